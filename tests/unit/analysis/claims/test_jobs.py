"""Claims on jobs, each where planted jobs make it hold, where they make it fail, and where it cannot be told."""

from dataclasses import replace
from statistics import fmean

import pytest
from facts import tells
from strategies import FAILS, INCONCLUSIVE, PASSES, job_point, judge

from pytest_slmserve.analysis.claims.table import applies, claim_of, models_read
from pytest_slmserve.analysis.sweep.curve import Curve, with_jobs
from pytest_slmserve.schema.specs import Adapters, EngineSpec

FOLLOWS, LONGER, WAITS = "throughput-follows-arrivals", "longer-outputs-fewer-requests", "all-at-once-waits-longer"
SHRINK, SLIGHTLY = "longer-outputs-shrink-the-batch", "longer-outputs-wait-slightly-longer"
ALIKE, KV, CONTINUOUS_MOST = "alike-at-one-size", "throughput-grows-with-kv-blocks", "continuous-batching-serves-most"
PLATEAU, AFTER_128 = "batch-limit-reaches-a-plateau", "batch-limit-gains-little-after-128"
LATENCY, DYNAMIC_SOONER = "batch-limit-costs-latency", "dynamic-batching-answers-sooner"
COST, MORE = "adapters-cost-throughput", "more-adapters-serve-less"
RANK, STARVE = "a-higher-rank-serves-less", "too-few-slots-starve-requests"


def of_jobs(*jobs, subject="opt-6.7b"):
    return Curve(subject=subject, jobs=jobs)


def is_judged(claim, curve):
    return applies(claim_of(claim), curve)


def of_cache(served, requests_that_fit, **figures):
    blocks = requests_that_fit * 3 + 1  # of 32 + 16 tokens in blocks of 16
    spec = EngineSpec("opt-6.7b", kv_cache_bytes=blocks << 20)
    made = job_point(served, output_tokens=16, requests=64, spec=spec, kv_blocks=blocks, **figures)
    return replace(made, workload=replace(made.workload, longest=48))


def at_rate(served, tokens, e2e_s=(1.0, 1.01)):
    return job_point(served, output_tokens=tokens, rate=10.0, e2e_s=e2e_s)


def batched(batches, tokens):
    made = job_point((50.0, 50.5), output_tokens=tokens)
    return replace(made, each=tuple(replace(each, batch=batch) for each, batch in zip(made.each, batches)))


def limit(most, served, batch=None, e2e_s=(2.0, 2.02), model="opt-6.7b"):
    spec = EngineSpec(model, max_num_seqs=most)
    return job_point(served, spec=spec, batch=batch or 0.97 * most, e2e_s=e2e_s, preemptions=0.0)


def way(batching, served, rate=None, e2e_s=(1.0, 1.01), **figures):
    extra = () if batching is None else (("batching", batching),)
    return job_point(served, rate=rate, e2e_s=e2e_s, spec=EngineSpec("opt-6.7b", extra=extra), **figures)


