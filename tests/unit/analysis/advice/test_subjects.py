"""What the advisor is asked about: sweeps of ours and external results, with their shape, memory and notes; the
engine as advised; and verdicts on what was predicted of it, on planted numbers."""

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest
import strategies
from committed import archive
from facts import tells
from published import ROWS, served
from refusals import refused
from stored_records import having
from strategies import FAILS, H200, INCONCLUSIVE, PASSES, judge, law, measurement, planted_telemetry

from pytest_slmserve.analysis.advice import subjects
from pytest_slmserve.analysis.advice.advisor import Advice, Ceiling, Gains, Objectives, plan, utilization
from pytest_slmserve.analysis.advice.subjects import KV_BLOCKS, LATENCY, THROUGHPUT, UNPREEMPTED
from pytest_slmserve.analysis.claims.table import applies, claim_of, stored_curves
from pytest_slmserve.analysis.points import points_of, ratio, shared_points
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import Axes, Curve, curve_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.advice import serve_words
from pytest_slmserve.schema import models, sensors
from pytest_slmserve.schema.records import Environment, Resolved
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec

BATCHES = (1, 16, 64)
BLOCKS, BLOCK_BYTES = 1365, 16 * 196_608  # of the planted engine
WEIGHTS = 2_631_516_160
SPEC = EngineSpec("opt-1.3b", max_num_seqs=64, kv_cache_bytes=BLOCKS * BLOCK_BYTES)
SPREAD = (0.999, 1.001)
GAINS = Gains(64, None, Ceiling("host", 0.9, 1 / 0.9, "the host"), Ceiling("dram", 0.5, 2.0, "the memory"))
MOVED = (("kv_cache_dtype", "fp8"), ("async_scheduling", False), ("compilation_config", {"level": 1}), ("x", True))
SET = (("max_num_seqs", 64), ("num_gpu_blocks_override", 9), ("gpu_memory_utilization", 0.5), ("dtype", "half"))


def sweep(model: str = "opt-1.3b", used: float | None = None, **facts: object) -> Curve:
    made = [measurement(c, law(c), model=model, repeat=i, **facts) for i, c in enumerate(BATCHES)]
    seen = {"telemetry": planted_telemetry({sensors.MEMORY_USED: used}, until_s=30.0, spans=False)}
    return curve_of(model, made if used is None else having(made, run=seen))


def changed(curve: Curve, **facts: object) -> Curve:
    """The sweep of an engine that differs in these fields."""
    return curve_of(curve.subject, having(curve.measurements, spec=facts))


def of_curves(*curves: Curve, model: str | None = None, longest: int | None = None):
    return subjects.of_curves(curves, model, longest)


def only(*curves: Curve, **asked):
    [subject] = of_curves(*curves, **asked).subjects
    return subject


def test_sweep_supplies_engine_facts():
    curve = sweep()
    asked = of_curves(curve)
    [subject] = asked.subjects
    footprint, engine = subject.footprint, subject.engine
    assert (subject.name, engine.spec.model, engine.dtype, subject.notes) == ("opt-1.3b", "opt-1.3b", "float16", ())
    assert (footprint.weight_bytes, footprint.kv_bytes_per_token, footprint.longest) == (WEIGHTS, 196_608, 96)
    assert (engine.kv_had_bytes, engine.max_num_batched_tokens) == (BLOCKS * BLOCK_BYTES, 8192)
    assert engine.gpu_had_bytes == asked.gpu_bytes == H200.gpu_memory_bytes
    assert asked.device == "NVIDIA H200" and subject.work and subject.peaks
    for point, original in zip(subject.points, curve.points, strict=True):
        assert point.e2e_repeats == (original.tpot_s,) and original.tpot_s < original.e2e_s
    for used, told in ((WEIGHTS + BLOCKS * BLOCK_BYTES + 3.0 * GIB, (True, 3)), (1e9, (False, 4)), (None, (False, 4))):
        footprint = only(sweep(used=used)).footprint
        assert (footprint.allowance_seen, footprint.allowance_bytes / GIB) == told, used
    on_cpu = sweep(environment=Environment(platform="cpu", cpu="some CPU", cores=2))
    asked = of_curves(changed(on_cpu, platform="cpu"))
    assert asked.subjects[0].footprint is None and tells(asked.subjects[0].engine.no_footprint, "CPU")
    assert asked.gpu_bytes is None and asked.device == "some CPU, 2 cores"
    remote = only(changed(sweep(), platform="remote", interface="endpoint", url="http://host:8000"))
    assert remote.engine is None and remote.footprint is None
    unknown = having(sweep().measurements, spec={"model": "mine", "dtype": "auto"})
    subject = only(curve_of("mine", [replace(m, resolved=Resolved()) for m in unknown]))
    assert subject.footprint is None and subject.engine.no_footprint


