"""Gain of each doubling of the load, the plateau, and the loads to measure next.

The gain per doubling is (T2/T1)**(1/log2(B2/B1)) - 1, because neighboring loads need not be a factor of two apart. If a
sweep has interim analyses, its intervals hold at all of them together: they are repeated confidence intervals (Jennison
and Turnbull 2000, chapter 9).

In the saturation model, the time of a step (load over throughput) is linear in the load. So an adaptive sweep predicts
the plateau from the smallest and the largest load, measures there and at the load before, and predicts it again. Past
the beginning, it measures between two loads if throughput grows by the tolerance. A plateau never rests on a predicted
load.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.estimates import TAIL, Interval, growth, percent
from pytest_slmserve.analysis.points import Figure, Point, busy_rate, e2e_s, output_rate, point_differences
from pytest_slmserve.analysis.verdict import State, below
from pytest_slmserve.schema.errors import TooFewPoints

# A GPU that idles between kernels runs them at higher clocks: within a model and load, ln(tokens per busy second) fell
# by 0.094 (± 0.025) per unit of ln(busy share) if the power limit was reached.
CLOCKS = 0.1
LOOKS = (2, 3, 4, 6, 8, 12, 16)  # repeats of a load at the interim analyses
TailOf = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(Interval):
    """Relative change per doubling between two concurrencies, with its 95% interval if the noise is known."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChosenLoad:
    """Load that a rule finds, or None.

    Attributes:
        low: the load by ends of the 95% intervals, as is `high`.
        known: whether a point was repeated, so that there are intervals.
    """

    value: int | None = None
    low: int | None = None
    high: int | None = None
    known: bool = False


def valid_points(points: Iterable[Point]) -> list[Point]:
    """Return the valid points by ascending concurrency."""
    return sorted((p for p in points if p.valid), key=lambda p: p.concurrency)


def looks_from(first: int) -> tuple[int, ...]:
    """Return the numbers of repeats at the interim analyses of a sweep that begins with `first` repeats."""
    return (first, *(n for n in LOOKS if n > first))


def tail_at(repeats: int, looks: Sequence[int] = (), over: bool = False) -> float:
    """Return the probability outside each end of an interval, such that all interim analyses together hold at 95%.

    Args:
        looks: numbers of repeats at the interim analyses. A single one needs no correction.
        over: whether this is the last analysis, which uses the remaining error probability.
    """
    taken = looks[: max(sum(n <= repeats for n in looks), 1)]
    if len(looks) < 2 or (over and len(taken) == 1):
        return TAIL
    return estimates.tails(tuple(taken), looks[-1], TAIL, over)[-1]


def clocks_apart(one: Point, other: Point) -> float:
    """Return how much lower ln(tokens per busy second) of the other point may be because its GPU idles less."""
    return CLOCKS * math.log((other.engine_active or 1.0) / (one.engine_active or 1.0))


def gains(
    points: Sequence[Point], repeats: Figure = output_rate, tail_of: TailOf = tail_at, several: int = 1
) -> tuple[Gain, ...]:
    """Return the relative change per doubling between neighboring valid points.

    The interval for tokens per busy second includes the effect of an idle GPU's clocks.

    Args:
        tail_of: probability outside each end of an interval, by number of repeats.
        several: number of gains from which the extreme one is chosen (Bonferroni).
    """
    valid = [p for p in valid_points(points) if repeats(p)]
    seen, found = point_differences(valid, repeats), []
    for i, (a, b) in enumerate(pairwise(valid)):
        tail = tail_of(max(len(a.repeats), len(b.repeats))) / several
        change, doublings = seen.between(i, i + 1, tail), math.log2(b.concurrency / a.concurrency)
        if repeats is busy_rate and change.low is not None and change.high is not None:
            apart = clocks_apart(a, b)
            change = replace(change, low=change.low + min(0.0, apart), high=change.high + max(0.0, apart))
        gain = change.mapped(partial(mul, 1 / doublings)).mapped(growth)
        found.append(Gain(gain.value, gain.low, gain.high, start=a.concurrency, end=b.concurrency))
    return tuple(found)


def plateau(
    points: Sequence[Point], tolerance: float = 0.10, tail_of: TailOf = tail_at, repeats: Figure = output_rate
) -> ChosenLoad:
    """Return the smallest concurrency after which every doubling gains less than `tolerance` (a share).

    Its `low` and `high` use the lower and the upper ends of the gains' intervals.
    """
    steps = gains(points, repeats, tail_of)

    def start(end: str) -> int | None:
        found = None
        for step in reversed(steps):
            gain = getattr(step, end)
            if gain is None or gain >= tolerance:
                break
            found = step.start
        return found

    return ChosenLoad(start("value"), start("low"), start("high"), any(step.low is not None for step in steps))


