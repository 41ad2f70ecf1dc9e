"""The simulated engine keeps the contract of all engines and its law on its own clock, fails as it is told to, and
makes batches by the formula."""

import math
import time
from collections import Counter
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from contract import Contract
from hypothesis import given, strategies as st
from interfaces import SIMULATED, batching_spec, natural_workload, small_workload
from measured import measure

from pytest_slmserve.analysis.metrics.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics.validity import health, problems
from pytest_slmserve.analysis.metrics.window import littles_law, requests_in_flight, step_s
from pytest_slmserve.analysis.points import job_points, summarize
from pytest_slmserve.engines.simulated import COLD_S, SimulatedBatches, SimulatedEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import Adapters, ClosedLoop, OpenLoop, WorkloadSpec
from pytest_slmserve.telemetry.sampler import INTERVAL_S
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import build_workload, with_adapters

WORKLOAD = small_workload(requests=64, output_tokens=32)
WIDE = replace(SIMULATED, max_num_seqs=1024)


def engine(spec=WIDE, **extra):
    return SimulatedEngine(replace(spec, extra=tuple(extra.items())))


def planted(spec=WIDE, **more):
    """One of 1000 tokens/s, half of which a batch of 8 gets, the same in each run."""
    return engine(spec, **{"t_inf": 1000.0, "b_half": 8.0, "noise": 0.0, **more})


def rate(run):
    opened, closed = run.window_s
    return sum(n for t, n in zip(run.steps.time_s, run.steps.new_tokens) if opened < t <= closed) / (closed - opened)


@given(st.integers(1, 300), st.floats(100, 1e5), st.floats(1, 500), st.floats(0, 1e4), st.floats(0.01, 100))
def test_throughput_follows_planted_law(concurrency, t_inf, b_half, opens, length):
    run = planted(t_inf=t_inf, b_half=b_half).run(WORKLOAD, ClosedLoop(concurrency, window_s=200 / t_inf))
    assert rate(run) == pytest.approx(t_inf * concurrency / (concurrency + b_half), rel=0.02)
    found = planted().sensed((opens, opens + length), 8, 1.0)
    assert found.time_s[0] == pytest.approx(opens - INTERVAL_S, abs=1e-5)
    assert opens + length - 1e-5 <= found.time_s[-1] <= opens + length + 2 * INTERVAL_S
    assert {len(column) for column in found.columns.values()} == {len(found)} == {len(found.span_s)}


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


@pytest.mark.parametrize("concurrency", [1, 4, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 2.0])
def test_drafts_gain_at_small_loads(concurrency, acceptance):
    made = planted(speculative_config=NGRAM, acceptance=acceptance, draft_cost=1.5)
    found = measure(made, small_workload(requests=64, output_tokens=128), ClosedLoop(concurrency), Environment())
    each = 128 / math.ceil((128 + acceptance) / (1 + acceptance))  # tokens a step, where the last one may have less
    law = 1000.0 * each * concurrency / (8 + 2.5 * concurrency)
    seen, wanted = summarize(found), found.workload.mean_output_tokens
    assert problems(found) == () and abs(seen.little) < 0.01
    assert seen.batch == pytest.approx(concurrency, rel=0.01)
    assert seen.output_tokens_per_s == pytest.approx(law, rel=0.02)
    assert seen.acceptance_length == pytest.approx(1 + acceptance, rel=0.02)
    assert {n for n, done in zip(found.run.samples.output_tokens, found.run.samples.finished) if done} == {wanted}


