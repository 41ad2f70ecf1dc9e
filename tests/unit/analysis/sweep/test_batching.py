"""The batch that is worth its latency: by hand, on published results, on planted laws; and where there is most
goodput, honest at the ends of what was measured and beside gaps."""

from __future__ import annotations

import pytest
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from published import ROWS
from refusals import refused
from strategies import law, point

from pytest_slmserve.analysis.advice.advisor import Decision, ModelSweep, Objectives, decide
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.batching import (
    CONCURRENCY,
    RATE,
    AbsoluteSlo,
    Caps,
    RelativeSlo,
    Slo,
    highest_load,
    latency_law,
    limit_of,
    measured_base,
    parse_relative_slo,
    peak,
)
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad
from pytest_slmserve.schema.errors import TooFewPoints

PUBLISHED = [point(knob, [total], [ms / 1e3]) for knob, _, total, ms, _ in ROWS]
B_HALF_FROM_SHAPES = 40.6  # OPT-1.3B, a context of 330 tokens
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = st.sets(st.integers(2, 1024), min_size=3, max_size=9).map(lambda found: sorted({1, *found}))


def batching(points: list[Point], slo: Slo | None, threshold: float = 0.1, b_half: float | None = None) -> Decision:
    sweep = ModelSweep(name="opt-1.3b", points=tuple(points), b_half=b_half)
    return decide(sweep, Objectives(slo=slo, threshold=threshold))


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("2x@32", RelativeSlo(2.0, 32)),
        ("2.5x@1", RelativeSlo(2.5, 1)),
        ("30ms", AbsoluteSlo(0.03)),
        ("0.03s", AbsoluteSlo(0.03)),
        (".5s", AbsoluteSlo(0.5)),
    ],
)
def test_objectives(text, slo):
    assert parse_relative_slo(text) == slo


@pytest.mark.parametrize(("factor", "chosen", "cap"), [(2, 96, 105), (4, 256, 250)])
def test_the_published_choice(factor, chosen, cap):
    seen = batching(PUBLISHED, RelativeSlo(factor, 32))
    assert seen.choice == ChosenLoad(chosen) and seen.limit.seconds == factor * 7.509587e-3
    assert seen.caps.slo == pytest.approx(cap, rel=0.06), "from the latencies alone"
    caps = batching(PUBLISHED, RelativeSlo(factor, 32), b_half=B_HALF_FROM_SHAPES).caps
    assert (round(caps.slo), round(caps.efficiency)) == (cap, 375), "closed forms, half-saturation from shapes"


def test_without_an_objective_efficiency_decides():
    seen = batching(PUBLISHED, None)
    assert seen.choice.value == 256 and seen.limit is None


@given(st.floats(10, 1e6), st.floats(0.5, 500), BATCHES, st.floats(0.02, 0.9), st.floats(1.01, 20))
def test_the_choice_is_the_last_of_the_grid_before_the_closed_forms(t_inf, b_half, batches, threshold, factor):
    """On a planted law; a load as near to a cap as rounding is may be on either side."""
    points = [point(b, [law(b, t_inf, b_half)]) for b in batches]
    seen = batching(points, RelativeSlo(factor, 1), threshold)
    cap = min(seen.caps.efficiency, seen.caps.slo)
    off = 1e-3 * (cap + b_half)
    sure, possible = (max(b for b in batches if b == 1 or b < cap + sign * off) for sign in (-1, 1))
    assert seen.choice.value in (sure, possible)


@given(BATCHES, st.floats(0.02, 0.9), st.floats(1.01, 20))
def test_a_tighter_objective_never_chooses_more(batches, threshold, factor):
    points = [point(b, [law(b)]) for b in batches]
    tight, loose = (
        batching(points, RelativeSlo(k, 1), e).choice.value
        for k, e in ((factor, threshold), (2 * factor, threshold / 2))
    )
    assert tight <= loose


