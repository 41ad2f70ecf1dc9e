from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import curves, law, measurement, noisy_curve, point, without

from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, is_sweep, obstacle
from pytest_slmserve.analysis.verdict import Inconclusive, State
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FLAT = {b: law(b) for b in BATCHES}  # the last doubling gains 8.1 %
STEEP = {b: law(b) for b in BATCHES[:7]}  # the last doubling gains 41 %
gain_after_128 = partial(strategies.judge, "marginal-after-128")
JUDGES = (Curve.pareto_plateau, Curve.latency_keeps_rising, Curve.pareto_up_to_plateau)


def rates_with_last_gain(gain: float) -> dict[int, float]:
    """A rise, and a last doubling that gains exactly so much."""
    return {1: 100.0, 2: 190.0, 4: 330.0, 8: 500.0, 16: 500.0 * (1 + gain)}


def states(judge, rates, runs=400, **noise) -> Counter:
    return Counter(judge(noisy_curve(rates, seed=seed, **noise)).state for seed in range(runs))


def test_a_planted_plateau_holds_and_says_where():
    verdict = noisy_curve(FLAT, noise=0.002).pareto_plateau(tolerance=0.10)
    assert verdict and verdict.claim == "throughput-plateau" and verdict.subject == "opt-1.3b"
    assert verdict.why.startswith("plateau from concurrency 256 (95 %: 256 to 256): later doublings gain at most 8.")
    assert verdict.why.endswith("(threshold 10 %)")
    assert verdict.low < verdict.value < verdict.high < verdict.threshold == 0.10
    assert verdict.n == 30 and len(verdict.records) == 30


def test_a_throughput_that_falls_at_the_end_is_a_plateau_too():
    verdict = noisy_curve({64: 200.0, 128: 280.0, 256: 290.0, 512: 249.0}, noise=0.002).pareto_plateau()
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(-0.14, abs=0.01)
    only_falling = noisy_curve({64: 100.0, 128: 280.0, 256: 200.0}, noise=0.002).pareto_plateau()
    assert "(threshold 10 %); from 256 to 512 throughput falls by 14" in verdict.why
    assert "plateau from concurrency 128" in only_falling.why and "lose at least 28" in only_falling.why


def test_no_plateau_fails_and_says_what_ended_the_sweep():
    curve = noisy_curve(STEEP, noise=0.002)
    verdict = curve.pareto_plateau()
    assert not verdict and verdict.why.startswith(
        "no plateau up to concurrency 64: the last doubling (32 to 64) gains 41"
    )
    held = replace(curve, measurements=(measurement(),))
    assert "the KV cache holds 227 requests" in held.pareto_plateau().why
    assert "128 was cut: over the KV cache" in replace(curve, cut=((128, "over the KV cache"),)).pareto_plateau().why


def test_noise_across_the_bound_is_inconclusive():
    verdict = noisy_curve(rates_with_last_gain(0.10), noise=0.02, seed=1).pareto_plateau()
    assert verdict.state is State.INCONCLUSIVE and "too noisy to tell" in verdict.why
    assert verdict.low < 0.10 < verdict.high
    with pytest.raises(Inconclusive, match="too noisy"):
        bool(verdict)


@pytest.mark.parametrize("repeats", [2, 3])
def test_at_the_bound_a_wrong_word_is_rare(repeats):
    """With a true gain at the bound, each of both sides may be said in 2.5 % of the cases."""
    seen = states(Curve.pareto_plateau, rates_with_last_gain(0.10), runs=1000, repeats=repeats, noise=0.01)
    assert seen[State.PASSES] < 42 and seen[State.FAILS] < 42


def test_one_per_cent_of_noise_does_not_hide_a_clear_answer():
    assert states(Curve.pareto_plateau, FLAT, runs=200, noise=0.005)[State.PASSES] > 190
    assert states(Curve.pareto_plateau, STEEP, runs=200)[State.FAILS] == 200
    assert states(Curve.pareto_plateau, rates_with_last_gain(0.15), noise=0.01)[State.PASSES] == 0
    assert states(Curve.pareto_plateau, rates_with_last_gain(0.05), noise=0.01)[State.FAILS] == 0


def test_latency_rises_past_the_plateau():
    verdict = noisy_curve(FLAT).latency_keeps_rising()
    assert verdict and verdict.value == pytest.approx(2 / 1.081 - 1, abs=0.05)
    assert "past concurrency 256 each doubling should raise the mean E2E by 10 %" in verdict.why


