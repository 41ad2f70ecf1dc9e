"""Verdicts against what was expected, in words, in colours and counted."""

from __future__ import annotations

import pytest

from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.verdicts import claim_outcomes, verdict_lines

EXPECTED_TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")
EXPECTED_TO_HOLD = ClaimRow("throughput-plateau", evidence="raw results")
NOT_EXPECTED = ClaimRow("marginal-after-128", expected="either", evidence="raw results")


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b") -> Verdict:
    return Verdict(claim, subject, state, "because")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("state", "row", "strict", "seen"),
    [
        (State.PASSES, None, False, "as expected"),
        (State.FAILS, None, False, "unexpected"),
        (State.INCONCLUSIVE, None, False, "inconclusive"),
        (State.PASSES, EXPECTED_TO_HOLD, False, "as expected"),
        (State.FAILS, EXPECTED_TO_FAIL, False, "as expected"),
        (State.PASSES, EXPECTED_TO_FAIL, False, "unexpected"),
        (State.INCONCLUSIVE, EXPECTED_TO_FAIL, False, "inconclusive"),
        (State.PASSES, NOT_EXPECTED, False, "as expected"),
        (State.FAILS, NOT_EXPECTED, False, "as expected"),
        (State.INCONCLUSIVE, NOT_EXPECTED, False, "as expected"),
        (State.FAILS, NOT_EXPECTED, True, "unexpected"),
        (State.FAILS, EXPECTED_TO_FAIL, True, "unexpected"),
        (State.PASSES, EXPECTED_TO_FAIL, True, "as expected"),
    ],
)
def test_outcome_is_against_what_was_expected(state, row, strict, seen):
    assert claim_outcomes([(verdict(state), row)], strict=strict)[0].outcome == seen


def verdict_text(judged):
    return "\n".join(text for text, _ in verdict_lines(claim_outcomes(judged)))


def test_verdicts_are_grouped_by_claim_and_counted():
    judged = [
        (verdict(State.FAILS, "table-1-batch-fits"), EXPECTED_TO_FAIL),
        (verdict(State.PASSES), EXPECTED_TO_HOLD),
        (verdict(State.PASSES, "a-claim-of-mine", "opt-2.7b"), None),
        (verdict(State.INCONCLUSIVE, subject="opt-2.7b"), EXPECTED_TO_HOLD),
    ]
    lines = [" ".join(line.split()) for line in verdict_text(judged).splitlines()]
    assert lines[0].startswith("throughput-plateau: Throughput reaches a plateau")
    assert lines[1:3] == ["passes opt-1.3b because", "inconclusive opt-2.7b because"]
    assert lines[3].startswith("table-1-batch-fits: ") and lines[4] == "fails, as expected opt-1.3b because"
    assert lines[5:] == [
        "a-claim-of-mine",
        "passes opt-2.7b because",
        "4 verdicts: 2 pass, 1 fail as expected, 1 inconclusive",
    ]


def test_what_may_go_either_way_fails_without_a_shout():
    text = words(verdict_text([(verdict(State.FAILS, "marginal-after-128"), NOT_EXPECTED)]))
    assert "fails opt-1.3b because" in text and text.endswith("1 verdict: either expected: 1 fail")


def test_a_surprise_shouts_with_what_was_expected_and_why():
    held = words(verdict_text([(verdict(State.PASSES, "table-1-batch-fits"), EXPECTED_TO_FAIL)]))
    assert "PASSES, UNEXPECTED opt-1.3b because; the claims table expects that it fails: 238 fit" in held
    failed = words(verdict_text([(verdict(State.FAILS), EXPECTED_TO_HOLD)]))
    assert "FAILS opt-1.3b because; the claims table expects that it passes: raw results" in failed
    assert words(verdict_text([(verdict(State.FAILS), None)])).endswith("because 1 verdict: 1 FAIL")


def test_verdicts_have_colours():
    judged = [(verdict(state), None) for state in (State.PASSES, State.FAILS, State.INCONCLUSIVE)]
    assert [colour for _, colour in verdict_lines(claim_outcomes(judged))] == [None, "green", "red", "yellow", None]
    assert verdict_text([]) == "no claim was judged"
