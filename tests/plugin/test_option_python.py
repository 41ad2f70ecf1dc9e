"""--slm-python is the interpreter that has vLLM; pytest's own needs none."""

import os
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


@pytest.fixture
def two_projects(pytester):
    """A project with a test, the current folder, and the interpreter of another one with settings of its own."""
    mine, other = pytester.mkdir("mine"), pytester.mkdir("other")
    (mine / "test_mine.py").write_text("def test_it(slm_measure): assert slm_measure(4).valid", "utf-8")
    (other / "pytest.ini").write_text("[pytest]\nslm_repeats = 3\n", "utf-8")
    (other / "python").symlink_to(sys.executable)
    os.chdir(mine)
    return mine, other


def test_a_path_by_which_pytest_takes_another_project_for_the_root_is_warned_of(pytester, two_projects):
    _, other = two_projects
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-python", f"{other}/python")
    result.assert_outcomes(passed=1, warnings=1)
    sentence = f"slmserve: --slm-python {other}/python made {other} the root of this run, with its settings: type "
    result.stdout.fnmatch_lines([f"*PytestConfigWarning: {sentence}--slm-python={other}/python"])


def test_where_that_project_makes_warnings_errors_it_is_one_of_usage(pytester, two_projects):
    _, other = two_projects
    (other / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", "utf-8")
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-python", f"{other}/python"))
    assert f"type --slm-python={other}/python" in text and "INTERNALERROR" not in text


@pytest.mark.parametrize("ini", [False, True])
def test_a_path_after_the_sign_is_not_warned_of_nor_one_in_the_project(pytester, two_projects, ini):
    mine, other = two_projects
    if ini:
        (mine / "pytest.ini").touch()
    (mine / "python").symlink_to(sys.executable)
    for words in ([f"--slm-python={other}/python"], ["--slm-python", "python"], ["--slm-python", f"{mine}/python"]):
        pytester.runpytest_inprocess("--slm-simulate", *words).assert_outcomes(passed=1, warnings=0)
