"""What each claim is judged by: planted figures of sweeps, models and replicas, of every size and noise, pass, fail or
are too noisy; what no sensor saw or no run measured is not guessed; and the arithmetic of a paper's table."""

import math
import random
from dataclasses import fields, replace
from statistics import fmean

import pytest
import strategies
from facts import numbers, tells
from hypothesis import given, strategies as st
from stored_records import having
from strategies import FAILS, H200, INCONCLUSIVE, PASSES, at_share, judge, measurement, point, without

from pytest_slmserve.analysis.claims import evidence
from pytest_slmserve.analysis.claims.evidence import NO_DECODING, NO_ENERGY, NO_PROFILE, NO_UTIL, PUBLISHED
from pytest_slmserve.analysis.claims.table import CLAIMS, applies, claim_of
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM
from pytest_slmserve.analysis.points import Summary, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_compared, with_plain, with_shared
from pytest_slmserve.schema import records, specs

ORDINARY = {
    "gpu_util": 1.0, "sm_active": 0.7, "sm_occupancy": 0.15, "dram_active": 0.6, "tensor_active": 0.1,
    "decode_dram": 0.6, "decode_tensor": 0.1, "saturation_gap": 1.7, "energy_per_token_j": 0.1, "power_limit_w": 700.0,
}  # fmt: skip
FEW_WARPS, SATURATES_FIRST = "occupancy-below-a-saturated-kernel", "gpu-util-saturates-first"
MEMORY_BOUND, UTIL_FALLS = "decode-stays-memory-bound", "gpu-util-falls-at-the-largest-load"
CHEAPER, DEARER = "energy-per-token-falls-with-load", "energy-per-token-grows-with-model"
SM_LOW, HOST, DRAM = "sm-activity-stays-low", "host-takes-at-most-half", "decode-saturates-dram"
MOST_WARPS, MOST_SMS = "maximum-occupancy-is-low", "maximum-sm-activity-reaches-the-limit"
PAY, SOONER, TAIL = "replicas-pay-mps", "replicas-answer-sooner-mps", "replicas-keep-the-tail-mps"
LOW, FULL = [0.1, 0.1], [1.7, 1.7]
OF_ONE_CURVE = (FEW_WARPS, SATURATES_FIRST, MEMORY_BOUND, CHEAPER)
LONGEST = 2048  # positions of OPT
T3, T3_OF_THREE = 3.182446, 4.856657  # Student's, with 3 degrees of freedom: 95% of one, and of three together
LOG2 = math.log(2)
GROWS = (100.0, 300.0, 900.0)
PROFILE = ("sm_active", "sm_occupancy", "dram_active", "tensor_active", "saturation_gap")
DECODING = ("decode_dram", "decode_tensor", "saturation_gap")
FIGURES = ("gpu_util", "sm_active", "sm_occupancy", "dram_active", "tensor_active", "saturation_gap")
VALUES = st.none() | st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -1.0]) | st.floats(-1e9, 1e9)
SUMMARIES = st.builds(Summary, **dict.fromkeys((*FIGURES, "energy_per_token_j", "power_limit_w"), VALUES))
MORE, EARLIER, FREER = "prefix-hits-raise-throughput", "prefix-hits-answer-sooner", "prefix-hits-free-the-gpu"
NONE_SHARED, MOST_SHARED = at_share(0.0, (1000.0, 1005.0)), at_share(0.75, (2000.0, 2010.0), (0.05, 0.0505))


def sensed(concurrency, rates=None, **figures):
    """A point whose repeats saw these figures; a number is that of all repeats."""
    rates = rates if rates is not None else [100.0 * concurrency, 101.0 * concurrency]
    seen = {k: [v] * len(rates) if isinstance(v, float) else v for k, v in {**ORDINARY, **figures}.items()}
    each = tuple(Summary(**{name: values[i] for name, values in seen.items()}) for i in range(len(rates)))
    known = {f.name: [v for v in seen.get(f.name, ()) if v is not None] for f in fields(Summary)}
    return replace(point(concurrency, rates), each=each, **{name: fmean(of) for name, of in known.items() if of})


def of_points(*points, subject="opt-1.3b", **facts):
    return Curve(subject=subject, points=points, measurements=(measurement(1, 100.0, model=subject, **facts),))


def sweep(figure, *by_load):
    """Points of which one figure is planted."""
    return of_points(*(sensed(4**i, **{figure: seen}) for i, seen in enumerate(by_load)))


def served(rates, util):
    loads = enumerate(zip(rates, util, strict=True))
    return of_points(*(sensed(4**i, [r, 1.01 * r], gpu_util=u) for i, (r, u) in loads))


def drop(curve, names, at=None):
    """Without these figures: at all loads, or at one."""
    nothing = dict.fromkeys(names)

    def blind(p):
        if at not in (None, p.concurrency):
            return p
        return replace(p, each=tuple(replace(s, **nothing) for s in p.each), **nothing)

    return replace(curve, points=tuple(map(blind, curve.points)))