def test_default_law_follows_model_shape():
    shape, per_context = model_of(SIMULATED.model), 16 + 32 / 2
    t_inf, b_half = engine().law(WORKLOAD)
    assert b_half == pytest.approx(shape.weight_bytes() / (per_context * shape.kv_bytes_per_token()))
    run = engine(noise=0.0).run(WORKLOAD, ClosedLoop(64, window_s=0.01))
    assert rate(run) == pytest.approx(t_inf * 64 / (64 + b_half), rel=0.02)
    tiny, larger = (engine(replace(SIMULATED, model=name, model_facts=None)) for name in ("opt-tiny", "opt-125m"))
    assert 9_000 < len(tiny.run(WORKLOAD, ClosedLoop(1, window_s=1.0)).steps.time_s) < 10_200
    per_sequence = per_context * model_of("opt-125m").kv_bytes_per_token()
    assert larger.law(WORKLOAD)[0] == pytest.approx(1e12 / per_sequence), "at 1 TB/s"
    seen, began = [], time.monotonic()
    run = planted(t_inf=1.0, b_half=1.0).run(WORKLOAD, ClosedLoop(2, window_s=3600.0), seen.append)
    assert run.window_s[1] > 3600 and time.monotonic() - began < 10 and run.began_s is None
    assert seen[-1].tokens_per_s == pytest.approx(2 / 3, rel=0.05)
    noisy, again = planted(noise=0.05), planted(noise=0.05)
    rates = [rate(noisy.run(WORKLOAD, ClosedLoop(8, window_s=1.0))) for _ in range(60)]
    assert [rate(again.run(WORKLOAD, ClosedLoop(8, window_s=1.0))) for _ in range(3)] == rates[:3]
    assert 0.03 < pstdev(rates) / fmean(rates) < 0.07
    mortal = engine(die_at=16)
    assert mortal.run(WORKLOAD, OpenLoop(requests=15)).failures == 0 and mortal.ready
    with pytest.raises(EngineFailed, match=r"\b16\b"):
        mortal.run(WORKLOAD, ClosedLoop(16))
    assert not mortal.ready
    sound, failed = (engine(fail_at=4).run(WORKLOAD, OpenLoop(requests=n)) for n in (3, 4))
    assert sound.first_failure is None
    assert (failed.failures, failed.first_failure) == (4, "PlantedFailure: as it was told to")
    few, full = (engine(preempt_from=8).run(WORKLOAD, OpenLoop(requests=n)).steps.preempted for n in (7, 8))
    assert ({*few}, {*full}) == ({0}, {1})


@pytest.mark.parametrize(("field", "limit"), [("max_num_seqs", 3), ("max_num_batched_tokens", 50)])
def test_engine_limit_makes_requests_wait(field, limit):
    """A prompt has 16 tokens: three of them and a decoding sequence fit into 50."""
    by_argument, by_field = engine(SIMULATED, **{field: limit}), engine(replace(SIMULATED, **{field: limit}))
    assert getattr(by_argument.resolved, field) == limit
    one, other = (each.run(WORKLOAD, OpenLoop(requests=8)) for each in (by_argument, by_field))
    assert one.samples == other.samples and one.steps.new_tokens[0] == 3 and all(one.samples.finished)
    assert field != "max_num_seqs" or ({*one.steps.new_tokens}, max(one.steps.waiting)) == ({3, 2}, 5)
    for unknown, value in (("max_num_seqs", "many"), ("speed", 3), ("noise", "loud")):
        with pytest.raises(BadUsage, match=unknown):
            engine(**{unknown: value})


def test_burst_prompts_share_step_tokens():
    """64 prompts of 16 tokens, of which a step takes 512 in less what it decodes, or all; or not even a whole one."""
    slow, fast = (planted(max_num_batched_tokens=n).run(WORKLOAD, OpenLoop(requests=64)) for n in (512, 8192))
    assert (fast.steps.new_tokens[0], slow.steps.new_tokens[:3]) == (64, (32, 62, 64))
    assert max(slow.samples.first_token_s) > max(fast.samples.first_token_s)
    assert all(slow.samples.finished) and sum(slow.steps.new_tokens) == sum(fast.steps.new_tokens)
    tiny = planted(max_num_batched_tokens=5).run(WORKLOAD, OpenLoop(requests=1))
    assert tiny.steps.new_tokens[:4] == (0, 0, 0, 1) and all(tiny.samples.finished)
    plain, drafting = (planted(**more).run(WORKLOAD, OpenLoop(requests=64)) for more in (
        {}, {"speculative_config": NGRAM, "acceptance": 0.7},
    ))  # fmt: skip
    assert sum(drafting.steps.new_tokens) == sum(plain.steps.new_tokens) == 64 * 32
    assert len(drafting.steps) == math.ceil((32 + 0.7) / 1.7) < len(plain.steps) == 32
    assert plain.steps.drafts == () and sum(drafting.steps.accepted) == 64 * (32 - len(drafting.steps))


