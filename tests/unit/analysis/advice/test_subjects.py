"""What the advisor is asked about: sweeps of ours and external results, with their shape, memory and notes; the
engine as advised; and verdicts on what was predicted of it, on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import pytest
from committed import archive
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from published import ROWS, served
from refusals import refused
from strategies import H200, judge, law, measurement, planted_telemetry

from pytest_slmserve.analysis.advice.advisor import Advice, Ceiling, Gains, Objectives, plan, utilization
from pytest_slmserve.analysis.advice.subjects import (
    KV_BLOCKS,
    LATENCY,
    THROUGHPUT,
    UNPREEMPTED,
    gain_within_bound,
    kv_blocks_as_predicted,
    of_curves,
    of_external,
    recommended_engine,
    verified,
)
from pytest_slmserve.analysis.claims.table import applies, claim_of, stored_curves
from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.points import points_of, ratio, shared_points
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import Axes, Curve, curve_of
from pytest_slmserve.analysis.verdict import State, within
from pytest_slmserve.report.advice import serve_words
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.models import CATALOGUE, model_from_config
from pytest_slmserve.schema.records import Environment, Measurement, Replica, Resolved
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
    with refused("opt-2.7b", hint="opt-1.3b, opt-125m"):
        of_curves(curves, "opt-2.7b", None)
    assert of_curves([], "opt-2.7b", None).subjects == ()


def test_of_several_sweeps_of_a_model_the_last_with_most_loads_is_taken():
    together = curve_of("opt-1.3b", [measurement(c, law(c), load=ClosedLoop(c, ramp_up="burst")) for c in BATCHES[:2]])
    [subject] = of_curves([together, sweep()], None, None).subjects
    assert len(subject.points) == 3 and any(tells(note, "staggered") and tells(note, "burst") for note in subject.notes)
    later = curve_of(
        "opt-1.3b",
        [
            replace(m, measured_at="2026-02-01T00:00:00.000+00:00", load=replace(m.load, ramp_up="burst"))
            for m in sweep().measurements
        ],
    )
    for curves in ([later, sweep()], [sweep(), later]):
        [subject] = of_curves(curves, None, None).subjects
        assert subject.points == of_curves([later], None, None).subjects[0].points and len(subject.notes) == 1


def test_records_of_two_devices_are_not_mixed():
    other = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
    with refused("NVIDIA H200", "NVIDIA H100 80GB HBM3", hint="--model"):
        of_curves([sweep(), sweep("opt-125m", environment=other)], None, None)
    assert of_curves([sweep(), sweep("opt-125m", environment=other)], "opt-125m", None).subjects[0].name == "opt-125m"


def changed(curve: Curve, **facts: object) -> Curve:
    """The sweep of an engine that differs in these fields."""
    return curve_of(curve.subject, [replace(m, spec=replace(m.spec, **facts)) for m in curve.measurements])


def test_a_cpu_has_no_memory_of_a_gpu():
    on_cpu = sweep(environment=Environment(platform="cpu", cpu="some CPU", cores=2))
    asked = of_curves([changed(on_cpu, platform="cpu")], None, None)
    assert asked.subjects[0].footprint is None and tells(asked.subjects[0].engine.no_footprint, "CPU")
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


def test_a_server_of_others_and_an_unknown_shape_have_no_footprint():
    [remote] = of_curves(
        [changed(sweep(), platform="remote", interface="endpoint", url="http://host:8000")], None, None
    ).subjects
    assert remote.engine is None and remote.footprint is None
    unknown = curve_of(
        "mine",
        [
            replace(m, spec=replace(m.spec, model="mine", dtype="auto"), resolved=Resolved())
            for m in sweep().measurements
        ],
    )
    [subject] = of_curves([unknown], None, None).subjects
    assert subject.footprint is None and subject.engine.no_footprint


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
    assert subject.notes[0] == "a note" and tells(subject.notes[1], "max_num_seqs", 768) and len(subject.notes) == 2
    assert len(subject.usable) == len(ROWS) - 1
    [subject] = of_external(published(slower=100.0), None, None, None).subjects
    assert tells(subject.notes[0], "knob", 1, 8, 32) and subject.points[0].batch_repeats == (1.0,)


@pytest.mark.parametrize("known", [{"batch": None}, {"e2e_s": None}, {"output_tokens_per_s": None}])
def test_the_share_of_output_is_of_the_points_that_tell_all_of_it(known):
    """Little's law needs the batch, the latency and the rate."""
    curve = published()
    first, *others = curve.points
    blind = replace(first, each=tuple(replace(one, **known) for one in first.each))
    mean = fmean(row[1] / row[2] for row in ROWS[1:])
    [subject] = of_external(replace(curve, points=(blind, *others)), None, None, None).subjects
    assert subject.output_share == pytest.approx(mean)
    [alone] = of_external(replace(curve, points=(blind,)), None, None, None).subjects
    assert alone.output_share is None


