"""Report on one curve of external results: its table, what it shows, and the batch to choose; as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from pytest_slmserve.analysis.advice.advisor import Plan
from pytest_slmserve.analysis.advice.subjects import NOT_THE_BATCH, more_in_flight
from pytest_slmserve.analysis.compare.deployments import Compared, EngineSet, ReplicaComparison
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.stats.estimates import Interval, percent
from pytest_slmserve.analysis.sweep.batching import efficiency
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.gains import fit
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.report.advice.text import batch_text, caps_text
from pytest_slmserve.report.as_json import as_json as json_text
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.tables.findings import UNSETTLED, findings
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    ends,
    figure,
    hundredths,
    listed,
    milliseconds,
    named,
    table,
)
from pytest_slmserve.schema.errors import TooFewPoints


def text(curve: Curve, found: Plan, columns: Columns, tolerance: float, notes: Sequence[str]) -> str:
    """Table and findings. found: advice on this curve alone. tolerance: gain per doubling below which it is flat."""
    (advice,) = found.advices
    pairs = [*findings(curve, tolerance, advice.subject.b_half), ("batch", batch_text(advice, found))]
    pairs += [("closed form", caps)] if (caps := caps_text(advice.decision)) else []
    pairs += [("note", note) for note in _notes(curve, found, columns, notes)]
    return "\n".join([table(entries(curve, found), _columns(columns)), "", named(pairs)])


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


def as_json(curve: Curve, found: Plan, columns: Columns, tolerance: float, notes: Sequence[str]) -> str:
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
        "points": entries(curve, found),
        "notes": notes,
    }
    return json_text(record)


def entries(curve: Curve, found: Plan) -> list[dict[str, Any]]:
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


MOST_OTHERS = 3  # other baselines that the text names
SIGNED = partial(hundredths, signed=True)


def text_replicas(found: ReplicaComparison, columns: Columns, notes: Sequence[str] = ()) -> str:
    """Table and findings. notes: what is known beside."""
    pairs = [
        *replica_findings(found, columns),
        *(("note", note) for note in (*_replicas_notes(found, columns), *notes)),
    ]
    if any(row.at_equal_total for row in found.rows):
        pairs.append(("note", f"at equal total: over one engine whose {columns.knob} is the total of all engines"))
    return "\n".join([table(found.rows, table_columns(found, columns)), "", named(pairs)])


def table_columns(found: ReplicaComparison, columns: Columns) -> tuple[Column[Compared], ...]:
    """Columns of the table, named as the file has them."""

    def setting(name: str) -> Column[Compared]:
        return Column(name, lambda row: dict(row.engines.settings)[name], "left")

    return (
        Column(columns.replicas or "engines", lambda row: str(row.engines.replicas)),
        Column(columns.knob, lambda row: str(row.engines.limit)),
        Column("total", lambda row: str(row.engines.total), rank=4),
        *map(setting, _settings(found)),
        Column(columns.throughput, lambda row: figure(row.engines.rate, 4)),
        Column("gain %", lambda row: _share(row.gain)),
        Column("95 %", lambda row: ends(row.gain, SIGNED), "left", rank=1),
        Column("at equal\ntotal %", lambda row: _share(row.at_equal_total), rank=5),
        Column(f"{stem(columns.latency)}\nms", lambda row: milliseconds(row.engines.point.e2e_s), rank=2),
        Column("latency\nfactor", lambda row: figure(row.latency.value if row.latency else None), rank=6),
        Column("power\nW", lambda row: figure(row.engines.point.power_w), rank=7),
        Column("mJ/\ntoken", lambda row: milliseconds(row.engines.point.energy_per_token_j), rank=3),
        Column("note", lambda row: _mark(row, found), "left"),
    )


def _settings(found: ReplicaComparison) -> list[str]:
    """Names of settings in which sets differ."""
    names = [name for name, _ in {pair for row in found.rows for pair in row.engines.settings}]
    return sorted({name for name in names if names.count(name) > 1})


def _share(gain: Interval | None) -> str:
    return ABSENT if gain is None else SIGNED(gain.value)


def _mark(row: Compared, found: ReplicaComparison) -> str:
    best = "<-- best" if row is found.best else ""
    return "; ".join(row.engines.point.problems) or ("baseline" if row.engines is found.baseline else best)


def replica_findings(found: ReplicaComparison, columns: Columns) -> Iterator[tuple[str, str]]:
    """Pairs of what is looked at and what was found."""
    one = f"{called(found.baseline, found)} with {figure(found.baseline.rate, 4)} {columns.throughput}"
    if found.best is None or found.best.gain is None:
        yield "baseline", one
        yield "best", "none: every row of several engines preempted"
        return
    best = found.best.engines
    rate = f"{called(best, found)} with {figure(best.rate, 4)} {columns.throughput}"
    yield "best", "; ".join([f"{rate}, {_gain(found.best.gain)} over {one}", *_costs(found.best, found, columns)])
    if why := "; ".join(_not_chosen(found, best)):
        yield "not chosen", why
    for other, gain in found.others[:MOST_OTHERS]:
        over = f"over {called(other, found)} with {figure(other.rate, 4)}"
        yield "other baseline", f"{over} the gain would be {_gain(gain)}"
    if len(found.others) > MOST_OTHERS:
        yield "other baseline", f"and {len(found.others) - MOST_OTHERS} more; --json has all"


def called(engines: EngineSet, found: ReplicaComparison) -> str:
    """ "2 engines of 256 (chunked_prefill=False)" """
    shown = _settings(found)
    settings = ", ".join(f"{name}={value}" for name, value in engines.settings if name in shown)
    number = "one engine" if engines.replicas == 1 else f"{engines.replicas} engines"
    return f"{number} of {engines.limit}" + (f" ({settings})" if settings else "")


def _gain(gain: Interval) -> str:
    """ "+33.7 % (95 %: +30.1 to +37.4 %)", and whether that may be no gain"""
    low, high = (gain.value if end is None else end for end in (gain.low, gain.high))
    doubt = ", which is a loss" if high < 0 else ", which may be nothing" if low <= 0 else ""
    known = "" if gain.low is None or gain.high is None else f" (95 %: {ends(gain, SIGNED)} %)"
    return f"{_share(gain)} %{known}{doubt}"


def _costs(best: Compared, found: ReplicaComparison, columns: Columns) -> Iterator[str]:
    """Latency, and energy where power is known, beside the baseline's."""
    if best.latency:
        yield f"{figure(best.latency.value)} times its {columns.latency}"
    ours, theirs = best.engines.point.energy_per_token_j, found.baseline.point.energy_per_token_j
    if ours is not None and theirs is not None:
        yield f"{milliseconds(ours)} instead of {milliseconds(theirs)} mJ per token"


