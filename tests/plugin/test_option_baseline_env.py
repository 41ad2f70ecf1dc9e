"""--slm-baseline-env adds variables to the environment of the baseline alone."""

from inside import usage_error


def test_it_goes_over_that_of_both(gate, archive):
    result = gate("--slm-env=A=1", "--slm-env=B=1", "--slm-baseline-env=A=2", "--slm-baseline-env=PYTHONPATH=/x:/y")
    result.stdout.no_fnmatch_line("*both sides*are the same*")
    env = {m.paired.side: m.spec.env for m in archive().measurements}
    assert env["baseline"] == (("A", "2"), ("B", "1"), ("PYTHONPATH", "/x:/y"))
    assert env["candidate"] == (("A", "1"), ("B", "1"))


def test_what_is_no_assignment_or_a_secret_is_refused(gate):
    assert "--slm-baseline-env: " in usage_error(gate("--slm-baseline-env=NAME"))
    assert "export HF_TOKEN before pytest" in usage_error(gate("--slm-baseline-env=HF_TOKEN=x"))


def test_without_a_gate_it_says_nothing(sweep):
    assert "no gate was asked for" in usage_error(sweep("--slm-baseline-env=A=1"))
