"""Gains of each doubling of the load, the plateau where they cease to pay, and the Pareto-optimal points.

The knob is the concurrency. Gains are per doubling, also where neighbours are not a factor of two apart:
(T2/T1)**(1/log2(B2/B1)) - 1. Their intervals are those of `stats.noise`, on the log scale. A sweep that measures until
its claims are decided looks at its data several times, and its intervals hold at all looks together: they are repeated
confidence intervals (Jennison and Turnbull 2000, chapter 9).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pytest_slmserve.analysis.points import sweep_points
from pytest_slmserve.analysis.points.sweep_points import Figure, Point, e2e_s, tokens_per_s
from pytest_slmserve.analysis.stats.estimates import Interval, growth
from pytest_slmserve.analysis.stats.group_sequential import tails
from pytest_slmserve.analysis.stats.noise import TAIL, Differences

LOOKS = (2, 3, 4, 6, 8, 12, 16)  # repeats of a load after which its claims are judged, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(Interval):
    """Relative change per doubling from one concurrency to the next, with its 95 % interval if the noise is known."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChosenLoad:
    """value: the load that a rule finds, None if there is none. low, high: the same by the ends of the 95 % intervals.
    known: whether there are such ends, that is, whether any point was repeated."""

    value: int | None
    low: int | None = None
    high: int | None = None
    known: bool = False


def valid_points(points: Sequence[Point]) -> list[Point]:
    return sorted((p for p in points if p.valid), key=lambda p: p.concurrency)


def differences(points: Sequence[Point], repeats: Figure = tokens_per_s) -> Differences:
    """Differences between the valid points, in ascending order."""
    return sweep_points.differences(valid_points(points), repeats)


def looks_from(first: int) -> tuple[int, ...]:
    """Numbers of repeats after which claims are judged, of a sweep that begins with `first` of each load."""
    return (first, *(n for n in LOOKS if n > first))


def tail_at(repeats: int, looks: Sequence[int]) -> float:
    """Probability outside each end of an interval after so many repeats, so that the intervals at all looks hold
    together with 95 %. looks: those that may be taken; with a single one nothing is stopped by what was seen."""
    if len(looks) < 2:
        return TAIL
    taken = sum(n <= repeats for n in looks)
    return tails(tuple(looks), looks[-1], TAIL)[max(taken - 1, 0)]


def gains(
    points: Sequence[Point], repeats: Figure = tokens_per_s, looks: Sequence[int] = (), several: int = 1
) -> tuple[Gain, ...]:
    """Relative change per doubling between neighbouring valid points: of throughput, or of another repeated figure.
    several: of how many gains the extreme one is chosen, so that its interval has to hold for all (Bonferroni)."""
    valid = valid_points(points)
    seen = differences(valid, repeats)
    return tuple(
        _gain(a, b, seen.between(i, i + 1, _tail(a, b, looks) / several)) for i, (a, b) in enumerate(pairwise(valid))
    )


def _tail(first: Point, second: Point, looks: Sequence[int]) -> float:
    return tail_at(max(len(first.repeats), len(second.repeats)), looks)


def _gain(first: Point, second: Point, change: Interval) -> Gain:
    doublings = math.log2(second.concurrency / first.concurrency)
    gain = change.mapped(lambda end: growth(end / doublings))
    return Gain(gain.value, gain.low, gain.high, start=first.concurrency, end=second.concurrency)


def _from(steps: Sequence[Gain], tolerance: float, end: Callable[[Gain], float | None]) -> int | None:
    """Start of the longest tail of `steps` of which every one stays under the tolerance."""
    start = None
    for step in reversed(steps):
        gain = end(step)
        if gain is None or gain >= tolerance:
            break
        start = step.start
    return start


def plateau(points: Sequence[Point], tolerance: float = 0.10, looks: Sequence[int] = ()) -> ChosenLoad:
    """The plateau: the smallest concurrency after which every doubling gains less than `tolerance` (a share) of
    throughput. low: by the lower ends of the gains' intervals; high: by the upper ones, None where it is perhaps not
    reached."""
    steps = gains(points, looks=looks)
    return ChosenLoad(
        value=_from(steps, tolerance, lambda g: g.value),
        low=_from(steps, tolerance, lambda g: g.low),
        high=_from(steps, tolerance, lambda g: g.high),
        known=any(step.low is not None for step in steps),
    )


def pareto_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Valid points that no other beats: none has as much throughput and as low a mean E2E, and one of them better."""
    valid = valid_points(points)
    return tuple(p for p in valid if not any(_dominates(q, p) for q in valid))


def _dominates(better: Point, worse: Point) -> bool:
    """Returns whether `better` has as much throughput and as low a mean E2E as `worse`, and one of them better. Means
    are compared, without regard to noise."""
    faster = fmean(better.repeats) - fmean(worse.repeats)
    sooner = fmean(worse.e2e_repeats) - fmean(better.e2e_repeats)
    return min(faster, sooner) >= 0 < max(faster, sooner)


def advantages(
    points: Sequence[Point], point: Point, looks: Sequence[int] = (), several: int = 1
) -> list[tuple[Point, Interval]]:
    """Advantage over `point` of every valid point at another load, in both throughput and mean E2E at once.

    The advantage of one over the other is the smaller of its two relative gains (more tokens/s, shorter E2E). So it is
    negative where the other point is worse in one of them. Its interval likewise: the smaller of both ends.
    """
    valid = valid_points(points)
    speed, wait, at = differences(valid), differences(valid, e2e_s), valid.index(point)
    found = []
    for i, other in enumerate(valid):
        if i != at:
            tail = _tail(point, other, looks) / several
            found.append((other, _smaller(speed.between(at, i, tail), wait.between(i, at, tail))))
    return found


def _smaller(a: Interval, b: Interval) -> Interval:
    value = growth(min(a.value, b.value))
    if a.low is None or b.low is None or a.high is None or b.high is None:
        return Interval(value)
    return Interval(value, growth(min(a.low, b.low)), growth(min(a.high, b.high)))
