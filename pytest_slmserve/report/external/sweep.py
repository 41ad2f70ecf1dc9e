"""What can be said of results that are not ours: a table and findings as text, or one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval, percent
from pytest_slmserve.analysis.sweep.batching import EFFICIENCY, Batching, Choice, Slo, batching
from pytest_slmserve.analysis.sweep.curve import FEWEST_POINTS, MARGIN, TOLERANCE
from pytest_slmserve.analysis.sweep.gains import Gain, Plateau, gains, pareto_front, plateau, valid_points
from pytest_slmserve.analysis.sweep.saturation import Fit, fit
from pytest_slmserve.archive.external import NOT_THE_BATCH, Columns, Setting
from pytest_slmserve.report.numbers import ABSENT, between, counted, figure, hundredths, listed, milliseconds
from pytest_slmserve.report.tables.findings import UNSETTLED
from pytest_slmserve.report.text_table import grid, named
from pytest_slmserve.schema.errors import TooFewPoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """slo: None asks by efficiency alone. b_half: where it is known, so that T_inf alone is fitted."""

    columns: Columns
    slo: Slo | None = None
    threshold: float = EFFICIENCY
    tolerance: float = TOLERANCE
    b_half: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Answers on one curve. law, batching: None where they cannot be had; then `notes` says why."""

    question: Question
    settings: tuple[Setting, ...]
    points: tuple[Point, ...]
    plateau: Plateau
    gains: tuple[Gain, ...]
    front: tuple[int, ...]
    law: Fit | None
    batching: Batching | None
    notes: tuple[str, ...]

    @property
    def choice(self) -> Choice:
        return self.batching.choice if self.batching else Choice(None)


def judge(settings: Sequence[Setting], question: Question, notes: Sequence[str] = ()) -> Judgement:
    """All answers. Points that preempted take no part in any. notes: what is known beside. Raises TooFewPoints."""
    points = tuple(setting.point for setting in settings)
    enough(points, settings, question.columns.knob)
    law, no_law = _law(points, question.b_half)
    found, no_batch = _batching(points, question, law)
    return Judgement(
        question=question,
        settings=tuple(settings),
        points=points,
        plateau=plateau(points, question.tolerance),
        gains=gains(points),
        front=tuple(p.concurrency for p in pareto_front(points)),
        law=law,
        batching=found,
        notes=(*notes, *(text for text in (no_law, no_batch) if text), *_notes(settings, question, law, found)),
    )


def enough(points: Sequence[Point], settings: Sequence[Setting], knob: str) -> None:
    """Raises TooFewPoints where nothing can be said of so few."""
    valid, lost = valid_points(points), sum(s.preempted for s in settings)
    if len(valid) < FEWEST_POINTS:
        without = f" without preemption ({lost} with)" if lost else ""
        seen = f"{counted(len(valid), 'value')} of {knob}{without}, {FEWEST_POINTS} are needed"
        raise TooFewPoints(seen, "results of more loads, or other conditions")


def _law(points: Sequence[Point], b_half: float | None) -> tuple[Fit | None, str | None]:
    try:
        return fit(points, b_half), None
    except TooFewPoints as error:
        return None, f"the saturation law is not fitted: {error.problem}"


def _batching(points: Sequence[Point], question: Question, law: Fit | None) -> tuple[Batching | None, str | None]:
    try:
        return batching(points, question.slo, question.threshold, law, question.b_half), None
    except TooFewPoints as error:
        return None, f"B_opt cannot be told: {error.problem}"


def _notes(settings: Sequence[Setting], question: Question, law: Fit | None, found: Batching | None) -> Iterator[str]:
    """What a reader of the numbers alone should know."""
    if law and not law.describes:
        yield f"the saturation law is off by {percent(law.error_max)} at its worst: it does not describe this curve"
    if found:
        yield from found.notes
        if question.slo is None:
            yield "no latency objective was given: B_opt is by efficiency alone"
    if lost := [s.knob for s in settings if s.preempted]:
        yield f"left out, for they preempted: {question.columns.knob} {listed(lost)}"
    yield from _little(settings, question.columns)


# Little's law