@pytest.mark.parametrize(("claim", "figure", "values", "state", "value", "load", "n"), [
    # A saturated kernel has 14.3%; 0.05 points off the mean leave 0.092 either way.
    *((FEW_WARPS, "sm_occupancy", (0.9, 0.9, [mean - 0.0005, mean + 0.0005]), state, mean, 16, 2) for mean, state in (
        (0.1, PASSES), (0.142, PASSES), (0.1422, INCONCLUSIVE), (0.143, INCONCLUSIVE), (0.1438, INCONCLUSIVE),
        (0.144, FAILS), (0.6, FAILS))),
    (FEW_WARPS, "sm_occupancy", (0.9, 0.9, [0.1, 0.9]), INCONCLUSIVE, 0.5, 16, 2),
    (MOST_WARPS, "sm_occupancy_max", ([0.1, 0.101], [0.3, 0.301], [0.2, 0.201]), PASSES, 0.3005, 4, 6),
    (MOST_WARPS, "sm_occupancy_max", ([0.1, 0.101], [0.5, 0.501], [0.2, 0.201]), FAILS, 0.5005, 4, 6),
    (MOST_SMS, "sm_active_max", (FULL, FULL, [0.97, 0.971]), PASSES, 0.9705, 16, 2),
    (MOST_SMS, "sm_active_max", (FULL, FULL, [0.6, 0.601]), FAILS, 0.6005, 16, 2),
    (SM_LOW, "sm_active", ([0.3, 0.301], [0.45, 0.451], [0.4, 0.401]), PASSES, 0.4505, 4, 6),
    (SM_LOW, "sm_active", ([0.3, 0.301], [0.9, 0.901], [0.4, 0.401]), FAILS, 0.9005, 4, 6),
    (HOST, "engine_active", ([0.9, 0.901], [0.6, 0.601], [0.8, 0.801]), PASSES, 0.3995, 4, 6),
    (HOST, "engine_active", ([0.9, 0.901], [0.8, 0.801], [0.2, 0.201]), FAILS, 0.7995, 16, 6),
    (DRAM, "decode_dram", (LOW, LOW, [0.8, 0.801]), PASSES, 0.8005 / REACHABLE_DRAM, 16, 2),
    (DRAM, "decode_dram", (FULL, FULL, [0.3, 0.301]), FAILS, 0.3005 / REACHABLE_DRAM, 16, 2),
    (UTIL_FALLS, "gpu_util", ([1.0, 0.999], [0.9, 0.901], [0.8, 0.801]), PASSES, 0.8005 / 0.9995, 16, 4),
    (UTIL_FALLS, "gpu_util", ([0.8, 0.801], [0.9, 0.901], [0.88, 0.881]), FAILS, 0.8805 / 0.8005, 16, 4),
    # Memory against tensor cores: the load at which memory is least near decides.
    (MEMORY_BOUND, "saturation_gap", (FULL, [1.2, 1.21], [0.9, 0.91]), PASSES, math.exp(0.905), 16, 6),
    (MEMORY_BOUND, "saturation_gap", (FULL, [-0.5, -0.51], [0.9, 0.91]), FAILS, math.exp(-0.505), 4, 6),
    (MEMORY_BOUND, "saturation_gap", (FULL, [0.01, -0.01], [0.9, 0.91]), INCONCLUSIVE, 1.0, 4, 6),
    (MEMORY_BOUND, "saturation_gap", ([1.7, 0.5], [0.3, 0.3], [0.9, 0.9]), INCONCLUSIVE, math.exp(0.3), 4, 6),
    (CHEAPER, "energy_per_token_j", ([1.0, 1.01], [0.5, 0.5], [0.1, 0.1]), PASSES, 0.1 / 1.005, 16, 4),
    (CHEAPER, "energy_per_token_j", ([1.0, 1.01], [0.1, 0.1], [0.8, 0.8]), FAILS, 0.8 / 1.005, 16, 4),
    (CHEAPER, "energy_per_token_j", ([1.0, 1.01], [0.5, 0.5], [0.5, 0.51]), INCONCLUSIVE, 0.505 / 1.005, 16, 4),
    (CHEAPER, "energy_per_token_j", ([0.5, 2.0], [0.5, 0.5], [0.1, 0.5]), INCONCLUSIVE, 0.3 / 1.25, 16, 4),
])  # fmt: skip
def test_deciding_load_gives_claim_verdict(claim, figure, values, state, value, load, n):
    verdict = judge(claim, sweep(figure, *values))
    assert (verdict.state, verdict.value, verdict.n) == (state, pytest.approx(value), n) and tells(verdict.why, load)
    assert verdict.low < verdict.value < verdict.high and len(verdict.records) == n
    assert claim != FEW_WARPS or (verdict.threshold, tells(verdict.why, "70%", "14.3%")) == (0.143, True)
    assert judge(claim, drop(sweep(figure, *values), [figure])).state is INCONCLUSIVE


@pytest.mark.parametrize(("claim", "figure", "values", "value", "half"), [
    # The spread within the groups is 0.02, 0 and 0.
    (FEW_WARPS, "sm_occupancy", ([0.11, 0.13], [0.2, 0.2], [0.15, 0.15]), 0.15, T3 * math.sqrt(0.0002 / 3 / 2)),
    # It may be the largest of three loads by chance.
    (SM_LOW, "sm_active", ([0.19, 0.21], [0.69, 0.71], [0.29, 0.31]), 0.7, T3_OF_THREE * 0.02 / 2),
    (MEMORY_BOUND, "saturation_gap", ([LOG2 - 0.02, LOG2 + 0.02], [0.98, 1.02], [1.98, 2.02]), 2.0, T3 * 0.02),
    # Logarithms 2 ln 1.01 apart in one group of three; the means that are compared are of two.
    (CHEAPER, "energy_per_token_j", ([1 / 1.01, 1.01], [0.5, 0.5], [0.2, 0.2]), 0.2 / fmean([1 / 1.01, 1.01]),
     T3 * math.log(1.01) * math.sqrt(2 / 3)),
])  # fmt: skip
def test_claim_interval_matches_hand_calculation(claim, figure, values, value, half):
    verdict = judge(claim, sweep(figure, *values))
    ends = [value * math.exp(-half), value * math.exp(half)]
    if claim in (FEW_WARPS, SM_LOW):
        ends = [value - half, value + half]
    assert [verdict.value, verdict.low, verdict.high] == pytest.approx([value, *ends], rel=1e-5)