@pytest.mark.parametrize("prompt", [16, 100, 600])
@pytest.mark.parametrize("tokens", [12, 64, 8192])
def test_long_prompts_stay_valid(prompt, tokens):
    workload = replace(WORKLOAD, requests=tuple(replace(r, prompt=r.prompt[:1] * prompt) for r in WORKLOAD.requests))
    served = planted(spec=replace(WIDE, max_num_seqs=12, max_model_len=1024), max_num_batched_tokens=tokens)
    seen = measure(served, workload, ClosedLoop(8, window_s=100.0), NOWHERE)
    assert littles_law(seen.run) == pytest.approx(0.0, abs=1e-9) and problems(seen) == ()
    ratio = requests_in_flight(seen.run) / requests_in_flight(seen.run, "first_token_s")
    assert (ratio > 1.2) == (prompt > 4 * tokens), "a prompt of many steps is in flight, and in no batch"


@given(st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.integers(1, 5))
def test_shared_prefix_is_cached_once(share, groups):
    asked = WorkloadSpec(prompt_tokens=100, output_tokens=8, requests=12, prefix_share=share, prefix_groups=groups)
    workload, caches = build_workload(asked, model_of("opt-tiny")), replace(WIDE, prefix_caching=True)
    run, whole = SimulatedEngine(caches).run(workload, ClosedLoop(4, requests=30)), asked.shared_of(100) // 16 * 16
    missed = min(groups, 12) if whole else 0
    assert sorted(run.samples.cached_tokens) == [0] * missed + [whole] * (30 - missed)
    plain = SimulatedEngine(caches).run(replace(workload, spec=WorkloadSpec()), ClosedLoop(4, requests=30))
    assert plain.samples.cached_tokens == () and plain.steps.time_s[-1] < run.steps.time_s[-1], "prompts cost nothing"


@pytest.mark.parametrize("caches", [False, True])
def test_turn_reuses_previous_prompt(caches):
    """But the first of each user, whatever turn that is; and rounds go on."""
    turns = WorkloadSpec(prompt_tokens=50, output_tokens=10, requests=24, turns=4)
    workload = build_workload(turns, model_of("opt-tiny"))
    run = SimulatedEngine(replace(WIDE, prefix_caching=caches)).run(workload, ClosedLoop(6, requests=60))
    rows = zip(run.samples.request, run.samples.cached_tokens, strict=True)
    found = Counter((n % 4, cached) for n, cached in rows)
    after = {1: 48, 2: 96, 3: 160} if caches else {1: 0, 2: 0, 3: 0}  # whole blocks of 50, 110 and 170 tokens
    assert {cached for turn, cached in found} <= {0, *after.values()} and found.total() == 60
    if caches:
        assert [found[turn, 0] for turn in (1, 2, 3)] == [2, 1, 1], "of six users, who begin at turns 0, 1, 2, 3, 0, 1"
        plain = SimulatedEngine(WIDE).run(workload, ClosedLoop(6, requests=60))
        assert plain.steps.time_s[-1] > run.steps.time_s[-1], "without a cache the whole prompt is computed"


@pytest.mark.parametrize("think_s", [0.0, 1.0, 4.0])
def test_users_wait_or_think(think_s):
    """The interactive response time law (P. J. Denning and J. P. Buzen, 1978): users = rate * (response + thinking)."""
    turns = WorkloadSpec(prompt_tokens=32, output_tokens=32, requests=400, turns=4)
    workload, users = build_workload(turns, model_of("opt-tiny")), 200
    spec = replace(WIDE, prefix_caching=True, max_num_seqs=256, max_model_len=1024)
    served = planted(spec=spec, t_inf=4_000.0, b_half=20.0)
    m = measure(served, workload, ClosedLoop(users, window_s=20.0, think_s=think_s), NOWHERE)
    assert problems(m) == ()
    in_flight, thinking = requests_in_flight(m.run, "sent_s"), 0.75 * think_s * rate(m.run) / 32
    assert in_flight + thinking == pytest.approx(users, rel=0.03)


LONG = ClosedLoop(8, window_s=10.0)


