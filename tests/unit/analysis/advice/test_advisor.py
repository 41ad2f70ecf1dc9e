"""Batch, memory and number of engines: on published results, on planted laws and by hand; a stricter limit never
gives more, more memory never less, what is divided always fits, and every unknown is told."""

from dataclasses import replace
from statistics import fmean

import pytest
from facts import tells
from hypothesis import example, given, strategies as st
from published import ROWS
from strategies import law, point, work_of_model

from pytest_slmserve.analysis.advice import advisor
from pytest_slmserve.analysis.advice.advisor import BatchOption, Footprint, ModelSweep, Objectives, decide, divide, plan
from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.batching import AbsoluteSlo, RelativeSlo
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad
from pytest_slmserve.schema import kv_cache, records
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import GIB, EngineSpec

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WEIGHTS, PER_TOKEN = 2_631_516_160, 196_608
FOOTPRINT = Footprint(weight_bytes=WEIGHTS, kv_bytes_per_token=PER_TOKEN, longest=768, allowance_bytes=2 * GIB)
ENGINE = advisor.ServedEngine(spec=EngineSpec("opt-1.3b"), dtype="float16", footprint=FOOTPRINT, kv_had_bytes=120 * GIB)
GPU = 140 * GIB
TWICE, FOUR_TIMES = RelativeSlo(2, 32), RelativeSlo(4, 32)
LOADS = st.sets(st.integers(2, 600), min_size=1, max_size=7).map(lambda found: sorted({1, *found}))
MODELS = st.tuples(LOADS, st.floats(0.5, 500), st.integers(1, 20), st.integers(16, 4096))
FOOTPRINTS = st.builds(
    Footprint, weight_bytes=st.integers(1, 30 * GIB), kv_bytes_per_token=st.integers(1, 10**6),
    longest=st.integers(1, 4096), block_size=st.sampled_from([1, 16, 128]), allowance_bytes=st.integers(1, 4 * GIB),
)  # fmt: skip
BATCHES, GPUS = st.integers(1, 2000), st.integers(GIB, 200 * GIB)
SENSED = {"engine_active": 0.64, "dram_active": 0.27, "tensor_active": 0.16, "power_w": 490.0, "power_limit_w": 700.0}


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


def subject(points: list[Point], name: str = "opt-1.3b", engine=ENGINE, **facts: object) -> ModelSweep:
    return ModelSweep(name=name, points=tuple(points), engine=engine, **facts)


def decided(points: list[Point], facts=(), **wish: object) -> advisor.Decision:
    return decide(subject(points, **dict(facts)), Objectives(**wish))


def advice(points: list[Point], wish: Objectives, **facts: object) -> advisor.Advice:
    return plan([subject(points, **facts)], wish).advices[0]


def test_two_loads_predict_larger_loads():
    """From 1 and 32 alone: every larger load is told 8 to 13% too slow. A prediction is marked and careful."""
    seen = advice(published(1, 32), Objectives(slo=FOUR_TIMES, gpu_bytes=GPU))
    errors = [seen.decision.wait.seconds(p.batch_repeats[0]) / p.e2e_repeats[0] - 1 for p in published()[-6:]]
    assert min(errors) > 0.075 and max(errors) < 0.135
    assert seen.decision.predicted and 180 < seen.batch < 256 and seen.advised.predicted
    assert tells(seen.decision.notes[0], "1 and 32") and seen.decision.choice == ChosenLoad(seen.decision.batch)
    assert seen.replicas.advised == 1, "it is to be measured first"
    wish = Objectives(slo=FOUR_TIMES, gpu_bytes=30 * GIB)
    found = advice(published(1, 32), wish)
    assert found.decision.batch > found.batch and found.advised.predicted, "the largest that fits"
    assert FOOTPRINT.total_bytes(found.batch) <= wish.budget_bytes < FOOTPRINT.total_bytes(found.batch + 1)
    line = advisor.through((32.0, 0.077), (1.0, 0.046))
    assert (line.seconds(101), line.b_half) == pytest.approx((0.146, 45))
    none = (((1.0, 0.1), (1.0, 0.2)), ((1.0, 0.2), (8.0, 0.1)), ((1.0, 0.1), (8.0, 0.9)))
    assert [advisor.through(*points) for points in none] == [None] * 3
    found = advice(planted((1, 32)), Objectives(slo=FOUR_TIMES, price_per_hour=1.0))
    offer, b = found.advised, found.batch
    assert offer.predicted and offer.tokens_per_s == Interval(pytest.approx(law(b))) and b > 32
    seen = offer.latency_s.value, offer.efficiency, offer.share
    assert seen == pytest.approx((b / law(b), law(b) / b / law(1), law(b) / law(32)))
    assert (found.largest.predicted, found.largest.batch) == (False, 32)
    single = advice(planted(GRID[2:]), Objectives()).single  # where no single request was measured
    assert single.predicted and single.tokens_per_s.value == pytest.approx(law(1))


@given(st.floats(0.5, 500), st.sampled_from(GRID[1:7]), st.floats(0.05, 0.9), st.floats(1.05, 8))
def test_two_loads_match_closed_form(b_half, second, threshold, factor):
    seen = decided(planted((1, second), b_half), slo=RelativeSlo(factor, second), threshold=threshold)
    cap = min((1 + b_half) / threshold - b_half, factor * (second + b_half) - b_half)
    if cap >= advisor.REACH * second:
        assert seen.batch == advisor.REACH * second and tells(seen.notes[1], f"{advisor.REACH} times")
    else:
        assert seen.batch == pytest.approx(cap, abs=1 + 1e-6 * (cap + b_half)) and seen.batch <= cap * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize(("points", "facts", "wish", "batch", "predicted", "notes"), [
    # vLLM does not start where max_num_seqs is above max_num_batched_tokens.
    (planted((8, 64)), {"engine": replace(ENGINE, max_num_batched_tokens=256)}, {"threshold": 0.01}, 256, True,
     [("T(1)",), ("max_num_batched_tokens", 256)]),
    # The larger load is all that is allowed: a measurement.
    (published(1, 32), {}, {"slo": RelativeSlo(1, 32)}, 32, False, []),
    # T(1) and the objective may be by the law too.
    (planted((8, 64)), {}, {"slo": RelativeSlo(2, 128)}, 2 * (128 + 45) - 45, True, [("T(1)",), (128,)]),
])  # fmt: skip
def test_two_load_advice_has_notes(points, facts, wish, batch, predicted, notes):
    seen = decided(points, facts, **wish)
    assert (seen.batch, seen.predicted, bool(seen.notes)) == (batch, predicted, bool(notes))
    assert all(any(tells(note, *its) for note in seen.notes) for its in notes)


@pytest.mark.parametrize(("points", "facts"), [
    ([], (0,)), (planted((64,)), (1, 64)), ([point(8, [100.0], [0.1]), point(64, ())], (1, 8)),
    ([point(8, [100.0], [0.1]), point(64, [800.0], [0.1])], ("8 and 64",)),
    ([point(b, [100.0 * b], [0.1]) for b in (2, 4, 8)], ("T(1)",)),
])  # fmt: skip
def test_impossible_advice_states_reason(points, facts):
    found = plan([subject(points)], Objectives(slo=AbsoluteSlo(1.0), gpu_bytes=GPU))
    [only] = found.advices
    assert not found.possible and only.batch is only.advised is only.needs is only.gains is found.together is None
    assert tells(only.decision.reason, *facts)


def test_degraded_points_are_never_chosen():
    points = planted()
    points[6:8] = replace(points[6], degraded=("the clock fell",)), point(128, ())
    found = [decided(each, threshold=0.2).batch for each in (planted(), points)]
    assert found == [128, 32], "alone 64 and 128 would be allowed by efficiency, 256 is not"
    for batches in (GRID, (1, 8)):
        seen = decided(planted(batches), slo=AbsoluteSlo(1e-6))
        assert (seen.batch, seen.predicted) == (None, False) and tells(seen.reason, "10%", "0.001 ms")
    notes = decided([*planted(GRID[:-1]), point(512, [law(64)], [0.1])], threshold=0.001).notes
    largest, more, off = notes
    assert tells(largest, 512) and tells(more, 256, "44.9%") and tells(off, "model")
    assert not any("law" in note for note in decided(planted()).notes)


@given(LOADS, st.floats(0.5, 500), st.floats(0.02, 0.9), *[st.floats(1e-4, 1.0)] * 2, *[st.integers(1, 200)] * 2)
@example([1, 55], 386.0, 0.25, 1.0, 0.125, 1, 1)  # what the law allows does not fit into the memory
def test_stricter_limit_never_advises_more(loads, b_half, threshold, one_s, other_s, one, other):
    strict, loose = (
        advice(planted(loads, b_half), Objectives(slo=AbsoluteSlo(s), threshold=threshold, gpu_bytes=GPU)).batch or 0
        for s in sorted((one_s, other_s))
    )
    assert strict <= loose
    small, large = (advice(planted(loads, b_half), Objectives(gpu_bytes=gib * GIB)) for gib in sorted((one, other)))
    assert (small.batch or 0) <= (large.batch or 0)
    if small.replicas and large.replicas and small.batch == large.batch:
        assert small.replicas.at_batch <= large.replicas.at_batch and small.replicas.split <= large.replicas.split


def test_batch_needs_state_freed_memory():
    had = replace(ENGINE, gpu_had_bytes=GPU)
    seen = advice(planted(), Objectives(slo=TWICE, gpu_bytes=GPU), engine=had).needs
    kv_bytes = 3073 * 16 * PER_TOKEN  # of 64 requests at full length
    total, freed = kv_bytes + WEIGHTS + 2 * GIB, 120 * GIB - kv_bytes
    assert seen == advisor.Needs(3073, kv_bytes, total, 0.097, freed, freed / GPU) and total <= 0.097 * GPU
    assert replace(FOOTPRINT, groups=2).kv_bytes(64) == (2 * 64 * 48 + 1) * 16 * PER_TOKEN
    # What is not known of the memory is none; below 0: it needs more than it had.
    for had_bytes, gpu, freed, share in ((None, GPU, None, None), (GIB, None, GIB - kv_bytes, None),
                                         (GIB, GPU, GIB - kv_bytes, (GIB - kv_bytes) / GPU)):  # fmt: skip
        engine = replace(ENGINE, kv_had_bytes=had_bytes, gpu_had_bytes=gpu)
        seen = advisor.needs(subject(planted(), engine=engine), 64, Objectives())
        assert seen == advisor.Needs(3073, kv_bytes, total, None, freed, share)
    assert advisor.needs(subject(planted()), None, Objectives()) is None


def test_freed_share_of_another_gpu():
    for gpu, known in ((140 * GIB, True), (80 * GIB, False)):
        seen = advisor.needs(subject(planted(), engine=ENGINE), 64, Objectives(gpu_bytes=gpu))
        assert (seen.freed_share is not None) is known and seen.freed_bytes > 0


@pytest.mark.parametrize(("engine", "gpu"), [
    (None, None), (None, GPU), (replace(ENGINE, footprint=None, no_footprint="why"), GPU), (ENGINE, None),
])  # fmt: skip
def test_batch_is_advised_without_gpu(engine, gpu):
    found = advice(planted(), Objectives(gpu_bytes=gpu), engine=engine)
    assert found.batch == 256 and found.replicas is None
    seen = found.needs and (found.needs.utilization, found.needs.kv_blocks)
    assert seen == ((None, 256 * 48 + 1) if engine == ENGINE else None)


@pytest.mark.parametrize(("gib", "batch", "lowered"), [(140, 256, ()), (40, 128, ("opt-1.3b",)), (4, None, ())])
def test_batch_beyond_memory_is_lowered(gib, batch, lowered):
    wish = Objectives(gpu_bytes=gib * GIB)
    found = plan([subject(planted())], wish)
    assert (found.advices[0].decision.batch, found.advices[0].batch) == (256, batch)
    assert (found.together.fits, found.possible) == (batch is not None,) * 2 and found.together.lowered == lowered
    both = plan([subject(planted(), "a"), subject(planted((8,)), "b")], replace(wish, together=True))
    assert [a.batch for a in both.advices] == [batch, None], "a model without advice takes no part"
    assert not batch or both.together.total_bytes == FOOTPRINT.total_bytes(batch)


@given(st.lists(MODELS, min_size=1, max_size=4), st.integers(1, 200), st.floats(0.1, 1))
def test_memory_of_models_always_fits(models, gib, share):
    subjects = []
    for i, (loads, b_half, weight, longest) in enumerate(models):
        footprint = replace(FOOTPRINT, weight_bytes=weight * GIB, longest=longest)
        subjects.append(subject(planted(loads, b_half), f"model-{i}", replace(ENGINE, footprint=footprint)))
    found = plan(subjects, Objectives(gpu_bytes=gib * GIB, gpu_memory_utilization=share, together=True))
    if found.together is None or not found.together.fits:
        assert not found.possible
        return
    total = sum(advice.needs.total_bytes for advice in found.advices if advice.batch)
    assert total == found.together.total_bytes <= found.together.budget_bytes <= share * gib * GIB
    assert all(a.batch is None or 1 <= a.batch <= a.decision.batch for a in found.advices)
    assert {a.subject.name for a in found.advices if a.batch != a.decision.batch} == set(found.together.lowered)


@given(FOOTPRINTS, BATCHES, GPUS, GPUS)
@example(FOOTPRINT, 1, int(126.9 * GIB), 127 * GIB)  # a request is not divided
def test_kv_bytes_match_batch_exactly(footprint, batch, gpu, other):
    """vLLM refuses to start where less than the share it was told is free: when those before it are there."""
    blocks = footprint.kv_bytes(batch) // footprint.block_bytes
    told = records.Resolved(kv_blocks=blocks, block_size=footprint.block_size)
    assert kv_cache.kv_capacity(EngineSpec("opt-1.3b"), footprint.longest, told) == batch
    total = footprint.total_bytes(batch)
    count, share = int(0.9 * gpu) // total, advisor.utilization(total, gpu)
    assert count == 0 or (count - 1) * total + share * gpu <= gpu
    assert share == 1 or total <= share * gpu + 1e-3
    # Replicas that split a batch fit, are no fewer than whole ones, and with more memory no fewer.
    budget, large = sorted((gpu, other))
    whole, split = budget // footprint.total_bytes(batch), advisor.replicas_that_split(footprint, batch, budget)
    assert batch >= split >= min(whole, batch)
    assert split == 0 or split * footprint.total_bytes(-(-batch // split)) <= budget
    assert split <= advisor.replicas_that_split(footprint, batch, large)
    assert advisor.replicas_that_split(FOOTPRINT, 64, int(126.9 * GIB)) == 26


@st.composite
def options(draw: st.DrawFn) -> list[BatchOption]:
    batches = sorted(draw(st.sets(BATCHES, min_size=1, max_size=6)))
    rate, footprint = st.floats(1, 1e6), draw(FOOTPRINTS)
    return [BatchOption(batch, draw(rate), footprint.total_bytes(batch)) for batch in batches]


@given(st.lists(options(), min_size=1, max_size=4), GPUS)
def test_memory_division_never_exceeds_budget(models, budget):
    """It takes the step down that loses least."""
    places = divide(models, budget)
    if places is None:
        assert sum(model[0].total_bytes for model in models) > budget
    else:
        assert sum(model[at].total_bytes for model, at in zip(models, places, strict=True)) <= budget
    full = sum(model[-1].total_bytes for model in models)
    assert full > budget or places == tuple(len(model) - 1 for model in models)
    both = rates({1: 10.0, 50: 99.0, 100: 100.0}), rates({1: 10.0, 50: 50.0, 100: 100.0})  # flat and steep
    assert [divide(both, size) for size in (206, 205, 155, 7)] == [(2, 2), (1, 2), (1, 1), None]
    both = rates({1: 99.9, 10: 100.0}), rates({1: 1.0, 1000: 100.0})  # large and small
    found = [divide(both, size) for size in (1000, 17, 16)]
    assert found == [(1, 0), (1, 0), (0, 0)], "what the last step freed too much lets others up again"


def rates(by_batch: dict[int, float]) -> list[BatchOption]:
    """Options of an engine that takes a byte for each request, and three more."""
    return [BatchOption(batch, rate, 3 + batch) for batch, rate in by_batch.items()]


@pytest.mark.parametrize(("figures", "time_slicing", "mps"), [
    ({}, ("host", 1 / 0.64), ("dram", 0.89 / 0.27)),
    ({"engine_active": 1.0, "tensor_active": 0.6}, ("host", 1.0), ("tensor", 0.94 / 0.6)),
    ({"dram_active": 0.95}, ("dram", 1.0), ("dram", 1.0)),  # no bound is below one
])  # fmt: skip
def test_busy_units_bound_sharing_gain(figures, time_slicing, mps):
    """The host bounds time slicing, and the nearest unit bounds MPS."""
    seen = advisor.gains_at(subject(planted(**{**SENSED, **figures})), 64)
    assert (seen.at, seen.power_share) == (64, pytest.approx(0.7))
    for bound, (unit, factor) in ((seen.time_slicing, time_slicing), (seen.mps, mps)):
        assert (bound.unit, bound.factor) == (unit, pytest.approx(factor, rel=0.01))


@given(st.floats(0, 1.05), st.floats(0, 1), st.floats(0, 1))
def test_roofline_bounds_gain_without_sensors(engine, dram, tensor):
    facts = {"work": work_of_model(CATALOGUE["opt-1.3b"], 512, 256), "peaks": peaks_of("NVIDIA H200")}
    seen = advisor.gains_at(subject(planted(), **facts), 64)
    assert seen.time_slicing is seen.mps and seen.mps.unit == "roofline" and seen.mps.factor > 1
    assert seen.power_share is None
    unknown = advisor.gains_at(subject(planted(), **facts, output_share=None), 64)
    assert unknown.mps is unknown.time_slicing is advisor.gains_at(subject([]), 64) is None
    points = subject(planted((4, 32), **SENSED))
    assert [advisor.gains_at(points, batch).at for batch in (2, 31, 32, 500)] == [4, 4, 32, 32]
    busy = replace(point(8, [100.0]), engine_active=engine, dram_active=dram, tensor_active=tensor)
    found = advisor.gains_at(subject([busy]), 8)
    for bound, used in ((found.time_slicing, (engine, dram, tensor)), (found.mps, (dram, tensor))):
        assert bound.factor >= 1 if any(used) else bound is None


@pytest.mark.parametrize(("figures", "gib", "gain", "advised", "facts"), [
    ({}, 140, None, 2, ()),
    ({"dram_active": 0.85}, 140, None, 1, (1.05,)),
    ({"engine_active": 0.95}, 140, None, 1, ("95%",)),
    ({"power_w": 665.0}, 140, None, 1, ()), ({"power_w": 664.0}, 140, None, 2, ()),
    ({"engine_active": None, "dram_active": None, "tensor_active": None}, 140, None, 1, ()),
    ({}, 8, None, 1, ()),
    # Sets that were measured decide.
    ({}, 140, 0.93, 1, ("0.93",)), ({}, 140, 1.09, 1, ("1.09",)), ({}, 140, 1.11, 2, ("1.11",)),
])  # fmt: skip
def test_second_engine_needs_expected_gain(figures, gib, gain, advised, facts):
    sets, wish = gain and Interval(gain), Objectives(slo=TWICE, gpu_bytes=gib * GIB)
    found = advice(planted(**{**SENSED, **figures}), wish, together=sets)
    assert (found.replicas.advised, found.replicas.each) == (advised, found.batch // advised)
    assert tells(found.replicas.why, *facts)


@pytest.mark.parametrize(("gib", "lowered"), [(24, True), (140, False)])
def test_models_share_gpu_on_request(gib, lowered):
    sweeps = [subject(planted(**SENSED), "a"), subject(planted((1, 8, 64), **SENSED), "b")]
    wish = Objectives(slo=TWICE, gpu_bytes=gib * GIB)
    alone, shared = plan(sweeps, wish), plan(sweeps, replace(wish, together=True))
    assert list(alone.advices) == [plan([sweep], wish).advices[0] for sweep in sweeps] and alone.together is None
    assert ([a.batch for a in shared.advices] != [a.batch for a in alone.advices]) is lowered
    assert [[a.replicas.advised for a in each.advices] for each in (alone, shared)] == [[2, 2], [1, 1]]


@pytest.mark.parametrize("output", [1.0, 0.5])
def test_each_offer_states_its_cost(output):
    wish = Objectives(slo=TWICE, price_per_hour=3.5)
    found = advice(planted(), wish, output_share=output)
    for offer, b in ((found.advised, 64), (found.largest, 512), (found.single, 1)):
        seen = offer.latency_s.value, offer.cost.value, offer.share, offer.efficiency
        wanted = b / law(b), 3.5 / 3600 / law(b) / output * 1e6, law(b) / law(512), law(b) / b / law(1)
        assert (offer.batch, offer.predicted) == (b, False) and seen == pytest.approx(wanted)
        assert offer.tokens_per_s == Interval(law(b)), "of one repeat no noise is known"
    nothing = advice(planted(), wish, output_share=None), advice(planted(), Objectives())
    assert [each.advised.cost for each in nothing] == [None, None]
    noisy = [point(b, [law(b) * 0.98, law(b) * 1.02]) for b in GRID]
    seen = advice(noisy, Objectives(price_per_hour=3.6)).advised
    assert (seen.cost.low, seen.cost.high) == pytest.approx((1e3 / seen.tokens_per_s.high, 1e3 / seen.tokens_per_s.low))
    assert seen.tokens_per_s.low < law(256) < seen.tokens_per_s.high and seen.latency_s.low is not None
    assert fmean((seen.tokens_per_s.low, seen.tokens_per_s.high)) == pytest.approx(law(256), rel=0.01)


def test_second_engine_reaches_published_share():
    sensed = advisor.gains_at(subject(planted(**SENSED)), 64)
    busy = advisor.gains_at(subject(planted(**{**SENSED, "engine_active": 0.1, "dram_active": 0.1})), 64)
    gain, most = advisor.second_engine(sensed), advisor.second_engine(busy)
    assert gain.value == pytest.approx(0.86 / 0.64) and (gain.low, gain.high) == pytest.approx(
        (0.71 / 0.64, 1.07 / 0.64)
    )
    assert most.value == pytest.approx(2 * 0.86), "two engines are taken to do twice what one does at most"
    assert advisor.second_engine(None) is advisor.second_engine(advisor.gains_at(subject(planted()), 64)) is None


@given(st.sampled_from([0.1, 0.3, 0.5]), st.floats(2, 100), LOADS)
def test_batch_ends_enclose_planted_batch(threshold, b_half, loads):
    advice = plan([subject(planted(sorted({1, 600, *loads}), b_half))], Objectives(threshold=threshold)).advices[0]
    truth = (1 + b_half) / threshold - b_half
    least, above = advisor.batch_ends(advice)
    if not advice.decision.predicted and advice.batch is not None:
        assert least <= truth * (1 + 1e-9) and (above is None or truth <= above * (1 + 1e-9))
