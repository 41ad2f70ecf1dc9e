"""Means, percentiles and 95% confidence intervals, also of differences on hosts whose noise is not white.

Windows vary more than their own courses predict, because the noise of a host is slow. The factor is about the same at
all loads of a sweep, although the noise differs by a factor of 100. So the factor is pooled over the loads: each
variance is drawn towards the common one, the more so the better they agree (Smyth 2004, "Linear models and empirical
Bayes methods", section 6.2). If several launches measured the points equally often, the launch is the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from itertools import pairwise
from operator import itemgetter
from statistics import NormalDist, fmean, variance
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from pytest_slmserve.schema.records import FIGURE, Run

TINY = 1e-300
CLOSE = 1e-14
TERMS = 500
POINTS = 400  # of an integral over the standard deviation of a sample
NORMAL = NormalDist()


def survival(t: float, df: float) -> float:
    """Return P(T > t) of Student's t for `df` >= 1 degrees of freedom, or raise ValueError.

    The incomplete beta function is a continued fraction, by Lentz's method as modified by Thompson and Barnett (1986).
    """
    if df < 1:
        raise ValueError(f"{df} degrees of freedom: at least 1 is needed")
    a, b, x = df / 2, 0.5, df / (df + t * t)
    whole = float(x >= 1)  # of the incomplete beta function
    if 0 < x < 1:
        log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
        if other_side := x >= (a + 1) / (a + b + 2):  # because the fraction converges slowly there
            a, b, x = b, a, 1 - x
        c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or TINY)
        found = d
        for m in range(1, TERMS):
            even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
            for term in (even, -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
                c, d = (1 + term / c) or TINY, 1 / ((1 + term * d) or TINY)
                found *= c * d
            if abs(c * d - 1) < CLOSE:
                break
        part = math.exp(log_front) * found / a
        whole = 1 - part if other_side else part
    return 0.5 * whole if t >= 0 else 1 - 0.5 * whole


def least(enough: Callable[[float], bool], low: float = 0.0, high: float = 1.0) -> float:
    """Return the least number above `low` from which on `enough` is true, to the last digit."""
    while not enough(high):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def t_above(tail: float, df: float) -> float:
    """Return the value that Student's t exceeds with probability `tail`, 0 < tail <= 0.5, exact for small tails too."""
    return least(lambda t: survival(t, df) <= tail)


