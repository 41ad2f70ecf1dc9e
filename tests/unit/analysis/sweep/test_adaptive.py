"""Which loads an adaptive sweep asks for, and when it has enough."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparse import h200_seconds, in_turn, play
from strategies import law, point, rates

from pytest_slmserve.analysis.sweep import plateau
from pytest_slmserve.analysis.sweep.curve import FEWEST_POINTS
from pytest_slmserve.analysis.sweep.plateau import (
    FEWEST_BATCHES,
    Grid,
    law_error,
    next_load,
    next_measurement,
    predicted,
    predictions,
)
from pytest_slmserve.run import executor

GRID = tuple(1 << i for i in range(11))
# OPT-125M with a staggered ramp-up on an H200: flat from 128 to 256, and then it grows again.
DENTED = dict(zip(GRID, (665, 1247, 2446, 4388, 7695, 12191, 17778, 25677, 27918, 42274, 53466)))


def grids() -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, 1024), min_size=1, max_size=12).map(lambda loads: tuple(sorted(loads)))


@st.composite
def planted(draw: st.DrawFn) -> dict[int, float]:
    """Any curve, sensible or not."""
    grid = draw(grids())
    return dict(zip(grid, draw(st.lists(rates(), min_size=len(grid), max_size=len(grid)))))


def full_plateau(curve: dict[int, float], tolerance: float = 0.10) -> int | None:
    return plateau.plateau([point(load, [rate]) for load, rate in curve.items()], tolerance).value


def steps_apart(grid, one, other) -> int:
    """Grid points between two plateaus; none at all begins past the last."""
    first, second = (len(grid) if p is None else grid.index(p) for p in (one, other))
    return abs(first - second)


# What is asked for


def test_the_ends_come_first_then_where_the_law_has_the_plateau_then_the_load_before():
    curve = {load: law(load, b_half=20.0) for load in GRID[:10]}
    asked = play(GRID[:10], curve.__getitem__, repeats=1).asked
    assert [(w.concurrency, w.why) for w in asked] == [
        (1, "the smallest load: what a step takes, whatever the batch"),
        (512, "the largest load: no prediction tells whether there is more to come"),
        (128, "the plateau should begin here"),
        (64, "the load before the plateau, which must still gain"),
    ]


def test_a_dent_is_no_plateau_where_the_largest_load_gains():
    """The first small gain, 9 % from 128 to 256, is not even looked at: half of the throughput is beyond it."""
    played = play(GRID, DENTED.__getitem__, repeats=1)
    assert played.loads == [1, 1024, 512]
    assert plateau.plateau(played.points).value is None is full_plateau(DENTED)


def test_without_a_plateau_the_last_doubling_is_measured():
    curve = {load: 100.0 * load**0.8 for load in GRID}
    played = play(GRID, curve.__getitem__, repeats=1)
    assert played.loads == [1, 1024, 512]
    assert played.asked[-1].why == "the last doubling decides whether there is a plateau"


def test_a_plateau_at_the_smallest_load_takes_three_loads():
    played = play(GRID, lambda load: 1000.0, repeats=1)
    assert played.loads == [1, 1024, 32] and plateau.plateau(played.points).value == 1
    assert played.asked[-1].why == "two loads cannot tell whether the law holds"


def test_a_curve_that_falls_past_its_plateau():
    curve = {load: law(load) * (1 if load <= 256 else 0.8) for load in GRID}
    assert full_plateau(curve) == 256
    assert steps_apart(GRID, plateau.plateau(play(GRID, curve.__getitem__, repeats=1).points).value, 256) <= 1


def test_growth_that_one_doubling_past_the_plateau_may_hide_is_looked_for():
    """By the law no doubling past 32 gains a tenth; but only measurements tell."""
    played = play(GRID, lambda load: law(load, b_half=7.0), repeats=1)
    assert played.loads == [1, 1024, 32, 16, 64, 256]
    assert [w.why for w in played.asked[-2:]] == [
        "from concurrency 32 to 1024 throughput grows by 21 %, perhaps in one doubling",
        "from concurrency 64 to 1024 throughput grows by 10.2 %, perhaps in one doubling",
    ]


@pytest.mark.parametrize("at", [128, 256, 512])
def test_a_step_up_beyond_the_plateau_of_the_law_is_found(at):
    curve = {load: law(load, b_half=2.0) * (1.2 if load >= at else 1) for load in GRID}
    assert plateau.plateau(play(GRID, curve.__getitem__, repeats=1).points).value == at == full_plateau(curve)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_small_grid_is_measured_as_far_as_it_goes(size):
    played = play(GRID[:size], lambda load: 100.0 * load, repeats=1)
    assert sorted(played.loads) == list(GRID[:size])


def test_a_load_that_is_invalid_is_passed_over():
    curve = {load: law(load, b_half=20.0) * (load != 128) for load in GRID[:10]}
    played = play(GRID[:10], curve.__getitem__, repeats=1)
    assert played.loads == [1, 512, 128, 256, 64], "its neighbours stand in for it"
    assert plateau.plateau(played.points).value == 256


def test_what_is_known_is_not_asked_for_again():
    curve = {load: law(load, b_half=20.0) for load in GRID[:10]}
    everything = [point(load, [rate, 1.001 * rate]) for load, rate in curve.items()]
    assert play(GRID[:10], curve.__getitem__, known=everything).asked == ()
    assert play(GRID[:10], curve.__getitem__, known=everything[::9], repeats=1).loads == [128, 64]


def test_loads_beside_the_grid_count_for_nothing():
    beside = [point(load, [5.0]) for load in (3, 100, 4096)]
    assert next_load(GRID, beside, 0.1) == next_load(GRID, (), 0.1)


# Repeats


def test_the_first_repeat_is_of_the_cheapest_load_around_the_plateau():
    curve = {load: law(load, b_half=20.0) for load in GRID}
    played = play(GRID, curve.__getitem__)
    assert played.loads == [1, 1024, 128, 64, 256, 64], "equal repeats have no noise: one is enough"
    assert played.asked[-1].repeats == 2 and played.asked[-1].why == "the noise is not known yet"


def test_no_repeat_is_made_where_one_is_all_there_may_be():
    curve = {load: law(load) for load in GRID}
    assert {w.repeats for w in play(GRID, curve.__getitem__, repeats=1).asked} == {1}


def test_a_gain_that_noise_hides_is_repeated_while_there_is_time():
    """Eleven loads twice, a second each: there is time for seven measurements."""
    noisy = in_turn({load: (law(load, b_half=20.0), 0.88 * law(load, b_half=20.0)) for load in GRID})
    played = play(GRID, noisy, seconds=lambda load, rate: 1.0)
    assert played.loads == [1, 1024, 128, 64, 256, 64, 128]
    assert played.asked[-1].why == "noise hides the gain from 256 to 1024"
    more = play(GRID, noisy, seconds=lambda load, rate: 1.0, repeats=3)
    assert more.loads == [1, 1024, 128, 64, 64, 64, 128, 128], "more repeats of the grid are more time for a part of it"


def test_the_first_repeat_is_made_even_where_the_loads_took_all_the_time():
    """Four loads, of which three are needed: a third of the seconds is spent before anything is known of the noise."""
    grid = (64, 128, 256, 512)
    played = play(grid, lambda load: law(load, b_half=20.0))
    assert played.loads == [64, 512, 128, 64]


def test_a_load_with_several_invalid_measurements_is_not_repeated():
    curve = {load: law(load, b_half=20.0) for load in GRID[:10]}
    once = [replace(point(load, [curve[load]]), left_out=2) for load in (1, 64, 128, 512)]
    assert next_measurement(Grid(GRID[:10], 0.1, 2, h200_seconds), once) is None
    once[1] = replace(once[1], left_out=1)
    assert next_measurement(Grid(GRID[:10], 0.1, 2, h200_seconds), once).concurrency == 64


# Of every curve


@given(planted(), st.integers(1, 3), st.floats(0.02, 0.5))
def test_it_ends_and_asks_for_planned_loads_only_each_no_more_often_than_wanted(curve, repeats, tolerance):
    played = play(tuple(curve), in_turn({k: (v, 1.1 * v, 0.9 * v) for k, v in curve.items()}), repeats=repeats)
    assert set(played.loads) <= set(curve)
    assert all(played.loads.count(load) <= repeats for load in curve)
    for load in set(played.loads):
        own = [w.repeats for w in played.asked if w.concurrency == load]
        assert own == list(range(1, len(own) + 1))


@given(planted(), st.floats(0.02, 0.5))
def test_what_decides_is_measured(curve, tolerance):
    """The plateau of the loads measured begins after a load next to it on the grid that still gains; where there is
    none, the last doubling of the grid gains."""
    grid = tuple(curve)
    points = play(grid, curve.__getitem__, repeats=1, tolerance=tolerance).points
    loads = [p.concurrency for p in points]
    assert len(loads) >= min(FEWEST_POINTS, len(grid)) and {grid[0], grid[-1]} <= set(loads)
    found = plateau.plateau(points, tolerance).value
    before = grid[max(grid.index(found) - 1, 0)] if found is not None else grid[max(len(grid) - 2, 0)]
    assert before in loads
    for a, b in pairwise(load for load in loads if found is not None and load >= found):
        between = [load for load in grid if a < load < b]
        allowed = len(between) <= (1 if a == found else 0)
        assert allowed or curve[b] / curve[a] - 1 < tolerance, "what may hide a doubling that gains was looked at"


@given(planted(), st.randoms(use_true_random=False))
def test_the_order_of_the_points_does_not_matter(curve, chance):
    points = [point(load, [rate]) for load, rate in curve.items() if chance.random() < 0.5]
    shuffled = chance.sample(points, len(points))
    assert next_load(tuple(curve), points, 0.1) == next_load(tuple(curve), shuffled, 0.1)
    assert next_measurement(Grid(tuple(curve), 0.1, 2, h200_seconds), points) == next_measurement(
        Grid(tuple(reversed(curve)), 0.1, 2, h200_seconds), shuffled
    )


@given(st.floats(2, 2000), st.sampled_from([9, 10, 11]))
def test_a_curve_that_keeps_to_the_law_is_known_from_a_third_of_the_seconds(b_half, size):
    """But for the first repeat, which is made in any case."""
    grid = GRID[:size]
    curve = {load: law(load, b_half=b_half) for load in grid}
    played = play(grid, curve.__getitem__)
    spent = sum(h200_seconds(load, curve[load]) for load in played.loads)
    assert spent <= 2 * sum(h200_seconds(load, rate) for load, rate in curve.items()) * (plateau.SHARE + 0.02)
    assert steps_apart(grid, plateau.plateau(played.points).value, full_plateau(curve)) <= 1


# Predictions


@given(st.floats(1, 500), st.sets(st.integers(1, 1024), min_size=3, max_size=9), st.integers(1, 1024))
def test_the_law_is_predicted_exactly_between_its_points(b_half, loads, load):
    known = {n: law(n, b_half=b_half) for n in loads}
    load = min(max(load, min(loads)), max(loads))
    assert predicted(known, load) == pytest.approx(law(load, b_half=b_half))
    points = [point(n, [rate]) for n, rate in known.items()]
    assert law_error(points)[0] < 1e-9
    (seen,) = predictions(points, [load])
    assert seen.tokens_per_s.low == pytest.approx(seen.tokens_per_s.value) == pytest.approx(law(load, b_half=b_half))


def test_the_interval_is_as_wide_as_the_law_misses_what_was_measured():
    points = [point(load, [law(load) * (1.05 if load == 64 else 1)]) for load in (1, 64, 512)]
    share, where = law_error(points)
    assert where == 64 and share == pytest.approx(1 - 1 / 1.05)
    (seen,) = predictions(points, [256])
    assert seen.tokens_per_s.high == pytest.approx(seen.tokens_per_s.value * (1 + share))
    assert seen.tokens_per_s.low < law(256) < seen.tokens_per_s.high


def test_there_is_no_prediction_where_the_law_does_not_describe_the_curve():
    points = [point(load, [DENTED[load]]) for load in (1, 512, 1024)]
    assert law_error(points)[0] > 0.15 and predictions(points, [256]) == ()
    assert law_error(points[:2]) is None and predictions(points[:2], [256]) == ()


def test_numbers_that_others_have_too_agree():
    assert FEWEST_BATCHES == FEWEST_POINTS and plateau.SECOND_CHANCES == executor.EXTRA_ATTEMPTS
    assert math.isclose(plateau.SHARE, 1 / 3)
