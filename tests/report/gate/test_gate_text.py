from __future__ import annotations

import pytest
from launches import pairs

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.report.gate.text import gate_text, goes_on

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
