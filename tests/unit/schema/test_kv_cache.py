"""Bytes of weights and of the KV cache, the blocks that an engine has, and the requests that fit in them: by shapes, by
what was quantized, and by what the engine itself reports."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st
from refusals import refused

from pytest_slmserve.schema import kv_cache
from pytest_slmserve.schema.kv_cache import kv_bytes, kv_capacity, kv_layout, predicted_blocks, weight_bytes
from pytest_slmserve.schema.models import CATALOGUE, Model, model_from_config
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, Adapters, EngineSpec

OPT = EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB)  # a token takes 196,608 bytes
UNKNOWN = EngineSpec("/somewhere/else", kv_cache_bytes=GIB, tensor_parallel_size=2)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
TINY = CATALOGUE["opt-tiny"], CATALOGUE["llama-tiny"]
QWEN, PLAIN = CATALOGUE["qwen3-0.6b"], EngineSpec("qwen3-0.6b")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FLOAT8 = {"num_bits": 8, "type": "float"}


def with_extra(spec: EngineSpec = OPT, **extra: object) -> EngineSpec:
    return replace(spec, extra=tuple(extra.items()))


FP8, SERVED = with_extra(PLAIN, quantization="fp8"), with_extra(**Adapters(4, 8).arguments({}))


def test_reported_kv_blocks_override_defaults():
    """arXiv:2503.08311's OPT-1.3B: 54.41 GiB of KV cache, 18,573 blocks of 16 tokens (the log rounds the GiB)."""
    spec = EngineSpec("opt-1.3b", kv_cache_bytes=int(54.41 * GIB))
    assert abs(predicted_blocks(spec) - 18_573) <= 2
    assert kv_capacity(OPT, 768) == (1365 - 1) // 48
    reason = kv_cache.no_room(OPT, 160, 137)
    assert "136" in reason and "160" in reason and kv_cache.no_room(OPT, 160, 136) is None
    assert kv_capacity(UNKNOWN, 160) is kv_cache.no_room(UNKNOWN, 160, 10_000) is None, "its capacity is not known"
    assert predicted_blocks(replace(OPT, dtype="auto"), Resolved(dtype="float16", block_size=32)) == 682
    assert kv_bytes(OPT, Resolved(kv_blocks=100, block_size=32)) == 100 * 32 * 196_608
    assert kv_bytes(UNKNOWN, Resolved(kv_blocks=100)) == kv_bytes(UNKNOWN, Resolved()) == 2 * GIB
    assert kv_bytes(replace(OPT, kv_cache_bytes=0), Resolved()) == 0
    sizes = {OPT: 2, with_extra(dtype="float"): 4, replace(OPT, dtype="int3"): None}
    assert {spec: kv_cache.value_bytes(spec) for spec in sizes} == sizes
    assert kv_cache.value_bytes(OPT, Resolved(dtype="float32")) == 4
    for said in (0, -1, -1000, None):  # a record whose blocks have no size is one that does not say
        assert kv_layout(OPT, Resolved(block_size=said)).block_size == kv_layout(OPT).block_size == 16
        assert kv_capacity(OPT, 768, Resolved(kv_blocks=481, block_size=said)) == 10
    for given_one, limit in ((None, 1024), (8, 8), (0, 1024), ("8", 1024)):
        extra = {} if given_one is None else {"max_num_seqs": given_one}
        assert kv_cache.given_limit(with_extra(**extra), "max_num_seqs") == limit
        assert kv_cache.given_limit(with_extra(**extra, more=1), "more", "max_num_seqs") == 1
    assert kv_cache.given_limit(OPT, "more", "max_num_seqs") == 1024
    types = {"auto": 2, "fp8": 1, "fp8_e4m3": 1, "bfloat16": 2, "float32": 4, "turbo": None}
    for asked, each in types.items():
        layout = kv_layout(with_extra(EngineSpec("opt-125m"), kv_cache_dtype=asked))
        assert layout == kv_cache.KvLayout(each, each and 18_432 * each, (None,), 16), "one group, whatever the type"


