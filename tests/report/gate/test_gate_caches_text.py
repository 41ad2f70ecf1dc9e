"""A gate says which compiled code there was, and what it took of a start: a cache that is not hit is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launches import pairs

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.report.gate.text import caches_text

SECONDS = {"baseline": (0.5, 0.7, 9.0, 0.6), "candidate": (11.0, 11.0, 12.0, None)}


def compiled(seconds):
    """Four pairs of launches, and what each spent on compiled code."""
    return [
        replace(m, resolved=replace(m.resolved, compile_s=seconds[m.paired.side][m.paired.pair - 1])) for m in pairs(4)
    ]


def test_it_tells_the_median_of_each_side():
    found = caches_text(judge_gate(compiled(SECONDS), GateCriteria()))
    assert found.startswith("compile caches were warm: ")
    assert found.endswith("; compiling took 0.65 and 11 s of a start")


@pytest.mark.parametrize("silent", ["baseline", "candidate"])
def test_of_a_side_that_does_not_tell_nothing_is_said(silent):
    made = compiled({**SECONDS, silent: (None,) * 4})
    assert "compiling" not in caches_text(judge_gate(made, GateCriteria()))
