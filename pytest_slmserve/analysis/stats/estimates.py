"""Means, percentiles and Student intervals. Values are plain numbers; an interval is always the 95 % one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.stats import student_t

MAX_LOG = 700.0  # exp of a little more is no float


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval; low and high are None where the noise is unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def mapped(self, rising: Callable[[float], float]) -> Interval:
        """The interval of a rising function of what is estimated."""
        low, high = (None if end is None else rising(end) for end in (self.low, self.high))
        return Interval(rising(self.value), low, high)


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative standard deviation of one repeat, and its degrees of freedom; sd is None where nothing was repeated."""

    sd: float | None
    df: float


def ends(seen: Interval) -> tuple[float, float]:
    """Both ends of an interval, as wide as can be where the noise is unknown."""
    return (
        -math.inf if seen.low is None else seen.low,
        math.inf if seen.high is None else seen.high,
    )


def t_975(df: float) -> float:
    """Student's t at 97.5 %."""
    return student_t.quantile(0.975, df)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    return fmean(values) if values else None


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Mean of those that were measured."""
    return mean([v for v in values if v is not None])


def per_second(number: float, window_s: tuple[float, float]) -> float:
    """A rate over a window; 0 where it has no extent, as that of a load of which no request was answered."""
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
    """Standard deviation of a sample of two or more, and 0 where all are alike.

    `statistics.stdev` does the same in fractions, whose last digits cost a gate that is drawn a thousand times most of
    its time. In any order of the values it is the same number.
    """
    ordered = sorted(values)
    away = [v - ordered[0] for v in ordered]
    centre = fmean(away)
    return math.hypot(*(d - centre for d in away)) / math.sqrt(len(values) - 1)


def pooled_sd(groups: Iterable[Sequence[float]]) -> Noise:
    """Standard deviation of values around their group's mean, pooled over groups. A group of one adds nothing."""
    squares, df = 0.0, 0
    for group in groups:
        if len(group) > 1:
            centre = fmean(group)
            squares += math.fsum((v - centre) ** 2 for v in group)
            df += len(group) - 1
    return Noise(math.sqrt(squares / df) if df else None, df)


def growth(log: float) -> float:
    """Relative change that a difference of logs stands for: exp(log) - 1, infinite where that is too large."""
    return math.expm1(log) if log < MAX_LOG else math.inf


def factor(log: Interval) -> Interval:
    """A difference of logs as a factor."""
    return log.mapped(lambda end: growth(end) + 1)


def times(seen: Interval) -> str:
    """A factor and its interval, if it has one: "1.23 times (95 %: 1.2 to 1.26)"."""
    ends = "" if seen.low is None or seen.high is None else f" (95 %: {seen.low:.3g} to {seen.high:.3g})"
    return f"{seen.value:.3g} times{ends}"


def student_interval(values: Sequence[float], value: float | None = None) -> Interval:
    """The mean of independent repeats with its interval (none for one repeat), or that interval around `value`."""
    centre = fmean(values)
    shown = centre if value is None else value
    if len(values) < 2:
        return Interval(shown)
    half = t_975(len(values) - 1) * sample_sd(values) / math.sqrt(len(values))
    return Interval(shown, shown - half, shown + half)


def possible(seen: Interval, most: float = math.inf) -> Interval:
    """The part of an interval that can be: its ends are cut at 0 and `most`. Where no part of it can be, there is
    none."""
    if seen.low is None or seen.high is None or seen.high < 0 or seen.low > most:
        return Interval(seen.value)
    return Interval(seen.value, max(seen.low, 0.0), min(seen.high, most))


def percent(share: float) -> str:
    """0.0789 as "7.9 %"."""
    return f"{round(100 * share, 1) + 0.0:g} %"


def percent_interval(seen: Interval) -> str:
    """An estimate and its interval, if it has one: "7.9 % (95 %: 7.1 % to 8.7 %)"."""
    if seen.low is None or seen.high is None:
        return percent(seen.value)
    return f"{percent(seen.value)} (95 %: {percent(seen.low)} to {percent(seen.high)})"