@pytest.mark.parametrize(("spec", "blocks"), [
    (EngineSpec("opt-tiny", platform="cpu", dtype="bfloat16", kv_cache_bytes=GIB), 8192),  # seen on vLLM's CPU backend
    (OPT, 1365),
    (EngineSpec("facebook/opt-1.3b", platform="simulated", kv_cache_bytes=4 * GIB), 1365),
    (replace(OPT, dtype="float32"), 682), (with_extra(dtype="float32"), 682),
    (with_extra(kv_cache_dtype="fp8"), 2730),
    (with_extra(kv_cache_dtype="fp8_per_token_head"), None),  # with scales, in vLLM 0.32
    (with_extra(block_size=32), 682), (with_extra(kv_cache_memory_bytes=GIB), 341),
    (with_extra(num_gpu_blocks_override=77), 77), (replace(OPT, tensor_parallel_size=2), 2730),
    (replace(OPT, kv_cache_bytes=0), None), (replace(OPT, interface="transformers"), None),
    (replace(OPT, platform="remote", interface="endpoint", url="http://h/v1"), None),
    (replace(OPT, dtype="auto"), None), (UNKNOWN, None),
])  # fmt: skip
def test_kv_blocks_follow_model_shape(spec, blocks):
    assert predicted_blocks(spec) == blocks


