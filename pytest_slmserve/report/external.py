"""Report on one curve of external results: its table, what it shows, and the batch to choose; as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.advice.advisor import Plan
from pytest_slmserve.analysis.advice.subjects import NOT_THE_BATCH, more_in_flight
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.analysis.sweep.batching import efficiency
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.gains import fit
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.report.advice.text import batch_text, caps_text
from pytest_slmserve.report.as_json import as_json as json_text
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.tables.findings import UNSETTLED, findings
from pytest_slmserve.report.text_table import (
    Column,
    figure,
    hundredths,
    listed,
    milliseconds,
    named_lines,
    table,
)
from pytest_slmserve.schema.errors import TooFewPoints


def external_text(curve: Curve, found: Plan, columns: Columns, tolerance: float, notes: Sequence[str]) -> str:
    """Table and findings. found: advice on this curve alone. tolerance: gain per doubling below which it is flat."""
    (advice,) = found.advices
    pairs = [*findings(curve, tolerance, advice.subject.b_half), ("batch", batch_text(advice, found))]
    pairs += [("closed form", caps)] if (caps := caps_text(advice.decision)) else []
    pairs += [("note", note) for note in _notes(curve, found, columns, notes)]
    return "\n".join([table(external_rows(curve, found), _columns(columns)), "", named_lines(pairs)])


def _columns(columns: Columns) -> tuple[Column[dict[str, Any]], ...]:
    return (
        Column(columns.knob, lambda row: str(row["concurrency"])),
        Column(columns.throughput, lambda row: figure(row["tokens_per_s"], 4)),
        Column(f"{stem(columns.latency)} ms", lambda row: milliseconds(row["latency_s"])),
        Column("gain %", lambda row: hundredths(row["gain_per_doubling"], signed=True), rank=1),
        Column("eff. %", lambda row: hundredths(row["efficiency"]), rank=2),
        Column("in flight", lambda row: figure(row["batch"]), rank=3),
        Column("Pareto", lambda row: "*" if row["pareto"] else "", "center", rank=4),
        Column("B_opt", lambda row: "<--" if row["chosen"] else "", "center"),
        Column("invalid", lambda row: "; ".join(row["problems"]), "left"),
    )


def stem(latency: str) -> str:
    """Name of a latency without its unit."""
    return latency.removesuffix("_ms").removesuffix("_s")


def external_json(curve: Curve, found: Plan, columns: Columns, tolerance: float, notes: Sequence[str]) -> str:
    """One object. Seconds and shares, nothing rounded; null is what is not known or not reached."""
    (advice,) = found.advices
    notes, law, seen = list(_notes(curve, found, columns, notes)), None, advice.decision
    try:
        law = fit(curve.points, advice.subject.b_half)
        if not law.identified:
            law = None
            notes.append("the saturation law is not identified: the points fit a b_half below 0, which cannot be")
    except TooFewPoints as error:
        notes.append(f"the saturation law is not fitted: {error.problem}")
    record = {
        "columns": columns,
        "objectives": found.wish,
        "plateau": curve.plateau(tolerance),
        "pareto": [point.concurrency for point in curve.pareto_front()],
        "saturation_law": law
        and {"t_inf_tokens_per_s": law.t_inf, **facts(law, "b_half", "fixed_s", "error_mean", "error_max")},
        "b_opt": {"value": seen.batch, **facts(seen, "low", "high", "known")},
        "limit_s": seen.limit and seen.limit.seconds,
        **facts(seen, "caps", "reason"),
        "advised": advice.advised,
        "points": external_rows(curve, found),
        "notes": notes,
    }
    return json_text(record)


def external_rows(curve: Curve, found: Plan) -> list[dict[str, Any]]:
    """Rows, one for each load, invalid ones too; means over its repeats. concurrency: the knob. tokens_per_s: of
    whatever tokens, in `repeats` of each row. gain_per_doubling: since the last valid load. batch: requests in flight
    by Little's law; little: how far the reported mean of running requests is from that, a share."""
    decision = found.advices[0].decision
    gains = {step.end: step.value for step in curve.gains()}
    front = curve.pareto_front()
    return [
        {
            **facts(p, "concurrency"),
            **external_figures(p),
            "gain_per_doubling": gains.get(p.concurrency),
            "efficiency": efficiency(p, decision.base) if decision.base and p.valid else None,
            **facts(p, "batch", "little"),
            "pareto": p in front,
            "chosen": p.concurrency == decision.batch,
        }
        for p in curve.points
    ]


def external_figures(point: Point) -> dict[str, Any]:
    """Figures of a point whose throughput is of whatever tokens, and whose latency is whatever its column holds."""
    return {
        "tokens_per_s": point.output_tokens_per_s,
        "latency_s": point.e2e_s,
        "repeats": [row.output_tokens_per_s for row in point.each],
        **facts(point, "valid", "problems"),
    }


def _notes(curve: Curve, found: Plan, columns: Columns, notes: Sequence[str]) -> Iterator[str]:
    """Caveats for a reader of the numbers alone."""
    yield from notes
    yield from found.advices[0].decision.notes
    if found.wish.slo is None:
        yield "no latency limit was given (--slo-itl): the batch is by efficiency alone"
    if lost := [p.concurrency for p in curve.points if not p.valid]:
        yield f"left out, for they preempted: {curve.axes.at(listed(lost))}"
    yield from _little(curve, columns)


def _little(curve: Curve, columns: Columns) -> Iterator[str]:
    """Findings by Little's law, output rate times latency: requests in flight, and the reported mean's error."""
    if columns.output_throughput is None:
        if columns.running is not None:
            yield f"{columns.running} is not checked by Little's law: no --output-throughput"
        return
    product = f"{columns.output_throughput} x {columns.latency}"
    if over := [p.concurrency for p in curve.points if more_in_flight(p)]:
        yield (
            f"{product} is more than {columns.knob} at {listed(over)}: the latency is not the time per output token, "
            "or the knob does not limit requests; Little's law is not applied"
        )
        return
    known = [(p, p.batch) for p in curve.points if p.batch is not None]
    if biases := [(p.little, p, batch) for p, batch in known if p.little is not None]:
        off, worst, batch = max(biases, key=lambda entry: abs(entry[0]))
        low, high = (hundredths(end(bias for bias, *_ in biases), signed=True) for end in (min, max))
        if abs(off) <= UNSETTLED:
            yield f"{columns.running} agrees with {product} (Little's law) within {percent(abs(off))}"
        else:
            yield (
                f"{columns.running} is biased: it is {low if low == high else f'{low} to {high}'} % off {product} "
                f"(Little's law), most at {columns.knob} {worst.concurrency}: {figure((1 + off) * batch)} reported, "
                f"{figure(batch)} in flight"
            )
    share, fewest, batch = min((batch / p.concurrency, p.concurrency, batch) for p, batch in known)
    if share < 1 - NOT_THE_BATCH:
        yield (
            f"the knob is not the batch: at {curve.axes.at(fewest)} only {figure(batch)} requests were in flight "
            f"({percent(share)} of it) by Little's law"
        )
