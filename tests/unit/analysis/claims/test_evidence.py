"""What each claim is judged by: planted figures of sweeps, models, jobs and replicas, of every size and noise, pass,
fail or are too noisy; what no sensor saw or no run measured is not guessed; and records that refute each claim."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from functools import partial
from math import isfinite
from statistics import fmean

import pytest
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from strategies import H200, judge, measurement, point, without

from pytest_slmserve.analysis.claims import evidence
from pytest_slmserve.analysis.claims.evidence import (
    IDLE_TENSOR,
    NO_DECODING,
    NO_ENERGY,
    NO_PROFILE,
    NO_UTIL,
    at_table_1,
)
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM
from pytest_slmserve.analysis.points import Summary
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.specs import GIB, ClosedLoop

PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
ORDINARY = {
    "gpu_util": [1.0, 1.0],
    "sm_active": [0.7, 0.7],
    "sm_occupancy": [0.15, 0.15],
    "dram_active": [0.6, 0.6],
    "tensor_active": [0.1, 0.1],
    "decode_dram": [0.6, 0.6],
    "decode_tensor": [0.1, 0.1],
    "saturation_gap": [1.7, 1.7],
    "energy_per_token_j": [0.1, 0.1],
    "power_limit_w": [700.0, 700.0],
}
FEW_WARPS, SATURATES_FIRST = "occupancy-below-a-saturated-kernel", "gpu-util-saturates-first"
MEMORY_BOUND, UTIL_FALLS = "decode-stays-memory-bound", "gpu-util-falls-at-the-largest-load"
CHEAPER, DEARER = "energy-per-token-falls-with-load", "energy-per-token-grows-with-model"
OF_ONE_CURVE = (FEW_WARPS, SATURATES_FIRST, MEMORY_BOUND, CHEAPER)
few_warps = partial(judge, FEW_WARPS, threshold=0.5)
util_saturates_first, memory_bound = partial(judge, SATURATES_FIRST), partial(judge, MEMORY_BOUND)
cheaper_tokens, dearer_models = partial(judge, CHEAPER), partial(judge, DEARER)


def judged(claim, curve):
    """The verdict on a claim on one sweep."""
    return few_warps(curve) if claim == FEW_WARPS else judge(claim, curve)


def sensed(concurrency, rates=None, **figures):
    """A point whose repeats saw these figures; a number is that of both repeats."""
    rates = rates if rates is not None else [100.0 * concurrency, 101.0 * concurrency]
    lists = {name: [seen] * len(rates) if isinstance(seen, float) else seen for name, seen in figures.items()}
    seen = {**{name: values[: len(rates)] for name, values in ORDINARY.items()}, **lists}
    each = tuple(
        Summary(**{name: values[i] for name, values in seen.items() if i < len(values)}) for i in range(len(rates))
    )
    means = {
        f.name: fmean(known)
        for f in fields(Summary)
        if f.name in seen and (known := [v for v in seen[f.name] if v is not None])
    }
    return replace(point(concurrency, rates), each=each, **means)


def of_points(*points, subject="opt-1.3b", **facts):
    return Curve(subject=subject, points=points, measurements=(measurement(1, 100.0, model=subject, **facts),))


def sweep(figure, *by_load, **more):
    """Three points, of which one figure is planted."""
    return of_points(*(sensed(4**i, **{figure: seen}, **more) for i, seen in enumerate(by_load)))


def drop(curve, names, at=None):
    """Without these figures: at all loads, or at one."""
    nothing = dict.fromkeys(names)

    def blind(p):
        if at not in (None, p.concurrency):
            return p
        return replace(p, each=tuple(replace(s, **nothing) for s in p.each), **nothing)

    return replace(curve, points=tuple(blind(p) for p in curve.points))


PROFILE = ("sm_active", "sm_occupancy", "dram_active", "tensor_active", "saturation_gap")
DECODING = ["decode_dram", "decode_tensor", "saturation_gap"]
ENERGY = ("energy_per_token_j", "power_w")


# Warps


@pytest.mark.parametrize(
    ("at_largest", "state"),
    [([0.15, 0.151], PASSES), ([0.6, 0.601], FAILS), ([0.45, 0.55], INCONCLUSIVE), ([0.2, 0.9], INCONCLUSIVE)],
)
def test_warps_at_the_largest_load(at_largest, state):
    verdict = few_warps(sweep("sm_occupancy", 0.9, 0.9, at_largest))
    assert (verdict.state, verdict.value, verdict.threshold) == (state, pytest.approx(fmean(at_largest)), 0.5)
    assert verdict.records == ("16-0", "16-1") and tells(verdict.why, 16, "70 %", "50 %")


def test_no_share_is_below_nothing_or_above_all():
    assert few_warps(sweep("sm_occupancy", [0.02, 0.10], [0.02, 0.10], [0.02, 0.10])).low == 0.0
    assert few_warps(sweep("sm_occupancy", [0.9, 1.0], [0.9, 1.0], [0.9, 1.0])).high == 1.0


def test_interval_of_the_warps_by_hand():
    # spread within the groups 0.02 apart, 0 and 0: sd = sqrt(0.0002 / 3) with 3 degrees of freedom, 3.1824 for 95 %
    verdict = few_warps(sweep("sm_occupancy", [0.11, 0.13], [0.2, 0.2], [0.15, 0.15]))
    half = 3.1824 * (0.0002 / 3) ** 0.5 / 2**0.5
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((0.15, 0.15 - half, 0.15 + half), abs=1e-6)
    assert half == pytest.approx(0.01837, abs=1e-5)


def test_what_fails_at_one_of_several_loads_is_corrected_for_the_choice():
    """Three loads, each 0.02 apart: the sd is 0.02 / sqrt 2 with 3 degrees of freedom, 4.857 for 95 % of three."""
    verdict = judge("sm-activity-stays-low", sweep("sm_active", [0.19, 0.21], [0.69, 0.71], [0.29, 0.31]))
    half = 4.857 * 0.02 / 2**0.5 / 2**0.5
    assert verdict.state is FAILS and verdict.value == pytest.approx(0.7)
    assert (verdict.low, verdict.high) == pytest.approx((0.7 - half, 0.7 + half), abs=1e-4)


def test_launches_that_measured_equally_often_are_what_is_repeated():
    # means of launches 0.04 apart in one group, 0 in the others: as single repeats 0.04 * sqrt 2, 3 degrees of freedom
    def of_two_launches(load, *occupancy):
        used = tuple((measurement(load, 100.0, launch=launch, repeat=i),) for launch in "ab" for i in range(2))
        return replace(sensed(load, [100.0] * 4, sm_occupancy=[*occupancy]), used=used)

    quiet = [of_two_launches(load, 0.2, 0.2, 0.2, 0.2) for load in (1, 4)]
    verdict = few_warps(of_points(*quiet, of_two_launches(16, 0.10, 0.10, 0.14, 0.14)), threshold=0.15)
    half = 3.1824 * (0.04**2 / 3) ** 0.5 / 4**0.5
    assert (verdict.low, verdict.high) == pytest.approx((0.12 - half, 0.12 + half), abs=1e-6)
    assert verdict.state is INCONCLUSIVE, "four repeats for themselves would tell 0.12 within 0.015"


# Counters at every load


@pytest.mark.parametrize(
    ("claim", "figure", "values", "state", "value", "loads"),
    [
        ("sm-activity-stays-low", "sm_active", (0.3, 0.45, 0.4), PASSES, 0.45, 4),
        ("sm-activity-stays-low", "sm_active", (0.3, 0.9, 0.4), FAILS, 0.9, 4),
        ("host-takes-at-most-half", "engine_active", (0.9, 0.6, 0.8), PASSES, 0.4, 4),
        ("host-takes-at-most-half", "engine_active", (0.9, 0.8, 0.2), FAILS, 0.8, 16),
        ("decode-saturates-dram", "decode_dram", (0.1, 0.1, 0.8), PASSES, 0.8 / REACHABLE_DRAM, 16),
        ("decode-saturates-dram", "decode_dram", (0.9, 0.9, 0.3), FAILS, 0.3 / REACHABLE_DRAM, 16),
        ("gpu-util-falls-at-the-largest-load", "gpu_util", (1.0, 0.9, 0.8), PASSES, 0.8, 16),
        ("gpu-util-falls-at-the-largest-load", "gpu_util", (0.8, 0.9, 0.88), FAILS, 1.1, 16),
    ],
)
def test_the_load_with_the_most_or_the_largest_decides(claim, figure, values, state, value, loads):
    pairs = [[0.999 * v, 1.001 * v] for v in values]
    verdict = judge(claim, sweep(figure, *pairs))
    assert (verdict.state, verdict.value) == (state, pytest.approx(value, rel=1e-3)) and tells(verdict.why, loads)
    assert verdict.low < verdict.value < verdict.high
    assert judge(claim, drop(sweep(figure, *pairs), [figure])).state is INCONCLUSIVE


# GPU utilisation


def served(*rates, util):
    return of_points(
        *(sensed(4**i, [r, 1.01 * r], gpu_util=u) for i, (r, u) in enumerate(zip(rates, util, strict=True)))
    )


@pytest.mark.parametrize(
    ("rates", "util", "state"),
    [
        ((100.0, 300.0, 900.0), (0.95, 1.0, 1.0), PASSES),
        ((100.0, 300.0, 330.0), (0.5, 0.92, 1.0), FAILS),
        ((100.0, 300.0, 450.0), (0.5, 0.92, 1.0), INCONCLUSIVE),
        ((100.0, 300.0, 900.0), (0.5, 0.6, 0.7), FAILS),
        ((100.0, 900.0, 300.0), (0.5, 0.6, 0.95), FAILS),  # the best load came before
        ((100.0, 400.0, 1600.0), (0.5, 0.6, [0.80, 0.99]), INCONCLUSIVE),  # it may be full
    ],
)
def test_throughput_after_utilisation_is_full(rates, util, state):
    assert util_saturates_first(served(*rates, util=util)).state is state


def test_utilisation_at_its_end_is_told_with_the_factor():
    verdict = util_saturates_first(served(100.0, 300.0, 900.0, util=(0.95, 1.0, 1.0)))
    assert verdict.value == pytest.approx(9.0) and verdict.low < 9 < verdict.high
    assert tells(verdict.why, "95 %", 1, 16)
    never = util_saturates_first(served(100.0, 300.0, 900.0, util=(0.5, 0.6, 0.7)))
    assert (never.state, never.value) == (FAILS, None) and tells(never.why, "90 %", "70 %")


def test_noise_leaves_open_whether_utilisation_is_full_at_a_smaller_load():
    """From concurrency 1 throughput grows 9 times, from 4 on no more: who says "fails" has to know that it is not 1."""
    unsure = served(100.0, 900.0, 910.0, util=([0.80, 0.99], 0.95, 1.0))
    verdict = util_saturates_first(unsure)
    assert verdict.state is INCONCLUSIVE and tells(verdict.why, "90 %", 1)
    assert util_saturates_first(served(100.0, 900.0, 910.0, util=(0.80, 0.95, 1.0))).state is FAILS


def test_throughput_at_the_largest_load_over_itself_is_one_without_noise():
    verdict = util_saturates_first(served(100.0, 300.0, 900.0, util=(0.5, 0.6, 0.95)))
    assert (verdict.state, verdict.value, verdict.low, verdict.high) == (FAILS, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("claim", [SATURATES_FIRST, UTIL_FALLS])
@pytest.mark.parametrize(
    ("util", "why"), [((0.0, 0.0, 0.0), NO_UTIL), ((0.0, 0.9, 0.9), f"{NO_UTIL} at concurrency 1")]
)
def test_a_utilisation_of_0_while_tokens_come_was_not_measured(claim, util, why):
    assert judge(claim, served(100.0, 300.0, 900.0, util=util)).why == why


# Memory against tensor cores


@pytest.mark.parametrize(
    ("gaps", "state"),
    [
        (([1.7, 1.7], [1.2, 1.21], [0.9, 0.91]), PASSES),
        (([1.7, 1.7], [-0.5, -0.51], [0.9, 0.91]), FAILS),
        (([1.7, 1.7], [0.01, -0.01], [0.9, 0.91]), INCONCLUSIVE),
        (([1.7, 0.5], [0.3, 0.3], [0.9, 0.9]), INCONCLUSIVE),
    ],
)
def test_the_load_at_which_memory_is_least_near_decides(gaps, state):
    verdict = memory_bound(sweep("saturation_gap", *gaps))
    assert verdict.state is state and verdict.n == 6, "it rests on all loads"
    assert verdict.value == pytest.approx(math.exp(min(map(fmean, gaps))))
    assert tells(verdict.why, 4 ** gaps.index(min(gaps, key=fmean)))


def test_the_factor_of_the_memory_by_hand():
    # ln 2 and ln 2 less 0.02, plus 0.02: the sd of each group is 0.02 * sqrt 2, pooled the same, 3 degrees of freedom
    log2 = 0.6931472
    pair = [log2 - 0.02, log2 + 0.02]
    verdict = memory_bound(sweep("saturation_gap", pair, [1 - 0.02, 1 + 0.02], [2 - 0.02, 2 + 0.02]))
    half = 3.1824 * 0.02 * 2**0.5 / 2**0.5
    assert verdict.value == pytest.approx(2.0, rel=1e-5)
    assert (verdict.low, verdict.high) == pytest.approx((2 * 2.718281828**-half, 2 * 2.718281828**half), rel=1e-5)


def test_tensor_cores_that_did_not_run_at_a_load_are_no_doubt():
    still = drop(sweep("saturation_gap", 1.7, 1.7, 1.7), ["saturation_gap"], at=1)
    still = replace(still, points=(replace(still.points[0], decode_tensor=0.0), *still.points[1:]))
    assert memory_bound(still).state is PASSES
    never = drop(still, ["saturation_gap"])
    assert (memory_bound(never, 1.0).state, memory_bound(never).why) == (INCONCLUSIVE, IDLE_TENSOR)


# Energy of a token in one sweep


@pytest.mark.parametrize(
    ("joules", "state"),
    [
        (([1.0, 1.01], [0.5, 0.5], [0.1, 0.1]), PASSES),
        (([1.0, 1.01], [0.1, 0.1], [0.8, 0.8]), FAILS),
        (([1.0, 1.01], [0.5, 0.5], [0.5, 0.51]), INCONCLUSIVE),
        (([0.5, 2.0], [0.5, 0.5], [0.1, 0.5]), INCONCLUSIVE),
    ],
)
def test_energy_of_a_token_at_the_largest_load(joules, state):
    verdict = cheaper_tokens(sweep("energy_per_token_j", *joules))
    assert (verdict.state, verdict.value) == (state, pytest.approx(fmean(joules[2]) / fmean(joules[0])))
    assert verdict.records == ("1-0", "1-1", "16-0", "16-1")


def test_interval_of_an_energy_ratio_by_hand():
    # logs 2 ln 1.01 apart in one group of three, 0 in the others: sd = ln 1.01 * sqrt(2 / 3), 3 degrees of freedom
    verdict = cheaper_tokens(sweep("energy_per_token_j", [1 / 1.01, 1.01], [0.5, 0.5], [0.2, 0.2]))
    half = 3.1824 * 0.00995033 * (2 / 3) ** 0.5
    ratio = 0.2 / fmean([1 / 1.01, 1.01])
    assert verdict.value == pytest.approx(ratio)
    assert (verdict.low, verdict.high) == pytest.approx((ratio * 2.718281828**-half, ratio * 2.718281828**half))


def test_another_power_limit_is_another_card():
    moved = of_points(sensed(1, power_limit_w=500.0), sensed(4), sensed(16, energy_per_token_j=0.01))
    verdict = cheaper_tokens(moved)
    assert verdict.state is INCONCLUSIVE and tells(verdict.why, "500 W", "700 W")


# What is missing


@pytest.mark.parametrize(
    ("claim", "names", "at", "why"),
    [
        (FEW_WARPS, PROFILE, None, NO_PROFILE),
        (SATURATES_FIRST, ["gpu_util"], None, NO_UTIL),
        (MEMORY_BOUND, PROFILE, None, NO_PROFILE),
        (MEMORY_BOUND, DECODING, None, NO_DECODING),
        (CHEAPER, ENERGY, None, NO_ENERGY),
        (FEW_WARPS, ["sm_occupancy"], 16, NO_PROFILE),
        (SATURATES_FIRST, ["gpu_util"], 1, f"{NO_UTIL} at concurrency 1"),
        (MEMORY_BOUND, ["dram_active", "saturation_gap"], 4, f"{NO_PROFILE} at concurrency 4"),
        (MEMORY_BOUND, DECODING, 16, f"{NO_DECODING} at concurrency 16"),
        (CHEAPER, ["energy_per_token_j"], 16, f"{NO_ENERGY} at concurrency 16"),
    ],
)
def test_what_no_sensor_saw_is_not_guessed(claim, names, at, why):
    verdict = judged(claim, drop(sweep("sm_occupancy", 0.1, 0.1, 0.1), [n for n in names if n in ORDINARY], at))
    assert (verdict.state, verdict.why, verdict.value) == (INCONCLUSIVE, why, None)


@pytest.mark.parametrize("claim", OF_ONE_CURVE)
def test_obstacles_of_the_sweep_come_first(claim):
    whole = sweep("sm_occupancy", 0.1, 0.1, 0.1)
    assert judged(claim, whole).state in (PASSES, FAILS)
    single = replace(whole, points=tuple(sensed(4**i, [100.0]) for i in range(3)))
    for curve, facts in (
        (replace(whole, missing=(64,)), (64,)),
        (without(whole, 4), (4, "invalid")),
        (replace(whole, points=whole.points[:2]), (2, 3)),
        (single, ("--slm-repeats 2",)),
        (Curve(subject="opt-1.3b"), (0, 3)),
    ):
        verdict = judged(claim, curve)
        assert verdict.state is INCONCLUSIVE and tells(verdict.why, *facts)


def test_a_figure_known_of_one_repeat_only_has_no_interval():
    once = of_points(*(sensed(4**i, sm_occupancy=[0.1, None]) for i in range(3)))
    verdict = few_warps(once)
    assert (verdict.state, verdict.value, verdict.low) == (INCONCLUSIVE, 0.1, None)
    assert tells(verdict.why, "--slm-repeats 2")


# Models against each other


def table_1(model, joules, concurrency=None, limit=700.0, **facts):
    """One point at the paper's batch, or elsewhere."""
    batch = concurrency or {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128}[model]
    return of_points(sensed(batch, energy_per_token_j=joules, power_limit_w=limit), subject=model, **facts)


