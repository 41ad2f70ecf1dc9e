from __future__ import annotations

import math
from statistics import quantiles, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from pytest_slmserve.analysis.estimates import (
    Interval,
    growth,
    mean_of_known,
    percent,
    percentile,
    possible,
    sample_sd,
    student_interval,
    t_above,
)

numbers = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


def test_quantiles_of_student_agree_with_scipy():
    for df in range(1, 400):
        assert t_above(0.025, df) == pytest.approx(student.ppf(0.975, df), abs=1e-4)


@given(numbers)
def test_percentile_is_that_of_the_standard_library(values):
    cuts = quantiles(values, n=100, method="inclusive")
    assert percentile(values, 0.5) == pytest.approx(cuts[49], abs=1e-6)
    assert percentile(values, 0.99) == pytest.approx(cuts[98], abs=1e-6)


@given(numbers, st.floats(0, 1))
def test_percentile_lies_among_the_values(values, share):
    assert min(values) - 1e-6 <= percentile(values, share) <= max(values) + 1e-6


def test_nothing_has_neither_mean_nor_percentile():
    assert percentile([], 0.5) is None and mean_of_known([None, None]) is None
    assert mean_of_known([None, 1.0, 3.0]) == 2.0


@given(numbers)
def test_deviation_is_that_of_the_standard_library(values):
    assert sample_sd(values) == pytest.approx(stdev(values), rel=1e-9, abs=1e-9)


@given(st.floats(-1e300, 1e300), st.integers(2, 30))
def test_what_is_all_alike_has_no_deviation_at_all(value, count):
    assert sample_sd([value] * count) == 0


def test_deviation_of_large_numbers_is_known_too():
    assert sample_sd([1e300, 3e300]) == pytest.approx(2**0.5 * 1e300)


def test_growth_is_never_too_large_to_say():
    assert growth(0.0) == 0 and growth(math.log(2)) == pytest.approx(1) and growth(1e6) == math.inf


def test_student_interval_by_hand():
    seen = student_interval([9.0, 11.0])
    assert seen.value == 10 and seen.high - 10 == pytest.approx(12.706205)
    assert student_interval([9.0, 11.0], 10.5).low == pytest.approx(10.5 - 12.706205)
    assert student_interval([5.0]) == Interval(5.0)


@pytest.mark.parametrize(("share", "text"), [(0.0789, "7.9 %"), (0.1, "10 %"), (-0.00001, "0 %"), (-0.14, "-14 %")])
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seen", "cut"),
    [
        (Interval(0.5, 0.4, 0.6), Interval(0.5, 0.4, 0.6)),
        (Interval(0.2, -0.3, 0.7), Interval(0.2, 0.0, 0.7)),
        (Interval(0.9, 0.6, 1.2), Interval(0.9, 0.6, 1.0)),
        (Interval(-0.1, -0.3, 0.1), Interval(-0.1, 0.0, 0.1)),
        (Interval(-0.2, -0.3, -0.1), Interval(-0.2)),
        (Interval(1.2, 1.1, 1.3), Interval(1.2)),
        (Interval(0.5), Interval(0.5)),
    ],
)
def test_an_interval_is_cut_where_it_cannot_be(seen, cut):
    assert possible(seen, most=1.0) == cut
