"""Batch, memory and number of engines: on published results, on planted laws and by hand; a stricter limit never
gives more, more memory never less, what is divided always fits, and every unknown is told."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from facts import tells
from hypothesis import example, given
from hypothesis import strategies as st
from published import ROWS
from strategies import law, point, work_of_model

from pytest_slmserve.analysis.advice.advisor import (
    REACH,
    Advice,
    BatchOption,
    Footprint,
    ModelSweep,
    Objectives,
    ServedEngine,
    decide,
    divide,
    gains_at,
    needs,
    plan,
    replicas_that_split,
    through,
    utilization,
)
from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.batching import AbsoluteSlo, RelativeSlo
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec

B_HALF_FROM_SHAPES = 40.6  # OPT-1.3B, a context of 330 tokens
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHAPE = CATALOGUE["opt-1.3b"]
FOOTPRINT = Footprint(weight_bytes=2_631_516_160, kv_bytes_per_token=196_608, longest=768, allowance_bytes=2 * GIB)
ENGINE = ServedEngine(spec=EngineSpec("opt-1.3b"), dtype="float16", footprint=FOOTPRINT, kv_had_bytes=120 * GIB)
GPU = 140 * GIB


def published(*knobs: int) -> list[Point]:
    """Batches by Little's law: output tokens/s times the time between tokens."""
    return [
        replace(point(knob, [total], [ms / 1e3]), batch_repeats=(output * ms / 1e3,))
        for knob, output, total, ms, _ in ROWS
        if not knobs or knob in knobs
    ]


def planted(batches=GRID, b_half: float = 45.0, **figures: object) -> list[Point]:
    """Points of the law; their latency is that of a step."""
    return [replace(point(b, [law(b, b_half=b_half)], [b / law(b, b_half=b_half)]), **figures) for b in batches]


def subject(
    points: list[Point], name: str = "opt-1.3b", engine: ServedEngine | None = ENGINE, **facts: object
) -> ModelSweep:
    return ModelSweep(name=name, points=tuple(points), engine=engine, **facts)


def advice(points: list[Point], wish: Objectives, **facts: object) -> Advice:
    return plan([subject(points, **facts)], wish).advices[0]


# The batch


@pytest.mark.parametrize(("factor", "chosen", "cap"), [(2, 96, 105), (4, 256, 250)])
def test_the_published_choice(factor, chosen, cap):
    wish = Objectives(slo=RelativeSlo(factor, 32), threshold=0.1)
    seen = decide(subject(published(), b_half=B_HALF_FROM_SHAPES), wish)
    assert seen.batch == chosen and not seen.predicted and seen.reason == ""
    assert round(seen.caps.slo) == cap and round(seen.caps.efficiency) == 375
    assert decide(subject(published()), wish).batch == chosen, "without shapes as well"


def test_two_published_points_predict_the_larger_ones():
    """From 1 and 32 alone: every larger load is told 8 to 13 % too slow."""
    wait = decide(subject(published(1, 32)), Objectives()).wait
    errors = [wait.seconds(p.batch_repeats[0]) / p.e2e_repeats[0] - 1 for p in published() if p.concurrency > 32]
    assert len(errors) == 6 and min(errors) > 0.075 and max(errors) < 0.135


def test_a_prediction_is_marked_and_careful():
    found = plan([subject(published(1, 32))], Objectives(slo=RelativeSlo(4, 32), gpu_bytes=GPU))
    seen = found.advices[0]
    assert seen.decision.predicted and 180 < seen.batch < 256 and seen.advised.predicted
    assert tells(seen.decision.notes[0], "1 and 32") and seen.decision.choice == ChosenLoad(seen.decision.batch)
    assert seen.replicas.advised == 1, "it is to be measured first"


@given(st.floats(0.5, 500), st.sampled_from(GRID[1:7]), st.floats(0.05, 0.9), st.floats(1.05, 8))
def test_on_a_planted_law_two_loads_tell_what_the_closed_form_does(b_half, second, threshold, factor):
    seen = decide(
        subject(planted((1, second), b_half)), Objectives(slo=RelativeSlo(factor, second), threshold=threshold)
    )
    cap = min((1 + b_half) / threshold - b_half, factor * (second + b_half) - b_half)
    if cap >= REACH * second:
        assert seen.batch == REACH * second and tells(seen.notes[1], f"{REACH} times")
    else:
        assert seen.batch == pytest.approx(cap, abs=1 + 1e-6 * (cap + b_half)) and seen.batch <= cap * (1 + 1e-9) + 1e-6


def test_no_batch_is_predicted_that_a_step_cannot_take():
    """vLLM does not start where max_num_seqs is above max_num_batched_tokens."""
    engine = replace(ENGINE, max_num_batched_tokens=256)
    seen = decide(subject(planted((8, 64)), engine=engine), Objectives(threshold=0.01))
    assert seen.batch == 256 and tells(seen.notes[1], "max_num_batched_tokens", 256)


def test_two_loads_of_which_the_larger_is_all_that_is_allowed_are_a_measurement():
    seen = decide(subject(published(1, 32)), Objectives(slo=RelativeSlo(1, 32)))
    assert seen.batch == 32 and not seen.predicted and seen.notes == ()


def test_t_of_one_and_the_objective_may_be_by_the_law_too():
    seen = decide(subject(planted((8, 64))), Objectives(slo=RelativeSlo(2, 128)))
    assert seen.predicted and seen.batch == 2 * (128 + 45) - 45
    assert any(tells(note, "T(1)") for note in seen.notes) and any(tells(note, 128) for note in seen.notes)


@pytest.mark.parametrize(
    ("points", "facts"),
    [
        ([], (0,)),
        (planted((64,)), (1, 64)),
        ([point(8, [100.0], [0.1]), point(64, ())], (1, 8)),
        ([point(8, [100.0], [0.1]), point(64, [800.0], [0.1])], ("8 and 64",)),
        ([point(b, [100.0 * b], [0.1]) for b in (2, 4, 8)], ("T(1)",)),
    ],
)
def test_where_nothing_can_be_advised_the_reason_is_told(points, facts):
    found = plan([subject(points)], Objectives(slo=AbsoluteSlo(1.0), gpu_bytes=GPU))
    [only] = found.advices
    assert not found.possible and only.batch is only.advised is only.needs is only.gains is found.together is None
    assert tells(only.decision.reason, *facts)


@pytest.mark.parametrize("batches", [GRID, (1, 8)])
def test_no_batch_within_the_limit(batches):
    seen = decide(subject(planted(batches)), Objectives(slo=AbsoluteSlo(1e-6)))
    assert seen.batch is None and not seen.predicted and tells(seen.reason, "10 %", "0.001 ms")


def test_degraded_and_invalid_points_are_never_chosen():
    points = planted()
    points[GRID.index(64)] = replace(points[GRID.index(64)], degraded=("the clock fell",))
    points[GRID.index(128)] = point(128, ())
    found = advice(points, Objectives(threshold=0.2, gpu_bytes=GPU))
    assert found.batch == 32, "alone 64 and 128 would be allowed by efficiency, 256 is not"
    assert decide(subject(planted()), Objectives(threshold=0.2)).batch == 128


def test_a_smaller_load_with_more_throughput_and_a_law_that_is_off_are_told():
    points = [*planted(GRID[:-1]), point(512, [law(64)], [0.1])]
    notes = decide(subject(points), Objectives(threshold=0.001)).notes
    assert [any(tells(note, *facts) for note in notes) for facts in ((256, "44.9 %"), (512,), ("45 %",))].count(
        True
    ) >= 2
    assert any("law" in note for note in notes) and not any(
        "law" in n for n in decide(subject(planted()), Objectives()).notes
    )


LOADS = st.sets(st.integers(2, 600), min_size=1, max_size=7).map(lambda found: sorted({1, *found}))


