"""Gains by hand, the plateau where the law has it, the law that was planted; and which loads an adaptive sweep asks
for: what decides is measured, nothing twice, in a third of the seconds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from adaptive import h200_seconds, in_turn, play
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from strategies import curves, law, measurement, noisy_curve, plateau_batch, point, rates, without, work_of_model

from pytest_slmserve.analysis.estimates import Interval, student_interval
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import point_differences, point_of
from pytest_slmserve.analysis.sweep.curve import FEWEST_POINTS, Curve
from pytest_slmserve.analysis.sweep.plateau import (
    FEWEST_BATCHES,
    SECOND_CHANCES,
    SHARE,
    ChosenLoad,
    Grid,
    advantages,
    fit,
    fit_law,
    gains,
    law_error,
    looks_from,
    next_load,
    next_measurement,
    plateau,
    predicted,
    predictions,
    tail_at,
)
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run import executor
from pytest_slmserve.schema.errors import TooFewPoints

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def pareto_front(points):
    return Curve(subject="opt-1.3b", points=tuple(points)).pareto_front()


def test_gain_per_doubling():
    [first, second] = gains([point(1, [100.0]), point(2, [150.0]), point(8, [600.0])])
    assert (first.start, first.end, first.value) == (1, 2, pytest.approx(0.5))
    assert second.value == pytest.approx(1.0), "fourfold over two doublings"
    assert first.low is None and first.high is None, "one repeat has no interval"


def test_interval_of_a_gain_by_hand():
    [seen, _] = gains([point(1, [100.0, 102.0]), point(2, [150.0, 150.0]), point(4, [160.0])])
    # sd of the two groups' logs pooled is 0.0099 with 2 degrees of freedom: half width 4.3027 * 0.0099 * 1
    assert seen.value == pytest.approx(150 / 101 - 1)
    assert seen.low == pytest.approx(0.4233, abs=1e-3) and seen.high == pytest.approx(0.5498, abs=1e-3)


def test_gains_pass_over_invalid_points():
    steps = gains([point(1, [1.0]), point(2, ()), point(4, [3.0])])
    assert [(g.start, g.end) for g in steps] == [(1, 4)]


@pytest.mark.parametrize("b_half", [1.1, 5.0, 21.0, 45.0])
@pytest.mark.parametrize("tolerance", [0.05, 0.10, 0.2])
def test_plateau_of_the_law_is_where_the_law_has_it(b_half, tolerance):
    points = [point(b, [law(b, b_half=b_half)] * 2) for b in BATCHES]
    expected = next(b for b in BATCHES if b > plateau_batch(b_half, tolerance))
    assert plateau(points, tolerance) == ChosenLoad(
        *(expected if expected < 512 else None for _ in range(3)), known=True
    )


def test_a_flat_stretch_before_a_rise_is_no_plateau():
    rates = {1: 100, 2: 101, 4: 102, 8: 150, 16: 152, 32: 153}
    assert plateau([point(b, [float(t)]) for b, t in rates.items()]) == ChosenLoad(8, None, None, known=False)


def test_noise_widens_the_plateau():
    seen = plateau(noisy_curve({b: law(b) for b in (64, 128, 256, 512, 1024)}, noise=0.03, repeats=2, seed=4).points)
    assert seen.known and (seen.low or 0) <= seen.value <= (seen.high or 10**9) and seen.low != seen.high


def test_no_point_has_no_plateau():
    assert plateau([]) == ChosenLoad(None, None, None, known=False) and gains([]) == () and pareto_front([]) == ()


@given(curves(fewest=3), st.integers(-8, 8))
def test_scaling_throughput_leaves_the_plateau(curve, exponent):
    # by powers of two, which are exact, so that no rounding moves a gain over the tolerance
    scale = 2.0**exponent
    scaled = [point(p.concurrency, [r * scale for r in p.repeats], p.e2e_repeats) for p in curve.points]
    first, second = plateau(curve.points), plateau(scaled)
    gaps = [abs(x - 0.1) for g in gains(curve.points) for x in (g.value, g.low, g.high)]
    assert first == second or min(gaps) < 1e-9


@given(curves(), st.randoms(use_true_random=False))
def test_order_of_points_does_not_matter(curve, chance: random.Random):
    shuffled = chance.sample(curve.points, len(curve.points))
    assert plateau(shuffled) == plateau(curve.points)
    assert pareto_front(shuffled) == pareto_front(curve.points)
    assert gains(shuffled) == gains(curve.points)


@given(st.lists(st.floats(10, 1000), min_size=2, max_size=6), st.integers(2, 5))
def test_a_gain_is_the_growth_per_doubling_whatever_the_loads(values, factor):
    found = gains([point(factor**i, [rate]) for i, rate in enumerate(values)])
    for gain, (a, b) in zip(found, pairwise(values), strict=True):
        assert (1 + gain.value) ** math.log2(factor) == pytest.approx(b / a)
        assert gain.end == factor * gain.start


@pytest.mark.parametrize(
    ("looks", "repeats", "tail"), [((), 3, 0.025), ((4,), 4, 0.025), ((2, 4), 1, None), ((2, 4), 4, None)]
)
def test_intervals_hold_at_all_looks_together(looks, repeats, tail):
    """With one look each tail is 2.5 %; with several each is less, together as much as one."""
    seen = tail_at(repeats, looks)
    assert seen == tail if tail else 0 < seen < 0.025
    if len(looks) > 1:
        assert tail_at(1, looks) == tail_at(2, looks) == tail_at(3, looks) and tail_at(4, looks) == tail_at(9, looks)
        assert 0.025 < tail_at(2, looks) + tail_at(4, looks) < 0.05


@pytest.mark.parametrize(("first", "found"), [(2, (2, 3, 4, 6, 8, 12, 16)), (5, (5, 6, 8, 12, 16)), (20, (20,))])
def test_looks_begin_with_what_is_measured_of_each_load(first, found):
    assert looks_from(first) == found


# Pareto


@given(curves())
def test_pareto_front_is_what_nothing_beats(curve):
    front = pareto_front(curve.points)
    assert front, "some point is always the fastest"
    for p in curve.points:
        beaten = any(
            q.output_tokens_per_s >= p.output_tokens_per_s
            and q.e2e_s <= p.e2e_s
            and (q.output_tokens_per_s, q.e2e_s) != (p.output_tokens_per_s, p.e2e_s)
            for q in curve.points
        )
        assert (p in front) is not beaten


def test_equal_points_are_both_on_the_front():
    points = [point(1, [10.0], [1.0]), point(2, [10.0], [1.0]), point(4, [10.0], [2.0])]
    assert [p.concurrency for p in pareto_front(points)] == [1, 2]


@given(curves(fewest=2))
def test_an_invalid_point_is_not_on_the_front(curve):
    spoilt = without(curve, curve.points[0].concurrency)
    assert curve.points[0].concurrency not in [p.concurrency for p in pareto_front(spoilt.points)]


@given(curves(fewest=2))
def test_only_points_off_the_front_are_at_a_disadvantage(curve):
    front = pareto_front(curve.points)
    for p in curve.points:
        most = max(by.value for _, by in advantages(curve.points, p))
        assert most <= 1e-9 if p in front else most >= -1e-9


def test_advantage_is_the_lesser_of_both_gains():
    slow, fast = point(1, [100.0, 100.0], [2.0, 2.0]), point(2, [150.0, 150.0], [1.6, 1.6])
    [(other, by)] = advantages([slow, fast], slow)
    assert other is fast and by.value == pytest.approx(0.25) and by.low == by.high == pytest.approx(0.25)
    single = [replace(p, repeats=p.repeats[:1], e2e_repeats=p.e2e_repeats[:1]) for p in (slow, fast)]
    assert advantages(single, single[0])[0][1].low is None
    assert not point_differences(single).known


# The law of saturation


PUBLISHED_MS = (
    4.0272,
    4.3287,
    4.3995,
    4.5941,
    5.268,
    6.5227,
    9.2927,
    11.9048,
    14.5958,
    20.702,
    26.3635,
    38.3864,
    51.0159,
)
PUBLISHED_STEP_MS = dict(zip((1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512), PUBLISHED_MS, strict=True))


def test_the_law_on_published_results():
    found = fit([point(b, [b / ms * 1e3]) for b, ms in PUBLISHED_STEP_MS.items()])
    assert found.b_half.value == pytest.approx(45.4, abs=0.5)
    assert found.error_max < 0.06 and found.error_mean < 0.03
    shapes = work_of_model(model_of("opt-1.3b"), 161, 338)
    assert shapes.b_half == pytest.approx(40.6, abs=0.1)
    assert found.b_half.value == pytest.approx(shapes.b_half, rel=0.15), "half of it needs no GPU"


def test_one_parameter_is_enough_where_shapes_give_the_other():
    """One number of the device predicts batches from 1 to 512: what is known of the model says the rest."""
    shapes = work_of_model(model_of("opt-1.3b"), 161, 338)
    found = fit([point(b, [b / ms * 1e3]) for b, ms in PUBLISHED_STEP_MS.items()], b_half=shapes.b_half)
    assert found.error_max < 0.10 and found.error_mean < 0.05
    assert found.b_half == Interval(shapes.b_half) and found.t_inf.value == pytest.approx(10_800, rel=0.02)


@given(st.floats(10, 1e6), st.floats(0.1, 500), st.sets(st.integers(1, 1024), min_size=1, max_size=9))
def test_the_rate_of_a_planted_law_is_found_where_its_half_is_known(t_inf, b_half, batches):
    assert fit_law([(b, law(b, t_inf, b_half)) for b in batches], b_half) == pytest.approx((t_inf, b_half))


def test_the_fixed_part_shows_the_host():
    """A step's fixed part was 3.95 ms where reading the weights takes 1.61 ms at the bandwidth of that GPU."""
    found = fit([point(b, [b / ms * 1e3]) for b, ms in PUBLISHED_STEP_MS.items()])
    work, peaks = work_of_model(model_of("opt-1.3b"), 161, 338), peaks_of("NVIDIA H100 64GB HBM2")
    assert work.weight_bytes / peaks.bytes_per_s == pytest.approx(1.61e-3, rel=0.01)
    assert found.fixed_s.value == pytest.approx(3.95e-3, rel=0.01)


