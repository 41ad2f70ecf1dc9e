"""Looking at the data more than once: at which pairs to look, and how large a t must be to decide there.

One-sided group-sequential boundaries with Pocock's kind of spending (Lan and DeMets 1983): what may be spent on false
alarms is spent a little at each look. Boundaries are found for normal increments by numerical integration, and each
nominal tail then is that of Student's t (the significance-level approach of Jennison and Turnbull 2000, chapter 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

from pytest_slmserve.analysis.stats import student_t

# A look after 3 pairs would save on quiet hosts what it costs on others: four unchanged endpoints take 3.0 pairs and
# not 4.0 at a noise of 0.3 %, but 5.0 and not 4.5 at 1 %. And it errs more: t has 2 degrees of freedom there, a small
# spread is often luck, and at 2 % of candidates 5 % worse 2.4 in ten thousand pass and not 0.9 (a million gates each).
FIRST_LOOKS = (4, 6, 8, 12)
GROWTH = 1.5  # of the number of pairs, between later looks
SMALL_SAMPLES = 1.15  # with 3 to 11 degrees of freedom the approach spends 10 to 14 % more than planned (simulated)
GRID = 200  # intervals
REACH = 7.0  # standard deviations; nothing that matters lies farther out
BISECTIONS = 60
NORMAL = NormalDist()


def looks_until(pairs: int) -> tuple[int, ...]:
    """Numbers of pairs at which to look: 4, 6, 8, 12, then half as many more each time, and last at `pairs`."""
    looks = [n for n in FIRST_LOOKS if n <= pairs]
    while looks and (later := 2 * round(looks[-1] * GROWTH / 2)) <= pairs and looks[-1] >= FIRST_LOOKS[-1]:
        looks.append(later)
    return tuple(looks if not looks or looks[-1] == pairs else [*looks, pairs])


@lru_cache(maxsize=256)
def boundaries(looks: tuple[int, ...], maximum: int, alpha: float) -> tuple[float, ...]:
    """Critical values of t at each look, so that one of them is exceeded with probability `alpha` at most where nothing
    has changed. maximum: pairs at which all of it is spent."""
    return tuple(student_t.above(tail, n - 1) for tail, n in zip(tails(looks, maximum, alpha), looks))


@lru_cache(maxsize=256)
def tails(looks: tuple[int, ...], maximum: int, alpha: float) -> tuple[float, ...]:
    """Tail probability of each boundary, taken by itself."""
    return tuple(_nominal_tails(looks, [spent(n / maximum, alpha / SMALL_SAMPLES) for n in looks]))


def spent(share: float, alpha: float) -> float:
    """Part of `alpha` to be spent when `share` of the pairs is measured (Lan and DeMets 1983, Pocock's kind)."""
    return alpha * math.log(1 + (math.e - 1) * min(1.0, share))


def _nominal_tails(looks: Sequence[int], planned: Sequence[float]) -> list[float]:
    """Tail probability at each boundary, taken by itself, for sums of standard normal increments.

    `density` is that of the sum at the last look, of those paths which no boundary has stopped.
    """
    tails = [planned[0]]
    last, sums = looks[0], _grid(looks[0], NORMAL.inv_cdf(1 - planned[0]) * math.sqrt(looks[0]))
    density = [NORMAL.pdf(s / math.sqrt(last)) / math.sqrt(last) for s in sums]
    for n, spend in zip(looks[1:], (after - before for before, after in pairwise(planned))):
        step = math.sqrt(n - last)
        weights = [w * d for w, d in zip(_weights(sums), density)]
        stop = _where(weights, sums, step, spend, REACH * math.sqrt(n))
        tails.append(NORMAL.cdf(-stop / math.sqrt(n)))
        following = _grid(n, stop)
        density = [sum(w * NORMAL.pdf((y - s) / step) for w, s in zip(weights, sums)) / step for y in following]
        last, sums = n, following
    return tails


def _where(weights: Sequence[float], sums: Sequence[float], step: float, spend: float, high: float) -> float:
    """The sum that is exceeded, at the next look and not before, with probability `spend`."""
    low = 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        exceeded = sum(w * NORMAL.cdf((s - middle) / step) for w, s in zip(weights, sums))
        low, high = (middle, high) if exceeded > spend else (low, middle)
    return high


def _grid(n: int, stop: float) -> list[float]:
    low = -REACH * math.sqrt(n)
    return [low + (stop - low) * i / GRID for i in range(GRID + 1)]


def _weights(points: Sequence[float]) -> list[float]:
    """Simpson's rule."""
    third = (points[1] - points[0]) / 3
    inner = [third * (4 if i % 2 else 2) for i in range(1, GRID)]
    return [third, *inner, third]
