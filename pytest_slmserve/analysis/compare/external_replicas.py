"""Throughput of several engines over the best of one: limits of the engines differ, so the best of each side is
compared.

The authors of arXiv:2503.08311 report the gain of their replicas in this way. Beside it is the gain over one engine
with the same total limit, where there is one. A set that preempted is compared, and never chosen: the memory was too
small for that limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.points.sweep_points import Point, figure, ratio
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.schema.errors import TooFewPoints

RATE, LATENCY = figure("output_tokens_per_s"), figure("e2e_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSet:
    """`replicas` engines on one device, each under the limit `limit`, and what they served together.

    settings: names and values that tell it from other sets of as many engines. point: of all engines; its `each` has
    the figures of every repeat, also where one of them preempted and the point is not valid. eligible: may be the
    baseline. alternative: may be one with other settings.
    """

    replicas: int
    limit: int
    settings: tuple[tuple[str, str], ...] = ()
    point: Point
    eligible: bool = True
    alternative: bool = True

    @property
    def total(self) -> int:
        return self.replicas * self.limit

    @property
    def rates(self) -> tuple[float, ...]:
        """Throughput of each repeat, tokens/s."""
        return tuple(RATE(self.point))

    @property
    def rate(self) -> float:
        return fmean(self.rates)

    @property
    def preempted(self) -> bool:
        return not self.point.valid


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A set beside the baseline. gain: of throughput, a share; at_equal_total: over one engine whose limit is the
    total; latency: a factor. None for the baseline itself, and where there is nothing to compare with."""

    engines: EngineSet
    gain: Interval | None = None
    at_equal_total: Interval | None = None
    latency: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaComparison:
    """rows: all, by replicas, limit and settings. best: the most throughput of several engines without preemption, None
    where all preempted. alike: others of several engines that the noise does not tell from it. others: the best of one
    engine for each other value of the settings, with the gain of `best` over it."""

    baseline: EngineSet
    best: Compared | None
    rows: tuple[Compared, ...]
    alike: tuple[EngineSet, ...] = ()
    others: tuple[tuple[EngineSet, Interval], ...] = ()

    @property
    def gain(self) -> Interval | None:
        return self.best.gain if self.best else None


def compare(sets: Sequence[EngineSet]) -> ReplicaComparison:
    """Comparison of several engines with the best of one; the order of `sets` does not matter. Raises TooFewPoints
    where one side has nothing.

    The noise is that of all sets; without repeats there are no intervals. Those of the best are corrected for having
    been chosen, and its baseline too.
    """
    found = sorted(sets, key=lambda s: (s.replicas, s.limit, s.settings))
    alone = [s for s in found if s.replicas == 1 and not s.preempted]
    usable = [s for s in alone if s.eligible]
    baseline = _most(usable)
    if baseline is None:
        raise TooFewPoints(_no_baseline(found), "another --baseline, or results of one engine too")
    if not any(s.replicas > 1 for s in found):
        raise TooFewPoints("there is no row of several engines", "another column for --replicas")
    points = [s.point for s in found]
    several = [s for s in found if s.replicas > 1 and not s.preempted]
    most, pairs = _most(several), len(several) * len(usable)
    rows = tuple(_compared(s, baseline, usable, points, pairs if s is most else 1) for s in found)
    if most is None:
        return ReplicaComparison(baseline=baseline, best=None, rows=rows)
    gains = [(s, _gain(s, most, points, len(several)).low) for s in several if s is not most]
    return ReplicaComparison(
        baseline=baseline,
        best=next(r for r in rows if r.engines is most),
        rows=rows,
        alike=tuple(s for s, low in gains if low is not None and low <= 0),
        others=tuple((s, _gain(s, most, points, pairs)) for s in _others(alone, baseline)),
    )


def _no_baseline(sets: Sequence[EngineSet]) -> str:
    lost = sum(s.replicas == 1 and s.eligible and s.preempted for s in sets)
    without = f" without preemption ({lost} with)" if lost else ""
    return f"there is no row of one engine{without} to compare several with"


def _most(sets: Sequence[EngineSet]) -> EngineSet | None:
    """The set with the most throughput, of equal ones the first; None for no sets."""
    return max(sets, key=lambda s: s.rate, default=None)


def _compared(
    seen: EngineSet, baseline: EngineSet, usable: Sequence[EngineSet], points: Sequence[Point], several: int
) -> Compared:
    if seen is baseline:
        return Compared(engines=seen)
    equal = _most([s for s in usable if s.limit == seen.total]) if seen.replicas > 1 else None
    return Compared(
        engines=seen,
        gain=_gain(baseline, seen, points, several),
        at_equal_total=_gain(equal, seen, points, several) if equal else None,
        latency=ratio(seen.point, baseline.point, points, LATENCY, several),
    )


def _gain(first: EngineSet, second: EngineSet, points: Sequence[Point], several: int) -> Interval:
    """Relative gain in throughput of the second set over the first, as a share of the first. several: see
    `sweep_points.ratio`."""
    return ratio(second.point, first.point, points, RATE, several).mapped(lambda end: end - 1)


def _others(alone: Sequence[EngineSet], baseline: EngineSet) -> Iterator[EngineSet]:
    """The best of one engine for each value of the settings that is not the baseline's."""
    usable = [s for s in alone if s.alternative and s.settings != baseline.settings]
    yield from (max(same, key=lambda s: s.rate) for _, same in sorted(grouped(usable, lambda s: s.settings).items()))
