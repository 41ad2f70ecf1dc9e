"""Whether both sides give the same tokens, and where they first differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.gate.launch_pairs import Answers, Differs, compare_outputs, first_difference

TOKENS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)


@given(TOKENS)
def test_what_is_the_same_does_not_differ(tokens):
    assert first_difference(tokens, tokens) is None


@given(TOKENS, st.data())
def test_the_first_planted_difference_is_found(tokens, data):
    request = data.draw(st.integers(0, len(tokens) - 1))
    position = data.draw(st.integers(0, len(tokens[request]) - 1))
    other = tuple(
        tuple(t + 10 * (i >= request and (i > request or at >= position)) for at, t in enumerate(row))
        for i, row in enumerate(tokens)
    )
    was = tokens[request][position]
    assert first_difference(tokens, other) == Differs(request + 1, position + 1, was, was + 10)


def test_one_that_ends_early_differs_where_it_ends():
    assert first_difference(((1, 2),), ((1,),)) == Differs(1, 2, 2, None)
    assert first_difference(((1,),), ((1,), (5,))) == Differs(2, 1, None, 5)


def test_launches_of_one_side_may_disagree_among_themselves():
    one, other = ((1, 2), (3, 4)), ((1, 2), (3, 5))
    assert compare_outputs([one, one], [one, ()]) == Answers(2, 2, True, None)
    assert compare_outputs([one, other], [one]) == Answers(2, 2, False, None)
    assert compare_outputs([one], [other]) == Answers(2, 2, True, Differs(2, 2, 4, 5))


def test_nobody_asked():
    assert compare_outputs([()], [((1,),)]) is None and compare_outputs([], []) is None
