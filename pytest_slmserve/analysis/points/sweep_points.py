"""A point of a sweep: one concurrency, the mean of its valid repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import chain
from statistics import mode
from typing import Any, Generic, TypeVar

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.metrics.goodput import Goodput, Slo, checked_slo, goodput_of, together
from pytest_slmserve.analysis.metrics.summary import Summary, summarize
from pytest_slmserve.analysis.metrics.validity import CheckResult, check
from pytest_slmserve.analysis.metrics.window import relative_variance
from pytest_slmserve.analysis.stats.estimates import Interval, factor, mean_of_known
from pytest_slmserve.analysis.stats.noise import TAIL, Differences, Repeat, Sample
from pytest_slmserve.schema.loads import is_steady
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, hosts_of, series_key

T = TypeVar("T")
Found = tuple[T, CheckResult]


@dataclass(frozen=True, kw_only=True)  # no slots: it is a base beside that of the figures, which has them
class Repeats(Generic[T]):
    """Repeats of one case: the figures of those that its means are over, and what is wrong with the others.

    Used are the clean ones; where there are none of them, the degraded ones; never an invalid one.
    each: figures of each repeat used, in the order measured. repeats, e2e_repeats: their output tokens/s and mean E2E;
    records: ids of their measurements, which are in `used`. left_out: number of repeats not used; problems: what was
    wrong with them. degraded: what the sensors say against those used. noise: what disturbed the host while those used
    were made.
    """

    repeats: tuple[float, ...] = ()
    e2e_repeats: tuple[float, ...] = ()
    records: tuple[str, ...] = ()
    each: tuple[T, ...] = field(default=(), repr=False)
    used: tuple[ReplicaGroup, ...] = field(default=(), repr=False, compare=False)
    left_out: int = 0
    problems: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """True where a claim may rest on it: one valid repeat is enough; rates and latencies are positive numbers."""
        numbers = (*self.repeats, *self.e2e_repeats)
        return 0 < len(self.repeats) == len(self.e2e_repeats) and all(0 < v < float("inf") for v in numbers)

    def goodput(self, slo: str | Slo) -> Goodput | None:
        """Requests that kept every bound of `slo`, such as "ttft:200ms,tpot:50ms", over all repeats used:
        `.attainment` is their share, `.per_s` their rate. None where there is no valid repeat. Raises BadUsage for what
        is no SLO, and for a bound on ITL."""
        bounds = checked_slo(slo) if isinstance(slo, str) else slo
        each = (together([goodput_of(m, bounds) for m in group], at_once=True) for group in self.used)
        return together(list(each))


@dataclass(frozen=True, kw_only=True)
class Point(Summary, Repeats[Summary]):
    """The figures are means over the repeats used (of percentiles too; `little` is the one farthest from 0), None
    where there is none. batch_repeats: the mean batch of each."""

    concurrency: int
    batch_repeats: tuple[float, ...] = ()


Figure = Callable[[Any], Sequence[float]]  # the values that the repeats of a point have of it


def tokens_per_s(point: Repeats[Any]) -> Sequence[float]:
    return point.repeats


def e2e_s(point: Repeats[Any]) -> Sequence[float]:
    return point.e2e_repeats


def figure(name: str) -> Figure:
    """The figure of this name, of the repeats that know it."""
    return lambda point: [value for s in point.each if (value := getattr(s, name)) is not None]


def differences(points: Iterable[Repeats[Any]], what: Figure = tokens_per_s) -> Differences:
    """Differences between points in a positive figure; those next to each other are alike."""
    return _differences(tuple(_sample(point, what) for point in points))


@lru_cache(maxsize=64)  # claims read the same points many times, and their common noise takes time to estimate
def _differences(samples: tuple[Sample, ...]) -> Differences:
    return Differences(samples)


def _sample(point: Repeats[Any], what: Figure) -> Sample:
    """Repeats of a point. The course of a window tells the noise of one engine under a staggered load: that of a convoy
    is no noise."""
    values, groups = what(point), point.used
    if len(groups) != len(values):
        return tuple(map(Repeat, values))
    even = all(len(g) == 1 and is_steady(g[0].load) and g[0].load.ramp_up == "staggered" for g in groups)
    rows = zip(values, (group[0] for group in groups), strict=True)
    return tuple(Repeat(v, m.measured_at, m.launch, relative_variance(m.run) if even else None) for v, m in rows)


def ratio(
    of: Repeats[Any],
    to: Repeats[Any],
    among: Sequence[Repeats[Any]] = (),
    what: Figure = tokens_per_s,
    several: int = 1,
) -> Interval:
    """A figure of one point over that of another. among: points whose repeats tell the noise, by default these two.
    several: of how many ratios this one is chosen, so that the interval has to hold for all (Bonferroni)."""
    points = among or (to, of)
    return factor(differences(points, what).between(points.index(to), points.index(of), TAIL / several))


def at_common_loads(first: Sequence[Point], second: Sequence[Point]) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """Pairs of points under one load, ascending, and all points to tell the noise of their ratios: like pairs first."""
    by_load = {p.concurrency: p for p in second}
    pairs = [(p, by_load[p.concurrency]) for p in first if p.concurrency in by_load]
    paired = {p.concurrency for p, _ in pairs}
    return pairs, [*(p for pair in pairs for p in pair), *(p for p in (*first, *second) if p.concurrency not in paired)]


def concurrency_of(measurement: Measurement) -> int | None:
    """The knob of a sweep, None for a load that has no steady window (a fixed number of requests), and for an
    engine that shared its device with others, or was measured to be compared with such."""
    return measurement.load.max_concurrency if is_steady(measurement.load) and not measurement.replica else None


def by_series(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Measurements by the curve they lie on, or beside, in the order first met, without jobs, gates and replicas."""
    found: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.alone and m.paired is None and is_steady(m.load):
            found.setdefault(series_key(m.spec, m.workload.hash, m.load, m.environment), []).append(m)
    return found


