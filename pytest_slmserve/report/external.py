"""The section and the facts of external results: a sweep, the batch to choose, and what Little's law says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_slmserve.analysis.advice.advisor import Plan
from pytest_slmserve.analysis.advice.subjects import NOT_THE_BATCH, more_in_flight
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.gains import fit
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.report.advice.text import batch_text, caps_text
from pytest_slmserve.report.as_json import facts, point_facts, sweep_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.section import Named, Section
from pytest_slmserve.report.sweeps import UNSETTLED, sweep_section
from pytest_slmserve.report.text_table import figure, hundredths, listed
from pytest_slmserve.schema.errors import TooFewPoints


def external_section(curve: Curve, found: Plan, columns: Columns, tolerance: float, notes: Sequence[str]) -> Section:
    """Return the section of a sweep with the batch to choose and notes.

    Args:
        found: Advice on this curve only.
        tolerance: Gain per doubling below which throughput counts as flat.
    """
    (advice,) = found.advices
    b_half = advice.subject.b_half
    section = sweep_section(curve, curve.subject, Findings(flat=tolerance, b_half=b_half))
    *parts, findings = section.parts
    assert isinstance(findings, Named)
    pairs = [*findings.pairs, ("batch", batch_text(advice, found))]
    pairs += [("closed form", caps)] if (caps := caps_text(advice.decision)) else []
    pairs += [("note", note) for note in _notes(curve, found, columns, notes)]
    return replace(section, parts=[*parts, Named(pairs)])


def external_facts(
    curve: Curve, found: Plan, columns: Columns, tolerance: float, notes: Sequence[str]
) -> dict[str, Any]:
    """Return the points and the sweep as of archives, the columns, and the batch to choose. Seconds and shares; null is
    what is not known or not reached."""
    (advice,) = found.advices
    notes, law, seen = list(_notes(curve, found, columns, notes)), None, advice.decision
    try:
        law = fit(curve.points, advice.subject.b_half)
        if not law.identified:
            law = None
            notes.append("the saturation law is not identified: the points fit a b_half below 0, which cannot be")
    except TooFewPoints as error:
        notes.append(f"the saturation law is not fitted: {error.problem}")
    return {
        "columns": columns,
        "objectives": found.wish,
        "points": point_facts([curve], (), ()),
        "sweeps": sweep_facts([curve], tolerance),
        "saturation_law": law
        and {"t_inf_tokens_per_s": law.t_inf, **facts(law, "b_half", "fixed_s", "error_mean", "error_max")},
        "b_opt": {"value": seen.batch, **facts(seen, "low", "high", "known")},
        "limit_s": seen.limit and seen.limit.seconds,
        **facts(seen, "caps", "reason"),
        "advised": advice.advised,
        "notes": notes,
    }


def _notes(curve: Curve, found: Plan, columns: Columns, notes: Sequence[str]) -> Iterator[str]:
    """Yield caveats, and findings by Little's law: output rate times latency is the number of requests in flight."""
    yield from notes
    yield from found.advices[0].decision.notes
    if found.wish.slo is None:
        yield "no latency limit was given (--slo-itl): the batch is by efficiency alone"
    if lost := [p.concurrency for p in curve.points if not p.valid]:
        yield f"left out, for they preempted: {curve.axes.at(listed(lost))}"
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