@given(
    st.integers(1, 2**40), st.sampled_from([16, 32, 128]), st.sampled_from(["opt-125m", "qwen3-0.6b", "gemma-3-1b"]),
    st.integers(1, 10_000), st.integers(1, 4096),
)  # fmt: skip
def test_predicted_blocks_fill_kv_cache(size, block, model, held, longest):
    spec = with_extra(EngineSpec(model, kv_cache_bytes=size), block_size=block)
    each, blocks = block * CATALOGUE[model].kv_bytes_per_token(2), predicted_blocks(spec)
    assert blocks * each <= size < (blocks + 1) * each
    assert kv_bytes(spec, Resolved()) == blocks * each
    each = -(-longest // block)
    fit = kv_capacity(EngineSpec("opt-1.3b"), longest, Resolved(kv_blocks=held, block_size=block))
    assert fit * each <= held - 1 < (fit + 1) * each


@pytest.mark.parametrize(("windows", "step_tokens", "blocks"), [
    ((None,), 4096, 48),
    ((None, 512), 4096, 96),  # of so few tokens a layer that slides keeps all while they are scheduled
    ((None, 512), 32, 48 + 37), ((None, 513), 32, 48 + 37), ((None, 514), 32, 48 + 38), ((None, 0), 32, 48 + 2),
    ((), 32, 0),
])  # fmt: skip
def test_request_blocks_cover_layer_groups(windows, step_tokens, blocks):
    spec = EngineSpec("opt-125m", max_num_batched_tokens=step_tokens)
    assert kv_cache.request_blocks(spec, windows, 16, 768) == blocks


def test_sliding_layer_groups_share_blocks():
    """As vLLM groups the 26 layers of Gemma 3 1B: 7 groups of 4."""
    spec = EngineSpec("gemma-3-1b", dtype="bfloat16", kv_cache_bytes=GIB, max_num_batched_tokens=2048)
    assert predicted_blocks(spec) == GIB // (16 * 4 * 1024) == 16_384
    assert kv_capacity(spec, 768) == 16_383 // (7 * 48)
    assert kv_capacity(spec, 30_720) == 16_383 // (1920 + 6 * (-(-(511 + 4096) // 16) + 1))
    larger = with_extra(spec, max_num_batched_tokens=8192)
    assert kv_capacity(larger, 30_720) == 16_383 // (1920 + 6 * (-(-(511 + 16_384) // 16) + 1))
    one = with_extra(EngineSpec("gemma-3-1b"), disable_hybrid_kv_cache_manager=True)
    assert predicted_blocks(one) is kv_capacity(one, 768) is None
    spec, told = EngineSpec("granite-4.0-h-350m"), Resolved(kv_blocks=1000, block_size=16)
    assert kv_capacity(spec, 768) is kv_capacity(spec, 768, told) is None, "nor what a request takes"
    assert kv_capacity(spec, 768, replace(told, kv_windows=(None, 0, 0))) == 999 // (48 + 2 * 2)


@example(10, 0.5, GIB - 1)
@example(10, 0.5, GIB)
@given(st.integers(1, 80), st.floats(0.05, 1), st.integers(0, 80 * GIB))
def test_kv_budget_excludes_weights(gib, share, weights):
    left = int(gib * GIB * share) - weights - 4 * GIB
    if left > 0:
        assert kv_cache.kv_budget_bytes(gib * GIB, share, weights) == left
    else:
        facts = f"{weights / GIB + 4:.1f} GiB", f"{gib * share:.1f} GiB"
        with refused(*facts, hint="--slm-gpu-memory-utilization"):
            kv_cache.kv_budget_bytes(gib * GIB, share, weights)


@pytest.mark.parametrize(("text", "size"), [
    ("80GiB", 80 * GIB), ("80 gib", 80 * GIB), ("63.5GiB", int(63.5 * GIB)), ("150754820096", 150754820096),
    ("1GiB", GIB), ("16384GiB", 1 << 44),
    *((text, None) for text in ("", "80", "80GB", "-1GiB", "0", "1e12", "nan", "9" * 40, "9" * 20, "0.99GiB",
                                "16385GiB", "1073741824" + ".0" * 15)),
])  # fmt: skip
def test_memory_sizes_are_parsed(text, size):
    if size is not None:
        assert kv_cache.parse_memory(text) == size
    else:
        with refused(repr(text), hint="80GiB"):
            kv_cache.parse_memory(text)


def quantized(own: dict) -> Model:
    return model_from_config("mine", {**dict(QWEN.config), "quantization_config": own}, QWEN.parameters)


@pytest.mark.parametrize(("spec", "method", "weights"), [
    (PLAIN, None, 2 * QWEN.parameters),
    (FP8, "fp8", QWEN.parameters + 151_936 * 1024),  # embeddings keep their type
    (replace(FP8, model_facts=CATALOGUE["qwen3-8b"]), "fp8", CATALOGUE["qwen3-8b"].parameters + 2 * 151_936 * 4096),
    (replace(FP8, model_facts=replace(QWEN, parameters=1000)), "fp8", 2000),  # no more than all are kept
    (EngineSpec("mine", model_facts=quantized(AWQ)), "awq",
     int(2 * QWEN.lm_head + (QWEN.parameters - QWEN.lm_head) * (4 + 20 / 128) / 8)),
    (EngineSpec("mine"), None, None),
    (replace(FP8, model_facts=replace(QWEN, parameters=None)), "fp8", None),
    (replace(PLAIN, model_facts=replace(QWEN, parameters=None)), None, None),
])  # fmt: skip
def test_weight_bytes_follow_quantization(spec, method, weights):
    assert (kv_cache.quantization_of(spec), weight_bytes(spec, 2)) == (method, weights)


def groups(*weights: dict) -> dict:
    return {"config_groups": {str(i): {"weights": each} if each else {} for i, each in enumerate(weights)}}


@pytest.mark.parametrize(("method", "own", "bits"), [
    ("fp8", {}, 8), ("FP8", {}, 8), ("mxfp8", {}, 8.25), ("bitsandbytes", {}, 4.5),
    ("gptq_marlin", {"bits": 8, "group_size": -1}, 8), ("compressed-tensors", groups({"num_bits": 8}), 8),
    ("compressed-tensors", groups({"num_bits": 4, "group_size": 128}), 4.125),
    ("compressed-tensors", groups({"num_bits": 4, "symmetric": False, "group_size": 32}), 4.625),
    ("compressed-tensors", groups({"num_bits": 8}, {}), None), ("compressed-tensors", {}, None), ("gptq", {}, None),
    ("mxfp4", {}, None),
])  # fmt: skip
def test_weight_bits_follow_quantization_method(method, own, bits):
    model = quantized({"quant_method": method.removesuffix("_marlin"), **own})
    found = weight_bytes(with_extra(EngineSpec("mine", model_facts=model), quantization=method), 0)
    assert found == (None if bits is None else int((model.parameters - model.lm_head) * bits / 8))


@pytest.mark.parametrize(("own", "each"), [
    ({}, 2),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, 2),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**FLOAT8, "strategy": "tensor"}}, 1),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1),
    ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, None),
    ({"quant_method": "fp8", "kv_cache_scheme": "static"}, 2),
])  # fmt: skip
def test_checkpoint_sets_kv_cache_dtype(own, each):
    """As `resolve_kv_cache_dtype_string` and `Attention` of vLLM have it."""
    spec = EngineSpec("mine", dtype="bfloat16", model_facts=quantized(own))
    assert kv_layout(spec).value_bytes == each
    assert kv_layout(with_extra(spec, kv_cache_dtype="bfloat16")).value_bytes == 2, "what is asked for counts first"