SMALL, LARGE = table_1("opt-125m", [0.0099, 0.0101]), table_1("opt-1.3b", [0.049, 0.051])


@pytest.mark.parametrize(
    ("large", "state"),
    [
        ([0.049, 0.051], PASSES),
        ([0.0049, 0.0051], FAILS),
        ([0.0099, 0.0102], INCONCLUSIVE),
        ([0.005, 0.05], INCONCLUSIVE),
    ],
)
def test_a_larger_model_against_the_next_smaller(large, state):
    verdict = dearer_models(table_1("opt-1.3b", large), [SMALL])
    assert (verdict.state, verdict.value) == (state, pytest.approx(fmean(large) / 0.01))
    assert verdict.subject == "opt-1.3b" and tells(verdict.why, "opt-125m", "0.01 J", 512)
    assert set(verdict.records) == {"256-0", "256-1", "512-0", "512-1"}


def test_one_repeat_of_each_model_is_inconclusive():
    small, large = (
        of_points(sensed(n, [1e4], energy_per_token_j=[j]), subject=m)
        for m, n, j in (("opt-125m", 512, 0.01), ("opt-1.3b", 256, 0.05))
    )
    verdict = dearer_models(large, [small])
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, pytest.approx(5)) and tells(verdict.why, "--slm-repeats 2")