def test_steps_that_no_cuda_graph_covers_are_noted_until_larger_graphs_are_tried():
    """Recorded: with the default a step with a prompt leaves half of the GPU's time to the host."""
    curves = stored_curves(archive("h100-vllm-0.26.0-cuda-graphs"), [])
    noted = {
        (curve.subject, bool(dict(curve.spec.extra))): [n for n in subject.notes if "max_cudagraph_capture_size" in n]
        for curve in curves
        for subject in of_curves([curve], None, None).subjects
    }
    assert len(noted) == 4 and all(bool(notes) is not larger for (_, larger), notes in noted.items())
    assert of_curves([sweep()], None, None).subjects[0].notes == ()
    [noted_one, *_] = [c for c in curves if of_curves([c], None, None).subjects[0].notes]
    for facts in (
        {"enforce_eager": True},
        {"extra": (("compilation_config", {"level": 1}),)},
        {"platform": "cpu", "kv_cache_bytes": GIB},
    ):
        assert of_curves([changed(noted_one, **facts)], None, None).subjects[0].notes == ()


def test_engines_of_several_gpus_tell_nothing_of_one():
    one = sweep()
    both = changed(one, tensor_parallel_size=2)
    assert of_curves([both, one], None, None) == of_curves([one], None, None)
    with refused("opt-1.3b", hint="--slm-tensor-parallel-size 1"):
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


def test_the_batch_is_judged_of_sweeps_on_one_gpu_that_tell_efficiency_and_objective():
    whole = judged({1: 100.0, 32: 2400.0, 128: 4800.0})[0]
    others = [judged(dict.fromkeys(loads, 100.0))[0] for loads in ((2, 32, 128), (1, 64, 128), (1, 32))]
    found = [whole, *others, changed(whole, tensor_parallel_size=2), replace(whole, beside=True)]
    claim = claim_of("advised-batch-costs-little")
    assert [applies(claim, replace(curve, subject="opt-1.3b")) for curve in found] == [True, *[False] * 5]


def test_a_batch_that_serves_most_itself_is_held_against_the_next():
    _, verdict = judged({1: 100.0, 32: 2400.0, 128: 2000.0})
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(1.2, rel=0.01)
    assert tells(verdict.why, 32, 128, "120 %")


# The engine as advised


BLOCKS = 1365
SPEC = EngineSpec("opt-1.3b", max_num_seqs=64, kv_cache_bytes=BLOCKS * 16 * 196_608)
SPREAD = (0.999, 1.001)
PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE


@cache
def advice(batches=(1, 16, 32, 64, 128), spread=SPREAD, spec: EngineSpec | None = None, **facts: Any) -> Advice:
    made = [measurement(c, law(c) * by, repeat=i, **facts) for c in batches for i, by in enumerate(spread)]
    made = [replace(m, spec=spec or m.spec) for m in made]
    found = of_curves([curve_of("opt-1.3b", made)], None, None)
    return plan(found.subjects, Objectives(slo=RelativeSlo(2, 32), gpu_bytes=found.gpu_bytes)).advices[0]