@given(st.floats(10, 1e6), st.floats(0.1, 500), st.sets(st.integers(1, 1024), min_size=3, max_size=9))
def test_a_planted_law_is_found(t_inf, b_half, batches):
    found = fit_law([(b, law(b, t_inf, b_half)) for b in batches])
    assert found == pytest.approx((t_inf, b_half), rel=1e-3)


def test_fit_of_noiseless_points():
    found = fit([point(b, [law(b)]) for b in BATCHES])
    assert (found.t_inf.value, found.b_half.value) == pytest.approx((10_000, 45))
    assert found.fixed_s.value == pytest.approx(0.0045) and found.error_max < 1e-9
    assert found.n == 1 and found.b_half.low is None, "one repeat has no interval"
    assert found.tokens_per_s(45) == pytest.approx(5000)


def test_interval_from_repeats_covers_the_truth():
    hits = 0
    for seed in range(300):
        found = fit(noisy_curve({b: law(b) for b in BATCHES}, repeats=3, seed=seed).points)
        hits += found.b_half.low <= 45 <= found.b_half.high
    assert 0.91 < hits / 300 < 0.985


def test_the_launch_is_what_is_repeated_where_several_measured_equally_often():
    """Two launches of which the second is 4 % faster: their own repeats say nothing of a third."""
    rates = [(launch, i, 1 + 0.04 * launch + 0.001 * i) for launch in range(2) for i in range(3)]
    points = [
        point_of([(measurement(b, law(b) * by, repeat=3 * on + i, launch=f"launch-{on}"),) for on, i, by in rates])
        for b in BATCHES
    ]
    found, means = fit(points).t_inf, student_interval([10_010.0, 10_410.0])
    assert (found.low, found.high) == pytest.approx((means.low, means.high), rel=0.01)


