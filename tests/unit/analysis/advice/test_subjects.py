"""What the advisor is asked about: sweeps of ours, and external results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published import ROWS, served
from scripts import BASELINES, in_checkout
from strategies import H200, judge, law, measurement, planted_telemetry

from pytest_slmserve.analysis.advice.subjects import of_curves, of_external
from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.points import ratio
from pytest_slmserve.analysis.sweep.curve import Axes, Curve, curve_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.report.advice import serve_words
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE, model_from_config
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec

BATCHES = (1, 16, 64)
KV_BYTES = 1365 * 16 * 196_608  # of the planted engine's blocks
WEIGHTS = 2_631_516_160


def sweep(model: str = "opt-1.3b", batches=BATCHES, used: float | None = None, **facts: object) -> Curve:
    made = [measurement(c, law(c), model=model, repeat=i, **facts) for i, c in enumerate(batches)]
    if used is not None:
        columns = {sensors.MEMORY_USED: used}
        made = [
            replace(m, run=replace(m.run, telemetry=planted_telemetry(columns, until_s=30.0, spans=False)))
            for m in made
        ]
    return curve_of(model, made)


def test_a_sweep_brings_its_shape_its_engine_and_its_gpu():
    asked = of_curves([sweep()], None, None)
    [subject] = asked.subjects
    footprint = subject.footprint
    assert (subject.name, subject.engine.spec.model, subject.engine.dtype) == ("opt-1.3b", "opt-1.3b", "float16")
    assert footprint.weight_bytes == WEIGHTS and footprint.kv_bytes_per_token == 196_608 and footprint.longest == 96
    assert footprint.allowance_bytes == 4 * GIB and not footprint.allowance_seen
    assert subject.engine.kv_had_bytes == KV_BYTES and subject.engine.max_num_batched_tokens == 8192
    assert subject.engine.gpu_had_bytes == asked.gpu_bytes == H200.gpu_memory_bytes
    assert asked.device == "NVIDIA H200" and subject.work and subject.peaks


def test_the_latency_is_the_time_per_output_token():
    curve = sweep()
    [subject] = of_curves([curve], None, None).subjects
    for point, original in zip(subject.points, curve.points, strict=True):
        assert point.e2e_repeats == (original.tpot_s,) and original.tpot_s < original.e2e_s


def test_the_allowance_is_what_the_sensors_saw_beyond_weights_and_kv():
    seen = of_curves([sweep(used=float(WEIGHTS + KV_BYTES + 3 * GIB))], None, None).subjects[0].footprint
    assert seen.allowance_seen and seen.allowance_bytes == 3 * GIB
    less = of_curves([sweep(used=1e9)], None, None).subjects[0].footprint
    assert not less.allowance_seen and less.allowance_bytes == 4 * GIB


def test_one_model_can_be_asked_for_and_the_length_be_given():
    curves = [sweep(), sweep("opt-125m")]
    assert [s.name for s in of_curves(curves, None, None).subjects] == ["opt-1.3b", "opt-125m"]
    [subject] = of_curves(curves, "facebook/opt-125m", 2048).subjects
    assert subject.name == "opt-125m" and subject.footprint.longest == 2048
    with pytest.raises(BadUsage, match="no records of opt-2.7b"):
        of_curves(curves, "opt-2.7b", None)


def test_of_several_sweeps_of_a_model_the_one_with_most_loads_is_taken():
    together = curve_of("opt-1.3b", [measurement(c, law(c), load=ClosedLoop(c, ramp_up="burst")) for c in BATCHES[:2]])
    [subject] = of_curves([together, sweep()], None, None).subjects
    note = "taken is the sweep with the most loads (opt-1.3b, ramp-up staggered), not opt-1.3b, ramp-up burst"
    assert len(subject.points) == 3 and note in subject.notes


def test_records_of_two_devices_are_not_mixed():
    other = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
    with pytest.raises(BadUsage, match="several devices"):
        of_curves([sweep(), sweep("opt-125m", environment=other)], None, None)
    assert of_curves([sweep(), sweep("opt-125m", environment=other)], "opt-125m", None).subjects[0].name == "opt-125m"


def changed(curve: Curve, **facts: object) -> Curve:
    """The sweep of an engine that differs in these fields."""
    return curve_of(curve.subject, [replace(m, spec=replace(m.spec, **facts)) for m in curve.measurements])


def test_a_cpu_has_no_memory_of_a_gpu():
    on_cpu = sweep(environment=Environment(platform="cpu", cpu="some CPU", cores=2))
    asked = of_curves([changed(on_cpu, platform="cpu")], None, None)
    assert asked.subjects[0].footprint is None and "on a CPU" in asked.subjects[0].engine.no_footprint
    assert asked.gpu_bytes is None and asked.device == "some CPU, 2 cores"


def test_what_moved_the_engine_stays_in_its_arguments():
    extra = (("kv_cache_dtype", "fp8"), ("async_scheduling", False), ("compilation_config", {"level": 1}), ("x", True))
    [subject] = of_curves([changed(sweep(), enforce_eager=True, extra=extra)], None, None).subjects
    words = serve_words(subject.engine, 8, None)
    assert words[words.index("--enforce-eager") :] == (
        *("--enforce-eager", "--kv-cache-dtype", "fp8", "--no-async-scheduling"),
        *("--compilation-config", '{"level": 1}', "--x"),
    )
    assert subject.footprint.kv_bytes_per_token == 196_608 / 2


def test_arguments_that_the_advice_sets_are_told_once_and_a_list_as_words():
    extra = (("max_num_seqs", 64), ("num_gpu_blocks_override", 9), ("gpu_memory_utilization", 0.5), ("dtype", "half"))
    extra += (("max_num_batched_tokens", 512), ("cudagraph_capture_sizes", (1, 2, 4)), ("revision", None))
    [subject] = of_curves([changed(sweep(), extra=extra)], None, None).subjects
    words = serve_words(subject.engine, 8, None)
    assert words[-4:] == ("--cudagraph-capture-sizes", "1", "2", "4") and len({*words}) == len(words)
    assert not {"--num-gpu-blocks-override", "--revision"} & {*words}


def test_variables_that_the_engine_was_measured_with_are_told():
    env = (("VLLM_USE_V2_MODEL_RUNNER", "1"), ("PYTHONPATH", "/elsewhere"))
    [subject] = of_curves([changed(sweep(), env=env)], None, None).subjects
    assert serve_words(subject.engine, 8, None)[:4] == ("env", "VLLM_USE_V2_MODEL_RUNNER=1", "vllm", "serve")


def published(slower: float = 1.0, lost: float = 0.0) -> Curve:
    """lost: preemptions of the largest load."""
    points = []
    for load, output, total, ms, _ in ROWS:
        wait = slower * ms / 1e3
        point = served(load, [total], [wait], lost if load == ROWS[-1][0] else 0.0, batch=output * wait)
        points.append(replace(point, each=(replace(point.each[0], batch=output * wait),)))
    return Curve(subject="external results", points=tuple(points), axes=Axes("max_num_seqs", "tokens", "itl_ms"))


def test_external_results_bring_their_batch_and_share_of_output():
    [subject] = of_external(published(), None, None, None).subjects
    assert subject.name == "results" and subject.engine is None and subject.notes == ()
    assert subject.output_share == pytest.approx(0.7254, abs=1e-4)
    assert subject.points[-1].batch_repeats == (pytest.approx(584.3, abs=0.1),), "of 768, by Little's law"


def test_a_model_gives_external_results_a_shape_and_a_length_their_memory():
    [subject] = of_external(published(), EngineSpec("opt-1.3b"), 632, None).subjects
    assert subject.name == "opt-1.3b" and subject.footprint.longest == 632 and not subject.footprint.allowance_seen
    assert subject.engine.max_num_batched_tokens is None and subject.engine.dtype == "float16"
    [known] = of_external(published(), EngineSpec("opt-1.3b"), 632, None, kv_blocks=18_573).subjects
    assert subject.engine.kv_had_bytes is None and known.engine.kv_had_bytes == 18_573 * 16 * 196_608
    [short] = of_external(published(), EngineSpec("opt-1.3b"), None, None).subjects
    assert short.footprint is None and "--max-model-len" in short.engine.no_footprint


def test_external_results_of_a_quantized_model_have_its_weights_and_its_cache():
    groups = {"0": {"weights": {"num_bits": 8}}}
    own = {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    config = {**dict(CATALOGUE["qwen3-0.6b"].config), "quantization_config": own}
    model = model_from_config("mine", config, CATALOGUE["qwen3-0.6b"].parameters)
    spec = EngineSpec("mine", dtype=model.dtype, model_facts=model)
    [subject] = of_external(published(), spec, 768, None).subjects
    assert subject.footprint.weight_bytes == 596_049_920 + 155_582_464, "the embeddings keep 16 bits"
    assert subject.footprint.kv_bytes_per_token == 28 * 8 * 128 * 2


def test_what_is_odd_about_external_results_is_noted():
    [subject] = of_external(published(lost=3.0), None, None, None, ["a note"]).subjects
    assert subject.notes == ("a note", "left out, for they are not valid: max_num_seqs 768")
    assert len(subject.usable) == len(ROWS) - 1
    [subject] = of_external(published(slower=100.0), None, None, None).subjects
    assert "the knob is taken as the batch" in subject.notes[0] and subject.points[0].batch_repeats == (1.0,)


@in_checkout
def test_steps_that_no_cuda_graph_covers_are_noted_until_larger_graphs_are_tried():
    """Recorded: with the default a step with a prompt leaves half of the GPU's time to the host."""
    contents = read(BASELINES / "h100-vllm-0.26.0-cuda-graphs.jsonl.xz")
    curves = stored_curves(contents.measurements, contents.plans)
    noted = {
        (curve.subject, bool(dict(curve.spec.extra))): [n for n in subject.notes if "max_cudagraph_capture_size" in n]
        for curve in curves
        for subject in of_curves([curve], None, None).subjects
    }
    assert all(bool(notes) is not larger for (_, larger), notes in noted.items()) and len(noted) == 4
    assert "of the steps hold a prompt and more tokens than vLLM's largest CUDA graph" in noted["qwen3-4b", False][0]
    assert of_curves([sweep()], None, None).subjects[0].notes == ()


