"""--slm-baseline-engine-arg is an argument for the engine of the baseline alone."""

import pytest
from inside import usage_error


def specs(archive):
    return {m.paired.side: m.spec for m in archive().measurements}


def test_it_reaches_that_side_over_what_both_have(gate, archive):
    gate("--slm-engine-arg=power_w=300", "--slm-baseline-engine-arg=power_w=200")
    found = specs(archive)
    assert dict(found["baseline"].extra)["power_w"] == 200
    assert dict(found["candidate"].extra)["power_w"] == 300


def test_the_limits_that_a_specification_names_are_set_there(gate, archive):
    arguments = ("max_num_batched_tokens=2048", "max_num_seqs=32", "enforce_eager=true", "dtype=bfloat16", "seed=3")
    result = gate("--slm-engine-arg=max_num_seqs=64", *(f"--slm-baseline-engine-arg={each}" for each in arguments))
    found = specs(archive)
    mine, other = found["baseline"], found["candidate"]
    assert (mine.max_num_batched_tokens, mine.max_num_seqs, mine.enforce_eager) == (2048, 32, True)
    assert (mine.dtype, mine.seed) == ("bfloat16", 3)
    assert (other.max_num_batched_tokens, other.max_num_seqs, other.enforce_eager) == (8192, 64, False)
    assert not {"max_num_seqs", "max_num_batched_tokens"} & {name for name, _ in (*mine.extra, *other.extra)}
    result.stdout.fnmatch_lines(["*baseline: *max_num_seqs 32, max_num_batched_tokens 2,048*"])


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("max_num_seqs=many", "the baseline: max_num_seqs is a whole number, not 'many'"),
        ("max_model_len=64", "the baseline: requests of 96 tokens do not fit max_model_len 64"),
        ("eager", "'eager'"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(gate, pytester, argument, problem):
    assert problem in usage_error(gate(f"--slm-baseline-engine-arg={argument}"))
    assert not (pytester.path / ".slm").exists()


def test_an_argument_that_the_engine_does_not_know_breaks_the_gate_off_and_names_the_side(gate):
    result = gate("--slm-baseline-engine-arg=t_half=3")
    assert result.ret == 3, "broken off is no verdict"
    result.stdout.fnmatch_lines(["*BadUsage: the baseline, pair 1: the simulated engine has no such argument*t_half*"])


def test_without_a_gate_it_says_nothing(sweep):
    assert "no gate was asked for" in usage_error(sweep("--slm-baseline-engine-arg=t_inf=1"))
