"""Bytes of quantized weights, and methods that a model does not have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_slmserve.analysis.metrics.gpu_figures import Peaks, peaks_for
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import check_quantization, kv_layout, quantization_of, weight_bytes
from pytest_slmserve.schema.models import CATALOGUE, Model, model_from_config
from pytest_slmserve.schema.specs import EngineSpec

QWEN = CATALOGUE["qwen3-0.6b"]
PLAIN, FP8 = EngineSpec("qwen3-0.6b"), EngineSpec("qwen3-0.6b", extra=(("quantization", "fp8"),))
ASYMMETRIC = {"num_bits": 4, "symmetric": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def quantized(own: dict) -> Model:
    return model_from_config("mine", {**dict(QWEN.config), "quantization_config": own}, QWEN.parameters)


def test_of_fp8_embeddings_keep_their_type():
    embeddings = 151_936 * 1024
    assert QWEN.lm_head == embeddings and QWEN.tied and not CATALOGUE["qwen3-8b"].tied
    assert CATALOGUE["opt-350m"].lm_head == 50_272 * 512, "narrower than its layers"
    assert weight_bytes(PLAIN, 2) == 2 * QWEN.parameters
    assert weight_bytes(FP8, 2) == QWEN.parameters + embeddings
    untied = CATALOGUE["qwen3-8b"]
    assert weight_bytes(replace(FP8, model_facts=untied), 2) == untied.parameters + 2 * 151_936 * 4096


@pytest.mark.parametrize(("model", "tied"), [("gemma-3-270m", True), ("opt-125m", True), ("llama-7b", False)])
def test_embeddings_of_a_configuration_that_does_not_tell(model, tied):
    """As Transformers writes those of Gemma and OPT."""
    untold = {name: value for name, value in CATALOGUE[model].config if name != "tie_word_embeddings"}
    shape = model_from_config("mine", untold)
    assert shape.tied is CATALOGUE[model].tied is tied and shape.lm_head == CATALOGUE[model].lm_head


def test_a_model_that_was_quantized_says_how():
    spec = EngineSpec("mine", model_facts=quantized(AWQ))
    assert quantization_of(PLAIN) is quantization_of(EngineSpec("mine")) is None
    assert (quantization_of(spec), quantization_of(FP8)) == ("awq", "fp8")
    bits = 4 + 20 / 128
    assert weight_bytes(spec, 2) == int(2 * QWEN.lm_head + (QWEN.parameters - QWEN.lm_head) * bits / 8)


@pytest.mark.parametrize(
    ("method", "own", "bits"),
    [
        ("fp8", {}, 8),
        ("mxfp8", {}, 8.25),
        ("gptq_marlin", {"bits": 8, "group_size": -1}, 8),
        ("compressed-tensors", {"config_groups": {"0": {"weights": {"num_bits": 8}}}}, 8),
        ("compressed-tensors", {"config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 128}}}}, 4.125),
        ("compressed-tensors", {"config_groups": {"0": {"weights": {**ASYMMETRIC, "group_size": 32}}}}, 4.625),
        ("compressed-tensors", {"config_groups": {"0": {"weights": {"num_bits": 8}}, "1": {}}}, None),
        ("compressed-tensors", {}, None),
        ("gptq", {}, None),
        ("mxfp4", {}, None),
    ],
)
def test_bits_of_a_weight(method, own, bits):
    model = quantized({"quant_method": method.removesuffix("_marlin"), **own})
    found = weight_bytes(EngineSpec("mine", extra=(("quantization", method),), model_facts=model), 0)
    others = model.parameters - model.lm_head
    assert found == (None if bits is None else int(others * bits / 8))


FLOAT8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("own", "dtype"),
    [
        ({}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**FLOAT8, "strategy": "tensor"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, ""),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "auto"),
    ],
)
def test_the_cache_that_a_checkpoint_asks_for(own, dtype):
    """As `resolve_kv_cache_dtype_string` and `Attention` of vLLM have it."""
    spec = EngineSpec("mine", dtype="bfloat16", model_facts=quantized(own))
    assert kv_layout(spec).value_bytes == {"auto": 2, "fp8": 1, "": None}[dtype]
    given = replace(spec, extra=(("kv_cache_dtype", "bfloat16"),))
    assert kv_layout(given).value_bytes == 2, "what the specification says counts first"


def test_what_is_computed_in_fp8():
    groups = [{"0": {"weights": FLOAT8, "input_activations": inputs}} for inputs in (FLOAT8, None, {"num_bits": 8})]
    models = [quantized({"quant_method": "compressed-tensors", "config_groups": group}) for group in groups]
    specs = [*(EngineSpec("mine", model_facts=each) for each in models), FP8, PLAIN, EngineSpec("mine")]
    peaks = Peaks("invented", (), flops_per_s=1.0, bytes_per_s=1.0, fp8_flops_per_s=2.0)
    assert [peaks_for(spec, peaks).flops_per_s for spec in specs] == [2.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    assert peaks_for(FP8, replace(peaks, fp8_flops_per_s=None)).flops_per_s == 1.0, "the GPU has none"


def test_weights_of_an_unknown_method_are_not_counted():
    assert weight_bytes(EngineSpec("mine", model_facts=quantized({"quant_method": "mxfp4"})), 2) is None


@pytest.mark.parametrize(
    ("asked", "own", "problem"),
    [
        ("awq", {}, "awq weights are loaded, not made"),
        ("fp8", AWQ, "its weights are quantized by awq, not fp8"),
        ("fp8", {}, None),
        ("awq", AWQ, None),
        ("awq_marlin", AWQ, None),
        ("gptq_marlin", {}, "gptq_marlin weights are loaded, not made"),
        ("a-method-of-tomorrow", {}, None),
        ("", AWQ, None),
    ],
)
def test_a_method_that_the_model_does_not_have_is_refused(asked, own, problem):
    model = quantized(own) if own else QWEN
    spec = EngineSpec("mine", extra=(("quantization", asked),) if asked else (), model_facts=model)
    if problem is None:
        return check_quantization(spec)
    with pytest.raises(BadUsage, match=problem):
        check_quantization(spec)
