"""The claims of one sweep: what was planted passes or fails, noise and gaps make it inconclusive and never green,
and a claim depends on the loads that it reads and on no other."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
import strategies
from facts import tells
from gate_sessions import most
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from strategies import curves, law, measurement, noisy_curve, point, without

from pytest_slmserve.analysis.sweep.curve import (
    LATENCY,
    PARETO,
    PLATEAU,
    Curve,
    curve_of,
    front_ends,
    is_sweep,
    labels,
    obstacle,
)
from pytest_slmserve.analysis.verdict import Inconclusive, State
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FLAT = {b: law(b) for b in BATCHES}  # the last doubling gains 8.1 %
STEEP = {b: law(b) for b in BATCHES[:7]}  # the last doubling gains 41 %
gain_after_128 = partial(strategies.judge, "marginal-after-128")
JUDGES = (Curve.pareto_plateau, Curve.latency_keeps_rising, Curve.pareto_up_to_plateau)
NAMED = ((PLATEAU, 0.10), (LATENCY, 0.10), (PARETO, 0.03))


def rates_with_last_gain(gain: float) -> dict[int, float]:
    """A rise, and a last doubling that gains exactly so much."""
    return {1: 100.0, 2: 190.0, 4: 330.0, 8: 500.0, 16: 500.0 * (1 + gain)}


def states(judge, rates, runs=400, **noise) -> Counter:
    return Counter(judge(noisy_curve(rates, seed=seed, **noise)).state for seed in range(runs))


def test_a_planted_plateau_holds_and_tells_where():
    verdict = noisy_curve(FLAT, noise=0.002).pareto_plateau(tolerance=0.10)
    assert verdict and verdict.claim == "throughput-plateau" and verdict.subject == "opt-1.3b"
    assert tells(verdict.why, 256, "10 %")
    assert verdict.low < verdict.value < verdict.high < verdict.threshold == 0.10
    assert verdict.value == pytest.approx(law(512) / law(256) - 1, abs=0.005)
    assert verdict.n == 30 and len(verdict.records) == 30


@pytest.mark.parametrize(
    ("rates", "last", "facts"),
    [
        ({64: 200.0, 128: 280.0, 256: 290.0, 512: 249.0}, -0.14, (128, 256, 512)),
        ({64: 100.0, 128: 280.0, 256: 200.0}, -0.286, (128,)),
    ],
)
def test_a_throughput_that_falls_at_the_end_is_a_plateau_too(rates, last, facts):
    verdict = noisy_curve(rates, noise=0.002).pareto_plateau()
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(last, abs=0.01)
    assert tells(verdict.why, *facts, "10 %")


def test_no_plateau_fails_and_tells_what_ended_the_sweep():
    curve = noisy_curve(STEEP, noise=0.002)
    verdict = curve.pareto_plateau()
    assert not verdict and verdict.value == pytest.approx(law(64) / law(32) - 1, abs=0.01)
    assert tells(verdict.why, 64, "32 to 64", "10 %")
    assert tells(replace(curve, measurements=(measurement(),)).pareto_plateau().why, 227), "requests in the KV cache"
    assert tells(replace(curve, cut=((128, "over the KV cache"),)).pareto_plateau().why, 128, "over the KV cache")


def test_noise_across_the_bound_is_inconclusive():
    verdict = noisy_curve(rates_with_last_gain(0.10), noise=0.02, seed=1).pareto_plateau()
    assert verdict.state is State.INCONCLUSIVE and verdict.low < 0.10 < verdict.high
    with pytest.raises(Inconclusive):
        bool(verdict)


@pytest.mark.parametrize("repeats", [2, 3])
def test_at_the_bound_a_wrong_word_is_rare(repeats):
    """With a true gain at the bound, each of both sides may be said in 2.5 % of the cases."""
    seen = states(Curve.pareto_plateau, rates_with_last_gain(0.10), runs=200, repeats=repeats, noise=0.01)
    assert seen[State.PASSES] <= most(200, 0.025) and seen[State.FAILS] <= most(200, 0.025)


@pytest.mark.parametrize(
    ("rates", "noise", "state"),
    [
        (FLAT, 0.005, State.PASSES),
        (STEEP, 0.01, State.FAILS),
        (rates_with_last_gain(0.15), 0.01, State.FAILS),
        (rates_with_last_gain(0.05), 0.01, State.PASSES),
    ],
)
def test_one_per_cent_of_noise_does_not_hide_or_turn_a_clear_answer(rates, noise, state):
    seen = states(Curve.pareto_plateau, rates, runs=50, noise=noise)
    assert seen[state] + seen[State.INCONCLUSIVE] == 50 and seen[state] >= (47 if rates in (FLAT, STEEP) else 0)


def with_waits(curve: Curve, waits) -> Curve:
    """waits: of a point; None for those that it has."""
    points = [replace(p, e2e_repeats=waits(p) or p.e2e_repeats) for p in curve.points]
    return replace(curve, points=tuple(points))


@pytest.mark.parametrize(
    ("waits", "state", "value"),
    [
        (lambda p: None, State.PASSES, 2 / 1.081 - 1),
        (lambda p: (7.0, 7.01, 6.99), State.FAILS, 0.0),
        (lambda p: (9.0 - p.concurrency / 100,) * 3, State.FAILS, (9 - 5.12) / (9 - 2.56) - 1),
        (lambda p: (1.0 * p.concurrency, 5.0 * p.concurrency, 9.0), State.INCONCLUSIVE, None),
    ],
)
def test_latency_past_the_plateau(waits, state, value):
    verdict = with_waits(noisy_curve(FLAT), waits).latency_keeps_rising()
    assert verdict.state is state and tells(verdict.why, 256) and verdict.threshold == 0.10
    assert value is None or verdict.value == pytest.approx(value, abs=0.05)


@pytest.mark.parametrize(
    ("waits", "state"),
    [
        (lambda p: None, State.PASSES),
        (lambda p: (9.0, 9.01, 9.02) if p.concurrency == 4 else None, State.FAILS),
        (lambda p: (1.0, 5.0, 9.0), State.INCONCLUSIVE),
        # A host-bound engine: steps take the same time at every small batch, so only noise tells their E2E apart.
        (lambda p: tuple(1.17 * r / p.repeats[0] for r in p.repeats) if p.concurrency < 16 else None, State.PASSES),
    ],
)
def test_points_up_to_the_plateau_are_worth_having(waits, state):
    verdict = with_waits(noisy_curve(FLAT, noise=0.002), waits).pareto_up_to_plateau()
    assert verdict.state is state and verdict.threshold == 0.03
    if state is State.PASSES:
        assert tells(verdict.why, *BATCHES[:9]) and not tells(verdict.why, 512) and verdict.high < 0.03
    if state is State.FAILS:
        assert tells(verdict.why, 4) and verdict.low > 0.03 and not tells(verdict.why, 512)


def test_past_no_plateau_there_is_nothing_to_judge_but_each_load_before_it():
    curve = noisy_curve(STEEP)
    assert curve.latency_keeps_rising().state is State.INCONCLUSIVE
    verdict = curve.pareto_up_to_plateau()
    assert verdict.state is State.PASSES and tells(verdict.why, *BATCHES[:7])
    *others, last, largest = curve.points
    slow = replace(last, repeats=others[-2].repeats, e2e_repeats=largest.e2e_repeats)
    beaten = replace(curve, points=(*others, slow, largest))
    assert beaten.plateau().value is None and beaten.pareto_up_to_plateau().state is State.FAILS


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    ("curve", "facts"),
    [
        (Curve(subject="opt-1.3b"), (0, 3)),
        (noisy_curve({1: 1.0, 2: 1.9}), (2, 3)),
        (noisy_curve(FLAT, repeats=1), ("--slm-repeats 2",)),
        (without(noisy_curve(FLAT), 512), (512, "planted: invalid")),
        (replace(noisy_curve(FLAT), missing=(1024, 2048)), ("1024, 2048",)),
        (Curve(subject="x", points=(point(1, [1.0], []),)), (1,)),
    ],
)
def test_what_is_not_there_is_inconclusive_with_a_reason(judge, curve, facts):
    verdict = judge(curve)
    assert verdict.state is State.INCONCLUSIVE and verdict.value is None and tells(verdict.why, *facts)
    assert (verdict.claim, verdict.threshold) == dict(zip(JUDGES, NAMED))[judge]
    assert set(verdict.records) == {record for p in curve.valid for record in p.records}


@given(curves(), st.floats(-0.5, 2.0), st.integers(1, 2))
def test_an_invalid_point_of_the_last_doubling_makes_no_claim_green(curve, tolerance, back):
    spoilt = without(curve, curve.points[-min(back, len(curve.points))].concurrency)
    assert {judge(spoilt, tolerance).state for judge in JUDGES} == {State.INCONCLUSIVE}


def test_a_claim_depends_on_the_loads_that_it_reads_and_on_no_other():
    """The plateau begins at 256: what is before it is nothing to the doublings past it."""
    plateau, latency, pareto = (judge(without(noisy_curve(FLAT, noise=0.002), 16)) for judge in JUDGES)
    assert plateau.state is latency.state is State.PASSES
    assert pareto.state is State.INCONCLUSIVE and tells(pareto.why, 16)


@given(curves(repeats=1) | curves(repeats=2), st.floats(-0.5, 2.0))
def test_every_judgement_is_total(curve, tolerance):
    for judge in JUDGES:
        verdict = judge(curve, tolerance)
        assert verdict.why and verdict.subject == "opt-1.3b"
        assert verdict.state is State.INCONCLUSIVE or verdict.low <= verdict.value <= verdict.high


@given(curves(fewest=3), st.floats(0.01, 1.0), st.randoms(use_true_random=False))
def test_order_of_points_does_not_matter(curve, tolerance, chance: random.Random):
    shuffled = replace(curve, points=tuple(chance.sample(curve.points, len(curve.points))))
    for judge in JUDGES:
        first, second = judge(curve, tolerance), judge(shuffled, tolerance)
        assert (first.state, first.value) == (second.state, second.value)


def test_curve_of_measurements():
    made = [measurement(c, law(c), repeat=i, launch=f"launch-{i}") for c in (1, 2, 4, 8) for i in range(2)]
    curve = curve_of("opt-1.3b", made, planned=(1, 2, 4, 8, 16, 32), cut=((32, "over the KV cache"),))
    assert [p.concurrency for p in curve.points] == [1, 2, 4, 8] == [p.concurrency for p in curve.valid]
    assert curve.missing == (16,) and curve.cut == ((32, "over the KV cache"),)
    assert curve.kv_capacity == (1365 - 1) // 6 and set(curve.measurements) == set(made) == set(curve.trusted)
    assert curve.spec == made[0].spec and curve.environment == made[0].environment
    assert (
        curve.load.ramp_up == "staggered"
        and curve.workload == made[0].workload
        and curve.resolved == (made[0].resolved,) * 2
    )
    assert [g.end for g in curve.gains()] == [2, 4, 8] and len(curve.pareto_front()) == 4
    assert curve.plateau(3.0).value == 1


def test_curve_of_nothing():
    curve = curve_of("opt-1.3b", [measurement(load=OpenLoop(requests=8))], planned=(1, 2))
    assert curve.points == () and curve.missing == (1, 2) and curve.kv_capacity is None
    assert tells(obstacle(curve), "1, 2")


def test_preempted_measurements_do_not_make_a_plateau():
    made = [measurement(c, law(c), repeat=i, preempted=c == 32) for c in (8, 16, 32) for i in range(2)]
    verdict = curve_of("opt-1.3b", made).pareto_plateau(tolerance=5.0)
    assert verdict.state is State.INCONCLUSIVE and tells(verdict.why, 32)
    again = [measurement(32, law(32), repeat=i) for i in (2, 3)]
    assert curve_of("opt-1.3b", [*made, *again]).pareto_plateau(tolerance=5.0), "measured again, it is valid"


@pytest.mark.parametrize(
    "other",
    [
        measurement(2, 190.0, model="facebook/opt-2.7b"),
        *(
            measurement(2, load=ClosedLoop(2, **facts))
            for facts in ({"ramp_up": "burst"}, {"window_s": 9.0}, {"settle_lifetimes": 0.0})
        ),
    ],
)
def test_different_engines_or_ways_of_loading_are_not_one_curve(other):
    with refused("2 different"):
        curve_of("opt-1.3b", [measurement(1, 100.0), other])


def test_a_curve_does_not_show_its_measurements():
    shown = repr(curve_of("opt-1.3b", [measurement(1, 100.0)]))
    assert "Measurement(" not in shown and "Run(" not in shown and len(shown) < 1700


def swept(*loads: int, repeats: int = 2, adaptive: float | None = 0.10) -> Curve:
    """An adaptive sweep of BATCHES that has measured some of them."""
    made = [measurement(c, FLAT[c] * (1 + 0.001 * i), repeat=i) for c in loads for i in range(repeats)]
    return curve_of("opt-1.3b", made, planned=BATCHES, adaptive=adaptive)


def test_loads_that_an_adaptive_sweep_does_not_need_are_not_missing():
    curve = swept(1, 128, 256, 512)
    assert curve.missing == () and curve.unneeded == (2, 4, 8, 16, 32, 64) and obstacle(curve) is None
    assert [p.concurrency for p in curve.predictions] == [2, 4, 8, 16, 32, 64]
    assert curve.predictions[-1].tokens_per_s.value == pytest.approx(FLAT[64], rel=0.01)
    assert tells(curve.pareto_plateau().why, "1, 128, 256, 512"), "judged at these"


def test_as_long_as_a_load_is_wanted_an_adaptive_sweep_decides_nothing():
    curve = swept(1, 128, 512)
    assert curve.missing == (256,) and curve.unneeded == () == curve.predictions
    assert all(judge(curve).state is State.INCONCLUSIVE and tells(judge(curve).why, 256) for judge in JUDGES)
    assert swept(1, 128, 256, 512, adaptive=None).missing == (2, 4, 8, 16, 32, 64), "a full sweep misses them all"


def test_an_adaptive_sweep_is_one_however_few_its_points():
    assert is_sweep(swept(1)) and not is_sweep(curve_of("x", [measurement(1)], planned=[1]))


def test_an_adaptive_sweep_that_is_inconclusive_tells_how_to_go_on():
    curve = swept(1, 128, 256, 512)
    rates = {p.concurrency: (0.9 * FLAT[p.concurrency], FLAT[p.concurrency]) for p in curve.points}
    verdict = replace(curve, points=tuple(point(*each) for each in rates.items())).pareto_plateau()
    assert verdict.state is State.INCONCLUSIVE and verdict.again == (256, 512)
    assert tells(verdict.remedy, "--slm-sweep full", "--slm-resume")


@pytest.mark.parametrize(("spread", "enough"), [(0.02, True), (0.3, False)])
def test_what_is_inconclusive_tells_about_how_long_it_would_take(spread, enough):
    """Intervals shrink with the root of the repeats: after so many more they would end at the threshold."""
    rates = {64: 100.0, 128: 150.0, 256: 160.0}
    made = [
        replace(m, resolved=replace(m.resolved, ready_s=20.0))
        for load, rate in rates.items()
        for i, by in enumerate((1 - spread, 1 + spread))
        for m in [measurement(load, rate * by, repeat=i)]
    ]
    curve = curve_of("opt-1.3b", made)
    verdict = curve.pareto_plateau()
    assert verdict.state is State.INCONCLUSIVE and verdict.again == (128, 256)
    assert tells(verdict.remedy, "128 and 256") and ("--slm-resume" in verdict.remedy) is enough
    if enough:
        reach, off = (verdict.high - verdict.low) / 2 * 2.2 / 3.18245, abs(verdict.value - 0.10)
        more = max(1, math.ceil(2 * (reach / off) ** 2) - 2)
        seconds = 20 + more * sum(curve.load.duration_s(fmean(p.e2e_repeats)) for p in curve.points[1:])
        assert tells(verdict.remedy, f"{seconds:.0f} s")


@pytest.mark.parametrize(
    ("at_256", "state", "gain"),
    [
        ((410.0, 411.0), State.PASSES, 0.025),
        ((350.0, 351.0), State.PASSES, -0.125),
        ((500.0, 501.0), State.FAILS, 0.25),
        ((400.0, 500.0), State.INCONCLUSIVE, 0.124),
    ],
)
def test_the_gain_after_128_and_the_loads_that_would_decide_it(at_256, state, gain):
    rates = {64: (300.0, 301.0), 128: (400.0, 401.0), 256: at_256}
    verdict = gain_after_128(Curve(subject="opt-1.3b", points=tuple(point(n, each) for n, each in rates.items())))
    assert verdict.state is state and verdict.value == pytest.approx(gain, abs=0.001)
    assert tells(verdict.why, "128 to 256", "10 %")
    assert verdict.again == ((128, 256) if state is State.INCONCLUSIVE else ()) and bool(verdict.remedy) is bool(
        verdict.again
    )
    between = gain_after_128(noisy_curve({64: 1.0, 256: 2.0}))
    assert between.state is State.INCONCLUSIVE and tells(between.why, 128)


# What tells curves of one model apart


def changed(part: str = "spec", **facts: object) -> Curve:
    """The curve of two loads with another fact in a part of its measurements."""
    made = [measurement(c, law(c)) for c in (1, 2)]
    return curve_of("opt-1.3b", [replace(m, **{part: replace(getattr(m, part), **facts)}) for m in made])


@pytest.mark.parametrize(
    ("other", "its", "ours"),
    [
        (changed("load", ramp_up="burst"), "ramp-up burst", "ramp-up staggered"),
        (changed("load", window_s=9.0), "window 9 s", "window 5 s"),
        (changed("load", settle_lifetimes=0.0), "warm-up 0", "warm-up 1"),
        (changed("environment", vllm="0.27.0"), "vLLM 0.27.0", "vLLM 0.26.0"),
        (changed("environment", gpu_name="NVIDIA H100"), "NVIDIA H100", "NVIDIA H200"),
        (changed(interface="server"), "server interface", "engine interface"),
        (changed(tensor_parallel_size=2, kv_cache_bytes=1 << 40), "TP 2", "TP 1"),
        (changed(max_num_seqs=64), "max_num_seqs 64", "max_num_seqs 1024"),
        (changed(enforce_eager=True), "enforce_eager", "no enforce_eager"),
        (changed(kv_cache_bytes=3 << 30), "KV cache 3 GiB", None),
        (changed(extra=(("block_size", 32),)), "block_size 32", "block_size unset"),
        (changed(env=(("VLLM_X", "1"),)), "VLLM_X 1", "VLLM_X unset"),
        (changed("workload", hash="fedcba987654"), "workload fedcba", "workload 012345"),
    ],
)
def test_curves_of_one_model_are_told_apart_by_what_differs_and_by_nothing_else(other, its, ours):
    mine, theirs = labels([changed(), other])
    assert theirs == f"opt-1.3b, {its}" and mine != theirs
    assert ours is None or mine == f"opt-1.3b, {ours}"
    small = curve_of("opt-125m", [measurement(1, model="opt-125m")])
    assert labels([changed(), small]) == ["opt-1.3b", "opt-125m"], "models are told apart by their names"


@pytest.mark.parametrize("count", [1, 4])
def test_front_ends_are_told_if_there_are_several(count):
    spec = EngineSpec("opt-1.3b", interface="server", extra=(("api_server_count", count),))
    assert (tells(front_ends(spec), count), bool(front_ends(spec))) == (count > 1, count > 1) and front_ends(None) == ""
