"""--slm-candidate-env adds variables to the environment of the candidate alone (more in that of the baseline)."""

from inside import usage_error


def test_it_goes_over_that_of_both(gate, archive):
    assert gate("--slm-env=A=1", "--slm-candidate-env=A=2", "--slm-candidate-env=PYTHONPATH=/x:/y").ret == 0
    env = {m.paired.side: m.spec.env for m in archive().measurements}
    assert env == {"baseline": (("A", "1"),), "candidate": (("A", "2"), ("PYTHONPATH", "/x:/y"))}


def test_a_secret_is_refused(gate):
    assert "export HF_TOKEN before pytest" in usage_error(gate("--slm-candidate-env=HF_TOKEN=x"))


def test_without_a_gate_it_says_nothing(sweep):
    assert "no gate was asked for" in usage_error(sweep("--slm-candidate-env=A=1"))