def test_latency_that_stays_fails():
    curve = noisy_curve(FLAT)
    flat = tuple(replace(p, e2e_repeats=(7.0, 7.01, 6.99)) for p in curve.points)
    verdict = replace(curve, points=flat).latency_keeps_rising()
    assert verdict.state is State.FAILS and verdict.value == pytest.approx(0, abs=0.01)


def test_latency_in_noise_is_inconclusive():
    curve = noisy_curve(FLAT)
    rough = tuple(replace(p, e2e_repeats=(1.0 * p.concurrency, 5.0 * p.concurrency, 9.0)) for p in curve.points)
    assert replace(curve, points=rough).latency_keeps_rising().state is State.INCONCLUSIVE


def test_points_up_to_the_plateau_are_worth_having():
    verdict = noisy_curve(FLAT, noise=0.005).pareto_up_to_plateau()
    assert verdict and verdict.why.endswith("than concurrency 1, 2, 4, 8, 16, 32, 64, 128, 256")
    assert verdict.high < verdict.threshold == 0.03


def test_a_beaten_point_fails():
    curve = noisy_curve(FLAT, noise=0.002)
    slow = tuple(replace(p, e2e_repeats=(9.0, 9.01, 9.02)) if p.concurrency == 4 else p for p in curve.points)
    verdict = replace(curve, points=slow).pareto_up_to_plateau()
    assert verdict.state is State.FAILS and "beats 4 in both throughput and mean E2E" in verdict.why
    assert verdict.low > 0.03


def test_equal_latencies_do_not_beat_each_other():
    """A host-bound engine: steps take the same time at every small batch, so only noise tells their E2E apart."""
    curve = noisy_curve({b: law(b, b_half=45) for b in BATCHES}, noise=0.002)
    level = tuple(
        replace(p, e2e_repeats=tuple(1.17 * r / p.repeats[0] for r in p.repeats)) if p.concurrency < 16 else p
        for p in curve.points
    )
    assert replace(curve, points=level).pareto_up_to_plateau().state is State.PASSES


def test_an_advantage_in_noise_is_inconclusive():
    curve = noisy_curve(FLAT)
    rough = tuple(replace(p, e2e_repeats=(1.0, 5.0, 9.0)) for p in curve.points)
    assert replace(curve, points=rough).pareto_up_to_plateau().state is State.INCONCLUSIVE


def test_past_no_plateau_there_is_nothing_to_judge():
    verdict = noisy_curve(STEEP).latency_keeps_rising()
    assert verdict.state is State.INCONCLUSIVE and "no plateau within the points measured" in verdict.why


def test_before_a_plateau_that_is_not_reached_every_load_has_to_be_pareto_optimal():
    curve = noisy_curve(STEEP)
    verdict, loads = curve.pareto_up_to_plateau(), [p.concurrency for p in curve.points]
    assert verdict.state is State.PASSES and verdict.why.endswith(f" than concurrency {', '.join(map(str, loads))}")
    *others, last, largest = curve.points
    slow = replace(last, repeats=others[-2].repeats, e2e_repeats=largest.e2e_repeats)
    beaten = replace(curve, points=(*others, slow, largest))
    assert beaten.plateau().value is None and beaten.pareto_up_to_plateau().state is State.FAILS


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    ("curve", "why"),
    [
        (Curve(subject="opt-1.3b"), "0 valid points, 3 are needed"),
        (noisy_curve({1: 1.0, 2: 1.9}), "2 valid points"),
        (noisy_curve(FLAT, repeats=1), "noise unknown: one repeat of each point; --slm-repeats 2"),
        (without(noisy_curve(FLAT), 512), "invalid at concurrency 512 (planted: invalid)"),
        (replace(noisy_curve(FLAT), missing=(1024, 2048)), "not measured at concurrency 1024, 2048"),
        (Curve(subject="x", points=(point(1, [1.0], []),)), "it has no valid repeat"),
    ],
)
def test_what_is_not_there_is_inconclusive_with_a_reason(judge, curve, why):
    verdict = judge(curve)
    assert verdict.state is State.INCONCLUSIVE and why in verdict.why and verdict.value is None


@given(curves(), st.floats(-0.5, 2.0), st.integers(1, 2))
def test_an_invalid_point_of_the_last_doubling_makes_no_claim_green(curve, tolerance, back):
    spoilt = without(curve, curve.points[-min(back, len(curve.points))].concurrency)
    assert {judge(spoilt, tolerance).state for judge in JUDGES} == {State.INCONCLUSIVE}