def of_another_workload():
    [m] = SMALL.measurements
    return replace(SMALL, measurements=(replace(m, workload=replace(m.workload, hash="another")),))


@pytest.mark.parametrize(
    "other",
    [
        table_1("opt-2.7b", 0.001),
        table_1("opt-125m", 0.01, concurrency=256),
        drop(SMALL, ["energy_per_token_j"]),
        without(SMALL, 512),
        table_1("opt-125m", 0.01, environment=replace(H200, gpu_name="NVIDIA H100")),
        table_1("opt-125m", 0.01, load=ClosedLoop(512, ramp_up="burst")),
        of_another_workload(),
    ],
    ids=["other model", "other load", "no energy", "invalid", "other GPU", "other starts", "other workload"],
)
def test_only_like_is_compared_with_like(other):
    verdict = dearer_models(LARGE, [other])
    assert verdict.state is INCONCLUSIVE and tells(verdict.why, "opt-125m", 512)
    assert dearer_models(LARGE, [other, SMALL]).state is PASSES, "the right one is found beside it"


def test_engines_may_differ_in_what_the_weights_leave_and_in_nothing_else():
    [m] = SMALL.measurements
    less = replace(SMALL, measurements=(replace(m, spec=replace(m.spec, kv_cache_bytes=1 << 30)),))
    eager = replace(SMALL, measurements=(replace(m, spec=replace(m.spec, enforce_eager=True)),))
    assert dearer_models(LARGE, [less]).state is PASSES
    assert dearer_models(LARGE, [eager]).state is INCONCLUSIVE


