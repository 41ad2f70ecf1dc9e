"""The roofline and the mean step: work of a request by its definition, bounds that rise and fall as they must, data
sheets by the names of GPUs, and parts of a step that are all of it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_telemetry, measurement, planted_telemetry, work_of_model

from pytest_slmserve.analysis.metrics import gpu_figures, window
from pytest_slmserve.analysis.metrics.gpu_figures import (
    GPUS,
    StepTime,
    ceiling_tokens_per_s,
    idle_share,
    peaks_of,
    peaks_of_engine,
    roofline_fraction,
    saturation_gap,
    step_parts,
    step_time,
    work_of_workload,
)
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.models import CATALOGUE, Quantization, model_from_config
from pytest_slmserve.schema.records import GpuPeaks, Resolved

A100, H200 = "NVIDIA A100-SXM4-40GB", "NVIDIA H200"
LLAMA_70B = {
    **{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "hidden_size": 8192, "vocab_size": 32000},
    **{
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
}

# Data sheets

FAMILIES = {
    **{"NVIDIA H200": "H200", "NVIDIA A100-SXM4-40GB": "A100-40", "NVIDIA A100-PCIE-40GB": "A100-40"},
    **{"NVIDIA A100 80GB PCIe": "A100-80-PCIe", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe"},
    **{"NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA L40": "L40", "Tesla T4": "T4", "NVIDIA A10G": "A10G"},
    **{"NVIDIA RTX A6000": "RTX-A6000", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada", "Quadro RTX 6000": None},
    **{"NVIDIA GeForce RTX 3090": "RTX-3090", "NVIDIA GeForce RTX 3090 Ti": None, "NVIDIA A100-SXM-64GB": None},
    **{"NVIDIA GeForce RTX 5090": "RTX-5090", "NVIDIA GeForce RTX 5090 D": None, "NVIDIA H800 NVL": None},
    **{"Tesla V100S-PCIE-32GB": "V100S", "Tesla V100-PCIE-32GB": "V100-PCIe", "Tesla V100-SXM2-16GB": "V100"},
    **{"NVIDIA H20": "H20", "NVIDIA H20-3e": "H20-3e", "NVIDIA H200 NVL": "H200-NVL", "NVIDIA GB200": "GB200"},
    **{"NVIDIA GH200 480GB": "GH200", "NVIDIA GH200 144G HBM3e": "GH200-144", "NVIDIA H100 NVL": "H100-NVL"},
    **{"NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "": None, None: None},
}


def test_a_gpu_is_known_by_all_words_of_its_name_and_a_variant_is_none():
    assert {name: (found := peaks_of(name)) and found.family for name in FAMILIES} == FAMILIES


def test_ridges_are_flops_per_byte_and_fp8_is_twice_as_fast_where_there_is_any():
    ridges = {gpu.family: gpu.ridge for gpu in GPUS}
    known = {"A100-40": 201, "H100": 295, "H100-64": 606, "H200": 206, "L4": 403, "V100": 139}
    assert {family: ridges[family] for family in known} == pytest.approx(known, abs=0.6)
    fp8 = [gpu for gpu in GPUS if gpu.fp8_flops_per_s]
    assert all(gpu.fp8_flops_per_s == pytest.approx(2 * gpu.flops_per_s, rel=0.015) for gpu in fp8)
    before = ("T4", "V100", "A10", "A30", "A40", "A800", "RTX-A6000", "RTX-3090")  # the fourth tensor cores
    assert all(gpu.family.startswith(before) for gpu in GPUS if gpu not in fp8) and len(fp8) > 10


def test_an_engine_has_the_rate_of_its_quantization_and_of_all_its_gpus():
    m = measurement()
    fp8 = replace(m.spec, tensor_parallel_size=2, extra=(("quantization", "fp8"),))
    assert peaks_of_engine(m.spec, m.environment) == peaks_of(H200)
    seen = peaks_of_engine(fp8, m.environment)
    assert (seen.bytes_per_s, seen.flops_per_s) == (9600e9, 3958e12)
    old = peaks_of_engine(fp8, replace(m.environment, gpu_name=A100))
    assert old.flops_per_s == 624e12, "an A100 computes in fp16 what is stored in fp8"
    for inputs, rate in ((True, 1979e12), (False, 989e12)):  # of 8 bits, or weights alone
        own = replace(m.spec.model_facts, quantization=Quantization("compressed-tensors", fp8_inputs=inputs))
        assert peaks_of_engine(replace(m.spec, model_facts=own), m.environment).flops_per_s == rate


def test_peaks_that_the_user_gave_count_before_the_list():
    m = measurement()
    environment = replace(m.environment, gpu_name="NVIDIA H200 MIG 1g.18gb", gpu_peaks=GpuPeaks(140, 600))
    seen = peaks_of_engine(replace(m.spec, tensor_parallel_size=2), environment)
    assert (seen.flops_per_s, seen.bytes_per_s) == (280e12, 1200e9)


# Work

SHAPES = [shape for shape in CATALOGUE.values() if shape.windows]
WORKS = st.builds(work_of_model, st.sampled_from(SHAPES), st.integers(1, 2048), st.integers(1, 2048))


@given(WORKS, st.sampled_from(GPUS), st.integers(1, 2048))
def test_a_ceiling_is_that_of_its_definition_and_rises_with_the_batch(work, peaks, batch):
    context = work.prompt_tokens + Fraction(work.output_tokens) / 2
    prefill = 2 * (work.parameters - work.lm_head) * work.prompt_tokens + 2 * work.lm_head
    prefill = Fraction(prefill + 2 * work.heads_width * work.prompt_tokens**2) / Fraction(peaks.flops_per_s)
    untouched = 1 - work.idle_share * (1 - work.routed_share) ** (batch - 1)
    moved = Fraction(work.weight_bytes * untouched) / batch + context * Fraction(work.kv_bytes_per_token)
    steps = work.output_tokens - 1
    by_bytes = steps * moved / Fraction(peaks.bytes_per_s)
    by_flops = steps * (2 * work.parameters + 4 * work.heads_width * context) / Fraction(peaks.flops_per_s)
    bound = ceiling_tokens_per_s(work, peaks, batch)
    assert bound == pytest.approx(float(work.output_tokens / (prefill + max(by_bytes, by_flops))))
    hidden = ceiling_tokens_per_s(work, peaks, batch, overlap=True)
    assert hidden == pytest.approx(float(work.output_tokens / max(by_bytes, prefill + by_flops)))
    assert bound <= min(hidden, ceiling_tokens_per_s(work, peaks, 2 * batch)) * (1 + 1e-9)
    assert ceiling_tokens_per_s(work, peaks, 0.1) == ceiling_tokens_per_s(work, peaks, 1.0)
    assert work.b_half == pytest.approx(float(work.weight_bytes / (context * Fraction(work.kv_bytes_per_token))))
    assert work.intensity == pytest.approx(work.token_flops / (float(context) * work.kv_bytes_per_token))


# Output tokens/s by hand from the formula with a decode step for each of the 256 tokens; ours has one step less.
@pytest.mark.parametrize(
    ("gpu", "model", "batch", "expected"),
    [(A100, "opt-125m", 512, 60027), (A100, "opt-1.3b", 32, 6681), (A100, "opt-2.7b", 64, 4524),
     (H200, "opt-1.3b", 512, 30967), (H200, "opt-6.7b", 256, 9336)],
)  # fmt: skip
def test_ceiling_of_the_papers_lengths(gpu, model, batch, expected):
    bound = ceiling_tokens_per_s(work_of_model(model_of(model), 512, 256), peaks_of(gpu), batch)
    assert expected < bound < 1.005 * expected


def test_logits_are_computed_of_a_prompts_last_token_only():
    work = work_of_model(model_of("opt-125m"), 512, 256)
    assert work.lm_head == 50272 * 768
    assert replace(work, prompt_tokens=1).prefill_flops == 2 * work.parameters + 2 * work.heads_width
    assert work_of_model(model_of("opt-350m"), 512, 256).lm_head == 50272 * 512, "of its narrower embeddings"


@pytest.mark.parametrize(("model", "b_half"), [("opt-125m", 10.6), ("opt-2.7b", 25.3), ("opt-13b", 49.0)])
def test_opt_is_bound_by_memory_at_every_batch(model, b_half):
    work = work_of_model(model_of(model), 512, 256)
    assert work.b_half == pytest.approx(b_half, abs=0.05)
    assert peaks_of(A100).ridge > work.intensity == pytest.approx(work.b_half + 1)


def test_grouped_queries_at_short_context_are_bound_by_arithmetic():
    work = work_of_model(model_from_config("llama-2-70b", LLAMA_70B, parameters=68_976_648_192), 512, 256)
    assert peaks_of(H200).ridge < work.intensity == pytest.approx(work.b_half + 8)


def test_weights_that_nobody_can_tell_are_those_that_were_measured():
    stranger, lookups = model_from_config("llama-2-70b", LLAMA_70B), 32_000 * 8192
    assert work_of_model(stranger, 512, 256) is None
    measured = work_of_model(stranger, 512, 256, weight_bytes=138 * 10**9)
    assert measured.parameters == 69e9 - lookups and measured.weight_bytes == 138e9 - 2 * lookups


def test_embeddings_that_are_only_looked_up_are_neither_read_nor_multiplied_with():
    """A seventh of OLMo 2 1B, whose output layer is another; OPT's is the same."""
    shape, tied = model_of("olmo-2-1b"), model_of("opt-1.3b")
    work, lookups = work_of_model(shape, 512, 256), 100_352 * 2048
    assert work.weight_bytes == 2 * work.parameters == 2 * (shape.parameters - lookups)
    quantized = work_of_model(shape, 512, 256, weight_bytes=2 * 10**9)
    assert quantized.weight_bytes == 2e9 - 2 * lookups and quantized.parameters == work.parameters
    assert work_of_model(tied, 512, 256).parameters == tied.parameters


