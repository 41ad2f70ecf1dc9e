"""--slm-gate compares a candidate with a baseline, and nothing else (test_slm_gate.py tells what comes of it)."""

import pytest
from inside import GATE, SWEEP, usage_error


def test_it_needs_a_mode_for_nothing_measured_is_no_pass(gate, pytester):
    gate("--collect-only")
    text = usage_error(pytester.runpytest_inprocess("--slm-gate"))
    assert "--slm-gate measures, and no mode says on what" in text
    assert "try: --slm-gpu, --slm-cpu or --slm-simulate" in text


def test_the_environment_needs_one_too(gate, pytester, monkeypatch):
    gate("--collect-only")
    monkeypatch.setenv("SLM_GATE", "1")
    usage_error(pytester.runpytest_inprocess())
    pytester.runpytest_inprocess(*GATE[2:], "--slm-simulate").assert_outcomes(passed=6)


def test_an_ini_file_may_wait_for_one(gate, pytester):
    gate("--collect-only")
    pytester.makeini("[pytest]\nslm_gate = 1\n")
    pytester.runpytest_inprocess().assert_outcomes(skipped=1)


def test_without_it_the_same_file_measures_its_points(pytester, gate):
    gate("--collect-only")
    pytester.makepyfile(test_sweep=SWEEP)
    words = [word for word in GATE if word != "--slm-gate"]
    pytester.runpytest_inprocess(*words, "-k", "not plateau").assert_outcomes(passed=2, skipped=1, deselected=1)
    pytester.runpytest_inprocess(*GATE).assert_outcomes(passed=6, deselected=3)


@pytest.mark.parametrize("flag", ["--slm-gate", "--slm-calibrate"])
def test_no_item_to_gate_is_an_error_that_says_where_there_are_some(pytester, flag):
    pytester.makepyfile(SWEEP)
    words = [flag if word == "--slm-gate" else word for word in GATE]
    text = usage_error(pytester.runpytest_inprocess(*words))
    assert f"{flag}: no test uses slm_gate\n  try: --pyargs pytest_slmserve.benchmarks" in text


def test_a_file_that_cannot_be_imported_is_told_and_not_that_no_test_gates(pytester):
    pytester.makepyfile("import nothing_of_that_name")
    result = pytester.runpytest_inprocess(*GATE)
    assert result.ret == pytest.ExitCode.INTERRUPTED and "no test uses" not in result.stderr.str()
    result.stdout.fnmatch_lines(["*nothing_of_that_name*"])


def test_what_is_left_out_for_it_is_told(pytester, gate):
    gate("--collect-only")
    pytester.makepyfile(test_sweep=SWEEP)
    pytester.runpytest_inprocess(*GATE).stdout.fnmatch_lines(["slmserve leaves out 3 tests: a gate runs alone"])