# A claim; jobs of which one figure is planted; that figure where it passes, fails and is too noisy; what it is compared
# with; what is told
RATE, SERVED = (10.0, 10.1), (20.0, 20.1)
PLANTED = [
    (FOLLOWS, lambda x: (at_rate((9.7, 9.7), 32), at_rate(x, 256), job_point(SERVED, output_tokens=32, rate=100.0)),
     ((9.4, 9.5), (6.0, 6.1), (7.0, 9.2), ()), 10, ("10/s", 256)),  # at the lowest rate
    (LONGER, lambda x: (job_point((50.0, 50.5), output_tokens=32), job_point(x, output_tokens=256)),
     ((10.0, 10.1), (48.0, 49.0), (30.0, 45.0), ()), 50.25, ()),
    (SHRINK, lambda x: (batched((260.0, 262.6), 32), batched(x, 256)),
     ((200.0, 202.0), (281.0, 283.8), (240.0, 290.0)), 261.3, ()),
    (SLIGHTLY, lambda x: (job_point(output_tokens=32, e2e_s=(1.0, 1.01)), job_point(output_tokens=256, e2e_s=x)),
     ((1.2, 1.21), (2.7, 2.72), (1.3, 1.7)), 1.005, ()),
    (WAITS, lambda x: (at_rate((9.0, 9.1), 32), job_point(output_tokens=32, e2e_s=x)),
     ((3.0, 3.1), (0.9, 0.91), (1.1, 1.9)), 1.005, ()),
    (PLATEAU, lambda x: (limit(64, RATE), limit(256, x), limit(128, SERVED)),
     ((20.4, 20.5), (25.0, 25.2), (20.0, 25.0), ()), 20.05, (500, 256, 248, 124)),
    (LATENCY, lambda x: (limit(64, RATE), limit(128, SERVED), limit(256, SERVED, e2e_s=x)),
     ((3.0, 3.1), (1.9, 1.91), (2.0, 2.6)), 2.01, (256, 128)),
    (CONTINUOUS_MOST, lambda x: (way("none", (1.0, 1.01)), way("static", RATE, waste=None), way(None, x)),
     (SERVED, (5.0, 5.1), (8.0, 13.0), ()), 10.05, ("none: 20",)),
    (DYNAMIC_SOONER, lambda x: (way("static", (2.0, 2.01), 2.0), way("dynamic", (2.0, 2.01), 2.0, x)),
     ((0.5, 0.51), (2.0, 2.1), (0.9, 1.2)), 1.005, ()),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "jobs", "figures", "other", "facts"), PLANTED, ids=[row[0] for row in PLANTED])
def test_job_claims_judge_planted_figures(claim, jobs, figures, other, facts):
    for figure, state in zip(figures, (PASSES, FAILS, INCONCLUSIVE, INCONCLUSIVE)):
        curve = of_jobs(*jobs(figure))
        verdict = judge(claim, curve)
        assert verdict.state is state and is_judged(claim, curve)
        assert verdict.value == (pytest.approx(fmean(figure) / other) if figure else None)
        assert state is not PASSES or tells(verdict.why, *facts)


def of_model(name, *served):
    jobs = [job_point(each, requests=n, model=name) for each, n in zip(served, (16, 64, 500))]
    return of_jobs(*jobs, subject=name)


def test_batching_compares_the_same_requests():
    long = way("static", RATE), way(None, SERVED)
    short = way("static", (100.0, 101.0), output_tokens=32), way(None, (300.0, 303.0), output_tokens=32)
    found = judge(CONTINUOUS_MOST, of_jobs(*long, *short))
    assert (found.state, found.value) == (PASSES, pytest.approx(fmean(SERVED) / fmean(RATE)))
    rates = ((2.0, (3.0, 3.01)), (8.0, (0.5, 0.51)))
    found = judge(DYNAMIC_SOONER, of_jobs(*(way(name, RATE, rate, *e2e_s) for rate, x in rates
                                            for name, *e2e_s in (("static",), ("dynamic", x)))))  # fmt: skip
    assert (found.state, found.value) == (FAILS, pytest.approx(3.005 / 1.005))


STATIC = way("static", (2.0, 2.01))
HELD = [[of_cache((1.0, 1.0 + 0.1 * n), fit) for n, fit in enumerate(held)] for held in ((4, 5), (64, 65))]
FEW, MANY = (of_jobs(*caches) for caches in HELD)
BOUND = limit(128, (15.0, 15.1), 107.0), limit(256, (15.0, 15.1), 107.0)  # by the KV cache


