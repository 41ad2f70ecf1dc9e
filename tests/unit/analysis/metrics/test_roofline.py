from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import measurement, work_of_model

from pytest_slmserve.analysis.metrics import gpu_figures
from pytest_slmserve.analysis.metrics.gpu_figures import ceiling_tokens_per_s, peaks_of
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.models import CATALOGUE, model_from_config
from pytest_slmserve.schema.records import GpuPeaks

A100, H200 = "NVIDIA A100-SXM4-40GB", "NVIDIA H200"
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("Tesla T4", "T4"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("Tesla V100S-PCIE-32GB", "V100S"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A800-SXM4-80GB", "A800-80"),
        ("NVIDIA A800 80GB PCIe", "A800-80-PCIe"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H800 PCIe", "H800-PCIe"),
        ("NVIDIA H800 NVL", None),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20-3e"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 NVL MIG 1g.12gb", None),
        ("", None),
        (None, None),
    ],
)
def test_gpu_by_its_name(name, family):
    found = peaks_of(name)
    assert (found and found.family) == family


@pytest.mark.parametrize(
    ("family", "ridge"), [("A100-40", 201), ("H100", 295), ("H100-64", 606), ("H200", 206), ("L4", 403), ("V100", 139)]
)
def test_ridges(family, ridge):
    assert next(g for g in gpu_figures.GPUS if g.family == family).ridge == pytest.approx(ridge, abs=0.6)


@pytest.mark.parametrize("gpu", gpu_figures.GPUS, ids=attrgetter("family"))
def test_fp8_is_twice_as_fast_and_came_with_the_fourth_tensor_cores(gpu):
    without = {"T4", "V100S", "V100-PCIe", "V100", "A10G", "A10", "A30", "A40", "RTX-A6000", "RTX-3090"}
    if gpu.family in without or gpu.family.startswith(("A100", "A800")):
        assert gpu.fp8_flops_per_s is None
    else:
        assert gpu.fp8_flops_per_s == pytest.approx(2 * gpu.flops_per_s, rel=0.015)


def test_an_engine_has_the_rate_of_its_quantization_and_of_all_its_gpus():
    m = measurement()
    fp8 = replace(m.spec, tensor_parallel_size=2, extra=(("quantization", "fp8"),))
    assert gpu_figures.peaks_of_engine(m.spec, m.environment) == peaks_of(H200)
    seen = gpu_figures.peaks_of_engine(fp8, m.environment)
    assert (seen.bytes_per_s, seen.flops_per_s) == (9600e9, 3958e12)
    old = gpu_figures.peaks_of_engine(fp8, replace(m.environment, gpu_name=A100))
    assert old.flops_per_s == 624e12, "an A100 computes in fp16 what is stored in fp8"


def test_peaks_that_the_user_gave_count_before_the_list():
    m = measurement()
    environment = replace(m.environment, gpu_name="NVIDIA H200 MIG 1g.18gb", gpu_peaks=GpuPeaks(140, 600))
    seen = gpu_figures.peaks_of_engine(replace(m.spec, tensor_parallel_size=2), environment)
    assert (seen.flops_per_s, seen.bytes_per_s) == (280e12, 1200e9)
    listed = replace(m, environment=replace(m.environment, gpu_peaks=GpuPeaks(989, 2400)))
    assert gpu_figures.roofline_fraction(listed, 5000.0, 8.0) > 1.5 * gpu_figures.roofline_fraction(m, 5000.0, 8.0)


# Output tokens/s by hand from the formula with a decode step for each of the 256 tokens; ours has one step less.
@pytest.mark.parametrize(
    ("gpu", "model", "batch", "expected"),
    [
        (A100, "opt-125m", 1, 5636),
        (A100, "opt-125m", 512, 60027),
        (A100, "opt-1.3b", 32, 6681),
        (A100, "opt-1.3b", 128, 9090),
        (A100, "opt-2.7b", 64, 4524),
        (H200, "opt-1.3b", 512, 30967),
        (H200, "opt-6.7b", 256, 9336),
    ],
)
def test_ceiling_of_the_papers_lengths(gpu, model, batch, expected):
    bound = ceiling_tokens_per_s(work_of_model(model_of(model), 512, 256), peaks_of(gpu), batch)
    assert expected < bound < 1.005 * expected


def test_logits_are_computed_of_a_prompts_last_token_only():
    work = work_of_model(model_of("opt-125m"), 512, 256)
    assert work.lm_head == 50272 * 768
    assert replace(work, prompt_tokens=1).prefill_flops == 2 * work.parameters + 2 * work.heads_width
    assert work.prefill_flops == pytest.approx(0.7035 * replace(work, lm_head=0).prefill_flops, rel=1e-4)
    assert work_of_model(model_of("opt-350m"), 512, 256).lm_head == 50272 * 512, "of its narrower embeddings"


works = st.builds(
    work_of_model,
    st.sampled_from([shape for shape in CATALOGUE.values() if shape.windows]),
    st.integers(1, 2048),
    st.integers(1, 2048),
)