def test_no_interval_of_the_law_reaches_below_nothing():
    """As two repeats of a small sweep have it, whose Student interval is 13 standard errors wide."""
    repeats = {1: [95.0, 130.0], 4: [420.0, 400.0], 16: [1210.0, 1340.0], 64: [2900.0, 2300.0]}
    found = fit([point(batch, rates) for batch, rates in repeats.items()])
    assert found.b_half.low == found.fixed_s.low == found.t_inf.low == 0.0
    assert found.b_half.value > 0 and found.b_half.high > found.b_half.value


def test_a_repeat_that_some_points_lack_is_not_fitted():
    points = [point(b, [law(b), law(b) * 1.01]) for b in BATCHES[:-1]]
    assert fit([*points, point(512, [law(512)])]).n == 1
    assert fit([*points, point(512, ())]).n == 2, "an invalid point takes no part"


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(10, 1e4)), min_size=4, max_size=8, unique_by=lambda row: row[0])
)
def test_no_other_law_is_nearer_to_the_points(rows):
    """Least squares of the relative error of the step time: any small step aside is farther."""

    def squares(t_inf: float, b_half: float) -> float:
        return math.fsum((1 - (batch + b_half) / t_inf * rate / batch) ** 2 for batch, rate in rows)

    try:
        t_inf, b_half = fit_law(rows)
    except TooFewPoints:
        return
    least = squares(t_inf, b_half) * (1 - 1e-9) - 1e-9
    assert all(squares(t_inf * by, b_half + more) >= least for by in (0.99, 1, 1.01) for more in (-0.5, 0, 0.5))