def test_launch_means_count_as_repeats():
    """Means of launches 0.04 apart in one group, 0 in the others: as single repeats 0.04 * sqrt 2."""

    def of_two_launches(load, *occupancy):
        used = tuple((measurement(load, 100.0, launch=launch, repeat=i),) for launch in "ab" for i in range(2))
        return replace(sensed(load, [100.0] * 4, sm_occupancy=[*occupancy]), used=used)

    quiet = [of_two_launches(load, 0.2, 0.2, 0.2, 0.2) for load in (1, 4)]
    verdict = judge(FEW_WARPS, of_points(*quiet, of_two_launches(16, 0.10, 0.10, 0.14, 0.14)), threshold=0.15)
    half = T3 * math.sqrt(0.04**2 / 3 / 4)
    assert (verdict.low, verdict.high) == pytest.approx((0.12 - half, 0.12 + half), abs=1e-6)
    assert verdict.state is INCONCLUSIVE, "four repeats for themselves would tell 0.12 within 0.015"
    assert judge(FEW_WARPS, drop(sweep("sm_occupancy", 0.1, 0.1, 0.1), ["sm_occupancy"], at=1)).state is PASSES
    assert judge(FEW_WARPS, sweep("sm_occupancy", *[[0.02, 0.10]] * 3)).low == 0.0
    assert judge(FEW_WARPS, sweep("sm_occupancy", *[[0.9, 1.0]] * 3)).high == 1.0
    once = judge(FEW_WARPS, sweep("sm_occupancy", *[[0.1, None]] * 3))
    assert (once.state, once.value, once.low) == (INCONCLUSIVE, 0.1, None) and tells(once.why, "--slm-repeats 2")
    # Tensor cores that did not run at a load are no doubt.
    still = drop(sweep("saturation_gap", 1.7, 1.7, 1.7), ["saturation_gap"], at=1)
    still = replace(still, points=(replace(still.points[0], decode_tensor=0.0), *still.points[1:]))
    never = judge(MEMORY_BOUND, drop(still, ["saturation_gap"]))
    assert judge(MEMORY_BOUND, still).state is PASSES
    assert (never.state, never.why) == (INCONCLUSIVE, evidence.IDLE_TENSOR)
    once = replace(SEEN, points=tuple(sensed(4**i, [100.0]) for i in range(3)))
    for claim in OF_ONE_CURVE:
        assert judge(claim, SEEN).state in (PASSES, FAILS)
        for curve, facts in (
            (replace(SEEN, missing=(64,)), (64,)), (without(SEEN, 4), (4, "invalid")), (once, ("--slm-repeats 2",)),
            (replace(SEEN, points=SEEN.points[:2]), (2, 3)), (Curve(subject="opt-1.3b"), (0, 3)),
        ):  # fmt: skip
            verdict = judge(claim, curve)
            assert verdict.state is INCONCLUSIVE and tells(verdict.why, *facts)


@pytest.mark.parametrize(("rates", "util", "state", "value", "facts"), [
    (GROWS, (0.95, 1.0, 1.0), PASSES, 9.0, ("95%", 1, 16)),
    ((100.0, 300.0, 330.0), (0.5, 0.92, 1.0), FAILS, 1.1, ()),
    ((100.0, 300.0, 450.0), (0.5, 0.92, 1.0), INCONCLUSIVE, 1.5, ()),
    (GROWS, (0.5, 0.6, 0.7), FAILS, None, ("90%", "70%")),
    ((100.0, 900.0, 300.0), (0.5, 0.6, 0.95), FAILS, 1.0, ()),  # over itself, without noise; the best load came before
    ((100.0, 400.0, 1600.0), (0.5, 0.6, [0.80, 0.99]), INCONCLUSIVE, None, ()),  # it may be full
    # From concurrency 1 throughput grows 9 times, from 4 on no more: who says "fails" has to know that it is not 1.
    ((100.0, 900.0, 910.0), ([0.80, 0.99], 0.95, 1.0), INCONCLUSIVE, 910 / 900, ("90%", 1)),
    ((100.0, 900.0, 910.0), (0.80, 0.95, 1.0), FAILS, 910 / 900, ()),
])  # fmt: skip
def test_gpu_utilisation_saturates_before_throughput(rates, util, state, value, facts):
    verdict = judge(SATURATES_FIRST, served(rates, util))
    assert verdict.state is state and tells(verdict.why, *facts)
    if util != (0.5, 0.6, [0.80, 0.99]):
        assert verdict.value == (None if value is None else pytest.approx(value))
    if value is not None:
        assert verdict.low == verdict.high == 1.0 if value == 1.0 else verdict.low < verdict.value < verdict.high


@pytest.mark.parametrize(("rates", "util", "state"), [
    (GROWS, (0.5, 0.95, 1.0), PASSES),  # and from an earlier load on it grows by no less
    ((100.0, 600.0, 700.0), (0.5, 0.95, 1.0), INCONCLUSIVE),  # it may have been full at a load that was left out
    (GROWS, (0.5, 0.6, 0.7), INCONCLUSIVE),
])  # fmt: skip
def test_unmeasured_loads_weaken_claim_verdict(rates, util, state):
    whole = served(rates, util)
    part = replace(whole, adaptive=True, unneeded=(2, 8))
    for claim in (SATURATES_FIRST, MEMORY_BOUND):
        assert tells(judge(claim, part).why, "1, 4, 16") and not tells(judge(claim, whole).why, "1, 4, 16")
    assert judge(SATURATES_FIRST, part).state is state
    assert judge(SATURATES_FIRST, whole).state is (PASSES if state is PASSES else FAILS)
    low = replace(sweep("sm_active", 0.3, 0.4, 0.4), adaptive=True)
    assert [judge(SM_LOW, replace(low, unneeded=loads)).state for loads in ((), (2, 8))] == [PASSES, INCONCLUSIVE]