def _little(settings: Sequence[Setting], columns: Columns) -> Iterator[str]:
    """What output rate times latency says of the requests in flight, and of the mean that was reported."""
    known = [(s, n) for s in settings if (n := s.in_flight) is not None]
    if not known:
        if columns.running is not None:
            yield f"{columns.running} is not checked by Little's law: no --output-throughput"
        return
    if over := [s.knob for s, n in known if n > (1 + NOT_THE_BATCH) * s.knob]:
        yield (
            f"{columns.output} x {columns.latency} is more than {columns.knob} at {listed(over)}: the latency is not "
            "the time per output token, or the knob does not limit requests; Little's law is not applied"
        )
        return
    yield from _bias(known, columns)
    short = [(n / s.knob, s.knob, n) for s, n in known if n < (1 - NOT_THE_BATCH) * s.knob]
    if short:
        share, knob, n = min(short)
        yield (
            f"the knob is not the batch: at {columns.knob} {knob} only {figure(n)} requests were in flight "
            f"({percent(share)} of it) by Little's law"
        )


def _bias(known: Sequence[tuple[Setting, float]], columns: Columns) -> Iterator[str]:
    """By how much the mean of running requests that was reported misses."""
    biases = [(fmean(s.running) / n - 1, s, n) for s, n in known if s.running]
    if not biases:
        return
    off, worst, n = max(biases, key=lambda entry: abs(entry[0]))
    if abs(off) <= UNSETTLED:
        yield f"{columns.running} agrees with output rate x latency (Little's law) within {percent(abs(off))}"
        return
    yield (
        f"{columns.running} is biased: it is {_range([bias for bias, _, _ in biases])} off output rate x latency "
        f"(Little's law), most at {columns.knob} {worst.knob}: "
        f"{figure(fmean(worst.running))} reported, {figure(n)} in flight"
    )


def _range(biases: Sequence[float]) -> str:
    low, high = (f"{hundredths(bias, signed=True)}" for bias in (min(biases), max(biases)))
    return f"{low} %" if low == high else f"{low} to {high} %"


# Text


def text(found: Judgement) -> str:
    """Table and findings."""
    return "\n".join([table(found), "", named(list(findings(found)))])


def table(found: Judgement) -> str:
    """One row per value of the knob; the one chosen is marked."""
    columns = found.question.columns
    asked = (columns.knob, columns.throughput, f"{stem(columns.latency)} ms")
    head = (*asked, "gain %", "eff. %", "in flight", "Pareto", "B_opt", "note")
    sides = ("right",) * 6 + ("center", "center", "left")
    rows = [_cells(entry) for entry in entries(found)]
    return grid(rows, head, sides)


def stem(latency: str) -> str:
    """Its name without its unit."""
    return latency.removesuffix("_ms").removesuffix("_s")


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(entry["knob"]),
        figure(entry["throughput"], 4),
        milliseconds(entry["latency_s"]),
        hundredths(entry["gain"], signed=True),
        hundredths(entry["efficiency"]),
        figure(entry["in_flight"]),
        "*" if entry["pareto"] else "",
        "<--" if entry["chosen"] else "",
        f"preempted {figure(entry['preemptions'])} times" if entry["preempted"] else "",
    )


def findings(found: Judgement) -> Iterator[tuple[str, str]]:
    """Pairs of what is looked at and what was found."""
    knob = found.question.columns.knob
    yield "plateau", _plateau(found)
    yield "most", _most(found)
    yield "Pareto-optimal", f"{knob} {listed(found.front)} (by the means, whatever the noise)"
    if found.law:
        yield "saturation law", _law_text(found.law, found.question)
    if found.batching:
        if found.batching.limit:
            yield "latency limit", f"{milliseconds(found.batching.limit.seconds)} ms"
        yield "B_opt", _choice_text(found, found.batching)
        yield "closed form", _caps_text(found.batching)
    for note in found.notes:
        yield "note", note


def _plateau(found: Judgement) -> str:
    flat, knob, bound = found.plateau, found.question.columns.knob, percent(found.question.tolerance)
    last = found.gains[-1]
    if flat.value is None:
        still = f"from {last.start} to {last.end} throughput still gains {percent(last.value)}"
        return f"not reached: {still}{between(last, 100, ' %')} per doubling (bound {bound})"
    high = "not reached" if flat.high is None else flat.high
    interval = f" (95 %: {flat.low} to {high})" if flat.known else "; not certain: one row per value, noise unknown"
    return f"from {knob} {flat.value}: past it a doubling gains less than {bound}{interval}"