def _not_chosen(found: ReplicaComparison, best: EngineSet) -> Iterator[str]:
    """Rejected alternatives: sets that served more but preempted, the runner-up, and those within noise of the best."""
    for engines in (row.engines for row in found.rows if row.engines.preempted):
        rival = best if engines.replicas > 1 else found.baseline
        if engines.rate > rival.rate and (engines.replicas > 1 or engines.eligible):
            had = "; ".join(engines.point.problems)
            yield f"{figure(engines.rate, 4)} by {called(engines, found)}, which had {had}"
    several = [row.engines for row in found.rows if row.engines.replicas > 1 and not row.engines.preempted]
    if rest := [engines for engines in several if engines is not best]:
        second = max(rest, key=lambda engines: engines.rate)
        yield f"next come {called(second, found)}, {percent(1 - second.rate / best.rate)} below the best"
    if found.alike:
        yield f"the noise does not tell the best from {', '.join(called(one, found) for one in found.alike)}"


def _replicas_notes(found: ReplicaComparison, columns: Columns) -> Iterator[str]:
    """Caveats for a reader of the numbers alone."""
    if found.baseline.limit == max(row.engines.limit for row in found.rows if row.engines.replicas == 1):
        yield f"no larger {columns.knob} of one engine was tried: the best of one may be more, and the gain less"
    if columns.power and any(row.engines.point.power_w is None for row in found.rows):
        yield f"{columns.power} is not known everywhere: energy is told where it is"
    if found.gain and found.gain.low is None:
        yield "nothing was repeated: the noise is not known, and there are no intervals"


def as_json_replicas(found: ReplicaComparison, columns: Columns, notes: Sequence[str] = ()) -> str:
    """One object. Seconds, joules and shares, nothing rounded; null is what is not known."""
    rows = entries_replicas(found)
    record = {
        "columns": columns,
        "baseline": next(row for row in rows if row["baseline"]),
        "best": next((row for row in rows if row["chosen"]), None),
        "gain": found.gain,
        "rows": rows,
        "other_baselines": [{**_facts(other), "gain": gain} for other, gain in found.others],
        "alike": [_facts(engines) for engines in found.alike],
        "notes": [*_replicas_notes(found, columns), *notes],
    }
    return json_text(record)


def entries_replicas(found: ReplicaComparison) -> list[dict[str, Any]]:
    """Rows, one for each set of engines, invalid ones too."""
    return [
        {
            **_facts(row.engines),
            "gain": row.gain,
            "gain_at_equal_concurrency": row.at_equal_total,
            "latency_factor": row.latency,
            "baseline": row.engines is found.baseline,
            "chosen": row is found.best,
        }
        for row in found.rows
    ]


def _facts(engines: EngineSet) -> dict[str, Any]:
    """Means over the repeats."""
    return {
        "replicas": engines.replicas,
        "concurrency": engines.total,
        "concurrency_per_replica": engines.limit,
        "settings": dict(engines.settings),
        **external_figures(engines.point),
        **facts(engines.point, "power_w", "energy_per_token_j"),
    }
