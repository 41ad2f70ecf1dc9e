"""Shapes: what a configuration says of layers, keys and values, and what follows for memory and traffic."""

from __future__ import annotations

import pytest

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import AS_CONFIGURED, CATALOGUE, model_from_config

# Bytes of one token's keys and values in 16 bit, over all layers (arXiv:2205.01068, and as vLLM 0.32 says).
KV_BYTES = {
    "opt-125m": 36_864,
    "opt-350m": 98_304,
    "opt-1.3b": 196_608,
    "opt-2.7b": 327_680,
    "opt-6.7b": 524_288,
    "opt-13b": 819_200,
    "qwen2.5-3b": 36_864,
    "qwen3-0.6b": 114_688,
    "qwen3-4b": 147_456,
    "llama-7b": 524_288,
    "llama-2-13b": 819_200,
    "llama-3.2-1b": 32_768,
    "llama-3.1-8b": 131_072,
    "smollm2-135m": 23_040,
    "smollm3-3b": 73_728,
    "phi-4-mini": 131_072,
    "granite-4.0-micro": 81_920,
    "olmoe-1b-7b": 131_072,
    "mpt-7b": 524_288,
    "gpt-j-6b": 458_752,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_of_a_token(name):
    shape = CATALOGUE[name]
    assert shape.kv_bytes_per_token() == KV_BYTES[name]
    assert shape.kv_read_bytes(100) == 100 * KV_BYTES[name], "all of it is read where all layers look back at all"
    assert shape.weight_bytes(4) == 4 * shape.parameters and shape.attention_width(9) > 0


@pytest.mark.parametrize(
    ("name", "layers", "sliding", "window"),
    [("gemma-3-270m", 3, 5, 512), ("gemma-3-1b", 4, 6, 512), ("gemma-3-4b-text", 5, 6, 1024)],
)
def test_layers_that_slide_are_grouped_with_as_many_that_do_not(name, layers, sliding, window):
    """The groups are those that vLLM 0.32 makes of each."""
    shape = CATALOGUE[name]
    each, windows = shape.kv_groups
    assert each == layers and sorted(windows, key=str) == [window] * sliding + [None]
    assert shape.kv_bytes_per_token() == layers * 4 * shape.kv_heads * 256


def test_layers_that_slide_read_no_more_than_their_window():
    shape = CATALOGUE["gemma-3-1b"]  # 22 layers of 26 look back 512 tokens; a layer keeps 1,024 bytes of a token
    assert shape.kv_read_bytes(512) == 26 * 512 * 1024
    assert shape.kv_read_bytes(2048) == (22 * 512 + 4 * 2048) * 1024
    assert shape.attention_width(2048) == 4 * 256 * (22 * 512 / 2048 + 4)


@pytest.mark.parametrize("name", ["granite-4.0-h-350m", "granite-4.0-h-1b", "lfm2-350m"])
def test_of_layers_with_a_state_only_the_engine_knows(name):
    shape = CATALOGUE[name]
    assert shape.parameters and shape.windows is shape.kv_groups is shape.kv_bytes_per_token() is None
    assert shape.kv_read_bytes(100) is None


def test_of_an_architecture_that_was_not_compared_only_the_engine_knows():
    shape = model_from_config("other", {**LLAMA, "architectures": ["FalconForCausalLM"]}, parameters=10)
    assert (shape.parameters, shape.active) == (10, 10) and shape.kv_bytes_per_token() is None
    assert "FalconForCausalLM" not in AS_CONFIGURED, "of its 71 heads, one is of keys"


@pytest.mark.parametrize(
    ("entries", "windows"),
    [
        ({}, {None}),
        ({"sliding_window": 64}, {64}),
        ({"sliding_window": 64, "use_sliding_window": False}, {None}),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 15}, {64, None}),
        ({"layer_types": ["attention"] * 30}, {None}),
    ],
)
def test_windows_by_the_configuration(entries, windows):
    assert set(model_from_config("x", {**LLAMA, **entries}).windows) == windows


@pytest.mark.parametrize(
    "entries",
    [
        {"sliding_window": 64, "sliding_window_pattern": 6},
        {"layer_types": ["sliding_attention"] * 30},
        {"layer_types": ["full_attention"] * 29},
        {"layer_types": ["full_attention"] * 29 + ["mamba"]},
        {"layer_types": ["full_attention"] * 29 + ["chunked_attention"]},
    ],
)
def test_unclear_windows_are_not_known(entries):
    assert model_from_config("x", {**LLAMA, **entries}).kv_bytes_per_token() is None


def test_kinds_of_layers_nearly_equal_in_number_are_grouped_otherwise_by_other_releases():
    def grouped(sliding):
        kinds = ["sliding_attention"] * sliding + ["full_attention"] * (30 - sliding)
        return model_from_config("x", {**LLAMA, "sliding_window": 64, "layer_types": kinds}).kv_groups

    assert grouped(15) == (15, (64, None))
    assert grouped(16) == (16, (64, None)), "one layer of padding"
    assert grouped(17) is None
    assert grouped(20) == (10, (64, 64, None))


def test_what_transformers_completed_counts_where_the_configuration_is_silent():
    bare = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}
    with pytest.raises(BadUsage):
        model_from_config("bare", bare)
    shape = model_from_config("bare", bare, completed=LLAMA)
    assert (shape.layers, shape.kv_heads, dict(shape.config)) == (30, 3, bare)


def test_the_text_part_of_a_configuration_is_read():
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    shape = model_from_config("nested", nested)
    assert shape.layers == 30 and shape.kv_bytes_per_token() is None


@pytest.mark.parametrize(
    ("told", "served"),
    [({}, "float16"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float32"}, "float16")],
)
def test_weights_are_served_in_their_own_type(told, served):
    assert model_from_config("x", {**LLAMA, **told}).dtype == served


@pytest.mark.parametrize("entry", sorted(LLAMA.keys() - {"num_key_value_heads", "intermediate_size"}))
def test_a_missing_entry_is_named(entry):
    config = {name: value for name, value in LLAMA.items() if name != entry}
    with pytest.raises(BadUsage, match=f"its config.json has no usable '{entry}'"):
        model_from_config("broken", config)


@pytest.mark.parametrize("broken", [{"architectures": []}, {"num_attention_heads": "many"}, {"vocab_size": None}])
def test_an_unusable_entry_is_wrong_usage(broken):
    with pytest.raises(BadUsage, match=r"broken: its config.json has no usable"):
        model_from_config("broken", {**LLAMA, **broken})


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
    assert model_from_config("x", config).indivisible(gpus).startswith(why)