# The largest bend of a curve over its largest bend at a measured load, if loads double and the saturation model holds.
BEND = 2.0


def crossing(ratios: Mapping[int, Interval]) -> Interval:
    """Return the load at which ratios that fall with the load cross 1, with its 95% interval.

    0 means below all loads, infinity above all. Isotonic regression makes the ratios fall. Between two loads, ln(ratio)
    is linear in ln(load). The possible error from the curve's bend widens the interval, up to these two loads.
    """
    loads = sorted(ratios)
    x, seen = [math.log(load) for load in loads], [ratios[load] for load in loads]

    def falling(values: Iterable[float]) -> list[float]:
        y = [math.log(max(value, estimates.TINY)) for value in values]
        each = range(len(y))
        return [min(max(fmean(y[i : k + 1]) for k in each[j:]) for i in each[: j + 1]) for j in each]

    means, lows, highs = map(falling, ([each.value for each in seen], *zip(*map(estimates.ends, seen))))
    slopes = [(d - c) / (b - a) for (a, b), (c, d) in zip(pairwise(x), pairwise(means))]
    bends = [abs(d - c) / (b - a) for (a, b), (c, d) in zip(zip(x, x[2:]), pairwise(slopes))]
    bend = BEND * max(bends, default=math.inf)

    def through(y: Sequence[float], side: int) -> float:
        for (a, b), (over, under) in zip(pairwise(x), pairwise(y)):
            if over > 0 >= under:
                at = a + (b - a) * over / (over - under)
                off = bend * (at - a) * (b - at) * (b - a) / (over - under) if side and a < at < b else 0.0
                return math.exp(min(max(at + side * off, a), b))
        return math.inf if y[-1] > 0 else 0.0

    return Interval(through(means, 0), through(lows, -1), through(highs, 1))


def advantages(
    points: Sequence[Point], point: Point, tail_of: TailOf = tail_at, several: int = 1
) -> list[tuple[Point, Interval]]:
    """Return the advantage over `point` of every valid point at another load.

    An advantage is the smaller of the gains in tokens/s and in mean E2E, so it is negative if one of them is worse.
    """
    valid = valid_points(points)
    speed, wait, at = point_differences(valid), point_differences(valid, e2e_s), valid.index(point)
    found = []
    for i, other in enumerate(valid):
        if i == at:
            continue
        tail = tail_of(max(len(point.repeats), len(other.repeats))) / several
        more, sooner = speed.between(at, i, tail), wait.between(i, at, tail)
        by = Interval(growth(min(more.value, sooner.value)))
        if more.low is not None and sooner.low is not None and more.high is not None and sooner.high is not None:
            by = replace(by, low=growth(min(more.low, sooner.low)), high=growth(min(more.high, sooner.high)))
        found.append((other, by))
    return found


