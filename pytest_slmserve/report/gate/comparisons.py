"""Comparisons of two sides: a table and one sentence for each endpoint, or plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pytest_slmserve.analysis.gate.decision import Comparison
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.numbers import ABSENT, figure
from pytest_slmserve.report.text_table import grid, named

HEAD = (
    "endpoint",
    "better",
    "pairs",
    "candidate /\nbaseline",
    "95 %",
    "spread\n%",
    "found from\n% worse",
    "margin\n%",
    "",
)
SIDES = ("left", "left", "right", "right", "left", "right", "right", "right", "left")
WORDS = {State.HOLDS: "pass", State.FAILS: "fail", State.UNDECIDED: "inconclusive"}  # as a gate says them
KEY = (
    "candidate / baseline: the median of all means of two pairs. spread: standard deviation of a pair. found from: the "
    "smallest worsening that so many pairs find with a power of 90 %. Without a margin: shown, not gated."
)


def text(found: Sequence[Comparison], shown: Sequence[Comparison] = ()) -> str:
    """Table, and why each gated endpoint has its outcome. shown: endpoints that are not gated."""
    rows = [*(row(each, gated=True) for each in found), *(row(each, gated=False) for each in shown)]
    said = [(each.name, f"{WORDS[each.outcome]}: {each.why}") for each in found]
    return "\n".join([grid(rows, HEAD, SIDES), "", named(said)])


def row(seen: Comparison, gated: bool) -> tuple[str, ...]:
    """Cells of the table."""
    ratio = seen.ratio
    known = ratio is not None and ratio.low is not None and ratio.high is not None
    return (
        seen.name,
        seen.better,
        str(seen.n),
        ABSENT if ratio is None else _factor(ratio.value),
        f"{_factor(ratio.low)} to {_factor(ratio.high)}" if known else ABSENT,  # type: ignore[union-attr, arg-type]
        ABSENT if seen.sd is None else figure(100 * seen.sd, 2),
        ABSENT if seen.detectable is None else figure(100 * seen.detectable, 2),
        f"{100 * seen.margin:.3g}" if gated else ABSENT,
        WORDS[seen.outcome] if gated else "",
    )


def _factor(value: float) -> str:
    return f"{value:.4f}"


def as_values(seen: Comparison) -> dict[str, Any]:
    """For JSON. worse, margin, detectable: shares, 0.03 for 3 %; worse is negative where the candidate is better."""
    ratio = seen.ratio
    return {
        "endpoint": seen.name,
        "outcome": WORDS[seen.outcome],
        "why": seen.why,
        "direction": seen.better,
        "pairs": seen.n,
        "decided_at": seen.decided_at,
        "ratio": None if ratio is None else ratio.value,
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "worse": None if seen.worse is None else math.expm1(seen.worse),
        "sd": seen.sd,
        "detectable": seen.detectable,
        "margin": seen.margin,
    }