def _most(found: Judgement) -> str:
    best = max(valid_points(found.points), key=lambda p: fmean(p.repeats))
    last = valid_points(found.points)[-1]
    end = ", the largest that counts: more is not excluded" if best is last else ""
    columns = found.question.columns
    return f"{figure(fmean(best.repeats), 4)} {columns.throughput} at {columns.knob} {best.concurrency}{end}"


def _law_text(law: Fit, question: Question) -> str:
    errors = f"off by {percent(law.error_mean)} in the mean, {percent(law.error_max)} at most"
    half = " as given" if question.b_half is not None else between(law.b_half)
    numbers = f"T_inf {figure(law.t_inf.value, 4)}{between(law.t_inf)}, b_half {figure(law.b_half.value)}{half}"
    return f"T(B) = T_inf B/(B + b_half): {numbers}; {errors}"


def _choice_text(found: Judgement, seen: Batching) -> str:
    knob, choice = found.question.columns.knob, seen.choice
    bounds = f"efficiency above {percent(found.question.threshold)}"
    bounds += " and latency within the limit" if seen.limit else ""
    if choice.value is None or seen.share is None:
        return f"none: no {knob} that was measured has {bounds}"
    interval = f" (95 %: {_or_none(choice.low)} to {_or_none(choice.high)})" if choice.known else ""
    share = f"{percent(seen.share)} of the largest throughput"
    return f"{knob} {choice.value}{interval}: the largest with {bounds}; {share}{_better(found, choice.value)}"


def _or_none(load: int | None) -> str:
    return "none" if load is None else str(load)


def _better(found: Judgement, chosen: int) -> str:
    """A smaller load that has clearly more throughput than the one chosen by the rule."""
    rates = {p.concurrency: fmean(p.repeats) for p in valid_points(found.points) if p.concurrency <= chosen}
    best = max(rates, key=lambda load: rates[load])
    more = rates[best] / rates[chosen] - 1
    return f"; but {best} has {percent(more)} more, and less latency to wait for" if more > MARGIN else ""


def _caps_text(seen: Batching) -> str:
    allowed = [("efficiency", seen.caps.efficiency), ("latency", seen.caps.slo)]
    known = [f"{name} allows a batch up to {figure(cap)}" for name, cap in allowed if cap is not None]
    return f"by the laws alone {', '.join(known)}" if known else f"{ABSENT} (no saturation law)"


# JSON


def as_json(found: Judgement) -> str:
    """One object; "value" with "low" and "high", null where unknown. Seconds and shares, nothing rounded."""
    return json.dumps(record(found), indent=2, allow_nan=False)


def record(found: Judgement) -> dict[str, Any]:
    law, seen, question = found.law, found.batching, found.question
    return {
        "plateau_from": ends(found.plateau),
        "pareto": {"value": list(found.front), "low": None, "high": None},
        "t_inf": ends(law.t_inf if law else None),
        "b_half": ends(law.b_half if law else None),
        "b_opt": ends(found.choice),
        "fit_error": {**ends(Interval(law.error_mean) if law else None), "max": law and law.error_max},
        "points": list(entries(found)),
        "slo_s": seen.limit.seconds if seen and seen.limit else None,
        "efficiency": question.threshold,
        "share_of_largest": seen and seen.share,
        "caps": {"efficiency": seen and seen.caps.efficiency, "slo": seen and seen.caps.slo},
        "notes": list(found.notes),
    }


def ends(seen: Interval | Plateau | Choice | None) -> dict[str, float | None]:
    return {end: None if seen is None else _finite(getattr(seen, end)) for end in ("value", "low", "high")}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def entries(found: Judgement) -> Iterator[dict[str, Any]]:
    """One per value of the knob, those that preempted too; means over its rows. gain: per doubling, since the last
    that counts."""
    steps = {step.end: step.value for step in found.gains}
    shares = found.batching.efficiency if found.batching else {}
    for s in found.settings:
        yield {
            "knob": s.knob,
            "throughput": fmean(s.throughput),
            "latency_s": fmean(s.latency_s),
            "repeats": len(s.throughput),
            "gain": _finite(steps.get(s.knob)),
            "efficiency": shares.get(s.knob),
            "running": fmean(s.running) if s.running else None,
            "in_flight": s.in_flight,
            "preemptions": s.preemptions,
            "preempted": s.preempted,
            "pareto": s.knob in found.front,
            "chosen": s.knob == found.choice.value,
        }
