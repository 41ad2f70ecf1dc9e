"""Claims on jobs, each where it holds, where it fails, and where it cannot be told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import job_point

from pytest_slmserve.analysis.claims.job_claims import (
    LONGER,
    alike_at_one_size,
    all_at_once_waits_longer,
    batch_limit_costs_latency,
    batch_limit_gains_little_after,
    batch_limit_reaches_a_plateau,
    compared_with,
    continuous_batching_serves_most,
    dynamic_batching_answers_sooner,
    has_grid,
    has_limits,
    has_limits_after,
    longest_over_shortest,
    throughput_follows_arrivals,
    throughput_grows_with_kv_blocks,
)
from pytest_slmserve.analysis.claims.table import applies, claim_of
from pytest_slmserve.analysis.sweep.curve import Curve, with_jobs
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.specs import EngineSpec

PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE


def curve(*jobs, subject="opt-6.7b"):
    return Curve(subject=subject, jobs=jobs)


def is_judged(claim, curve):
    return applies(claim_of(claim), curve)


def at_rate(served, tokens, e2e_s=(1.0, 1.01)):
    return job_point(served, output_tokens=tokens, rate=10.0, e2e_s=e2e_s)


@pytest.mark.parametrize(
    ("served", "state"), [((9.4, 9.5), PASSES), ((6.0, 6.1), FAILS), ((7.0, 9.2), INCONCLUSIVE), ((), INCONCLUSIVE)]
)
def test_throughput_follows_arrivals(served, state):
    verdict = throughput_follows_arrivals(curve(at_rate((9.7, 9.7), 32), at_rate(served, 256)), 0.8)
    assert verdict.state is state
    if state is PASSES:
        assert verdict.value == pytest.approx(0.945, abs=0.001) and "at 10/s, 256 output tokens" in verdict.why


def test_it_is_judged_at_the_lowest_rate_alone():
    overload = job_point((20.0, 20.1), output_tokens=32, rate=100.0)
    assert throughput_follows_arrivals(curve(at_rate((9.7, 9.8), 32), overload), 0.8).state is PASSES
    assert "no job at a rate" in throughput_follows_arrivals(curve(job_point()), 0.8).why


def test_one_repeat_tells_no_noise():
    verdict = throughput_follows_arrivals(curve(at_rate((9.7,), 32, (1.0,))), 0.8)
    assert verdict.state is INCONCLUSIVE and "--slm-repeats 2" in verdict.why


@pytest.mark.parametrize(
    ("long", "state"), [((10.0, 10.1), PASSES), ((48.0, 49.0), FAILS), ((30.0, 45.0), INCONCLUSIVE), ((), INCONCLUSIVE)]
)
def test_longer_outputs_fewer_requests(long, state):
    verdict = longest_over_shortest(
        LONGER, curve(job_point((50.0, 50.5), output_tokens=32), job_point(long, output_tokens=256)), 0.75
    )
    assert verdict.state is state
    if state is PASSES:
        assert verdict.value == pytest.approx(0.2, abs=0.001)


@pytest.mark.parametrize(("e2e_s", "state"), [((3.0, 3.1), PASSES), ((0.9, 0.91), FAILS), ((1.1, 1.9), INCONCLUSIVE)])
def test_all_at_once_waits_longer(e2e_s, state):
    verdict = all_at_once_waits_longer(curve(at_rate((9.0, 9.1), 32), job_point(output_tokens=32, e2e_s=e2e_s)), 1.2)
    assert verdict.state is state


def test_all_at_once_waits_longer_needs_both_ways_to_come():
    assert "no length was measured" in all_at_once_waits_longer(curve(job_point()), 1.2).why


@pytest.mark.parametrize(
    ("served", "state"),
    [
        ((10.5, 10.6), PASSES),
        ((6.0, 6.1), FAILS),
        ((15.0, 15.1), FAILS),
        ((10.0, 15.0), INCONCLUSIVE),
        ((), INCONCLUSIVE),
    ],
)
def test_alike_at_one_size(served, state):
    llama, opt = curve(job_point(served, model="llama-7b"), subject="llama-7b"), curve(job_point())
    verdict = alike_at_one_size(llama, [llama, opt], 1.25)
    assert verdict.state is state


def test_alike_at_one_size_is_judged_at_each_number_of_requests():
    def model(name, of_16):
        jobs = (job_point(of_16, requests=16, model=name), *(job_point(model=name, requests=n) for n in (64, 500)))
        return curve(*jobs, subject=name)

    opt, llama, slow = model("opt-6.7b", (10.0, 10.1)), model("llama-7b", (10.0, 10.1)), model("llama-7b", (6.0, 6.1))
    assert is_judged("alike-at-one-size", llama) and alike_at_one_size(llama, [llama, opt], 1.25).state is PASSES
    verdict = alike_at_one_size(slow, [slow, opt], 1.25)
    assert verdict.state is FAILS and "decides of 3 jobs" in verdict.why
    assert verdict.why.startswith("with 16 requests of 256 output tokens it serves 0.602 times")


def test_alike_at_one_size_needs_the_other_model():
    llama = curve(job_point(model="llama-7b"), subject="llama-7b")
    assert "of both llama-7b and opt-6.7b" in alike_at_one_size(llama, [llama], 1.25).why
    assert compared_with("llama-7b") == ("llama-7b", "opt-6.7b") and compared_with("opt-6.7b") == ("opt-6.7b",) * 2
    assert not is_judged("alike-at-one-size", llama)


def cache(served, requests_that_fit, **figures):
    blocks = requests_that_fit * 3 + 1  # of 32 + 16 tokens in blocks of 16
    spec = EngineSpec("opt-6.7b", kv_cache_bytes=blocks << 20)
    made = job_point(served, output_tokens=16, requests=64, spec=spec, kv_blocks=blocks, **figures)
    return replace(made, workload=replace(made.workload, longest=48))


KV_STATES = [
    ((10.0, 10.1), (20.0, 20.1), (20.1, 20.2), 0, PASSES),
    ((19.5, 19.6), (20.0, 20.1), (20.1, 20.2), 0, FAILS),  # does not grow
    ((10.0, 10.1), (20.0, 20.1), (30.1, 30.2), 0, FAILS),  # grows on
    ((10.0, 10.1), (20.0, 20.1), (20.1, 20.2), 3, FAILS),  # preempts though all fit
    ((10.0, 10.1), (20.0, 20.1), (), 0, INCONCLUSIVE),
    ((10.0, 30.0), (20.0, 20.1), (20.1, 20.2), 0, INCONCLUSIVE),
]


@pytest.mark.parametrize(("small", "fits", "more", "preempted", "state"), KV_STATES)
def test_throughput_grows_with_kv_blocks(small, fits, more, preempted, state):
    jobs = cache(small, 8, preemptions=40.0, batch=9.0), cache(fits, 64), cache(more, 128, preemptions=preempted)
    verdict = throughput_grows_with_kv_blocks(curve(*jobs), 1.1, 1.1)
    assert verdict.state is state
    if state is PASSES:
        assert "193 blocks, which hold all 64 requests" in verdict.why and "25 do, with 40 preemptions" in verdict.why


def test_kv_blocks_that_all_hold_or_do_not_hold_everything_tell_nothing():
    assert (
        "every KV cache"
        in throughput_grows_with_kv_blocks(curve(cache((1.0, 1.0), 64), cache((1.0, 1.1), 65)), 1, 1).why
    )
    assert "no KV cache" in throughput_grows_with_kv_blocks(curve(cache((1.0, 1.0), 4), cache((1.0, 1.1), 5)), 1, 1).why
    assert "two sizes" in throughput_grows_with_kv_blocks(curve(cache((1.0, 1.0), 4)), 1, 1).why


def limit(most, served, batch=None, e2e_s=(2.0, 2.02)):
    spec = EngineSpec("opt-6.7b", max_num_seqs=most)
    return job_point(served, spec=spec, batch=batch or 0.97 * most, e2e_s=e2e_s, preemptions=0.0)


@pytest.mark.parametrize(
    ("largest", "state"),
    [((20.4, 20.5), PASSES), ((25.0, 25.2), FAILS), ((20.0, 25.0), INCONCLUSIVE), ((), INCONCLUSIVE)],
)
def test_the_last_limit_of_the_batch_gains_little(largest, state):
    limits = curve(limit(64, (10.0, 10.1)), limit(256, largest), limit(128, (20.0, 20.1)))
    verdict = batch_limit_reaches_a_plateau(limits, 1.1)
    assert verdict.state is state and has_limits(limits)
    if state is PASSES:
        assert "all 500 at once, max_num_seqs 256 serves 1.02 times" in verdict.why
        assert "a mean batch of 248 after 124" in verdict.why


def test_a_limit_that_the_kv_cache_does_not_let_the_batch_reach_decides_nothing():
    limits = curve(limit(64, (10.0, 10.1)), limit(128, (15.0, 15.1), 107.0), limit(256, (15.0, 15.1), 107.0))
    assert batch_limit_reaches_a_plateau(limits, 1.1).state is FAILS
    assert "max_num_seqs 128 serves 1.5 times" in batch_limit_reaches_a_plateau(limits, 1.1).why
    bound = curve(limit(128, (15.0, 15.1), 107.0), limit(256, (15.0, 15.1), 107.0))
    assert "two limits that bound the batch" in batch_limit_reaches_a_plateau(bound, 1.1).why


def test_after_a_limit_every_further_one_gains_little():
    limits = [limit(64, (10.0, 10.1)), limit(128, (20.0, 20.1)), limit(256, (20.2, 20.3)), limit(512, (30.0, 30.1))]
    assert batch_limit_gains_little_after(curve(*limits[:3]), 1.1, 128).state is PASSES
    assert batch_limit_gains_little_after(curve(*limits), 1.1, 128).state is FAILS
    assert has_limits_after(curve(*limits), 128) and not has_limits_after(curve(*limits[:2]), 128)
    assert not has_limits(curve(limits[0])) and not has_limits_after(curve(limits[0]), 64)


@pytest.mark.parametrize(("e2e_s", "state"), [((3.0, 3.1), PASSES), ((1.9, 1.91), FAILS), ((2.0, 2.6), INCONCLUSIVE)])
def test_a_batch_beyond_the_plateau_costs_latency(e2e_s, state):
    served = (20.0, 20.1)
    limits = curve(limit(64, (10.0, 10.1)), limit(128, served), limit(256, served, e2e_s=e2e_s))
    verdict = batch_limit_costs_latency(limits, 1.1, 1.1)
    assert verdict.state is state and "under max_num_seqs 256 as under 128" in verdict.why


def test_latency_beyond_a_plateau_needs_one():
    growing = curve(limit(64, (10.0, 10.1)), limit(128, (20.0, 20.1)))
    assert "throughput still grows at max_num_seqs 128" in batch_limit_costs_latency(growing, 1.1, 1.1).why
    assert "two limits" in batch_limit_costs_latency(curve(limit(64, (10.0, 10.1))), 1.1, 1.1).why


def test_what_there_is_to_judge():
    grid, caches = (
        curve(at_rate((9.0, 9.0), 32), job_point(output_tokens=32)),
        curve(cache((1.0,), 4), cache((1.0,), 5)),
    )
    rates, blocks = "all-at-once-waits-longer", "throughput-grows-with-kv-blocks"
    assert has_grid(grid) and is_judged(rates, grid) and not is_judged(blocks, grid)
    assert is_judged(blocks, caches) and not has_grid(caches) and not is_judged(rates, caches)
    assert not has_grid(Curve(subject="opt-6.7b"))


def test_jobs_go_with_the_curve_of_their_model_or_make_one():
    jobs = [job_point(), job_point(model="llama-7b")]
    found = with_jobs([Curve(subject="opt-6.7b")], jobs)
    assert [(c.subject, len(c.jobs)) for c in found] == [("opt-6.7b", 1), ("llama-7b", 1)]
    assert found[1].environment == jobs[1].environment


def way(batching, served, rate=None, e2e_s=(1.0, 1.01), **figures):
    extra = () if batching is None else (("batching", batching),)
    return job_point(served, rate=rate, e2e_s=e2e_s, spec=EngineSpec("opt-6.7b", extra=extra), **figures)


@pytest.mark.parametrize(
    ("continuous", "state"),
    [((20.0, 20.1), PASSES), ((5.0, 5.1), FAILS), ((8.0, 13.0), INCONCLUSIVE), ((), INCONCLUSIVE)],
)
def test_continuous_batching_serves_most(continuous, state):
    ways = curve(way("none", (1.0, 1.01)), way("static", (10.0, 10.1), waste=None), way(None, continuous))
    verdict = continuous_batching_serves_most(ways, 1.0)
    assert verdict.state is state and is_judged("continuous-batching-serves-most", ways)
    assert not is_judged("dynamic-batching-answers-sooner", ways)
    if state is PASSES:
        assert verdict.value == pytest.approx(1.995, abs=0.01) and "(none: 20)" in verdict.why


@pytest.mark.parametrize(("e2e_s", "state"), [((0.5, 0.51), PASSES), ((2.0, 2.1), FAILS), ((0.9, 1.2), INCONCLUSIVE)])
def test_dynamic_batching_answers_sooner(e2e_s, state):
    ways = curve(way("static", (2.0, 2.01), 2.0), way("dynamic", (2.0, 2.01), 2.0, e2e_s))
    assert dynamic_batching_answers_sooner(ways, 1.0).state is state
    assert is_judged("dynamic-batching-answers-sooner", ways)


def test_one_way_to_batch_is_none_to_compare():
    alone = curve(way("static", (2.0, 2.01)))
    assert "two ways" in continuous_batching_serves_most(alone, 1.0).why
    assert not is_judged("continuous-batching-serves-most", alone)
    assert "dynamic and by static" in dynamic_batching_answers_sooner(alone, 1.0).why
