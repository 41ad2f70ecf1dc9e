"""Gains of each doubling of the load, the plateau where they cease to pay, and the Pareto-optimal points.

The knob is the concurrency. Gains are per doubling, also where neighbours are not a factor of two apart:
(T2/T1)**(1/log2(B2/B1)) - 1. Their intervals take one relative standard deviation, pooled over the repeats of all
points, and Student's t on the log scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval, Noise, growth, log_ratio, pooled_relative_sd

Repeats = Callable[[Point], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(Interval):
    """Relative change per doubling from one concurrency to the next, with its 95 % interval if the noise is known."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plateau:
    """value: smallest concurrency after which every doubling gains less than the tolerance; None: not reached.

    low, high: the same by the lower and the upper ends of the gains' intervals (high None: perhaps not reached).
    known: whether there are such ends, that is, whether any point was repeated.
    """

    value: int | None
    low: int | None
    high: int | None
    known: bool


def tokens_per_s(point: Point) -> Sequence[float]:
    return point.repeats


def e2e_s(point: Point) -> Sequence[float]:
    return point.e2e_repeats


def valid_points(points: Sequence[Point]) -> list[Point]:
    return sorted((p for p in points if p.valid), key=lambda p: p.concurrency)


def noise_of(points: Sequence[Point], repeats: Repeats = tokens_per_s) -> Noise:
    """Relative standard deviation of one repeat, pooled over all valid points."""
    return pooled_relative_sd([repeats(p) for p in valid_points(points)])


def gains(points: Sequence[Point], repeats: Repeats = tokens_per_s) -> tuple[Gain, ...]:
    """Relative change per doubling between neighbouring valid points: of throughput, or of another repeated figure."""
    noise = noise_of(points, repeats)
    return tuple(_gain(a, b, repeats, noise) for a, b in pairwise(valid_points(points)))


def _gain(first: Point, second: Point, repeats: Repeats, noise: Noise) -> Gain:
    doublings = math.log2(second.concurrency / first.concurrency)
    change = log_ratio(repeats(first), repeats(second), noise)
    low, high = (None if end is None else growth(end / doublings) for end in (change.low, change.high))
    value = growth(change.value / doublings)
    return Gain(value, low, high, start=first.concurrency, end=second.concurrency)


def _from(steps: Sequence[Gain], tolerance: float, end: Callable[[Gain], float | None]) -> int | None:
    """Start of the longest tail of `steps` of which every one stays under the tolerance."""
    start = None
    for step in reversed(steps):
        gain = end(step)
        if gain is None or gain >= tolerance:
            break
        start = step.start
    return start


def plateau(points: Sequence[Point], tolerance: float = 0.10) -> Plateau:
    """The plateau, where throughput ceases to grow by `tolerance` (a share) per doubling."""
    steps = gains(points)
    return Plateau(
        value=_from(steps, tolerance, lambda g: g.value),
        low=_from(steps, tolerance, lambda g: g.low),
        high=_from(steps, tolerance, lambda g: g.high),
        known=noise_of(points).sd is not None,
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


def advantages(points: Sequence[Point], point: Point) -> list[tuple[Point, Interval]]:
    """Advantage over `point` of every valid point at another load, in both throughput and mean E2E at once.

    The advantage of one over the other is the smaller of its two relative gains (more tokens/s, shorter E2E). So it is
    negative where the other point is worse in one of them. Its interval likewise: the smaller of both ends.
    """
    speed, wait = noise_of(points), noise_of(points, e2e_s)
    found = []
    for other in valid_points(points):
        if other.concurrency != point.concurrency:
            more = log_ratio(point.repeats, other.repeats, speed)
            sooner = log_ratio(other.e2e_repeats, point.e2e_repeats, wait)
            found.append((other, _smaller(more, sooner)))
    return found


def _smaller(a: Interval, b: Interval) -> Interval:
    value = growth(min(a.value, b.value))
    if a.low is None or b.low is None or a.high is None or b.high is None:
        return Interval(value)
    return Interval(value, growth(min(a.low, b.low)), growth(min(a.high, b.high)))