def test_a_latency_at_the_limit_is_within_and_an_efficiency_at_the_threshold_not():
    points = [point(b, [rate], [wait]) for b, rate, wait in ((1, 100.0, 0.1), (2, 150.0, 0.2), (4, 200.0, 0.4))]
    assert batching(points, RelativeSlo(1, 2)).choice.value == 2
    assert batching(points, AbsoluteSlo(0.4)).choice.value == 4
    assert batching(points, AbsoluteSlo(0.4), 0.5).choice.value == 2, "200/(4 x 100) is not above one half"
    assert batching(points, AbsoluteSlo(0.05)).choice == ChosenLoad(None)


def test_noise_gives_the_choice_an_interval():
    noisy = [point(b, [law(b) * 0.97, law(b) * 1.03]) for b in GRID]
    seen = batching(noisy, RelativeSlo(2, 32)).choice
    assert seen == ChosenLoad(64, 64, 64, known=True), "128 is far beyond"
    near = batching(noisy, RelativeSlo(1.41, 32)).choice
    assert (near.value, near.low, near.high) == (32, 32, 64), "64 takes 1.416 times as long as 32: it may be within"
    assert batching(noisy, RelativeSlo(1.42, 32)).choice == ChosenLoad(64, 32, 64, known=True)


HUGE = "9" * 400


@pytest.mark.parametrize(
    "text", ["", "30 ms", *f"2x x@32 0x@32 2x@0 -2x@32 2x@3.5 30 0ms nans {HUGE}s {HUGE}x@1".split()]
)
def test_what_is_no_objective(text):
    with refused(repr(text), hint="2x@32"):
        parse_relative_slo(text)


def test_an_invalid_point_is_never_chosen_nor_a_reference():
    points = [point(b, [law(b)]) for b in GRID[:-1]]
    assert batching([*points, point(512, ())], None, 0.05).choice.value == 256
    limit = limit_of(RelativeSlo(2, 32), [*points[:5], *points[6:]], None)
    assert limit.at is None and tells(limit.note, 32, 16, 64)


@pytest.mark.parametrize(("at", "facts"), [(100, (64, 128)), (1024, ()), (64, None)])
def test_a_latency_that_was_not_measured_is_interpolated_or_by_the_law_and_told(at, facts):
    """Little's latency of the law is a straight line."""
    points = [point(b, [law(b)]) for b in GRID[3:]]
    found = limit_of(RelativeSlo(2, at), points, latency_law(points))
    assert found.seconds == pytest.approx(2 * 256 * at / law(at))
    assert (found.at, found.note) == (64, None) if facts is None else tells(found.note, at, *facts)


def test_the_rate_of_one_alone_is_by_the_law_if_it_was_not_measured():
    base = batching([point(b, [law(b)]) for b in GRID[3:]], None).base
    assert base.per_s == pytest.approx(law(1)) and base.note
    assert measured_base([point(1, [90.0, 110.0])]).per_s == 100 and measured_base([point(2, [1.0])]) is None


def test_neither_measured_nor_told():
    steep = [point(b, [100.0 * b]) for b in (2, 4, 8)]
    undecided = batching(steep, None)
    assert undecided.batch is None and tells(undecided.reason, "T(1)")
    with refused(64, kind=TooFewPoints):
        limit_of(RelativeSlo(2, 64), [point(1, [100.0]), *steep], None)
    assert batching([point(1, [100.0]), *steep], AbsoluteSlo(3.0)).caps == Caps()


# Goodput


CURVE = [(1, 1.0), (2, 2.0), (4, 3.9), (8, 6.0), (16, 2.5)]


@pytest.mark.parametrize(
    ("points", "below", "above"),
    [(CURVE, 4, 16), (CURVE[:4], 4, None), (CURVE[3:], None, 16), (CURVE[3:4], None, None)],
)
@pytest.mark.parametrize("unit", [RATE, CONCURRENCY])
def test_a_peak_is_between_loads_that_have_less_or_more_is_not_excluded(points, below, above, unit):
    seen = peak(points, unit=unit)
    assert (seen.load, seen.per_s, seen.below, seen.above, seen.unit) == (8, 6.0, below, above, unit)
    assert seen.bracketed is (None not in (below, above)) and tells(seen.why, "6/s", f"8 {unit}")
    assert not seen.bracketed or tells(seen.why, 4, 16)