@pytest.mark.parametrize(("claim", "curve", "judged", "facts"), [
    *((claim, of_jobs(*jobs), False, ()) for claim in (FOLLOWS, WAITS) for jobs in ((job_point(), STATIC), ())),
    *((claim, of_jobs(STATIC), False, ()) for claim in (CONTINUOUS_MOST, DYNAMIC_SOONER)),
    (FOLLOWS, of_jobs(at_rate((9.7,), 32, (1.0,))), False, ("--slm-repeats 2",)),
    (FOLLOWS, FEW, False, ()), (WAITS, FEW, False, ()),
    # KV caches that all hold, or that all do not hold everything
    (KV, FEW, True, ()), (KV, MANY, True, ()), (KV, of_jobs(of_cache(RATE, 4)), False, ()),
    # Limits that the KV cache does not let the batch reach, and no plateau of throughput
    (PLATEAU, of_jobs(*BOUND), True, ()), (PLATEAU, of_jobs(limit(64, RATE)), False, ()),
    (LATENCY, of_jobs(limit(64, RATE)), False, ()),
    (LATENCY, of_jobs(limit(64, RATE), limit(128, SERVED)), True, (128,)),
    *((ALIKE, of_model("llama-7b", *served), len(served) > 1, ("llama-7b", "opt-6.7b"))
      for served in ((RATE,), (RATE, RATE))),
])  # fmt: skip
def test_unmeasured_jobs_are_inconclusive(claim, curve, judged, facts):
    verdict = judge(claim, curve, [curve])
    assert (verdict.state, verdict.value, is_judged(claim, curve)) == (INCONCLUSIVE, None, judged)
    assert tells(verdict.why, *facts)


@pytest.mark.parametrize(("served", "state"), [
    ((10.5, 10.6), PASSES), ((6.0, 6.1), FAILS), ((15.0, 15.1), FAILS), ((10.0, 15.0), INCONCLUSIVE),
    ((), INCONCLUSIVE),
])  # fmt: skip
def test_alike_claim_judges_request_counts(served, state):
    llama, opt = of_model("llama-7b", served, RATE, RATE), of_model("opt-6.7b", RATE, RATE, RATE)
    verdict = judge(ALIKE, llama, [llama, opt])
    assert verdict.state is state and is_judged(ALIKE, llama)
    assert served != (6.0, 6.1) or tells(verdict.why, 16, 256, "0.602", 3)
    read = [models_read(claim_of(ALIKE), name) for name in ("llama-7b", "opt-6.7b")]
    assert read == [("llama-7b", "opt-6.7b"), ("opt-6.7b",)]


@pytest.mark.parametrize(("small", "fits", "more", "preempted", "state"), [
    ((10.0, 10.1), (20.0, 20.1), (20.1, 20.2), 0, PASSES),
    ((19.5, 19.6), (20.0, 20.1), (20.1, 20.2), 0, FAILS),  # does not grow
    ((10.0, 10.1), (20.0, 20.1), (30.1, 30.2), 0, FAILS),  # grows on
    ((10.0, 10.1), (20.0, 20.1), (20.1, 20.2), 3, FAILS),  # preempts though all fit
    ((10.0, 10.1), (20.0, 20.1), (), 0, INCONCLUSIVE),
    ((10.0, 30.0), (20.0, 20.1), (20.1, 20.2), 0, INCONCLUSIVE),
])  # fmt: skip
def test_throughput_grows_with_kv_blocks(small, fits, more, preempted, state):
    first, last = of_cache(small, 8, preemptions=40.0, batch=9.0), of_cache(more, 128, preemptions=preempted)
    verdict = judge(KV, of_jobs(first, of_cache(fits, 64), last))
    assert verdict.state is state
    assert state is not PASSES or tells(verdict.why, 193, 64, 25, 40)
    if verdict.value:
        assert verdict.threshold == claim_of(KV).parameters["threshold"] and verdict.n == len(verdict.records) == 6


