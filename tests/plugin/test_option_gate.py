"""--slm-gate compares a candidate with a baseline, and nothing else (test_slm_gate.py tells what comes of it)."""

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


def test_no_item_to_gate_is_no_pass(pytester):
    pytester.makepyfile(SWEEP)
    assert pytester.runpytest_inprocess(*GATE).ret == 5
