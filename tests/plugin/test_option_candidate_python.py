"""--slm-candidate-python is the interpreter that has the candidate's vLLM (more in that of the baseline)."""

from inside import usage_error


def test_it_is_that_side_s_alone_and_the_report_says_it(gate, archive):
    result = gate("--slm-python=/both/python", "--slm-candidate-python=/my/python")
    python = {m.paired.side: m.spec.python for m in archive().measurements}
    assert python == {"candidate": "/my/python", "baseline": "/both/python"}
    result.stdout.fnmatch_lines(["*baseline: *, /both/python, *", "*candidate: *, /my/python, *"])


def test_one_that_does_not_run_is_refused_before_anything_starts(gate, pytester):
    words = ("--slm-cpu", "--slm-gate", "--slm-candidate-python=/no/such/python")
    gate("--collect-only")
    assert "/no/such/python is not a Python interpreter that runs" in usage_error(pytester.runpytest_inprocess(*words))
    assert not (pytester.path / ".slm").exists()


def test_without_a_gate_it_says_nothing(sweep):
    assert "no gate was asked for" in usage_error(sweep("--slm-candidate-python=/my/python"))