def test_all_jobs_contribute_claim_noise():
    """A larger cache whose repeats are farther apart makes the ratio of the two others less sure."""
    caches = of_cache(RATE, 8), of_cache(SERVED, 64)
    quiet, loud = (judge(KV, of_jobs(*caches, of_cache(more, 128))) for more in ((20.1, 20.2), (18.0, 22.3)))
    assert quiet.value == loud.value and loud.low < quiet.low < quiet.high < loud.high
    jobs = [job_point(), job_point(model="llama-7b")]
    found = with_jobs([Curve(subject="opt-6.7b")], jobs)
    assert [(c.subject, len(c.jobs)) for c in found] == [("opt-6.7b", 1), ("llama-7b", 1)]
    assert found[1].environment == jobs[1].environment
    limits = [limit(n, served) for n, served in ((64, RATE), (128, SERVED), (256, (20.4, 20.5)))]
    others = [replace(limits[0], load=replace(limits[0].load, requests=7))] * 2
    alone = judge(PLATEAU, of_jobs(*limits))
    found = [judge(PLATEAU, of_jobs(*jobs)).value for jobs in ((*limits, *others), (*others, *limits))]
    assert found == [alone.value] * 2 and alone.state is PASSES
    verdict = judge(PLATEAU, of_jobs(limit(64, RATE), *BOUND))
    assert verdict.state is FAILS and verdict.value == pytest.approx(1.5, rel=0.01) and tells(verdict.why, 128)
    rates = {64: RATE, 128: SERVED, 256: (20.2, 20.3), 512: (30.0, 30.1)}
    limits = [limit(most, served, model="opt-1.3b") for most, served in rates.items()]
    assert [judge(AFTER_128, of_jobs(*limits[:n])).state for n in (3, 4)] == [PASSES, FAILS]
    small = [is_judged(AFTER_128, of_jobs(*limits[:n], subject="opt-1.3b")) for n in (1, 2, 4)]
    assert small == [False, False, True]
    assert not is_judged(AFTER_128, of_jobs(*limits)), "the paper says it of other models"
    jobs = lora(SERVED, 0), lora((18.0, 18.1), 1), lora((25.0, 25.1), 64)
    assert [judge(COST, of_jobs(*jobs[:n])).state for n in (2, 3)] == [PASSES, FAILS]
    assert judge(COST, of_jobs(lora(SERVED, 0), lora(RATE, 64, slots=8))).state is INCONCLUSIVE
    found = judge(MORE, of_jobs(lora(SERVED, 1), lora((15.0, 15.1), 8), lora(RATE, 64)))
    assert found.value == pytest.approx(0.5, rel=0.01) and found.state is PASSES, "the most over the fewest"


def lora(served, count, rank=8, slots=64, **more):
    """A job with so many adapters; 0: of the same requests without."""
    asked = Adapters(count, rank) if count else None
    extra = tuple(asked.arguments({"max_loras": slots}).items()) if asked else ()
    made = job_point(served, spec=EngineSpec("opt-6.7b", extra=extra, kv_cache_bytes=(9 - bool(count)) << 30), **more)
    named = replace(made.workload, spec=replace(made.workload.spec, adapters=asked), hash=f"{count:06d}{rank:06d}")
    return replace(made, workload=named, records=tuple(f"{count}-{rank}-{slots}-{i}" for i in range(2)))


@pytest.mark.parametrize(("claim", "of", "to", "words"), [
    (COST, {"count": 1}, {"count": 0}, ["1x8"]), (COST, {"count": 64, "rank": 16}, {"count": 0}, ["64x16"]),
    (MORE, {"count": 64}, {"count": 1}, ["64x8", "1x8"]), (RANK, {"count": 64, "rank": 64}, {"count": 64}, ["64x64"]),
    (STARVE, {"count": 64, "slots": 8}, {"count": 64}, [8, "64x8", 64]),
])  # fmt: skip
def test_adapter_claims_judge_their_cost(claim, of, to, words):
    for served, state in ((RATE, PASSES), ((30.0, 30.1), FAILS), ((10.0, 35.0), INCONCLUSIVE)):
        verdict = judge(claim, of_jobs(lora(served, **of), lora(SERVED, **to)))
        assert verdict.state is state and tells(verdict.why, *words), verdict.why
    assert judge(claim, of_jobs(lora(RATE, **of), lora(SERVED, **to))).value == pytest.approx(0.5, rel=0.01)
    other = lora(SERVED, **to, requests=7)
    assert [is_judged(claim, of_jobs(*jobs)) for jobs in ((lora(RATE, **of),), (job_point(),))] == [True, False]
    assert judge(claim, of_jobs(lora(RATE, **of), other)).state is INCONCLUSIVE
