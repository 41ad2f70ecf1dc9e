"""Choice of the loads of a planned grid that must be measured to find the plateau, and predictions for the others.

The saturation law holds between two measured loads: the time of a step, load over throughput, is a straight line from
one to the other. So the smallest load and the largest predict where the plateau begins. The smallest gives the time of
a step whatever the batch; no prediction shows whether there is more to come past the largest. Then the loads that
decide this are measured: the load where it begins, and the one before, which must still gain. Past the beginning, one
load is added between two from which throughput grows by the tolerance or more. Each measurement moves the prediction. A
plateau never rests on a predicted load.

Throughput is a function of the requested load. Everything here is pure: points in, a decision out.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pytest_slmserve.analysis.points import Point, point_differences
from pytest_slmserve.analysis.stats.estimates import Interval, percent
from pytest_slmserve.analysis.sweep.gains import DESCRIBES, FEWEST_BATCHES, gains, plateau, valid_points
from pytest_slmserve.analysis.verdict import State, below

SHARE = 1 / 3  # of what the whole grid would take: no repeat is made beyond it
SECOND_CHANCES = 1  # a load of which more measurements than these were left out is not repeated

Seconds = Callable[[int, float], float]  # what a measurement takes, by its load and its tokens/s


@dataclass(frozen=True, slots=True)
class Wanted:
    """The next measurement. repeats: of this load in all, those that are known among them. why: in a few words."""

    concurrency: int
    repeats: int
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction by the law for a load that was not measured. The interval is as wide as the law's largest error at a
    measured load, when it is predicted from its neighbours only."""

    concurrency: int
    tokens_per_s: Interval


@dataclass(frozen=True, slots=True)
class Grid:
    """The planned loads of a sweep. tolerance: per doubling, for the plateau. repeats: the most of a load. looks: those
    that intervals are made for."""

    loads: Sequence[int]
    tolerance: float
    repeats: int
    seconds: Seconds
    looks: Sequence[int] = ()


def next_measurement(grid: Grid, points: Iterable[Point]) -> Wanted | None:
    """Return the next measurement to make, or None if nothing more is worth its time. points: results on this curve so
    far; loads outside the grid do not count.

    Loads come first, once each; then repeats, while the noise leaves the gain of the last doubling on both sides of the
    tolerance: of the loads around and past the plateau the smallest, then of the others. Repeats end when all
    measurements would take more than SHARE of the time of the whole grid. The first repeat is made in any case: without
    one the noise is unknown, and no verdict is possible.
    """
    known = [p for p in points if p.concurrency in grid.loads]
    if wanted := next_load(grid.loads, known, grid.tolerance):
        return wanted
    valid = valid_points(known)
    if len(valid) < 2:
        return None
    last = gains(valid, looks=grid.looks)[-1]
    if below(last, grid.tolerance) is not State.INCONCLUSIVE:
        return None
    rates, invalid = _rates(valid), {p.concurrency for p in known if not p.valid}
    each_s = {load: grid.seconds(load, predicted(rates, load)) for load in sorted(set(grid.loads) - invalid)}
    spent_s = sum((len(p.repeats) + p.left_out) * each_s[p.concurrency] for p in valid)
    left_s = SHARE * grid.repeats * sum(each_s.values()) - spent_s
    may = [p for p in valid if len(p.repeats) < grid.repeats and p.left_out <= SECOND_CHANCES]
    noise_known, why = point_differences(valid).known, "the noise is not known yet"
    candidates = [p for p in may if each_s[p.concurrency] <= left_s]
    loads = [p.concurrency for p in valid]
    begins = plateau(valid, grid.tolerance).value
    start = loads[max(loads.index(loads[-1] if begins is None else begins) - 1, 0)]
    if noise_known:
        why = f"noise hides the gain from {last.start} to {last.end}"
    elif not candidates:
        candidates, start = may, 0
    chosen = next((p for p in candidates if p.concurrency >= start), next(iter(candidates), None))
    return Wanted(chosen.concurrency, len(chosen.repeats) + 1, why) if chosen else None