def test_its_own_energy_or_limit_may_be_another_or_missing_too():
    limited = dearer_models(LARGE, [table_1("opt-125m", [0.0099, 0.0101], limit=500.0)])
    assert limited.state is INCONCLUSIVE and tells(limited.why, "500 W", "700 W")
    blind = dearer_models(drop(LARGE, ["energy_per_token_j"]), [SMALL])
    assert blind.state is INCONCLUSIVE and tells(blind.why, "opt-1.3b", 256)


@pytest.mark.parametrize("model", ["opt-125m", "opt-350m", "qwen2.5-3b", ""])
def test_models_without_a_smaller_one_in_the_table(model):
    verdict = dearer_models(Curve(subject=model), [SMALL, LARGE])
    assert (verdict.state, verdict.value) == (INCONCLUSIVE, None)


def test_the_point_of_the_table():
    assert at_table_1(LARGE).concurrency == 256
    assert at_table_1(of_points(sensed(256), subject="opt-125m")) is None
    [m] = LARGE.measurements
    on_two = replace(m, spec=replace(m.spec, tensor_parallel_size=2))
    assert at_table_1(replace(LARGE, measurements=(on_two,))) is None, "the table is of one GPU"
    assert at_table_1(Curve(subject="opt-6.7b")) is at_table_1(of_points(sensed(1), subject="qwen2.5-3b")) is None


