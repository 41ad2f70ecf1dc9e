"""--slm-python is the interpreter that has vLLM; pytest's own needs none."""

import sys

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.telemetry import host_probe


def test_what_is_no_interpreter_is_refused(pytester):
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess("--slm-cpu", "--slm-python=/no/such/python"))
    assert "/no/such/python is not a Python interpreter that runs" in text


def test_an_interpreter_is_asked_for_what_it_holds():
    facts = host_probe.interpreter(sys.executable, {})
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(facts) == {"python", "vllm", "torch", "executable"}


def test_an_interpreter_without_vllm_is_named(tmp_path):
    with pytest.raises(host_probe.BadUsage, match=r"/opt/old/python has no vLLM"):
        host_probe.check_vllm("cuda", None, "/opt/old/python")
