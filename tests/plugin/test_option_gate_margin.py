"""--slm-gate-margin is the share by which a candidate may be worse."""

import pytest
from inside import usage_error

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.options.table import OPTS

SLOWER = ("--slm-baseline-engine-arg=t_inf=10000", "--slm-candidate-engine-arg=t_inf=9600")


def test_what_is_worse_by_half_of_it_fails_and_by_less_passes(gate):
    """4 % slower costs 4.2 % more."""
    assert gate(*SLOWER).ret == 1
    result = gate(*SLOWER, "--slm-gate-margin=10%")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["mean E2E, small load*1.0417 *10 *pass"])


def test_a_start_keeps_its_own(gate):
    starts = ("--slm-baseline-engine-arg=start_s=20", "--slm-candidate-engine-arg=start_s=30")
    result = gate(*starts, "--slm-gate-margin=0.5")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["s to start*1.5000 *15 *fail"])


@pytest.mark.parametrize("margin", ["3", "0", "1", "300%"])
def test_what_is_no_share_is_refused_at_once(gate, margin):
    assert f"--slm-gate-margin: '{margin}' is not " in usage_error(gate(f"--slm-gate-margin={margin}"))


def test_the_default_is_that_of_the_analysis():
    assert next(opt.default for opt in OPTS if opt.name == "gate_margin") == GateCriteria().margin


def test_without_a_gate_it_says_nothing(sweep):
    assert "no gate was asked for" in usage_error(sweep("--slm-gate-margin=0.05"))
