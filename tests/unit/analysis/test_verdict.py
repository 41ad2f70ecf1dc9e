"""Verdicts: what a whole interval says of a limit, the one of several estimates that decides, corrected for having been
chosen, the states of several promises, and what a verdict keeps of the points that it rests on."""

from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given, strategies as st
from stored_records import measurement
from strategies import FAILS, H200, INCONCLUSIVE, PASSES

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.points import points_of
from pytest_slmserve.analysis.verdict import Inconclusive, State, Verdict, above, all_of, below, every, unsure, within

ENDS = st.integers(-3, 3)
SECOND_FARTHER = [(Interval(1.0, 0.9, 1.1), "a"), (Interval(1.3, 1.2, 1.4), "b")]
KNOWN, ONCE = Interval(1.0, 0.9, 1.1), Interval(1.0)


@given(ENDS, st.integers(0, 4), ENDS, st.integers(0, 3), st.lists(st.sampled_from(State)))
def test_whole_interval_decides_limit(low, width, least, room, states):
    """Each by looking at all values that the interval holds, its ends among them."""
    seen, most = Interval(low + width / 2, low, low + width), least + room
    values = [low + i / 4 for i in range(4 * width + 1)]
    for judge, kept, broken in (
        (lambda seen: below(seen, least), [v < least for v in values], [v > least for v in values]),
        (lambda seen: above(seen, least), [v > least for v in values], [v < least for v in values]),
        (lambda seen: within(seen, least, most), [least <= v <= most for v in values], None),
    ):
        fails = low + width < least or low > most if broken is None else all(broken)
        assert judge(seen) is (PASSES if all(kept) else FAILS if fails else INCONCLUSIVE)
        assert judge(Interval(low)) is INCONCLUSIVE, "the noise is not known"
    expected = FAILS if FAILS in states else PASSES if states and set(states) == {PASSES} else INCONCLUSIVE
    assert all_of(states) is expected


def around(values):
    """Intervals of normal estimates with a standard error of 1, as wide as `several` of them need."""

    def seen(several):
        width = NormalDist().inv_cdf(1 - 0.025 / several)
        return [(Interval(value, value - width, value + width), place) for place, value in enumerate(values)]

    return seen


@pytest.mark.parametrize(("limits", "state", "decides"), [
    ({"most": 1.5}, PASSES, "b"), ({"most": 1.3}, INCONCLUSIVE, "b"), ({"most": 1.15}, FAILS, "b"),
    ({"least": 0.8}, PASSES, "a"), ({"least": 1.0}, INCONCLUSIVE, "a"), ({"least": 1.15}, FAILS, "a"),
    ({"least": 0.5, "most": 1.5}, PASSES, "b"), ({"least": 0.8, "most": 2}, PASSES, "a"),
    ({"least": 1, "most": 2}, INCONCLUSIVE, "a"), ({"least": 1.15, "most": 2}, FAILS, "a"),
    ({"least": 0, "most": 1.1}, FAILS, "b"),
])  # fmt: skip
def test_estimate_nearest_bound_decides(limits, state, decides):
    found, seen, what = every(lambda several: SECOND_FARTHER, **limits)
    assert (found, what) == (state, decides) and seen == {name: row for row, name in SECOND_FARTHER}[decides]


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=5), st.floats(-5, 5))
def test_largest_estimate_decides_upper_bound(values, bound):
    state, seen, place = every(around(values), most=bound)
    own, wide = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(1 - 0.025 / len(values))
    largest = max(values)
    expected = FAILS if largest - wide > bound else PASSES if largest + own < bound else INCONCLUSIVE
    assert state is expected and seen.value == values[place] == largest
    other = every(around([-value for value in values]), least=-bound)
    assert other[0] is state and other[1].value == -seen.value


def test_inconclusive_verdict_raises_as_boolean():
    """By its own interval an estimate is beyond the bound, corrected it is not. Without noise the farthest is named."""
    for limit, values in (("most", [2.1, -3.0]), ("least", [-2.1, 3.0])):
        state, seen, place = every(around(values), **{limit: 0.0})
        assert (state, place, seen.value) == (INCONCLUSIVE, 0, values[0]) and seen.low < 0 < seen.high
        blind = [(Interval(value), place) for place, value in enumerate(values)]
        found = every(lambda several, blind=blind: blind, **{limit: 2 * values[0]})
        assert found == (INCONCLUSIVE, Interval(values[0]), 0)
    made = {state: Verdict("claim", "subject", state, "it is so") for state in State}
    assert made[PASSES] and not made[FAILS]
    with pytest.raises(Inconclusive) as error:
        bool(made[INCONCLUSIVE])
    assert not isinstance(error.value, AssertionError) and str(error.value) == repr(made[INCONCLUSIVE])
    assert all(word in repr(made[FAILS]) for word in ("fails", "claim", "subject", "it is so"))
    points = points_of(measurement(load, 100.0, repeat=i) for load in (8, 16) for i in range(2))
    seen = Verdict.from_interval("c", "s", PASSES, "w", KNOWN, 2.0, *points, points[0])
    records = points[0].records + points[1].records
    assert seen == Verdict("c", "s", PASSES, seen.why, 1.0, 0.9, 1.1, 2.0, 4, records)
    nothing = Verdict.inconclusive("c", "s", "w", 2.0, points[0])
    assert nothing == Verdict("c", "s", INCONCLUSIVE, "w", threshold=2.0, n=2, records=points[0].records)
    assert "--slm-repeats 2" in unsure(ONCE) and unsure(KNOWN) == unsure(None) == "", "the option that gives some"


@pytest.mark.parametrize(("launches", "hosts", "judged", "told"), [
    (["aa", "aa"], "aa", KNOWN, {"launch"}), (["ab", "ab"], "aa", KNOWN, set()), (["aa", "aa"], "aa", ONCE, set()),
    (["ab", "ab"], "ab", KNOWN, {"hosts"}), (["ab", "ab"], ("ab", "ab"), KNOWN, set()),
    (["ab", "ab"], ("ab", "a"), KNOWN, {"hosts"}), (["ab", "ab"], ("a", None), KNOWN, set()),
], ids=str)  # fmt: skip
def test_verdict_warns_of_single_launch(launches, hosts, judged, told):
    """hosts: of each point, one or one for each repeat."""
    points = points_of(
        measurement(load, 100.0, repeat=i, launch=launch, environment=replace(H200, host=of_load and of_load[-i]))
        for load, of_load, each in zip((8, 16), hosts, launches)
        for i, launch in enumerate(each)
    )
    why = Verdict.from_interval("claim", "subject", PASSES, "it is so", judged, 2.0, *points).why
    assert why.startswith("it is so") and {word for word in ("launch", "hosts") if word in why} == told
