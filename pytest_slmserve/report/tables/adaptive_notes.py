"""Notes on loads that an adaptive sweep did not measure: the reason, and the saturation law's prediction."""

from __future__ import annotations

from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.analysis.sweep.adaptive import law_error
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.saturation import DESCRIBES
from pytest_slmserve.report.numbers import counted, figure, listed


def amount(curve: Curve) -> str:
    """ "4 points", and of an adaptive sweep how many loads it did without."""
    points = counted(len(curve.points), "point")
    if not curve.adaptive:
        return points
    ended = f"{counted(len(curve.unneeded), 'planned load')} not needed" if not curve.missing else "not at its end"
    return f"{points} (adaptive sweep, {ended})"


def remark(curve: Curve) -> str:
    """A line below the table; empty where nothing was left out."""
    if not curve.unneeded:
        return ""
    rows = [f"{figure(p.tokens_per_s.value)} at {p.concurrency}" for p in curve.predictions]
    if not rows:
        return f"not measured, not needed: {listed(curve.unneeded)} in flight; {_trust(curve)}"
    return f"not measured, predicted: tokens/s {', '.join(rows)} in flight; {_trust(curve)}"


def skip_note(curve: Curve, concurrency: int) -> str:
    """The reason of a skipped item."""
    if concurrency not in curve.unneeded:
        return f"the adaptive sweep ended early: {listed(curve.missing)} in flight was next"
    text = "not needed: the adaptive sweep found the plateau without it"
    found = next((p.tokens_per_s for p in curve.predictions if p.concurrency == concurrency), None)
    if found is None:
        return f"{text}; {_trust(curve)}"
    seen = f"{figure(found.value)} tokens/s ({figure(found.low)} to {figure(found.high)})"
    return f"{text}; predicted: {seen}; {_trust(curve)}"


def _trust(curve: Curve) -> str:
    """The saturation law's largest error at a measured load, given only its neighbours."""
    missed = law_error(curve.points)
    if missed is None:
        return "too few points for a prediction"
    share, where = missed
    off = (
        f"told the neighbours of a measured load, the saturation law misses it by at most {percent(share)} (at {where})"
    )
    return f"no prediction: {off}" if share > DESCRIBES else off
