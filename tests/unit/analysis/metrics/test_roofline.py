"""The roofline and the mean step: work of a request by its definition, bounds that rise and fall as they must, data
sheets by the names of GPUs, and parts of a step that are all of it."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st
from strategies import changed, measurement, planted_telemetry, work_of_model

from pytest_slmserve.analysis.metrics import gpu_figures, window
from pytest_slmserve.analysis.metrics.gpu_figures import StepTime, ceiling_tokens_per_s, roofline_fraction, step_time
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.models import CATALOGUE, Quantization, model_from_config
from pytest_slmserve.schema.records import GpuPeaks, Resolved

A100, H200 = (gpu_figures.peaks_of(name) for name in ("NVIDIA A100-SXM4-40GB", "NVIDIA H200"))
FP8 = {"extra": (("quantization", "fp8"),)}
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "hidden_size": 8192, "vocab_size": 32000,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip

FAMILIES = {
    "NVIDIA H200": "H200", "NVIDIA A100-SXM4-40GB": "A100-40", "NVIDIA A100-PCIE-40GB": "A100-40",
    "NVIDIA A100 80GB PCIe": "A100-80-PCIe", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA L40": "L40", "Tesla T4": "T4", "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "RTX-A6000", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada", "Quadro RTX 6000": None,
    "NVIDIA GeForce RTX 3090": "RTX-3090", "NVIDIA GeForce RTX 3090 Ti": None, "NVIDIA A100-SXM-64GB": None,
    "NVIDIA GeForce RTX 5090": "RTX-5090", "NVIDIA GeForce RTX 5090 D": None, "NVIDIA H800 NVL": None,
    "Tesla V100S-PCIE-32GB": "V100S", "Tesla V100-PCIE-32GB": "V100-PCIe", "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA H20": "H20", "NVIDIA H20-3e": "H20-3e", "NVIDIA H200 NVL": "H200-NVL", "NVIDIA GB200": "GB200",
    "NVIDIA GH200 480GB": "GH200", "NVIDIA GH200 144G HBM3e": "GH200-144", "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "": None, None: None,
}  # fmt: skip
SHAPES = [shape for shape in CATALOGUE.values() if shape.windows]
WORKS = st.builds(work_of_model, st.sampled_from(SHAPES), st.integers(1, 2048), st.integers(1, 2048))


def test_gpu_name_selects_data_sheet():
    assert {name: (found := gpu_figures.peaks_of(name)) and found.family for name in FAMILIES} == FAMILIES
    ridges = {gpu.family: gpu.ridge for gpu in gpu_figures.GPUS}
    known = {"A100-40": 201, "H100": 295, "H100-64": 606, "H200": 206, "L4": 403, "V100": 139}
    assert {family: ridges[family] for family in known} == pytest.approx(known, abs=0.6)
    fp8 = [gpu for gpu in gpu_figures.GPUS if gpu.fp8_flops_per_s]
    assert all(gpu.fp8_flops_per_s == pytest.approx(2 * gpu.flops_per_s, rel=0.015) for gpu in fp8)
    before = ("T4", "V100", "A10", "A30", "A40", "A800", "RTX-A6000", "RTX-3090")  # the fourth tensor cores
    assert all(gpu.family.startswith(before) for gpu in gpu_figures.GPUS if gpu not in fp8) and len(fp8) > 10


def own(inputs):
    """A model of 8-bit floats, of which the inputs are such floats too, or the weights alone."""
    quantization = Quantization("compressed-tensors", fp8_inputs=inputs)
    return {"model_facts": replace(model_of("opt-1.3b"), quantization=quantization)}


@pytest.mark.parametrize(("spec", "environment", "rates"), [
    ({}, {}, (4800e9, 989e12)), ({"tensor_parallel_size": 2} | FP8, {}, (9600e9, 3958e12)),
    (FP8, {"gpu_name": "NVIDIA A100-SXM4-40GB"}, (1555e9, 312e12)),  # computes in fp16 what is stored in fp8
    (own(True), {}, (4800e9, 1979e12)), (own(False), {}, (4800e9, 989e12)),
    # What the user gave counts before the list.
    ({"tensor_parallel_size": 2}, {"gpu_name": "NVIDIA H200 MIG", "gpu_peaks": GpuPeaks(140, 600)}, (1.2e12, 28e13)),
])  # fmt: skip
def test_quantization_sets_engine_peak_rate(spec, environment, rates):
    m = measurement()
    seen = gpu_figures.peaks_of_engine(replace(m.spec, **spec), replace(m.environment, **environment))
    assert (seen.bytes_per_s, seen.flops_per_s) == rates


def work_of(model, prompt=512, **facts):
    return work_of_model(model_of(model), prompt, 256, **facts)


@given(WORKS, st.sampled_from(gpu_figures.GPUS), st.integers(1, 2048))
def test_roofline_ceiling_matches_its_definition(work, peaks, batch):
    context = work.prompt_tokens + Fraction(work.output_tokens) / 2
    prefill = 2 * (work.parameters - work.lm_head) * work.prompt_tokens + 2 * work.lm_head
    prefill = Fraction(prefill + 2 * work.heads_width * work.prompt_tokens**2) / Fraction(peaks.flops_per_s)
    untouched = 1 - work.idle_share * (1 - work.routed_share) ** (batch - 1)
    moved = Fraction(work.weight_bytes * untouched) / batch + context * Fraction(work.kv_bytes_per_token)
    steps = work.output_tokens - 1
    by_bytes = steps * moved / Fraction(peaks.bytes_per_s)
    by_flops = steps * (2 * work.parameters + 4 * work.heads_width * context) / Fraction(peaks.flops_per_s)
    bound, hidden = (ceiling_tokens_per_s(work, peaks, batch, overlap=overlap) for overlap in (False, True))
    if steps:
        assert bound == pytest.approx(float(work.output_tokens / (prefill + max(by_bytes, by_flops))))
        assert hidden == pytest.approx(float(work.output_tokens / max(by_bytes, prefill + by_flops)))
    else:  # all that is read is read for the prompts of the step
        untouched = 1 - work.idle_share * (1 - work.routed_share) ** (batch * work.prompt_tokens - 1)
        read = Fraction(work.weight_bytes * untouched) / batch / Fraction(peaks.bytes_per_s)
        assert bound == hidden == pytest.approx(float(1 / max(prefill, read)))
    assert bound <= min(hidden, ceiling_tokens_per_s(work, peaks, 2 * batch)) * (1 + 1e-9)
    assert ceiling_tokens_per_s(work, peaks, 0.1) == ceiling_tokens_per_s(work, peaks, 1.0)
    assert work.b_half == pytest.approx(float(work.weight_bytes / (context * Fraction(work.kv_bytes_per_token))))
    assert work.intensity == pytest.approx(work.token_flops / (float(context) * work.kv_bytes_per_token))


def test_opt_models_are_memory_bound():
    halves = {"opt-125m": 10.6, "opt-2.7b": 25.3, "opt-13b": 49.0}
    works = {name: work_of(name) for name in halves}
    assert {name: work.b_half for name, work in works.items()} == pytest.approx(halves, abs=0.05)
    assert all(A100.ridge > work.intensity == pytest.approx(work.b_half + 1) for work in works.values())
    grouped = work_of_model(model_from_config("llama-2-70b", LLAMA_70B, parameters=68_976_648_192), 512, 256)
    assert H200.ridge < grouped.intensity == pytest.approx(grouped.b_half + 8)
    # A seventh of OLMo 2 1B, whose output layer is another; OPT's is the same, and narrower in OPT-350M.
    tied = work_of("opt-125m")
    assert (tied.lm_head, work_of("opt-350m").lm_head) == (50272 * 768, 50272 * 512)
    assert replace(tied, prompt_tokens=1).prefill_flops == 2 * tied.parameters + 2 * tied.heads_width
    assert tied.parameters == model_of("opt-125m").parameters
    work, lookups = work_of("olmo-2-1b"), 100_352 * 2048
    assert work.weight_bytes == 2 * work.parameters == 2 * (model_of("olmo-2-1b").parameters - lookups)
    quantized = work_of("olmo-2-1b", weight_bytes=2 * 10**9)
    assert (quantized.weight_bytes, quantized.parameters) == (2e9 - 2 * lookups, work.parameters)
    stranger, lookups = model_from_config("llama-2-70b", LLAMA_70B), 32_000 * 8192
    measured = work_of_model(stranger, 512, 256, weight_bytes=138 * 10**9)
    assert (measured.parameters, measured.weight_bytes) == (69e9 - lookups, 138e9 - 2 * lookups)
    assert work_of_model(stranger, 512, 256) is None is work_of("granite-4.0-h-350m"), "a state in place of a cache"


def test_step_reads_only_used_experts():
    work, dense, lookups = work_of("olmoe-1b-7b"), work_of("opt-1.3b"), 50_304 * 2048
    assert (work.weight_bytes, work.parameters) == (2 * (6_919_161_856 - lookups), 1_282_017_280 - lookups)
    assert work.weights_read(0) == work.weights_read(1) == pytest.approx(2 * work.parameters)
    assert work.weights_read(2) == pytest.approx(work.weight_bytes * (1 - work.idle_share * 7 / 8)), "8 of 64 experts"
    assert work.weights_read(8) < work.weights_read(64) < work.weight_bytes < work.weights_read(64) / 0.99
    assert dense.weights_read(1) == dense.weights_read(64) == dense.weight_bytes
    short, long = work_of("gemma-3-1b", 128), work_of("gemma-3-1b", 3968)
    assert short.context * short.kv_bytes_per_token == 26 * 256 * 1024
    assert long.context * long.kv_bytes_per_token == (22 * 512 + 4 * 4096) * 1024
    assert long.heads_width < short.heads_width
    full, half = (work_of("qwen3-0.6b", cache=dtype) for dtype in ("auto", "fp8"))
    assert (half.kv_bytes_per_token, half.weight_bytes) == (full.kv_bytes_per_token / 2, full.weight_bytes)
    few, many = (work_of("qwen2.5-3b", gpus=n) for n in (2, 4))
    assert many.kv_bytes_per_token == 2 * few.kv_bytes_per_token, "more of them than heads"


def test_roofline_fraction_needs_known_work():
    m = measurement(8, 5000.0)
    assert roofline_fraction(m, 5000.0, 8.0) == pytest.approx(5000 / ceiling_tokens_per_s(work(m), H200, 8))
    assert roofline_fraction(m, 5000.0, 8.0, overlap=True) < roofline_fraction(m, 5000.0, 8.0)
    allowed = changed(m, "spec", allow_prefix_cache=True)
    assert roofline_fraction(allowed, 1.0, 8.0), "its engine keeps no prompts"
    unknown = [
        (changed(m, "spec", model="/somewhere/else", model_facts=None), 1.0, 8.0),
        (changed(m, "environment", gpu_name=None), 1.0, 8.0),
        (changed(allowed, "spec", prefix_caching=True), 1.0, 8.0),  # prompts that are not computed
        (changed(m, "spec", extra=(("speculative_config", '{"method": "ngram"}'),)), 1.0, 8.0),  # drafts
        *((m, None, 8.0), (m, 1.0, None)),
    ]
    assert [roofline_fraction(*each) for each in unknown] == [None] * 6
    for dram, tensor in ((None, 0.1), (0.6, None), (None, None)):
        slow, fast = (step_time(seen(0.5, dram, tensor, m)).bound for m in (measurement(), measurement(8, 10_000.0)))
        assert (slow, fast) == (None, "memory"), "shapes fill a small part of the slow step"
    m = measurement()
    strange, unshaped = changed(m, "environment", gpu_name="Some GPU"), changed(m, "spec", model="/a", model_facts=None)
    unknown = (strange, unshaped, changed(m, "run", window_s=(1e6, 1e6 + 1)))
    assert [step_time(each) for each in unknown] == [StepTime({}, None, None)] * 3
    step_parts = gpu_figures.step_parts
    m = seen(engine=0.9)
    parts, blind = step_parts([m]), step_parts([measurement()])
    assert [*parts] == ["weights", "kv", "flops", "kernels", "idle"] and sum(parts.values()) == pytest.approx(1)
    assert parts["weights"] + parts["kv"] == pytest.approx(least(m)[0]) and parts["idle"] == pytest.approx(0.1)
    assert parts["kernels"] + parts["idle"] == pytest.approx(step_time(m).unexplained)
    assert [*blind] == ["weights", "kv", "flops", "unsplit"]
    assert blind["unsplit"] == pytest.approx(step_time(measurement()).unexplained)
    both = step_parts([seen(engine=0.9, m=each) for each in (measurement(8, 1000.0), measurement(8, 3000.0))])
    assert both["weights"] == pytest.approx(2 * parts["weights"])
    strange = [changed(each, "environment", gpu_name="another") for each in (m, seen(0.7))]
    assert step_parts(strange) == pytest.approx({"kernels": 0.8, "idle": 0.2}), "without a data sheet"
    assert step_parts([m, measurement()]) == {}, "repeats that differ"
    assert step_parts([seen(engine=1e-6)]) == {}, "counters below the data sheet"


def seen(engine=0.95, dram=0.6, tensor=0.1, m=None):
    """A measurement with planted counters."""
    m = m or measurement()
    columns = {of.ENGINE_ACTIVE: engine, of.DRAM_ACTIVE: dram, of.TENSOR_ACTIVE: tensor}
    telemetry = planted_telemetry(columns, until_s=m.run.window_s[1], interval_s=m.run.window_s[1] / 40)
    return changed(m, "run", telemetry=telemetry)


def with_peaks(m, flops_per_s, bytes_per_s):
    return changed(m, "environment", gpu_peaks=GpuPeaks(tflops=flops_per_s / 1e12, gbps=bytes_per_s / 1e9))


def with_prompts(m, tokens):
    return changed(m, "run", "samples", prompt_tokens=[tokens] * len(m.run.samples))


def least(m):
    """Shares of the step that its bytes and its FLOPs take at least: what is explained if the other is for nothing."""
    alone = with_peaks(m, 1e30, H200.bytes_per_s), with_peaks(m, H200.flops_per_s, 1e30)
    return tuple(1 - step_time(each).unexplained for each in alone)


def work(m):
    return gpu_figures.work_of_workload(m.spec, m.resolved, m.workload)


def test_step_work_matches_hand_calculation():
    for prompt_tokens in (64, 1000):
        m = with_prompts(measurement(8, 1000.0, steps=320), prompt_tokens)
        w, decoded, prompts = work(m), 8 * 31 / 32, 8 / 32  # of a request's 32 tokens, the first is the prefill's
        moved = w.weight_bytes + (decoded * w.context + prompts * prompt_tokens) * w.kv_bytes_per_token
        computed = decoded * w.token_flops + prompts * replace(w, prompt_tokens=prompt_tokens).prefill_flops
        assert least(m) == pytest.approx((moved / 4800e9 / 0.008, computed / 989e12 / 0.008))
        assert step_time(m).unexplained == pytest.approx(1 - max(least(m)))
    # Of 64 steps one has a prompt, and reads all; a step with the mean number of tokens would read twice the mean.
    m = measurement(4, 600.0, model="olmoe-1b-7b", output_tokens=256, resolved=Resolved(dtype="bfloat16"))
    prompts = [0 if i % 64 else 512 for i in range(len(m.run.steps))]
    m = with_prompts(changed(m, "run", "steps", prompt_tokens=prompts), 512)
    mean = (63 * work(m).weights_read(4) + work(m).weight_bytes) / 64
    assert step_time(m).parts["weights"] * window.step_s(m.run) == pytest.approx(mean / 4800e9, rel=0.01)


@pytest.mark.parametrize(("engine", "dram", "tensor", "bound"), [
    (0.95, 0.60, 0.10, "memory"), (0.95, 0.46, 0.10, "memory"), (1.02, 0.60, 0.10, "memory"),
    (0.95, 0.445, 0.10, "memory"), (0.95, 0.44, 0.10, "mixed"),  # half of what it can reach
    (0.95, 0.30, 0.60, "compute"), (0.95, 0.72, 0.77, "compute"),  # 0.81 of its reach against 0.82
    (0.69, 0.30, 0.10, "host"), (0.70 - 1e-9, 0.20, 0.10, "host"),
    (0.71, 0.20, 0.10, "mixed"), (None, 0.20, 0.10, "mixed"),  # it idles, but not much
    (0.60, 0.50, 0.10, "memory"), (0.50, 0.50, 0.10, "memory"),  # it idles, but its memory is busy for as long
])  # fmt: skip
def test_counters_tell_step_bound(engine, dram, tensor, bound):
    assert step_time(seen(engine, dram, tensor)).bound == bound


@pytest.mark.parametrize(("shares", "bound", "flops"), [
    ((0.6, 0.2), "memory", 0), ((0.2, 0.6), "compute", 0.4), ((0.4, 0.4), None, 0), ((0.3, 0.51), "compute", 0.21),
])  # fmt: skip
def test_shapes_tell_step_bound(shares, bound, flops):
    """shares: of the step, that its bytes and its FLOPs take at least on a GPU of these peaks."""
    m = seen(0.9, None, None)
    by_bytes, by_flops = (known / share for known, share in zip(least(m), shares))
    found = step_time(with_peaks(m, H200.flops_per_s * by_flops, H200.bytes_per_s * by_bytes))
    assert (found.bound, found.parts["flops"]) == (bound, pytest.approx(flops))
    assert found.parts["kernels"] == pytest.approx(0.9 - max(shares))


@given(st.integers(1, 64), st.floats(0.01, 0.9), st.integers(32, 64), st.floats(0.01, 1), st.floats(0.01, 1))
def test_unexplained_step_share_stays_bounded(batch, fraction, output_tokens, dram, tensor):
    # the roofline leaves out what a prefill moves: some percent at these lengths, hence 0.9 of it
    m = measurement(batch, 1.0, output_tokens=output_tokens, steps=1)
    limit = ceiling_tokens_per_s(work(m), H200, batch, overlap=True)
    m = measurement(batch, fraction * limit, output_tokens=output_tokens, steps=4 * output_tokens)
    assert 0 <= step_time(m).unexplained <= 1 and max(least(m)) <= 1
    assert step_time(measurement(8, 1e6)).unexplained < 0, "faster than the roofline shows"
    by_hand = math.log((dram / 0.89) / (tensor / 0.94))
    assert gpu_figures.saturation_gap(dram, tensor) == pytest.approx(by_hand, abs=1e-9)
    nothing = (None, tensor), (dram, None), (0.0, tensor), (dram, 0.0)
    assert [gpu_figures.saturation_gap(*each) for each in nothing] == [None] * 4
