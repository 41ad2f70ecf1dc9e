"""Claims on jobs, each where planted jobs make it hold, where they make it fail, and where it cannot be told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
from facts import tells
from strategies import job_point, judge

from pytest_slmserve.analysis.claims.table import applies, claim_of, models_read
from pytest_slmserve.analysis.sweep.curve import Curve, with_jobs
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.specs import EngineSpec

PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
FOLLOWS, LONGER, WAITS = "throughput-follows-arrivals", "longer-outputs-fewer-requests", "all-at-once-waits-longer"
ALIKE, KV, CONTINUOUS_MOST = "alike-at-one-size", "throughput-grows-with-kv-blocks", "continuous-batching-serves-most"
PLATEAU, AFTER_128 = "batch-limit-reaches-a-plateau", "batch-limit-gains-little-after-128"
LATENCY, DYNAMIC_SOONER = "batch-limit-costs-latency", "dynamic-batching-answers-sooner"


def of_jobs(*jobs, subject="opt-6.7b"):
    return Curve(subject=subject, jobs=jobs)


def is_judged(claim, curve):
    return applies(claim_of(claim), curve)


def at_rate(served, tokens, e2e_s=(1.0, 1.01)):
    return job_point(served, output_tokens=tokens, rate=10.0, e2e_s=e2e_s)


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
    llama, opt = of_jobs(job_point(served, model="llama-7b"), subject="llama-7b"), of_jobs(job_point())
    assert judge(ALIKE, llama, [llama, opt]).state is state


def test_alike_at_one_size_is_judged_at_each_number_of_requests():
    def model(name, of_16):
        made = (job_point(of_16, requests=16, model=name), *(job_point(model=name, requests=n) for n in (64, 500)))
        return of_jobs(*made, subject=name)

    opt, llama, slow = model("opt-6.7b", (10.0, 10.1)), model("llama-7b", (10.0, 10.1)), model("llama-7b", (6.0, 6.1))
    assert is_judged(ALIKE, llama) and judge(ALIKE, llama, [llama, opt]).state is PASSES
    verdict = judge(ALIKE, slow, [slow, opt])
    assert verdict.state is FAILS and tells(verdict.why, 16, 256, "0.602", 3)


def test_alike_at_one_size_needs_the_other_model():
    llama = of_jobs(job_point(model="llama-7b"), subject="llama-7b")
    alone = judge(ALIKE, llama, [llama])
    assert alone.state is INCONCLUSIVE and tells(alone.why, "llama-7b", "opt-6.7b")
    assert models_read(claim_of(ALIKE), "llama-7b") == ("llama-7b", "opt-6.7b")
    assert models_read(claim_of(ALIKE), "opt-6.7b") == ("opt-6.7b",) and not is_judged(ALIKE, llama)


def of_cache(served, requests_that_fit, **figures):
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
    jobs = (
        of_cache(small, 8, preemptions=40.0, batch=9.0),
        of_cache(fits, 64),
        of_cache(more, 128, preemptions=preempted),
    )
    verdict = judge(KV, of_jobs(*jobs))
    assert verdict.state is state
    assert state is not PASSES or tells(verdict.why, 193, 64, 25, 40)
    if verdict.value:
        assert verdict.threshold == claim_of(KV).parameters["threshold"] and verdict.n == len(verdict.records) == 6


def test_the_noise_of_a_comparison_is_that_of_all_that_is_compared():
    """A larger cache whose repeats are farther apart makes the ratio of the two others less sure."""
    quiet, loud = (
        judge(KV, of_jobs(of_cache((10.0, 10.1), 8), of_cache((20.0, 20.1), 64), of_cache(more, 128)))
        for more in ((20.1, 20.2), (18.0, 22.3))
    )
    assert quiet.value == loud.value and loud.low < quiet.low < quiet.high < loud.high


@pytest.mark.parametrize("held", [(64, 65), (4, 5), (4,)])
def test_kv_blocks_that_all_hold_or_do_not_hold_everything_tell_nothing(held):
    caches = of_jobs(*(of_cache((1.0, 1.0 + 0.1 * n), fit) for n, fit in enumerate(held)))
    verdict = judge(KV, caches)
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, None) and is_judged(KV, caches) is (len(held) > 1)
    assert not is_judged(FOLLOWS, caches) and not is_judged(WAITS, caches)


def limit(most, served, batch=None, e2e_s=(2.0, 2.02), model="opt-6.7b"):
    spec = EngineSpec(model, max_num_seqs=most)
    return job_point(served, spec=spec, batch=batch or 0.97 * most, e2e_s=e2e_s, preemptions=0.0)


def test_a_limit_that_the_kv_cache_does_not_let_the_batch_reach_decides_nothing():
    limits = of_jobs(limit(64, (10.0, 10.1)), limit(128, (15.0, 15.1), 107.0), limit(256, (15.0, 15.1), 107.0))
    verdict = judge(PLATEAU, limits)
    assert verdict.state is FAILS and verdict.value == pytest.approx(1.5, rel=0.01) and tells(verdict.why, 128)
    bound = judge(PLATEAU, of_jobs(limit(128, (15.0, 15.1), 107.0), limit(256, (15.0, 15.1), 107.0)))
    assert (bound.state, bound.value) == (INCONCLUSIVE, None)


def test_the_jobs_under_the_most_limits_are_taken():
    limits = [limit(n, served) for n, served in ((64, (10.0, 10.1)), (128, (20.0, 20.1)), (256, (20.4, 20.5)))]
    others = [replace(limit(64, (10.0, 10.1)), load=replace(limits[0].load, requests=7)) for _ in range(2)]
    alone = judge(PLATEAU, of_jobs(*limits))
    for jobs in ((*limits, *others), (*others, *limits)):
        assert (judge(PLATEAU, of_jobs(*jobs)).value, alone.state) == (alone.value, PASSES)


def test_after_a_limit_every_further_one_gains_little():
    rates = {64: (10.0, 10.1), 128: (20.0, 20.1), 256: (20.2, 20.3), 512: (30.0, 30.1)}
    limits = [limit(most, served, model="opt-1.3b") for most, served in rates.items()]
    of_a_small_model = partial(of_jobs, subject="opt-1.3b")
    assert judge(AFTER_128, of_jobs(*limits[:3])).state is PASSES
    assert judge(AFTER_128, of_jobs(*limits)).state is FAILS
    assert is_judged(AFTER_128, of_a_small_model(*limits)) and not is_judged(AFTER_128, of_a_small_model(*limits[:2]))
    assert not is_judged(AFTER_128, of_jobs(*limits)), "the paper says it of other models"
    assert not is_judged(PLATEAU, of_jobs(limits[0])) and not is_judged(AFTER_128, of_a_small_model(limits[0]))


@pytest.mark.parametrize("more", [(), (limit(128, (20.0, 20.1)),)])
def test_latency_beyond_a_plateau_needs_one(more):
    verdict = judge(LATENCY, of_jobs(limit(64, (10.0, 10.1)), *more))
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, None) and (not more or tells(verdict.why, 128))


def test_jobs_go_with_the_curve_of_their_model_or_make_one():
    jobs = [job_point(), job_point(model="llama-7b")]
    found = with_jobs([Curve(subject="opt-6.7b")], jobs)
    assert [(c.subject, len(c.jobs)) for c in found] == [("opt-6.7b", 1), ("llama-7b", 1)]
    assert found[1].environment == jobs[1].environment


def way(batching, served, rate=None, e2e_s=(1.0, 1.01), **figures):
    extra = () if batching is None else (("batching", batching),)
    return job_point(served, rate=rate, e2e_s=e2e_s, spec=EngineSpec("opt-6.7b", extra=extra), **figures)


# A claim; jobs of which one figure is planted; that figure where it passes, fails and is too noisy; the ratio by it;
# what is told
RATE, SERVED = (10.0, 10.1), (20.0, 20.1)
PLANTED = [
    (
        FOLLOWS,
        lambda x: (at_rate((9.7, 9.7), 32), at_rate(x, 256), job_point(SERVED, output_tokens=32, rate=100.0)),
        ((9.4, 9.5), (6.0, 6.1), (7.0, 9.2), ()),
        lambda mean: mean / 10,  # at the lowest rate
        ("10/s", 256),
    ),
    (
        LONGER,
        lambda x: (job_point((50.0, 50.5), output_tokens=32), job_point(x, output_tokens=256)),
        ((10.0, 10.1), (48.0, 49.0), (30.0, 45.0), ()),
        lambda mean: mean / 50.25,
        (),
    ),
    (
        WAITS,
        lambda x: (at_rate((9.0, 9.1), 32), job_point(output_tokens=32, e2e_s=x)),
        ((3.0, 3.1), (0.9, 0.91), (1.1, 1.9)),
        lambda mean: mean / 1.005,
        (),
    ),
    (
        PLATEAU,
        lambda x: (limit(64, RATE), limit(256, x), limit(128, SERVED)),
        ((20.4, 20.5), (25.0, 25.2), (20.0, 25.0), ()),
        lambda mean: mean / 20.05,
        (500, 256, 248, 124),
    ),
    (
        LATENCY,
        lambda x: (limit(64, RATE), limit(128, SERVED), limit(256, SERVED, e2e_s=x)),
        ((3.0, 3.1), (1.9, 1.91), (2.0, 2.6)),
        lambda mean: mean / 2.01,
        (256, 128),
    ),
    (
        CONTINUOUS_MOST,
        lambda x: (way("none", (1.0, 1.01)), way("static", RATE, waste=None), way(None, x)),
        (SERVED, (5.0, 5.1), (8.0, 13.0), ()),
        lambda mean: mean / 10.05,
        ("none: 20",),
    ),
    (
        DYNAMIC_SOONER,
        lambda x: (way("static", (2.0, 2.01), 2.0), way("dynamic", (2.0, 2.01), 2.0, x)),
        ((0.5, 0.51), (2.0, 2.1), (0.9, 1.2)),
        lambda mean: mean / 1.005,
        (),
    ),
]


@pytest.mark.parametrize(("claim", "jobs", "figures", "ratio", "facts"), PLANTED, ids=[row[0] for row in PLANTED])
@pytest.mark.parametrize(("at", "state"), [*enumerate([PASSES, FAILS, INCONCLUSIVE, INCONCLUSIVE])])
def test_planted_jobs_pass_fail_or_are_too_noisy_or_not_there(claim, jobs, figures, ratio, facts, at, state):
    figure = figures[min(at, len(figures) - 1)]
    curve = of_jobs(*jobs(figure))
    verdict = judge(claim, curve)
    assert verdict.state is state and is_judged(claim, curve)
    assert verdict.value == (pytest.approx(ratio(fmean(figure))) if figure else None)
    assert state is not PASSES or tells(verdict.why, *facts)


@pytest.mark.parametrize("claim", [FOLLOWS, WAITS, CONTINUOUS_MOST, DYNAMIC_SOONER])
def test_what_was_not_measured_is_inconclusive_and_not_judged(claim):
    alone = of_jobs(job_point(), way("static", (2.0, 2.01)))
    for curve in (alone, of_jobs()) if claim in (FOLLOWS, WAITS) else (of_jobs(way("static", (2.0, 2.01))),):
        assert (judge(claim, curve).state, judge(claim, curve).value) == (INCONCLUSIVE, None)
        assert not is_judged(claim, curve)
    once = judge(FOLLOWS, of_jobs(at_rate((9.7,), 32, (1.0,))))
    assert once.state is INCONCLUSIVE and tells(once.why, "--slm-repeats 2")