@pytest.mark.parametrize(("asked", "own", "facts"), [
    ("awq", {}, ("awq",)), ("fp8", AWQ, ("by awq", "fp8")), ("fp8", {}, None), ("awq", AWQ, None),
    ("awq_marlin", AWQ, None), ("awq_marlin", {**AWQ, "quant_method": "awq_marlin"}, None),
    ("gptq_marlin", {}, ("gptq_marlin",)), ("a-method-of-tomorrow", {}, None),
    ("", AWQ, None),
])  # fmt: skip
def test_unavailable_quantization_method_is_refused(asked, own, facts):
    spec = with_extra(EngineSpec("mine", model_facts=quantized(own)), **({"quantization": asked} if asked else {}))
    if facts is None:
        assert kv_cache.check_quantization(spec) is None
    else:
        with refused("mine", *facts, hint=f"--slm-quantization {'awq' if own else 'fp8'}"):
            kv_cache.check_quantization(spec)


@pytest.mark.parametrize(("arguments", "facts"), [
    ({"max_num_batched_tokens": 1023}, ("1023", "1024")), ({"max_num_batched_tokens": 1024}, None),
    ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, None), ({"max_num_seqs": 9000}, ("9000", "8192")),
    ({"speculative_config": None}, None), ({"speculative_config": "ngram"}, ("not an object", "'ngram'")),
    ({"speculative_config": "{}"}, ("not an object",)),
    ({"speculative_config": '{"num_speculative_tokens": 3}'}, ("method",)),
    ({"speculative_config": '{"method": "ngram"}'}, ("num_speculative_tokens", "None")),
    ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 0}'}, ("num_speculative_tokens 0",)),
    ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": true}'}, ("num_speculative_tokens True",)),
    ({"speculative_config": NGRAM[:-1] + ', "prompt_lookup_max": 4}'}, None),
    ({"speculative_config": NGRAM[:-1] + ', "prompt_lookup_min": 5, "prompt_lookup_max": 4}'},
     ("prompt_lookup_min 5", "prompt_lookup_max 4")),
    ({"speculative_config": '{"method": "suffix"}'}, None), ({"speculative_config": '{"model": "opt-tiny"}'}, None),
    ({"interface": "transformers", "speculative_config": NGRAM}, ("speculative_config",)),
    ({"platform": "cpu", "speculative_config": NGRAM[:-1] + ', "rejection_sample_method": "synthetic"}'},
     ("synthetic",)),
])  # fmt: skip
def test_impossible_engine_arguments_are_refused(arguments, facts):
    own = {name: arguments[name] for name in ("interface", "platform") if name in arguments}
    spec = EngineSpec("opt-125m", max_num_seqs=1024, max_num_batched_tokens=8192, **own)
    spec = with_extra(spec, **{name: value for name, value in arguments.items() if name not in own})
    if facts is None:
        assert kv_cache.check_arguments(spec) is None
    else:
        with refused(*facts):
            kv_cache.check_arguments(spec)


@pytest.mark.parametrize(("config", "load_format", "made_up", "weights"), [
    (None, "dummy", False, False),
    (NGRAM, "dummy", True, False), (NGRAM, "auto", False, False),
    ('{"model": "opt-tiny", "num_speculative_tokens": 3}', "dummy", True, True),
])  # fmt: skip
def test_dummy_weight_acceptance_is_noted(config, load_format, made_up, weights):
    spec = EngineSpec("opt-125m", load_format=load_format, extra=(("speculative_config", config),))
    note = kv_cache.made_up_acceptance(spec)
    assert "nothing of real text" in note if made_up else note is None
    assert kv_cache.has_draft_weights(spec) is weights


