from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import any_telemetry, measurement, planted_telemetry

from pytest_slmserve.analysis.metrics import gpu_figures as module
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.gpu_figures import (
    ceiling_tokens_per_s,
    device_figures,
    peaks_of,
    step_parts,
    step_time,
    work_of_workload,
)
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import GpuPeaks, Resolved


def seen(engine=0.95, dram=0.6, tensor=0.1, m=None):
    """A measurement with planted counters."""
    m = m or measurement()
    columns = {sensors.ENGINE_ACTIVE: engine, sensors.DRAM_ACTIVE: dram, sensors.TENSOR_ACTIVE: tensor}
    telemetry = planted_telemetry(columns, until_s=m.run.window_s[1], interval_s=m.run.window_s[1] / 40)
    return replace(m, run=replace(m.run, telemetry=telemetry))


def saturation_gap(m):
    found = device_figures(m.run)
    return module.saturation_gap(found.dram_active, found.tensor_active)


def with_peaks(m, flops_per_s, bytes_per_s):
    given = GpuPeaks(tflops=flops_per_s / 1e12, gbps=bytes_per_s / 1e9)
    return replace(m, environment=replace(m.environment, gpu_peaks=given))


def least(m):
    """Shares of the step that its bytes and its FLOPs take at least: what is explained if the other is for nothing."""
    peaks = peaks_of("NVIDIA H200")
    alone = with_peaks(m, 1e30, peaks.bytes_per_s), with_peaks(m, peaks.flops_per_s, 1e30)
    return tuple(1 - step_time(each).unexplained for each in alone)


def work(m):
    return work_of_workload(m.spec, m.resolved, m.workload)


def test_bytes_of_a_step_are_the_weights_and_the_contexts():
    m = measurement(8, 1000.0, steps=320)
    w = work(m)
    decoded, prompts = 8 * 31 / 32, 8 / 32  # of a request's 32 tokens, the first is the prefill's
    moved = w.weight_bytes + (decoded * w.context + prompts * 64) * w.kv_bytes_per_token
    computed = decoded * w.token_flops + prompts * w.prefill_flops
    assert least(m) == pytest.approx((moved / 4800e9 / 0.008, computed / 989e12 / 0.008))
    assert step_time(m).unexplained == pytest.approx(1 - moved / 4800e9 / 0.008)


def test_prompts_count_with_their_own_lengths():
    m = measurement(8, 1000.0, steps=320)
    samples = replace(m.run.samples, prompt_tokens=[1000] * len(m.run.samples))
    longer, w = replace(m, run=replace(m.run, samples=samples)), work(m)
    more = (replace(w, prompt_tokens=1000).prefill_flops - w.prefill_flops) * 8 / 32
    assert least(longer)[1] - least(m)[1] == pytest.approx(more / 989e12 / 0.008)


def test_experts_are_read_by_each_step_for_its_own_tokens():
    """Of 64 steps one has a prompt, and reads all; a step with the mean number of tokens would read twice the mean."""
    m = measurement(4, 600.0, model="olmoe-1b-7b", output_tokens=256, resolved=Resolved(dtype="bfloat16"))
    prompts = [0 if i % 64 else 512 for i in range(len(m.run.steps))]
    samples = replace(m.run.samples, prompt_tokens=[512] * len(m.run.samples))
    m = replace(m, run=replace(m.run, steps=replace(m.run.steps, prompt_tokens=prompts), samples=samples))
    found, w = step_time(m), work(m)
    mean = (63 * w.weights_read(4) + w.weight_bytes) / 64
    assert found.parts["weights"] * window.step_s(m.run) == pytest.approx(mean / 4800e9, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "dram", "tensor", "bound"),
    [
        (0.95, 0.60, 0.10, "memory"),
        (0.95, 0.46, 0.10, "memory"),
        (0.95, 0.44, 0.10, "mixed"),
        (0.95, 0.30, 0.60, "compute"),
        (0.95, 0.72, 0.75, "memory"),  # 0.81 of its reach against 0.80
        (0.95, 0.72, 0.77, "compute"),  # against 0.82
        (0.69, 0.30, 0.10, "host"),
        (0.71, 0.20, 0.10, "mixed"),  # it idles, but not much
        (0.60, 0.50, 0.10, "memory"),  # it idles, but its memory is busy for longer
        (None, 0.20, 0.10, "mixed"),
        (1.02, 0.60, 0.10, "memory"),
    ],
)
def test_the_bound_by_counters(engine, dram, tensor, bound):
    assert step_time(seen(engine, dram, tensor)).bound == bound


@pytest.mark.parametrize(("dram", "tensor"), [(None, 0.1), (0.6, None), (None, None)])
def test_without_both_counters_shapes_tell(dram, tensor):
    m = measurement()
    slow, fast = seen(0.5, dram, tensor, m), seen(0.5, dram, tensor, measurement(8, 10_000.0))
    assert step_time(slow).bound is None, "shapes fill a small part of the step"
    assert step_time(fast).bound == "memory"