def test_planted_costs_slow_each_step():
    usual, slow, began = planted().run(WORKLOAD, LONG), planted(slowdown=0.05).run(WORKLOAD, LONG), time.monotonic()
    assert rate(usual) / rate(slow) == pytest.approx(1.05, rel=0.01)
    assert planted(lasts_s=0.05).run(WORKLOAD, LONG).samples == usual.samples and time.monotonic() - began >= 0.05

    def drawn(launch, scatter=0.02):
        made = planted(scatter=scatter)
        made.differ(launch)
        return made

    launches = [drawn(f"{side} {n}") for side in ("baseline", "candidate") for n in range(200)]
    speeds = [math.log(each.speed) for each in launches]
    assert pstdev(speeds) == pytest.approx(0.02, rel=0.15) and abs(fmean(speeds)) < 0.004
    assert pstdev(math.log(each.resolved.ready_s / 20) for each in launches) == pytest.approx(0.06, rel=0.15)
    cold, longer = planted(scatter=0.0), dict(planted(start_s=26.0).resolved.stages)
    warm = cold.resolved
    usual_stages = dict(warm.stages)
    cold.differ("any", cold=True)
    assert sum(usual_stages.values()) == 19.0 and cold.resolved.ready_s - warm.ready_s == 30.0 == COLD_S
    assert {n for n in longer if longer[n] != usual_stages[n]} == {"compile"} and longer["compile"] == pytest.approx(10)
    assert dict(planted(start_s=10.0).resolved.stages)["import"] == 4.5 and planted(wake_s=2.0).nap()[1] != 2.0
    assert drawn("baseline 7").speed == launches[7].speed != launches[8].speed
    assert drawn("baseline 7", scatter=0).speed == 1.0
    asked = replace(WORKLOAD, spec=replace(WORKLOAD.spec, response_format="json"))
    free, own, usual = (
        rate(planted(**more).run(each, ClosedLoop(8, window_s=2.0)))
        for each, more in ((WORKLOAD, {}), (asked, {"structured_cost": 0.25}), (asked, {}))
    )
    assert own == pytest.approx(free / 1.25, rel=0.01) and usual == pytest.approx(free / 1.05, rel=0.01)

    def served(asked, slots, t_inf=1e3):
        arguments = asked.arguments({"max_loras": slots}) if asked else {}
        requests = with_adapters(WORKLOAD.requests, asked, 0) if asked else WORKLOAD.requests
        workload = replace(WORKLOAD, spec=replace(WORKLOAD.spec, adapters=asked), requests=tuple(requests))
        return rate(planted(t_inf=t_inf, **arguments).run(workload, ClosedLoop(8, window_s=2e3 / t_inf)))

    alone, few, many = served(None, 0), served(Adapters(2, 8), 2), served(Adapters(32, 8), 32)
    assert alone > few > many > served(Adapters(32, 32), 32) and few == pytest.approx(alone / 1.104, rel=0.02)
    assert served(Adapters(32, 256), 2, 1e6) < 0.7 * served(Adapters(2, 256), 2, 1e6), "whose steps are as long"


def test_sensors_show_planted_values():
    run = planted(dram_active=0.3, tensor_active=0.4, sm_occupancy=0.5, power_w=123.0).run(WORKLOAD, LONG)
    seen = device_figures(run)
    assert (seen.dram_active, seen.tensor_active, seen.sm_occupancy) == pytest.approx((0.3, 0.4, 0.5))
    assert (seen.power_w, seen.coverage) == pytest.approx((123.0, 1.0), rel=1e-3) and abs(seen.energy_deviation) < 1e-3
    assert run.telemetry.sources == ("simulated",) and health(run).state == "ok"
    assert planted(sensors=False).run(WORKLOAD, LONG).telemetry is None
    # A step of 10 sequences takes 18 ms by the law; counters are as planted, less the time without a kernel.
    for host_s, share in ((0.0, 1.0), (0.001, 1.0), (0.036, 0.5), (0.072, 0.25)):
        run = planted(host_s=host_s, dram_active=0.3).run(WORKLOAD, ClosedLoop(10, window_s=10.0))
        seen = device_figures(run)
        assert (seen.engine_active, seen.dram_active) == pytest.approx((0.97 * share, 0.3 * share), rel=1e-6), host_s
        assert step_s(run) == pytest.approx(max(0.018, host_s), rel=1e-6)
    for concurrency, slower in ((1, True), (200, False)):  # opt-tiny has two layers: 1 ms a step
        load = ClosedLoop(concurrency, window_s=0.5)
        eager, captured = (rate(planted(t_inf=40_000.0, enforce_eager=on).run(WORKLOAD, load)) for on in (True, False))
        assert eager == pytest.approx(concurrency / 1e-3 if slower else captured, rel=0.02), concurrency