SEEN, NO_LIMIT = sweep("sm_occupancy", 0.1, 0.1, 0.1), "measured under power limits of 500 W and 700 W"


@pytest.mark.parametrize(("claim", "curve", "why"), [
    (FEW_WARPS, drop(SEEN, PROFILE), NO_PROFILE),
    (SATURATES_FIRST, drop(SEEN, ["gpu_util"]), NO_UTIL),
    (MEMORY_BOUND, drop(SEEN, PROFILE), NO_PROFILE),
    (MEMORY_BOUND, drop(SEEN, DECODING), NO_DECODING),
    (CHEAPER, drop(SEEN, ["energy_per_token_j"]), NO_ENERGY),
    (FEW_WARPS, drop(SEEN, ["sm_occupancy"], 16), NO_PROFILE),
    (SATURATES_FIRST, drop(SEEN, ["gpu_util"], 1), f"{NO_UTIL} at concurrency 1"),
    (MEMORY_BOUND, drop(SEEN, ["dram_active", "saturation_gap"], 4), f"{NO_PROFILE} at concurrency 4"),
    (MEMORY_BOUND, drop(SEEN, DECODING, 16), f"{NO_DECODING} at concurrency 16"),
    (CHEAPER, drop(SEEN, ["energy_per_token_j"], 16), f"{NO_ENERGY} at concurrency 16"),
    # A utilisation of 0 while tokens come was not measured.
    *((claim, served(GROWS, (0.0, full, full)), f"{NO_UTIL}{where}") for claim in (SATURATES_FIRST, UTIL_FALLS)
      for full, where in ((0.0, ""), (0.9, " at concurrency 1"))),
    # Another power limit is another card.
    (CHEAPER, of_points(sensed(1, power_limit_w=500.0), sensed(4), sensed(16, energy_per_token_j=0.01)), NO_LIMIT),
])  # fmt: skip
def test_missing_sensor_makes_claim_inconclusive(claim, curve, why):
    verdict = judge(claim, curve)
    assert (verdict.state, verdict.why, verdict.value) == (INCONCLUSIVE, why, None)


def table_1(model, joules=(0.0099, 0.0101), concurrency=None, limit=700.0, power_w=None, **facts):
    """One point at the paper's batch, or elsewhere."""
    figures = {"energy_per_token_j": [*joules], "power_limit_w": limit, "power_w": power_w and [power_w] * 2}
    known = {name: seen for name, seen in figures.items() if seen}
    return of_points(sensed(concurrency or PUBLISHED[model], **known), subject=model, **facts)


def of_engine(curve, **facts):
    return replace(curve, measurements=tuple(having(curve.measurements, **facts)))


SMALL, LARGE = table_1("opt-125m"), table_1("opt-1.3b", (0.049, 0.051))
ONCE = [of_points(sensed(PUBLISHED[m], [1e4], energy_per_token_j=[0.01]), subject=m) for m in ("opt-125m", "opt-1.3b")]


def test_energy_claim_compares_model_sizes():
    for large, state in (
        ((0.049, 0.051), PASSES), ((0.0049, 0.0051), FAILS), ((0.0099, 0.0102), INCONCLUSIVE),
        ((0.005, 0.05), INCONCLUSIVE),
    ):  # fmt: skip
        verdict = judge(DEARER, table_1("opt-1.3b", large), [SMALL])
        assert (verdict.state, verdict.value) == (state, pytest.approx(fmean(large) / 0.01))
        assert verdict.subject == "opt-1.3b" and tells(verdict.why, "opt-125m", "0.01 J", 512)
        assert set(verdict.records) == {"256-0", "256-1", "512-0", "512-1"}
    smaller = [table_1("opt-1.3b", power_w=684.0), table_1("opt-2.7b", power_w=500.0)]
    for watts, state in ((760.0, PASSES), (690.0, FAILS)):
        verdict = judge("larger-models-draw-more-power", table_1("opt-6.7b", power_w=watts), smaller)
        assert (verdict.state, verdict.value) == (state, pytest.approx(watts / 684))
    of_6 = [table_1("opt-6.7b", power_w=692.0)]
    for watts, state in ((705.0, PASSES), (655.0, FAILS), (800.0, FAILS)):
        verdict = judge("power-rises-slightly-to-13b", table_1("opt-13b", power_w=watts), of_6)
        assert (verdict.state, verdict.value) == (state, pytest.approx(watts / 692))
    verdict = judge(DEARER, ONCE[1], ONCE[:1])
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, pytest.approx(1)) and tells(verdict.why, "--slm-repeats 2")
    left = of_engine(SMALL, spec={"kv_cache_bytes": 1 << 30})
    assert judge(DEARER, LARGE, [left]).state is PASSES, "engines may differ in what the weights leave"
    # The table is of one GPU, at a batch for each of its models.
    assert evidence.at_table_1(LARGE).concurrency == 256
    elsewhere = of_points(sensed(256), subject="opt-125m"), of_points(sensed(1), subject="qwen2.5-3b")
    for other in (*elsewhere, Curve(subject="opt-6.7b"), of_engine(LARGE, spec={"tensor_parallel_size": 2})):
        assert evidence.at_table_1(other) is None


