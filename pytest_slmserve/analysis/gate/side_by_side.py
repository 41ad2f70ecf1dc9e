"""Decision of a gate whose sides share one GPU: each launch has several windows, in which the sides alternate.

A launch of both engines on one host is the unit that is repeated. Its effect on the ratio, for example by memory
placement, is common to all of its windows, and two or four launches cannot show its size. So the size is assumed from
earlier launches (`Allowance`: sd, df) and corrected by the present ones (moderated variance; Smyth 2004). With the
variance b of k launch means, and the variance w of a launch mean by its windows,

    V = (df (sd**2 + w) + (k - 1) b) / (df + k - 1)

has df + k - 1 degrees of freedom, and the standard error is the root of V / k. Neighboring windows may share slow noise
of the host, so w is the larger of the estimates from all windows and from four blocks of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, Self

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.estimates import TAIL, Interval, growth, percent
from pytest_slmserve.analysis.gate.decision import Better, Estimate, Pair, PairSeries, is_positive

THROWN_AWAY = 2  # pairs of windows at the beginning of each launch: one ABBA
FIRST_PAIRS = 8  # of windows, whose standard deviation shows how many a launch needs
FEWEST_PAIRS, MOST_PAIRS = 8, 40  # of windows in a launch; beyond, another launch shows more in the same time
BLOCKS = 4  # of neighboring pairs of windows
SURE = 1.2  # times the standard deviation of the first pairs, which may be small by luck
# Standard deviations of window pairs from which on the host determines their speed: an unchanged candidate then passes
# in at most 80% of gates.
EARLY_SPREAD, LATE_SPREAD = 0.13, 0.10
LEAST_BUSY = 0.7  # of the time: below it, the host's cores determine the throughput
LEAST_SD, MOST_SD = 0.005, 0.012  # of a calibration: few launches may agree by luck; above MOST_SD, launches decide
# Standard deviations between two launches, beyond which the assumed noise does not explain the difference. With 3.5 a
# gate of two endpoints would refuse 2% of unchanged candidates.
TOO_FAR = 4.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """Assumed variation between launches of both sides.

    Attributes:
        sd: standard deviation of the logarithm of the ratio, with `df` degrees of freedom.
        source: its origin, as text.
    """

    sd: float
    df: int
    source: str

    @classmethod
    def known(cls, sd: float, launches: int, source: str) -> Allowance:
        """Return the allowance from the standard deviation of a number of launches of equal sides."""
        return cls(max(sd, LEAST_SD), launches - 1, source)

    @property
    def refused(self) -> str:
        """Reason why no gate can rest on it, or ""."""
        if self.sd <= MOST_SD:
            return ""
        return f"launches of equal sides differ by {percent(self.sd)} (at most {percent(MOST_SD)}, by {self.source})"


# All committed pairs of launches give 0.67% with 24 degrees of freedom. It has fewer, because hosts differ.
COMMITTED = Allowance(0.008, 8, "all committed gates")
COMMITTED_CORES = replace(COMMITTED, sd=0.018)  # of own cores, with 18 degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeries(PairSeries):
    """Values of one endpoint in the windows of each launch.

    Attributes:
        pairs: geometric means of the sides in each launch.
        windows: logarithms of the ratios of the window pairs in each launch; empty if a value is missing.
    """

    windows: tuple[tuple[float, ...], ...]
    allowance: Allowance = COMMITTED

    unit: ClassVar[tuple[str, str]] = "launch", "launches"

    @classmethod
    def of(
        cls,
        name: str,
        better: Better,
        launches: Sequence[Sequence[Pair]],
        margin: float,
        allowance: Allowance = COMMITTED,
    ) -> WindowSeries:
        """Return the series of window pairs by launch."""
        pairs: list[Pair] = []
        windows: list[tuple[float, ...]] = []
        for launch in launches:
            logs = [(math.log(a), math.log(b)) for a, b in launch if is_positive(a) and is_positive(b)]
            whole = 0 < len(logs) == len(launch)
            windows.append(tuple(b - a for a, b in logs) if whole else ())
            baseline, candidate = (math.exp(fmean(side)) for side in zip(*logs)) if whole else (None, None)
            pairs.append((baseline, candidate))
        return cls(name, better, tuple(pairs), margin, windows=tuple(windows), allowance=allowance)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the logarithm of a window pair's ratio, averaged over launches."""
        found = [estimates.sample_sd(launch) for launch in self.whole() if len(launch) > 1]
        return math.sqrt(fmean(sd**2 for sd in found)) if found else None

    def with_costs(self, costs: Sequence[float]) -> Self:
        """Return this series with these mean costs, and with the variation of the first complete launch."""
        there = self.whole()[0]
        around = [each - fmean(there) for each in there]
        windows = tuple(tuple(self.sign * cost + each for each in around) for cost in costs)
        return replace(self, pairs=tuple((1.0, math.exp(self.sign * cost)) for cost in costs), windows=windows)

    def whole(self, n: int | None = None) -> list[tuple[float, ...]]:
        """Return the windows of the complete launches, of the first `n` or of all."""
        return [launch for launch in self.windows[:n] if launch]

    def estimate(self, n: int | None = None) -> Estimate | None:
        """Return the estimate of the first `n` launches, or of all complete ones; None if one of `n` is incomplete."""
        launches = self.whole(n)
        if not launches or len(launches) < (n or 0):
            return None
        means, prior, more = [fmean(launch) for launch in launches], self.allowance, len(launches) - 1
        assumed = prior.df * (prior.sd**2 + variance_of_mean(launches))
        seen = more * estimates.sample_sd(means) ** 2 if more else 0.0
        error = math.sqrt((assumed + seen) / (prior.df + more) / len(means))
        return Estimate(self.sign * fmean(means), error, prior.df + more)

    @property
    def interval(self) -> Interval:
        """Candidate over baseline, with its 95% interval."""
        seen = self.estimate()
        assert seen is not None
        mean, reach = self.sign * seen.mean, estimates.t_above(TAIL, seen.df) * seen.error
        return Interval(mean, mean - reach, mean + reach).mapped(math.exp)

    @property
    def strange(self) -> str:
        """Reason why launches differ by more than the allowance, or ""."""
        means = [fmean(launch) for launch in self.whole()]
        if len(means) < 2:
            return ""
        allowed = TOO_FAR * math.sqrt(2 * (self.allowance.sd**2 + variance_of_mean(self.whole())))
        if max(means) - min(means) <= allowed:
            return ""
        apart = percent(growth(max(means) - min(means)))
        return f"two launches differ by {apart} in the ratio of the sides (at most {percent(growth(allowed))} is noise)"