def again(factor: float = 1.0, batch: int = 64, spread=SPREAD, **facts: Any) -> list[Measurement]:
    made = [measurement(batch, law(batch) * factor * by, repeat=i, launch="2", **facts) for i, by in enumerate(spread)]
    return [replace(m, spec=SPEC) for m in made]


def verdicts(advised: Advice, found: list[Measurement]) -> dict[str, State]:
    return {verdict.claim: verdict.state for verdict in verified(advised, SPEC, found)}


def told(claim: str, advised: Advice, found: list[Measurement]) -> Any:
    return next(verdict for verdict in verified(advised, SPEC, found) if verdict.claim == claim)


def test_the_engine_is_that_of_the_sweep_with_the_limits_advised():
    spec = measurement(1, law(1)).spec
    engine = recommended_engine(advice(), spec, 64)
    total = engine.kv_cache_bytes + 2_631_516_160 + 4 * GIB
    assert (engine.max_num_seqs, engine.max_model_len) == (64, 96)
    assert engine.kv_cache_bytes == (64 * 6 + 1) * 16 * 196_608
    assert engine.gpu_memory_utilization == utilization(total, H200.gpu_memory_bytes or 0) == 0.054
    limits = ("max_num_seqs", "max_model_len", "kv_cache_bytes", "gpu_memory_utilization")
    assert replace(engine, **{name: getattr(spec, name) for name in limits}) == spec


def test_arguments_of_the_sweep_do_not_override_the_limits():
    extra = (("max_num_seqs", 512), ("num_gpu_blocks_override", 99), ("block_size", 16))
    engine = recommended_engine(advice(), replace(SPEC, extra=extra), 64)
    assert engine.max_num_seqs == 64 and engine.extra == (("block_size", 16),)


@pytest.mark.parametrize(("batch", "gib"), [(8, 1), (4096, 73)])
def test_on_the_cpu_the_kv_cache_has_whole_gib(batch, gib):
    spec = EngineSpec("opt-1.3b", platform="cpu", kv_cache_bytes=GIB)
    engine = recommended_engine(advice(spec=spec, environment=Environment(platform="cpu", cpu="some")), spec, batch)
    assert engine.kv_cache_bytes == gib * GIB and engine.max_num_seqs == batch and engine.max_model_len == 2048


# What was predicted of it


@given(st.floats(0.5, 1.5), st.floats(0, 0.5), st.floats(0.01, 0.4))
def test_within_is_decided_where_no_end_of_the_interval_says_otherwise(value, half, margin):
    seen = within(Interval(value, value - half, value + half), 1 - margin, 1 + margin)
    apart = abs(value - 1)
    assert (seen is PASSES) == (1 - margin <= value - half and value + half <= 1 + margin)
    assert seen is not FAILS or apart > margin
    assert seen is not INCONCLUSIVE or half > 0
    assert within(Interval(value), 1 - margin, 1 + margin) is INCONCLUSIVE, "without known noise"


@pytest.mark.parametrize(
    ("factor", "wanted", "in_time"),
    [(1.0, PASSES, PASSES), (0.9, PASSES, PASSES), (0.7, FAILS, PASSES), (0.5, FAILS, FAILS), (1.3, FAILS, PASSES)],
)
def test_throughput_and_latency(factor, wanted, in_time):
    found = verdicts(advice(), again(factor))
    assert found == {UNPREEMPTED: PASSES, KV_BLOCKS: PASSES, THROUGHPUT: wanted, LATENCY: in_time}
    throughput, latency = told(THROUGHPUT, advice(), again(factor)), told(LATENCY, advice(), again(factor))
    assert throughput.value == pytest.approx(factor) and throughput.low < factor < throughput.high
    assert (
        latency.value == pytest.approx(64 / law(64) / factor, rel=1e-4) and latency.low < latency.value < latency.high
    )
    limit = advice().decision.limit.seconds
    assert (throughput.threshold, latency.threshold) == (1.0, pytest.approx(1.15 * limit))
    assert tells(latency.why, f"{1e3 * limit:.3g} ms") and {throughput.n, latency.n} == {2}