# For all curves


FIGURES = ("gpu_util", "sm_active", "sm_occupancy", "dram_active", "tensor_active", "saturation_gap")
VALUES = st.none() | st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -1.0]) | st.floats(-1e9, 1e9)


@st.composite
def any_curves(draw):
    """Whatever sensors may have said, sensible or not, of any loads."""
    loads = draw(st.lists(st.sampled_from([1, 2, 16, 128, 256, 512]), max_size=5, unique=True).map(sorted))
    points = []
    for load in loads:
        repeats = draw(st.integers(0, 3))
        each = tuple(
            Summary(**{name: draw(VALUES) for name in (*FIGURES, "energy_per_token_j", "power_limit_w")})
            for _ in range(repeats)
        )
        means = {name: draw(VALUES) for name in FIGURES}
        points.append(replace(point(load, [100.0 * load] * repeats), each=each, **means))
    return Curve(subject=draw(st.sampled_from(["opt-125m", "opt-1.3b", "opt-2.7b", "x"])), points=tuple(points))


@given(any_curves(), st.lists(any_curves(), max_size=2))
def test_judging_is_total_and_sure_only_with_an_interval(curve, others):
    verdicts = [judged(claim, curve) for claim in OF_ONE_CURVE]
    for verdict in (*verdicts, dearer_models(curve, others)):
        assert verdict.subject == curve.subject and verdict.why
        if verdict.state is not INCONCLUSIVE and verdict.value is not None:
            rounding = 1e-9 * abs(verdict.value) if isfinite(verdict.value) else 0.0
            assert verdict.low - rounding <= verdict.value <= verdict.high + rounding