def test_adapter_slots_reduce_kv_cache():
    """vLLM 0.32 on a CPU, three slots of rank 8: 221,184 bytes of opt-tiny, and of a Llama its tables too."""
    spec = with_extra(EngineSpec("opt-tiny"), enable_lora=True, max_loras=3, max_lora_rank=8)
    assert kv_cache.adapter_bytes(spec) == 221_184
    assert kv_cache.adapter_bytes(replace(spec, dtype="float32")) == 2 * 221_184
    shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_size": 32, "feed_forward": 344, "vocabulary": 1024}
    llama, others = replace(TINY[1], layers=2, **shape), {"Qwen2ForCausalLM": 0, "Olmo2ForCausalLM": 1}
    for kind, tables in {"LlamaForCausalLM": 2, **others}.items():
        made = 3 * replace(llama, architecture=kind).adapter_slot_bytes(8)
        assert made == 61_440 + 69_888 + 90_624 + tables * 55_296
    assert kv_cache.adapter_bytes(OPT) == kv_cache.adapter_bytes(replace(UNKNOWN, extra=SERVED.extra)) == 0
    assert not CATALOGUE["gpt-j-6b"].adapted
    each = CATALOGUE["opt-1.3b"].adapter_slot_bytes(256)
    spec = with_extra(**Adapters(64, 256).arguments({}))
    assert kv_cache.beside_adapters(OPT, GIB) == GIB
    assert kv_cache.beside_adapters(spec, 80 * GIB) == 80 * GIB - 64 * each
    budget = 10 * each + 2048 * 196_608  # and one request as long as the context
    with refused(64, hint="--slm-engine-arg max_loras=10"):
        kv_cache.beside_adapters(spec, budget)
    assert kv_cache.beside_adapters(replace(spec, extra=(*spec.extra, ("max_loras", 10))), budget) == budget - 10 * each
    with refused(hint="utilization"):
        kv_cache.beside_adapters(spec, GIB // 4)


@pytest.mark.parametrize(("spec", "word"), [
    (OPT, "--slm-lora 4x8"), (replace(SERVED, model="gpt-j-6b", model_facts=None), "OPTForCausalLM"),
    (replace(UNKNOWN, extra=SERVED.extra), "OPTForCausalLM"),
    (replace(SERVED, interface="transformers"), "--slm-interface"),
    (replace(SERVED, platform="remote", interface="endpoint", url="http://h/v1"), "--slm-endpoint"),
    (with_extra(SERVED, **{**SERVED.arguments, "max_lora_rank": 24}), "max_lora_rank=8"),
    (with_extra(SERVED, **{**SERVED.arguments, "max_lora_rank": 1}), "max_lora_rank=8"),
    (with_extra(SERVED, **{**SERVED.arguments, "max_loras": 0}), "positive"),
    (with_extra(SERVED, **{**SERVED.arguments, "max_loras": "many"}), "positive"),
    (with_extra(SERVED, **{**SERVED.arguments, "max_cpu_loras": 3}), "max_cpu_loras=4"),
    (replace(SERVED, interface="server", extra=(*SERVED.extra, ("api_server_count", 2))), "api_server_count=1"),
])  # fmt: skip
def test_unsupported_adapters_are_refused(spec, word):
    with refused(hint=word):
        kv_cache.check_adapters(spec, Adapters(4, 8))
    wider = with_extra(SERVED, **{**SERVED.arguments, "max_lora_rank": 16})
    assert kv_cache.check_adapters(wider, Adapters(40, 8)) is None, "more than its slots are what starves"


@pytest.mark.parametrize(("asked", "told"), [
    ({"synthetic_acceptance_length": 2.5}, "of 2.5 tokens"),
    ({"synthetic_acceptance_rates": [0.8, 0.4]}, "of 2.2 tokens"),
    ({"synthetic_acceptance_rates": "many"}, "acceptance"), ({}, "acceptance"),  # which vLLM refuses
])  # fmt: skip
@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_synthetic_acceptance_is_noted(asked, told, load_format):
    config = json.dumps({"method": "ngram", "rejection_sample_method": "synthetic", **asked})
    spec = EngineSpec("opt-125m", load_format=load_format, extra=(("speculative_config", config),))
    note = kv_cache.made_up_acceptance(spec)
    assert "planted" in note and told in note and "real text" not in note