DESCRIBES = 0.15  # largest relative error at a point of a model that describes the curve
FEWEST_BATCHES = 3  # two parameters, and one batch to check the fit


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted saturation model.

    Attributes:
        t_inf: output tokens/s of an infinite batch.
        b_half: batch with half of it. A negative estimate means that the points do not identify it.
        fixed_s: part of a step that does not depend on the batch.
        n: number of fitted repeats. Intervals are over fits of single repeats or launches, cut at 0.
    """

    t_inf: Interval
    b_half: Interval
    fixed_s: Interval
    error_mean: float
    error_max: float
    n: int

    @property
    def identified(self) -> bool:
        """True if the half-saturation batch is not negative."""
        return self.b_half.value >= 0

    @property
    def describes(self) -> bool:
        """True if the model is close to every point."""
        return self.error_max <= DESCRIBES

    def tokens_per_s(self, batch: float) -> float:
        """Return the output tokens/s that the model predicts."""
        return self.t_inf.value * batch / (batch + self.b_half.value)


def fit(points: Iterable[Point], b_half: float | None = None) -> Fit:
    """Return the saturation model of the means of the valid points, with intervals from their repeats.

    The i-th fit uses the i-th repeat of every point.

    Args:
        b_half: known value, for example from the model configuration; then only T_inf is fitted.

    Raises:
        TooFewPoints: if there are too few batches, or if throughput does not saturate.
    """
    valid = with_batches(points)
    means = [(fmean(p.batch_repeats), fmean(p.repeats)) for p in valid]
    t_inf, half = fit_law(means, b_half)
    repeats = min(len(p.repeats) for p in valid)
    each = [fit_law([(p.batch_repeats[i], p.repeats[i]) for p in valid], b_half) for i in range(repeats)]
    launches = [tuple(p.used[i][0].launch for p in valid if p.used) for i in range(repeats)]

    def around(value: float, fitted: Iterable[float]) -> Interval:
        by_launch = estimates.launch_means(zip(launches, fitted))
        return estimates.possible(estimates.student_interval(by_launch, value))

    errors = [abs((batch + half) / t_inf * rate / batch - 1) for batch, rate in means]
    return Fit(
        t_inf=around(t_inf, (t for t, _ in each)),
        b_half=around(half, (b for _, b in each)) if b_half is None else Interval(half),
        fixed_s=around(half / t_inf, (b / t for t, b in each)),
        error_mean=fmean(errors),
        error_max=max(errors),
        n=repeats,
    )


def with_batches(points: Iterable[Point]) -> list[Point]:
    """Return the valid points, ascending, whose repeats all have a mean batch."""
    return [p for p in valid_points(points) if len(p.batch_repeats) == len(p.repeats)]


def fit_law(points: Iterable[tuple[float, float]], b_half: float | None = None) -> tuple[float, float]:
    """Return (T_inf, b_half) from pairs of batch and output tokens/s.

    Least squares of the relative error of the step time: 1 = T/T_inf + (T/B)(b_half/T_inf). It is linear in 1/T_inf and
    b_half/T_inf and needs three batches. With a known `b_half`, it is 1 = (B + b_half)(T/B)/T_inf.

    Raises:
        TooFewPoints: if there are too few batches, or if throughput does not saturate.
    """
    rows = list(points)
    if b_half is not None:
        if not rows:
            raise TooFewPoints("the saturation model needs a point, there is none", "Sweep several concurrencies.")
        x = [(batch + b_half) * rate / batch for batch, rate in rows]
        return math.fsum(v * v for v in x) / math.fsum(x), b_half
    if (batches := len({batch for batch, _ in rows})) < FEWEST_BATCHES:
        needed = f"the saturation model needs {FEWEST_BATCHES} batches, there are {batches}"
        raise TooFewPoints(needed, "Sweep more concurrencies.")
    x = [rate for _, rate in rows]
    z = [rate / batch for batch, rate in rows]
    xx, xz, zz = (math.fsum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (x, z), (z, z)))
    sx, sz = math.fsum(x), math.fsum(z)
    per_sequence, fixed = (sx * zz - sz * xz), (sz * xx - sx * xz)  # both times the determinant, which is positive
    determinant = xx * zz - xz * xz
    if per_sequence <= 0 or determinant <= 0:
        raise TooFewPoints("throughput grows as fast as the batch: no saturation to fit", "Sweep larger concurrencies.")
    return determinant / per_sequence, fixed / per_sequence


SHARE = 1 / 3  # of the time of the whole grid, which repeats do not exceed
WIDE = 4.0  # factor between neighboring loads, above which a budget fills the gap before it pays for repeats
SECOND_CHANCES = 1  # a load with more excluded measurements is not repeated

Seconds = Callable[[int, float], float]  # time of a measurement, from its load and its tokens/s


@dataclass(frozen=True, slots=True)
class Wanted:
    """Next measurement.

    Attributes:
        repeats: total number of repeats of this load.
    """

    concurrency: int
    repeats: int
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted throughput of a load that was not measured.

    The interval has the width of the largest error at a measured load that is predicted from its neighbors.
    """

    concurrency: int
    tokens_per_s: Interval


@dataclass(frozen=True, slots=True)
class Grid:
    """Planned loads of a sweep, and the limits of its measurements.

    Attributes:
        tolerance: of the plateau, per doubling.
        repeats: largest number per load.
        looks: numbers of repeats at the interim analyses.
        left_s: seconds that are left of the budget.
    """

    loads: Sequence[int]
    tolerance: float
    repeats: int
    seconds: Seconds
    looks: Sequence[int] = ()
    left_s: float = math.inf

    def paid(self, rates: Mapping[int, float]) -> list[int]:
        """Return the loads that the budget pays for, ascending, next to a repeat of the smallest load.

        The loads above the largest known one must be paid for together, because throughput may still grow.

        Args:
            rates: tokens/s at the known loads.
        """
        if not rates:
            return [*self.loads]
        first, top = min(rates), max(rates)
        left_s, above = self.left_s - self.seconds(first, rates[first]), [n for n in self.loads if n > top]
        between = {n: self.seconds(n, predicted(rates, max(n, first))) for n in self.loads if n <= top}
        costs = {**between, **dict(zip(above, accumulate(self.seconds(n, rates[top]) for n in above)))}
        return [n for n in self.loads if n in rates or costs[n] <= left_s]