def test_a_step_reads_the_experts_that_one_of_its_tokens_is_sent_to():
    work, lookups = work_of_model(model_of("olmoe-1b-7b"), 512, 256), 50_304 * 2048
    assert work.weight_bytes == 2 * (6_919_161_856 - lookups) and work.parameters == 1_282_017_280 - lookups
    assert work.weights_read(0) == work.weights_read(1) == pytest.approx(2 * work.parameters)
    assert work.weights_read(2) == pytest.approx(work.weight_bytes * (1 - work.idle_share * 7 / 8)), "8 of 64 experts"
    assert work.weights_read(8) < work.weights_read(64) < work.weight_bytes < work.weights_read(64) / 0.99
    dense = work_of_model(model_of("opt-1.3b"), 512, 256)
    assert dense.weights_read(1) == dense.weights_read(64) == dense.weight_bytes


def test_layers_that_slide_are_read_up_to_their_window():
    shape = model_of("gemma-3-1b")
    short, long = (work_of_model(shape, prompt, 256) for prompt in (128, 3968))
    assert short.context * short.kv_bytes_per_token == 26 * 256 * 1024
    assert long.context * long.kv_bytes_per_token == (22 * 512 + 4 * 4096) * 1024
    assert long.heads_width < short.heads_width


def test_half_as_many_bytes_of_an_fp8_cache_and_of_more_gpus_than_heads_more():
    full, half = (work_of_model(model_of("qwen3-0.6b"), 512, 256, cache=dtype) for dtype in ("auto", "fp8"))
    assert half.kv_bytes_per_token == full.kv_bytes_per_token / 2 and half.weight_bytes == full.weight_bytes
    few, many = (work_of_model(model_of("qwen2.5-3b"), 512, 256, gpus=n) for n in (2, 4))
    assert many.kv_bytes_per_token == 2 * few.kv_bytes_per_token
    assert work_of_model(model_of("granite-4.0-h-350m"), 512, 256) is None, "a state in place of a cache"


