"""--slm-gate-pairs is how many pairs of launches a gate may take."""

import pytest
from inside import usage_error

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.stats.estimates import FIRST_LOOKS
from pytest_slmserve.options.table import FEWEST_PAIRS, OPTS


def test_a_clear_case_takes_fewer(gate, archive):
    gate("--slm-gate-pairs=24").stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs of launches"])
    assert len({m.launch for m in archive().measurements}) == 8


def test_it_is_told_with_the_price(gate):
    gate("--slm-gate-pairs=20", "--slm-plan").stdout.fnmatch_lines(["note: *takes up to 20"])


@pytest.mark.parametrize("few", ["3", "0", "many"])
def test_too_few_are_refused_at_once(gate, pytester, few):
    assert f"'{few}' is not a whole number, 4 or more" in usage_error(gate(f"--slm-gate-pairs={few}"))
    assert not (pytester.path / ".slm").exists()


def test_too_many_are_refused_at_once(gate):
    assert "'1001' is not a whole number up to 1000" in usage_error(gate("--slm-gate-pairs=1001"))


def test_the_fewest_and_the_default_are_those_of_the_analysis():
    assert FIRST_LOOKS[0] == FEWEST_PAIRS
    assert next(opt.default for opt in OPTS if opt.name == "gate_pairs") == GateCriteria().pairs


def test_without_a_gate_it_says_nothing(sweep):
    text = usage_error(sweep("--slm-gate-pairs=8"))
    assert "--slm-gate-pairs says what a gate compares, and no gate was asked for" in text
    assert "try: --slm-gate --slm-gate-pairs" in text
