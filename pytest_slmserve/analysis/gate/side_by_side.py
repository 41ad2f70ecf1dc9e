"""Decision of a gate whose sides live on one GPU at once: windows of both sides alternate, several in each launch.

The unit that is repeated is a launch of both engines, on one host. What a launch does to the ratio of the sides, for
example by where their memory lies, is common to all of its windows, and two or four launches cannot tell how large that
is. So it is assumed, from earlier launches (`Allowance`: sd, df), and corrected by the launches at hand as they come (a
moderated variance; Smyth 2004). With the variance b of k launch means, and w that of one launch mean by its windows,

    V = (df (sd**2 + w) + (k - 1) b) / (df + k - 1)

has df + k - 1 degrees of freedom, and the standard error is the root of V / k.

Neighbouring windows may share a slow part of the host's noise. So w is the larger one of what all windows and of what
four blocks of them say.
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
FIRST_PAIRS = 8  # of windows, whose spread tells how many a launch needs
FEWEST_PAIRS, MOST_PAIRS = 8, 40  # of windows in a launch; beyond, a further launch tells more in the same time
BLOCKS = 4  # of neighbouring pairs of windows
SURE = 1.2  # times the spread of the first pairs, which may be small by luck
# Of pairs of windows, where the host decides how fast they are: an unchanged candidate passes in 80 % of gates at most.
EARLY_SPREAD, LATE_SPREAD = 0.13, 0.10
LEAST_BUSY = 0.7  # of the time: below it throughput as seen is that of the host's cores
LEAST_SD, MOST_SD = 0.005, 0.012  # of a calibration: a few launches may agree by luck; more, and launches decide
# Standard deviations of the difference of two launches, which are then none of the noise assumed. With 3.5 a gate of
# two endpoints would refuse 2 % of unchanged candidates.
TOO_FAR = 4.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """What launches of both sides may differ by: the standard deviation of the logarithm of the ratio, and the degrees
    of freedom by which it is known. source: where it comes from."""

    sd: float
    df: int
    source: str

    @classmethod
    def measured(cls, launches: Sequence[Sequence[float]], source: str) -> Allowance:
        """Return the allowance by launches of two equal sides. launches: logarithms of ratios, of pairs of windows."""
        return cls.known(estimates.sample_sd([fmean(launch) for launch in launches]), len(launches), source)

    @classmethod
    def known(cls, sd: float, launches: int, source: str) -> Allowance:
        """Return the allowance by so many launches of two equal sides."""
        return cls(max(sd, LEAST_SD), launches - 1, source)

    @property
    def refused(self) -> str:
        """Reason why no gate can rest on it, which is that launches differ too much; empty if one can."""
        if self.sd <= MOST_SD:
            return ""
        return f"launches of equal sides differ by {percent(self.sd)} (at most {percent(MOST_SD)}, by {self.source})"


# By all committed pairs of launches it is 0.67 %, with 24 degrees of freedom: fewer here, as those hosts were others.
COMMITTED = Allowance(0.008, 8, "all committed gates")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeries(PairSeries):
    """Values of one endpoint in the windows of each launch of both sides. pairs: of each launch, the geometric means of
    each side. windows: of each launch, the logarithms of candidate over baseline of its pairs of windows."""

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
        """Return the series of pairs of windows, by launch. A launch in which a value is missing has none."""
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
        """Standard deviation of the logarithm of the ratio of one pair of windows, in the mean over launches."""
        found = [estimates.sample_sd(launch) for launch in self.whole() if len(launch) > 1]
        return math.sqrt(fmean(sd**2 for sd in found)) if found else None

    def with_costs(self, costs: Sequence[float]) -> Self:
        """Return this series with launches that have these logarithms of cost ratios in the mean, and whose windows
        scatter as those of the first launch."""
        there = self.whole(1)[0]
        around = [each - fmean(there) for each in there]
        windows = tuple(tuple(self.sign * cost + each for each in around) for cost in costs)
        return replace(self, pairs=tuple((1.0, math.exp(self.sign * cost)) for cost in costs), windows=windows)

    def whole(self, n: int | None = None) -> list[tuple[float, ...]]:
        """Return the windows of those launches, of the first n or of all, that have all values."""
        return [launch for launch in self.windows[:n] if launch]

    def estimate(self, n: int | None = None) -> Estimate | None:
        """Return what the first n launches say, or all that have all values; None if one of the n lacks a value."""
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
        """Candidate over baseline, over all launches with all values, with its 95 % interval."""
        seen = self.estimate()
        assert seen is not None
        mean, reach = self.sign * seen.mean, estimates.t_above(TAIL, seen.df) * seen.error
        return Interval(mean, mean - reach, mean + reach).mapped(math.exp)

    @property
    def strange(self) -> str:
        """Reason why its launches are not as the allowance says: two are too far apart. Empty if they are."""
        means = [fmean(launch) for launch in self.whole()]
        if len(means) < 2:
            return ""
        allowed = TOO_FAR * math.sqrt(2 * (self.allowance.sd**2 + variance_of_mean(self.whole())))
        if max(means) - min(means) <= allowed:
            return ""
        apart = percent(growth(max(means) - min(means)))
        return f"two launches differ by {apart} in the ratio of the sides (at most {percent(growth(allowed))} is noise)"


def variance_of_mean(launches: Sequence[Sequence[float]]) -> float:
    """Return the variance of the mean of a launch's pairs of windows, in the mean over launches: by the scatter of the
    pairs or of their blocks, whichever is larger. Each launch has at least BLOCKS pairs."""
    by_pairs, by_blocks = [], []
    for launch in launches:
        n = len(launch)
        blocks = [fmean(launch[n * i // BLOCKS : n * (i + 1) // BLOCKS]) for i in range(BLOCKS)]
        by_pairs.append(estimates.sample_sd(launch) ** 2 / n)
        by_blocks.append(estimates.sample_sd(blocks) ** 2 / BLOCKS)
    return max(fmean(by_pairs), fmean(by_blocks))


def pairs_wanted(first: Sequence[Sequence[float]], margin: float) -> int:
    """Return how many pairs of windows each launch needs, so that its mean is known to a quarter of the margin, or to a
    tenth of itself if it is far beyond the margin: a multiple of four, by the endpoint that needs most. first:
    logarithms of ratios of its first pairs."""
    needed = max(SURE * estimates.sample_sd(each) / max(margin / 4, abs(fmean(each)) / 10) for each in first) ** 2
    return min(max(BLOCKS * math.ceil(needed / BLOCKS), FEWEST_PAIRS), MOST_PAIRS)


def host_decides(ratios: Sequence[float], busy: float | None) -> str:
    """Return why throughput as seen cannot be judged after a launch, because it is the host's; empty if it can.

    Args:
        ratios: Logarithms of the ratios of its pairs of windows, or of the first of them.
        busy: Share of the time of these windows in which a kernel ran; None if it is unknown.
    """
    if busy is not None and busy < LEAST_BUSY:
        return f"a kernel runs for {percent(busy)} of the time (at least {percent(LEAST_BUSY)} is needed)"
    spread = estimates.sample_sd(ratios)
    limit = EARLY_SPREAD if len(ratios) <= FIRST_PAIRS else LATE_SPREAD
    if spread > limit:
        return f"windows of both sides scatter by {percent(spread)} (at most {percent(limit)})"
    return ""
