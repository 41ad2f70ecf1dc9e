"""Gates of an archive, judged again by the terms that were stored with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.analysis.stored.claims import UNUSABLE, Plan, unusable
from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.schema.records import Measurement


def stored_gates(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> Iterator[tuple[Gated, str]]:
    """Each gate of one archive, in the order measured, and what is to be said of its terms, if anything.

    plans: of each session, with the time it started (ISO 8601, UTC), ascending; `{"gate": {"margin": 0.03, ...}}` in
    that of a run that gated. Raises BadArchive where the terms are none.
    """
    gates: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.paired:
            gates.setdefault(m.paired.gate, []).append(m)
    for members in gates.values():
        began = min(m.measured_at for m in members)
        plan: Plan = next((plan for started, plan in reversed(plans) if started <= began), {})
        terms = _terms(plan["gate"]) if "gate" in plan else None
        gated = judge_gate(members, terms or GateCriteria())
        yield gated, "" if terms else _assumed(gated)


def _terms(facts: Mapping[str, Any]) -> GateCriteria:
    try:
        return GateCriteria(float(facts["margin"]), float(facts["alpha"]), float(facts["beta"]), int(facts["pairs"]))
    except (SlmError, *UNUSABLE) as error:
        raise unusable("the terms of the gate", error) from None


def _assumed(gated: Gated) -> str:
    margin, pairs = percent(gated.terms.margin), gated.terms.pairs
    return (
        f"the terms of the gate of {gated.model} were not stored: judged by a margin of {margin}, and {pairs} pairs "
        "at most"
    )