def points_of(measurements: Iterable[Measurement]) -> tuple[Point, ...]:
    """One point per concurrency, ascending, whatever the order of the measurements. Other loads are left out."""
    by_load = grouped(sorted(measurements, key=lambda m: (m.measured_at, m.launch)), concurrency_of)
    return tuple(point_of(load, by_load[load]) for load in sorted(load for load in by_load if load is not None))


def choose(repeats: Iterable[T], findings: Callable[[T], CheckResult]) -> tuple[list[Found[T]], list[Found[T]]]:
    """Repeats that count, and the others, each with what was found. The clean ones count; where there are none of them,
    the degraded ones; never an invalid one."""
    judged = [(repeat, findings(repeat)) for repeat in repeats]
    valid = [entry for entry in judged if not entry[1].problems]
    used = [entry for entry in valid if not entry[1].degradations] or valid
    return used, [entry for entry in judged if not any(entry is other for other in used)]


def repeat_fields(groups: Iterable[ReplicaGroup], summary: Callable[[ReplicaGroup], Any]) -> dict[str, Any]:
    """Fields of `Repeats` by name. groups: measurements of each repeat. summary: its figures."""
    used, others = choose(groups, lambda group: check(*group))
    each = tuple(summary(group) for group, _ in used)
    return {
        "repeats": tuple(s.output_tokens_per_s for s in each if s.output_tokens_per_s is not None),
        "e2e_repeats": tuple(s.e2e_s for s in each if s.e2e_s is not None),
        "records": tuple(m.id for group, _ in used for m in group),
        "each": each,
        "used": tuple(group for group, _ in used),
        "left_out": len(others),
        "problems": tuple(dict.fromkeys(text for _, found in others for text in found.problems or found.degradations)),
        "degraded": tuple(dict.fromkeys(text for _, found in used for text in found.degradations)),
        "noise": tuple(dict.fromkeys(text for _, found in used for text in found.noise)),
    }


def point_of(concurrency: int, measurements: Sequence[Measurement]) -> Point:
    """Point of repeats of one load, whether they are of a sweep or not."""
    repeats = repeat_fields(((m,) for m in measurements), lambda group: summarize(group[0]))
    batches = tuple(s.batch for s in repeats["each"] if s.batch is not None)
    return Point(concurrency=concurrency, batch_repeats=batches, **repeats, **mean_figures(repeats["each"]))


def on_hosts_of(point: Point, other: Repeats[Any]) -> Point | None:
    """The point of those of its repeats that a host of `other` made, in the same boot; None where there are none. What
    one host serves says nothing of another: of the same kind and with the same GPU some serve twice as much. The point
    itself where a host is not known."""
    mine = list(chain.from_iterable(point.used))
    here, there = hosts_of(mine), hosts_of(chain.from_iterable(other.used))
    if not there or None in here | there or here <= there:
        return point
    kept = [m for m in mine if m.environment.host in there]
    return point_of(point.concurrency, kept) if kept else None


def mean_figures(summaries: Sequence[Summary], kind: type[Summary] = Summary) -> dict[str, Any]:
    """Means of what is a number; of the law's deviations the worst, of the bounds the one found most often, and the
    power limit where there was but one."""
    figures: dict[str, Any] = {
        f.name: mean_of_known(getattr(s, f.name) for s in summaries) for f in fields(kind) if f.name != "bound"
    }
    figures["little"] = max((s.little for s in summaries if s.little is not None), key=abs, default=None)
    bounds = [s.bound for s in summaries if s.bound is not None]
    limits = {s.power_limit_w for s in summaries if s.power_limit_w is not None}
    return figures | {
        "bound": mode(bounds) if bounds else None,
        "power_limit_w": limits.pop() if len(limits) == 1 else None,
    }