@pytest.mark.parametrize(
    ("rates", "b_half", "facts"),
    [
        ({}, None, (3, 0)),
        ({1: [1.0], 2: [1.5]}, None, (3, 2)),
        ({1: [1.0], 2: (), 4: ()}, None, (3, 1)),
        ({8: ()}, 45.0, ()),
        ({b: [b**1.5] for b in BATCHES}, None, ()),
    ],
)
def test_no_law_of_too_few_points_or_of_what_does_not_saturate(rates, b_half, facts):
    with refused(*facts, kind=TooFewPoints):
        fit([point(b, each) for b, each in rates.items()], b_half)


def test_the_order_of_the_points_leaves_the_law():
    points = list(noisy_curve({b: law(b) for b in BATCHES}).points)
    shuffled = random.Random(1).sample(points, len(points))
    assert fit(shuffled) == fit(points)


# Which loads are asked for


GRID = tuple(1 << i for i in range(11))
DENTED = dict(zip(GRID, (665, 1247, 2446, 4388, 7695, 12191, 17778, 25677, 27918, 42274, 53466)))


def grids() -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, 1024), min_size=1, max_size=12).map(lambda loads: tuple(sorted(loads)))


@st.composite
def planted(draw: st.DrawFn) -> dict[int, float]:
    """Any curve, sensible or not."""
    grid = draw(grids())
    return dict(zip(grid, draw(st.lists(rates(), min_size=len(grid), max_size=len(grid)))))


def full_plateau(curve: dict[int, float], tolerance: float = 0.10) -> int | None:
    return plateau([point(load, [rate]) for load, rate in curve.items()], tolerance).value


def steps_apart(grid, one, other) -> int:
    """Grid points between two plateaus; none at all begins past the last."""
    first, second = (len(grid) if p is None else grid.index(p) for p in (one, other))
    return abs(first - second)


