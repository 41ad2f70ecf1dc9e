"""Engines as advised, and verdicts on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import H200, law, measurement

from pytest_slmserve.analysis.advice.advisor import Advice, Ceiling, Gains, Objectives, plan, utilization
from pytest_slmserve.analysis.advice.subjects import (
    KV_BLOCKS,
    LATENCY,
    THROUGHPUT,
    UNPREEMPTED,
    gain_within_bound,
    of_curves,
    recommended_engine,
    verified,
)
from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.points import points_of, shared_points
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.analysis.verdict import State, within
from pytest_slmserve.schema.records import Environment, Measurement, Replica, Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec

BLOCKS = 1365
SPEC = EngineSpec("opt-1.3b", max_num_seqs=64, kv_cache_bytes=BLOCKS * 16 * 196_608)
SPREAD = (0.999, 1.001)
PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE


def advice(batches=(1, 16, 32, 64, 128), spread=SPREAD, spec: EngineSpec | None = None, **facts: Any) -> Advice:
    made = [measurement(c, law(c) * by, repeat=i, **facts) for c in batches for i, by in enumerate(spread)]
    made = [replace(m, spec=spec or m.spec) for m in made]
    found = of_curves([curve_of("opt-1.3b", made)], None, None)
    return plan(found.subjects, Objectives(slo=RelativeSlo(2, 32), gpu_bytes=found.gpu_bytes)).advices[0]


def again(factor: float = 1.0, batch: int = 64, spread=SPREAD, **facts: Any) -> list[Measurement]:
    made = [measurement(batch, law(batch) * factor * by, repeat=i, launch="2", **facts) for i, by in enumerate(spread)]
    return [replace(m, spec=SPEC) for m in made]


def states(advised: Advice, found: list[Measurement]) -> dict[str, State]:
    return {verdict.claim: verdict.state for verdict in verified(advised, SPEC, found)}


def told(claim: str, advised: Advice, found: list[Measurement]) -> Any:
    return next(verdict for verdict in verified(advised, SPEC, found) if verdict.claim == claim)


# The engine


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
    found = states(advice(), again(factor))
    assert found == {UNPREEMPTED: PASSES, KV_BLOCKS: PASSES, THROUGHPUT: wanted, LATENCY: in_time}
    throughput, latency = told(THROUGHPUT, advice(), again(factor)), told(LATENCY, advice(), again(factor))
    assert throughput.value == pytest.approx(factor) and throughput.low < factor < throughput.high
    assert latency.value == pytest.approx(64 / law(64) / factor, rel=1e-4)


def test_a_prediction_by_the_law_has_no_noise_of_its_own():
    predicted = advice((1, 32))
    assert predicted.decision.predicted and predicted.batch != 64
    near = told(THROUGHPUT, predicted, again(1.02, predicted.batch))
    assert near.value == pytest.approx(1.02, rel=1e-3)
    measured = told(THROUGHPUT, advice(), again(1.02))
    assert near.high - near.low < measured.high - measured.low


def test_noise_that_is_not_known_decides_nothing():
    found = states(advice(spread=(1.0,)), again(spread=(1.0,)))
    assert found[THROUGHPUT] is found[LATENCY] is INCONCLUSIVE


def test_preemptions_fail_and_leave_the_rest_inconclusive():
    found = states(advice(), again(preempted=3))
    assert (found[UNPREEMPTED], found[THROUGHPUT], found[LATENCY]) == (FAILS, INCONCLUSIVE, INCONCLUSIVE)
    assert "6 preemptions" in told(UNPREEMPTED, advice(), again(preempted=3)).why


def test_fewer_blocks_than_predicted_fail_and_unknown_ones_are_not_judged():
    fewer = Resolved(kv_blocks=BLOCKS - 40, block_size=16, max_num_seqs=64, dtype="float16")
    assert told(KV_BLOCKS, advice(), again(resolved=fewer)).value == -40
    assert states(advice(), again(resolved=fewer))[KV_BLOCKS] is FAILS
    assert KV_BLOCKS not in states(advice(), again(resolved=replace(fewer, kv_blocks=None)))


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


@pytest.mark.parametrize(("share", "wanted"), [(0.8, PASSES), (1.1, PASSES), (1.3, FAILS)])
def test_the_gain_against_its_bound(share, wanted):
    verdict = gain_within_bound(replace(advice(), gains=GAINS), points_of(again())[0], together(share))
    assert verdict.state is wanted and verdict.subject == "2 x opt-1.3b"
    assert verdict.value == pytest.approx(2 * share) and verdict.threshold == 2
    assert f"{2 * share:.3g} times (95 %: " in verdict.why and "at most 2 times is possible" in verdict.why


def test_a_gain_that_nothing_bounds_or_that_is_not_known_is_inconclusive():
    single = points_of(again())[0]
    unbound = gain_within_bound(replace(advice(), gains=None), single, together(0.8))
    assert unbound.state is INCONCLUSIVE and "bounds the gain" in unbound.why
    broken = gain_within_bound(replace(advice(), gains=GAINS), single, together(0.8, failures=1))
    assert broken.state is INCONCLUSIVE and "1 requests failed" in broken.why
