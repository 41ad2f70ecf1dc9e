"""Goodput over several loads: where there is most of it, and up to which load enough requests are good.

A load is a rate of requests, or a number of them in flight. The second question is what Y. Zhong and others (DistServe,
arXiv:2401.09670) call goodput: the highest rate at which a wanted share of the requests, 90 % say, is good. Neither
answer says more than was measured: at the ends of the loads, and beside an invalid measurement, it says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from statistics import fmean

from pytest_slmserve.analysis.stats.estimates import percent

RATE, IN_FLIGHT = "requests/s", "in flight"
ATTAINMENT = 0.9  # as in DistServe


@dataclass(frozen=True, slots=True)
class Peak:
    """The load with the highest goodput, which is in requests per second, and the loads measured next to it.

    below, above: None where the peak is the smallest or the largest load of which something is known. Then more goodput
    is not excluded on that side. unknown: loads between these two whose measurements are invalid. unit: of loads.
    """

    load: float
    per_s: float
    below: float | None
    above: float | None
    unknown: tuple[float, ...] = ()
    unit: str = RATE

    @property
    def bracketed(self) -> bool:
        """Was no more seen on both sides, and is nothing unknown in between?"""
        return self.below is not None and self.above is not None and not self.unknown

    @property
    def why(self) -> str:
        """The finding in a sentence."""
        if not self.per_s:
            return f"no request is good at any load {self._known}{_but_unknown(self.unknown)}"
        found = f"most goodput, {self.per_s:.4g}/s, at {self.load:g} {self.unit}"
        if self.above is None:
            end = f"the largest load {self._known}: a larger one may have more"
        elif self.below is None:
            end = f"the smallest load {self._known}: a smaller one may have more"
        else:
            end = f"no more at {self.below:g} and {self.above:g}"
        return f"{found}, {end}{_but_unknown(self.unknown)}"

    @property
    def _known(self) -> str:
        return "with a valid measurement" if self.unknown else "measured"


@dataclass(frozen=True, slots=True)
class HighestLoad:
    """DistServe's goodput: the highest load at which, as at every smaller one that was measured, the share `goal` of
    the requests or more is good.

    load, attainment: None where it is not reached at the smallest load. above: the next load with what is attained
    there; None where `load` is the largest of which something is known. unknown: loads up to `above` whose measurements
    are invalid. unit: of loads.
    """

    goal: float
    load: float | None
    attainment: float | None
    above: tuple[float, float] | None
    unknown: tuple[float, ...] = ()
    unit: str = RATE

    @property
    def why(self) -> str:
        """The finding in a sentence."""
        more = "" if self.above is None else f"{percent(self.above[1])} are at {self.above[0]:g}"
        if self.load is None:
            known = "the smallest with a valid measurement" if self.unknown else "the smallest"
            found = f"at no load measured are {percent(self.goal)} of the requests good: {more}, {known}"
        else:
            seen = f"{self.load:g} {self.unit} ({percent(self.attainment or 0.0)})"
            end = f"; {more}" if more else ", the largest load measured: the limit is not reached"
            found = f"{percent(self.goal)} of the requests are good up to {seen}{end}"
        return f"{found}{_but_unknown(self.unknown)}"


def peak(points: Sequence[tuple[float, float]], invalid: Sequence[float] = (), unit: str = RATE) -> Peak | None:
    """The load with the highest goodput, from pairs of (load, goodput), repeats of a load averaged; None for no pairs.

    Among loads with equal goodput the smallest: more load for the same is no gain. invalid: loads with measurements
    that are not valid; a load that also has a valid repeat is not unknown.
    """
    means = _means(points)
    if not means:
        return None
    best = max(range(len(means)), key=lambda index: means[index][1])
    below = means[best - 1][0] if best > 0 else None
    above = means[best + 1][0] if best + 1 < len(means) else None
    return Peak(*means[best], below=below, above=above, unknown=_between(below, above, means, invalid), unit=unit)


def highest_load(
    points: Sequence[tuple[float, float]], goal: float = ATTAINMENT, invalid: Sequence[float] = (), unit: str = RATE
) -> HighestLoad | None:
    """The highest load at which a share `goal` of the requests is good, as at every smaller load. points: pairs of
    (load, attainment); repeats of a load are averaged. None for no pairs. invalid: loads with measurements that are not
    valid; a load that also has a valid repeat is not unknown."""
    means = _means(points)
    if not means:
        return None
    kept = list(takewhile(lambda point: point[1] >= goal, means))
    load, attainment = kept[-1] if kept else (None, None)
    above = means[len(kept)] if len(kept) < len(means) else None
    unknown = _between(None, above and above[0], means, invalid)
    return HighestLoad(goal, load, attainment, above, unknown, unit)


def _between(
    below: float | None, above: float | None, known: Sequence[tuple[float, float]], invalid: Sequence[float]
) -> tuple[float, ...]:
    """Invalid loads between these two that have no valid measurement beside."""
    valid, low, high = {rate for rate, _ in known}, below or 0.0, math.inf if above is None else above
    return tuple(rate for rate in sorted({*invalid}) if low < rate < high and rate not in valid)


def _but_unknown(rates: Sequence[float]) -> str:
    if not rates:
        return ""
    return f"; what was measured at {', '.join(f'{rate:g}' for rate in rates)} is invalid and may not be believed"


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    by_load = groupby(sorted(points), key=lambda point: point[0])
    return [(load, fmean(value for _, value in same)) for load, same in by_load]