def variance_of_mean(launches: Sequence[Sequence[float]]) -> float:
    """Return the mean variance of a launch mean, by window pairs or by blocks of them, whichever is larger."""
    by_pairs, by_blocks = [], []
    for launch in launches:
        n = len(launch)
        blocks = [fmean(launch[n * i // BLOCKS : n * (i + 1) // BLOCKS]) for i in range(BLOCKS)]
        by_pairs.append(estimates.sample_sd(launch) ** 2 / n)
        by_blocks.append(estimates.sample_sd(blocks) ** 2 / BLOCKS)
    return max(fmean(by_pairs), fmean(by_blocks))


def pairs_wanted(first: Sequence[Sequence[float]], margin: float) -> int:
    """Return the number of window pairs per launch, a multiple of four, for the endpoint that needs most.

    They give the mean to a quarter of the margin, or to a tenth of itself if it is far beyond the margin.

    Args:
        first: logarithms of ratios of the first window pairs, by endpoint.
    """
    needed = max(SURE * estimates.sample_sd(each) / max(margin / 4, abs(fmean(each)) / 10) for each in first) ** 2
    return min(max(BLOCKS * math.ceil(needed / BLOCKS), FEWEST_PAIRS), MOST_PAIRS)


def host_decides(ratios: Sequence[float], busy: float | None) -> str:
    """Return why the host determines the throughput of a launch, or "".

    Args:
        ratios: logarithms of ratios of window pairs.
        busy: share of the time with a kernel, if known.
    """
    if busy is not None and busy < LEAST_BUSY:
        return f"a kernel runs for {percent(busy)} of the time (at least {percent(LEAST_BUSY)} is needed)"
    spread = estimates.sample_sd(ratios)
    limit = EARLY_SPREAD if len(ratios) <= FIRST_PAIRS else LATE_SPREAD
    if spread > limit:
        return f"windows of both sides scatter by {percent(spread)} (at most {percent(limit)})"
    return ""
