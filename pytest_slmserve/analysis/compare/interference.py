"""Do engines on the GPUs of one host disturb each other? The same cell alone, and beside others."""

from __future__ import annotations

from pytest_slmserve.analysis.points.sweep_points import Point, at_common_loads, points_of, ratio
from pytest_slmserve.analysis.stats.estimates import Interval, percent, percent_interval
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Verdict, every_within

CLAIM = "neighbours-do-not-disturb"


def pairs_of(curve: Curve) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """The points beside others and alone, of each load that was measured in both ways, and all points."""
    beside, alone = (
        [p for p in points_of(m for m in curve.measurements if bool(m.neighbours) is busy) if p.valid]
        for busy in (True, False)
    )
    return at_common_loads(beside, alone)


def neighbours_do_not_disturb(curve: Curve, margin: float) -> Verdict:
    """Is each cell that was measured in both ways the same within the margin? value, low, high: of output tokens/s
    alone over those beside others, at the load that decides."""
    pairs, among = pairs_of(curve)
    if not pairs:
        why = "none of its loads was measured both alone and beside others"
        return Verdict.undecided(CLAIM, curve.subject, why, margin)

    def changes(several: int = 1) -> list[tuple[Interval, int]]:
        return [(ratio(q, p, among, several=several).mapped(lambda end: end - 1), p.concurrency) for p, q in pairs]

    state, decisive, _ = every_within(-margin, margin, changes)
    told = "; ".join(f"{'+' if seen.value >= 0 else ''}{percent_interval(seen)} at {n}" for seen, n in changes())
    why = f"output tokens/s alone against beside others: {told} in flight (bound {percent(margin)})"
    return Verdict.from_interval(
        CLAIM, curve.subject, state, why, decisive, margin, *(point for pair in pairs for point in pair)
    )