@given(works, st.sampled_from(gpu_figures.GPUS), st.floats(1, 2048))
def test_ceiling_rises_with_the_batch_and_falls_without_overlap(work, peaks, batch):
    bound = ceiling_tokens_per_s(work, peaks, batch)
    assert bound <= ceiling_tokens_per_s(work, peaks, 2 * batch) * (1 + 1e-9)
    assert bound <= ceiling_tokens_per_s(work, peaks, batch, overlap=True) * (1 + 1e-9)
    assert ceiling_tokens_per_s(work, peaks, 0.1) == ceiling_tokens_per_s(work, peaks, 1.0)


def test_long_decoding_at_batch_one_reads_the_weights_for_each_token():
    work, peaks = work_of_model(model_of("opt-6.7b"), 1, 200), peaks_of(H200)
    assert ceiling_tokens_per_s(work, peaks, 1) == pytest.approx(4800e9 / work.weight_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("model", "b_half"),
    [("opt-125m", 10.6), ("opt-1.3b", 20.9), ("opt-2.7b", 25.3), ("opt-6.7b", 39.7), ("opt-13b", 49.0)],
)
def test_opt_is_bound_by_memory_at_every_batch(model, b_half):
    work = work_of_model(model_of(model), 512, 256)
    assert work.b_half == pytest.approx(b_half, abs=0.05)
    assert peaks_of(A100).ridge > work.intensity == pytest.approx(work.b_half + 1)


def test_grouped_queries_at_short_context_are_bound_by_arithmetic():
    work = work_of_model(model_from_config("llama-2-70b", LLAMA_70B, parameters=68_976_648_192), 512, 256)
    assert peaks_of(H200).ridge < work.intensity == pytest.approx(work.b_half + 8)


def test_weights_that_nobody_can_tell():
    stranger = model_from_config("llama-2-70b", LLAMA_70B)
    assert work_of_model(stranger, 512, 256) is None
    measured = work_of_model(stranger, 512, 256, weight_bytes=138 * 10**9)
    lookups = 32_000 * 8192
    assert measured.parameters == 69e9 - lookups and measured.weight_bytes == 138e9 - 2 * lookups


def test_embeddings_that_are_only_looked_up_are_neither_read_nor_multiplied_with():
    """A seventh of OLMo 2 1B, whose output layer is another; OPT's is the same."""
    shape, tied = model_of("olmo-2-1b"), model_of("opt-1.3b")
    work, lookups = work_of_model(shape, 512, 256), 100_352 * 2048
    assert work.weight_bytes == 2 * work.parameters == 2 * (shape.parameters - lookups)
    quantized = work_of_model(shape, 512, 256, weight_bytes=2 * 10**9)
    assert quantized.weight_bytes == 2e9 - 2 * lookups and quantized.parameters == work.parameters
    assert work_of_model(tied, 512, 256).parameters == tied.parameters


def test_of_experts_a_token_is_multiplied_with_those_that_it_is_sent_to():
    work = work_of_model(model_of("olmoe-1b-7b"), 512, 256)
    lookups = 50_304 * 2048
    assert work.weight_bytes == 2 * (6_919_161_856 - lookups) and work.parameters == 1_282_017_280 - lookups


def test_a_step_reads_the_experts_that_one_of_its_tokens_is_sent_to():
    work = work_of_model(model_of("olmoe-1b-7b"), 512, 256)
    assert work.weights_read(1) == pytest.approx(2 * work.parameters)
    assert work.weights_read(1) < work.weights_read(8) < work.weights_read(64) < work.weight_bytes
    assert work.weights_read(64) > 0.99 * work.weight_bytes
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


def test_a_state_in_place_of_a_cache_has_no_roofline():
    assert work_of_model(model_of("granite-4.0-h-350m"), 512, 256) is None


def test_fraction_of_a_measurement():
    m = measurement(8, 5000.0)
    fraction = gpu_figures.roofline_fraction(m, 5000.0, 8.0)
    work = work_of_model(model_of("opt-1.3b"), 64, 32, weight_bytes=m.resolved.weight_bytes)
    assert fraction == pytest.approx(5000 / ceiling_tokens_per_s(work, peaks_of(H200), 8))
    assert gpu_figures.roofline_fraction(m, 5000.0, 8.0, overlap=True) < fraction


def test_fraction_of_the_unknown():
    m = measurement()
    assert gpu_figures.roofline_fraction(m, None, 8.0) is None
    assert (
        gpu_figures.roofline_fraction(
            replace(m, spec=replace(m.spec, model="/somewhere/else", model_facts=None)), 1.0, 8.0
        )
        is None
    )
    assert (
        gpu_figures.roofline_fraction(replace(m, environment=replace(m.environment, gpu_name=None)), 1.0, 8.0) is None
    )
    allowed = replace(m.spec, allow_prefix_cache=True)
    assert gpu_figures.roofline_fraction(replace(m, spec=allowed), 1.0, 8.0), "its engine keeps no prompts"
    cached = replace(allowed, prefix_caching=True)
    assert gpu_figures.roofline_fraction(replace(m, spec=cached), 1.0, 8.0) is None, "prompts that are not computed"
