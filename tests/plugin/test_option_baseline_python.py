"""--slm-baseline-python is the interpreter that has the baseline's vLLM."""

import sys

import pytest
from inside import usage_error

from pytest_slmserve.telemetry import host_probe


@pytest.fixture
def releases(monkeypatch):
    """What interpreters hold; pytest's own has no vLLM."""

    def hold(python, env):
        vllm = {"/old/python": "0.31.0", "/new/python": "0.32.0"}.get(python)
        if vllm is None and python != sys.executable:
            raise host_probe.BadUsage(f"{python} is not a Python interpreter that runs", "--slm-python")
        return {"python": "3.11.7", "vllm": vllm, "torch": "2.13.0"}

    monkeypatch.setattr(host_probe, "interpreter", hold)


def test_it_is_that_side_s_alone(gate, archive):
    assert gate("--slm-python=/both/python", "--slm-baseline-python=/my/python").ret == 0
    python = {m.paired.side: m.spec.python for m in archive().measurements}
    assert python == {"baseline": "/my/python", "candidate": "/both/python"}


def test_with_one_for_each_side_that_of_pytest_needs_no_vllm(gate, pytester, releases):
    gate("--collect-only")
    chosen = ("--slm-baseline-python=/old/python", "--slm-candidate-python=/new/python")
    result = pytester.runpytest_inprocess("--slm-cpu", "--slm-gate", "--collect-only", *chosen)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["slmserve: *, vLLM 0.32.0; *", "*test_no_worse?opt-tiny-throughput?*"])


def test_one_that_does_not_run_is_refused_before_anything_starts(gate, pytester, releases):
    gate("--collect-only")
    words = ("--slm-cpu", "--slm-gate", "--slm-python=/new/python", "--slm-baseline-python=/no/such/python")
    assert "/no/such/python is not a Python interpreter that runs" in usage_error(pytester.runpytest_inprocess(*words))
    assert not (pytester.path / ".slm").exists()


def test_without_a_gate_it_says_nothing(sweep):
    text = usage_error(sweep("--slm-baseline-python=/my/python"))
    assert "--slm-baseline-python says what a gate compares, and no gate was asked for" in text


def test_an_ini_file_may_hold_it_for_other_runs(pytester, sweep):
    pytester.makeini("[pytest]\nslm_baseline_python = /my/python\n")
    assert sweep("--slm-plan").ret == 0
