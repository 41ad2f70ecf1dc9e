"""Is it as predicted? Ratios, bounds and verdicts on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import law, measurement

from pytest_slmserve.analysis.advice.advisor import Advice, Ceiling, Gains, Unit, plan
from pytest_slmserve.analysis.advice.batch_choice import Objectives
from pytest_slmserve.analysis.advice.subjects import of_curves
from pytest_slmserve.analysis.advice.verification import (
    BOUNDED,
    KV_BLOCKS,
    LATENCY,
    THROUGHPUT,
    UNPREEMPTED,
    Verification,
    Verified,
    bound_of,
    not_started,
    together_failed,
    verified,
    verified_together,
)
from pytest_slmserve.analysis.points import engines
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.analysis.verdict import State, within
from pytest_slmserve.report.advice.text import verification_facts
from pytest_slmserve.report.advice.text import verification_text as text
from pytest_slmserve.schema.records import Measurement, Replica, Resolved
from pytest_slmserve.schema.specs import EngineSpec

BLOCKS = 1365
SPEC = EngineSpec("opt-1.3b", max_num_seqs=64, kv_cache_bytes=BLOCKS * 16 * 196_608)
SPREAD = (0.999, 1.001)


def advice(batches=(1, 16, 32, 64, 128), spread=SPREAD) -> Advice:
    made = [measurement(c, law(c) * by, repeat=i) for c in batches for i, by in enumerate(spread)]
    wish = Objectives(slo=RelativeSlo(2, 32))
    return plan(of_curves([curve_of("opt-1.3b", made)], None, None).subjects, wish).advices[0]


def again(factor: float = 1.0, batch: int = 64, spread=SPREAD, **facts: Any) -> list[Measurement]:
    made = [measurement(batch, law(batch) * factor * by, repeat=i, launch="2", **facts) for i, by in enumerate(spread)]
    return [replace(m, spec=SPEC) for m in made]


def state(seen: Verified, claim: str) -> State:
    [verdict] = [verdict for verdict in seen.verdicts if verdict.claim == claim]
    return verdict.state


@given(st.floats(0.5, 1.5), st.floats(0, 0.5), st.floats(0.01, 0.4))
def test_within_is_decided_where_no_end_of_the_interval_says_otherwise(value, half, margin):
    seen = within(Interval(value, value - half, value + half), 1 - margin, 1 + margin)
    apart = abs(value - 1)
    assert (seen is State.PASSES) == (1 - margin <= value - half and value + half <= 1 + margin)
    assert seen is not State.FAILS or apart > margin
    assert seen is not State.INCONCLUSIVE or half > 0
    assert within(Interval(value), 1 - margin, 1 + margin) is State.INCONCLUSIVE, "without known noise"


@pytest.mark.parametrize(
    ("factor", "wanted", "in_time"),
    [
        (1.0, State.PASSES, State.PASSES),
        (0.9, State.PASSES, State.PASSES),
        (0.7, State.FAILS, State.PASSES),
        (0.5, State.FAILS, State.FAILS),
        (1.3, State.FAILS, State.PASSES),
    ],
)
def test_throughput_and_latency(factor, wanted, in_time):
    seen = verified(advice(), SPEC, again(factor), 0.15)
    assert seen.ratio.value == pytest.approx(factor) and seen.ratio.low < factor < seen.ratio.high
    assert seen.latency_s.value == pytest.approx(64 / law(64) / factor, rel=1e-4)
    assert (state(seen, THROUGHPUT), state(seen, LATENCY)) == (wanted, in_time)
    assert Verification(0.15, 2, (seen,)).state is (State.FAILS if State.FAILS in (wanted, in_time) else State.PASSES)


def test_a_prediction_by_the_law_has_no_noise_of_its_own():
    seen = verified(advice((1, 32)), SPEC, again(1.02, 64), 0.15)
    assert seen.advice.decision.predicted and seen.advice.batch != 64
    near = verified(advice((1, 32)), SPEC, again(1.02, seen.advice.batch), 0.15)
    assert near.ratio.value == pytest.approx(1.02, rel=1e-3)
    measured = verified(advice(), SPEC, again(1.02), 0.15)
    assert near.ratio.high - near.ratio.low < measured.ratio.high - measured.ratio.low


def test_noise_that_is_not_known_decides_nothing():
    seen = verified(advice(spread=(1.0,)), SPEC, again(spread=(1.0,)), 0.15)
    assert state(seen, THROUGHPUT) is state(seen, LATENCY) is State.INCONCLUSIVE
    assert Verification(0.15, 1, (seen,)).state is State.INCONCLUSIVE


def test_preemptions_fail_and_leave_the_rest_inconclusive():
    seen = verified(advice(), SPEC, again(preempted=3), 0.15)
    assert seen.preemptions == 6 and state(seen, UNPREEMPTED) is State.FAILS
    assert state(seen, THROUGHPUT) is State.INCONCLUSIVE and seen.ratio is None
    assert "6 preemptions" in " ".join(text(Verification(0.15, 2, (seen,))).split())


def test_fewer_blocks_than_predicted():
    fewer = Resolved(kv_blocks=BLOCKS - 40, block_size=16, max_num_seqs=64, dtype="float16")
    seen = verified(advice(), SPEC, again(resolved=fewer), 0.15)
    assert seen.kv_blocks == (BLOCKS, BLOCKS - 40) and state(seen, KV_BLOCKS) is State.FAILS
    untold = replace(fewer, kv_blocks=None)
    seen = verified(advice(), SPEC, again(resolved=untold), 0.15)
    assert KV_BLOCKS not in {verdict.claim for verdict in seen.verdicts}


def test_an_engine_that_does_not_start_fails():
    seen = Verification(0.15, 2, (not_started(advice(), "no memory is left\n  | log"),))
    assert seen.state is State.FAILS and seen.verdicts[0].why == "no memory is left"
    assert "no memory is left" in text(seen) and verification_facts(seen)["models"][0]["preemptions"] is None


def test_nothing_verified_is_inconclusive():
    assert Verification(0.15, 2, ()).state is State.INCONCLUSIVE


# Several


def gains(**busy: float) -> Gains:
    names: dict[str, Unit] = {"host": "host", "dram": "dram", "roofline": "roofline"}
    return Gains(64, tuple(Ceiling(names[name], share, max(1.0, 1 / share)) for name, share in busy.items()), None)


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=4), st.floats(0.05, 1), st.floats(0.05, 1))
def test_for_engines_of_one_model_the_bound_is_the_one_told(parts, host, dram):
    seen = gains(host=host, dram=dram)
    assert bound_of(parts, [seen] * len(parts), "time-slicing") == pytest.approx(seen.time_slicing.factor)
    assert bound_of(parts, [seen] * len(parts), "mps") == pytest.approx(seen.mps.factor)


def test_models_that_need_different_units_may_gain_more_than_each_with_itself():
    one, other = gains(host=1.0, dram=0.2, roofline=0.1), gains(host=1.0, dram=0.1, roofline=0.2)
    assert bound_of([0.5, 0.5], [one, other], "time-slicing") == pytest.approx(1)
    assert bound_of([0.5, 0.5], [one, other], "mps") == pytest.approx(1 / 0.15)
    assert bound_of([0.5, 0.5], [one, gains(host=1.0)], "mps") is None, "no unit is known of both"
    assert bound_of([0.5, 0.5], [one, None], "mps") is None


def together(rates: tuple[float, float], **facts: Any) -> list[tuple[Measurement, ...]]:
    return [
        tuple(
            replace(
                measurement(32, rate * by, repeat=run, launch=f"{index}", **facts),
                replica=Replica(f"g{run}", index, 2, "set", "mps"),
            )
            for index, rate in enumerate(rates)
        )
        for run, by in enumerate(SPREAD)
    ]


def alone() -> Verified:
    seen = verified(advice(), SPEC, again(), 0.15)
    return replace(seen, advice=replace(seen.advice, gains=gains(host=0.9, dram=0.5)))


@pytest.mark.parametrize(("share", "wanted"), [(0.8, State.PASSES), (1.1, State.PASSES), (1.3, State.FAILS)])
def test_the_sum_against_the_bound_and_against_one_alone(share, wanted):
    one, rate = alone(), law(64)
    seen = verified_together(together((share * rate, share * rate)), [one, one], "mps", 0.15)
    assert seen.gain.value == pytest.approx(2 * share) and seen.bound == pytest.approx(2)
    assert {v.claim: v.state for v in seen.verdicts} == {UNPREEMPTED: State.PASSES, BOUNDED: wanted}
    assert seen.latency_s == pytest.approx(32 / (share * rate), rel=1e-4) and engines(seen.models) == "2 x opt-1.3b"
    said = " ".join(text(Verification(0.15, 2, (one,), seen)).split())
    assert f"{2 * share:.3g} times (95 %: " in said and "the bound is 2.00" in said


def test_where_nothing_bounds_the_sum_it_is_told_and_not_judged():
    one = replace(alone(), advice=replace(advice(), gains=None))
    seen = verified_together(together((4000, 4000)), [one, one], "mps", 0.15)
    assert seen.gain is not None and seen.bound is None and [v.claim for v in seen.verdicts] == [UNPREEMPTED]
    assert "nothing bounds it" in " ".join(text(Verification(0.15, 2, (one,), seen)).split())


def test_engines_together_that_cannot_be_judged():
    one = alone()
    seen = verified_together(together((4000, 4000), failures=1), [one, one], "mps", 0.15)
    assert [v.state for v in seen.verdicts] == [State.PASSES, State.INCONCLUSIVE] and seen.gain is None
    lost = replace(one, point=None)
    seen = verified_together(together((4000, 4000)), [one, lost], "mps", 0.15)
    assert seen.gain is None and "not all of them were measured alone" in seen.verdicts[1].why


def test_engines_that_do_not_start_beside_each_other():
    seen = together_failed(["opt-125m", "opt-1.3b"], [8, 64], "mps", "replica 2 of 2: the end\n  | log")
    whole = Verification(0.15, 2, (alone(),), seen)
    assert (
        whole.state is State.FAILS
        and verification_facts(whole)["together"]["verdicts"][0].why == "replica 2 of 2: the end"
    )
    assert "opt-125m + opt-1.3b" in text(whole)