def next_load(grid: Sequence[int], points: Iterable[Point], tolerance: float) -> Wanted | None:
    """Return the next load that the plateau depends on; None if all are known. Loads without a valid repeat, though
    they were tried, are passed over.

    Past the plateau's beginning it is a load between two from which throughput grows so much that a doubling in between
    may gain more than the tolerance. A single load next to the beginning is left alone: it moves that by no more.
    """
    known = [p for p in points if p.concurrency in grid]
    rates, invalid = _rates(known), {p.concurrency for p in known if not p.valid}
    loads = sorted(set(grid) - invalid)
    if not loads:
        return None
    # A load that is not known stands before all that depend on it.
    deciding = [
        (loads[0], "the smallest load: what a step takes, whatever the batch"),
        (loads[-1], "the largest load: no prediction tells whether there is more to come"),
    ]
    if loads[0] in rates and loads[-1] in rates:
        expected = [(load, predicted(rates, load)) for load in loads]
        imagined = [Point(concurrency=load, repeats=(rate,), e2e_repeats=(load / rate,)) for load, rate in expected]
        start = plateau(imagined, tolerance).value
        if start is None:
            deciding.append((loads[max(len(loads) - 2, 0)], "the last doubling decides whether there is a plateau"))
        else:
            before = loads[max(loads.index(start) - 1, 0)]
            deciding.append((start, "the plateau should begin here"))
            deciding.append((before, "the load before the plateau, which must still gain"))
            for a, b in pairwise(sorted(load for load in rates if load >= start)):
                between, grown = [load for load in loads if a < load < b], rates[b] / rates[a] - 1
                if grown >= tolerance and len(between) >= (2 if a == start else 1):
                    where = between[0] if a == start else between[len(between) // 2]
                    why = f"from {a} to {b} in flight throughput grows by {percent(grown)}, perhaps in one doubling"
                    deciding.append((where, why))
        if len(rates) < min(FEWEST_BATCHES, len(loads)):
            unknown = [load for load in loads if load not in rates]
            deciding.append((unknown[len(unknown) // 2], "two loads cannot tell whether the law holds"))
    return next((Wanted(load, 1, why) for load, why in deciding if load not in rates), None)


def _rates(points: Iterable[Point]) -> dict[int, float]:
    """Return the mean output tokens/s of the valid points, by load."""
    return {p.concurrency: fmean(p.repeats) for p in valid_points(points)}


def predicted(rates: Mapping[int, float], load: int) -> float:
    """Return tokens/s at a load between two that are known: a step's time is a straight line between theirs. Known
    loads are as they are."""
    if load in rates:
        return rates[load]
    known = sorted(rates)
    after = bisect(known, load)
    a, b = known[after - 1], known[after]
    first, second = a / rates[a], b / rates[b]
    return load / (first + (second - first) * (load - a) / (b - a))


def law_error(points: Iterable[Point]) -> tuple[float, int] | None:
    """Return the largest relative error of the law at a measured load that is predicted from its two neighbours, and
    that load. None for fewer than three loads."""
    rates = _rates(points)
    loads = sorted(rates)
    misses = [
        (abs(predicted({a: rates[a], b: rates[b]}, load) / rates[load] - 1), load)
        for a, load, b in zip(loads, loads[1:], loads[2:])
    ]
    return max(misses, default=None)


def predictions(points: Iterable[Point], loads: Iterable[int]) -> tuple[Prediction, ...]:
    """Return predictions by the law for loads between those measured; none if the law does not describe this curve."""
    known = tuple(points)
    missed = law_error(known)
    if missed is None or missed[0] > DESCRIBES:
        return ()
    rates, error = _rates(known), missed[0]
    rows = [(load, predicted(rates, load)) for load in loads]
    return tuple(Prediction(load, Interval(rate, rate / (1 + error), rate * (1 + error))) for load, rate in rows)