def test_the_fraction_of_a_measurement_is_over_its_ceiling_and_of_the_unknown_none():
    m = measurement(8, 5000.0)
    assert roofline_fraction(m, 5000.0, 8.0) == pytest.approx(5000 / ceiling_tokens_per_s(work(m), peaks_of(H200), 8))
    assert roofline_fraction(m, 5000.0, 8.0, overlap=True) < roofline_fraction(m, 5000.0, 8.0)
    allowed = replace(m.spec, allow_prefix_cache=True)
    assert roofline_fraction(replace(m, spec=allowed), 1.0, 8.0), "its engine keeps no prompts"
    assert roofline_fraction(m, None, 8.0) is roofline_fraction(m, 1.0, None) is None
    blind = [replace(m, spec=replace(m.spec, model="/somewhere/else", model_facts=None))]
    blind += [replace(m, environment=replace(m.environment, gpu_name=None))]
    blind += [replace(m, spec=replace(allowed, prefix_caching=True))]  # prompts that are not computed
    assert [roofline_fraction(each, 1.0, 8.0) for each in blind] == [None] * 3


# The mean step


def seen(engine=0.95, dram=0.6, tensor=0.1, m=None):
    """A measurement with planted counters."""
    m = m or measurement()
    columns = {1001: engine, 1005: dram, 1004: tensor}  # by DCGM's numbers
    telemetry = planted_telemetry(columns, until_s=m.run.window_s[1], interval_s=m.run.window_s[1] / 40)
    return replace(m, run=replace(m.run, telemetry=telemetry))