def noisy(chance, scale):
    """A sweep whose figures scatter about their means by so much, of the mean."""

    def pair(mean):
        off = chance.uniform(0, 1) * scale * mean
        return [mean - off, mean + off]

    return of_points(
        *(
            sensed(
                load,
                sm_occupancy=pair(chance.uniform(0.1, 0.9)),
                saturation_gap=pair(chance.uniform(-2, 2)),
                energy_per_token_j=pair(chance.uniform(0.1, 1)),
                gpu_util=1.0,
            )
            for load in (1, 16, 256)
        )
    )


@given(st.integers(0, 10**6), st.floats(0, 0.4), st.floats(1, 2))
def test_more_noise_never_decides(seed, scale, more):
    quiet, loud = noisy(random.Random(seed), scale), noisy(random.Random(seed), scale * more)
    for claim in (FEW_WARPS, MEMORY_BOUND, CHEAPER):
        one, other = judged(claim, quiet), judged(claim, loud)
        assert one.value == pytest.approx(other.value)
        assert other.state in (one.state, INCONCLUSIVE)
        assert one.state is not INCONCLUSIVE or other.state is INCONCLUSIVE


@pytest.mark.parametrize(
    ("rates", "util", "state"),
    [
        ((100.0, 300.0, 900.0), (0.5, 0.95, 1.0), PASSES),  # and from an earlier load on it grows by no less
        ((100.0, 600.0, 700.0), (0.5, 0.95, 1.0), INCONCLUSIVE),  # it may have been full at a load that was left out
        ((100.0, 300.0, 900.0), (0.5, 0.6, 0.7), INCONCLUSIVE),
    ],
)
def test_what_fails_at_the_loads_of_an_adaptive_sweep_need_not_fail_between_them(rates, util, state):
    whole = served(*rates, util=util)
    part = replace(whole, adaptive=True, unneeded=(2, 8))
    for claim in (SATURATES_FIRST, MEMORY_BOUND):
        assert tells(judge(claim, part).why, "1, 4, 16") and not tells(judge(claim, whole).why, "1, 4, 16")
    assert util_saturates_first(part).state is state
    low = replace(sweep("sm_active", 0.3, 0.4, 0.4), adaptive=True)
    doubtful = judge("sm-activity-stays-low", replace(low, unneeded=(2, 8)))
    assert (judge("sm-activity-stays-low", low).state, doubtful.state) == (PASSES, INCONCLUSIVE)
    assert util_saturates_first(whole).state is (PASSES if state is PASSES else FAILS)


