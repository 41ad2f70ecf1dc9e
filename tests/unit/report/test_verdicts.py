"""Verdicts against what was expected: outcome, words, colour and tally of each, and what would decide an inconclusive
one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from strategies import noisy_curve

from pytest_slmserve.analysis.claims.table import CLAIMS, ClaimRow
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.verdicts import (
    by_claim,
    by_outcome,
    claim_outcomes,
    inconclusive,
    remedy,
    tally,
    unexpected,
    verdict_lines,
)

EXPECTED_TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")
EXPECTED_TO_HOLD = ClaimRow("throughput-plateau", evidence="raw results")
NOT_EXPECTED = ClaimRow("marginal-after-128", expected="either", evidence="raw results")
P, F, I = State.PASSES, State.FAILS, State.INCONCLUSIVE  # noqa: E741


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b", **facts: object) -> Verdict:
    return Verdict(claim, subject, state, "because", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "strict", "outcomes", "words"),
    [
        (None, False, "+-?", ("passes", "FAILS", "inconclusive")),
        (EXPECTED_TO_HOLD, False, "+-?", ("passes", "FAILS", "inconclusive")),
        (EXPECTED_TO_FAIL, False, "-+?", ("PASSES, UNEXPECTED", "fails, as expected", "inconclusive")),
        (NOT_EXPECTED, False, "+++", ("passes", "fails", "inconclusive")),
        (NOT_EXPECTED, True, "+-?", ("passes", "FAILS", "inconclusive")),
        (EXPECTED_TO_FAIL, True, "+-?", ("passes", "FAILS", "inconclusive")),
    ],
)
def test_an_outcome_is_against_what_was_expected(row, strict, outcomes, words):
    signs = {"+": "as expected", "-": "unexpected", "?": "inconclusive"}
    seen = claim_outcomes([(verdict(state), row) for state in (P, F, I)], strict=strict)
    assert [each.outcome for each in seen] == [signs[sign] for sign in outcomes]
    assert tuple(each.words for each in seen) == words
    told = [each.why != "because" for each in seen]  # with the evidence
    assert told == [each.outcome == "unexpected" and row is not None for each in seen]


def test_evidence_against_a_surprise_is_told():
    (seen,) = claim_outcomes([(verdict(P), EXPECTED_TO_FAIL)])
    assert seen.why.startswith("because; ") and seen.why.endswith("it fails: 238 fit, the paper has 256")
    (strict,) = claim_outcomes([(verdict(F), NOT_EXPECTED)], strict=True)
    assert "expects" not in strict.why and strict.why.endswith(": raw results")
    assert claim_outcomes([(verdict(F), replace(EXPECTED_TO_HOLD, evidence=""))])[0].why == "because"


def test_verdicts_are_grouped_by_claim_in_the_order_of_the_table():
    names = [*CLAIMS][3], "of-mine", [*CLAIMS][1]
    judged = [(verdict(P, name, subject), None) for subject, name in product("ab", names)]
    found = by_claim(claim_outcomes(judged))
    assert list(found) == [names[2], names[0], "of-mine"]
    assert [[each.verdict.subject for each in group] for group in found.values()] == [["a", "b"]] * 3


def test_lines_have_a_colour_for_each_outcome_below_the_claim():
    judged = [(verdict(F, "of-mine", "opt-125m"), None), (verdict(P), None), (verdict(I, subject="x"), None)]
    outcomes = claim_outcomes(judged)
    lines = list(verdict_lines(outcomes))
    assert [colour for _, colour in lines] == [None, "green", "yellow", None, "red", None]
    assert lines[0][0] == f"throughput-plateau: {CLAIMS['throughput-plateau'].statement}" and lines[3][0] == "of-mine"
    assert [" ".join(text.split()) for text, colour in lines if colour] == [
        "passes opt-1.3b because",
        "inconclusive x because",
        "FAILS opt-125m because",
    ]
    assert len({text.index("because") for text, colour in lines if colour}) == 1, "reasons stand below each other"
    assert lines[-1][0] == f"3 verdicts: {tally(by_outcome(outcomes))}" and len(list(verdict_lines([]))) == 1


def test_each_verdict_is_in_one_list_and_counted_once():
    rows = (None, EXPECTED_TO_FAIL, NOT_EXPECTED, NOT_EXPECTED)
    kinds = by_outcome(claim_outcomes([(verdict(state), row) for row, state in product(rows, (P, F, I))]))
    assert sum(map(len, kinds.values())) == 12
    assert {name: len(each) for name, each in kinds.items() if each} == {
        "pass": 1, "fail as expected": 1, "FAIL": 1, "PASS, UNEXPECTED": 1, "inconclusive": 2,
        "either expected: pass": 2, "either expected: fail": 2, "either expected: inconclusive": 2,
    }  # fmt: skip
    first, second = tally(kinds).split("; ")
    assert first == "1 pass, 1 fail as expected, 1 FAIL, 1 PASS, UNEXPECTED, 2 inconclusive"
    assert second == "either expected: 2 pass, 2 fail, 2 inconclusive" and tally({}) == ""


def test_what_is_not_as_expected_is_named_failures_first():
    judged = [(verdict(P, "b", "y"), EXPECTED_TO_FAIL), (verdict(F, "a", "x"), None), (verdict(P, "c", "z"), None)]
    assert [text.split(": ")[0] for text in unexpected(by_outcome(claim_outcomes(judged)))] == [
        "FAILS a, x",
        "PASSES, UNEXPECTED b, y",
    ]


def test_inconclusive_claims_are_together_by_what_would_decide_them():
    judged = [(replace(verdict(I, "a", f"m{n}"), remedy="ask"), None) for n in range(3)]
    judged += [(replace(verdict(I, "b", f"m{n}"), remedy="ask"), None) for n in range(2)]
    judged += [(replace(verdict(I, "b", "m2"), remedy="look"), None)]
    seen = list(inconclusive(by_outcome(claim_outcomes(judged)), []))
    assert [text.partition(": ")[2] for text in seen] == ["ask: a (3 verdicts), b (m0; m1)", "look: b (m2)"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"remedy": "ask", "low": 0.1}, "ask"),
        ({"low": 0.1, "high": 0.3}, "--slm-repeats 6 "),
        ({"why": "not measured at concurrency 8"}, "--slm-resume "),
        ({"why": "invalid at concurrency 8"}, "--slm-resume "),
        ({"why": "noise unknown: one repeat of each point"}, "--slm-repeats 2 "),
        ({"why": "no sensor told it"}, "no sensor told it"),
    ],
)
def test_a_remedy_is_an_option_or_the_reason(facts, words):
    curve = noisy_curve({1: 1.0, 2: 2.0}, repeats=3)
    assert words in remedy(replace(verdict(I), **facts), [Curve(subject="x"), curve])


def test_without_points_two_repeats_are_a_remedy():
    assert "--slm-repeats 2 " in remedy(verdict(I, low=0.1), [])
