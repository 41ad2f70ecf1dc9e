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
from pytest_slmserve.report import verdicts
from pytest_slmserve.report.verdicts import by_outcome, claim_outcomes

TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")
TO_HOLD = ClaimRow("throughput-plateau", evidence="raw results")
EITHER = ClaimRow("marginal-after-128", expected="either", evidence="raw results")
P, F, I = State.PASSES, State.FAILS, State.INCONCLUSIVE  # noqa: E741


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b", **facts: object) -> Verdict:
    return Verdict(claim, subject, state, "because", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "strict", "outcomes", "words"),
    [
        (None, False, "+-?", ("passes", "FAILS", "inconclusive")),
        (TO_HOLD, False, "+-?", ("passes", "FAILS", "inconclusive")),
        (TO_FAIL, False, "-+?", ("PASSES, UNEXPECTED", "fails, as expected", "inconclusive")),
        (EITHER, False, "+++", ("passes", "fails", "inconclusive")),
        (EITHER, True, "+-?", ("passes", "FAILS", "inconclusive")),
        (TO_FAIL, True, "+-?", ("passes", "FAILS", "inconclusive")),
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
    judged = (verdict(P), TO_FAIL), (verdict(F), replace(TO_HOLD, evidence=""))
    seen, bare = (claim_outcomes([each])[0].why for each in judged)
    strict = claim_outcomes([(verdict(F), EITHER)], strict=True)[0].why
    assert seen.startswith("because; ") and seen.endswith("it fails: 238 fit, the paper has 256") and bare == "because"
    assert "expects" not in strict and strict.endswith(": raw results")


def test_verdicts_are_grouped_by_claim_in_the_order_of_the_table():
    names = [*CLAIMS][3], "of-mine", [*CLAIMS][1]
    found = verdicts.by_claim(
        claim_outcomes([(verdict(P, name, subject), None) for subject, name in product("ab", names)])
    )
    subjects = [(name, [each.verdict.subject for each in group]) for name, group in found.items()]
    assert subjects == [(name, ["a", "b"]) for name in (names[2], names[0], "of-mine")]


def test_lines_have_a_colour_for_each_outcome_below_the_claim():
    judged = [(verdict(F, "of-mine", "opt-125m"), None), (verdict(P), None), (verdict(I, subject="x"), None)]
    lines = list(verdicts.verdict_lines(claim_outcomes(judged)))
    assert [(" ".join(text.split()), colour) for text, colour in lines] == [
        (f"throughput-plateau: {CLAIMS['throughput-plateau'].statement}", None),
        ("passes opt-1.3b because", "green"),
        ("inconclusive x because", "yellow"),
        ("of-mine", None),
        ("FAILS opt-125m because", "red"),
        ("3 verdicts: 1 pass, 1 FAIL, 1 inconclusive", None),
    ]
    assert len({text.index("because") for text, colour in lines if colour}) == 1, "reasons stand below each other"
    assert len(list(verdicts.verdict_lines([]))) == 1


def test_each_verdict_is_in_one_list_and_counted_once():
    rows = (None, TO_FAIL, EITHER, EITHER)
    kinds = by_outcome(claim_outcomes([(verdict(state), row) for row, state in product(rows, (P, F, I))]))
    assert {name: len(each) for name, each in kinds.items() if each} == {
        "pass": 1, "fail as expected": 1, "FAIL": 1, "PASS, UNEXPECTED": 1, "inconclusive": 2,
        "either expected: pass": 2, "either expected: fail": 2, "either expected: inconclusive": 2,
    }  # fmt: skip
    first, second = verdicts.tally(kinds).split("; ")
    assert first == "1 pass, 1 fail as expected, 1 FAIL, 1 PASS, UNEXPECTED, 2 inconclusive"
    assert second == "either expected: 2 pass, 2 fail, 2 inconclusive" and verdicts.tally({}) == ""


def test_what_is_not_as_expected_is_named_failures_first():
    judged = [(verdict(P, "b", "y"), TO_FAIL), (verdict(F, "a", "x"), None), (verdict(P, "c", "z"), None)]
    named = [text.split(": ")[0] for text in verdicts.unexpected(by_outcome(claim_outcomes(judged)))]
    assert named == ["FAILS a, x", "PASSES, UNEXPECTED b, y"]


def test_inconclusive_claims_are_together_by_what_would_decide_them():
    asked = [("a", "m0"), ("a", "m1"), ("a", "m2"), ("b", "m0"), ("b", "m1")]
    judged = [(verdict(I, *each, remedy="ask"), None) for each in asked] + [
        (verdict(I, "b", "m2", remedy="look"), None)
    ]
    seen = verdicts.inconclusive(by_outcome(claim_outcomes(judged)), [])
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
    curves = [Curve(subject="x"), noisy_curve({1: 1.0, 2: 2.0}, repeats=3)]
    assert words in verdicts.remedy(replace(verdict(I), **facts), curves)


def test_without_points_two_repeats_are_a_remedy():
    assert "--slm-repeats 2 " in verdicts.remedy(verdict(I, low=0.1), [])