# Table 1 of arXiv:2404.03353


MODELS = list(evidence.PUBLISHED)
LONGEST = 2048  # positions of OPT


@pytest.mark.parametrize(
    ("model", "published", "longest", "known"),
    [
        ("opt-125m", 512, 508, 1356),
        ("opt-1.3b", 256, 89, 238),
        ("opt-2.7b", 128, 49, 132),
        ("opt-6.7b", 64, 23, 62),
        ("opt-13b", 16, 7, 20),
    ],
)
def test_the_table(model, published, longest, known):
    assert evidence.PUBLISHED[model] == published
    assert (evidence.largest_batch(model, LONGEST), evidence.largest_batch(model)) == (longest, known)
    assert evidence.largest_batch(model, evidence.KNOWN, block=evidence.BLOCK_SIZE) == known, (
        "768 tokens are 48 whole blocks"
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_paper_overcommits_two_models_which_fit_only_on_the_average(model):
    verdict = judge("table-1-batch-fits", Curve(subject=model))
    overcommitted = model in ("opt-1.3b", "opt-6.7b")
    assert verdict.state is (FAILS if overcommitted else PASSES)
    assert (verdict.value, verdict.threshold) == (evidence.largest_batch(model), evidence.PUBLISHED[model])
    mean = evidence.largest_batch(model, evidence.MEAN, block=evidence.BLOCK_SIZE)
    assert tells(verdict.why, mean) is overcommitted and mean >= evidence.PUBLISHED[model]


@pytest.mark.parametrize(
    ("claim", "value", "threshold", "state"),
    [
        ("table-1-request-size", 150_994_944, 50_000_000, FAILS),
        ("table-1-batch-size", 512 * 150_994_944, 25_600_000_000, FAILS),
    ],
)
def test_fifty_megabytes_is_off_by_three(claim, value, threshold, state):
    verdict = judge(claim, Curve(subject="opt-1.3b"))
    assert (verdict.state, verdict.value, verdict.threshold) == (state, value, threshold)
    assert {judge(claim, Curve(subject=model)).state for model in ("opt-2.7b", "opt-tiny")} == {INCONCLUSIVE}


def test_of_larger_models_less_than_500_requests_fit():
    verdicts = [judge("larger-models-cannot-hold-500", Curve(subject=model)) for model in MODELS]
    assert [v.state for v in verdicts] == [PASSES if evidence.largest_batch(m) < 500 else FAILS for m in MODELS]
    assert {v.threshold for v in verdicts} == {500} and {v.state for v in verdicts} == {PASSES, FAILS}
    assert judge("table-1-batch-fits", Curve(subject="opt-tiny")).state is INCONCLUSIVE


@given(st.sampled_from(MODELS), st.integers(30, 200))
def test_known_lengths_and_pages_never_hold_less_than_the_longest(model, gib):
    longest, known = (evidence.largest_batch(model, tokens, gib * GIB) for tokens in (LONGEST, evidence.KNOWN))
    lengths = (evidence.KNOWN, evidence.MEAN)
    paged, mean = (evidence.largest_batch(model, tokens, gib * GIB, evidence.BLOCK_SIZE) for tokens in lengths)
    assert longest <= paged <= known and paged <= mean
