"""Do engines on the GPUs of one host disturb each other? The same cell alone, and beside others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.points.sweep_points import points_of
from pytest_slmserve.analysis.stats.estimates import (
    Interval,
    Noise,
    growth,
    log_ratio,
    percent,
    pooled_relative_sd,
)
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Verdict, all_of, within
from pytest_slmserve.schema.records import Measurement

CLAIM = "neighbours-do-not-disturb"


@dataclass(frozen=True, slots=True)
class InterferencePair:
    """One load. change: relative, of output tokens/s, from beside others to alone."""

    concurrency: int
    change: Interval


def has_neighbours(curve: Curve) -> bool:
    """Was any of it measured while engines of the same run worked on other GPUs?"""
    return any(m.neighbours for m in curve.measurements)


def pairs_of(curve: Curve) -> tuple[InterferencePair, ...]:
    """The loads that were measured in both ways."""
    beside = _by_load([m for m in curve.measurements if m.neighbours])
    alone = _by_load([m for m in curve.measurements if not m.neighbours])
    noise = pooled_relative_sd((*beside.values(), *alone.values()))
    return tuple(
        InterferencePair(load, _change(beside[load], alone[load], noise))
        for load in sorted(beside.keys() & alone.keys())
    )


def _by_load(measurements: Sequence[Measurement]) -> dict[int, tuple[float, ...]]:
    return {point.concurrency: point.repeats for point in points_of(measurements) if point.valid}


def _change(beside: Sequence[float], alone: Sequence[float], noise: Noise) -> Interval:
    log = log_ratio(beside, alone, noise)
    low, high = (None if end is None else growth(end) for end in (log.low, log.high))
    return Interval(growth(log.value), low, high)


def neighbours_do_not_disturb(curve: Curve, margin: float) -> Verdict:
    """Is each cell that was measured in both ways the same within the margin? value, low, high: of the one that is
    farthest from it."""
    pairs = pairs_of(curve)
    if not pairs:
        why = "none of its loads was measured both alone and beside others"
        return Verdict.undecided(CLAIM, curve.subject, why, margin)
    worst = max(pairs, key=lambda pair: abs(math.log1p(max(pair.change.value, -1 + 1e-12))))
    state = all_of(within(pair.change, -margin, margin) for pair in pairs)
    told = "; ".join(f"{_signed(pair.change)} at {pair.concurrency}" for pair in pairs)
    why = f"output tokens/s alone against beside others: {told} in flight (bound {percent(margin)})"
    seen, records = worst.change, tuple(m.id for m in curve.measurements)
    return Verdict(CLAIM, curve.subject, state, why, seen.value, seen.low, seen.high, margin, len(records), records)


def _signed(seen: Interval) -> str:
    sign = "+" if seen.value >= 0 else ""
    if seen.low is None or seen.high is None:
        return f"{sign}{percent(seen.value)}"
    return f"{sign}{percent(seen.value)} (95 %: {percent(seen.low)} to {percent(seen.high)})"
