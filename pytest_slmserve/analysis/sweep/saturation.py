"""The saturation law of decoding: T(B) = T_inf * B / (B + b_half).

A step reads the weights once and each sequence's context: it takes b_half/T_inf seconds whatever the batch, and 1/T_inf
more for each sequence. From shapes, b_half is weight bytes / (context x KV bytes per token), and the fixed part weight
bytes / bandwidth; what a fit finds beyond that is the host and the launching of kernels. Fitted to the raw results that
belong to arXiv:2503.08311 (OPT-1.3B, batch 1 to 512) the law is nowhere off by more than 6 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.metrics.roofline import Peaks, Work
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval, possible, student_interval
from pytest_slmserve.analysis.stats.noise import launch_means
from pytest_slmserve.analysis.sweep.gains import valid_points
from pytest_slmserve.schema.errors import TooFewPoints

DESCRIBES = 0.15  # a law that is off by more at any point says nothing about that curve's steps
FEWEST_BATCHES = 3  # two parameters, and one batch to tell whether they fit


@dataclass(frozen=True, slots=True)
class Fit:
    """t_inf in output tokens/s, b_half in sequences, fixed_s: the part of a step that no batch changes, in seconds.

    Intervals are over repeats or launches, each repeat fitted by itself, and cut at 0; a single one has none. An
    estimate of b_half below 0, which cannot be, says that the points do not identify it. error_mean, error_max:
    relative error of the fitted step time over the points. n: repeats fitted.
    """

    t_inf: Interval
    b_half: Interval
    fixed_s: Interval
    error_mean: float
    error_max: float
    n: int

    @property
    def identified(self) -> bool:
        """Is it a law that can be?"""
        return self.b_half.value >= 0

    @property
    def describes(self) -> bool:
        """Is the law near enough to every point to speak of its parts?"""
        return self.error_max <= DESCRIBES

    def tokens_per_s(self, batch: float) -> float:
        """Output tokens/s that the law predicts for a batch."""
        return self.t_inf.value * batch / (batch + self.b_half.value)


def fit_step(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(T_inf, b_half) from pairs of batch and output tokens/s, three batches or more. Raises TooFewPoints.

    Least squares on the relative error of the step time B/T: 1 = T/T_inf + (T/B)(b_half/T_inf), which is linear in
    1/T_inf and b_half/T_inf and needs no starting values.
    """
    rows = list(points)
    if len({batch for batch, _ in rows}) < FEWEST_BATCHES:
        raise TooFewPoints(
            f"the saturation law needs {FEWEST_BATCHES} batches, there are {len({b for b, _ in rows})}",
            "a sweep over more concurrencies",
        )
    x = [rate for _, rate in rows]
    z = [rate / batch for batch, rate in rows]
    xx, xz, zz = (math.fsum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (x, z), (z, z)))
    sx, sz = math.fsum(x), math.fsum(z)
    per_sequence, fixed = (sx * zz - sz * xz), (sz * xx - sx * xz)  # both times the determinant, which is positive
    determinant = xx * zz - xz * xz
    if per_sequence <= 0 or determinant <= 0:
        raise TooFewPoints("throughput grows as fast as the batch: no saturation to fit", "larger concurrencies")
    return determinant / per_sequence, fixed / per_sequence


def fit_t_inf(points: Iterable[tuple[float, float]], b_half: float) -> float:
    """T_inf where b_half is known, from one pair of batch and output tokens/s or more. Raises TooFewPoints.

    Least squares on the relative error of the step time as well: 1 = (B + b_half)(T/B)/T_inf.
    """
    x = [(batch + b_half) * rate / batch for batch, rate in points]
    if not x:
        raise TooFewPoints("the saturation law needs a point, there is none", "a sweep over some concurrencies")
    return math.fsum(v * v for v in x) / math.fsum(x)


def fit(points: Iterable[Point], b_half: float | None = None) -> Fit:
    """The law through the means of the valid points, with intervals from the repeats. Raises TooFewPoints.

    b_half: where it is known, for instance from shapes; then T_inf alone is fitted, and b_half has no interval.
    The i-th repeats of every point make the i-th fit, as far as all points have one; fits of one launch count as one
    where several launches measured equally often.
    """
    valid = with_batches(points)
    means = [(fmean(p.batch_repeats), fmean(p.repeats)) for p in valid]
    t_inf, half = fit_law(means, b_half)
    repeats = min(len(p.repeats) for p in valid)
    each = [fit_law([(p.batch_repeats[i], p.repeats[i]) for p in valid], b_half) for i in range(repeats)]
    launches = [tuple(p.used[i][0].launch for p in valid if p.used) for i in range(repeats)]

    def around(value: float, of: Callable[[float, float], float]) -> Interval:
        return possible(student_interval(launch_means(zip(launches, (of(*law) for law in each))), value))

    errors = [abs((batch + half) / t_inf * rate / batch - 1) for batch, rate in means]
    return Fit(
        t_inf=around(t_inf, lambda t, b: t),
        b_half=around(half, lambda t, b: b) if b_half is None else Interval(half),
        fixed_s=around(half / t_inf, lambda t, b: b / t),
        error_mean=fmean(errors),
        error_max=max(errors),
        n=repeats,
    )


def with_batches(points: Iterable[Point]) -> list[Point]:
    """The valid points of which every repeat told its batch, ascending: what a law is fitted to."""
    return [p for p in valid_points(list(points)) if len(p.batch_repeats) == len(p.repeats)]


def fit_law(pairs: Sequence[tuple[float, float]], b_half: float | None) -> tuple[float, float]:
    """(T_inf, b_half) from pairs of batch and output tokens/s, both fitted, or T_inf alone where b_half is known.
    Raises TooFewPoints."""
    return fit_step(pairs) if b_half is None else (fit_t_inf(pairs, b_half), b_half)


def fixed_s_from_shapes(work: Work, peaks: Peaks) -> float:
    """Seconds to read the weights once at the data sheet's bandwidth."""
    return work.weight_bytes / peaks.bytes_per_s