@pytest.mark.parametrize(("own", "other", "facts"), [
    (LARGE, table_1("opt-2.7b", (0.001, 0.001)), ("opt-125m", 512)),
    (LARGE, table_1("opt-125m", concurrency=256), ("opt-125m", 512)),
    (LARGE, drop(SMALL, ["energy_per_token_j"]), ("opt-125m", 512)),
    (LARGE, without(SMALL, 512), ("opt-125m", 512)),
    (LARGE, table_1("opt-125m", environment=replace(H200, gpu_name="NVIDIA H100")), ("opt-125m", 512)),
    (LARGE, table_1("opt-125m", load=specs.ClosedLoop(512, ramp_up="burst")), ("opt-125m", 512)),
    (LARGE, of_engine(SMALL, workload={"hash": "another"}), ("opt-125m", 512)),
    (LARGE, of_engine(SMALL, spec={"enforce_eager": True}), ("opt-125m", 512)),
    (LARGE, table_1("opt-125m", limit=500.0), ("500 W", "700 W")),
    (drop(LARGE, ["energy_per_token_j"]), SMALL, ("opt-1.3b", 256)),
    *((Curve(subject=model), LARGE, ()) for model in ("opt-125m", "opt-350m", "qwen2.5-3b", "")),  # none is smaller
])  # fmt: skip
def test_energy_claim_needs_like_conditions(own, other, facts):
    verdict = judge(DEARER, own, [other])
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, None) and tells(verdict.why, *facts)
    if facts == ("opt-125m", 512):
        assert judge(DEARER, own, [other, SMALL]).state is PASSES, "the right one is found beside it"


@st.composite
def any_curves(draw):
    """Whatever sensors may have said, sensible or not, of any loads."""
    loads = draw(st.lists(st.sampled_from([1, 2, 16, 128, 256, 512]), max_size=5, unique=True).map(sorted))
    points = []
    for load in loads:
        each, means = draw(st.lists(SUMMARIES, max_size=3)), {name: draw(VALUES) for name in FIGURES}
        points.append(replace(point(load, [100.0 * load] * len(each)), each=tuple(each), **means))
    return Curve(subject=draw(st.sampled_from(["opt-125m", "opt-1.3b", "opt-2.7b", "x"])), points=tuple(points))


@given(any_curves(), st.lists(any_curves(), max_size=2))
def test_decided_claims_always_have_interval(curve, others):
    for name, claim in CLAIMS.items():
        verdict = judge(name, curve, others)
        assert (verdict.claim, verdict.subject) == (name, curve.subject) and verdict.why
        if verdict.state is not INCONCLUSIVE and verdict.value is not None and claim.of != "arithmetic":
            rounding = 1e-9 * abs(verdict.value) if math.isfinite(verdict.value) else 0.0
            assert verdict.low - rounding <= verdict.value <= verdict.high + rounding


@given(st.integers(0, 10**6), st.floats(0, 0.4), st.floats(1, 2))
def test_more_noise_never_decides_claim(seed, scale, more):
    ranges = {"sm_occupancy": (0.1, 0.9), "saturation_gap": (-2, 2), "energy_per_token_j": (0.1, 1)}

    def scattered(scale):
        chance, points = random.Random(seed), []
        for load in (1, 16, 256):
            means = {name: (chance.uniform(*ends), scale * chance.uniform(0, 1)) for name, ends in ranges.items()}
            points.append(sensed(load, **{n: [mean * (1 - off), mean * (1 + off)] for n, (mean, off) in means.items()}))
        return of_points(*points)

    for claim, bound in ((FEW_WARPS, {"threshold": 0.5}), (MEMORY_BOUND, {}), (CHEAPER, {})):
        quiet, loud = (judge(claim, scattered(each), **bound) for each in (scale, scale * more))
        assert quiet.value == pytest.approx(loud.value) and loud.state in (quiet.state, INCONCLUSIVE)
        assert quiet.state is not INCONCLUSIVE or loud.state is INCONCLUSIVE


@pytest.mark.parametrize(("model", "published", "longest", "known"), [
    ("opt-125m", 512, 508, 1356), ("opt-1.3b", 256, 89, 238), ("opt-2.7b", 128, 49, 132), ("opt-6.7b", 64, 23, 62),
    ("opt-13b", 16, 7, 20),
])  # fmt: skip
def test_two_published_batches_overcommit_memory(model, published, longest, known):
    in_blocks = evidence.largest_batch(model, evidence.KNOWN, block=evidence.BLOCK_SIZE)
    assert (evidence.largest_batch(model, LONGEST), evidence.largest_batch(model), in_blocks) == (longest, known, known)
    verdict = judge("table-1-batch-fits", Curve(subject=model))
    overcommitted = model in ("opt-1.3b", "opt-6.7b")
    assert verdict.state is (FAILS if overcommitted else PASSES)
    assert (verdict.value, verdict.threshold) == (known, PUBLISHED[model]) == (known, published)
    mean = evidence.largest_batch(model, evidence.MEAN, block=evidence.BLOCK_SIZE)
    assert tells(verdict.why, mean) is overcommitted and mean >= published
    of_500 = judge("larger-models-cannot-hold-500", Curve(subject=model))
    assert (of_500.state, of_500.threshold) == (PASSES if known < 500 else FAILS, 500)


@pytest.mark.parametrize(("claim", "model", "value", "threshold", "state"), [
    ("table-1-request-size", "opt-1.3b", 150_994_944, 50_000_000, FAILS),
    ("table-1-batch-size", "opt-1.3b", 512 * 150_994_944, 25_600_000_000, FAILS),
    *((claim, model, None, None, INCONCLUSIVE)
      for claim in ("table-1-request-size", "table-1-batch-size") for model in ("opt-2.7b", "opt-tiny")),
    ("table-1-batch-fits", "opt-tiny", None, None, INCONCLUSIVE),
])  # fmt: skip
def test_published_request_size_is_wrong(claim, model, value, threshold, state):
    verdict = judge(claim, Curve(subject=model))
    assert (verdict.state, verdict.value) == (state, value) and threshold in (None, verdict.threshold)


@given(st.sampled_from(list(PUBLISHED)), st.integers(30, 200))
def test_known_lengths_hold_larger_batches(model, gib):
    longest, known = (evidence.largest_batch(model, tokens, gib * specs.GIB) for tokens in (LONGEST, evidence.KNOWN))
    lengths = (evidence.KNOWN, evidence.MEAN)
    paged, mean = (evidence.largest_batch(model, tokens, gib * specs.GIB, evidence.BLOCK_SIZE) for tokens in lengths)
    assert longest <= paged <= known and paged <= mean