@pytest.mark.parametrize(("shares", "bound"), [((0.6, 0.2), "memory"), ((0.2, 0.6), "compute"), ((0.4, 0.4), None)])
def test_the_bound_by_shapes(shares, bound):
    """shares: of the step, that its bytes and its FLOPs take at least on a GPU of these peaks."""
    m, peaks = measurement(), peaks_of("NVIDIA H200")
    by_bytes, by_flops = (known / share for known, share in zip(least(m), shares))
    assert step_time(with_peaks(m, peaks.flops_per_s * by_flops, peaks.bytes_per_s * by_bytes)).bound == bound


def test_nothing_known_no_step_time():
    m, nothing = measurement(), module.StepTime({}, None, None)
    assert step_time(replace(m, environment=replace(m.environment, gpu_name="Some GPU"))) == nothing
    assert step_time(replace(m, spec=replace(m.spec, model="/not/here", model_facts=None))) == nothing
    assert step_time(replace(m, run=replace(m.run, window_s=(1e6, 1e6 + 1)))) == nothing


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.floats(0.01, 0.9), st.integers(32, 64))
def test_no_share_is_above_1_below_the_roofline(batch, fraction, output_tokens):
    # the roofline leaves out what a prefill moves: some percent at these lengths, hence 0.9 of it
    m = measurement(batch, 1.0, output_tokens=output_tokens)
    limit = ceiling_tokens_per_s(work(m), peaks_of("NVIDIA H200"), batch, overlap=True)
    m = measurement(batch, fraction * limit, output_tokens=output_tokens, steps=4 * output_tokens)
    assert 0 <= step_time(m).unexplained <= 1 and max(least(m)) <= 1


def test_faster_than_the_roofline_shows():
    assert step_time(measurement(8, 1e6)).unexplained < 0


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_the_gap_is_positive_where_memory_is_nearer_to_its_end(dram, tensor):
    gap = saturation_gap(seen(0.95, dram, tensor, SHORT))
    assert gap == pytest.approx(math.log((dram / 0.89) / (tensor / 0.94)), abs=1e-9)


SHORT = measurement(1, 1000.0, steps=4)


@pytest.mark.parametrize(("dram", "tensor"), [(None, 0.1), (0.1, None), (0.0, 0.1), (0.1, 0.0)])
def test_no_gap_without_both(dram, tensor):
    assert saturation_gap(seen(0.95, dram, tensor)) is None
    assert saturation_gap(measurement()) is None


@settings(max_examples=100, deadline=None)
@given(any_telemetry())
def test_step_time_with_any_telemetry(telemetry):
    m = replace(SHORT, run=replace(SHORT.run, telemetry=telemetry))
    assert step_time(m).unexplained == step_time(SHORT).unexplained
    assert saturation_gap(m) is None or math.isfinite(saturation_gap(m))


def test_parts_of_a_step_are_all_of_it():
    m = seen(engine=0.9)
    parts, known = step_parts([m]), step_time(m)
    assert [*parts] == ["weights", "kv", "flops", "kernels", "idle"] and sum(parts.values()) == pytest.approx(1)
    assert parts["weights"] + parts["kv"] == pytest.approx(least(m)[0]) and parts["idle"] == pytest.approx(0.1)
    assert parts["kernels"] + parts["idle"] == pytest.approx(known.unexplained)


def test_without_counters_kernels_and_host_are_one_part():
    parts = step_parts([measurement()])
    assert [*parts] == ["weights", "kv", "flops", "unsplit"]
    assert parts["unsplit"] == pytest.approx(step_time(measurement()).unexplained)


def test_without_a_data_sheet_there_are_kernels_and_none():
    m = seen(engine=0.9)
    parts = step_parts([replace(m, environment=replace(m.environment, gpu_name="another"))])
    assert parts == pytest.approx({"kernels": 0.9, "idle": 0.1})


@pytest.mark.parametrize("repeats", [(seen(engine=0.9), measurement()), (seen(engine=1e-6),)])
def test_repeats_that_differ_and_counters_below_the_data_sheet_have_no_parts(repeats):
    assert step_parts(repeats) == {}


def test_arithmetic_is_a_part_where_it_takes_longer_than_the_bytes():
    m, peaks = seen(engine=0.9), peaks_of("NVIDIA H200")
    by_bytes, by_flops = (known / share for known, share in zip(least(m), (0.3, 0.5)))
    parts = step_parts([with_peaks(m, peaks.flops_per_s * by_flops, peaks.bytes_per_s * by_bytes)])
    assert parts["flops"] == pytest.approx(0.2) and parts["kernels"] == pytest.approx(0.4)