def test_a_prediction_by_the_law_has_no_noise_of_its_own():
    predicted = advice((1, 32))
    assert predicted.decision.predicted and predicted.batch != 64
    near = told(THROUGHPUT, predicted, again(1.02, predicted.batch))
    assert near.value == pytest.approx(1.02, rel=1e-3)
    measured = told(THROUGHPUT, advice(), again(1.02))
    assert near.high - near.low < measured.high - measured.low


def test_noise_that_is_not_known_decides_nothing():
    found = verdicts(advice(spread=(1.0,)), again(spread=(1.0,)))
    assert found[THROUGHPUT] is found[LATENCY] is INCONCLUSIVE


def test_preemptions_fail_and_leave_the_rest_inconclusive():
    found = verdicts(advice(), again(preempted=3))
    assert (found[UNPREEMPTED], found[THROUGHPUT], found[LATENCY]) == (FAILS, INCONCLUSIVE, INCONCLUSIVE)
    assert tells(told(UNPREEMPTED, advice(), again(preempted=3)).why, 6)


@pytest.mark.parametrize(("off", "state"), [(-40, FAILS), (-3, FAILS), (-2, PASSES), (2, PASSES), (3, FAILS)])
def test_kv_blocks_may_be_two_apart_and_the_launch_that_is_farthest_decides(off, state):
    limits = Resolved(kv_blocks=BLOCKS, block_size=16, max_num_seqs=64, dtype="float16")
    launches = [
        limits,
        replace(limits, kv_blocks=BLOCKS + off),
        replace(limits, kv_blocks=BLOCKS + (off > 0) - (off < 0)),
    ]
    found = kv_blocks_as_predicted(SPEC, launches)
    assert (found.state, found.value, found.threshold) == (state, off, 2)
    unknown = kv_blocks_as_predicted(SPEC, [*launches, replace(limits, kv_blocks=None)])
    assert (unknown.state, unknown.value) == (INCONCLUSIVE, None)
    assert KV_BLOCKS not in verdicts(advice(), again(resolved=replace(limits, kv_blocks=None)))
    assert told(KV_BLOCKS, advice(), again(resolved=launches[1])).value == off


# Several engines


def together(share: float, **facts: Any) -> Any:
    made = [
        replace(
            measurement(32, share * law(64) * by, repeat=run, launch=f"{index}", **facts),
            replica=Replica(f"g{run}", index, 2, "set", "mps"),
        )
        for run, by in enumerate(SPREAD)
        for index in range(2)
    ]
    return shared_points(made)[0]


GAINS = Gains(64, None, Ceiling("host", 0.9, 1 / 0.9, "the host"), Ceiling("dram", 0.5, 2.0, "the memory"))


@pytest.mark.parametrize(("share", "wanted"), [(0.8, PASSES), (1.14, PASSES), (1.16, FAILS), (1.3, FAILS)])
def test_the_gain_against_its_bound(share, wanted):
    """With 15 % above it."""
    verdict = gain_within_bound(replace(advice(), gains=GAINS), points_of(again())[0], together(share))
    assert verdict.state is wanted and verdict.subject == "2 x opt-1.3b"
    assert verdict.value == pytest.approx(2 * share) and verdict.threshold == 2
    assert tells(verdict.why, f"{2 * share:.3g} times", "2 times")


@pytest.mark.parametrize(
    ("gains", "single", "shared"),
    [
        (None, again(), together(0.8)),
        (GAINS, again(), together(0.8, failures=1)),
        (GAINS, again(failures=1), together(0.8)),
    ],
    ids=["nothing bounds it", "invalid together", "invalid alone"],
)
def test_a_gain_that_nothing_bounds_or_that_is_not_known_is_inconclusive(gains, single, shared):
    verdict = gain_within_bound(replace(advice(), gains=gains), points_of(single)[0], shared)
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, None)