def test_advisor_selects_sweep_per_model():
    curves = [sweep(), sweep("opt-125m")]
    assert [s.name for s in of_curves(*curves).subjects] == ["opt-1.3b", "opt-125m"]
    subject = only(*curves, model="facebook/opt-125m", longest=2048)
    assert (subject.name, subject.footprint.longest) == ("opt-125m", 2048)
    with refused("opt-2.7b", hint="opt-1.3b, opt-125m"):
        of_curves(*curves, model="opt-2.7b")
    assert of_curves(model="opt-2.7b").subjects == ()
    other = sweep("opt-125m", environment=replace(H200, gpu_name="NVIDIA H100 80GB HBM3"))
    with refused("NVIDIA H200", "NVIDIA H100 80GB HBM3", hint="--model"):
        of_curves(sweep(), other)
    assert only(sweep(), other, model="opt-125m").name == "opt-125m"
    one, both = sweep(), changed(sweep(), tensor_parallel_size=2)
    assert of_curves(both, one) == of_curves(one)
    with refused("opt-1.3b", hint="--slm-tensor-parallel-size 1"):
        of_curves(both)
    together = curve_of("opt-1.3b", [measurement(c, law(c), load=ClosedLoop(c, ramp_up="burst")) for c in BATCHES[:2]])
    subject = only(together, sweep())
    assert len(subject.points) == 3 and any(tells(note, "staggered") and tells(note, "burst") for note in subject.notes)
    facts = {"measured_at": "2026-02-01T00:00:00.000+00:00", "load": {"ramp_up": "burst"}}
    later = curve_of("opt-1.3b", having(sweep().measurements, **facts))
    for curves in ([later, sweep()], [sweep(), later]):
        assert only(*curves).points == only(later).points and len(only(*curves).notes) == 1
    drafts = {"extra": (("speculative_config", '{"method": "ngram", "num_speculative_tokens": 3}'),)}
    made_up, real = (changed(later, **drafts, load_format=weights) for weights in ("dummy", "auto"))
    assert [bool(only(sweep(), each).engine.spec.speculation) for each in (made_up, real)] == [False, True]
    assert only(made_up).engine.spec.speculation, "there is no other"


SET += (("max_num_batched_tokens", 512), ("cudagraph_capture_sizes", (1, 2, 4)), ("revision", None))


def test_advised_arguments_keep_engine_settings():
    moved = changed(sweep(), enforce_eager=True, extra=MOVED)
    words = serve_words(only(moved).engine, 8, None)
    assert words[words.index("--enforce-eager") :] == (
        *("--enforce-eager", "--kv-cache-dtype", "fp8", "--no-async-scheduling"),
        *("--compilation-config", '{"level": 1}', "--x"),
    )
    assert only(moved).footprint.kv_bytes_per_token == 196_608 / 2
    env = (("VLLM_USE_V2_MODEL_RUNNER", "1"), ("PYTHONPATH", "/elsewhere"))
    words = serve_words(only(changed(sweep(), extra=SET, env=env)).engine, 8, None)
    assert words[:4] == ("env", "VLLM_USE_V2_MODEL_RUNNER=1", "vllm", "serve")
    options = [word for word in words if word.startswith("--")]
    assert words[-4:] == ("--cudagraph-capture-sizes", "1", "2", "4") and len({*options}) == len(options)
    assert not {"--num-gpu-blocks-override", "--revision"} & {*words}
    # Recorded: with the default a step with a prompt leaves half of the GPU's time to the host.
    notes = [(curve, only(curve).notes) for curve in stored_curves(archive("h100-vllm-0.26.0-cuda-graphs"), [])]
    noted = [any("max_cudagraph_capture_size" in note for note in each) for _, each in notes]
    assert noted == [not curve.spec.extra for curve, _ in notes] and len(noted) == 4
    curve = next(curve for curve, each in notes if each)
    other = {"extra": (("compilation_config", {"level": 1}),)}
    for facts in ({"enforce_eager": True}, other, {"platform": "cpu", "kv_cache_bytes": GIB}):
        assert only(changed(curve, **facts)).notes == ()


