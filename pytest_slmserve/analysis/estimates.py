"""Means, percentiles and 95 % intervals; and those of differences on hosts whose noise is not white.

Three levels: the course of a window, windows, launches. Windows scatter more than their own courses tell, since the
noise of a host is slow; the factor by which they do is about the same at all loads of a sweep, where the noise itself
differs by a hundred. So what is pooled over loads is that factor, and only as far as it is alike: each variance is
drawn towards the common one by as much as the variances agree (Smyth 2004, "Linear models and empirical Bayes methods",
section 6.2). Where points were measured equally often by several launches, the launch is the unit.
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
POINTS = 400  # of an integral over the spread that a sample may have
NORMAL = NormalDist()


def survival(t: float, df: float) -> float:
    """Return P(T > t) for `df` degrees of freedom, a whole number or not. Raises ValueError if there is none.

    The incomplete beta function is a continued fraction, by Lentz's method as modified by Thompson and Barnett (1986).
    """
    if df < 1:
        raise ValueError(f"{df} degrees of freedom: at least 1 is needed")
    a, b, x = df / 2, 0.5, df / (df + t * t)
    whole = float(x >= 1)  # of the incomplete beta function
    if 0 < x < 1:
        log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
        if other_side := x >= (a + 1) / (a + b + 2):  # where the fraction converges slowly
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
    """Return the least number above `low` from which on something is `enough`, to the last digit. high: where to
    begin."""
    while not enough(high):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def t_above(tail: float, df: float) -> float:
    """Return the t that a share `tail` of all values lies above, 0 < tail <= 0.5: exact for small tails too."""
    return least(lambda t: survival(t, df) <= tail)


@lru_cache(maxsize=256)
def chi_square_above(tail: float, df: int) -> float:
    """Return the chi-square that a share `tail` of all values lies above, 0 < tail < 1, for 1 or more degrees of
    freedom: its tail has a closed form, of which each two degrees add a term (Abramowitz and Stegun 1964, 26.4.4 and
    26.4.5)."""

    def above(x: float) -> float:
        half, first = x / 2, 1.0 if df % 2 == 0 else 0.5
        begins = math.exp(-half) if first == 1 else math.erfc(math.sqrt(half))
        terms = (first + i for i in range((df - 1) // 2))
        return begins + sum(math.exp(a * math.log(half) - half - math.lgamma(a + 1)) for a in terms)

    return least(lambda x: above(x) <= tail)


@lru_cache(maxsize=1024)
def shift(power: float, critical: float, df: int) -> float:
    """Return the distance of the true mean from 0, in its standard errors, at which t exceeds `critical` with
    probability `power`, 0.5 <= power < 1.

    The distribution is noncentral t, as a normal value over a spread with its own probabilities: standard deviations of
    samples over the true one are chi over the root of df.
    """
    step = (1 + 10 / math.sqrt(2 * df)) / POINTS
    log_front = math.log(2 * step) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    spreads = [step * i for i in range(1, POINTS)]
    weights = [math.exp(log_front + (df - 1) * math.log(s) - df * s * s / 2) for s in spreads]

    def exceeded(mean: float) -> bool:
        return sum(w * NORMAL.cdf(mean - critical * s) for s, w in zip(spreads, weights)) >= power

    return least(exceeded)


MAX_LOG = 700.0  # exp of a little more is no float


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval; low and high are None where the noise is unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def mapped(self, rising: Callable[[float], float]) -> Interval:
        """Return the interval of a rising function of what is estimated."""
        low, high = (None if end is None else rising(end) for end in (self.low, self.high))
        return Interval(rising(self.value), low, high)


def ends(seen: Interval) -> tuple[float, float]:
    """Both ends of an interval, as wide as can be where the noise is unknown."""
    return (-math.inf if seen.low is None else seen.low, math.inf if seen.high is None else seen.high)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that were measured, None if there is none."""
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def per_second(number: float, window_s: tuple[float, float]) -> float:
    """Return a rate over a window; 0 where it has no extent, as that of a load of which no request was answered."""
    opens, closes = window_s
    return number / (closes - opens) if closes > opens else 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Quantile with linear interpolation between order statistics; share from 0 to 1. None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def sample_sd(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of two or more, the same in any order of the values. `statistics.stdev`
    computes in fractions, whose last digits cost a gate that is drawn a thousand times most of its time."""
    ordered = sorted(values)
    away = [v - ordered[0] for v in ordered]
    centre = fmean(away)
    return math.hypot(*(d - centre for d in away)) / math.sqrt(len(values) - 1)


def growth(log: float) -> float:
    """Relative change that a difference of logs stands for: exp(log) - 1, infinite where that is too large."""
    return math.expm1(log) if log < MAX_LOG else math.inf


def factor(log: Interval) -> Interval:
    """Return a difference of logs as a factor."""
    return log.mapped(lambda end: growth(end) + 1)


def times(seen: Interval) -> str:
    """Return a factor and its interval, if it has one: "1.23 times (95 %: 1.2 to 1.26)"."""
    ends = "" if seen.low is None or seen.high is None else f" (95 %: {seen.low:.3g} to {seen.high:.3g})"
    return f"{seen.value:.3g} times{ends}"


def student_interval(values: Sequence[float], value: float | None = None) -> Interval:
    """Return the mean of independent repeats with its interval (none for one repeat), or that interval around
    `value`."""
    centre = fmean(values)
    shown = centre if value is None else value
    if len(values) < 2:
        return Interval(shown)
    half = t_above(TAIL, len(values) - 1) * sample_sd(values) / math.sqrt(len(values))
    return Interval(shown, shown - half, shown + half)


def sd_interval(sd: float, df: int) -> Interval:
    """Return a standard deviation of normal values with its interval, which is none without degrees of freedom."""
    if df < 1:
        return Interval(sd)
    low, high = (sd * math.sqrt(df / chi_square_above(tail, df)) for tail in (TAIL, 1 - TAIL))
    return Interval(sd, low, high)


def possible(seen: Interval, most: float = math.inf) -> Interval:
    """Return the part of an interval that can be, between 0 and `most`; where no part of it can be, there is none."""
    if seen.low is None or seen.high is None or seen.high < 0 or seen.low > most:
        return Interval(seen.value)
    return Interval(seen.value, max(seen.low, 0.0), min(seen.high, most))


def percent(share: float) -> str:
    """0.0789 as "7.9 %"."""
    return f"{round(100 * share, 1) + 0.0:g} %"


def percent_interval(seen: Interval) -> str:
    """Return an estimate and its interval, if it has one: "7.9 % (95 %: 7.1 % to 8.7 %)"."""
    if seen.low is None or seen.high is None:
        return percent(seen.value)
    return f"{percent(seen.value)} (95 %: {percent(seen.low)} to {percent(seen.high)})"


T = TypeVar("T")
P = ParamSpec("P")


def once(quantity: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Decorate a function of a run so that each run computes it once for the same further arguments. The answer is kept
    with the run, for as long as that lives. Nobody may change it."""
    return _kept(quantity, "columns")


def once_for_all(quantity: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Decorate a function as `once`, whose answer is a number or a few: it is kept also when the columns of the run
    leave the memory."""
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
    """Lists of values by their key, in the order first met."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


# A look after 3 pairs would save on quiet hosts what it costs on others: four unchanged endpoints take 3.0 pairs and
# not 4.0 at a noise of 0.3 %, but 5.0 and not 4.5 at 1 %. And it errs more: t has 2 degrees of freedom there, a small
# spread is often luck, and at 2 % of candidates 5 % worse 2.4 in ten thousand pass and not 0.9 (a million gates each).
FIRST_LOOKS = (4, 6, 8, 12)
GROWTH = 1.5  # of the number of pairs, between later looks
SMALL_SAMPLES = 1.15  # with 3 to 11 degrees of freedom the approach spends 10 to 14 % more than planned (simulated)
GRID = 200  # intervals
REACH = 7.0  # standard deviations; nothing that matters lies farther out


def looks_until(pairs: int) -> tuple[int, ...]:
    """Return numbers of pairs at which to look: 4, 6, 8, 12, then half as many more each time, and last at `pairs`."""
    looks = [n for n in FIRST_LOOKS if n <= pairs]
    while looks and (later := 2 * round(looks[-1] * GROWTH / 2)) <= pairs and looks[-1] >= FIRST_LOOKS[-1]:
        looks.append(later)
    return tuple(looks if not looks or looks[-1] == pairs else [*looks, pairs])


@lru_cache(maxsize=256)
def boundaries(looks: tuple[int, ...], maximum: int, alpha: float) -> tuple[float, ...]:
    """Return critical values of t at each look, so that one of them is exceeded with probability `alpha` at most if
    nothing has changed. maximum: pairs at which all of it is spent."""
    return tuple(t_above(tail, n - 1) for tail, n in zip(tails(looks, maximum, alpha), looks))


def spent(share: float, alpha: float) -> float:
    """Return the part of `alpha` to be spent at this share of the pairs (Lan and DeMets 1983, Pocock's kind)."""
    return alpha * math.log(1 + (math.e - 1) * min(1.0, share))


@lru_cache(maxsize=256)
def tails(looks: tuple[int, ...], maximum: int, alpha: float, over: bool = False) -> tuple[float, ...]:
    """Return the tail probability at each boundary, taken by itself, for sums of standard normal increments. over: the
    last look is the last of all, so what is left of `alpha` is spent there.

    `density` is that of the sum at the last look, of those paths which no boundary has stopped, on a grid whose
    `weights` are those of Simpson's rule.
    """

    def rare(spend: float, step: float, sums: Sequence[tuple[float, float]], stop: float) -> bool:
        return sum(w * NORMAL.cdf((s - stop) / step) for w, s in sums) <= spend

    planned = [spent(1.0 if over and n == looks[-1] else n / maximum, alpha / SMALL_SAMPLES) for n in looks]
    found, last = [planned[0]], looks[0]
    sums = _grid(last, NORMAL.inv_cdf(1 - planned[0]) * math.sqrt(last))
    density = [NORMAL.pdf(s / math.sqrt(last)) / math.sqrt(last) for s in sums]
    for n, spend in zip(looks[1:], (after - before for before, after in pairwise(planned))):
        step, third = math.sqrt(n - last), (sums[1] - sums[0]) / 3
        simpson = [third, *(third * (4 if i % 2 else 2) for i in range(1, GRID)), third]
        weights = [w * d for w, d in zip(simpson, density)]
        # The sum that is exceeded, now and not before, with probability `spend`.
        stop = least(partial(rare, spend, step, [*zip(weights, sums)]), high=REACH * math.sqrt(n))
        found.append(NORMAL.cdf(-stop / math.sqrt(n)))
        following = _grid(n, stop)
        density = [sum(w * NORMAL.pdf((y - s) / step) for w, s in zip(weights, sums)) / step for y in following]
        last, sums = n, following
    return tuple(found)


def _grid(n: int, stop: float) -> list[float]:
    low = -REACH * math.sqrt(n)
    return [low + (stop - low) * i / GRID for i in range(GRID + 1)]


TAIL = 0.025  # outside each end of a 95 % interval
MINUTES = 0.37  # variance common to repeats within 15 s, over that between them: studies/minutes_apart.py
LEAST = 1e-5  # of the median variance: repeats that are equal by chance have no logarithm of one


class Repeat(NamedTuple):
    """One repeat of a positive figure. at: when it was measured (ISO 8601). launch: of the engine. within: relative
    variance of its mean by the course of its own window; None where that tells nothing."""

    value: float
    at: str = ""
    launch: str = ""
    within: float | None = None


Sample = tuple[Repeat, ...]


class Contrast(NamedTuple):
    """Difference of the logarithms of two means. scale: its variance, were the courses of the windows all that there
    is. ratio: variance that the repeats show, over that; df: its degrees of freedom, 0 for an unknown ratio. in_turn:
    several repeats, paired in time."""

    value: float
    scale: float
    ratio: float
    df: int
    in_turn: bool


class Prior(NamedTuple):
    """Variance that all have in common, and the degrees of freedom that it is worth to each. most: those of all."""

    ratio: float
    df: float
    most: float


@dataclass(frozen=True)  # no slots: the prior takes a while to compute, and is kept
class Differences:
    """Differences between samples of repeats, those next to each other alike: of a sweep ascending by load. minutes:
    see `contrast`."""

    samples: tuple[Sample, ...]
    minutes: float = MINUTES

    @cached_property
    def known(self) -> bool:
        """Whether anything was repeated. Without repeats no noise is known, and intervals have no ends."""
        return any(len(sample) > 1 for sample in self.samples)

    @cached_property
    def _paired(self) -> Prior:
        """Of differences between neighbours that were measured in turn: a slow course of the host is in samples, not in
        these. Two that share a sample have a correlation of -1/2, so their variances have one of 1/4, and fewer degrees
        of freedom together (Satterthwaite 1946). Where there are none: of samples."""
        found = [contrast(a, b) for a, b in pairwise(self._told)]
        each = [c.df if c.in_turn else 0 for c in found]
        if not (total := sum(each)):
            return self._levels
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
        """ln(mean of the second sample / mean of the first), and its interval. tail: probability outside each end."""
        if first == second:
            return Interval(0.0, 0.0, 0.0)
        found = contrast(self._told[first], self._told[second], self.minutes)
        alone = Prior(found.ratio, math.inf, found.df)  # where nothing else tells of the noise
        common = self._paired if found.in_turn else self._levels if len(self.samples) > 2 else alone
        return self._interval(found, common, tail)

    def mean(self, number: int, tail: float = TAIL) -> Interval:
        """ln(mean of a sample), and its interval. tail: probability outside each end."""
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
    """Return the contrast of two samples. Their repeats are paired with neighbours in time if all were measured in
    turn, and each pair is of one launch if both samples are of the same.

    minutes: variance that the repeats of one launch have in common, over that between them. It counts where one sample
    was measured after the other by other launches: repeats lie seconds apart, and samples minutes. Two of them are
    often alike by luck, so windows then scatter at least as their own courses tell. 0: the reader of the contrast adds
    what launches differ by."""
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
    """Means of each launch where there are several that measured equally often, else the values."""
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
    """Return a variance drawn towards the common one, and its degrees of freedom: no more than all have."""
    if math.isinf(common.df):
        return common.ratio, max(common.most, 1)
    whole = common.df + df
    return (common.df * common.ratio + df * ratio) / whole, max(min(whole, common.most), 1)


def prior(variances: Sequence[tuple[float, int]]) -> Prior:
    """Return what variances with their degrees of freedom have in common, by the mean and the scatter of their
    logarithms. If they are equal in all but chance, it is the pooled variance, worth any number of degrees of
    freedom."""
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
    # The x whose trigamma is `beyond`: it falls with x.
    half = math.exp(least(lambda log: digammas(math.exp(log))[1] <= beyond, math.log(1e-3), math.log(1e6)))
    return Prior(math.exp(fmean(logs) + digammas(half)[0] - math.log(half)), 2 * half, total)


def digammas(x: float) -> tuple[float, float]:
    """Return the first and the second derivative of ln gamma(x), digamma and trigamma, for x > 0 (Abramowitz and Stegun
    1964, 6.3.5, 6.3.18, 6.4.6 and 6.4.12)."""
    first = second = 0.0
    while x < 6:
        first, second, x = first - 1 / x, second + 1 / x**2, x + 1
    y = 1 / x**2
    first = first + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y / 252))
    return first, second + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y / 42))
