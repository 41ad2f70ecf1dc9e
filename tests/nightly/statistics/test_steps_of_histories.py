"""Steps in a history: none is found without as often as is said, and the answers are those of Apache Otava."""

import random
from itertools import accumulate

import pytest

from pytest_slmserve.analysis.compare.steps import LEAST_VALUES, level_steps

Planted = tuple[tuple[int, float], ...]  # index and factor of each step


def series(chance: random.Random, values: int, *steps: tuple[int, float], noise: float = 0.02) -> list[float]:
    by = [dict(steps).get(i, 1.0) for i in range(values)]
    return [round(1000 * level * chance.gauss(1, noise), 3) for level in accumulate(by, lambda a, b: a * b)]


@pytest.mark.parametrize("values", [LEAST_VALUES, 13])
def test_false_steps_stay_rare(values):
    """Bounded as a binomial count: 300 histories at the level have 27 or more once in a thousand times."""
    chance = random.Random(values)
    assert sum(bool(level_steps(series(chance, values))) for _ in range(300)) < 27


# By apache-otava 0.8.0 with NumPy 2.2.0: `compute_change_points_orig(series, max_pvalue=0.05, seed=1)`, which is the
# method of Matteson and James with 100 random orders, then `compute_change_points(series)`, which is Hunter's.
OTAVA: dict[tuple[int, int, Planted], tuple[list[int], list[int]]] = {
    (11, 8, ((4, 1.1),)): ([], [4]),
    (11, 12, ((5, 0.9),)): ([5], [5]),
    (11, 16, ((8, 1.1),)): ([8, 10], [8]),
    (11, 24, ((8, 1.1), (16, 0.9))): ([8, 17], []),
    (11, 30, ((10, 1.1), (20, 1.1))): ([10, 20], [10, 20]),
    (11, 20, ()): ([], []),
    (11, 12, ()): ([], []),
    (12, 8, ((4, 1.1),)): ([], [4]),
    (12, 12, ((5, 0.9),)): ([5], [5]),
    (12, 16, ((8, 1.1),)): ([8, 12], [8, 12]),
    (12, 24, ((8, 1.1), (16, 0.9))): ([8, 12, 16], []),
    (12, 30, ((10, 1.1), (20, 1.1))): ([11, 20], [20]),
    (12, 20, ()): ([], [12]),
    (12, 12, ()): ([], []),
    (13, 8, ((4, 1.1),)): ([], [4]),
    (13, 12, ((5, 0.9),)): ([5], [5]),
    (13, 16, ((8, 1.1),)): ([8], [8]),
    (13, 24, ((8, 1.1), (16, 0.9))): ([8, 16], []),
    (13, 30, ((10, 1.1), (20, 1.1))): ([10, 20], [10, 20]),
    (13, 20, ()): ([], []),
    (13, 12, ()): ([], []),
}


def test_steps_match_apache_otava():
    found = {
        case: {each.at for each in level_steps(series(random.Random(case[0]), case[1], *case[2]))} for case in OTAVA
    }
    assert [case for case, (by_orders, _) in OTAVA.items() if not {*by_orders} <= found[case]] == []
    ours_alone = {case: found[case] - {*by_orders} - {*by_t} for case, (by_orders, by_t) in OTAVA.items()}
    assert {case: more for case, more in ours_alone.items() if more} == {(12, 12, ((5, 0.9),)): {9}}