@lru_cache(maxsize=256)
def chi_square_above(tail: float, df: int) -> float:
    """Return the value that chi-square with `df` >= 1 degrees of freedom exceeds with probability `tail`, 0 < tail < 1.

    The tail has a closed form (Abramowitz and Stegun 1964, 26.4.4 and 26.4.5).
    """

    def above(x: float) -> float:
        half, first = x / 2, 1.0 if df % 2 == 0 else 0.5
        begins = math.exp(-half) if first == 1 else math.erfc(math.sqrt(half))
        terms = (first + i for i in range((df - 1) // 2))
        return begins + sum(math.exp(a * math.log(half) - half - math.lgamma(a + 1)) for a in terms)

    return least(lambda x: above(x) <= tail)


@lru_cache(maxsize=1024)
def shift(power: float, critical: float, df: int) -> float:
    """Return the true mean, in standard errors, at which t exceeds `critical` with probability `power` (0.5 to 1).

    Noncentral t is a normal value over a relative standard deviation, which is distributed as chi over the root of df.
    """
    step = (1 + 10 / math.sqrt(2 * df)) / POINTS
    log_front = math.log(2 * step) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    spreads = [step * i for i in range(1, POINTS)]
    weights = [math.exp(log_front + (df - 1) * math.log(s) - df * s * s / 2) for s in spreads]

    def exceeded(mean: float) -> bool:
        return sum(w * NORMAL.cdf(mean - critical * s) for s, w in zip(spreads, weights)) >= power

    return least(exceeded)


MAX_LOG = 700.0  # exp() overflows slightly above


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate with its confidence interval (95%, or wider for several comparisons).

    Both ends are None if the noise is unknown.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def mapped(self, rising: Callable[[float], float]) -> Interval:
        low, high = (None if end is None else rising(end) for end in (self.low, self.high))
        return Interval(rising(self.value), low, high)


def ends(seen: Interval) -> tuple[float, float]:
    """Return both ends of an interval, infinite if unknown."""
    return (-math.inf if seen.low is None else seen.low, math.inf if seen.high is None else seen.high)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def per_second(number: float, window_s: tuple[float, float]) -> float:
    """Return a rate over a window, or 0 if the window is empty because no request was answered."""
    opens, closes = window_s
    return number / (closes - opens) if closes > opens else 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile at `share` (0 to 1), interpolated linearly, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def sample_sd(values: Sequence[float]) -> float:
    """Return the standard deviation of two or more values, independent of their order."""
    # `statistics.stdev` computes in fractions, which would take most of the time when a gate is drawn 1,000 times.
    ordered = sorted(values)
    away = [v - ordered[0] for v in ordered]
    centre = fmean(away)
    return math.hypot(*(d - centre for d in away)) / math.sqrt(len(values) - 1)


def growth(log: float) -> float:
    """Return exp(log) - 1, the relative change for a difference of logarithms; inf on overflow."""
    return math.expm1(log) if log < MAX_LOG else math.inf


def factor(log: Interval) -> Interval:
    """Return the interval of exp(log)."""
    return log.mapped(lambda end: growth(end) + 1)


def times(seen: Interval) -> str:
    """Return text such as "1.23 times (95%: 1.2 to 1.26)"."""
    ends = "" if seen.low is None or seen.high is None else f" (95%: {seen.low:.3g} to {seen.high:.3g})"
    return f"{seen.value:.3g} times{ends}"


def student_interval(values: Sequence[float], value: float | None = None) -> Interval:
    """Return the mean of independent repeats, or `value`, with Student's 95% interval, which needs two repeats."""
    centre = fmean(values)
    shown = centre if value is None else value
    if len(values) < 2:
        return Interval(shown)
    half = t_above(TAIL, len(values) - 1) * sample_sd(values) / math.sqrt(len(values))
    return Interval(shown, shown - half, shown + half)


def sd_interval(sd: float, df: int) -> Interval:
    """Return a standard deviation of normal values with its 95% interval, which needs one degree of freedom."""
    if df < 1:
        return Interval(sd)
    low, high = (sd * math.sqrt(df / chi_square_above(tail, df)) for tail in (TAIL, 1 - TAIL))
    return Interval(sd, low, high)


def possible(seen: Interval, most: float = math.inf) -> Interval:
    """Return the part of an interval between 0 and `most`, or no interval if there is no part."""
    if seen.low is None or seen.high is None or seen.high < 0 or seen.low > most:
        return Interval(seen.value)
    return Interval(seen.value, max(seen.low, 0.0), min(seen.high, most))


def percent(share: float) -> str:
    """Return 0.0789 as "7.9%"."""
    return f"{round(100 * share, 1) + 0.0:g}%"


def percent_interval(seen: Interval) -> str:
    """Return text such as "7.9% (95%: 7.1% to 8.7%)"."""
    if seen.low is None or seen.high is None:
        return percent(seen.value)
    return f"{percent(seen.value)} (95%: {percent(seen.low)} to {percent(seen.high)})"


T = TypeVar("T")
P = ParamSpec("P")


def once(quantity: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Decorate a function of a run, to compute it once per run and further arguments.

    The run stores the result, which callers must not change, until its columns leave the memory.
    """
    return _kept(quantity, "columns")


def once_for_all(quantity: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Decorate a function like `once`, but store its result, one or a few numbers, as long as the run lives."""
    return _kept(quantity, FIGURE)


def _kept(quantity: Callable[Concatenate[Run, P], T], kind: str) -> Callable[Concatenate[Run, P], T]:
    name = f"{quantity.__module__}.{quantity.__name__}"

    @wraps(quantity)
    def kept(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = kind, name, args, *kwargs.items()
        if key not in run.derived:
            run.derived[key] = quantity(run, *args, **kwargs)
        return cast(T, run.derived[key])

    return kept


K = TypeVar("K", bound=Hashable)


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return lists of values by key, in the order first met."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


# An analysis after 3 pairs would save as much on quiet hosts as it costs on others: four unchanged endpoints take 3.0
# pairs instead of 4.0 at a noise of 0.3%, but 5.0 instead of 4.5 at 1%. It would also err more, because t has 2 degrees
# of freedom there, and a small standard deviation is often luck. At a noise of 2%, 2.4 in 10,000 candidates that are 5%
# worse would pass instead of 0.9 (a million gates each).
FIRST_LOOKS = (4, 6, 8, 12)
GROWTH = 1.5  # factor between the numbers of pairs at later analyses
SMALL_SAMPLES = 1.15  # with 3 to 11 degrees of freedom the method spends 10 to 14% more than planned (simulated)
GRID = 200  # intervals
REACH = 7.0  # standard deviations, beyond which the density is negligible


def looks_until(pairs: int) -> tuple[int, ...]:
    """Return the numbers of pairs at interim analyses: 4, 6, 8, 12, then 1.5 times as many each, finally `pairs`."""
    looks = [n for n in FIRST_LOOKS if n <= pairs]
    while looks and (later := 2 * round(looks[-1] * GROWTH / 2)) <= pairs and looks[-1] >= FIRST_LOOKS[-1]:
        looks.append(later)
    return tuple(looks if not looks or looks[-1] == pairs else [*looks, pairs])


@lru_cache(maxsize=256)
def boundaries(looks: tuple[int, ...], maximum: int, alpha: float) -> tuple[float, ...]:
    """Return critical values of t, one of which an unchanged candidate exceeds with a probability of at most `alpha`.

    Args:
        looks: number of pairs at each interim analysis.
        maximum: number of pairs by which all of `alpha` is spent.
    """
    return tuple(t_above(tail, n - 1) for tail, n in zip(tails(looks, maximum, alpha), looks))


def spent(share: float, alpha: float) -> float:
    """Return the part of `alpha` to spend up to this share of the pairs (Lan and DeMets 1983, Pocock type)."""
    return alpha * math.log(1 + (math.e - 1) * min(1.0, share))


@lru_cache(maxsize=256)
def tails(looks: tuple[int, ...], maximum: int, alpha: float, over: bool = False) -> tuple[float, ...]:
    """Return the marginal tail probability at each boundary, for sums of standard normal increments.

    If `over`, the last analysis spends the rest of `alpha`.
    """

    def rare(spend: float, step: float, sums: Sequence[tuple[float, float]], stop: float) -> bool:
        return sum(w * NORMAL.cdf((s - stop) / step) for w, s in sums) <= spend

    planned = [spent(1.0 if over and n == looks[-1] else n / maximum, alpha / SMALL_SAMPLES) for n in looks]
    found, last = [planned[0]], looks[0]
    sums = _grid(last, NORMAL.inv_cdf(1 - planned[0]) * math.sqrt(last))
    # Density of the sum at the last analysis, over the paths that no boundary has stopped.
    density = [NORMAL.pdf(s / math.sqrt(last)) / math.sqrt(last) for s in sums]
    for n, spend in zip(looks[1:], (after - before for before, after in pairwise(planned))):
        step, third = math.sqrt(n - last), (sums[1] - sums[0]) / 3
        simpson = [third, *(third * (4 if i % 2 else 2) for i in range(1, GRID)), third]
        weights = [w * d for w, d in zip(simpson, density)]
        # The sum that is exceeded for the first time at this analysis with probability `spend`.
        stop = least(partial(rare, spend, step, [*zip(weights, sums)]), high=REACH * math.sqrt(n))
        found.append(NORMAL.cdf(-stop / math.sqrt(n)))
        following = _grid(n, stop)
        density = [sum(w * NORMAL.pdf((y - s) / step) for w, s in zip(weights, sums)) / step for y in following]
        last, sums = n, following
    return tuple(found)


def _grid(n: int, stop: float) -> list[float]:
    low = -REACH * math.sqrt(n)
    return [low + (stop - low) * i / GRID for i in range(GRID + 1)]


TAIL = 0.025  # probability outside each end of a 95% interval
MINUTES = 0.37  # variance common to repeats within 15 s / variance between them (studies/minutes_apart.py)
LEAST = 1e-5  # of the median variance: a floor, because the variance of equal repeats has no logarithm


class Repeat(NamedTuple):
    """One repeat of a positive figure.

    Attributes:
        at: time of the measurement (ISO 8601).
        within: relative variance of the mean, estimated from its own window; None if unknown.
    """

    value: float
    at: str = ""
    launch: str = ""
    within: float | None = None


Sample = tuple[Repeat, ...]


class Contrast(NamedTuple):
    """Difference of the logarithms of two means.

    Attributes:
        scale: its variance as predicted from the courses of the windows.
        ratio: observed over predicted variance, with `df` degrees of freedom (0 if it is unknown).
        in_turn: whether several repeats were paired in time.
    """

    value: float
    scale: float
    ratio: float
    df: int
    in_turn: bool


class Prior(NamedTuple):
    """Variance common to all samples. It is worth `df` degrees of freedom to each, and all have `most`."""

    ratio: float
    df: float
    most: float


@dataclass(frozen=True)  # no slots: cached_property keeps the prior, which takes a while to compute
class Differences:
    """Logarithmic differences between samples, of which neighbors are similar, for example in a sweep by load."""

    samples: tuple[Sample, ...]
    minutes: float = MINUTES

    @cached_property
    def known(self) -> bool:
        """Whether anything was repeated. If not, the noise is unknown."""
        return any(len(sample) > 1 for sample in self.samples)

    @cached_property
    def _paired(self) -> Prior:
        # A slow course of the host is in the samples, but not in differences between neighbors measured in turn.
        found = [contrast(a, b) for a, b in pairwise(self._told)]
        each = [c.df if c.in_turn else 0 for c in found]
        if not (total := sum(each)):
            return self._levels
        # Two differences that share a sample have a correlation of -1/2. So their variances have one of 1/4, and fewer
        # degrees of freedom together (Satterthwaite 1946).
        shared = sum(map(min, each, each[1:]))
        most = total**2 / (total + shared / 2)
        return prior([(c.ratio, c.df) for c in found if c.in_turn])._replace(most=most)

    @cached_property
    def _levels(self) -> Prior:
        return prior([_spread(sample) for sample in self._told if len(sample) > 1])

    @cached_property
    def _told(self) -> tuple[Sample, ...]:
        if all(r.within is not None for sample in self.samples for r in sample):
            return self.samples
        return tuple(tuple(r._replace(within=None) for r in sample) for sample in self.samples)

    def between(self, first: int, second: int, tail: float = TAIL) -> Interval:
        """Return ln(second mean / first mean) and its interval, with probability `tail` outside each end."""
        if first == second:
            return Interval(0.0, 0.0, 0.0)
        found = contrast(self._told[first], self._told[second], self.minutes)
        alone = Prior(found.ratio, math.inf, found.df)  # if no other sample shows the noise
        common = self._paired if found.in_turn else self._levels if len(self.samples) > 2 else alone
        return self._interval(found, common, tail)

    def mean(self, number: int, tail: float = TAIL) -> Interval:
        """Return ln(mean of a sample) and its interval, with probability `tail` outside each end."""
        sample = self._told[number]
        value, scale = math.log(fmean(r.value for r in sample)), fmean(map(_within, sample)) / len(sample)
        return self._interval(Contrast(value, scale, *_spread(sample), in_turn=False), self._levels, tail)

    def _interval(self, seen: Contrast, common: Prior, tail: float) -> Interval:
        if not self.known:
            return Interval(seen.value)
        ratio, df = moderated(seen.ratio, seen.df, common)
        half = t_above(tail, df) * math.sqrt(ratio * seen.scale)
        return Interval(seen.value, seen.value - half, seen.value + half)


def contrast(first: Sequence[Repeat], second: Sequence[Repeat], minutes: float = MINUTES) -> Contrast:
    """Return the contrast of two samples, paired in time if they have equal sizes and were measured in turn.

    Args:
        minutes: variance common to repeats of one launch / variance between them. It is added if one sample followed
            the other, by different launches, because samples are minutes apart and repeats seconds. Few repeats often
            agree by luck, so windows then vary at least as much as their courses predict. With 0, the caller adds the
            variance of launches.
    """
    value = math.log(fmean(r.value for r in second) / fmean(r.value for r in first))
    courses = [fmean(map(_within, sample)) for sample in (first, second)]
    scale = sum(course / len(sample) for course, sample in zip(courses, (first, second)))
    order = sorted([*((r.at, 0, r) for r in first), *((r.at, 1, r) for r in second)], key=lambda row: row[:2])
    pairs = [sorted(pair, key=itemgetter(1)) for pair in zip(order[::2], order[1::2])]
    together = {r.launch for r in first} & {r.launch for r in second}
    apart = any(a[1] == b[1] or (together and a[2].launch != b[2].launch) for a, b in pairs)
    timed = len({at for at, _, _ in order}) == len(order)
    if len(first) == len(second) and timed and not apart:
        logs = [((a.launch, b.launch), math.log(b.value / a.value)) for (*_, a), (*_, b) in pairs]
        differences = launch_means(logs)
        if (df := len(differences) - 1) > 0:
            return Contrast(value, scale, variance(differences) / len(differences) / scale, df, True)
    spreads = [_spread(sample) for sample in (first, second)]
    df = sum(df for _, df in spreads)
    sides = [side for _, side, _ in order]
    if not minutes or together or not timed or sides not in (sorted(sides), sorted(sides, reverse=True)):
        return Contrast(value, scale, sum(ratio * df for ratio, df in spreads) / df if df else 0.0, df, False)
    scale += minutes * sum(c for c, each in zip(courses, (first, second)) if len({r.launch for r in each}) == 1)
    weight = sum(df * course for (_, df), course in zip(spreads, courses))
    ratio = sum(ratio * df * course for (ratio, df), course in zip(spreads, courses)) / weight if weight else 0.0
    told = all(r.within is not None for _, _, r in order)
    return Contrast(value, scale, max(ratio, 1.0) if told else ratio, df, False)


def launch_means(values: Iterable[tuple[object, float]]) -> list[float]:
    """Return the mean of each launch if several launches measured equally often, else the values."""
    each = [[value for _, value in of_one] for of_one in grouped(values, itemgetter(0)).values()]
    even = len(each) > 1 and len({*map(len, each)}) == 1
    return [fmean(of_one) for of_one in each] if even else [value for of_one in each for value in of_one]


def _spread(sample: Sequence[Repeat]) -> tuple[float, int]:
    units = launch_means((r.launch, math.log(r.value)) for r in sample)
    if len(units) < 2:
        return 0.0, 0
    each = fmean(map(_within, sample)) * len(units) / len(sample)
    return variance(units) / each, len(units) - 1


def _within(repeat: Repeat) -> float:
    return 1.0 if repeat.within is None else repeat.within


def moderated(ratio: float, df: int, common: Prior) -> tuple[float, float]:
    """Return a variance drawn towards the common one, and its degrees of freedom, at most those of all samples."""
    if math.isinf(common.df):
        return common.ratio, max(common.most, 1)
    whole = common.df + df
    return (common.df * common.ratio + df * ratio) / whole, max(min(whole, common.most), 1)


def prior(variances: Sequence[tuple[float, int]]) -> Prior:
    """Return the common part of variances with their degrees of freedom, from the mean and scatter of their logarithms.

    If only chance separates them, it is the pooled variance with infinite degrees of freedom.
    """
    total = sum(df for _, df in variances)
    pooled = Prior(sum(v * df for v, df in variances) / total if total else 0.0, math.inf, total)
    floor = LEAST * sorted(v for v, _ in variances)[len(variances) // 2] if variances else 0.0
    if len(variances) < 3 or not floor:
        return pooled
    chance = [digammas(df / 2) for _, df in variances]
    logs = [math.log(max(v, floor)) - first + math.log(df / 2) for (v, df), (first, _) in zip(variances, chance)]
    beyond = variance(logs) - fmean(second for _, second in chance)
    if beyond <= 0:
        return pooled
    # The x at which trigamma, which falls with x, is `beyond`.
    half = math.exp(least(lambda log: digammas(math.exp(log))[1] <= beyond, math.log(1e-3), math.log(1e6)))
    return Prior(math.exp(fmean(logs) + digammas(half)[0] - math.log(half)), 2 * half, total)


def digammas(x: float) -> tuple[float, float]:
    """Return digamma and trigamma of x > 0 (Abramowitz and Stegun 1964, 6.3.5, 6.3.18, 6.4.6 and 6.4.12)."""
    first = second = 0.0
    while x < 6:
        first, second, x = first - 1 / x, second + 1 / x**2, x + 1
    y = 1 / x**2
    first = first + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y / 252))
    return first, second + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y / 42))