def next_measurement(grid: Grid, points: Iterable[Point]) -> Wanted | None:
    """Return the next measurement, or None if no further one is worth its time.

    Each load that matters is measured once. Then loads around and past the plateau, and after them the others, are
    repeated until the gain of the last doubling is conclusive, or until SHARE of the time of the whole grid is spent.
    The first repeat is always made, because without it the noise is unknown. With a budget, gaps wider than WIDE come
    first.
    """
    known = [p for p in points if p.concurrency in grid.loads]
    valid = valid_points(known)
    rates = _rates(valid)
    loads = grid.paid(rates)
    if wanted := next_load(loads, known, grid.tolerance):
        return wanted
    if len(valid) < 2:
        return None
    invalid = {p.concurrency for p in known if not p.valid}
    a, b = max(pairwise(sorted(rates)), key=lambda pair: pair[1] / pair[0])
    between = [load for load in loads if a < load < b and load not in invalid]
    if grid.left_s < math.inf and b / a > WIDE and between:
        return Wanted(between[len(between) // 2], 1, f"nothing is known between concurrency {a} and {b}")
    last = gains(valid, tail_of=partial(tail_at, looks=grid.looks))[-1]
    if below(last, grid.tolerance) is not State.INCONCLUSIVE:
        return None
    each_s = {load: grid.seconds(load, predicted(rates, load)) for load in sorted({*loads} - invalid)}
    spent_s = sum((len(p.repeats) + p.left_out) * each_s[p.concurrency] for p in valid)
    left_s = min(SHARE * grid.repeats * sum(each_s.values()) - spent_s, grid.left_s)
    may = [p for p in valid if len(p.repeats) < grid.repeats and p.left_out <= SECOND_CHANCES]
    noise_known, why = point_differences(valid).known, "the noise is not known yet"
    candidates = [p for p in may if each_s[p.concurrency] <= left_s]
    measured = [p.concurrency for p in valid]
    begins = plateau(valid, grid.tolerance).value
    start = measured[max(measured.index(measured[-1] if begins is None else begins) - 1, 0)]
    if noise_known:
        why = f"noise hides the gain from {last.start} to {last.end}"
    elif not candidates:
        candidates, start = may, 0
    chosen = next((p for p in candidates if p.concurrency >= start), next(iter(candidates), None))
    return Wanted(chosen.concurrency, len(chosen.repeats) + 1, why) if chosen else None


def next_load(grid: Sequence[int], points: Iterable[Point], tolerance: float) -> Wanted | None:
    """Return the next load on which the plateau depends, or None.

    Loads without a valid repeat are skipped. So is a single load next to the beginning of the plateau, because it
    hardly moves it.
    """
    known = [p for p in points if p.concurrency in grid]
    rates, invalid = _rates(known), {p.concurrency for p in known if not p.valid}
    loads = sorted(set(grid) - invalid)
    if not loads:
        return None
    # An unknown load stands before the loads that depend on it.
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
                    why = f"from concurrency {a} to {b} throughput grows by {percent(grown)}, perhaps in one doubling"
                    deciding.append((where, why))
        if len(rates) < min(FEWEST_BATCHES, len(loads)):
            unknown = [load for load in loads if load not in rates]
            deciding.append((unknown[len(unknown) // 2], "two loads cannot tell whether the model holds"))
    return next((Wanted(load, 1, why) for load, why in deciding if load not in rates), None)


def _rates(points: Iterable[Point]) -> dict[int, float]:
    return {p.concurrency: fmean(p.repeats) for p in valid_points(points)}


def predicted(rates: Mapping[int, float], load: int) -> float:
    """Return tokens/s at a known load, or between two, where the time of a step is linear."""
    if load in rates:
        return rates[load]
    known = sorted(rates)
    after = bisect(known, load)
    a, b = known[after - 1], known[after]
    first, second = a / rates[a], b / rates[b]
    return load / (first + (second - first) * (load - a) / (b - a))


def law_error(points: Iterable[Point]) -> tuple[float, int] | None:
    """Return the largest relative error at a load predicted from its neighbors, and the load; None if there is none."""
    rates = _rates(points)
    loads = sorted(rates)
    misses = [
        (abs(predicted({a: rates[a], b: rates[b]}, load) / rates[load] - 1), load)
        for a, load, b in zip(loads, loads[1:], loads[2:])
    ]
    return max(misses, default=None)


def predictions(points: Iterable[Point], loads: Iterable[int]) -> tuple[Prediction, ...]:
    """Return predictions for loads between the measured ones; empty if the model does not describe this curve."""
    known = tuple(points)
    missed = law_error(known)
    if missed is None or missed[0] > DESCRIBES:
        return ()
    rates, error = _rates(known), missed[0]
    rows = [(load, predicted(rates, load)) for load in loads]
    return tuple(Prediction(load, Interval(rate, rate / (1 + error), rate * (1 + error))) for load, rate in rows)
