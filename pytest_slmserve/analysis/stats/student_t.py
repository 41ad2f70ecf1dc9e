"""Student's t: tail and quantile, by the regularised incomplete beta function (DLMF 8.17)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

TINY = 1e-300
CLOSE = 1e-14
TERMS = 500
HALVINGS = 200
POINTS = 400  # of an integral over the spread that a sample may have
NORMAL = NormalDist()


def survival(t: float, df: float) -> float:
    """P(T > t) for `df` degrees of freedom, a whole number or not. Raises ValueError where there is none."""
    if df < 1:
        raise ValueError(f"{df} degrees of freedom: at least 1 is needed")
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return tail if t >= 0 else 1 - tail


@lru_cache(maxsize=1024)
def quantile(p: float, df: float) -> float:
    """The t that a share `p` of all values lies below, 0.5 <= p < 1."""
    return above(1 - p, df)


@lru_cache(maxsize=1024)
def above(tail: float, df: float) -> float:
    """The t that a share `tail` of all values lies above, 0 < tail <= 0.5: exact for small tails too."""
    low, high = 0.0, 1.0
    while survival(high, df) > tail:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if survival(middle, df) > tail else (low, middle)
    return high


@lru_cache(maxsize=1024)
def shift(power: float, critical: float, df: int) -> float:
    """Distance of the true mean from 0, in its standard errors, at which t exceeds `critical` with probability `power`.
    0.5 <= power < 1. The distribution is noncentral t, as a normal value over a spread with its own probabilities."""
    spreads, low, high = _spreads(df), 0.0, 1.0
    while _power(high, critical, spreads) < power:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _power(middle, critical, spreads) < power else (low, middle)
    return high


def _power(mean: float, critical: float, spreads: Sequence[tuple[float, float]]) -> float:
    return sum(weight * NORMAL.cdf(mean - critical * spread) for spread, weight in spreads)


def _spreads(df: int) -> list[tuple[float, float]]:
    """Standard deviations of samples over the true one, and their probabilities: chi over the root of df."""
    step = (1 + 10 / math.sqrt(2 * df)) / POINTS
    log_front = math.log(2 * step) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    points = [step * i for i in range(1, POINTS)]
    return [(s, math.exp(log_front + (df - 1) * math.log(s) - df * s * s / 2)) for s in points]


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0 or x >= 1:
        return float(x >= 1)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _continued_fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function, by Lentz's method as modified by Thompson and Barnett
    (1986)."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = _not_zero(1 + term / c), 1 / _not_zero(1 + term * d)
            found *= c * d
        if abs(c * d - 1) < CLOSE:
            break
    return found


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY
