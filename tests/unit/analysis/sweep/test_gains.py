from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import curves, law, noisy_curve, plateau_batch, point, without

from pytest_slmserve.analysis.points import point_differences
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad, advantages, gains, plateau

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
