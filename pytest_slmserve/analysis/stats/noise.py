"""Intervals of differences between points that were repeated a few times each, on hosts whose noise is not white.

Three levels: the course of a window, windows, launches. Windows scatter more than their own courses tell, since the
noise of a host is slow; the factor by which they do is about the same at all loads of a sweep, where the noise itself
differs by a hundred. So what is pooled over loads is that factor, and only as far as it is alike: each variance is
drawn towards the common one by as much as the variances agree (Smyth 2004, "Linear models and empirical Bayes methods",
section 6.2). Where points were measured equally often by several launches, the launch is the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from statistics import fmean, variance
from typing import NamedTuple

from pytest_slmserve.analysis.stats.estimates import Interval, grouped, quantile

TAIL = 0.025  # outside each end of a 95 % interval
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
    """Differences between samples of repeats, those next to each other alike: of a sweep ascending by load."""

    samples: tuple[Sample, ...]

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
        """The samples. What the courses of windows tell counts where all of them tell it."""
        if all(r.within is not None for sample in self.samples for r in sample):
            return self.samples
        return tuple(tuple(r._replace(within=None) for r in sample) for sample in self.samples)

    def between(self, first: int, second: int, tail: float = TAIL) -> Interval:
        """ln(mean of the second sample / mean of the first), and its interval. tail: probability outside each end. A
        sample has no noise against itself."""
        if first == second:
            return Interval(0.0, 0.0, 0.0)
        found = contrast(self._told[first], self._told[second])
        common = self._paired if found.in_turn else self._levels
        return self._interval(found.value, found.scale, moderated(found.ratio, found.df, common), tail)

    def mean(self, number: int, tail: float = TAIL) -> Interval:
        """ln(mean of a sample), and its interval. tail: probability outside each end."""
        sample = self._told[number]
        scale = fmean(map(_within, sample)) / len(sample)
        value = math.log(fmean(r.value for r in sample))
        return self._interval(value, scale, moderated(*_spread(sample), self._levels), tail)

    def _interval(self, value: float, scale: float, noise: tuple[float, float], tail: float) -> Interval:
        if not self.known:
            return Interval(value)
        ratio, df = noise
        half = quantile(1 - tail, df) * math.sqrt(ratio * scale)
        return Interval(value, value - half, value + half)


def contrast(first: Sequence[Repeat], second: Sequence[Repeat]) -> Contrast:
    """Return the contrast of two samples. Their repeats are paired with their neighbours in time if all were measured
    in turn and, where both samples are of the same launches, each pair is of one."""
    value = math.log(fmean(r.value for r in second) / fmean(r.value for r in first))
    scale = sum(fmean(map(_within, sample)) / len(sample) for sample in (first, second))
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
    return Contrast(value, scale, sum(ratio * df for ratio, df in spreads) / df if df else 0.0, df, False)


def launch_means(values: Iterable[tuple[object, float]]) -> list[float]:
    """Means of each launch where there are several that measured equally often, else the values."""
    each = [[value for _, value in of_one] for of_one in grouped(values, itemgetter(0)).values()]
    even = len(each) > 1 and len({*map(len, each)}) == 1
    return [fmean(of_one) for of_one in each] if even else [value for of_one in each for value in of_one]


def _spread(sample: Sequence[Repeat]) -> tuple[float, int]:
    """Variance of one repeat over what its course tells, and its degrees of freedom."""
    units = launch_means((r.launch, math.log(r.value)) for r in sample)
    if len(units) < 2:
        return 0.0, 0
    each = fmean(map(_within, sample)) * len(units) / len(sample)
    return variance(units) / each, len(units) - 1


def _within(repeat: Repeat) -> float:
    return 1.0 if repeat.within is None else repeat.within


def moderated(ratio: float, df: int, common: Prior) -> tuple[float, float]:
    """A variance drawn towards the common one, and its degrees of freedom: no more than all have."""
    if math.isinf(common.df):
        return common.ratio, max(common.most, 1)
    whole = common.df + df
    return (common.df * common.ratio + df * ratio) / whole, max(min(whole, common.most), 1)


def prior(variances: Sequence[tuple[float, int]]) -> Prior:
    """What variances with their degrees of freedom have in common, by the mean and the scatter of their logarithms.
    Equal in all but chance: the pooled variance, worth any number of degrees of freedom."""
    total = sum(df for _, df in variances)
    pooled = Prior(sum(v * df for v, df in variances) / total if total else 0.0, math.inf, total)
    floor = LEAST * sorted(v for v, _ in variances)[len(variances) // 2] if variances else 0.0
    if len(variances) < 3 or not floor:
        return pooled
    logs = [math.log(max(v, floor)) - digamma(df / 2) + math.log(df / 2) for v, df in variances]
    beyond = variance(logs) - fmean(trigamma(df / 2) for _, df in variances)
    if beyond <= 0:
        return pooled
    low, high = 1e-3, 1e6  # of the x with trigamma(x) = beyond, which falls with x
    for _ in range(60):
        half = math.sqrt(low * high)
        low, high = (half, high) if trigamma(half) > beyond else (low, half)
    half = math.sqrt(low * high)
    return Prior(math.exp(fmean(logs) + digamma(half) - math.log(half)), 2 * half, total)


def digamma(x: float) -> float:
    """Derivative of ln gamma(x) for x > 0 (Abramowitz and Stegun 1964, 6.3.5 and 6.3.18)."""
    below = 0.0
    while x < 6:
        below, x = below - 1 / x, x + 1
    y = 1 / x**2
    return below + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y / 252))


def trigamma(x: float) -> float:
    """Derivative of digamma(x) for x > 0 (Abramowitz and Stegun 1964, 6.4.6 and 6.4.12)."""
    below = 0.0
    while x < 6:
        below, x = below + 1 / x**2, x + 1
    y = 1 / x**2
    return below + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y / 42))