def together(*rows, **how):
    """A run for each row of rates, of an engine for each rate."""
    return [m for repeat, row in enumerate(rows) for m in strategies.together(*row, repeat=repeat, **how)]


def alone(*rates, concurrency=16, **how):
    return [measurement(concurrency, rate, repeat=i, **how) for i, rate in enumerate(rates)]


def curve(single, shared):
    return with_shared([curve_of("opt-1.3b", single)], shared_points(shared))[0]


ONE, TWO = alone(1000.0, 1004.0), together((600.0, 600.0), (601.0, 601.0))
FOUR = together([260.0] * 4, [261.0] * 4, concurrency=4, group="four")


def test_replica_points_match_their_curve():
    swept = curve_of("opt-1.3b", [*ONE, *TWO])
    assert [p.concurrency for p in swept.points] == [16] and swept.shared == ()
    others = [
        *together((400.0, 400.0), group="a", models=["opt-125m"] * 2),
        *together((400.0, 400.0), group="b", environment=replace(H200, driver="1")),
        *having(together((400.0, 400.0), group="c", output_tokens=64), workload={"hash": "of other requests"}),
    ]
    found = with_shared([swept, Curve(subject="x")], shared_points([*TWO, *others]))
    assert [[set(s.records) for s in c.shared] for c in found] == [[{m.id for m in TWO}], []]

    # One engine that was measured for comparison is no point of a sweep.
    one = replace(measurement(16, 990.0), replica=records.Replica("g", 0, 1, "one", "time-slicing"))
    found = curve_of("opt-1.3b", [*(measurement(c, 100.0 * c) for c in (8, 32)), one])
    assert [p.concurrency for p in found.points] == [8, 32] and len(found.measurements) == 3
    assert found.one_engine(16).repeats == pytest.approx((990.0,))
    assert found.one_engine(8).repeats == pytest.approx((800.0,)) and found.one_engine(64) is None
    # Hosts of one kind, in one archive: on the other host one engine serves more at 32, and at concurrency 16.
    runs, mine = (having(each, environment={"host": "here"}) for each in (TWO, ONE))
    theirs = [*alone(1300.0, 1301.0), *alone(1300.0, 1301.0, concurrency=32)]
    theirs = having(theirs, environment={"host": "there"})
    both, own = (judge(PAY, curve(single, runs)) for single in ([*mine, *theirs], mine))
    assert both.state is PASSES and both.value == own.value == pytest.approx(1201 / 1002)
    for claim in (PAY, TAIL):
        verdict = judge(claim, curve(theirs, runs))
        assert verdict.state is INCONCLUSIVE and numbers(verdict.why) == [16]


@pytest.mark.parametrize(("claim", "rates", "bound", "state", "value"), [
    (PAY, (620.0, 624.0), {}, PASSES, 1244 / 1002), (PAY, (450.0, 452.0), {}, FAILS, 902 / 1002),
    (PAY, (400.0, 620.0), {}, INCONCLUSIVE, 1020 / 1002),
    (TAIL, (520.0, 521.0), {"threshold": 1.1}, PASSES, 1002 / 1041),
    (TAIL, (520.0, 521.0), {"threshold": 0.5}, FAILS, 1002 / 1041),
])  # fmt: skip
def test_replica_claims_get_planted_verdicts(claim, rates, bound, state, value):
    verdict = judge(claim, curve(ONE, together(*((rate, rate) for rate in rates))), **bound)
    assert (verdict.claim, verdict.state, verdict.n) == (claim, state, 6) and {2, 16} <= {*numbers(verdict.why)}
    assert verdict.value == pytest.approx(value, rel=0.03 if claim == TAIL else 1e-6)


@pytest.mark.parametrize("sharing", ["time-slicing", "mps", "mig", "gpus"])
@pytest.mark.parametrize(("claim", "value"), [
    ("pay", 601 / 1002), ("answer-sooner", 1002 / 601), ("keep-the-tail", 1002 / 601),
    ("use-the-gpu-more", 0.9), ("draw-more-power", 0.9), ("keep-the-power", 0.9),
])  # fmt: skip
def test_slower_replicas_refute_every_claim(claim, value, sharing):
    """Two of 8 together serve 601, one of 16 serves 1002: by Little's law each waits so much longer. Of two, sensors
    saw 0.9 times the utilisation and power of one."""

    def seen(points, share):
        each = {"gpu_util": 0.8 * share, "power_w": 600.0 * share}
        return tuple(replace(p, each=tuple(replace(s, **each) for s in p.each)) for p in points)

    slow = curve(ONE, together((300.0, 300.0), (301.0, 301.0), sharing=sharing))
    slow = replace(slow, points=seen(slow.points, 1.0), shared=seen(slow.shared, 0.9))
    verdict = judge(f"replicas-{claim}-{sharing}", slow)
    assert verdict.state is FAILS and verdict.value == pytest.approx(value, rel=0.02) and tells(verdict.why, 2)
    nothing, single = (judge(verdict.claim, replace(slow, **{name: ()})) for name in ("shared", "points"))
    assert nothing.state is single.state is INCONCLUSIVE and tells(single.why, 16)