def published(slower: float = 1.0, lost: float = 0.0) -> Curve:
    """lost: preemptions of the largest load."""
    points = []
    for load, output, total, ms, _ in ROWS:
        wait = slower * ms / 1e3
        point = served(load, [total], [wait], lost if load == ROWS[-1][0] else 0.0, batch=output * wait)
        points.append(replace(point, each=(replace(point.each[0], batch=output * wait),)))
    return Curve(subject="external results", points=tuple(points), axes=Axes("max_num_seqs", "tokens", "itl_ms"))


def of_external(curve: Curve, spec: EngineSpec | None = None, longest: int | None = None, notes=(), **more):
    [subject] = subjects.of_external(curve, spec, longest, None, notes, **more).subjects
    return subject


def test_external_results_supply_engine_facts():
    """Little's law needs the batch, the latency and the rate."""
    curve = published()
    subject = of_external(curve)
    assert (subject.name, subject.engine, subject.notes) == ("results", None, ())
    assert subject.output_share == pytest.approx(0.7254, abs=1e-4)
    assert subject.points[-1].batch_repeats == (pytest.approx(584.3, abs=0.1),), "of 768, by Little's law"
    first, *others = curve.points
    for unknown in ("batch", "e2e_s", "output_tokens_per_s"):
        blind = replace(first, each=tuple(replace(one, **{unknown: None}) for one in first.each))
        some, none = (of_external(replace(curve, points=points)) for points in ((blind, *others), (blind,)))
        assert some.output_share == pytest.approx(fmean(row[1] / row[2] for row in ROWS[1:]))
        assert none.output_share is None
    subject = of_external(published(lost=3.0), notes=["a note"])
    assert subject.notes[0] == "a note" and tells(subject.notes[1], "max_num_seqs", 768) and len(subject.notes) == 2
    assert len(subject.usable) == len(ROWS) - 1
    subject = of_external(published(slower=100.0))
    assert tells(subject.notes[0], "knob", 1, 8, 32) and subject.points[0].batch_repeats == (1.0,)
    subject = of_external(published(), EngineSpec("opt-1.3b"), 632)
    assert (subject.name, subject.footprint.longest, subject.footprint.allowance_seen) == ("opt-1.3b", 632, False)
    assert (subject.engine.max_num_batched_tokens, subject.engine.dtype) == (None, "float16")
    known = of_external(published(), EngineSpec("opt-1.3b"), 632, kv_blocks=18_573)
    assert (subject.engine.kv_had_bytes, known.engine.kv_had_bytes) == (None, 18_573 * BLOCK_BYTES)
    short = of_external(published(), EngineSpec("opt-1.3b"))
    assert short.footprint is None and "--max-model-len" in short.engine.no_footprint
    groups = {"0": {"weights": {"num_bits": 8}}}
    own = {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    config = {**dict(models.CATALOGUE["qwen3-0.6b"].config), "quantization_config": own}
    model = models.model_from_config("mine", config, models.CATALOGUE["qwen3-0.6b"].parameters)
    footprint = of_external(published(), EngineSpec("mine", dtype=model.dtype, model_facts=model), 768).footprint
    assert footprint.weight_bytes == 596_049_920 + 155_582_464, "the embeddings keep 16 bits"
    assert footprint.kv_bytes_per_token == 28 * 8 * 128 * 2


def of_rates(rates):
    return curve_of("opt-1.3b", [measurement(n, rate + i, repeat=i) for n, rate in rates.items() for i in range(2)])


def test_advised_batch_claim_corrects_selection():
    """The load that serves most is chosen of all, so its interval is corrected for that."""
    claim = "advised-batch-costs-little"
    curve = of_rates({1: 100.0, 32: 2400.0, 128: 4800.0, 512: 4900.0})
    verdict, (_, chosen, _, most) = judge(claim, curve), curve.valid
    by_itself = ratio(chosen, most, curve.valid)
    assert verdict.state is FAILS and verdict.value == by_itself.value
    assert verdict.low < by_itself.low < by_itself.high < verdict.high
    verdict = judge(claim, of_rates({1: 100.0, 32: 2400.0, 128: 2000.0}))
    assert verdict.state is PASSES and verdict.value == pytest.approx(1.2, rel=0.01), "itself the most: the next"
    assert tells(verdict.why, 32, 128, "120%")
    # It is judged of sweeps on one GPU that tell efficiency and objective.
    whole, *others = (of_rates(dict.fromkeys(n, 100.0)) for n in ((1, 32, 128), (2, 32, 128), (1, 64, 128), (1, 32)))
    found = [whole, *others, changed(whole, tensor_parallel_size=2), replace(whole, beside=True)]
    assert [applies(claim_of(claim), each) for each in found] == [True, *[False] * 5]


@cache
def advice(batches=(1, 16, 32, 64, 128), spread=SPREAD, spec: EngineSpec | None = None, **facts: object) -> Advice:
    made = [measurement(c, law(c) * by, repeat=i, **facts) for c in batches for i, by in enumerate(spread)]
    found = subjects.of_curves([curve_of("opt-1.3b", [replace(m, spec=spec or m.spec) for m in made])], None, None)
    return plan(found.subjects, Objectives(slo=RelativeSlo(2, 32), gpu_bytes=found.gpu_bytes)).advices[0]


def again(factor: float = 1.0, batch: int = 64, spread=SPREAD, **facts: object):
    made = [measurement(batch, law(batch) * factor * by, repeat=i, launch="2", **facts) for i, by in enumerate(spread)]
    return [replace(m, spec=SPEC) for m in made]


def verified(advised: Advice, found):
    return {verdict.claim: verdict for verdict in subjects.verified(advised, SPEC, found)}


def states(advised: Advice, found) -> dict[str, State]:
    return {claim: verdict.state for claim, verdict in verified(advised, found).items()}


def test_recommended_engine_has_advised_limits():
    extra = (("max_num_seqs", 512), ("num_gpu_blocks_override", 99), ("block_size", 16))
    spec = replace(measurement(1, law(1)).spec, extra=extra)
    kv_bytes = (64 * 6 + 1) * BLOCK_BYTES
    share = utilization(kv_bytes + WEIGHTS + 4 * GIB, H200.gpu_memory_bytes or 0)
    limits = {"max_num_seqs": 64, "max_model_len": 96, "kv_cache_bytes": kv_bytes, "gpu_memory_utilization": share}
    wanted = replace(spec, extra=(("block_size", 16),), **limits)
    assert subjects.recommended_engine(advice(), spec, 64) == wanted and share == 0.054
    # On the CPU the KV cache has whole GiB.
    spec = EngineSpec("opt-1.3b", platform="cpu", kv_cache_bytes=GIB)
    advised = advice(spec=spec, environment=Environment(platform="cpu", cpu="some"))
    for batch, gib in ((8, 1), (4096, 73)):
        engine = subjects.recommended_engine(advised, spec, batch)
        assert (engine.kv_cache_bytes, engine.max_num_seqs, engine.max_model_len) == (gib * GIB, batch, 2048)
    found = states(advice(spread=(1.0,)), again(spread=(1.0,)))
    assert found[THROUGHPUT] is found[LATENCY] is INCONCLUSIVE
    predicted = advice((1, 32))
    assert predicted.decision.predicted and predicted.batch != 64
    near = verified(predicted, again(1.02, predicted.batch))[THROUGHPUT]
    measured = verified(advice(), again(1.02))[THROUGHPUT]
    assert near.value == pytest.approx(1.02, rel=1e-3) and near.high - near.low < measured.high - measured.low
    found = states(advice(), again(preempted=3))
    assert (found[UNPREEMPTED], found[THROUGHPUT], found[LATENCY]) == (FAILS, INCONCLUSIVE, INCONCLUSIVE)
    assert tells(verified(advice(), again(preempted=3))[UNPREEMPTED].why, 6)


@pytest.mark.parametrize(("factor", "wanted", "in_time"), [
    (1.0, PASSES, PASSES), (0.9, PASSES, PASSES), (0.7, FAILS, PASSES), (0.5, FAILS, FAILS), (1.3, FAILS, PASSES),
])  # fmt: skip
def test_measured_engine_verifies_predicted_speed(factor, wanted, in_time):
    wished = {UNPREEMPTED: PASSES, KV_BLOCKS: PASSES, THROUGHPUT: wanted, LATENCY: in_time}
    assert states(advice(), again(factor)) == wished
    found, limit = verified(advice(), again(factor)), advice().decision.limit.seconds
    for claim, value, bound in ((THROUGHPUT, factor, 1.0), (LATENCY, 64 / law(64) / factor, 1.15 * limit)):
        verdict = found[claim]
        assert (verdict.value, verdict.threshold) == pytest.approx((value, bound), rel=1e-4)
        assert verdict.low < verdict.value < verdict.high and verdict.n == 2
    assert tells(found[LATENCY].why, f"{1e3 * limit:.3g} ms")


@pytest.mark.parametrize(("off", "state"), [
    (-BLOCKS, FAILS), (-3, FAILS), (-2, PASSES), (0, PASSES), (2, PASSES), (3, FAILS),
])  # fmt: skip
def test_kv_blocks_may_differ_slightly(off, state):
    limits = Resolved(kv_blocks=BLOCKS, block_size=16, max_num_seqs=64, dtype="float16")
    launches = [replace(limits, kv_blocks=BLOCKS + each) for each in (0, off, (off > 0) - (off < 0))]
    found = subjects.kv_blocks_as_predicted(SPEC, launches)
    assert (found.state, found.value, found.threshold) == (state, off, 2)
    assert tells(found.why, f"{BLOCKS + off:,}", "1,365")
    unknown = replace(limits, kv_blocks=None)
    for spec, told in ((SPEC, [*launches, unknown]), (EngineSpec("/somewhere/else"), launches)):
        verdict = subjects.kv_blocks_as_predicted(spec, told)
        assert (verdict.state, verdict.value) == (INCONCLUSIVE, None)
    assert KV_BLOCKS not in states(advice(), again(resolved=unknown))
    assert verified(advice(), again(resolved=launches[1]))[KV_BLOCKS].value == off


def together(share: float, **facts: object):
    rates = [(share * law(64) * by,) * 2 for by in SPREAD]
    runs = (strategies.together(*each, concurrency=32, repeat=run, **facts) for run, each in enumerate(rates))
    return shared_points([m for run in runs for m in run])[0]


@pytest.mark.parametrize(("gains", "single", "shared", "wanted", "value"), [
    # 15% above the bound are allowed.
    *((GAINS, again(), together(share), state, 2 * share)
      for share, state in ((0.8, PASSES), (1.14, PASSES), (1.16, FAILS), (1.3, FAILS))),
    (None, again(), together(0.8), INCONCLUSIVE, None),  # nothing bounds it
    (GAINS, again(), together(0.8, failures=1), INCONCLUSIVE, None),
    (GAINS, again(failures=1), together(0.8), INCONCLUSIVE, None),
])  # fmt: skip
def test_gain_above_bound_fails_verdict(gains, single, shared, wanted, value):
    verdict = subjects.gain_within_bound(replace(advice(), gains=gains), points_of(single)[0], shared)
    assert (verdict.state, verdict.subject) == (wanted, "2 x opt-1.3b")
    assert verdict.value == (value and pytest.approx(value))
    if value:
        assert verdict.threshold == 2 and tells(verdict.why, f"{value:.3g} times", "2 times")


def test_best_measured_set_gives_gain():
    """Of those that are valid, on one GPU, and under a load that one engine was measured under."""
    good = together(0.6)
    bad = together(0.6, failures=1), replace(good, sharing="gpus"), replace(good, concurrency=48)
    best = [[together(share)] for share in (0.5, 0.75, 0.6)]
    none = [], *([[one]] for one in bad)
    for sets, value in (([[good]], 1.2), (best, 1.5), *((sets, None) for sets in none), ([[*bad, good]], 1.2)):
        found = subjects.gain_of_sets([replace(sweep(), shared=tuple(shared)) for shared in sets])
        assert (found and found.value) == (value and pytest.approx(value)), sets
    found = of_curves(*stored_curves(archive("h200-vllm-0.26.0-embed"), ()))
    [advice] = plan(found.subjects, Objectives(threshold=0.1)).advices
    assert advice.advised.batch == 64 and advice.advised.tokens_per_s.value == pytest.approx(2033, rel=0.001)
    assert advice.gains.time_slicing.factor == pytest.approx(1 / 0.254, rel=0.02)
    assert not advice.subject.notes and "--runner" in serve_words(advice.subject.engine, 64, None)
