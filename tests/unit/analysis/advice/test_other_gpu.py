"""The law on another GPU: exact where a step is what two data sheets and a host make of it, and refuted elsewhere;
checked by the same engine, workload and release only."""

from dataclasses import replace
from statistics import fmean

import pytest
from committed import archive
from facts import tells
from refusals import refused
from stored_records import having
from strategies import H200, measurement

from pytest_slmserve.analysis.advice import other_gpu
from pytest_slmserve.analysis.advice.other_gpu import carries, gpu_named, predicted_elsewhere
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM, REACHABLE_TENSOR, Peaks
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import TooFewPoints

H100 = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
A100 = replace(H200, gpu_name="NVIDIA A100-SXM4-80GB")
LOADS = (1, 8, 64)
ON_H100, ON_H200 = gpu_named("H100"), gpu_named("H200")


def sweep(environment, rate, loads=LOADS, **spec: object) -> Curve:
    pairs = [(load, i, factor * rate(load)) for load in loads for i, factor in enumerate((0.999, 1.001))]
    made = [measurement(load, each, environment=environment, repeat=i) for load, i, each in pairs]
    return curve_of("opt-1.3b", having(made, spec=spec))


WORK = sweep(H200, lambda load: 100.0 * load).work


def physical(gpu: Peaks, host_s: float = 0.002, slower: float = 1.0):
    """Throughput of an engine whose steps read the weights and contexts, compute prompts, and wait for the host."""
    bandwidth = REACHABLE_DRAM * gpu.bytes_per_s
    prompt_s = WORK.prefill_flops / WORK.output_tokens / (REACHABLE_TENSOR * gpu.flops_per_s)
    fixed_s = host_s + WORK.weight_bytes / bandwidth
    each_s = WORK.context * WORK.kv_bytes_per_token / bandwidth + prompt_s
    return lambda load: load / (slower * (fixed_s + each_s * load))


HERE, THERE = sweep(H100, physical(ON_H100)), sweep(H200, physical(ON_H200))
PREDICTION = predicted_elsewhere(HERE, ON_H200)


def noisier(point, share: float):
    return replace(point, repeats=((1 - share) * fmean(point.repeats), (1 + share) * fmean(point.repeats)))


@pytest.mark.parametrize("there", [H200, A100], ids=lambda environment: environment.gpu_name)
@pytest.mark.parametrize("host_s", [0.0, 0.002, 0.01])
def test_a_step_of_memory_compute_and_host_is_predicted_on_another_gpu(host_s, there):
    gpu = gpu_named(there.gpu_name)
    prediction, truth = predicted_elsewhere(sweep(H100, physical(ON_H100, host_s)), gpu), physical(gpu, host_s)
    assert [prediction.tokens_per_s(n) for n in LOADS] == pytest.approx([*map(truth, LOADS)], rel=0.01)
    assert prediction.step.pace * 64 / (64 + prediction.step.b_half) == pytest.approx(truth(64), rel=0.01)
    assert carries(prediction, sweep(there, truth)).state is State.PASSES


def test_prompts_of_an_fp8_engine_are_computed_in_fp8_and_without_a_law_or_a_sheet_nothing_is_predicted():
    here, truth = (physical(replace(gpu, flops_per_s=gpu.fp8_flops_per_s)) for gpu in (ON_H100, ON_H200))
    prediction = predicted_elsewhere(sweep(H100, here, extra=(("quantization", "fp8"),)), ON_H200)
    assert [prediction.tokens_per_s(n) for n in LOADS] == pytest.approx([*map(truth, LOADS)], rel=0.001)
    for slower in (0.8, 1.25):
        verdict = carries(PREDICTION, sweep(H200, physical(ON_H200, slower=slower)))
        assert verdict.state is State.FAILS and verdict.value == pytest.approx(slower, rel=0.02)
        assert tells(verdict.why, "H200", "10 %")
    noisy = replace(THERE, points=tuple(noisier(p, 0.2) for p in THERE.points))
    assert carries(PREDICTION, noisy).state is State.INCONCLUSIVE
    # Noise of one request alone, which tells the fixed part of a step, hardly moves what is predicted of 64.
    for side in ("here", "there"):
        curves = dict.fromkeys(("here", "there"), sweep(H100, physical(ON_H100), (1, 4, 16, 64)))
        first, *others = curves[side].points
        curves[side] = replace(curves[side], points=(noisier(first, 0.05), *others))
        seen = [each for each, _ in other_gpu.errors(predicted_elsewhere(curves["here"], ON_H100), curves["there"])]
        assert seen[0].low < 0.95 < 1.05 < seen[0].high, side
        assert seen[-1].high - seen[-1].low < 0.5 * (seen[0].high - seen[0].low)
    names = {"h200": "H200", "H100": "H100", "NVIDIA A100-SXM4-40GB": "A100-40", "L40S": "L40S"}
    assert {name: gpu_named(name).family for name in names} == names
    with refused("MI300X", hint="H200"):
        gpu_named("MI300X")
    no_law = sweep(H100, lambda load: {1: 10.0, 8: 900.0, 64: 700.0}[load])
    no_sheet, wide = replace(H200, gpu_name="Voodoo 5"), sweep(H100, physical(ON_H100), tensor_parallel_size=2)
    for curve in (no_law, sweep(no_sheet, physical(ON_H200)), wide, Curve(subject="nothing")):
        with refused(kind=TooFewPoints):
            predicted_elsewhere(curve, ON_H200)


def test_jobs_under_several_batch_limits_are_a_sweep_of_the_limit():
    """Figure 1 on an H200 and an H100: the law carries where the GPU decides, and not where the host does."""
    names = ("h200-vllm-0.26.0-figure-1", "h100-vllm-0.26.0-figure-1")
    here, there = (other_gpu.limit_sweeps(archive(name)) for name in names)
    assert [curve.subject for curve in here] == ["opt-125m, 500 at once", "opt-1.3b, 500 at once"]
    assert [[p.concurrency for p in curve.points] for curve in here] == [[64, 128, 256, 512]] * 2
    assert all(batch <= p.concurrency for curve in here for p in curve.points for batch in p.batch_repeats)
    off = []
    for curve in here:
        prediction = predicted_elsewhere(curve, ON_H100)
        (checked,) = other_gpu.measured_there(prediction, [*here, *there])
        off.append(max(abs(prediction.tokens_per_s(p.batch) / fmean(p.repeats) - 1) for p in checked.points))
    assert off[0] > 0.25 and off[1] < 0.105
    assert other_gpu.limit_sweeps(archive("h200-vllm-0.26.0-batching")) == [], "they differ in more than the limit"


@pytest.mark.parametrize(("spec", "counts"), [
    ({}, True), ({"kv_cache_bytes": 1 << 33}, True),  # what the memory of a GPU of another size leaves
    ({"max_num_seqs": 7}, False), ({"enforce_eager": True}, False),
])  # fmt: skip
def test_only_the_same_engine_workload_and_release_check_it(spec, counts):
    rate = physical(ON_H200)
    other, older = sweep(H200, rate, **spec), sweep(replace(H200, vllm="0.20.2"), rate)
    assert other_gpu.measured_there(PREDICTION, [HERE, other, older, sweep(A100, rate)]) == [other] * counts
