"""Gates of an archive are judged again by the terms that were stored with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launches import pairs

from pytest_slmserve.analysis.stored.claims import stored_gates
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import BadArchive

TERMS = {"margin": 0.03, "alpha": 0.01, "beta": 0.05, "pairs": 12}
EARLY, LATE = "2025-12-31T00:00:00+00:00", "2026-06-01T00:00:00+00:00"  # `launches` measures between them


def again(measurements, *plans):
    return list(stored_gates(measurements, plans))


def test_the_terms_of_its_session_rule():
    """5 % worse: within the wider margin, and not within the usual one."""
    made = pairs(4, speed=1 / 1.05)
    [(usual, note)] = again(made, (EARLY, {"gate": TERMS}))
    [(wide, _)] = again(made, (EARLY, {"gate": {**TERMS, "margin": 0.2}}))
    assert (usual.outcome, wide.outcome, note) == (State.FAILS, State.HOLDS, "")
    assert (wide.terms.margin, wide.terms.pairs, wide.gate) == (0.2, 12, "gate")


def test_a_later_session_has_no_say():
    [(gated, _)] = again(pairs(4), (EARLY, {"gate": TERMS}), (LATE, {"gate": {**TERMS, "margin": 0.5}}))
    assert gated.terms.margin == 0.03


@pytest.mark.parametrize("plans", [(), ((EARLY, {}),), ((EARLY, {"sweeps": {}}),), ((LATE, {"gate": TERMS}),)])
def test_without_stored_terms_the_defaults_are_taken_and_said(plans):
    [(gated, note)] = again(pairs(4), *plans)
    assert gated.terms.margin == 0.03 and gated.outcome is State.HOLDS
    assert note == "the terms of the gate of opt-1.3b were not stored: judged by a margin of 3 %, and 12 pairs at most"


def test_gates_of_one_archive_are_told_apart():
    other = [replace(m, paired=replace(m.paired, gate="other")) for m in pairs(4, speed=0.9)]
    assert [g.outcome for g, _ in again([*pairs(4), *other])] == [State.HOLDS, State.FAILS]


@pytest.mark.parametrize(
    "stored", [{}, None, 3, {**TERMS, "margin": "wide"}, {**TERMS, "margin": 2.0}, {**TERMS, "pairs": 1}]
)
def test_terms_that_are_none_are_one_sentence(stored):
    with pytest.raises(BadArchive, match="the terms of the gate in the archive cannot be used"):
        again(pairs(4), (EARLY, {"gate": stored}))


def test_what_is_in_no_gate_makes_none():
    assert again([replace(m, paired=None) for m in pairs(1)]) == []
