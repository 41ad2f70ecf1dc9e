"""Steps in a history: planted ones are found where they are, and a split is that of the definition."""

import random
from itertools import accumulate, combinations
from statistics import fmean

import pytest

from pytest_slmserve.analysis.compare.steps import LEAST_VALUES, LEVEL, best_split, level_steps

Planted = tuple[tuple[int, float], ...]  # index and factor of each step


def series(chance: random.Random, values: int, *steps: tuple[int, float], noise: float = 0.02) -> list[float]:
    by = [dict(steps).get(i, 1.0) for i in range(values)]
    return [round(1000 * level * chance.gauss(1, noise), 3) for level in accumulate(by, lambda a, b: a * b)]


@pytest.mark.parametrize(("values", "steps"), [
    (LEAST_VALUES, ((4, 1.1),)), (12, ((3, 1.1),)), (12, ((9, 1 / 1.1),)), (18, ((6, 1.1), (12, 1 / 1.1))),
])  # fmt: skip
def test_planted_history_step_is_found(values, steps):
    chance, drawn = random.Random(1), 20
    found = [level_steps(series(chance, values, *steps)) for _ in range(drawn)]
    near = [[min(abs(each.at - at) for each in some) if some else values for some in found] for at, _ in steps]
    assert all(sum(each <= 1 for each in away) >= 0.9 * drawn for away in near)
    exact = [some for some in found if [each.at for each in some] == [at for at, _ in steps]]
    assert len(exact) >= 0.7 * drawn
    for number, (_, by) in enumerate(steps):
        ratios = [some[number].ratio for some in exact]
        assert sum(seen.low <= by <= seen.high for seen in ratios) >= 0.85 * len(exact)
        assert all(seen.low < seen.value < seen.high for seen in ratios)
    assert all(0 < each.chance <= LEVEL for some in found for each in some)


def test_short_history_has_no_step():
    assert level_steps([]) == level_steps(series(random.Random(1), LEAST_VALUES - 1, (3, 2.0))) == []
    values = series(random.Random(2), 9, (4, 1.05))

    def apart(first, second):
        n, m = len(first), len(second)
        across = sum(abs(a - b) for a in first for b in second) / (n * m)
        inside = [fmean(abs(a - b) for a, b in combinations(each, 2)) for each in (first, second)]
        return n * m / (n + m) * (2 * across - sum(inside))

    splits = {(at, end): apart(values[:at], values[at:end]) for at in range(2, 8) for end in range(at + 2, 10)}
    best = max(splits, key=splits.__getitem__)
    assert best_split(values) == (pytest.approx(splits[best]), best[0])
