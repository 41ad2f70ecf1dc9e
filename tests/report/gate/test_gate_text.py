from __future__ import annotations

import pytest
from launches import pairs

from pytest_slmserve.analysis.gate.decision import Comparison, GateCriteria, InterimAnalysis
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.gate.text import gate_text, goes_on, interim_lines

OPTIONS = "can decide: --slm-gate --slm-resume --slm-concurrency=8,64"


@pytest.mark.parametrize(
    ("there", "more"),
    [(1, f"3 more pairs {OPTIONS}"), (2, f"about 120 s more {OPTIONS}"), (3, f"about 60 s more {OPTIONS}"), (4, "")],
)
def test_a_gate_before_its_first_look_says_what_can_decide_it(there, more):
    gated = judge_gate(pairs(there), GateCriteria())
    assert goes_on(gated) == more
    assert (f"undecided: {more}" in gate_text(gated)) is bool(more)


def test_a_gate_that_fails_needs_no_more():
    assert goes_on(judge_gate(pairs(2, kv_blocks=1000), GateCriteria())) == ""


def test_boundaries_of_each_interim_analysis_are_a_table():
    steps = (
        InterimAnalysis(4, 0.9787, 0.9394, 1.0049, State.UNDECIDED),
        InterimAnalysis(6, 0.9658, 0.9688, 0.9906, State.FAILS),
    )
    found = Comparison("tokens/s", "higher", State.FAILS, "", 0.03, 6, interim=steps)
    _, text = interim_lines([found])
    assert [line.split() for line in text.split("\n")[3:]] == [
        ["tokens/s", "4", "0.9787", "0.9394", "1.0049", "inconclusive"],
        ["tokens/s", "6", "0.9658", "0.9688", "0.9906", "fail"],
    ]


def test_a_gate_s_text_has_boundaries_from_the_first_look_on():
    assert "fails if" in gate_text(judge_gate(pairs(4), GateCriteria()))
    assert "fails if" not in gate_text(judge_gate(pairs(3), GateCriteria()))