def test_repeats_are_averaged_and_order_does_not_matter():
    seen = peak([(16, 2.0), (8, 1.0), (8, 7.0), (4, 3.9), (8, 7.0)])
    assert (seen.load, seen.per_s) == (8, 5.0)
    assert peak([]) is None


def test_of_equal_goodput_the_smaller_rate_is_the_peak():
    assert peak([(4, 3.0), (8, 5.0), (16, 5.0), (32, 1.0)]).load == 8


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 100)), min_size=1, max_size=30))
def test_nothing_measured_is_higher_than_the_peak(points):
    seen, rates = peak(points), sorted({rate for rate, _ in points})
    by_rate = {rate: [value for at, value in points if at == rate] for rate in rates}
    assert all(sum(values) / len(values) <= seen.per_s + 1e-9 for values in by_rate.values())
    assert (seen.above is None) == (seen.load == rates[-1]) and (seen.below is None) == (seen.load == rates[0])


def test_an_invalid_rate_beside_the_peak_is_no_proof_that_it_has_less():
    seen = peak([(1, 1.0), (4, 3.9), (16, 2.5)], invalid=[8, 2, 0.5, 1, 16])
    assert (seen.load, seen.below, seen.above, seen.unknown, seen.bracketed) == (4, 1, 16, (2, 8), False)
    assert tells(seen.why, "2, 8")
    largest = peak([(1, 1.0), (4, 3.9)], invalid=[8])
    assert (largest.above, largest.unknown) == (None, (8,)) and tells(largest.why, 8)


def test_where_nothing_is_good_there_is_no_peak_to_speak_of():
    nothing, doubtful = peak([(4, 0.0), (8, 0.0)]), peak([(4, 0.0), (8, 0.0)], invalid=[2])
    assert nothing.per_s == doubtful.per_s == 0 and (nothing.unknown, doubtful.unknown) == ((), (2,))
    assert not tells(nothing.why, 4) and tells(doubtful.why, 2)


def test_a_rate_with_a_valid_repeat_is_known():
    assert peak(CURVE, invalid=[8, 16]).bracketed
    assert peak([], invalid=[8]) is None


ATTAINED = [(1, 1.0), (2, 0.97), (4, 0.91), (8, 0.6), (16, 0.95)]


@pytest.mark.parametrize(("goal", "rate", "above"), [(0.9, 4, 8), (0.97, 2, 4), (0.5, 16, None)])
def test_distserves_goodput_is_the_highest_load_up_to_which_enough_is_good(goal, rate, above):
    """What 16 attains above 90 % is luck: 8 does not."""
    seen = highest_load(ATTAINED, goal)
    assert (seen.load, seen.attainment) == (rate, dict(ATTAINED)[rate])
    assert (seen.above and seen.above[0]) == above


@pytest.mark.parametrize(
    ("points", "facts"), [([(1, 1.0), (1, 0.7)], ("90 %", "85 %", 1)), ([(1, 0.2), (2, 0.1)], ("90 %", "20 %", 1))]
)
def test_too_little_at_the_smallest_load_is_no_highest_load(points, facts):
    none = highest_load(points)
    assert (none.load, none.attainment, none.goal) == (None, None, 0.9) and tells(none.why, *facts)
    assert highest_load([]) is None


@pytest.mark.parametrize("unit", [RATE, CONCURRENCY])
def test_the_highest_load_with_what_is_attained_there_and_beyond(unit):
    assert tells(highest_load(ATTAINED, unit=unit).why, "90 %", f"4 {unit}", "91 %", "60 %", 8)
    whole = highest_load(ATTAINED, 0.5, unit=unit)
    assert whole.above is None and tells(whole.why, f"16 {unit}", "95 %")
    doubtful = highest_load([(1, 1.0), (4, 0.91), (8, 0.6)], invalid=[2, 4, 16])
    assert doubtful.unknown == (2,) and doubtful.above == (8, 0.6) and tells(doubtful.why, 2)