def test_a_claim_depends_on_the_loads_that_it_reads_and_on_no_other():
    """The plateau begins at 256: what is before it is nothing to the doublings past it."""
    plateau, latency, pareto = (judge(without(noisy_curve(FLAT, noise=0.002), 16)) for judge in JUDGES)
    assert plateau.state is latency.state is State.PASSES
    assert pareto.state is State.INCONCLUSIVE and pareto.why.startswith("invalid at concurrency 16")


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
    assert obstacle(curve) == "not measured at concurrency 1, 2"


def test_preempted_measurements_do_not_make_a_plateau():
    made = [measurement(c, law(c), repeat=i, preempted=c == 32) for c in (8, 16, 32) for i in range(2)]
    verdict = curve_of("opt-1.3b", made).pareto_plateau(tolerance=5.0)
    assert (
        verdict.state is State.INCONCLUSIVE and "invalid at concurrency 32 (1 preemptions in the window" in verdict.why
    )
    again = [measurement(32, law(32), repeat=i) for i in (2, 3)]
    assert curve_of("opt-1.3b", [*made, *again]).pareto_plateau(tolerance=5.0), "measured again, it is valid"


def test_different_engines_are_not_one_curve():
    made = [measurement(1, 100.0), measurement(2, 190.0, model="facebook/opt-2.7b")]
    with pytest.raises(BadUsage, match="2 different engines"):
        curve_of("opt-1.3b", made)


@pytest.mark.parametrize("other", [{"ramp_up": "burst"}, {"window_s": 9.0}, {"settle_lifetimes": 0.0}])
def test_different_ways_of_loading_are_not_one_curve(other):
    made = [measurement(c, 100.0 * c, load=load) for c in (1, 2) for load in (ClosedLoop(c), ClosedLoop(c, **other))]
    with pytest.raises(BadUsage, match="2 different"):
        curve_of("opt-1.3b", made)


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
    verdict = curve.pareto_plateau()
    assert verdict.why.startswith("plateau from concurrency 256")
    assert verdict.why.endswith("(adaptive sweep: judged at concurrency 1, 128, 256, 512), of one launch")


def test_as_long_as_a_load_is_wanted_an_adaptive_sweep_decides_nothing():
    curve = swept(1, 128, 512)
    assert curve.missing == (256,) and curve.unneeded == () == curve.predictions
    assert all(judge(curve).why == "not measured at concurrency 256" for judge in JUDGES)
    assert swept(1, 128, 256, 512, adaptive=None).missing == (2, 4, 8, 16, 32, 64), "a full sweep misses them all"


def test_an_adaptive_sweep_is_one_however_few_its_points():
    assert is_sweep(swept(1)) and not is_sweep(curve_of("x", [measurement(1)], planned=[1]))


def test_an_adaptive_sweep_that_is_inconclusive_says_how_to_go_on():
    curve = swept(1, 128, 256, 512)
    noisy = replace(
        curve,
        points=tuple(point(p.concurrency, (0.9 * FLAT[p.concurrency], FLAT[p.concurrency])) for p in curve.points),
    )
    verdict = noisy.pareto_plateau()
    assert "too noisy to tell" in verdict.why and verdict.again == (256, 512)
    assert verdict.remedy == "--slm-sweep full with --slm-resume measures the rest"


@pytest.mark.parametrize(
    ("at_256", "state", "why"),
    [
        ((410.0, 411.0), State.PASSES, "throughput changes by 2.5 %"),
        ((350.0, 351.0), State.PASSES, "throughput changes by -12.5 %"),
        ((500.0, 501.0), State.FAILS, "throughput changes by 25"),
        ((400.0, 500.0), State.INCONCLUSIVE, "throughput changes by 12.4 %"),
    ],
)
def test_the_gain_after_128_and_the_loads_that_would_decide_it(at_256, state, why):
    rates = {64: (300.0, 301.0), 128: (400.0, 401.0), 256: at_256}
    verdict = gain_after_128(Curve(subject="opt-1.3b", points=tuple(point(n, each) for n, each in rates.items())))
    assert verdict.state is state and verdict.why.startswith(why)
    assert "from concurrency 128 to 256 (threshold 10 %)" in verdict.why
    undecided = state is State.INCONCLUSIVE
    assert (verdict.again, verdict.remedy) == (
        ((128, 256), "more repeats at concurrency 128 and 256") if undecided else ((), "")
    )


def test_a_gain_between_loads_that_were_not_measured_is_not_told():
    assert gain_after_128(noisy_curve({64: 1.0, 256: 2.0})).why == "not measured at concurrency 128 and twice as many"
