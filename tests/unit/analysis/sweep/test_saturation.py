from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import law, measurement, noisy_curve, point, work_of_model

from pytest_slmserve.analysis.estimates import Interval, student_interval
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import point_of
from pytest_slmserve.analysis.sweep.plateau import fit, fit_law
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import TooFewPoints

# Decode milliseconds per step of OPT-1.3B on an H100 with 64 GB, 161 prompt and 338 output tokens: the raw results
# published with arXiv:2503.08311 (series decode_kernels/batch_size_evolution).
PUBLISHED_STEP_MS = {
    1: 4.0272,
    2: 4.3287,
    4: 4.3995,
    8: 4.5941,
    16: 5.2680,
    32: 6.5227,
    64: 9.2927,
    96: 11.9048,
    128: 14.5958,
    192: 20.7020,
    256: 26.3635,
    384: 38.3864,
    512: 51.0159,
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


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


def test_a_known_half_asks_for_a_point():
    with pytest.raises(TooFewPoints, match="needs a point"):
        fit([point(8, ())], b_half=45.0)


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


@pytest.mark.parametrize(
    "points", [[], [point(1, [1.0]), point(2, [1.5])], [point(1, [1.0]), point(2, ()), point(4, ())]]
)
def test_too_few_points(points):
    with pytest.raises(TooFewPoints, match="3 batches"):
        fit(points)


def test_no_saturation():
    with pytest.raises(TooFewPoints, match="no saturation"):
        fit([point(b, [b**1.5]) for b in BATCHES])


def test_order_does_not_matter():
    points = list(noisy_curve({b: law(b) for b in BATCHES}).points)
    shuffled = random.Random(1).sample(points, len(points))
    assert fit(shuffled) == fit(points)
