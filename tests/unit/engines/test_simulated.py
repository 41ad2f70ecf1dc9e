"""The simulated engine keeps the contract of all engines and its law on its own clock, fails as it is told to, and
makes batches by the formula."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from contract import Contract
from hypothesis import given
from hypothesis import strategies as st
from interfaces import SIMULATED, small_workload
from measured import measure

from pytest_slmserve.analysis.metrics.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics.validity import CheckResult, health
from pytest_slmserve.analysis.points import job_points
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.simulated import SimulatedBatches, SimulatedEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, WorkloadSpec
from pytest_slmserve.telemetry.sampler import INTERVAL_S
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import build_workload

WORKLOAD = small_workload(requests=64, output_tokens=32)


def engine(**extra):
    return SimulatedEngine(replace(SIMULATED, max_num_seqs=1024, extra=tuple(extra.items())))


def rate(run):
    """Output tokens/s in the window."""
    opened, closed = run.window_s
    return sum(n for t, n in zip(run.steps.time_s, run.steps.new_tokens) if opened < t <= closed) / (closed - opened)


@given(st.integers(1, 300), st.floats(100, 1e5), st.floats(1, 500))
def test_throughput_is_the_planted_law(concurrency, t_inf, b_half):
    run = engine(t_inf=t_inf, b_half=b_half, noise=0.0).run(WORKLOAD, ClosedLoop(concurrency, window_s=200 / t_inf))
    assert rate(run) == pytest.approx(t_inf * concurrency / (concurrency + b_half), rel=0.02)


def test_its_progress_tells_the_rate_of_the_load():
    seen = []
    engine(t_inf=1000.0, b_half=3.0, noise=0.0).run(WORKLOAD, ClosedLoop(1, window_s=2.0), seen.append)
    assert seen[-1].tokens_per_s == pytest.approx(250.0, rel=0.05)


def test_by_default_the_law_is_that_of_the_models_shape():
    shape = model_of(SIMULATED.model)
    context = 16 + 32 / 2
    t_inf, b_half = engine().law(WORKLOAD)
    assert b_half == pytest.approx(shape.weight_bytes() / (context * shape.kv_bytes_per_token()))
    run = engine(noise=0.0).run(WORKLOAD, ClosedLoop(64, window_s=0.01))
    assert rate(run) == pytest.approx(t_inf * 64 / (64 + b_half), rel=0.02)


def test_a_tiny_models_window_has_no_more_steps_than_one_whose_weights_take_a_tenth_of_a_millisecond():
    tiny = SimulatedEngine(replace(SIMULATED, model="opt-tiny", model_facts=None, extra=(("noise", 0.0),)))
    run = tiny.run(WORKLOAD, ClosedLoop(1, window_s=1.0))
    assert 9_000 < len(run.steps.time_s) < 10_200
    larger = SimulatedEngine(replace(SIMULATED, model="opt-125m", model_facts=None))
    per_sequence = (16 + 32 / 2) * model_of("opt-125m").kv_bytes_per_token()
    assert larger.law(WORKLOAD)[0] == pytest.approx(1e12 / per_sequence), "at 1 TB/s"


def test_its_clock_is_virtual():
    began = time.monotonic()
    run = engine(t_inf=1.0, b_half=1.0).run(WORKLOAD, ClosedLoop(2, window_s=3600.0))
    assert run.window_s[1] > 3600
    assert time.monotonic() - began < 10


def test_noise_is_between_runs_seeded_and_of_the_size_planted():
    load = ClosedLoop(8, window_s=1.0)
    noisy = engine(t_inf=1000.0, b_half=8.0, noise=0.05)
    rates = [rate(noisy.run(WORKLOAD, load)) for _ in range(60)]
    again = engine(t_inf=1000.0, b_half=8.0, noise=0.05)
    assert [rate(again.run(WORKLOAD, load)) for _ in range(3)] == rates[:3]
    spread = (sum((r - fmean(rates)) ** 2 for r in rates) / len(rates)) ** 0.5 / fmean(rates)
    assert 0.03 < spread < 0.07


def test_it_dies_at_the_planted_load_and_not_below():
    mortal = engine(die_at=16)
    assert mortal.run(WORKLOAD, OpenLoop(requests=15)).failures == 0
    assert mortal.ready
    with pytest.raises(EngineFailed, match=r"\b16\b"):
        mortal.run(WORKLOAD, ClosedLoop(16))
    assert not mortal.ready


def test_requests_fail_from_the_planted_load_on():
    failing = engine(fail_at=4)
    assert failing.run(WORKLOAD, OpenLoop(requests=3)).first_failure is None
    run = failing.run(WORKLOAD, OpenLoop(requests=4))
    assert (run.failures, run.first_failure) == (4, "PlantedFailure: as it was told to")


def test_steps_preempt_from_the_planted_batch_on():
    full = engine(preempt_from=8)
    assert sum(full.run(WORKLOAD, OpenLoop(requests=7)).steps.preempted) == 0
    assert set(full.run(WORKLOAD, OpenLoop(requests=8)).steps.preempted) == {1}


def test_its_limit_makes_the_rest_wait():
    small = SimulatedEngine(replace(SIMULATED, max_num_seqs=3))
    run = small.run(WORKLOAD, OpenLoop(requests=8))
    assert set(run.steps.new_tokens) == {3, 2}
    assert max(run.steps.waiting) == 5
    assert all(run.samples.finished)


@pytest.mark.parametrize(("field", "limit"), [("max_num_seqs", 3), ("max_num_batched_tokens", 50)])
def test_an_argument_that_is_a_field_counts_as_the_field(field, limit):
    """A prompt has 16 tokens: three of them and a decoding sequence fit into 50."""
    by_argument = SimulatedEngine(replace(SIMULATED, extra=((field, limit),)))
    by_field = SimulatedEngine(replace(SIMULATED, **{field: limit}))
    assert getattr(by_argument.resolved, field) == limit
    runs = [each.run(WORKLOAD, OpenLoop(requests=8)) for each in (by_argument, by_field)]
    assert runs[0].samples == runs[1].samples and runs[0].steps.new_tokens[0] == 3
    with pytest.raises(BadUsage, match="max_num_seqs .*'many'"):
        engine(max_num_seqs="many")


def test_prompts_of_a_burst_share_the_tokens_of_a_step():
    """64 prompts of 16 tokens, of which a step takes 512 in less what it decodes, or all."""
    few, many = (engine(t_inf=1000.0, b_half=8.0, noise=0.0, max_num_batched_tokens=n) for n in (512, 8192))
    slow, fast = (each.run(WORKLOAD, OpenLoop(requests=64)) for each in (few, many))
    assert fast.steps.new_tokens[0] == 64
    assert slow.steps.new_tokens[:3] == (32, 62, 64)
    assert max(slow.samples.first_token_s) > max(fast.samples.first_token_s)
    assert all(slow.samples.finished) and sum(slow.steps.new_tokens) == sum(fast.steps.new_tokens)


def test_a_prompt_longer_than_a_step_takes_several():
    tiny = engine(t_inf=1000.0, b_half=8.0, noise=0.0, max_num_batched_tokens=5)
    run = tiny.run(WORKLOAD, OpenLoop(requests=1))
    assert run.steps.new_tokens[:4] == (0, 0, 0, 1) and all(run.samples.finished)


@pytest.mark.parametrize(("concurrency", "slower"), [(1, True), (200, False)])
def test_without_graphs_a_step_waits_for_the_host_where_it_is_short(concurrency, slower):
    """opt-tiny has two layers: 1 ms a step."""
    given = {"t_inf": 40_000.0, "b_half": 8.0, "noise": 0.0}
    load = ClosedLoop(concurrency, window_s=0.5)
    eager, captured = (rate(engine(**given, **more).run(WORKLOAD, load)) for more in ({"enforce_eager": True}, {}))
    assert eager == pytest.approx(concurrency / 1e-3 if slower else captured, rel=0.02)


def test_a_slowdown_is_of_each_step():
    given = {"t_inf": 1000.0, "b_half": 8.0, "noise": 0.0}
    load = ClosedLoop(8, window_s=10.0)
    slow, usual = (rate(engine(**given, **more).run(WORKLOAD, load)) for more in ({"slowdown": 0.05}, {}))
    assert usual / slow == pytest.approx(1.05, rel=0.01)


def drawn(launch, **faults):
    made = engine(t_inf=1000.0, b_half=8.0, **faults)
    made.differ(launch)
    return made


def test_launches_of_a_gate_scatter_by_their_names_and_are_the_same_again():
    launches = [drawn(f"{side} {n}", scatter=0.02) for side in ("baseline", "candidate") for n in range(200)]
    speeds = [math.log(each.speed) for each in launches]
    starts = [math.log(each.resolved.ready_s / 20) for each in launches]
    assert pstdev(speeds) == pytest.approx(0.02, rel=0.15) and abs(fmean(speeds)) < 0.004
    assert pstdev(starts) == pytest.approx(0.06, rel=0.15)
    assert drawn("baseline 7", scatter=0.02).speed == launches[7].speed != launches[8].speed
    assert drawn("baseline 7", scatter=0).speed == 1.0


def test_an_argument_it_does_not_know_is_refused():
    with pytest.raises(BadUsage):
        engine(speed=3)


def test_launches_have_names_of_their_own():
    assert engine().launch != engine().launch


# Its sensors

LONG = ClosedLoop(8, window_s=10.0)


def slow_engine(**extra):
    return engine(t_inf=1000.0, b_half=8.0, **extra)


@given(st.floats(0, 1e4), st.floats(0.01, 100))
def test_readings_cover_the_window_and_an_interval_around_it(opens, length):
    found = slow_engine().sensed((opens, opens + length), 8)
    assert found.time_s[0] == pytest.approx(opens - INTERVAL_S, abs=1e-5)
    assert opens + length - 1e-5 <= found.time_s[-1] <= opens + length + 2 * INTERVAL_S
    assert {len(column) for column in found.columns.values()} == {len(found)} == {len(found.span_s)}


def test_sensors_say_what_is_planted():
    run = slow_engine(dram_active=0.3, tensor_active=0.4, sm_occupancy=0.5, power_w=123.0).run(WORKLOAD, LONG)
    seen = device_figures(run)
    assert (seen.dram_active, seen.tensor_active, seen.sm_occupancy) == pytest.approx((0.3, 0.4, 0.5))
    assert seen.power_w == pytest.approx(123.0, rel=1e-3)
    assert abs(seen.energy_deviation) < 1e-3 and seen.coverage == pytest.approx(1.0)
    assert run.telemetry.sources == ("simulated",) and health(run).state == "ok"
    assert run.began_s is None, "its clock is no host's"


def test_a_device_without_sensors():
    assert slow_engine(sensors=False).run(WORKLOAD, LONG).telemetry is None


@pytest.mark.parametrize(
    ("fault", "state", "why"),
    [
        ("lost_from", "degraded", "a sensor was lost: simulated failed after 43 readings: as it was told to"),
        ("hot_from", "invalid", "hardware thermal slowdown"),
    ],
)
def test_its_health_suffers_from_the_planted_load_on(fault, state, why):
    sick = slow_engine(**{fault: 8})
    assert health(sick.run(WORKLOAD, ClosedLoop(7, window_s=10.0))).state == "ok"
    seen = health(sick.run(WORKLOAD, LONG))
    assert seen.state == state and why in seen.reasons[0] and len(seen.reasons) == 1 and seen.noise == ()


def test_a_clock_that_is_planted_to_sink_is_noise():
    shaky = slow_engine(slow_clock_from=8)
    assert health(shaky.run(WORKLOAD, ClosedLoop(7, window_s=10.0))) == CheckResult()
    seen = health(shaky.run(WORKLOAD, LONG))
    assert (seen.state, seen.reasons) == ("ok", ()) and len(seen.noise) == 1
    assert "the SM clock fell to 1600 MHz from a median of 1980 MHz" in seen.noise[0]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_on_several_gpus_a_step_is_shared_and_waits_for_all_reduces(gpus):
    """opt-tiny has 2 layers: four all-reduces a step."""
    planted = (("t_inf", 1000.0), ("b_half", 8.0), ("noise", 0.0), ("all_reduce_s", 1e-3))
    made = SimulatedEngine(replace(SIMULATED, tensor_parallel_size=gpus, extra=planted))
    seen = rate(made.run(WORKLOAD, ClosedLoop(8, window_s=2.0)))
    step_s = 16 / (1000 * gpus) + (4e-3 if gpus > 1 else 0)
    assert seen == pytest.approx(8 / step_s, rel=0.02)


def test_each_of_its_gpus_has_sensors_and_kv_blocks_add_up():
    one = SimulatedEngine(replace(SIMULATED, tensor_parallel_size=1))
    two = SimulatedEngine(replace(SIMULATED, tensor_parallel_size=2, extra=(("power_w", 300.0), ("imbalance", 0.5))))
    assert two.resolved.kv_blocks in (2 * one.resolved.kv_blocks, 2 * one.resolved.kv_blocks + 1)
    seen = device_figures(two.run(WORKLOAD, ClosedLoop(8, window_s=2.0)))
    assert (seen.power_w, seen.power_imbalance) == pytest.approx((450.0, 150 / 225))


def test_a_run_lasts_as_long_as_it_is_told_to_and_serves_the_same():
    workload, load = small_workload(), ClosedLoop(2, window_s=1.0)
    began = time.monotonic()
    slow = SimulatedEngine(replace(SIMULATED, extra=(*SIMULATED.extra, ("lasts_s", 0.05)))).run(workload, load)
    assert time.monotonic() - began >= 0.05
    assert slow.samples == SimulatedEngine(SIMULATED).run(workload, load).samples


# Batches made one after the other


NATURAL = WorkloadSpec(prompt_tokens=None, output_tokens=None, requests=12)


NATURALLY = build_workload(NATURAL, model_of("opt-tiny"))


SHORTER = tuple(replace(request, output_tokens=max(1, request.output_tokens // 16)) for request in NATURALLY.requests)


BATCHED = replace(NATURALLY, requests=SHORTER)


BATCH_LAW = (("noise", 0.0), ("t_inf", 1000.0), ("b_half", 10.0))


def batched(batching: str, base: EngineSpec = SIMULATED, extra=BATCH_LAW) -> EngineSpec:
    how = (("batching", batching), ("wait_s", 0.1))
    return replace(base, interface="transformers", max_num_seqs=4, max_model_len=2048, extra=(*extra, *how))


def served(batching: str, rate: float = math.inf):
    engine = SimulatedBatches(batched(batching))
    return job_points([measure(engine, BATCHED, job(12, rate), Environment(platform="simulated"))])[0]


def test_a_batch_lasts_as_long_as_its_longest_output():
    outputs = [r.output_tokens for r in BATCHED.requests]
    seconds = sum(max(outputs[i : i + 4]) * 14 / 1000 for i in (0, 4, 8))
    assert served("static").output_tokens_per_s == pytest.approx(sum(outputs) / seconds)
    assert served("none").output_tokens_per_s == pytest.approx(1000 / 11)


def test_what_is_wasted_is_padding_and_what_has_ended():
    requests = BATCHED.requests
    groups = [requests[i : i + 4] for i in (0, 4, 8)]
    computed = sum(4 * (max(len(r.prompt) for r in g) + max(r.output_tokens for r in g)) for g in groups)
    wanted = sum(len(r.prompt) + r.output_tokens for r in requests)
    assert served("static").waste == pytest.approx(1 - wanted / computed)
    assert served("none").waste == pytest.approx(0.0)


def test_at_a_low_rate_a_dynamic_batch_does_not_wait_until_it_is_full():
    dynamic, static = served("dynamic", rate=1.0), served("static", rate=1.0)
    assert dynamic.valid and static.valid and dynamic.e2e_s < 0.5 * static.e2e_s
    assert (dynamic.batching, dynamic.capacity) == ("dynamic", None)


def test_users_who_wait_for_answers_and_an_engine_without_a_way_are_refused():
    with closing(Pool()) as pool:
        with pytest.raises(BadUsage):
            pool.engine(batched("static")).run(BATCHED, ClosedLoop(2))
        with pytest.raises(BadUsage, match="batching"):
            pool.engine(replace(SIMULATED, interface="transformers", extra=())).run(
                small_workload(), OpenLoop(requests=2)
            )


class TestContract(Contract):
    spec = SIMULATED
