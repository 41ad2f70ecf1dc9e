"""Verdicts against what was expected: outcome, words, colour and tally of each, and what would decide an inconclusive
one."""

from dataclasses import replace

from sections import difference
from strategies import noisy_curve

from pytest_slmserve.analysis.claims.table import CLAIMS, ClaimRow
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import verdicts

TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")
TO_HOLD = ClaimRow("throughput-plateau", evidence="raw results")
EITHER = ClaimRow("marginal-after-128", expected="either", evidence="raw results")
OPEN = (
    {"remedy": "ask", "low": 0.1}, {"low": 0.1, "high": 0.3}, {"why": "not measured at concurrency 8"},
    {"why": "invalid at concurrency 8"}, {"why": "noise unknown: one repeat of each point"},
    {"why": "no sensor told it"},
)  # fmt: skip
P, F, I = State.PASSES, State.FAILS, State.INCONCLUSIVE  # noqa: E741


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b", **facts: object) -> Verdict:
    return Verdict(claim, subject, state, "because", **facts)  # type: ignore[arg-type]


def test_verdict_lines_match_expected_file():
    names = [*CLAIMS][3], "of-mine", [*CLAIMS][1]
    evidence = [(verdict(P), TO_FAIL), (verdict(F), TO_HOLD), (verdict(F), replace(TO_HOLD, evidence=""))]
    asked = [("a", "m0", "ask"), ("a", "m1", "ask"), ("a", "m2", "ask"), ("b", "m0", "ask"), ("b", "m2", "look")]
    found = {
        "of each kind": [(verdict(state), row) for row in (None, TO_FAIL, EITHER, EITHER) for state in (P, F, I)],
        "evidence": evidence,
        "of three claims in the order of their table": [(verdict(P, name, s), None) for s in "ab" for name in names],
        "what would decide": [(verdict(I, claim, model, remedy=remedy), None) for claim, model, remedy in asked],
        "none": [],
    }
    told = {name: verdicts.claim_outcomes(judged) for name, judged in found.items()}
    told["of each kind, strict"] = verdicts.claim_outcomes(found["of each kind"], strict=True)
    shown = {}
    for name, outcomes in told.items():
        kinds = verdicts.by_outcome(outcomes)
        lines = [f"{colour or '':7}{text}" for text, colour in verdicts.verdict_lines(outcomes)]
        lines += [f"- {text}" for text in (*verdicts.unexpected(kinds), *verdicts.inconclusive(kinds, []))]
        shown[name] = "\n".join([*lines, *(f"{kind}: {len(each)}" for kind, each in kinds.items() if each)])
    curves = [Curve(subject="x"), noisy_curve({1: 1.0, 2: 2.0}, repeats=3)]
    shown["remedies"] = "\n".join(verdicts.remedy(replace(verdict(I), **facts), curves) for facts in OPEN)
    shown["a remedy without points"] = verdicts.remedy(verdict(I, low=0.1), [])
    assert difference("verdicts", shown) == ""
