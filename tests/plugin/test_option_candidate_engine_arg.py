"""--slm-candidate-engine-arg is an argument for the engine of the candidate alone (more in that of the baseline)."""

from inside import usage_error


def test_it_reaches_that_side_over_what_both_have(gate, archive):
    gate("--slm-engine-arg=power_w=300", "--slm-candidate-engine-arg=power_w=200", "--slm-candidate-engine-arg=seed=3")
    found = {m.paired.side: (dict(m.spec.extra)["power_w"], m.spec.seed) for m in archive().measurements}
    assert found == {"baseline": (300, 0), "candidate": (200, 3)}


def test_nonsense_is_refused_before_anything_starts(gate, pytester):
    text = usage_error(gate("--slm-candidate-engine-arg=enforce_eager=yes"))
    assert "the candidate: enforce_eager is true or false, not 'yes'\n  try: enforce_eager=false" in text
    assert not (pytester.path / ".slm").exists()


def test_without_a_gate_it_says_nothing(sweep):
    assert "no gate was asked for" in usage_error(sweep("--slm-candidate-engine-arg=t_inf=1"))
