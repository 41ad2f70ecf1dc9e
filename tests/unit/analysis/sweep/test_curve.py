"""The claims of one sweep: what was planted passes or fails, noise and gaps make it inconclusive and never green,
and a claim depends on the loads that it reads and on no other."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
import strategies
from facts import tells
from hypothesis import given, strategies as st
from refusals import refused
from strategies import FAILS, INCONCLUSIVE, PASSES, curves, law, measurement, noisy_curve, point, without

from pytest_slmserve.analysis.points import Summary, busy_rate
from pytest_slmserve.analysis.sweep import curve as of_curve
from pytest_slmserve.analysis.sweep.curve import GPU_PLATEAU, LATENCY, PARETO, PLATEAU, Curve, curve_of, labels
from pytest_slmserve.schema.specs import Adapters, ClosedLoop, EngineSpec, OpenLoop

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FLAT = {b: law(b) for b in BATCHES}  # the last doubling gains 8.1%
STEEP = {b: law(b) for b in BATCHES[:7]}  # the last doubling gains 41%
GPU, WAITS = {32: 10_000.0, 64: 15_000.0, 128: 15_300.0}, {32: 0.3, 64: 0.4, 128: 0.6}
gain_after_128 = partial(strategies.judge, "marginal-after-128")
REPEATED = ("repeats", "e2e_repeats", "each")
ADAPTED = replace(measurement(1).workload.spec, adapters=Adapters(4, 8, "zipf"))
JUDGES = (Curve.pareto_plateau, Curve.latency_keeps_rising, Curve.pareto_up_to_plateau)
NAMED = dict(zip(JUDGES, ((PLATEAU, 0.10), (LATENCY, 0.10), (PARETO, 0.03))))


def with_last_gain(gain):
    """Rates that rise, and whose last doubling gains exactly so much."""
    return {1: 100.0, 2: 190.0, 4: 330.0, 8: 500.0, 16: 500.0 * (1 + gain)}


@pytest.mark.parametrize(("rates", "state", "value", "facts"), [
    (FLAT, PASSES, law(512) / law(256) - 1, (256,)),
    ({64: 200.0, 128: 280.0, 256: 290.0, 512: 249.0}, PASSES, -0.14, (128, 256, 512)),
    ({64: 100.0, 128: 280.0, 256: 200.0}, PASSES, -0.286, (128,)),
    (STEEP, FAILS, law(64) / law(32) - 1, (64, "32 to 64")),
])  # fmt: skip
def test_planted_plateau_is_found(rates, state, value, facts):
    verdict = noisy_curve(rates, noise=0.002).pareto_plateau()
    assert (verdict.state, verdict.claim, verdict.subject) == (state, "throughput-plateau", "opt-1.3b")
    assert verdict.value == pytest.approx(value, abs=0.01) and tells(verdict.why, *facts, "10%")
    assert verdict.low < verdict.value < verdict.high and verdict.threshold == 0.10
    assert verdict.n == len(verdict.records) == 3 * len(rates)


@pytest.mark.parametrize(("loads", "gain", "state"), [
    ((1, 8, 64, 128), 0.13, FAILS), ((1, 8, 64, 256), 0.13, INCONCLUSIVE), ((1, 8, 64, 129), 0.13, INCONCLUSIVE),
    ((1, 8, 64, 1024), 0.13, INCONCLUSIVE), ((1, 8, 64, 256), 0.05, PASSES), ((1, 8, 64, 96), 0.13, FAILS),
])  # fmt: skip
def test_wide_load_gap_refutes_nothing(loads, gain, state):
    """A doubling in it may gain more than the last one does, which was not measured."""
    *_, before, last = loads
    rates = {load: 100.0 * load**0.5 for load in loads[:-1]}
    rates[last] = rates[before] * (1 + gain) ** math.log2(last / before)
    verdict = noisy_curve(rates, noise=0.0005).pareto_plateau()
    assert verdict.state is state and verdict.value == pytest.approx(gain, abs=0.005)
    missing = state is INCONCLUSIVE
    assert (f"{last / 2:g}" in verdict.remedy) is missing and verdict.again == (), "repeats would decide nothing"


def test_missing_plateau_explains_sweep_end():
    curve = noisy_curve(STEEP, noise=0.002)
    assert tells(replace(curve, measurements=(measurement(),)).pareto_plateau().why, 227), "requests in the KV cache"
    assert tells(replace(curve, cut=((128, "over the KV cache"),)).pareto_plateau().why, 128, "over the KV cache")
    curve = noisy_curve(STEEP)
    verdict = curve.pareto_up_to_plateau()
    assert curve.latency_keeps_rising().state is INCONCLUSIVE
    assert verdict.state is PASSES and tells(verdict.why, *BATCHES[:7])
    *others, last, largest = curve.points
    slow = replace(last, repeats=others[-2].repeats, e2e_repeats=largest.e2e_repeats)
    beaten = replace(curve, points=(*others, slow, largest))
    assert beaten.plateau().value is None and beaten.pareto_up_to_plateau().state is FAILS
    # The plateau begins at 256: what is before it is nothing to the doublings past it.
    plateau, latency, pareto = (judge(without(noisy_curve(FLAT, noise=0.002), 16)) for judge in JUDGES)
    assert (plateau.state, latency.state, pareto.state) == (PASSES, PASSES, INCONCLUSIVE) and tells(pareto.why, 16)


@pytest.mark.parametrize(("rates", "noise", "state", "least"), [
    (FLAT, 0.005, PASSES, 47), (STEEP, 0.01, FAILS, 47),
    (with_last_gain(0.15), 0.01, FAILS, 0), (with_last_gain(0.05), 0.01, PASSES, 0),
])  # fmt: skip
def test_small_noise_keeps_plateau_verdict(rates, noise, state, least):
    seen = Counter(noisy_curve(rates, seed=seed, noise=noise).pareto_plateau().state for seed in range(50))
    assert seen[state] + seen[INCONCLUSIVE] == 50 and seen[state] >= least


def on_a_host(of_gpu, busy, noise=0.0005, repeats=3):
    """A curve of tokens per busy second, and of the share of the time in which a kernel runs, by load."""
    curve = noisy_curve({load: rate * busy[load] for load, rate in of_gpu.items()}, noise=noise, repeats=repeats)

    def seen(p):
        shares = [busy[p.concurrency] * (1 + 0.1 * (i - 1)) for i in range(repeats)]
        rates = [rate / busy[p.concurrency] for rate in p.repeats]
        each = (Summary(tokens_per_busy_s=r, engine_active=s) for r, s in zip(rates, shares, strict=True))
        return replace(p, each=tuple(each), engine_active=busy[p.concurrency])

    return replace(curve, points=tuple(map(seen, curve.points)))


def test_gain_has_gpu_host_factors():
    curve = on_a_host(GPU, WAITS)
    assert curve.factors() == {64: pytest.approx((0.5, 1 / 3), abs=2e-3), 128: pytest.approx((0.02, 0.5), abs=2e-3)}
    seen, of_gpu = curve.pareto_plateau(), curve.pareto_plateau(figure=busy_rate)
    assert (seen.state, of_gpu.state) == (FAILS, PASSES) and (seen.claim, of_gpu.claim) == (PLATEAU, GPU_PLATEAU)
    assert of_gpu.value == pytest.approx(0.02, abs=2e-3) and tells(of_gpu.why, 64, "kernel")
    assert "+2% GPU, +50% host" in seen.why and "GPU," not in of_gpu.why
    # Rounds on a host whose speed changes: what is seen is too noisy to tell, what the GPU does is not.
    curve = on_a_host(GPU, WAITS, noise=0.01)
    noisy = replace(curve, points=tuple(replace(p, repeats=(0.7 * p.repeats[0], *p.repeats[1:])) for p in curve.points))
    assert noisy.pareto_plateau().state is INCONCLUSIVE
    assert noisy.pareto_plateau(figure=busy_rate).state is PASSES
    # A tenth of the change in the logarithm of the busy share, to the side of the load at which it rests more.
    for before in (0.2, 0.6, 0.9):
        same, changed = ([*on_a_host(GPU, {**WAITS, 64: b, 128: 0.6}).gains(busy_rate)][-1] for b in (0.6, before))
        by = math.exp(0.1 * math.log(0.6 / before))
        assert 1 + changed.high == pytest.approx((1 + same.high) * max(1, by), rel=1e-9)
        assert 1 + changed.low == pytest.approx((1 + same.low) * min(1, by), rel=1e-9)
    for before, enough in ((0.6, True), (0.7, True), (0.5, False)):
        curve = on_a_host({**GPU, 128: GPU[64] * 1.095}, {**WAITS, 64: before, 128: 0.6}, noise=0.01)
        verdict = curve.pareto_plateau(figure=busy_rate)
        assert verdict.state is INCONCLUSIVE and (verdict.more_repeats is not None) is enough
        assert ("too near" in verdict.remedy) is not enough
    for load in (64, 128):

        def blind(p, load=load):
            unseen = tuple(replace(s, tokens_per_busy_s=None) for s in p.each)
            return replace(p, each=unseen) if p.concurrency == load else p

        curve = on_a_host(GPU, WAITS)
        verdict = replace(curve, points=tuple(map(blind, curve.points))).pareto_plateau(figure=busy_rate)
        assert (verdict.state, verdict.why, verdict.value) == (INCONCLUSIVE, of_curve.NO_BUSY, None)
        assert noisy_curve(GPU).factors() == {} and "GPU" not in noisy_curve(GPU).pareto_plateau().why


@pytest.mark.parametrize("judge", JUDGES)
def test_two_repeated_loads_decide_nothing(judge):
    """They may agree by chance. What the GPU does is decided; so is an adaptive sweep, which measures what it needs."""
    whole = on_a_host(FLAT, dict.fromkeys(FLAT, 0.5), repeats=3)
    once = [replace(p, **{name: getattr(p, name)[:1] for name in REPEATED}) for p in whole.points[:-2]]
    few = replace(whole, looks=(2, 3), points=(*once, *whole.points[-2:]))
    assert judge(few).state is INCONCLUSIVE and "--slm-repeats 2" in judge(few).remedy and judge(few).again == ()
    assert judge(few).value is not None, "what it is, is told"
    third = replace(few, points=(*once[:-1], *whole.points[-3:]))
    for decided in (third, replace(few, adaptive=True), replace(few, looks=(2,)), replace(whole, looks=(2, 3))):
        assert judge(decided).state is not INCONCLUSIVE
    assert few.pareto_plateau(figure=busy_rate).state is PASSES


def with_waits(curve, waits):
    """waits: of a point; None for those that it has."""
    return replace(curve, points=tuple(replace(p, e2e_repeats=waits(p) or p.e2e_repeats) for p in curve.points))


@pytest.mark.parametrize(("waits", "state", "value"), [
    (lambda p: None, PASSES, 2 / 1.081 - 1), (lambda p: (7.0, 7.01, 6.99), FAILS, 0.0),
    (lambda p: (9.0 - p.concurrency / 100,) * 3, FAILS, (9 - 5.12) / (9 - 2.56) - 1),
    (lambda p: (1.0 * p.concurrency, 5.0 * p.concurrency, 9.0), INCONCLUSIVE, None),
])  # fmt: skip
def test_latency_rises_past_plateau(waits, state, value):
    verdict = with_waits(noisy_curve(FLAT), waits).latency_keeps_rising()
    assert (verdict.state, verdict.threshold) == (state, 0.10) and tells(verdict.why, 256)
    assert value is None or verdict.value == pytest.approx(value, abs=0.05)


@pytest.mark.parametrize(("waits", "state"), [
    (lambda p: None, PASSES),
    (lambda p: (9.0, 9.01, 9.02) if p.concurrency == 4 else None, FAILS),
    (lambda p: (1.0, 5.0, 9.0), INCONCLUSIVE),
    # A host-bound engine: steps take the same time at every small batch, so only noise tells their E2E apart.
    (lambda p: tuple(1.17 * r / p.repeats[0] for r in p.repeats) if p.concurrency < 16 else None, PASSES),
])  # fmt: skip
def test_points_before_plateau_are_worthwhile(waits, state):
    verdict = with_waits(noisy_curve(FLAT, noise=0.002), waits).pareto_up_to_plateau()
    assert (verdict.state, verdict.threshold) == (state, 0.03)
    if state is PASSES:
        assert tells(verdict.why, *BATCHES[:9]) and not tells(verdict.why, 512) and verdict.high < 0.03
    if state is FAILS:
        assert tells(verdict.why, 4) and verdict.low > 0.03 and not tells(verdict.why, 512)


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("curve", "facts"), [
    (Curve(subject="opt-1.3b"), (0, 3)), (noisy_curve({1: 1.0, 2: 1.9}), (2, 3)),
    (noisy_curve(FLAT, repeats=1), ("--slm-repeats 2",)),
    (without(noisy_curve(FLAT), 512), (512, "planted: invalid")),
    (replace(noisy_curve(FLAT), missing=(1024, 2048)), ("1024, 2048",)),
    (Curve(subject="x", points=(point(1, [1.0], []),)), (1,)),
])  # fmt: skip
def test_incomplete_sweep_is_inconclusive(judge, curve, facts):
    verdict = judge(curve)
    assert (verdict.state, verdict.value, verdict.claim, verdict.threshold) == (INCONCLUSIVE, None, *NAMED[judge])
    assert tells(verdict.why, *facts) and set(verdict.records) == {record for p in curve.valid for record in p.records}


@given(curves(repeats=1) | curves(), st.floats(-0.5, 2.0), st.integers(1, 2), st.randoms(use_true_random=False))
def test_invalid_last_doubling_never_passes(curve, most, back, chance):
    shuffled = replace(curve, points=tuple(chance.sample(curve.points, len(curve.points))))
    spoilt = without(curve, curve.points[-min(back, len(curve.points))].concurrency)
    for judge in JUDGES:
        verdict, other = judge(curve, most), judge(shuffled, most)
        assert verdict.why and (verdict.state, verdict.value) == (other.state, other.value)
        assert verdict.state is INCONCLUSIVE or verdict.low <= verdict.value <= verdict.high
        assert judge(spoilt, most).state is INCONCLUSIVE


def test_preempted_loads_form_no_plateau():
    made = [measurement(c, law(c), repeat=i, launch=f"launch-{i}") for c in (1, 2, 4, 8) for i in range(2)]
    curve = curve_of("opt-1.3b", made, planned=(1, 2, 4, 8, 16, 32), cut=((32, "over the KV cache"),))
    assert [p.concurrency for p in curve.points] == [1, 2, 4, 8] == [p.concurrency for p in curve.valid]
    assert (curve.missing, curve.cut, curve.kv_capacity) == ((16,), ((32, "over the KV cache"),), (1365 - 1) // 6)
    assert set(curve.measurements) == set(made) == set(curve.trusted)
    first = made[0]
    assert (curve.spec, curve.environment, curve.workload) == (first.spec, first.environment, first.workload)
    assert (curve.load.ramp_up, curve.resolved) == ("staggered", (first.resolved,) * 2)
    assert ([g.end for g in curve.gains()], len(curve.pareto_front())) == ([2, 4, 8], 4)
    assert curve.plateau(3.0).value == 1
    assert not {word for word in ("Measurement(", "Run(") if word in repr(curve)}
    nothing = curve_of("opt-1.3b", [measurement(load=OpenLoop(requests=8))], planned=(1, 2))
    assert (nothing.points, nothing.missing, nothing.kv_capacity) == ((), (1, 2), None)
    assert tells(of_curve.obstacle(nothing), "1, 2")
    made = [measurement(c, law(c), repeat=i, preempted=c == 32) for c in (8, 16, 32) for i in range(2)]
    verdict = curve_of("opt-1.3b", made).pareto_plateau(tolerance=5.0)
    assert verdict.state is INCONCLUSIVE and tells(verdict.why, 32)
    again = [measurement(32, law(32), repeat=i) for i in (2, 3)]
    assert curve_of("opt-1.3b", [*made, *again]).pareto_plateau(tolerance=5.0), "measured again, it is valid"


@pytest.mark.parametrize("other", [{"model": "opt-2.7b"}, *({"load": ClosedLoop(2, **facts)} for facts in (
    {"ramp_up": "burst"}, {"window_s": 9.0}, {"settle_lifetimes": 0.0},
))], ids=str)  # fmt: skip
def test_different_engines_form_no_curve(other):
    with refused("2 different"):
        curve_of("opt-1.3b", [measurement(1, 100.0), measurement(2, 190.0, **other)])


def swept(*loads, adaptive=0.10):
    """An adaptive sweep of BATCHES that has measured some of them twice."""
    made = [measurement(c, FLAT[c] * (1 + 0.001 * i), repeat=i) for c in loads for i in range(2)]
    return curve_of("opt-1.3b", made, planned=BATCHES, adaptive=adaptive)


def test_unneeded_loads_are_not_missing():
    curve = swept(1, 128, 256, 512)
    assert (curve.missing, curve.unneeded, of_curve.obstacle(curve)) == ((), BATCHES[1:7], None)
    assert tuple(p.concurrency for p in curve.predictions) == BATCHES[1:7]
    assert curve.predictions[-1].tokens_per_s.value == pytest.approx(FLAT[64], rel=0.01)
    assert tells(curve.pareto_plateau().why, "1, 128, 256, 512"), "judged at these"
    noisy = tuple(point(c, (0.9 * FLAT[c], FLAT[c])) for c in (1, 128, 256, 512))
    verdict = replace(curve, points=noisy).pareto_plateau()
    assert (verdict.state, verdict.again) == (INCONCLUSIVE, (256, 512))
    assert tells(verdict.remedy, "--slm-sweep full", "--slm-resume")
    curve = swept(1, 128, 512)
    assert (curve.missing, curve.unneeded, curve.predictions) == ((256,), (), ())
    assert all(judge(curve).state is INCONCLUSIVE and tells(judge(curve).why, 256) for judge in JUDGES)
    assert swept(1, 128, 256, 512, adaptive=None).missing == BATCHES[1:7], "a full sweep misses them all"
    assert of_curve.is_sweep(swept(1)), "however few its points"
    assert not of_curve.is_sweep(curve_of("x", [measurement(1)], planned=[1]))


@pytest.mark.parametrize(("spread", "enough"), [(0.02, True), (0.3, False)])
def test_inconclusive_verdict_estimates_needed_time(spread, enough):
    """Intervals shrink with the root of the repeats: after so many more they would end at the threshold."""
    started, rates = replace(strategies.RESOLVED, ready_s=20.0), {64: 100.0, 128: 150.0, 256: 160.0}
    repeats = [(n, rate * by, i) for n, rate in rates.items() for i, by in enumerate((1 - spread, 1 + spread))]
    curve = curve_of("opt-1.3b", [measurement(n, rate, repeat=i, resolved=started) for n, rate, i in repeats])
    verdict = curve.pareto_plateau()
    assert (verdict.state, verdict.again) == (INCONCLUSIVE, (128, 256))
    assert tells(verdict.remedy, "128 and 256") and ("--slm-resume" in verdict.remedy) is enough
    if enough:
        reach, off = (verdict.high - verdict.low) / 2 * 2.2 / 3.18245, abs(verdict.value - 0.10)
        more = max(1, math.ceil(2 * (reach / off) ** 2) - 2)
        seconds = 20 + more * sum(curve.load.duration_s(fmean(p.e2e_repeats)) for p in curve.points[1:])
        assert tells(verdict.remedy, f"{seconds:.0f} s")


@pytest.mark.parametrize(("at_256", "state", "gain", "again"), [
    ((410.0, 411.0), PASSES, 0.025, ()), ((350.0, 351.0), PASSES, -0.125, ()), ((500.0, 501.0), FAILS, 0.25, ()),
    ((400.0, 500.0), INCONCLUSIVE, 0.124, (128, 256)),
])  # fmt: skip
def test_gain_after_128_is_judged(at_256, state, gain, again):
    points = (point(64, (300.0, 301.0)), point(128, (400.0, 401.0)), point(256, at_256))
    verdict = gain_after_128(Curve(subject="opt-1.3b", points=points))
    assert (verdict.state, verdict.value) == (state, pytest.approx(gain, abs=0.001))
    assert (verdict.again, bool(verdict.remedy)) == (again, bool(again)) and tells(verdict.why, "128 to 256", "10%")
    between = gain_after_128(noisy_curve({64: 1.0, 256: 2.0}))
    assert between.state is INCONCLUSIVE and tells(between.why, 128)


def changed(part="spec", **facts):
    """The curve of two loads with another fact in a part of its measurements."""
    made = [measurement(c, law(c)) for c in (1, 2)]
    return curve_of("opt-1.3b", [replace(m, **{part: replace(getattr(m, part), **facts)}) for m in made])


@pytest.mark.parametrize(("other", "its", "ours"), [
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
    (changed("workload", spec=ADAPTED, hash="fedcba987654"), "lora 4x8 zipf", "no lora"),
])  # fmt: skip
def test_curve_labels_show_differences_only(other, its, ours):
    mine, theirs = labels([changed(), other])
    assert theirs == f"opt-1.3b, {its}" and mine != theirs and mine == (f"opt-1.3b, {ours}" if ours else mine)
    small = curve_of("opt-125m", [measurement(1, model="opt-125m")])
    assert labels([changed(), small]) == ["opt-1.3b", "opt-125m"], "models are told apart by their names"


def test_several_front_ends_are_mentioned():
    one, four = (EngineSpec("opt-1.3b", interface="server", extra=(("api_server_count", n),)) for n in (1, 4))
    assert tells(of_curve.front_ends(four), 4) and of_curve.front_ends(one) == of_curve.front_ends(None) == ""