def with_peaks(m, flops_per_s, bytes_per_s):
    given = GpuPeaks(tflops=flops_per_s / 1e12, gbps=bytes_per_s / 1e9)
    return replace(m, environment=replace(m.environment, gpu_peaks=given))


def least(m):
    """Shares of the step that its bytes and its FLOPs take at least: what is explained if the other is for nothing."""
    peaks = peaks_of(H200)
    alone = with_peaks(m, 1e30, peaks.bytes_per_s), with_peaks(m, peaks.flops_per_s, 1e30)
    return tuple(1 - step_time(each).unexplained for each in alone)


def work(m):
    return work_of_workload(m.spec, m.resolved, m.workload)


@pytest.mark.parametrize("prompt_tokens", [64, 1000])
def test_bytes_of_a_step_are_weights_and_contexts_and_prompts_count_by_length(prompt_tokens):
    m = measurement(8, 1000.0, steps=320)
    lengths = replace(m.run.samples, prompt_tokens=[prompt_tokens] * len(m.run.samples))
    m = replace(m, run=replace(m.run, samples=lengths))
    w = work(m)
    decoded, prompts = 8 * 31 / 32, 8 / 32  # of a request's 32 tokens, the first is the prefill's
    moved = w.weight_bytes + (decoded * w.context + prompts * prompt_tokens) * w.kv_bytes_per_token
    prefill = replace(w, prompt_tokens=prompt_tokens).prefill_flops
    computed = decoded * w.token_flops + prompts * prefill
    assert least(m) == pytest.approx((moved / 4800e9 / 0.008, computed / 989e12 / 0.008))
    assert step_time(m).unexplained == pytest.approx(1 - max(least(m)))


def test_experts_are_read_by_each_step_for_its_own_tokens():
    """Of 64 steps one has a prompt, and reads all; a step with the mean number of tokens would read twice the mean."""
    m = measurement(4, 600.0, model="olmoe-1b-7b", output_tokens=256, resolved=Resolved(dtype="bfloat16"))
    prompts = [0 if i % 64 else 512 for i in range(len(m.run.steps))]
    samples = replace(m.run.samples, prompt_tokens=[512] * len(m.run.samples))
    m = replace(m, run=replace(m.run, steps=replace(m.run.steps, prompt_tokens=prompts), samples=samples))
    mean = (63 * work(m).weights_read(4) + work(m).weight_bytes) / 64
    assert step_time(m).parts["weights"] * window.step_s(m.run) == pytest.approx(mean / 4800e9, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "dram", "tensor", "bound"),
    [
        (0.95, 0.60, 0.10, "memory"),
        (0.95, 0.46, 0.10, "memory"),
        (0.95, 0.44, 0.10, "mixed"),
        (0.95, 0.445, 0.10, "memory"),  # half of what it can reach
        (0.95, 0.30, 0.60, "compute"),
        (0.95, 0.72, 0.77, "compute"),  # 0.81 of its reach against 0.82
        (0.69, 0.30, 0.10, "host"),
        (0.70 - 1e-9, 0.20, 0.10, "host"),
        (0.71, 0.20, 0.10, "mixed"),  # it idles, but not much
        (0.60, 0.50, 0.10, "memory"),  # it idles, but its memory is busy for longer
        (0.50, 0.50, 0.10, "memory"),  # as long
        (None, 0.20, 0.10, "mixed"),
        (1.02, 0.60, 0.10, "memory"),
    ],
)
def test_the_bound_by_counters(engine, dram, tensor, bound):
    assert step_time(seen(engine, dram, tensor)).bound == bound


@pytest.mark.parametrize(("dram", "tensor"), [(None, 0.1), (0.6, None), (None, None)])
def test_without_both_counters_shapes_tell(dram, tensor):
    slow, fast = (step_time(seen(0.5, dram, tensor, m)).bound for m in (measurement(), measurement(8, 10_000.0)))
    assert (slow, fast) == (None, "memory"), "shapes fill a small part of the slow step"


