"""Change points of a history by E-divisive means.

Matteson and James 2014, "A nonparametric approach for multiple change point analysis of multivariate data",
arXiv:1306.4933. Hunter (Fleming et al. 2023, arXiv:2301.03034) and Apache Otava find regressions with it. Otava 0.8.0
pins NumPy 2.2.0, which excludes vLLM, so the method is implemented here. Unlike Otava, it tests a split by random
orders of the values, as Matteson and James do. Otava's t-test has no known level, because its split is chosen first.

A value represents a whole release, because a change of host would look like a step between launches.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from pytest_slmserve.analysis.estimates import TAIL, Interval, factor, t_above

LEVEL = 0.05  # largest share of histories without a step in which one is found
ORDERS = 999  # random orders of the values
LEAST_VALUES = 8  # with seven values, 3 of 70 orders and their mirrors split as well as the best: more than `LEVEL`
SHORTEST = 2  # values on each side of a split, because a single value has no scatter


@dataclass(frozen=True, slots=True)
class LevelStep:
    """A change of level.

    Attributes:
        at: index of the first value of the new level.
        ratio: level after over level before, with a 95% interval from the scatter around all levels.
        chance: share of random orders that split as well.
    """

    at: int
    ratio: Interval
    chance: float


def level_steps(values: Sequence[float]) -> list[LevelStep]:
    """Return the steps in a series of positive values in order; empty for fewer than `LEAST_VALUES` values."""
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
    """Return the distance of the best split, the index of its level, and its index in that level."""
    splits = map(best_split, levels)
    return max((apart, number, at) for number, (apart, at) in enumerate(splits))


def best_split(values: Sequence[float]) -> tuple[float, int]:
    """Return the largest distance between two adjacent parts of a series, and the index where the second part begins.

    The first part begins with the series, and the second may end before it does. The distance is the energy statistic
    of absolute differences times n m / (n + m), or minus infinity if the series is too short.
    """
    n, best = len(values), (-math.inf, 0)
    # Sums of all pairwise differences: of values[:i], and, while `at` decreases, of values[at:i].
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
