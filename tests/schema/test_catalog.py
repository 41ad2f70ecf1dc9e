"""Shapes: parameters and KV bytes of published checkpoints follow from their configurations."""

from __future__ import annotations

import json

import pytest

from pytest_slmserve.schema.catalog import CATALOGUE, hub_name, shape_from_config, shape_of, short_name
from pytest_slmserve.schema.errors import BadUsage

# Counts of the published checkpoints (arXiv:2205.01068, and as Transformers counts them); bytes of one token's keys and
# values in 16 bit.
PUBLISHED = {
    "opt-125m": (125_239_296, 36_864),
    "opt-350m": (331_196_416, 98_304),
    "opt-1.3b": (1_315_758_080, 196_608),
    "opt-2.7b": (2_651_596_800, 327_680),
    "opt-6.7b": (6_658_473_984, 524_288),
    "opt-13b": (12_853_473_280, 819_200),
    "qwen2.5-3b": (3_085_938_688, 36_864),
    "llama-7b": (6_738_415_616, 524_288),
    "llama-2-7b": (6_738_415_616, 524_288),
    "llama-2-13b": (13_015_864_320, 819_200),
    "mpt-7b": (6_649_286_656, 524_288),
    "gpt-j-6b": (6_050_882_784, 458_752),
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_kv_bytes_are_those_of_the_checkpoint(name):
    shape, (parameters, kv_bytes) = CATALOGUE[name], PUBLISHED[name]
    assert (shape.parameters, shape.kv_bytes_per_token()) == (parameters, kv_bytes)
    assert (shape.weight_bytes(), shape.weight_bytes(4)) == (2 * parameters, 4 * parameters)
    positions = {"qwen2.5-3b": 32768, "llama-2-7b": 4096, "llama-2-13b": 4096}
    assert shape.heads * shape.head_size == shape.hidden and shape.positions == positions.get(name, 2048)


def test_every_published_size_is_in_the_catalogue():
    assert CATALOGUE.keys() == {*PUBLISHED, "opt-tiny", "llama-tiny", "mpt-tiny", "gpt-j-tiny"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_parameters_are_those_that_transformers_counts(name):
    """Without a byte of memory for them, where it is installed."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    facts = dict(CATALOGUE[name].config)
    config = transformers.AutoConfig.for_model(**{k: v for k, v in facts.items() if k != "architectures"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == CATALOGUE[name].parameters


def test_a_llama_like_model_with_grouped_keys():
    shape = shape_from_config("SmolLM2-135M", SMOLLM2_135M)
    assert (shape.parameters, shape.kv_bytes_per_token()) == (134_515_008, 23_040)
    untied = shape_from_config("untied", {**SMOLLM2_135M, "tie_word_embeddings": False})
    assert untied.parameters - shape.parameters == 49152 * 576
    wide = shape_from_config("wide", {**SMOLLM2_135M, "head_dim": 128, "num_key_value_heads": None})
    assert (wide.head_size, wide.kv_heads) == (128, 9)


def test_an_unknown_architecture_has_a_cache_but_no_count():
    shape = shape_from_config("other", {**SMOLLM2_135M, "architectures": ["OtherForCausalLM"]})
    assert shape.parameters is shape.weight_bytes() is None and shape.kv_bytes_per_token() == 23_040


@pytest.mark.parametrize("entry", sorted(SMOLLM2_135M.keys() - {"num_key_value_heads", "tie_word_embeddings"}))
def test_a_missing_entry_is_named(entry):
    config = {name: value for name, value in SMOLLM2_135M.items() if name != entry}
    with pytest.raises(BadUsage, match=f"its config.json has no usable '{entry}'"):
        shape_from_config("broken", config)


@pytest.mark.parametrize("broken", [{"architectures": []}, {"num_attention_heads": "many"}, {"vocab_size": None}])
def test_an_unusable_entry_is_wrong_usage(broken):
    with pytest.raises(BadUsage, match=r"broken: its config.json has no usable"):
        shape_from_config("broken", {**SMOLLM2_135M, **broken})


@pytest.mark.parametrize("model", ["opt-1.3b", "facebook/opt-1.3b", "facebook/OPT-1.3B"])
def test_names_of_the_catalogue(model):
    assert shape_of(model) is CATALOGUE["opt-1.3b"]


def test_a_second_llama_is_not_the_first():
    assert shape_of("meta-llama/Llama-2-13b-hf") is CATALOGUE["llama-2-13b"]
    assert shape_of("llama-2-7b") is not shape_of("llama-7b")


def test_a_folder_with_a_configuration(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2_135M), "utf-8")
    assert (shape_of(str(folder)).name, shape_of(f"{folder}/").parameters) == ("mine", 134_515_008)
    (folder / "config.json").write_text("{", "utf-8")
    with pytest.raises(BadUsage, match="is not JSON"):
        shape_of(str(folder))


def test_an_unknown_model_is_told_what_there_is():
    with pytest.raises(BadUsage, match=r"unknown model 'gpt-5'\n  try: one of opt-tiny, opt-125m"):
        shape_of("gpt-5")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("opt-1.4b", "opt-1.3b"),
        ("opt-2b", "opt-2.7b"),
        ("OPT1.3B", "opt-1.3b"),
        ("facebook/opt-126m", "opt-125m"),
        ("Qwen2.5-3", "qwen2.5-3b"),
        ("lama-7b", "llama-7b"),
    ],
)
def test_a_near_miss_gets_a_suggestion(typed, meant):
    with pytest.raises(BadUsage, match=rf"\n  try: {meant}\b.*; one of opt-tiny"):
        shape_of(typed)


def test_a_name_on_the_hub_gets_the_command_that_makes_a_folder_of_it():
    command = (
        "`hf download HuggingFaceTB/SmolLM2-135M config.json --local-dir SmolLM2-135M` and the folder SmolLM2-135M"
    )
    with pytest.raises(BadUsage) as error:
        shape_of("HuggingFaceTB/SmolLM2-135M")
    assert error.value.hint.startswith(f"{command}; one of opt-tiny")


def test_a_folder_without_a_config_says_what_is_missing(tmp_path):
    with pytest.raises(BadUsage, match=rf"^the folder {tmp_path} holds no config.json\n"):
        shape_of(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "name"), [("facebook/OPT-1.3B", "opt-1.3b"), ("/models/Mine/", "mine"), ("opt-tiny", "opt-tiny")]
)
def test_short_names(model, name):
    assert short_name(model) == name


@pytest.mark.parametrize(("model", "name"), [("opt-125m", "facebook/opt-125m"), ("me/mine", "me/mine")])
def test_names_on_the_hub(model, name):
    assert hub_name(model) == name


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_model_whose_heads_are_divided_evenly_takes_as_much_kv_cache_in_all(gpus):
    for name in ("opt-125m", "opt-13b"):
        shape = CATALOGUE[name]
        assert shape.indivisible(gpus) is None
        assert shape.kv_bytes_per_token(gpus=gpus) == shape.kv_bytes_per_token()


def test_with_fewer_kv_heads_than_gpus_some_are_held_twice():
    shape = CATALOGUE["qwen2.5-3b"]  # 16 heads, 2 KV heads
    assert [shape.kv_bytes_per_token(gpus=n) // shape.kv_bytes_per_token() for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert shape.indivisible(8) is None


@pytest.mark.parametrize(
    ("change", "gpus", "why"),
    [
        ({}, 3, "x has 16 heads, which 3 GPUs cannot divide evenly"),
        ({"intermediate_size": 11007}, 2, "x has feed-forward layers 11007 wide, which 2 GPUs cannot divide evenly"),
        ({"num_key_value_heads": 3, "num_attention_heads": 24}, 4, "x has 3 KV heads, which 4 GPUs cannot divide"),
    ],
)
def test_what_cannot_be_divided_says_why(change, gpus, why):
    config = {**dict(CATALOGUE["qwen2.5-3b"].config), **change}
    assert shape_from_config("x", config).indivisible(gpus).startswith(why)
