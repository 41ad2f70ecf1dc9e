"""Where there is most goodput, and up to which rate enough requests are good; honest at the ends and beside gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.sweep.batching import CONCURRENCY, highest_load, peak

CURVE = [(1, 1.0), (2, 2.0), (4, 3.9), (8, 6.0), (16, 2.5)]


@pytest.mark.parametrize(
    ("points", "below", "above", "end"),
    [
        (CURVE, 4, 16, "no more at 4 and 16"),
        (CURVE[:4], 4, None, "the largest load measured: a larger one may have more"),
        (CURVE[3:], None, 16, "the smallest load measured: a smaller one may have more"),
    ],
)
def test_a_peak_at_an_end_says_that_more_is_not_excluded(points, below, above, end):
    seen = peak(points)
    assert (seen.load, seen.per_s, seen.below, seen.above) == (8, 6.0, below, above)
    assert seen.bracketed is (None not in (below, above))
    assert seen.why == f"most goodput, 6/s, at 8 requests/s, {end}"


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
    seen = peak([(1, 1.0), (4, 3.9), (16, 2.5)], invalid=[8, 2, 0.5])
    assert (seen.load, seen.below, seen.above, seen.unknown, seen.bracketed) == (4, 1, 16, (2, 8), False)
    assert seen.why.endswith("; what was measured at 2, 8 is invalid and may not be believed")
    largest = peak([(1, 1.0), (4, 3.9)], invalid=[8])
    assert "the largest load with a valid measurement: a larger one may have more" in largest.why


def test_where_nothing_is_good_there_is_no_peak_to_speak_of():
    assert peak([(4, 0.0), (8, 0.0)]).why == "no request is good at any load measured"
    doubtful = peak([(4, 0.0), (8, 0.0)], invalid=[2])
    assert doubtful.why.startswith("no request is good at any load with a valid measurement; what was measured at 2")
    assert "20 % are at 2, the smallest with a valid measurement; what" in highest_load([(2, 0.2)], invalid=[1]).why


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


def test_of_nothing_or_of_too_little_there_is_no_highest_load():
    assert highest_load([]) is None
    assert highest_load([(1, 1.0), (1, 0.7)]).load is None, "repeats are averaged"
    none = highest_load([(1, 0.2), (2, 0.1)])
    assert (
        none.load is None
        and none.why == "at no load measured are 90 % of the requests good: 20 % are at 1, the smallest"
    )


def test_the_highest_load_in_a_sentence():
    assert highest_load(ATTAINED).why == "90 % of the requests are good up to 4 requests/s (91 %); 60 % are at 8"
    assert "the largest load measured: the limit is not reached" in highest_load(ATTAINED, 0.5).why
    doubtful = highest_load([(1, 1.0), (4, 0.91), (8, 0.6)], invalid=[2, 16])
    assert doubtful.unknown == (2,)
    assert doubtful.why.endswith("; what was measured at 2 is invalid and may not be believed")


def test_loads_may_be_requests_in_flight():
    assert "at 8 concurrent requests, no more at 4 and 16" in peak(CURVE, unit=CONCURRENCY).why
    assert "good up to 4 concurrent requests (91 %)" in highest_load(ATTAINED, unit=CONCURRENCY).why
