"""What a job found, and which jobs can be compared: by jobs of the simulated engine, whose law is known."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from measured import measure
from strategies import job_point, planted_telemetry

from pytest_slmserve.analysis.claims.evidence import most_varied, same_but_kv, same_engine
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import e2e_s, job_points, ratio
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment, Samples
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, OpenLoop, WorkloadSpec
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import build_workload

HERE = Environment(platform="simulated", gpu_name="simulated")
SPEC = EngineSpec("opt-125m", "simulated", extra=(("noise", 0.0), ("t_inf", 4000.0), ("b_half", 10.0)))
WORKLOAD = build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=20, requests=40), model_of("opt-125m"))


def served(load: Load, spec: EngineSpec = SPEC):
    return measure(SimulatedEngine(spec), WORKLOAD, load, HERE)


def test_all_at_once_it_is_the_law_of_the_engine():
    (point,) = job_points([served(job(40)), served(job(40))])
    assert point.output_tokens_per_s == pytest.approx(4000 * 40 / 50)
    assert point.requests_per_s == pytest.approx(160)
    assert point.e2e_s == pytest.approx(40 / 160)
    assert (point.rate, point.preemptions, point.waste, point.batch) == (None, 0, None, pytest.approx(40))
    assert (point.valid, len(point.repeats), point.batching, point.output_tokens) == (True, 2, "continuous", 20)
    assert point.fits and point.model == "opt-125m"


def test_a_job_has_percentiles_and_goodput():
    (point,) = job_points([served(job(40)), served(job(40))])
    assert point.e2e_p50_s == pytest.approx(40 / 160) == pytest.approx(point.e2e_p95_s) and point.ttft_p90_s > 0
    found = point.goodput("e2e:1s")
    assert (found.requests, found.attainment) == (80, 1) and found.per_s == pytest.approx(160)
    assert point.goodput("e2e:100ms").attainment == 0


def test_at_a_low_rate_it_is_the_rate_and_the_last_requests_time():
    load = job(40, rate=5.0, seed=1)
    (point,) = job_points([served(load)])
    last = load.schedule_s[-1]
    assert point.rate == pytest.approx(40 / last)
    assert point.requests_per_s == pytest.approx(40 / (last + point.e2e_s), rel=0.01)
    assert point.batch < 1


def test_energy_of_a_token_is_that_of_the_whole_job():
    """Power is the mean over the job, so tokens/s are those of the job too, not those from its first step on."""
    first = served(job(40, rate=5.0, seed=1))
    watched = planted_telemetry({sensors.POWER_INSTANT: 300.0}, until_s=first.run.window_s[1], interval_s=0.1)
    (point,) = job_points([replace(first, run=replace(first.run, telemetry=watched))])
    assert point.energy_per_token_j == pytest.approx(300 * point.seconds / (40 * 20))


def test_a_batch_that_does_not_fit_waits_its_turn():
    small = replace(SPEC, kv_cache_bytes=10 * 3 * 16 * model_of("opt-125m").kv_bytes_per_token())
    (tight,), (roomy,) = job_points([served(job(40), small)]), job_points([served(job(40))])
    assert (tight.kv_blocks, tight.fits, roomy.fits) == (30, False, True)
    assert tight.output_tokens_per_s == pytest.approx(4000 * 10 / 20)
    assert ratio(roomy, tight, [roomy, tight]).value == pytest.approx(1.6)
    assert same_but_kv(tight) == same_but_kv(roomy) and same_engine(tight) != same_engine(roomy)


def test_points_are_by_question_and_other_loads_are_left_out():
    made = [served(job(40)), served(job(40, rate=5.0)), served(ClosedLoop(4, window_s=0.5)), served(job(40))]
    assert [(p.load.rate, len(p.repeats)) for p in job_points(made)] == [(math.inf, 2), (5.0, 1)]


def test_what_was_not_served_is_invalid():
    died = served(job(40), replace(SPEC, extra=(*SPEC.extra, ("fail_at", 1.0))))
    assert "40 requests failed" in problems(died)[0]
    whole = served(job(40))
    cut = replace(whole.run.samples, finished=(*whole.run.samples.finished[:-1], False))
    assert problems(replace(whole, run=replace(whole.run, samples=cut))) == ("39 of 40 requests were served",)
    (point,) = job_points([replace(whole, run=replace(whole.run, samples=cut))])
    assert not point.valid and point.problems == ("39 of 40 requests were served",)


def test_requests_of_a_job_that_failed_are_judged_by_the_share_that_may():
    whole = served(job(200))
    fewer = Samples(*(getattr(whole.run.samples, column.name)[:-1] for column in fields(Samples)))
    failed = replace(whole, run=replace(whole.run, samples=fewer, failures=1))
    assert problems(failed, failed_share=0.01) == () and problems(failed)[0].startswith("1 requests failed")
    assert problems(replace(whole, run=replace(whole.run, samples=fewer))) == ("199 of 200 requests were served",)


def test_a_trace_that_tells_of_other_tokens_is_invalid():
    whole = served(job(40))
    more = replace(whole.run.steps, new_tokens=tuple(2 * n for n in whole.run.steps.new_tokens))
    (problem,) = problems(replace(whole, run=replace(whole.run, steps=more)))
    assert problem == "the requests have 800 output tokens, the trace of the steps 1600"


def test_preemptions_are_a_figure_and_no_problem():
    preempted = served(job(40), replace(SPEC, extra=(*SPEC.extra, ("preempt_from", 30.0))))
    (point,) = job_points([preempted])
    assert point.valid and point.preemptions == 20


def test_ratios_take_their_noise_from_all_that_is_compared():
    slow, fast = job_point((10.0, 10.2)), job_point((20.0, 20.2), e2e_s=(1.0, 1.0))
    seen = ratio(fast, slow, [slow, fast])
    assert seen.low < seen.value == pytest.approx(1.99, abs=0.01) and seen.high > seen.value
    assert ratio(fast, slow, what=e2e_s).value == pytest.approx(0.4975, abs=0.001)


def test_of_groups_that_are_alike_the_most_varied_counts():
    grid = [job_point(output_tokens=n) for n in (32, 64)]
    alone = job_point(output_tokens=32, spec=EngineSpec("opt-6.7b", max_num_seqs=8))
    assert most_varied([grid, [alone]], lambda p: p.output_tokens) == grid
    assert most_varied([], lambda p: p.output_tokens) == []


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"requests": 0},
        {"requests": 3, "rate": 0.0},
        {"requests": 3, "rate": math.nan},
        {"requests": 3, "window_s": 1.0},
        {"requests": 3, "burstiness": 0.5},
        {"requests": 3, "rate": 1.0, "burstiness": 0.0},
        {"requests": 3, "max_concurrency": 0},
        {"window_s": 1.0},
        {"window_s": 0.0, "rate": 1.0},
        {"window_s": 1.0, "rate": 1.0, "settle_s": 2.0, "steps": ((1.0, 2.0),)},
    ],
)
def test_an_impossible_open_loop_is_refused(words):
    with pytest.raises(BadUsage):
        OpenLoop(**words)
