"""Comparisons of two sides: a table and one sentence for each endpoint, or facts for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pytest_slmserve.analysis.gate.decision import Comparison
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.numbers import ABSENT, ends, figure
from pytest_slmserve.report.text_table import Column, named, table

WORDS = {State.HOLDS: "pass", State.FAILS: "fail", State.UNDECIDED: "inconclusive"}  # as a gate says them
KEY = (
    "candidate / baseline: the median of all means of two pairs. spread: standard deviation of a pair. detectable: the "
    "smallest worsening of one endpoint, the others unchanged, that so many pairs find with a power of 90 %. Without a "
    "margin: shown, not gated."
)

Row = tuple[Comparison, bool]  # what was compared, and whether it is gated
COLUMNS: tuple[Column[Row], ...] = (
    Column("endpoint", lambda row: row[0].name, "left"),
    Column("better", lambda row: row[0].better, "left", rank=5),
    Column("pairs", lambda row: str(row[0].n), rank=3),
    Column("candidate /\nbaseline", lambda row: ABSENT if row[0].ratio is None else f"{row[0].ratio.value:.4f}"),
    Column("95 %", lambda row: ends(row[0].ratio, "{:.4f}".format), "left", rank=1),
    Column("spread\n%", lambda row: _percents(row[0].sd), rank=4),
    Column("detectable\n% worse", lambda row: _percents(row[0].detectable), rank=2),
    Column("margin\n%", lambda row: f"{100 * row[0].margin:.3g}" if row[1] else ABSENT, rank=3),
    Column("", lambda row: WORDS[row[0].outcome] if row[1] else "", "left"),
)


def text(found: Sequence[Comparison], shown: Sequence[Comparison] = ()) -> str:
    """Table, and why each gated endpoint has its outcome. shown: endpoints that are not gated."""
    rows = [*((each, True) for each in found), *((each, False) for each in shown)]
    said = [(each.name, f"{WORDS[each.outcome]}: {each.why}") for each in found]
    return "\n".join([table(rows, COLUMNS, always=len(COLUMNS)), "", named(said)])


def _percents(share: float | None) -> str:
    return figure(None if share is None else 100 * share, 2)


def comparison_facts(seen: Comparison, gated: bool = True) -> dict[str, Any]:
    """Facts for JSON. worse, margin, detectable: shares, negative if better. gated: with what a gated endpoint has."""
    found = facts(seen, "name", "better", "n", "decided_at", "ratio", "sd", "detectable")
    found["worse"] = None if seen.worse is None else math.expm1(seen.worse)
    return {**found, "outcome": WORDS[seen.outcome], **facts(seen, "why", "margin")} if gated else found