@pytest.mark.parametrize(("fault", "state", "reasons", "noise"), [
    ("lost_from", "degraded", ["a sensor was lost: simulated failed after 43 readings"], []),
    ("hot_from", "invalid", ["hardware thermal slowdown"], []),
    ("slow_clock_from", "ok", [], ["the SM clock fell to 1600 MHz from a median of 1980 MHz"]),
])  # fmt: skip
def test_planted_fault_degrades_health(fault, state, reasons, noise):
    well, seen = (health(planted(**{fault: 8}).run(WORKLOAD, ClosedLoop(n, window_s=10.0))) for n in (7, 8))
    assert (well.state, well.reasons, well.noise) == ("ok", (), ()) and seen.state == state
    assert (len(seen.reasons), len(seen.noise)) == (len(reasons), len(noise))
    assert all(fact in text for text, fact in zip((*seen.reasons, *seen.noise), (*reasons, *noise)))


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_several_gpus_share_each_step(gpus):
    """opt-tiny has 2 layers: four all-reduces a step."""
    law = {"t_inf": 1e3, "b_half": 8.0, "noise": 0.0, "all_reduce_s": 1e-3, "power_w": 300.0, "imbalance": 0.5}
    one, made = (engine(replace(SIMULATED, tensor_parallel_size=n), **law) for n in (1, gpus))
    run = made.run(WORKLOAD, ClosedLoop(8, window_s=2.0))
    assert rate(run) == pytest.approx(8 / (16 / (1000 * gpus) + (4e-3 if gpus > 1 else 0)), rel=0.02)
    assert 0 <= made.resolved.kv_blocks - gpus * one.resolved.kv_blocks < gpus
    if gpus == 2:
        assert (device_figures(run).power_w, device_figures(run).power_imbalance) == pytest.approx((450.0, 150 / 225))


NATURAL, NOWHERE = natural_workload(), Environment(platform="simulated")


def served(batching, rate=math.inf):
    engine = SimulatedBatches(batching_spec(batching, noise=0.0, t_inf=1000.0, b_half=10.0))
    return job_points([measure(engine, NATURAL, job(12, rate), NOWHERE)])[0]


def test_longest_output_ends_static_batch():
    static, none = served("static"), served("none")
    outputs, prompts = sum(r.output_tokens for r in NATURAL.requests), sum(len(r.prompt) for r in NATURAL.requests)
    groups = [NATURAL.requests[i : i + 4] for i in (0, 4, 8)]
    longest = [max(r.output_tokens for r in group) for group in groups]
    computed = sum(4 * (max(len(r.prompt) for r in group) + last) for group, last in zip(groups, longest))
    assert static.output_tokens_per_s == pytest.approx(outputs / (sum(longest) * 14 / 1000))
    assert none.output_tokens_per_s == pytest.approx(1000 / 11)
    assert (static.waste, none.waste) == pytest.approx((1 - (prompts + outputs) / computed, 0.0))
    dynamic, static = served("dynamic", rate=1.0), served("static", rate=1.0)
    assert dynamic.valid and static.valid and dynamic.e2e_s < 0.5 * static.e2e_s
    assert (dynamic.batching, dynamic.capacity) == ("dynamic", None)
    with pytest.raises(BadUsage):
        SimulatedBatches(batching_spec("static")).run(NATURAL, ClosedLoop(2))  # users who wait for answers


class TestContract(Contract):
    spec = SIMULATED


@pytest.mark.parametrize("kind", ["embed", "rerank"])
def test_pooling_rate_follows_model_arithmetic(kind):
    model = "bge-small-en-v1.5" if kind == "embed" else "ms-marco-minilm-l12-v2"
    spec = replace(SIMULATED, model=model, model_facts=None, max_model_len=512, max_num_seqs=64)
    spec = replace(spec, max_num_batched_tokens=1 << 20)
    workload = build_workload(WorkloadSpec(kind=kind, requests=64, output_tokens=1), model_of(model))
    made = measure(engine(spec, noise=0.0), workload, ClosedLoop(64, window_s=1.0), Environment())
    each_s = 2 * model_of(model).parameters * 512 / 1e14
    assert rate(made.run) == pytest.approx(1 / each_s, rel=0.02) and problems(made) == ()
    seen = summarize(made)
    assert seen.e2e_s == pytest.approx(64 * each_s, rel=0.05) and seen.requests_per_s == seen.output_tokens_per_s
    assert {seen.ttft_s, seen.tpot_s, seen.itl_s, seen.normalized_latency_s, seen.little} == {None}
