"""Shapes: what a configuration says of layers, keys and values, weights and quantization, and what follows for memory
and traffic; and the names by which a model is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from pytest_slmserve.schema.models import (
    AS_CONFIGURED,
    CATALOGUE,
    Model,
    Quantization,
    catalogue_name,
    hub_name,
    model_from_config,
    short_name,
)

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
    assert shape.kv_bytes_per_token() == KV_BYTES[name] == shape.kv_bytes_per_token(1) * 2
    assert shape.kv_read_bytes(100) == 100 * KV_BYTES[name], "all of it is read where all layers look back at all"
    assert shape.kv_read_bytes(100, 4) == 200 * KV_BYTES[name]
    assert shape.weight_bytes(4) == 4 * shape.parameters == 2 * shape.weight_bytes()
    assert shape.attention_width(9) == shape.heads * shape.head_size * shape.layers


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
    assert shape.attention_width(100) == shape.heads * shape.head_size * shape.layers
    assert replace(shape, parameters=None).weight_bytes() is None


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
    with refused("bare", hint="decoder-only"):
        model_from_config("bare", bare)
    shape = model_from_config("bare", bare, completed=LLAMA)
    assert (shape.layers, shape.kv_heads, dict(shape.config)) == (30, 3, bare)


def test_the_text_part_of_a_configuration_is_read():
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    shape = model_from_config("nested", nested)
    assert shape.layers == 30 and shape.kv_bytes_per_token() is None


def test_every_entry_reaches_its_field():
    more = {"head_dim": 50, "word_embed_proj_dim": 77, "ffn_dim": 99, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert model_from_config("x", {**LLAMA, **more}, 123, 45, source="hub") == Model(
        name="x",
        architecture="LlamaForCausalLM",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_size=50,
        vocabulary=49152,
        positions=8192,
        parameters=123,
        active=45,
        windows=(None,) * 30,
        embedding_width=77,
        feed_forward=99,
        experts=8,
        experts_per_token=2,
        source="hub",
    )
    plain = model_from_config("x", {**LLAMA, "num_key_value_heads": None})
    assert (plain.kv_heads, plain.head_size, plain.embedding_width, plain.feed_forward) == (9, 64, 576, 1536)
    assert (plain.parameters, plain.active, plain.experts, plain.experts_per_token) == (None, None, 0, 0)
    assert (plain.source, plain.tied, plain.quantization) == ("catalogue", False, None)
    none = model_from_config("x", {**LLAMA, "intermediate_size": None, "n_routed_experts": 4}, 10)
    assert (none.feed_forward, none.experts, none.experts_per_token, none.active) == (None, 4, 4, 10)
    assert model_from_config("x", {**LLAMA, "num_experts": None, "num_local_experts": 6}).experts == 6


OLD = {"n_layer": 30, "n_embd": 576, "n_head": 9, "n_positions": 8192}
OLDER = {"n_layers": 30, "d_model": 576, "n_heads": 9, "max_seq_len": 8192}


@pytest.mark.parametrize("words", [OLD, OLDER])
def test_older_words_mean_the_same(words):
    usual = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    config = {**{name: value for name, value in LLAMA.items() if name not in usual}, **words}
    assert model_from_config("x", config) == model_from_config("x", LLAMA)
    assert model_from_config("x", {**LLAMA, **dict.fromkeys(words, 1)}) == model_from_config("x", LLAMA)


@pytest.mark.parametrize(
    ("told", "served"),
    [({}, "float16"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float32"}, "float16")],
)
def test_weights_are_served_in_their_own_type(told, served):
    assert model_from_config("x", {**LLAMA, **told}).dtype == served


@pytest.mark.parametrize("entry", sorted(LLAMA.keys() - {"num_key_value_heads", "intermediate_size"}))
def test_a_missing_entry_is_named(entry):
    config = {name: value for name, value in LLAMA.items() if name != entry}
    with refused("broken", entry, hint="decoder-only"):
        model_from_config("broken", config)


@pytest.mark.parametrize("broken", [{"architectures": []}, {"num_attention_heads": "many"}, {"vocab_size": None}])
def test_an_unusable_entry_is_wrong_usage(broken):
    with refused("broken", hint="decoder-only"):
        model_from_config("broken", {**LLAMA, **broken})


def test_a_request_has_the_positions_of_the_model_or_the_usual_ones():
    assert [replace(CATALOGUE["opt-125m"], positions=n).context for n in (2047, 2048, 4096)] == [2047, 2048, 2048]


# Embeddings and quantization


@pytest.mark.parametrize(("name", "tied"), [("gemma-3-270m", True), ("opt-125m", True), ("llama-7b", False)])
def test_embeddings_of_a_configuration_that_does_not_tell(name, tied):
    """As Transformers writes those of Gemma and OPT."""
    untold = {entry: value for entry, value in CATALOGUE[name].config if entry != "tie_word_embeddings"}
    shape = model_from_config("mine", untold)
    assert shape.tied is CATALOGUE[name].tied is tied and shape.lm_head == CATALOGUE[name].lm_head
    for entry in ("tie_word_embeddings", "tie_embedding"):
        assert model_from_config("mine", {**untold, entry: not tied}).tied is not tied
    assert model_from_config("mine", {**untold, "tie_word_embeddings": tied, "tie_embedding": not tied}).tied is tied


def test_embeddings_may_be_narrower_than_the_layers():
    assert CATALOGUE["opt-350m"].lm_head == 50_272 * 512
    assert CATALOGUE["qwen3-0.6b"].lm_head == 151_936 * 1024 and CATALOGUE["qwen3-0.6b"].tied
    assert not CATALOGUE["qwen3-8b"].tied


FLOAT8 = {"num_bits": 8, "type": "float"}
FOUR = {"num_bits": 4, "group_size": 32}


def groups(*weights: object, **more: object) -> dict[str, object]:
    made = {str(n): {"weights": each} for n, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": made, **more}


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (None, None),
        ({}, None),
        ("awq", None),
        ({"quant_method": "fp8"}, Quantization("fp8")),
        ({"bits": 4}, Quantization(None, 4.0, zero_points=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization("awq", 4.0, 64, True)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Quantization("gptq", 8.0, None, True)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 1}, Quantization("gptq", 8.0, 1, True)),
        (groups(FOUR), Quantization("compressed-tensors", 4.0, 32)),
        (groups(FOUR, FOUR), Quantization("compressed-tensors", 4.0, 32)),
        (groups({**FOUR, "symmetric": False}), Quantization("compressed-tensors", 4.0, 32, True)),
        (groups(FOUR, {**FOUR, "symmetric": False}), Quantization("compressed-tensors")),
        (groups(FOUR, {**FOUR, "group_size": 64}), Quantization("compressed-tensors")),
        (groups(FOUR, None), Quantization("compressed-tensors")),
        (groups(), Quantization("compressed-tensors")),
        (groups(kv_cache_scheme=FLOAT8), Quantization("compressed-tensors", kv_cache_dtype="fp8")),
        (groups(kv_cache_scheme="int8"), Quantization("compressed-tensors", kv_cache_dtype="")),
        ({"quant_method": "modelopt4", "kv_cache_quant_algo": "FP8"}, Quantization("modelopt4", kv_cache_dtype="fp8")),
        ({"quant_method": "fp8", "kv_cache_scheme": "FP8"}, Quantization("fp8")),
        ({"quant_method": "x", "config_groups": {"0": {"input_activations": FLOAT8}}},
         Quantization("x", fp8_inputs=True)),
        ({"quant_method": "x", "config_groups": {"0": {"input_activations": {"num_bits": 8}}}}, Quantization("x")),
        ({"quant_method": "x", "config_groups": {"0": {"input_activations": {"type": "float"}}}}, Quantization("x")),
        ({"quant_method": "x", "config_groups": {"0": {}, "1": {"input_activations": FLOAT8}}},
         Quantization("x", fp8_inputs=True)),
    ],
)  # fmt: skip
def test_the_quantization_that_a_configuration_tells(own, found):
    assert model_from_config("mine", {**LLAMA, "quantization_config": own}).quantization == found


# Several GPUs


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_model_whose_heads_are_divided_evenly_takes_as_much_kv_cache_in_all(gpus):
    for name in ("opt-125m", "opt-13b"):
        shape = CATALOGUE[name]
        assert shape.indivisible(gpus) is None
        assert shape.kv_bytes_per_token(gpus=gpus) == shape.kv_bytes_per_token()
        assert shape.kv_read_bytes(7, gpus=gpus) == shape.kv_read_bytes(7)


def test_with_fewer_kv_heads_than_gpus_some_are_held_twice():
    shape = CATALOGUE["qwen2.5-3b"]  # 16 heads, 2 KV heads
    assert [shape.kv_bytes_per_token(gpus=n) // shape.kv_bytes_per_token() for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [shape.kv_read_bytes(9, gpus=n) / shape.kv_read_bytes(9) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert shape.indivisible(8) is None


@given(st.integers(1, 64), st.integers(1, 16), st.none() | st.integers(1, 64), st.integers(1, 16))
def test_gpus_divide_heads_and_columns_evenly_or_share_kv_heads_evenly(heads, kv_heads, wide, gpus):
    shape = replace(CATALOGUE["opt-125m"], heads=heads, kv_heads=kv_heads, feed_forward=wide)
    even = heads % gpus == 0 and (wide is None or wide % gpus == 0) and (kv_heads % gpus == 0 or gpus % kv_heads == 0)
    assert (shape.indivisible(gpus) is None) is even


@pytest.mark.parametrize(
    ("change", "gpus", "facts"),
    [
        ({}, 3, ["16 heads", "3 GPUs"]),
        ({"intermediate_size": 11007}, 2, ["11007", "2 GPUs"]),
        ({"num_key_value_heads": 3, "num_attention_heads": 24}, 4, ["3 KV heads", "4 GPUs"]),
    ],
)
def test_what_cannot_be_divided_says_why(change, gpus, facts):
    reason = model_from_config("x", {**dict(CATALOGUE["qwen2.5-3b"].config), **change}).indivisible(gpus)
    assert reason.startswith("x ") and all(fact in reason for fact in facts)


# Names


def test_a_model_is_known_by_its_name_or_that_of_the_hub_and_a_folder_is_none():
    assert catalogue_name("OPT-1.3b") == catalogue_name("facebook/OPT-1.3B") == "opt-1.3b"
    assert catalogue_name("./opt-1.3b") is catalogue_name("opt-1.3b/") is None
    assert hub_name("opt-1.3b") == "facebook/opt-1.3b" and hub_name("./opt-1.3b") == "./opt-1.3b"
    assert hub_name("opt-tiny") == "opt-tiny", "ours, which the Hub does not have"


@pytest.mark.parametrize(
    ("model", "name"), [("facebook/opt-1.3b", "opt-1.3b"), ("/a/b/Mine//", "mine"), ("X", "x"), ("a/b/", "b")]
)
def test_a_name_for_people_is_the_last_part(model, name):
    assert short_name(model) == name