def test_best_replica_count_decides_claim():
    for claim in (PAY, SOONER):
        best = judge(claim, curve(ONE, [*TWO, *FOUR]))
        assert claim == SOONER or {2, 4, 1.04} <= {*numbers(best.why)}
        four = together([250.0] * 4, [251.0] * 4, concurrency=4, group="four")
        single, best = (judge(claim, curve(ONE, runs)) for runs in (TWO, [*TWO, *four]))
        assert single.value == best.value and best.low < single.low < single.high < best.high
        # Three loads of one engine serve as much as the set: the largest mean of them is larger by chance.
        runs = together((500.0, 500.0), (501.0, 501.0))
        loads = [alone(1000.0 + load, 1001.0 + load, concurrency=load) for load in (4, 8, 16)]
        one, three = (judge(PAY, curve(single, runs)) for single in (loads[-1], [m for each in loads for m in each]))
        assert one.value == three.value and three.low < one.low < one.high < three.high
        verdict = judge(PAY, curve([*ONE, *alone(1300.0, 1301.0, concurrency=32)], TWO))
        assert verdict.state is FAILS and verdict.value == pytest.approx(1201 / 1300.5, rel=1e-3)
        assert {16, 32} <= {*numbers(verdict.why)}
    for claim in (PAY, TAIL):
        runs = TWO[:2]
        for name, found, facts in (
            (claim.replace("mps", "time-slicing"), curve(ONE, runs), ()),
            (claim, curve(alone(900.0, concurrency=8), runs), (16,)),
            (claim, curve(ONE, together((600.0, 600.0), failures=2)), (2, 1)),
        ):
            verdict = judge(name, found)
            assert (verdict.state, verdict.value) == (INCONCLUSIVE, None) and {*facts} <= {*numbers(verdict.why)}
        once = judge(PAY, curve(ONE[:1], runs))
        assert once.state is INCONCLUSIVE and "--slm-repeats 2" in once.why
        there = [applies(claim_of(f"replicas-pay-{how}"), curve(ONE, runs)) for how in ("mps", "mig")]
        assert there == [True, False]


@pytest.mark.parametrize(("claim", "rates", "ttft_s", "state"), [
    (MORE, (1500.0, 1510.0), (0.1, 0.1), PASSES), (MORE, (900.0, 905.0), (0.1, 0.1), FAILS),
    (MORE, (2500.0, 2510.0), (0.1, 0.1), FAILS),  # more than at the larger hit rate
    (MORE, (900.0, 1300.0), (0.1, 0.1), INCONCLUSIVE),
    (FREER, (1500.0, 1510.0), (0.1, 0.1), PASSES), (FREER, (900.0, 905.0), (0.1, 0.1), FAILS),
    (EARLIER, (1500.0, 1500.0), (0.07, 0.0705), PASSES), (EARLIER, (1500.0, 1500.0), (0.2, 0.201), FAILS),
    (EARLIER, (1500.0, 1500.0), (0.08, 0.13), INCONCLUSIVE),
])  # fmt: skip
def test_prefix_hits_must_raise_throughput(claim, rates, ttft_s, state):
    others = [MOST_SHARED, at_share(0.5, rates, ttft_s), NONE_SHARED]  # in whatever order
    judged = [judge(claim, curve) for curve in with_compared(others) if curve.warmer]
    assert [verdict.state for verdict in judged] == [state]
    assert judged[0].value and tells(judged[0].why, 64), judged[0].why


def test_only_prefix_share_may_differ():
    plain = of_points(point(64, [1000.0, 1005.0]))
    elsewhere = at_share(0.5, (1500.0, 1510.0))
    elsewhere = of_engine(elsewhere, environment={"gpu_name": "NVIDIA L4"})
    assert [curve.warmer for curve in with_compared([plain, elsewhere, NONE_SHARED])] == [()] * 3
    assert not applies(claim_of(MORE), NONE_SHARED) and not applies(claim_of(MORE), plain)
    pair = with_compared([NONE_SHARED, MOST_SHARED])
    assert [applies(claim_of(MORE), curve) for curve in pair] == [True, False]
    invalid = replace(at_share(0.5, (9.0, 9.0)), points=(point(64, ()),))
    elsewhere = at_share(0.5, (9.0, 9.0), concurrency=8)
    for wrong, reason in ((invalid, "planted: invalid"), (elsewhere, "two hit rates")):
        verdict = judge(MORE, with_compared([NONE_SHARED, wrong])[0])
        assert reason in verdict.why and verdict.state is INCONCLUSIVE
    once = with_compared([at_share(0.0, (1000.0,), (0.1,)), at_share(0.5, (1500.0,), (0.1,))])[0]
    assert "--slm-repeats 2" in judge(MORE, once).why
    shared = at_share(0.5, (1000.0, 1005.0), concurrency=PUBLISHED["opt-1.3b"])
    talks = at_share(None, (1000.0, 1005.0), concurrency=PUBLISHED["opt-1.3b"], turns=4)
    spent = tuple(replace(each, energy_per_token_j=0.1) for each in shared.points[0].each)
    curves = [replace(c, points=(replace(shared.points[0], each=spent),)) for c in (shared, talks, of_points())]
    assert [bool(evidence.at_table_1(curve)) for curve in curves] == [False, False, True]


# Structured output

CHEAP = "structured-output-costs-little"
FREE = at_share(None, (1000.0, 1005.0))


def in_json(*rates, concurrency=64, response_format="json"):
    return at_share(None, rates, concurrency=concurrency, response_format=response_format)


@pytest.mark.parametrize(("rates", "state"), [
    ((950.0, 955.0), PASSES), ((800.0, 805.0), FAILS), ((850.0, 1000.0), INCONCLUSIVE),
])  # fmt: skip
def test_structured_output_costs_little(rates, state):
    schema = '{"type": "array"}'
    curves = with_compared([in_json(*rates), FREE, in_json(980.0, 985.0, response_format=schema)])
    judged = [(curve, judge(CHEAP, curve)) for curve in curves if curve.structured]
    assert [(curve.workload.spec.output, verdict.state) for curve, verdict in judged] == [("free text", state)]
    assert judged[0][1].why.startswith("JSON serves") and tells(judged[0][1].why, 64, 0.9, 2), judged[0][1].why
    assert [len(evidence.structured_pairs(curve)) for curve in curves] == [0, 2, 0]


