from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.report.text_table import between, counted, figure, hundredths, milliseconds


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 3, "-"),
        (math.inf, 3, "-"),
        (0.0, 3, "0"),
        (0.05123, 3, "0.0512"),
        (4.028, 3, "4.03"),
        (9.996, 3, "10.0"),
        (65.54, 3, "65.5"),
        (511.62, 4, "511.6"),
        (16772.4, 4, "16,772"),
        (999.96, 4, "1,000"),
        (1e-9, 3, "0.000000"),
    ],
)
def test_figures_have_significant_digits(value, digits, text):
    assert figure(value, digits) == text


@given(st.floats(1e-3, 1e9))
def test_a_figure_is_off_by_half_a_per_cent_at_most(value):
    assert float(figure(value).replace(",", "")) == pytest.approx(value, rel=0.005001)


def test_milliseconds():
    assert milliseconds(0.01234) == "12.3" and milliseconds(None) == "-"


def test_shares_have_one_decimal():
    assert [hundredths(v) for v in (None, 0.1234, -0.0001, math.nan)] == ["-", "12.3", "0.0", "-"]
    assert [hundredths(v, signed=True) for v in (0.841, -0.05)] == ["+84.1", "-5.0"]


def test_intervals_where_noise_is_known():
    assert between(Interval(2.0, 1.5, 2.5), 1e3) == " (95 %: 1,500 to 2,500)"
    assert between(Interval(2.0)) == ""


def test_words():
    assert [counted(1, "launch"), counted(2, "launch"), counted(3, "host")] == ["1 launch", "2 launches", "3 hosts"]
