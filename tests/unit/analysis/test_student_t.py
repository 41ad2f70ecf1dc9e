"""Student's t against printed tables, closed forms and plain integration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis import estimates as student_t
from pytest_slmserve.analysis.estimates import NORMAL

DEGREES = st.integers(1, 200)
CLOSED = {
    1: lambda t: 0.5 - math.atan(t) / math.pi,
    2: lambda t: 0.5 - t / (2 * math.sqrt(2 + t * t)),
    3: lambda t: 0.5 - (math.atan(t / math.sqrt(3)) + math.sqrt(3) * t / (3 + t * t)) / math.pi,
    4: lambda t: 0.5 - t * (6 + t * t) / (2 * (4 + t * t) ** 1.5),
}


def integrated(t: float, df: int, intervals: int = 4000) -> float:
    """The same by Simpson's rule over the density from 0 to t."""
    log_front = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    width = t / intervals
    weights = [1, *(4 if i % 2 else 2 for i in range(1, intervals)), 1]
    density = (math.exp(log_front - (df + 1) / 2 * math.log1p((width * i) ** 2 / df)) for i in range(intervals + 1))
    return 0.5 - width / 3 * math.fsum(w * d for w, d in zip(weights, density))


@pytest.mark.parametrize(
    ("df", "expected"),
    [
        (1, 12.7062047362),
        (2, 4.3026527297),
        (3, 3.1824463053),
        (5, 2.5705818356),
        (10, 2.2281388520),
        (30, 2.0422724563),
    ],
)
def test_the_quantile_of_975_is_that_of_the_tables(df, expected):
    assert student_t.t_above(0.025, df) == pytest.approx(expected, abs=1e-6)
    assert student_t.survival(expected, df) == pytest.approx(0.025, abs=1e-9)


def test_a_small_tail_of_few_degrees():
    assert student_t.t_above(0.0045, 3) == pytest.approx(6.0639, abs=5e-5)
    assert CLOSED[3](student_t.t_above(0.0045, 3)) == pytest.approx(0.0045, abs=1e-12)


@pytest.mark.parametrize("df", CLOSED)
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.1, 0.7, 1.0, 1.7, 3.0, 10.0, 50.0])
def test_few_degrees_have_closed_forms(df, t):
    assert student_t.survival(t, df) == pytest.approx(CLOSED[df](t), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("df", [3, 5, 7, 11, 17, 60])
@pytest.mark.parametrize("t", [0.05, 0.5, 1.5, 2.5, 6.0])
def test_more_degrees_agree_with_an_integral(df, t):
    assert student_t.survival(t, df) == pytest.approx(integrated(t, df), abs=1e-10)


@given(st.floats(-1e6, 1e6), DEGREES)
def test_both_sides_are_alike(t, df):
    assert student_t.survival(t, df) + student_t.survival(-t, df) == pytest.approx(1, abs=1e-12)


@given(st.floats(1e-9, 0.499), DEGREES)
def test_the_tail_above_a_quantile_is_the_one_asked_for(tail, df):
    assert student_t.survival(student_t.t_above(tail, df), df) == pytest.approx(tail, rel=1e-7)


@given(st.floats(0, 100), st.floats(0.001, 100), DEGREES)
def test_farther_out_lies_less(t, more, df):
    assert student_t.survival(t + more, df) < student_t.survival(t, df)


@given(st.floats(1e-6, 0.4), DEGREES)
def test_more_degrees_have_thinner_tails(tail, df):
    assert student_t.t_above(tail, df + 1) < student_t.t_above(tail, df)


def test_with_many_degrees_it_is_the_normal_one():
    assert student_t.t_above(0.01, 10**6) == pytest.approx(NORMAL.inv_cdf(0.99), abs=1e-4)


def test_ends_of_the_line():
    assert student_t.survival(0.0, 4) == 0.5
    assert student_t.survival(math.inf, 4) == 0 and student_t.survival(-math.inf, 4) == 1
    assert student_t.t_above(0.5, 4) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("df", [0, -1])
def test_without_a_degree_of_freedom_there_is_none(df):
    for ask in (
        lambda: student_t.survival(1.0, df),
        lambda: student_t.t_above(0.1, df),
    ):
        with pytest.raises(ValueError, match="degrees of freedom: at least 1"):
            ask()


@pytest.mark.parametrize("df", [3, 5, 7, 11])
@pytest.mark.parametrize("critical", [2.0, 4.0, 10.0])
def test_a_shifted_mean_is_found_as_often_as_asked(df, critical):
    numpy = pytest.importorskip("numpy")
    chance, gates = numpy.random.default_rng(df), 100_000
    mean = student_t.shift(0.9, critical, df)
    seen = (chance.standard_normal(gates) + mean) / numpy.sqrt(chance.chisquare(df, gates) / df)
    assert numpy.mean(seen > critical) == pytest.approx(0.9, abs=0.004)  # four standard errors


def test_half_of_all_samples_exceed_what_is_a_little_above_the_critical_value():
    assert student_t.shift(0.5, 3.0, 10**4) == pytest.approx(3.0, abs=1e-3)
    assert student_t.shift(0.9, 0.0, 5) == pytest.approx(NORMAL.inv_cdf(0.9), abs=1e-6)