def test_structured_output_needs_free_text():
    schema, there = in_json(900.0, 905.0, response_format='{"type": "array"}'), claim_of(CHEAP)
    assert not any(curve.structured for curve in with_compared([in_json(950.0, 955.0), schema, NONE_SHARED]))
    pair = with_compared([FREE, in_json(950.0, 955.0)])
    assert [applies(there, curve) for curve in pair] == [True, False]
    invalid = replace(in_json(9.0, 9.0), points=(point(64, ()),))
    for wrong, reason in ((invalid, "planted: invalid"), (in_json(9.0, 9.0, concurrency=8), "measured with both")):
        verdict = judge(CHEAP, with_compared([FREE, wrong])[0])
        assert reason in verdict.why and verdict.state is INCONCLUSIVE
    once = with_compared([at_share(None, (1000.0,), (0.1,)), in_json(950.0)])[0]
    assert "--slm-repeats 2" in judge(CHEAP, once).why and evidence.at_table_1(pair[1]) is None


# An engine with and without speculation

GAINS, CROSSES = "speculation-gains-at-the-smallest-load", "speculation-costs-beyond-a-load"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
PLAIN = {1: 100.0, 4: 300.0, 16: 600.0, 64: 800.0}


def of_rates(rates, config=NGRAM, noise=0.005, acceptance=1.7, **spec):
    """A curve of two repeats at each load, an invalid point where a rate is None. config: None without speculation."""
    made = measurement(1, 100.0)
    extra = (("speculative_config", config),) if config else ()
    made = replace(made, spec=replace(made.spec, extra=extra, **spec))
    points = [point(c, [] if r is None else [r * (1 - noise), r * (1 + noise)]) for c, r in rates.items()]
    points = [replace(p, acceptance_length=acceptance if config else None) for p in points]
    return Curve(subject="opt-1.3b", points=tuple(points), measurements=(made,))


def drafting(*ratios, noise=0.005, plain=PLAIN, **spec):
    """An engine with speculation that serves so many times what it does without, at each load."""
    rates = {c: None if ratio is None else ratio * r for (c, r), ratio in zip(PLAIN.items(), ratios)}
    return with_plain([of_rates(rates, noise=noise, **spec), of_rates(plain, config=None, noise=noise)])[0]


@pytest.mark.parametrize(("ratios", "noise", "smallest", "crosses", "words"), [
    ((1.6, 1.2, 0.9, 0.7), 0.005, PASSES, PASSES, ["b*", 1.6, 1.2, 0.9, 0.7]),
    ((1.6, 1.5, 1.4, 1.2), 0.005, PASSES, FAILS, ["b* > 64"]), ((0.9, 0.8, 0.7, 0.6), 0.005, FAILS, FAILS, ["b* < 1"]),
    ((0.9, 1.3, 1.2, 0.7), 0.005, FAILS, FAILS, [1, 16, "again"]),  # drafting itself costs at 1
    ((1.6, 1.2, 0.9, 0.7), 0.4, INCONCLUSIVE, INCONCLUSIVE, ["gains at 1", "costs at 64"]),
    ((1.6, 1.2, 1.1, 1.0), 0.005, PASSES, INCONCLUSIVE, ["costs at 64"]),
])  # fmt: skip
def test_speculation_gains_until_crossing_load(ratios, noise, smallest, crosses, words):
    curve = drafting(*ratios, noise=noise)
    first, found = (judge(claim, curve) for claim in (GAINS, CROSSES))
    assert (first.state, found.state) == (smallest, crosses) and tells(found.why, *words), found.why
    assert first.value == pytest.approx(ratios[0]) and tells(first.why, 1, 1.7) and "nothing of real text" in first.why
    assert (found.value is not None) is (crosses is PASSES) and "nothing of real text" in found.why
    if crosses is PASSES:
        assert 4 < found.low < found.value < found.high < 16 and found.n == len(found.records)


def test_speculation_pairs_otherwise_equal_engines():
    plain, real = of_rates(PLAIN, None), of_rates(PLAIN, load_format="auto")
    larger = of_rates(PLAIN, '{"model": "opt-tiny"}', kv_cache_bytes=0)  # the cache is what a draft model leaves
    other = of_rates(PLAIN, '{"method": "suffix"}')
    found = with_plain([other, plain, real, larger, Curve(subject="opt-1.3b")])
    assert [curve.plain for curve in found] == [plain, None, None, plain, None]
    assert [applies(claim_of(CROSSES), curve) for curve in found] == [True, False, False, True, False]
    said = "at a planted acceptance of 2 tokens a step"
    planted = '{"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}'
    verdict = judge(GAINS, drafting(1.6, 1.2, 0.9, 0.7, config=planted))
    assert said in verdict.why and "real text" not in verdict.why


def test_speculation_claim_says_missing_data():
    elsewhere = {2 * load: rate for load, rate in PLAIN.items()}
    for curve, fact in (
        (drafting(None, 1.2, 0.9, 0.7), "planted: invalid"),
        (drafting(1.6, 1.2, 0.9, 0.7, plain={**PLAIN, 1: None}), "planted: invalid"),
        (drafting(1.6, 1.2, 0.9, 0.7, plain=elsewhere), "with and without"),
        (drafting(1.6, 1.2), "3 are needed"),
    ):
        for claim in (GAINS, CROSSES):
            verdict = judge(claim, curve)
            assert verdict.state is INCONCLUSIVE and fact in verdict.why, verdict.why
    larger = drafting(1.6, 1.2, 0.9, None)
    assert [judge(claim, larger).state for claim in (GAINS, CROSSES)] == [PASSES, INCONCLUSIVE]
