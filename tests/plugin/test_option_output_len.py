"""--slm-output-len sets the output tokens of every request, or takes those of the conversations."""

from inside import usage_error


def test_a_fixed_length_beside_the_prompts_of_the_mode(sweep, archive):
    sweep("--slm-output-len=20", "--slm-concurrency=1,16")
    for measurement in archive().measurements:
        assert set(measurement.run.samples.prompt_tokens) == {512}
        assert max(measurement.run.samples.output_tokens) == 20


def test_natural_outputs_have_natural_prompts(sweep, archive):
    sweep("--slm-output-len=natural", "--slm-concurrency=16,64", "--slm-window=5")
    assert {m.workload.spec.prompt_tokens for m in archive().measurements} == {None}


def test_one_fixed_and_one_natural_length_are_refused(sweep):
    text = usage_error(sweep("--slm-input-len=64", "--slm-output-len=natural"))
    assert "only one of prompt and output length is fixed" in text


def test_other_words_are_refused(sweep):
    assert "--slm-output-len" in usage_error(sweep("--slm-output-len=short"))
