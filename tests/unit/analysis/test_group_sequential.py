"""Looks and their boundaries, against samples that were drawn and looked at."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis import estimates as student_t
from pytest_slmserve.analysis.estimates import boundaries, looks_until, spent

MAXIMA = (4, 5, 6, 8, 10, 12, 20)
ALPHAS = (0.0025, 0.01, 0.05)
DRAWN, PARTS = 100_000, 6
MORE = 3.09  # standard errors that one in a thousand lies beyond


@pytest.mark.parametrize(
    ("pairs", "looks"),
    [
        (0, ()),
        (3, ()),
        (4, (4,)),
        (5, (4, 5)),
        (7, (4, 6, 7)),
        (10, (4, 6, 8, 10)),
        (12, (4, 6, 8, 12)),
        (13, (4, 6, 8, 12, 13)),
        (18, (4, 6, 8, 12, 18)),
        (20, (4, 6, 8, 12, 18, 20)),
        (30, (4, 6, 8, 12, 18, 28, 30)),
    ],
)
def test_looks(pairs, looks):
    assert looks_until(pairs) == looks


@given(st.integers(4, 3000))
def test_looks_ascend_to_the_last_pair(pairs):
    looks = looks_until(pairs)
    assert looks[0] == 4 and looks[-1] == pairs and list(looks) == sorted(set(looks))
    assert all(n % 2 == 0 for n in looks[:-1])  # as many pairs begin with the one side as with the other
    assert looks[:-1] == looks_until(looks_until(pairs + 1)[-2])[: len(looks) - 1]


@lru_cache(maxsize=1)
def drawn():
    """Student's t of many samples of nothing but noise, by the number of pairs that it is of."""
    numpy = pytest.importorskip("numpy")
    chance, parts = numpy.random.default_rng(20), []
    wanted = sorted({n for most in MAXIMA for n in looks_until(most)})
    for _ in range(PARTS):
        values = chance.standard_normal((max(wanted), DRAWN))
        sums, squares = numpy.cumsum(values, axis=0), numpy.cumsum(values**2, axis=0)
        rows = []
        for n in wanted:
            mean = sums[n - 1] / n
            rows.append(mean / numpy.sqrt((squares[n - 1] / n - mean**2) / (n - 1)))
        parts.append(numpy.stack(rows))
    return dict(zip(wanted, numpy.concatenate(parts, axis=1)))


def exceeded(looks: tuple[int, ...], critical: tuple[float, ...]) -> float:
    """Share of the samples that exceed one of these values."""
    import numpy

    t = drawn()
    return float(numpy.mean(numpy.any([t[n] > c for n, c in zip(looks, critical, strict=True)], axis=0)))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("most", MAXIMA)
def test_no_more_is_spent_than_may_be_and_not_much_less(most, alpha):
    drawn()
    looks = looks_until(most)
    share = exceeded(looks, boundaries(looks, most, alpha))
    error = math.sqrt(alpha * (1 - alpha) / (DRAWN * PARTS))
    assert 0.8 * alpha - MORE * error < share < alpha + MORE * error


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("so_far", [1, 2, 3])
def test_of_a_gate_that_ends_early_only_a_part_is_spent(so_far, alpha):
    drawn()
    looks = looks_until(12)[:so_far]
    share, planned = exceeded(looks, boundaries(looks, 12, alpha)), spent(looks[-1] / 12, alpha)
    error = math.sqrt(planned * (1 - planned) / (DRAWN * PARTS))
    assert 0.8 * planned - MORE * error < share < planned + MORE * error


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_look_too_many_would_be_seen(alpha):
    """What the boundaries are there for: four tests at `alpha` each are wrong far more often."""
    drawn()
    looks = looks_until(12)
    naive = tuple(student_t.t_above(alpha, n - 1) for n in looks)
    assert exceeded(looks, naive) > 1.6 * alpha


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1e-4, 0.5))
def test_spending_grows_from_nothing_to_everything(share, more, alpha):
    assert spent(0.0, alpha) == 0 and spent(1.0, alpha) == pytest.approx(alpha) == spent(1.5, alpha)
    assert spent(share, alpha) <= spent(min(1.0, share + more), alpha) <= alpha * (1 + 1e-12)


@pytest.mark.parametrize("most", MAXIMA)
def test_a_smaller_alpha_has_higher_boundaries(most):
    looks = looks_until(most)
    rows = [boundaries(looks, most, alpha) for alpha in (0.001, *ALPHAS, 0.2, 0.5)]
    for stricter, laxer in pairwise(rows):
        assert all(high > low > 0 for high, low in zip(stricter, laxer, strict=True))


def test_who_may_measure_more_spends_less_at_each_look():
    rows = [boundaries((4, 6, 8, 12), most, 0.01) for most in (12, 18, 28, 60)]
    for sooner, later in pairwise(rows):
        assert all(high > low for high, low in zip(later, sooner, strict=True))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_boundaries_do_not_depend_on_looks_to_come(alpha):
    looks = looks_until(20)
    whole = boundaries(looks, 20, alpha)
    assert all(boundaries(looks[:k], 20, alpha) == pytest.approx(whole[:k]) for k in range(1, len(looks)))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_each_planned_look_needs_less_than_the_one_before_and_more_than_a_single_one(alpha):
    looks = looks_until(12)
    found = boundaries(looks, 12, alpha)
    assert list(found) == sorted(found, reverse=True)
    assert all(c > student_t.t_above(alpha, n - 1) for n, c in zip(looks, found))