@given(LOADS, st.floats(0.5, 500), st.floats(0.02, 0.9), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
@example([1, 55], 386.0, 0.25, 1.0, 0.125)  # what the law allows does not fit into the memory
def test_a_stricter_limit_never_gives_a_larger_batch(loads, b_half, threshold, one, other):
    strict, loose = (
        advice(planted(loads, b_half), Objectives(slo=AbsoluteSlo(s), threshold=threshold, gpu_bytes=GPU)).batch or 0
        for s in sorted((one, other))
    )
    assert strict <= loose


@given(LOADS, st.floats(0.5, 500), st.integers(1, 200), st.integers(1, 200))
def test_more_memory_never_gives_less(loads, b_half, one, other):
    small, large = (advice(planted(loads, b_half), Objectives(gpu_bytes=gib * GIB)) for gib in sorted((one, other)))
    assert (small.batch or 0) <= (large.batch or 0)
    if small.replicas and large.replicas and small.batch == large.batch:
        assert small.replicas.at_batch <= large.replicas.at_batch and small.replicas.split <= large.replicas.split


def test_through_two_points():
    line = through((32.0, 0.077), (1.0, 0.046))
    assert line.seconds(101) == pytest.approx(0.146) and line.b_half == pytest.approx(45)
    assert through((1.0, 0.1), (1.0, 0.2)) is through((1.0, 0.2), (8.0, 0.1)) is through((1.0, 0.1), (8.0, 0.9)) is None


# Memory


def test_what_the_batch_needs_and_what_is_freed():
    had = replace(ENGINE, gpu_had_bytes=GPU)
    seen = advice(planted(), Objectives(slo=RelativeSlo(2, 32), gpu_bytes=GPU), engine=had).needs
    assert seen.kv_bytes == FOOTPRINT.kv_bytes(64)
    assert seen.freed_bytes == 120 * GIB - FOOTPRINT.kv_bytes(64) and seen.freed_share == seen.freed_bytes / GPU
    assert seen.utilization == 0.097 and seen.total_bytes <= 0.097 * GPU


@pytest.mark.parametrize(
    ("had", "gpu", "freed", "share"), [(None, GPU, False, False), (GIB, None, True, False), (GIB, GPU, True, True)]
)
def test_what_is_not_known_of_the_memory_is_none(had, gpu, freed, share):
    engine = replace(ENGINE, kv_had_bytes=had, gpu_had_bytes=gpu)
    seen = needs(subject(planted(), engine=engine), 64, Objectives())
    assert (seen.freed_bytes is not None, seen.freed_share is not None) == (freed, share)
    assert seen.utilization is None and seen.kv_blocks == 64 * 48 + 1
    if freed:
        assert seen.freed_bytes == GIB - FOOTPRINT.kv_bytes(64) < 0, "it needs more than it had"
    assert needs(subject(planted(), engine=engine), None, Objectives()) is None


def test_without_a_model_or_a_gpu_the_batch_is_advised_all_the_same():
    found = advice(planted(), Objectives(), engine=None)
    assert found.batch == 256 and found.needs is found.replicas is None
    unknown = advice(planted(), Objectives(gpu_bytes=GPU), engine=replace(ENGINE, footprint=None, no_footprint="why"))
    assert unknown.batch == 256 and unknown.needs is unknown.replicas is None
    nowhere = advice(planted(), Objectives())
    assert nowhere.needs.utilization is None and nowhere.needs.kv_blocks == 256 * 48 + 1 and nowhere.replicas is None


def test_a_batch_that_the_memory_does_not_hold_is_lowered():
    found = plan([subject(planted())], Objectives(gpu_bytes=40 * GIB))
    assert found.advices[0].decision.batch == 256 and found.advices[0].batch == 128
    assert found.together.fits and found.together.lowered == ("opt-1.3b",)
    nothing = plan([subject(planted())], Objectives(gpu_bytes=4 * GIB))
    assert not nothing.together.fits and not nothing.possible and nothing.together.lowered == ()


def test_a_predicted_batch_is_lowered_to_the_largest_that_fits():
    wish = Objectives(slo=RelativeSlo(4, 32), gpu_bytes=30 * GIB)
    found = advice(published(1, 32), wish)
    footprint = subject(published(1, 32)).footprint
    assert found.decision.batch > found.batch and found.advised.predicted
    assert footprint.total_bytes(found.batch) <= wish.budget_bytes < footprint.total_bytes(found.batch + 1)


@given(
    st.lists(st.tuples(LOADS, st.floats(0.5, 500), st.integers(1, 20), st.integers(16, 4096)), min_size=1, max_size=4),
    st.integers(1, 200),
    st.floats(0.1, 1),
)
def test_the_memory_of_all_models_always_fits(models, gib, share):
    subjects = [
        subject(
            planted(loads, b_half),
            f"model-{i}",
            replace(ENGINE, footprint=replace(FOOTPRINT, weight_bytes=weight * GIB, longest=longest)),
        )
        for i, (loads, b_half, weight, longest) in enumerate(models)
    ]
    found = plan(subjects, Objectives(gpu_bytes=gib * GIB, gpu_memory_utilization=share, together=True))
    if found.together is None or not found.together.fits:
        assert not found.possible
        return
    total = sum(advice.needs.total_bytes for advice in found.advices if advice.batch)
    assert total == found.together.total_bytes <= found.together.budget_bytes <= share * gib * GIB
    assert all(a.batch is None or 1 <= a.batch <= a.decision.batch for a in found.advices)
    assert {a.subject.name for a in found.advices if a.batch != a.decision.batch} == set(found.together.lowered)


def test_a_model_without_advice_takes_no_part():
    found = plan([subject(planted(), "a"), subject(planted((8,)), "b")], Objectives(gpu_bytes=GPU, together=True))
    assert found.possible and [a.batch for a in found.advices] == [256, None]
    assert found.together.total_bytes == FOOTPRINT.total_bytes(256)


FOOTPRINTS = st.builds(
    Footprint,
    weight_bytes=st.integers(1, 30 * GIB),
    kv_bytes_per_token=st.integers(1, 10**6),
    longest=st.integers(1, 4096),
    block_size=st.sampled_from([1, 16, 128]),
    allowance_bytes=st.integers(1, 4 * GIB),
)
BATCHES = st.integers(1, 2000)
GPUS = st.integers(GIB, 200 * GIB)


@st.composite
def options(draw: st.DrawFn) -> list[BatchOption]:
    batches = sorted(draw(st.sets(BATCHES, min_size=1, max_size=6)))
    rate, footprint = st.floats(1, 1e6), draw(FOOTPRINTS)
    return [BatchOption(batch, draw(rate), footprint.total_bytes(batch)) for batch in batches]


@given(FOOTPRINTS, BATCHES)
def test_the_kv_bytes_hold_the_batch_and_not_one_more(footprint, batch):
    blocks = footprint.kv_bytes(batch) // footprint.block_bytes
    told = Resolved(kv_blocks=blocks, block_size=footprint.block_size)
    assert kv_capacity(EngineSpec("opt-1.3b"), footprint.longest, told) == batch


@given(FOOTPRINTS, BATCHES, GPUS, GPUS)
def test_more_memory_never_gives_fewer_replicas(footprint, batch, one, other):
    small, large = sorted((one, other))
    assert replicas_that_split(footprint, batch, small) <= replicas_that_split(footprint, batch, large)


@given(FOOTPRINTS, BATCHES, GPUS)
def test_split_replicas_fit_and_are_no_fewer_than_whole_ones(footprint, batch, budget):
    whole, split = budget // footprint.total_bytes(batch), replicas_that_split(footprint, batch, budget)
    assert split <= batch and split >= min(whole, batch)
    assert split == 0 or split * footprint.total_bytes(-(-batch // split)) <= budget


@given(FOOTPRINTS, BATCHES, GPUS)
def test_each_replica_passes_vllms_check_when_those_before_it_are_there(footprint, batch, gpu):
    """vLLM refuses to start where less than the share it was told is free."""
    total = footprint.total_bytes(batch)
    count, share = int(0.9 * gpu) // total, utilization(total, gpu)
    assert count == 0 or (count - 1) * total + share * gpu <= gpu
    assert share == 1 or total <= share * gpu + 1e-3


@given(st.lists(options(), min_size=1, max_size=4), GPUS)
def test_a_division_always_fits_or_is_none(models, budget):
    places = divide(models, budget)
    if places is None:
        assert sum(model[0].total_bytes for model in models) > budget
    else:
        assert sum(model[at].total_bytes for model, at in zip(models, places, strict=True)) <= budget
    full = sum(model[-1].total_bytes for model in models)
    assert full > budget or places == tuple(len(model) - 1 for model in models)


def test_the_step_down_that_loses_least_is_taken():
    flat, steep = rates(_1=10.0, _50=99.0, _100=100.0), rates(_1=10.0, _50=50.0, _100=100.0)
    full = flat[2].total_bytes + steep[2].total_bytes
    assert divide([flat, steep], full) == (2, 2)
    assert divide([flat, steep], full - 1) == (1, 2)
    assert divide([flat, steep], full - 51) == (1, 1)
    assert divide([flat, steep], flat[0].total_bytes + steep[0].total_bytes - 1) is None


def test_what_the_last_step_freed_too_much_lets_others_up_again():
    """The large model is at its second step down, and what that freed holds the small one's."""
    models = [rates(_1=99.9, _10=100.0), rates(_1=1.0, _1000=100.0)]
    assert [divide(models, budget) for budget in (1000, 17, 16)] == [(1, 0), (1, 0), (0, 0)]


def rates(**by_batch: float) -> list[BatchOption]:
    """Options of an engine that takes a byte for each request, and three more."""
    return [BatchOption(int(b[1:]), rate, 3 + int(b[1:])) for b, rate in by_batch.items()]


def test_a_batch_has_room_for_all_of_its_requests_at_full_length():
    assert FOOTPRINT.kv_bytes(64) == 3073 * 16 * 196_608
    assert FOOTPRINT.total_bytes(64) == FOOTPRINT.kv_bytes(64) + 2_631_516_160 + 2 * GIB
    assert replace(FOOTPRINT, groups=2).kv_bytes(64) == (2 * 64 * 48 + 1) * 16 * 196_608


@pytest.mark.parametrize(("batch", "gib", "replicas"), [(64, 126.9, 26), (1, 126.9, 1), (64, 1, 0)])
def test_replicas_by_hand(batch, gib, replicas):
    """A request is not divided."""
    assert replicas_that_split(FOOTPRINT, batch, int(gib * GIB)) == replicas


# More engines


SENSED = {"engine_active": 0.64, "dram_active": 0.27, "tensor_active": 0.16, "power_w": 490.0, "power_limit_w": 700.0}


def test_time_slicing_is_bound_by_the_host_and_mps_by_the_nearest_unit():
    seen = gains_at(subject(planted(**SENSED)), 64)
    assert (seen.time_slicing.unit, seen.mps.unit, seen.at) == ("host", "dram", 64)
    assert seen.time_slicing.factor == pytest.approx(1 / 0.64) and seen.mps.factor == pytest.approx(0.89 / 0.27)
    assert seen.power_share == pytest.approx(0.7)
    busy = gains_at(subject(planted(**{**SENSED, "engine_active": 1.0, "tensor_active": 0.6})), 64)
    assert busy.time_slicing.factor == 1 and busy.mps.unit == "tensor"
    over = gains_at(subject(planted(**{**SENSED, "dram_active": 0.95})), 64)
    assert over.mps.factor == over.time_slicing.factor == 1, "no bound is below one"


def test_without_sensors_the_roofline_bounds_both():
    facts = {"work": work_of_model(SHAPE, 512, 256), "peaks": peaks_of("NVIDIA H200")}
    seen = gains_at(subject(planted(), **facts), 64)
    assert seen.time_slicing is seen.mps and seen.mps.unit == "roofline" and seen.mps.factor > 1
    assert seen.power_share is None
    unknown = gains_at(subject(planted(), **facts, output_share=None), 64)
    assert unknown.mps is unknown.time_slicing is None
    assert gains_at(subject([]), 64) is None


def test_the_load_that_the_bound_was_seen_at_is_the_nearest_below():
    points = planted((4, 32), **SENSED)
    assert [gains_at(subject(points), batch).at for batch in (2, 31, 32, 500)] == [4, 4, 32, 32]


@given(st.floats(0, 1.05), st.floats(0, 1), st.floats(0, 1))
def test_every_bound_is_at_least_one(engine, dram, tensor):
    busy = replace(point(8, [100.0]), engine_active=engine, dram_active=dram, tensor_active=tensor)
    found = gains_at(subject([busy]), 8)
    for bound, used in ((found.time_slicing, (engine, dram, tensor)), (found.mps, (dram, tensor))):
        assert bound.factor >= 1 if any(used) else bound is None


@pytest.mark.parametrize(
    ("figures", "gib", "advised", "facts"),
    [
        ({}, 140, 2, ()),
        ({"dram_active": 0.85}, 140, 1, (1.05,)),
        ({"engine_active": 0.95}, 140, 1, ("95 %",)),
        ({"power_w": 665.0}, 140, 1, ()),
        ({"power_w": 664.0}, 140, 2, ()),
        ({"engine_active": None, "dram_active": None, "tensor_active": None}, 140, 1, ()),
        ({}, 8, 1, ()),
    ],
)
def test_two_engines_are_worth_a_trial_only_where_something_is_to_be_gained(figures, gib, advised, facts):
    found = advice(planted(**{**SENSED, **figures}), Objectives(slo=RelativeSlo(2, 32), gpu_bytes=gib * GIB))
    assert (found.replicas.advised, found.replicas.each) == (advised, found.batch // advised)
    assert tells(found.replicas.why, *facts)


@pytest.mark.parametrize(("together", "advised"), [(True, [1, 1]), (False, [2, 2])])
def test_several_models_get_one_engine_each_if_they_share_the_gpu(together, advised):
    wish = Objectives(slo=RelativeSlo(2, 32), gpu_bytes=GPU, together=together)
    found = plan([subject(planted(**SENSED), name) for name in "ab"], wish)
    assert [a.replicas.advised for a in found.advices] == advised and (found.together is not None) is together


def test_each_of_several_models_has_the_gpu_for_itself_unless_they_share_it():
    sweeps = [subject(planted(), "a"), subject(planted((1, 8, 64)), "b")]
    wish = Objectives(gpu_bytes=24 * GIB)
    alone = [plan([sweep], wish).advices[0] for sweep in sweeps]
    assert list(plan(sweeps, wish).advices) == alone
    assert list(plan(sweeps, replace(wish, together=True)).advices) != alone


@pytest.mark.parametrize(("gain", "advised"), [(0.93, 1), (1.09, 1), (1.11, 2), (None, 2)])
def test_measured_sets_decide_whether_a_second_engine_is_worth_a_trial(gain, advised):
    sweep = replace(subject(planted(**SENSED)), together=gain and Interval(gain))
    [found] = plan([sweep], Objectives(slo=RelativeSlo(2, 32), gpu_bytes=GPU)).advices
    assert found.replicas.advised == advised and (gain is None or f"{gain:.2f}" in found.replicas.why)


# What it costs, and how sure it is


@pytest.mark.parametrize("output", [1.0, 0.5])
def test_the_figures_and_the_cost_of_each_choice(output):
    wish = Objectives(slo=RelativeSlo(2, 32), price_per_hour=3.5)
    found = advice(planted(), wish, output_share=output)
    for offer, b in ((found.advised, 64), (found.largest, 512), (found.single, 1)):
        assert (offer.batch, offer.predicted) == (b, False) and offer.latency_s.value == pytest.approx(b / law(b))
        assert offer.cost.value == pytest.approx(3.5 / 3600 / law(b) / output * 1e6)
        assert (offer.share, offer.efficiency) == pytest.approx((law(b) / law(512), law(b) / b / law(1)))
    assert (
        advice(planted(), wish, output_share=None).advised.cost is advice(planted(), Objectives()).advised.cost is None
    )


def test_a_predicted_choice_has_the_figures_of_the_laws():
    found = advice(planted((1, 32)), Objectives(slo=RelativeSlo(4, 32), price_per_hour=1.0))
    offer, b = found.advised, found.batch
    assert offer.predicted and offer.tokens_per_s == Interval(pytest.approx(law(b))) and b > 32
    assert offer.latency_s.value == pytest.approx(b / law(b)) and offer.efficiency == pytest.approx(law(b) / b / law(1))
    assert offer.share == pytest.approx(law(b) / law(32)) and not found.largest.predicted and found.largest.batch == 32


def test_repeats_give_rates_an_interval_and_one_gives_none():
    noisy = [replace(point(b, [law(b) * 0.98, law(b) * 1.02]), degraded=()) for b in GRID]
    seen = advice(noisy, Objectives(price_per_hour=3.6)).advised
    assert (seen.cost.low, seen.cost.high) == pytest.approx((1e3 / seen.tokens_per_s.high, 1e3 / seen.tokens_per_s.low))
    assert seen.tokens_per_s.low < law(256) < seen.tokens_per_s.high and seen.latency_s.low is not None
    assert fmean((seen.tokens_per_s.low, seen.tokens_per_s.high)) == pytest.approx(law(256), rel=0.01)
    assert advice(planted(), Objectives()).advised.tokens_per_s == Interval(law(256))


def test_where_no_single_request_was_measured_its_rate_is_by_the_law():
    found = advice(planted(GRID[2:]), Objectives())
    assert found.single.predicted and found.single.tokens_per_s.value == pytest.approx(law(1))