def test_engines_of_several_gpus_tell_nothing_of_one():
    one = sweep()
    both = changed(one, tensor_parallel_size=2)
    assert of_curves([both, one], None, None) == of_curves([one], None, None)
    with pytest.raises(BadUsage, match="opt-1.3b was measured on several GPUs at once, and advice is for one"):
        of_curves([both], None, None)


# The claim on the batch of the advisor, from records whose throughput is planted


def judged(rates):
    curve = curve_of("opt-1.3b", [measurement(n, rate + i, repeat=i) for n, rate in rates.items() for i in range(2)])
    return curve, judge("advised-batch-costs-little", curve)


def test_the_load_that_serves_most_is_chosen_of_all_and_corrected_for_it():
    curve, verdict = judged({1: 100.0, 32: 2400.0, 128: 4800.0, 512: 4900.0})
    _, chosen, _, most = curve.valid
    by_itself = ratio(chosen, most, curve.valid)
    assert verdict.state is State.FAILS and verdict.value == by_itself.value
    assert verdict.low < by_itself.low < by_itself.high < verdict.high


def test_a_batch_that_serves_most_itself_is_held_against_the_next():
    _, verdict = judged({1: 100.0, 32: 2400.0, 128: 2000.0})
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(1.2, rel=0.01)
    assert "concurrency 32, chosen for twice the latency at 32, serves 120 %" in verdict.why
    assert "of what 128 does" in verdict.why
