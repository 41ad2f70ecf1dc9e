"""--slm-input-len sets the prompt tokens of every request, or takes those of the conversations."""

import pytest
from inside import usage_error


def test_fixed_lengths(sweep, archive):
    sweep("--slm-input-len=100", "--slm-output-len=20", "--slm-concurrency=1,16")
    for measurement in archive().measurements:
        assert set(measurement.run.samples.prompt_tokens) == {100}
        assert max(measurement.run.samples.output_tokens) == 20


def test_one_length_alone_leaves_the_other_as_the_mode_has_it(sweep, archive):
    sweep("--slm-input-len=100", "--slm-concurrency=1,16")
    assert {(w.prompt_tokens, w.output_tokens) for m in archive().measurements for w in [m.workload.spec]} == {
        (100, 256)
    }


def test_natural_lengths_differ_from_request_to_request(sweep, archive):
    sweep("--slm-input-len=natural", "--slm-concurrency=16,64", "--slm-window=5")
    reference = archive().measurements[0].workload
    assert (reference.spec.prompt_tokens, reference.spec.output_tokens) == (None, None)
    assert len(set(archive().measurements[-1].run.samples.prompt_tokens)) > 10


@pytest.mark.parametrize("length", ["512/256", "0", "long"])
def test_other_words_are_refused(sweep, length):
    assert "--slm-input-len" in usage_error(sweep(f"--slm-input-len={length}"))


def test_lengths_beyond_the_models_positions_are_refused(sweep):
    assert "do not fit its 2048 positions" in usage_error(sweep("--slm-input-len=2000", "--slm-output-len=100"))