@pytest.mark.parametrize(
    ("grid", "rate", "loads", "begins"),
    [
        (GRID[:10], lambda load: law(load, b_half=20.0), [1, 512, 128, 64], 128),  # the ends, where it begins, before
        (GRID, DENTED.__getitem__, [1, 1024, 512], None),  # 9 % from 128 to 256: half of the throughput is beyond it
        (GRID, lambda load: 100.0 * load**0.8, [1, 1024, 512], None),  # the last doubling
        (GRID, lambda load: 1000.0, [1, 1024, 32], 1),  # two loads cannot tell whether the law holds
        (GRID, lambda load: law(load, b_half=7.0), [1, 1024, 32, 16, 64, 256], 32),  # perhaps in one doubling
        (GRID[:10], lambda load: law(load, b_half=20.0) * (load != 128), [1, 512, 128, 256, 64], 256),  # 128 is invalid
        *(
            (GRID, lambda load, at=at: law(load, b_half=2.0) * (1.2 if load >= at else 1), None, at)
            for at in (128, 256, 512)
        ),
    ],
)
def test_loads_in_the_order_that_they_are_asked_for_and_where_the_plateau_begins(grid, rate, loads, begins):
    played = play(grid, rate, repeats=1)
    assert played.loads == (loads or played.loads) and all(wanted.why for wanted in played.asked)
    assert plateau(played.points).value == begins == full_plateau({n: rate(n) for n in grid if rate(n)})


def test_a_curve_that_falls_past_its_plateau():
    curve = {load: law(load) * (1 if load <= 256 else 0.8) for load in GRID}
    assert full_plateau(curve) == 256
    assert steps_apart(GRID, plateau(play(GRID, curve.__getitem__, repeats=1).points).value, 256) <= 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_small_grid_is_measured_as_far_as_it_goes(size):
    played = play(GRID[:size], lambda load: 100.0 * load, repeats=1)
    assert sorted(played.loads) == list(GRID[:size])


def test_what_is_known_is_not_asked_for_again():
    curve = {load: law(load, b_half=20.0) for load in GRID[:10]}
    everything = [point(load, [rate, 1.001 * rate]) for load, rate in curve.items()]
    assert play(GRID[:10], curve.__getitem__, known=everything).asked == ()
    assert play(GRID[:10], curve.__getitem__, known=everything[::9], repeats=1).loads == [128, 64]


def test_loads_beside_the_grid_count_for_nothing():
    beside = [point(load, [5.0]) for load in (3, 100, 4096)]
    assert next_load(GRID, beside, 0.1) == next_load(GRID, (), 0.1)


# Repeats


NOISY = {load: (law(load, b_half=20.0), 0.88 * law(load, b_half=20.0)) for load in GRID}


@pytest.mark.parametrize(
    ("answer", "facts", "loads"),
    [
        # Equal repeats have no noise: one is enough, of the cheapest load around the plateau.
        (lambda load: law(load, b_half=20.0), {}, [1, 1024, 128, 64, 256, 64]),
        # Eleven loads twice, a second each: there is time for seven measurements; of three repeats for more.
        (None, {"seconds": lambda load, rate: 1.0}, [1, 1024, 128, 64, 256, 64, 128]),
        (None, {"seconds": lambda load, rate: 1.0, "repeats": 3}, [1, 1024, 128, 64, 256, 64, 64, 128, 128, 256, 512]),
    ],
)
def test_a_gain_that_noise_hides_is_repeated_while_there_is_time(answer, facts, loads):
    played = play(GRID, answer or in_turn(NOISY), **facts)
    assert played.loads == loads
    assert [w.repeats for w in played.asked] == [loads[: i + 1].count(load) for i, load in enumerate(loads)]


def test_no_repeat_is_made_where_one_is_all_there_may_be():
    assert {w.repeats for w in play(GRID, law, repeats=1).asked} == {1}


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
    found = plateau(points, tolerance).value
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
    assert spent <= 2 * sum(h200_seconds(load, rate) for load, rate in curve.items()) * (SHARE + 0.02)
    assert steps_apart(grid, plateau(played.points).value, full_plateau(curve)) <= 1


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
    assert FEWEST_BATCHES == FEWEST_POINTS and SECOND_CHANCES == executor.EXTRA_ATTEMPTS and math.isclose(SHARE, 1 / 3)
