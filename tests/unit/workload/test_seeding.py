from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.workload.tokens import STREAMS, draws, first_in_order

SEEDS = st.integers(-(2**40), 2**40)


def test_the_stream_is_the_same_for_ever():
    assert list(islice(draws(0, "order"), 3)) == [0.8444218515250481, 0.7579544029403025, 0.420571580830845]
    assert list(islice(draws(0, "ids"), 2)) == [0.13436424411240122, 0.8474337369372327]
    assert next(draws(0, "arrivals")) == 0.9776462743838505
    assert next(draws(0, "trace")) == 0.10175875467846374


@given(SEEDS, SEEDS)
def test_every_seed_has_its_own_stream(one, other):
    same = list(islice(draws(one, "order"), 4)) == list(islice(draws(other, "order"), 4))
    assert same == (one == other)


@given(SEEDS)
def test_purposes_do_not_share_a_stream(seed):
    assert len({next(draws(seed, purpose)) for purpose in STREAMS}) == len(STREAMS) == 4


@given(st.lists(st.text(max_size=3)), SEEDS, st.integers(0, 60))
def test_a_larger_limit_begins_the_same(items, seed, limit):
    everything = first_in_order(items, seed, len(items))
    assert sorted(everything) == sorted(items)
    assert first_in_order(iter(items), seed, limit) == everything[:limit]


def test_order_depends_on_the_seed():
    assert first_in_order(range(6), 0, 6) == [3, 5, 2, 4, 1, 0]
    assert first_in_order(range(6), 1, 6) != first_in_order(range(6), 0, 6)
