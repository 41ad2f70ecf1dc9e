"""Recommend the largest batch whose latency is acceptable, by the rule of arXiv:2503.08311.

The efficiency is eff(B) = T(B)/(B T(1)). B_opt is the largest measured B with eff(B) > epsilon and a latency within the
limit. The saturation model has closed forms: the efficiency allows (1 + b_half)/epsilon - b_half, and k times the
latency at R allows k (R + b_half) - b_half. The second form needs the b_half of the latencies, because that of the
throughput is smaller if prompts are processed between steps.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from statistics import fmean

from pytest_slmserve.analysis.estimates import MAX_LOG, Differences, percent
from pytest_slmserve.analysis.points import Point, e2e_s, point_differences
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad, fit_law, valid_points
from pytest_slmserve.schema.errors import BadUsage, TooFewPoints

EFFICIENCY = 0.1  # epsilon of the published figures
NUMBER = r"\d+(?:\.\d*)?|\.\d+"
RELATIVE = re.compile(rf"({NUMBER})x@(\d{{1,9}})", re.ASCII)
ABSOLUTE = re.compile(rf"({NUMBER})(ms|s)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RelativeSlo:
    """Limit of `factor` times the latency at the concurrency `at`."""

    factor: float
    at: int


@dataclass(frozen=True, slots=True)
class AbsoluteSlo:
    """Limit of the latency in seconds."""

    seconds: float


Slo = RelativeSlo | AbsoluteSlo


@dataclass(frozen=True, slots=True)
class Base:
    """Throughput T(1) of a single sequence.

    Attributes:
        note: how it was predicted, if it was not measured.
    """

    per_s: float
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """Latency limit in seconds.

    Attributes:
        at: concurrency at which the reference latency was measured, if any.
    """

    seconds: float
    at: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class LatencyLaw:
    """Saturation model of the latency: latency(B) = (B + b_half)/pace, in seconds."""

    pace: float
    b_half: float

    def seconds(self, batch: float) -> float:
        return (batch + self.b_half) / self.pace

    def batch(self, seconds: float) -> float:
        return seconds * self.pace - self.b_half


@dataclass(frozen=True, slots=True)
class Caps:
    """Largest batch that the saturation model predicts for each condition, or None."""

    efficiency: float | None = None
    slo: float | None = None


def parse_relative_slo(text: str) -> Slo:
    """Return a latency limit: "2x@32" is twice the latency at concurrency 32, "30ms" and "0.03s" are absolute.

    Raises:
        BadUsage: if it is not a limit.
    """
    if found := RELATIVE.fullmatch(text):
        factor, at = float(found[1]), int(found[2])
        if 0 < factor < math.inf and at > 0:
            return RelativeSlo(factor, at)
    if found := ABSOLUTE.fullmatch(text):
        seconds = float(found[1]) / (1e3 if found[2] == "ms" else 1)
        if 0 < seconds < math.inf:
            return AbsoluteSlo(seconds)
    raise BadUsage(f"{text!r} is not a latency objective", "Write 2x@32 (twice the latency at 32), 30ms, or 0.03s.")


def measured_base(points: Sequence[Point]) -> Base | None:
    """Return the measured T(1), or None without a valid point at concurrency 1."""
    single = next((p for p in valid_points(points) if p.concurrency == 1), None)
    return None if single is None else Base(fmean(single.repeats))


def latency_law(points: Sequence[Point], b_half: float | None = None) -> LatencyLaw | None:
    """Return the fit to the mean latencies of the valid points, or None if it fails or has a negative b_half."""
    pairs = [(float(p.concurrency), p.concurrency / fmean(p.e2e_repeats)) for p in valid_points(points)]
    try:
        pace, half = fit_law(pairs, b_half)
    except TooFewPoints:
        return None
    return None if half < 0 else LatencyLaw(pace, half)


def limit_of(slo: Slo, points: Sequence[Point], law: LatencyLaw | None) -> Limit:
    """Return the limit in seconds.

    The latency between two measured loads is interpolated linearly, as in the saturation model.

    Raises:
        TooFewPoints: if the latency is unknown.
    """
    if isinstance(slo, AbsoluteSlo):
        return Limit(slo.seconds)
    waits = {p.concurrency: fmean(p.e2e_repeats) for p in valid_points(points)}
    if slo.at in waits:
        return Limit(slo.factor * waits[slo.at], slo.at)
    around = next(((a, b) for a, b in pairwise(waits) if a < slo.at < b), None)
    if around:
        a, b = around
        share = (slo.at - a) / (b - a)
        seconds, how = (1 - share) * waits[a] + share * waits[b], f"interpolated between {a} and {b}"
    elif law:
        seconds, how = law.seconds(slo.at), "by the saturation model, beyond what was measured"
    else:
        raise TooFewPoints(
            f"no valid point is at concurrency {slo.at}, nor on both sides of it",
            "Measure that concurrency, or pass a limit in milliseconds, for example 30ms.",
        )
    return Limit(slo.factor * seconds, note=f"no valid point at {slo.at}: its latency is {how}")


def b_opt(points: Sequence[Point], base: Base, limit: Limit | None, threshold: float) -> ChosenLoad:
    """Return the largest valid load with eff(B) > threshold and a mean latency within the limit.

    Its `low` and `high` take the bad and the good ends of both intervals.
    """
    valid = valid_points(points)
    speed, wait, loads = point_differences(valid), point_differences(valid, e2e_s), [p.concurrency for p in valid]
    alone = None if base.note else 0
    limited = loads.index(limit.at) if limit and limit.at else None

    def half(seen: Differences, number: int, other: int | None) -> float:
        log = seen.mean(number) if other is None else seen.between(other, number)
        return 0.0 if log.high is None else min(log.high - log.value, MAX_LOG)

    def largest(sign: int) -> int | None:
        found = None
        for number, p in enumerate(valid):
            efficiency = fmean(p.repeats) / (p.concurrency * base.per_s)  # eff(B) = T(B)/(B T(1))
            enough = efficiency * math.exp(sign * half(speed, number, alone)) > threshold
            latency = fmean(p.e2e_repeats) * math.exp(-sign * half(wait, number, limited))
            if enough and (limit is None or latency <= limit.seconds):
                found = p.concurrency
        return found

    known = wait.known
    return ChosenLoad(largest(0), largest(-1) if known else None, largest(1) if known else None, known)


RATE, CONCURRENCY = "requests/s", "concurrent requests"
ATTAINMENT = 0.9  # as in DistServe


@dataclass(frozen=True, slots=True)
class Peak:
    """Load with the highest goodput (requests/s), and its measured neighbors.

    Attributes:
        below: next smaller load; None if a smaller one may have more goodput.
        above: next larger load; None likewise.
        unknown: loads between these two whose measurements are invalid.
        bracketed: whether there are neighbors on both sides, and no unknown load.
    """

    load: float
    per_s: float
    below: float | None
    above: float | None
    unknown: tuple[float, ...]
    unit: str
    bracketed: bool
    why: str


@dataclass(frozen=True, slots=True)
class HighestLoad:
    """Highest load (DistServe's goodput) at which, as at all smaller ones, a share `goal` of the requests is good.

    Attributes:
        load: None if the smallest load fails.
        above: next larger load and its share of good requests, if any.
        unknown: loads up to `above` whose measurements are invalid.
    """

    goal: float
    load: float | None
    attainment: float | None
    above: tuple[float, float] | None
    unknown: tuple[float, ...]
    unit: str
    why: str


def peak(points: Sequence[tuple[float, float]], invalid: Sequence[float] = (), unit: str = RATE) -> Peak | None:
    """Return the load with the highest goodput, the smallest of equal ones; None without points.

    Args:
        points: load and goodput in requests/s; repeats of a load are averaged.
        invalid: loads with invalid measurements.
    """
    means = _means(points)
    if not means:
        return None
    best = max(range(len(means)), key=lambda index: means[index][1])
    load, per_s = means[best]
    below = means[best - 1][0] if best > 0 else None
    above = means[best + 1][0] if best + 1 < len(means) else None
    unknown, doubt = _unknown(below, above, means, invalid)
    known = "with a valid measurement" if unknown else "measured"
    end = "" if below is None or above is None else f"no more at {below:g} and {above:g}"
    if above is None:
        end = f"the largest load {known}: a larger one may have more"
    elif below is None:
        end = f"the smallest load {known}: a smaller one may have more"
    why = f"most goodput, {per_s:.4g}/s, at {load:g} {unit}, {end}{doubt}"
    if not per_s:
        why = f"no request is good at any load {known}{doubt}"
    bracketed = below is not None and above is not None and not unknown
    return Peak(load, per_s, below, above, unknown, unit, bracketed, why)


def highest_load(
    points: Sequence[tuple[float, float]], goal: float = ATTAINMENT, invalid: Sequence[float] = (), unit: str = RATE
) -> HighestLoad | None:
    """Return the highest load up to which a share `goal` of the requests is good; None without points.

    Args:
        points: load and share of good requests; see `peak`.
    """
    means = _means(points)
    if not means:
        return None
    kept = list(takewhile(lambda point: point[1] >= goal, means))
    load, attainment = kept[-1] if kept else (None, None)
    above = means[len(kept)] if len(kept) < len(means) else None
    unknown, doubt = _unknown(None, above and above[0], means, invalid)
    more = f"{percent(above[1])} are at {above[0]:g}" if above else ""
    if load is None:
        smallest = "the smallest with a valid measurement" if unknown else "the smallest"
        why = f"at no load measured are {percent(goal)} of the requests good: {more}, {smallest}"
    else:
        end = f"; {more}" if more else ", the largest load measured: the limit is not reached"
        why = f"{percent(goal)} of the requests are good up to {load:g} {unit} ({percent(attainment or 0.0)}){end}"
    return HighestLoad(goal, load, attainment, above, unknown, unit, why + doubt)


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    by_load = groupby(sorted(points), key=itemgetter(0))
    return [(load, fmean(value for _, value in same)) for load, same in by_load]


def _unknown(
    below: float | None, above: float | None, known: Sequence[tuple[float, float]], invalid: Sequence[float]
) -> tuple[tuple[float, ...], str]:
    valid, low, high = {load for load, _ in known}, below or 0.0, math.inf if above is None else above
    loads = tuple(load for load in sorted({*invalid}) if low < load < high and load not in valid)
    named = ", ".join(f"{load:g}" for load in loads)
    return loads, f"; what was measured at {named} is invalid and may not be believed" if loads else ""