@pytest.mark.parametrize(("shares", "bound"), [((0.6, 0.2), "memory"), ((0.2, 0.6), "compute"), ((0.4, 0.4), None)])
def test_the_bound_by_shapes(shares, bound):
    """shares: of the step, that its bytes and its FLOPs take at least on a GPU of these peaks."""
    m, peaks = measurement(), peaks_of(H200)
    by_bytes, by_flops = (known / share for known, share in zip(least(m), shares))
    assert step_time(with_peaks(m, peaks.flops_per_s * by_flops, peaks.bytes_per_s * by_bytes)).bound == bound


def test_nothing_known_no_step_time():
    m, nothing = measurement(), StepTime({}, None, None)
    assert step_time(replace(m, environment=replace(m.environment, gpu_name="Some GPU"))) == nothing
    assert step_time(replace(m, spec=replace(m.spec, model="/not/here", model_facts=None))) == nothing
    assert step_time(replace(m, run=replace(m.run, window_s=(1e6, 1e6 + 1)))) == nothing


@given(st.integers(1, 64), st.floats(0.01, 0.9), st.integers(32, 64))
def test_no_share_is_above_1_below_the_roofline(batch, fraction, output_tokens):
    # the roofline leaves out what a prefill moves: some percent at these lengths, hence 0.9 of it
    m = measurement(batch, 1.0, output_tokens=output_tokens, steps=1)
    limit = ceiling_tokens_per_s(work(m), peaks_of(H200), batch, overlap=True)
    m = measurement(batch, fraction * limit, output_tokens=output_tokens, steps=4 * output_tokens)
    assert 0 <= step_time(m).unexplained <= 1 and max(least(m)) <= 1
    assert step_time(measurement(8, 1e6)).unexplained < 0, "faster than the roofline shows"


SHORT = measurement(1, 1000.0, steps=4)


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_the_gap_is_positive_where_memory_is_nearer_to_its_end(dram, tensor):
    assert saturation_gap(dram, tensor) == pytest.approx(math.log((dram / 0.89) / (tensor / 0.94)), abs=1e-9)
    for nothing in ((None, tensor), (dram, None), (0.0, tensor), (dram, 0.0)):
        assert saturation_gap(*nothing) is None


@given(any_telemetry())
def test_step_time_with_any_telemetry_is_explained_alike(telemetry):
    m = replace(SHORT, run=replace(SHORT.run, telemetry=telemetry))
    found, share = step_time(m), idle_share(gpu_figures.device_figures(m.run).engine_active)
    assert found.unexplained == step_time(SHORT).unexplained
    assert share is None or share >= 0


def test_parts_of_a_step_are_all_of_it():
    m = seen(engine=0.9)
    parts, known = step_parts([m]), step_time(m)
    assert [*parts] == ["weights", "kv", "flops", "kernels", "idle"] and sum(parts.values()) == pytest.approx(1)
    assert parts["weights"] + parts["kv"] == pytest.approx(least(m)[0]) and parts["idle"] == pytest.approx(0.1)
    assert parts["kernels"] + parts["idle"] == pytest.approx(known.unexplained)
    blind = step_parts([measurement()])
    assert [*blind] == ["weights", "kv", "flops", "unsplit"]
    assert blind["unsplit"] == pytest.approx(step_time(measurement()).unexplained)


def test_parts_of_repeats_are_means_and_without_a_data_sheet_kernels_and_none():
    strange = [replace(m, environment=replace(m.environment, gpu_name="another")) for m in (seen(0.9), seen(0.7))]
    assert step_parts(strange) == pytest.approx({"kernels": 0.8, "idle": 0.2})
    both = step_parts([seen(engine=0.9, m=m) for m in (measurement(8, 1000.0), measurement(8, 3000.0))])
    assert both["weights"] == pytest.approx(2 * step_parts([seen(engine=0.9)])["weights"])


@pytest.mark.parametrize("repeats", [(seen(engine=0.9), measurement()), (seen(engine=1e-6),)], ids=["differ", "less"])
def test_repeats_that_differ_and_counters_below_the_data_sheet_have_no_parts(repeats):
    assert step_parts(repeats) == {}


def test_arithmetic_is_a_part_where_it_takes_longer_than_the_bytes():
    m, peaks = seen(engine=0.9), peaks_of(H200)
    by_bytes, by_flops = (known / share for known, share in zip(least(m), (0.3, 0.5)))
    parts = step_parts([with_peaks(m, peaks.flops_per_s * by_flops, peaks.bytes_per_s * by_bytes)])
    assert parts["flops"] == pytest.approx(0.2) and parts["kernels"] == pytest.approx(0.4)
