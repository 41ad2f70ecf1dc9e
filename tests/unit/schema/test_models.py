"""Shapes: what a configuration says of layers, keys and values, weights and quantization, and what follows for memory
and traffic; and the names by which a model is known."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.schema import models
from pytest_slmserve.schema.models import CATALOGUE, Model, Quantization, model_from_config

# Bytes of one token's keys and values in 16 bit, over all layers (arXiv:2205.01068, and as vLLM 0.32 says).
KV_BYTES = {
    "opt-125m": 36_864, "opt-350m": 98_304, "opt-1.3b": 196_608, "opt-2.7b": 327_680, "opt-6.7b": 524_288,
    "opt-13b": 819_200, "qwen2.5-3b": 36_864, "qwen3-0.6b": 114_688, "qwen3-4b": 147_456, "llama-7b": 524_288,
    "llama-2-13b": 819_200, "llama-3.2-1b": 32_768, "llama-3.1-8b": 131_072, "smollm2-135m": 23_040,
    "smollm3-3b": 73_728, "phi-4-mini": 131_072, "granite-4.0-micro": 81_920, "olmoe-1b-7b": 131_072,
    "mpt-7b": 524_288, "gpt-j-6b": 458_752,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "max_position_embeddings": 8192, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
}  # fmt: skip
POSITIONS = "max_position_embeddings"
BLOOM = {"architectures": ["BloomForCausalLM"], "hidden_size": 1024, "vocab_size": 9}
LARGE_BLOOM = {**BLOOM, "num_hidden_layers": 24, "num_attention_heads": 16, POSITIONS: 2048}
USUAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", POSITIONS)
OLDER = [dict(zip(words, (30, 576, 9, 8192))) for words in (
    ("n_layer", "n_embd", "n_head", "n_positions"), ("n_layers", "d_model", "n_heads", "max_seq_len"),
)]  # fmt: skip
FLOAT8 = {"num_bits": 8, "type": "float"}
FOUR = {"num_bits": 4, "group_size": 32}
UNCLEAR = Quantization("compressed-tensors")
QWEN = {"sliding_window": 64, "use_sliding_window": True, "architectures": ["Qwen2ForCausalLM"]}
HALF = {"layer_types": ["sliding_attention", "full_attention"] * 15}
KINDS = {
    "GPT2LMHeadModel ChatGLMModel Grok1ModelForCausalLM BloomForCausalLM": ("generate", "embed"),
    "BertModel LlamaModel XLMRobertaModel": ("embed",),
    "Qwen2ForSequenceClassification BertForSequenceClassification": ("rerank", "classify"),
}
COUNTED = [name for name, model in models.MODELS.items() if model["config"]["model_type"] in {*models.FAMILIES, "bert"}]
FALCON = model_from_config("other", {**LLAMA, "architectures": ["FalconForCausalLM"]}, parameters=10)


def llama(**entries: object) -> Model:
    return model_from_config("x", {**LLAMA, **entries})


@pytest.mark.parametrize("value", [0, -1, 1 << 31, 1.5, float("inf"), float("nan"), "12", True, [12], {}], ids=str)
@pytest.mark.parametrize("name", sorted(models.MOST))
def test_impossible_model_size_is_refused(name, value):
    with refused("x: ", name, hint="decoder-only"):
        llama(**{name: value})


@pytest.mark.parametrize("value", [-1, 1 << 31, 1.5, float("inf"), float("nan"), "text", True, [12], {"a": 1}], ids=str)
@pytest.mark.parametrize("name", sorted(models.MOST_IF_ANY))
def test_impossible_optional_size_is_refused(name, value):
    with refused("x: ", "config.json", f"'{name}'", hint="decoder-only"):
        llama(**{**dict.fromkeys(models.MOST_IF_ANY, None), name: value})
    assert llama(**{name: 0}) == llama(**{name: None})


def test_architecture_determines_request_kinds():
    with refused("x: ", "'hidden_size'", "1", "9 heads"):
        llama(hidden_size=1)
    for bits in (-4, 65, 1e308, float("inf"), float("nan")):
        with refused("x: ", "'quantization_config'"):
            llama(quantization_config={"quant_method": "gptq", "bits": bits})
    entries = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9, "architectures": ["MambaForCausalLM"]}
    shape = model_from_config("x", {**entries, "state_size": 16})
    assert (shape.heads, shape.kv_heads, shape.windows, shape.indivisible(4)) == (0, 0, None, None)
    with refused("num_attention_heads"):
        model_from_config("x", entries)
    for kind, name in (("llama", "Llama"), ("qwen2_moe", "Qwen2Moe"), ("strange_kind", "strangekind")):
        unnamed = [llama(architectures=none, model_type=kind).architecture for none in (None, [])]
        assert unnamed == [f"{name}ForCausalLM"] * 2, "that of the kind"
    for names, kinds in KINDS.items():
        for name in names.split():
            model = llama(architectures=[name])
            assert (model.architecture, model.kinds, model.is_encoder) == (name, kinds, "ert" in name)
    for name in """RobertaForMaskedLM Qwen2ForRewardModel BertForTokenClassification BertForQuestionAnswering
                   T5ForConditionalGeneration""".split():  # noqa: SIM905
        with refused(name):
            llama(architectures=[name], is_encoder_decoder=name.startswith("T5"))


@pytest.mark.parametrize("name", COUNTED)
def test_parameter_count_matches_published_count(name):
    """By what was published, or Transformers counts."""
    model = models.MODELS[name]
    assert models.count_parameters(model["config"]) == model["parameters"]
    assert models.count_parameters({**model["config"], "strange_entry": 1}) is None
    unread = {"rope_theta": 7, "_name_or_path": "x", "eos_token_id": 3}
    assert models.count_parameters({**model["config"], **unread}) == model["parameters"]


def test_parameter_count_includes_biases():
    plain = {**models.MODELS["llama-tiny"]["config"], "attention_bias": False}
    wide, inner, layers = (plain[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    keys = wide // plain["num_attention_heads"] * plain["num_key_value_heads"]
    own = models.count_parameters(plain)
    assert models.count_parameters({**plain, "attention_bias": True}) == own + layers * (2 * wide + 2 * keys)
    assert models.count_parameters({**plain, "mlp_bias": True}) == own + layers * (2 * inner + wide)
    assert len(COUNTED) >= 25 and models.count_parameters(models.MODELS["opt-125m"]["config"]) is None
    assert llama(model_type="llama").parameters == models.count_parameters({**LLAMA, "model_type": "llama"})
    assert llama().parameters is None


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_match_published_models(name):
    shape = CATALOGUE[name]
    assert shape.kv_bytes_per_token() == KV_BYTES[name] == shape.kv_bytes_per_token(1) * 2
    assert shape.kv_read_bytes(100) == 100 * KV_BYTES[name], "all of it is read where all layers look back at all"
    assert shape.kv_read_bytes(100, 4) == 200 * KV_BYTES[name]
    assert shape.weight_bytes(4) == 4 * shape.parameters == 2 * shape.weight_bytes()
    assert shape.attention_width(9) == shape.heads * shape.head_size * shape.layers


def test_sliding_layers_read_their_window():
    """The groups are those that vLLM 0.32 makes of each."""
    for name, layers, sliding, window in (("270m", 3, 5, 512), ("1b", 4, 6, 512), ("4b-text", 5, 6, 1024)):
        shape = CATALOGUE[f"gemma-3-{name}"]
        each, windows = shape.kv_groups
        assert each == layers and sorted(windows, key=str) == [window] * sliding + [None]
        assert shape.kv_bytes_per_token() == layers * 4 * shape.kv_heads * 256
    shape = CATALOGUE["gemma-3-1b"]  # 22 layers of 26 look back 512 tokens; a layer keeps 1,024 bytes of a token
    assert shape.kv_read_bytes(512) == 26 * 512 * 1024
    assert shape.kv_read_bytes(2048) == (22 * 512 + 4 * 2048) * 1024
    assert shape.attention_width(2048) == 4 * 256 * (22 * 512 / 2048 + 4)
    # Of Falcon's 71 heads, one is of keys.
    for shape in (FALCON, *map(CATALOGUE.get, ("granite-4.0-h-350m", "granite-4.0-h-1b", "lfm2-350m"))):
        assert shape.windows is shape.kv_groups is shape.kv_bytes_per_token() is shape.kv_read_bytes(100) is None
        assert shape.parameters and replace(shape, parameters=None).weight_bytes() is None
        assert shape.attention_width(100) == shape.heads * shape.head_size * shape.layers
    # With 16 there is one layer of padding.
    for sliding, groups in ((15, (15, (64, None))), (16, (16, (64, None))), (17, None), (20, (10, (64, 64, None)))):
        kinds = ["sliding_attention"] * sliding + ["full_attention"] * (30 - sliding)
        assert llama(sliding_window=64, layer_types=kinds).kv_groups == groups


@pytest.mark.parametrize(("entries", "windows"), [
    ({}, {None}), ({"sliding_window": 64}, {64}),
    ({"sliding_window": 64, "use_sliding_window": False}, {None}),
    ({"sliding_window": 64, **HALF}, {64, None}), ({"layer_types": ["attention"] * 30}, {None}),
    ({"sliding_window": 64, "sliding_window_pattern": 6}, None),
    ({"sliding_window": 64, "architectures": ["Gemma2ForCausalLM"]}, None),
    ({**QWEN, "max_window_layers": 28}, {None, 64}), ({**QWEN, "max_window_layers": 30}, {None}), (QWEN, None),
    (HALF, None), ({"layer_types": ["full_attention"] * 29}, None),
    ({"layer_types": ["full_attention"] * 29 + ["mamba"]}, None),
    ({"layer_types": ["full_attention"] * 29 + ["chunked_attention"]}, None),
])  # fmt: skip
def test_configuration_determines_attention_windows(entries, windows):
    shape = llama(**entries)
    assert (shape.windows and {*shape.windows}) == windows and (shape.kv_bytes_per_token() is None) is (windows is None)


def test_configuration_entries_fill_model_fields():
    bare = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}
    with refused("bare", hint="decoder-only"):
        model_from_config("bare", bare)
    shape = model_from_config("bare", bare, completed=LLAMA)
    assert (shape.layers, shape.kv_heads, dict(shape.config)) == (30, 3, bare)
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    assert model_from_config("nested", nested).layers == 30
    more = {"head_dim": 50, "word_embed_proj_dim": 77, "ffn_dim": 99, "num_local_experts": 8, "num_experts_per_tok": 2}
    sizes = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "vocabulary": 49152, "positions": 8192}
    widths = {"head_size": 50, "embedding_width": 77, "feed_forward": 99, "experts": 8, "experts_per_token": 2}
    counts = {"parameters": 123, "active": 45, "windows": (None,) * 30, "source": "hub"}
    full = Model("x", "LlamaForCausalLM", **sizes, **widths, **counts)
    assert model_from_config("x", {**LLAMA, **more}, 123, 45, source="hub") == full
    widths = {"head_size": 64, "embedding_width": 576, "feed_forward": 1536, "experts": 0, "experts_per_token": 0}
    counts = {"parameters": None, "active": None, "windows": (None,) * 30, "source": "catalogue"}
    plain = Model("x", "LlamaForCausalLM", **{**sizes, "kv_heads": 9}, **widths, **counts)
    assert llama(num_key_value_heads=None) == plain and not plain.tied and plain.quantization is None
    none = model_from_config("x", {**LLAMA, "intermediate_size": None, "n_routed_experts": 4}, 10)
    assert (none.feed_forward, none.experts, none.experts_per_token, none.active) == (None, 4, 4, 10)
    assert llama(num_experts=None, num_local_experts=6).experts == 6
    told = {}, {"torch_dtype": "bfloat16"}, {"dtype": "float32"}
    assert [llama(**each).dtype for each in told] == ["float16", "bfloat16", "float16"]
    assert [replace(CATALOGUE["opt-125m"], positions=n).context for n in (2047, 2048, 4096)] == [2047, 2048, 2048]
    config = {**models.MODELS["bge-small-en-v1.5"]["config"], "max_position_embeddings": 514, "pad_token_id": 1}
    for kind, positions in (("bert", 514), ("roberta", 512), ("xlm-roberta", 512)):
        told = {**config, "model_type": kind, "architectures": ["XLMRobertaModel"]}
        found = model_from_config("x", told, 7)
        assert found.positions == found.context == positions
        assert (found.kinds, found.is_encoder) == (("embed",), True)


@pytest.mark.parametrize(("entries", "usual"), [
    *(({**BLOOM, **words}, LARGE_BLOOM) for words in (
        {"n_layer": 24, "n_head": 16, "seq_length": 2048}, {"n_layers": 24, "n_heads": 16, "max_seq_len": 2048},
        {"num_layers": 24, "num_attention_heads": 16, "padded_vocab_size": 9, "vocab_size": None, "seq_length": 2048},
        {"num_hidden_layers": 24.0, "num_attention_heads": 16})),  # no positions, as with ALiBi: vLLM's own default
    *(({**{name: size for name, size in LLAMA.items() if name not in USUAL}, **words}, LLAMA) for words in OLDER),
], ids=range(6))  # fmt: skip
def test_older_configuration_names_are_read(entries, usual):
    assert model_from_config("x", entries) == model_from_config("x", usual)
    assert llama(**dict.fromkeys([word for words in OLDER for word in words], 1)) == llama(), "which go before them"


@pytest.mark.parametrize("broken", [
    *((name, None) for name in sorted(LLAMA.keys() - {"num_key_value_heads", "intermediate_size", POSITIONS})),
    ("architectures", []), ("num_attention_heads", "many"), ("vocab_size", "many"),
])  # fmt: skip
def test_missing_configuration_entry_is_refused(broken):
    name, value = broken
    entries = {**LLAMA, name: value}
    with refused("x: ", hint="decoder-only"):
        model_from_config("x", entries)
    del entries[name]
    with refused("x: ", name, hint="decoder-only"):
        model_from_config("x", entries)


@pytest.mark.parametrize(("name", "tied"), [("gemma-3-270m", True), ("opt-125m", True), ("llama-7b", False)])
def test_embedding_tying_follows_architecture(name, tied):
    """As Transformers writes those of Gemma and OPT."""
    untold = {entry: value for entry, value in CATALOGUE[name].config if entry != "tie_word_embeddings"}
    shape = model_from_config("mine", untold)
    assert shape.tied is CATALOGUE[name].tied is tied and shape.lm_head == CATALOGUE[name].lm_head
    for entry in ("tie_word_embeddings", "tie_embedding"):
        assert model_from_config("mine", {**untold, entry: not tied}).tied is not tied
    assert model_from_config("mine", {**untold, "tie_word_embeddings": tied, "tie_embedding": not tied}).tied is tied
    sizes = [(CATALOGUE[each].lm_head, CATALOGUE[each].tied) for each in ("opt-350m", "qwen3-0.6b", "qwen3-8b")]
    assert sizes == [(50_272 * 512, True), (151_936 * 1024, True), (151_936 * 4096, False)]


def groups(*weights: object, **more: object) -> dict[str, object]:
    made = {str(n): {"weights": each} for n, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": made, **more}


def inputs(*activations: object) -> dict[str, object]:
    made = {str(n): {"input_activations": each} if each else {} for n, each in enumerate(activations)}
    return {"quant_method": "x", "config_groups": made}


@pytest.mark.parametrize(("own", "found"), [
    (None, None), ({}, None),
    ("awq", None), ({"quant_method": "fp8"}, Quantization("fp8")),
    ({"bits": 4}, Quantization(None, 4.0, zero_points=True)),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization("awq", 4.0, 64, True)),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Quantization("gptq", 8.0, None, True)),
    ({"quant_method": "gptq", "bits": 8, "group_size": 1}, Quantization("gptq", 8.0, 1, True)),
    (groups(FOUR), replace(UNCLEAR, bits=4.0, group_size=32)),
    (groups(FOUR, FOUR), replace(UNCLEAR, bits=4.0, group_size=32)),
    (groups({**FOUR, "symmetric": False}), replace(UNCLEAR, bits=4.0, group_size=32, zero_points=True)),
    (groups(FOUR, {**FOUR, "symmetric": False}), UNCLEAR), (groups(FOUR, {**FOUR, "group_size": 64}), UNCLEAR),
    (groups(FOUR, None), UNCLEAR), (groups(), UNCLEAR),
    (groups(kv_cache_scheme=FLOAT8), replace(UNCLEAR, kv_cache_dtype="fp8")),
    (groups(kv_cache_scheme="int8"), replace(UNCLEAR, kv_cache_dtype="")),
    ({"quant_method": "modelopt4", "kv_cache_quant_algo": "FP8"}, Quantization("modelopt4", kv_cache_dtype="fp8")),
    ({"quant_method": "fp8", "kv_cache_scheme": "FP8"}, Quantization("fp8")),
    (inputs(FLOAT8), Quantization("x", fp8_inputs=True)), (inputs({"num_bits": 8}), Quantization("x")),
    (inputs({"type": "float"}), Quantization("x")), (inputs({}, FLOAT8), Quantization("x", fp8_inputs=True)),
])  # fmt: skip
def test_quantization_is_read_from_configuration(own, found):
    assert llama(quantization_config=own).quantization == found


def test_scarce_kv_heads_are_duplicated():
    for gpus in (1, 2, 4, 8):
        for name, heads in (("opt-125m", 12), ("opt-13b", 40), ("qwen2.5-3b", 2)):
            shape, held = CATALOGUE[name], max(1, gpus // heads)
            assert (shape.indivisible(gpus) is None) is (name != "opt-125m" or gpus != 8)
            assert shape.kv_bytes_per_token(gpus=gpus) == held * shape.kv_bytes_per_token()
            assert shape.kv_read_bytes(9, gpus=gpus) == held * shape.kv_read_bytes(9)


@given(st.integers(1, 64), st.integers(1, 16), st.none() | st.integers(1, 64), st.integers(1, 16))
def test_uneven_gpu_split_is_explained(heads, kv_heads, wide, gpus):
    shape = replace(CATALOGUE["opt-125m"], heads=heads, kv_heads=kv_heads, feed_forward=wide)
    even = heads % gpus == 0 and (wide is None or wide % gpus == 0) and (kv_heads % gpus == 0 or gpus % kv_heads == 0)
    assert (shape.indivisible(gpus) is None) is even
    few = {"num_key_value_heads": 3, "num_attention_heads": 24}
    for change, n, fact in (({}, 3, "16 heads"), ({"intermediate_size": 11007}, 2, "11007"), (few, 4, "3 KV heads")):
        reason = model_from_config("x", {**dict(CATALOGUE["qwen2.5-3b"].config), **change}).indivisible(n)
        assert reason.startswith("x ") and fact in reason and f"{n} GPUs" in reason


@pytest.mark.parametrize(("model", "catalogue", "hub", "short"), [
    ("OPT-1.3b", "opt-1.3b", "facebook/opt-1.3b", "opt-1.3b"),
    ("facebook/OPT-1.3B", "opt-1.3b", "facebook/opt-1.3b", "opt-1.3b"),
    ("opt-tiny", "opt-tiny", "opt-tiny", "opt-tiny"),  # ours, which the Hub does not have
    ("./opt-1.3b", None, "./opt-1.3b", "opt-1.3b"),  # a folder
    ("opt-1.3b/", None, "opt-1.3b/", "opt-1.3b"), ("/a/b/Mine//", None, "/a/b/Mine//", "mine"),
])  # fmt: skip
def test_model_names_are_resolved(model, catalogue, hub, short):
    names = models.catalogue_name(model), models.hub_name(model), models.short_name(model)
    assert names == (catalogue, hub, short)
