"""Promises of several: each by its own interval, and what breaks one corrected for having been chosen."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_records import measurement
from strategies import H200

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.points import points_of
from pytest_slmserve.analysis.verdict import State, Verdict, every

PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
SECOND_FARTHER = [(Interval(1.0, 0.9, 1.1), "a"), (Interval(1.3, 1.2, 1.4), "b")]


def around(values, half=1.0):
    """Intervals of normal estimates with a standard error of 1, as wide as `several` of them need."""

    def seen(several):
        width = half * NormalDist().inv_cdf(1 - 0.025 / several)
        return [(Interval(value, value - width, value + width), place) for place, value in enumerate(values)]

    return seen


@pytest.mark.parametrize(
    ("limits", "state", "decides"),
    [
        ({"most": 1.5}, PASSES, "b"),
        ({"most": 1.3}, INCONCLUSIVE, "b"),
        ({"most": 1.15}, FAILS, "b"),
        ({"least": 0.8}, PASSES, "a"),
        ({"least": 1.0}, INCONCLUSIVE, "a"),
        ({"least": 1.15}, FAILS, "a"),
    ],
)
def test_the_one_that_is_nearest_to_its_bound_or_beyond_it_decides(limits, state, decides):
    found, seen, what = every(lambda several: SECOND_FARTHER, **limits)
    assert (found, what) == (state, decides) and seen == dict(map(reversed, SECOND_FARTHER))[decides]


@pytest.mark.parametrize(
    ("least", "most", "state", "decides"),
    [
        (0.5, 1.5, PASSES, "b"),
        (0.8, 2, PASSES, "a"),
        (1, 2, INCONCLUSIVE, "a"),
        (1.15, 2, FAILS, "a"),
        (0, 1.1, FAILS, "b"),
    ],
)
def test_between_two_bounds(least, most, state, decides):
    found, _, what = every(lambda several: SECOND_FARTHER, least, most)
    assert (found, what) == (state, decides)


@pytest.mark.parametrize(("limit", "values"), [("most", [2.1, -3.0]), ("least", [-2.1, 3.0])])
def test_an_inconclusive_one_is_told_with_an_interval_that_has_the_bound_in_it(limit, values):
    """By its own interval it is beyond the bound, corrected it is not."""
    state, seen, place = every(around(values), **{limit: 0.0})
    assert (state, place, seen.value) == (INCONCLUSIVE, 0, values[0]) and seen.low < 0 < seen.high


def test_without_noise_nothing_is_decided_and_the_farthest_is_named():
    rows = [(Interval(1.0), "a"), (Interval(2.0), "b")]
    assert every(lambda several: rows, most=5.0) == (INCONCLUSIVE, Interval(2.0), "b")
    assert every(lambda several: rows, least=0.5) == (INCONCLUSIVE, Interval(1.0), "a")


def test_one_of_many_that_keep_a_promise_seldom_breaks_it_by_chance():
    """Ten estimates of what lies at the bound: without the correction one in five of these promises would fail."""
    chance, runs = random.Random(1), 2000
    failed = sum(every(around([chance.gauss(0, 1) for _ in range(10)]), most=0.0)[0] is FAILS for _ in range(runs))
    assert failed / runs < 0.04


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.floats(-5, 5))
def test_below_a_bound_is_above_it_turned_round(values, bound):
    one = every(around(values), most=bound)
    other = every(around([-value for value in values]), least=-bound)
    assert one[0] is other[0] and one[1].value == -other[1].value


@pytest.mark.parametrize(("launches", "told"), [(("a", "a"), True), (("a", "b"), False)])
def test_a_verdict_that_rests_on_one_launch_says_so(launches, told):
    [point] = points_of(measurement(8, 100.0, repeat=i, launch=launch) for i, launch in enumerate(launches))
    verdict = Verdict.from_interval("claim", "subject", PASSES, "it is so", Interval(1.0, 0.9, 1.1), 2.0, point)
    assert verdict.why == ("it is so, of one launch" if told else "it is so")
    assert (
        Verdict.from_interval("claim", "subject", INCONCLUSIVE, "who knows", Interval(1.0), 2.0, point).why
        == "who knows"
    )


@pytest.mark.parametrize(
    ("hosts", "told"),
    [("aa", False), ("ab", True), (("ab", "ab"), False), (("ab", "a"), True), (("a", None), False)],
    ids=str,
)
def test_a_verdict_on_points_of_different_hosts_says_so(hosts, told):
    points = points_of(
        measurement(load, 100.0, repeat=i, launch=f"{load}{i}", environment=replace(H200, host=host))
        for load, of_load in zip((8, 16), hosts)
        for i, host in enumerate(of_load or (None, None))
    )
    verdict = Verdict.from_interval("claim", "subject", PASSES, "it is so", Interval(1.0, 0.9, 1.1), 2.0, *points)
    assert verdict.why.endswith(", on different hosts") is told
