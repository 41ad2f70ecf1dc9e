"""Where a history changes its level: change points by E-divisive means.

Matteson and James 2014, "A nonparametric approach for multiple change point analysis of multivariate data",
arXiv:1306.4933. Hunter (Fleming et al. 2023, arXiv:2301.03034) and Apache Otava find regressions with it. Otava 0.8.0
pins NumPy 2.2.0, which excludes vLLM, so the method is here, and a test holds it against Otava's answers. It differs in
the test of a split, which here is that of Matteson and James: how often the values in a random order can be split as
well. Otava's t-test has no known level, because a split was chosen before it is tested.

A value is that of a whole release. Launches of one release share host and day, so they would pass a host for a step.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from pytest_slmserve.analysis.estimates import TAIL, Interval, factor, t_above

LEVEL = 0.05  # share of histories without a step in which one is found, at most
ORDERS = 999  # random orders of the values
LEAST_VALUES = 8  # of seven values 3 of 70 orders and their mirrors split as well as the best: more than `LEVEL`
SHORTEST = 2  # values on each side of a split: one has no scatter


@dataclass(frozen=True, slots=True)
class LevelStep:
    """A change of level. at: index of its first value. ratio: of the levels after and before, up to the next steps,
    with a 95 % interval by the scatter around all levels. chance: share of random orders that split as well."""

    at: int
    ratio: Interval
    chance: float


def level_steps(values: Sequence[float]) -> list[LevelStep]:
    """Return the steps in a series of positive values, the first one first; none of fewer than `LEAST_VALUES`."""
    logs, chance = [math.log(value) for value in values], random.Random(0)
    levels, shares = [logs], dict[int, float]()  # by index of the first value
    while len(values) >= LEAST_VALUES:
        apart, part, at = _best_of(levels)
        as_good = 1  # the order as it is
        for _ in range(ORDERS):
            as_good += _best_of([chance.sample(level, len(level)) for level in levels])[0] >= apart * (1 - 1e-9)
            if as_good > LEVEL * (ORDERS + 1):
                break
        else:
            shares[sum(map(len, levels[:part])) + at] = as_good / (ORDERS + 1)
            levels[part : part + 1] = [levels[part][:at], levels[part][at:]]
            continue
        break
    squares = sum((log - fmean(level)) ** 2 for level in levels for log in level)
    steps = []
    for at, (before, after) in zip(sorted(shares), pairwise(levels)):
        seen, df = fmean(after) - fmean(before), len(logs) - len(levels)
        half = t_above(TAIL, df) * math.sqrt(squares / df * (1 / len(before) + 1 / len(after)))
        steps.append(LevelStep(at, factor(Interval(seen, seen - half, seen + half)), shares[at]))
    return steps


def _best_of(levels: Sequence[Sequence[float]]) -> tuple[float, int, int]:
    """Return the distance of the best split of any level, the number of that level, and where in it the split is."""
    splits = map(best_split, levels)
    return max((apart, number, at) for number, (apart, at) in enumerate(splits))


def best_split(values: Sequence[float]) -> tuple[float, int]:
    """Return the largest distance of two parts that follow each other, of which the first one begins a series, and the
    index at which the second one begins; minus infinity if the series is too short. The distance is the energy
    statistic of the parts by absolute differences, times n m / (n + m)."""
    n, best = len(values), (-math.inf, 0)
    # Sums of the differences of all pairs: of the first values, and, from the last index down, of those from it on.
    first = [0.0, *accumulate(sum([abs(b - a) for a in values[:i]]) for i, b in enumerate(values))]
    second = [0.0] * (n + 1)
    for at in range(n - 1, SHORTEST - 1, -1):
        value = values[at]
        ends = accumulate([abs(value - other) for other in values[at + 1 :]])
        second[at + 2 :] = [pairs + more for pairs, more in zip(second[at + 2 :], ends)]
        for end in range(at + SHORTEST, n + 1):
            m, inside, beyond = end - at, first[at], second[end]
            apart = (first[end] - inside - beyond) / (at * m) - inside / (at * (at - 1)) - beyond / (m * (m - 1))
            if (scaled := 2 * apart * at * m / end) > best[0]:
                best = scaled, at
    return best
