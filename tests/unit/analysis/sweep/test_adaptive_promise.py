"""The promise of an adaptive sweep on curves that were measured: the plateau of the full grid within one grid point,
at no more than a third of its seconds. The measured repeats are its answers, their recorded seconds its price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import pytest
from adaptive import Played, in_turn, play
from committed import archive
from published import ROWS
from strategies import point

from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import Point, by_series, points_of
from pytest_slmserve.analysis.sweep import plateau
from pytest_slmserve.analysis.sweep.plateau import SHARE
from pytest_slmserve.schema.records import Measurement

FULL_REPEATS = 2
SPREAD, TOGETHER, SENSORS = (f"h200-vllm-0.26.0-{name}" for name in ("staggered", "burst", "sensors"))
CPU = "cpu-vllm-0.32.0"


@dataclass(frozen=True)
class Measured:
    """A sweep with every load measured, and the seconds that one measurement of each took."""

    points: tuple[Point, ...]
    seconds: dict[int, float]

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(p.concurrency for p in self.points)

    @property
    def plateau(self) -> int | None:
        return plateau.plateau(self.points).value

    def played(self) -> Played:
        answers = in_turn({p.concurrency: p.repeats for p in self.points})
        return play(self.grid, answers, repeats=FULL_REPEATS, seconds=lambda load, rate: self.seconds[load])

    def share(self, loads: Iterable[int]) -> float:
        return sum(self.seconds[load] for load in loads) / (FULL_REPEATS * sum(self.seconds.values()))

    def apart(self, found: int | None) -> int:
        first, second = (len(self.grid) if p is None else self.grid.index(p) for p in (found, self.plateau))
        return abs(first - second)


def measured(name: str, model: str, counts: Callable[[Measurement], bool] = lambda m: True) -> Measured:
    (group,) = by_series(m for m in archive(name) if m.spec.model == model and counts(m)).values()
    return of(group)


def of(group: Sequence[Measurement]) -> Measured:
    points = points_of(group)
    lasted = {p.concurrency: [m.run.window_s[1] for m in group if m.load.concurrency == p.concurrency] for p in points}
    return Measured(points, {load: fmean(seconds) for load, seconds in lasted.items()})


SWEEPS: Sequence[tuple[str, str, int | None, list[int], int | None]] = (
    (SPREAD, "opt-125m", None, [1, 1024, 512, 512, 1024], None),
    (SPREAD, "opt-1.3b", 128, [1, 512, 128, 64, 64, 1], 128),
    (SPREAD, "opt-2.7b", 128, [1, 256, 128, 64, 1], 128),
    (SENSORS, "opt-125m", 512, [1, 1024, 512, 256, 256], 512),
    (SENSORS, "opt-1.3b", 128, [1, 512, 128, 64, 64, 1], 128),
    (SENSORS, "opt-2.7b", 128, [1, 256, 128, 64, 1], 128),
    (CPU, "opt-tiny", 128, [1, 256, 64, 32, 32], 64),
)
SHORT = (0.19, 0.21, 0.28, 0.19, 0.24, 0.25, 0.17)


@pytest.mark.parametrize(("name", "model", "full", "loads", "found"), SWEEPS)
def test_the_plateau_of_the_full_grid_from_a_third_of_its_seconds(name, model, full, loads, found):
    sweep = measured(name, model)
    played = sweep.played()
    assert sweep.plateau == full and played.loads == loads
    assert plateau.plateau(played.points).value == found and sweep.apart(found) <= 1
    assert sweep.share(loads) <= SHARE


@pytest.mark.parametrize(("name", "model", "share"), [(*sweep[:2], SHORT[i]) for i, sweep in enumerate(SWEEPS)])
def test_with_the_windows_of_today_it_is_less_than_a_third(name, model, share):
    """The first 2 s of each window, against two repeats of all loads with the windows that were measured."""
    sweep = measured(name, model)
    (group,) = by_series(m for m in archive(name) if m.spec.model == model).values()
    short = of([replace(m, run=replace(m.run, window_s=(at, at + 2.0))) for m in group for at in m.run.window_s[:1]])
    played = short.played()
    seconds = sum(short.seconds[load] for load in played.loads)
    assert sweep.apart(plateau.plateau(played.points).value) <= 1
    assert seconds / (FULL_REPEATS * sum(sweep.seconds.values())) == pytest.approx(share, abs=0.006)
    assert share < SHARE


@pytest.mark.parametrize(
    ("model", "loads", "full"), [("opt-1.3b", [64, 512, 128, 64], 128), ("opt-125m", [64, 512, 256, 64], None)]
)
def test_of_four_loads_three_are_needed_and_those_are_more_than_a_third(model, loads, full):
    """What was measured in a burst: too few loads to leave any out. The plateau is the same."""
    sweep = measured(TOGETHER, model)
    played = sweep.played()
    assert sweep.grid == (64, 128, 256, 512) and played.loads == loads
    assert plateau.plateau(played.points).value == full == sweep.plateau
    assert SHARE < sweep.share(loads) < 0.5


def test_a_dent_does_not_end_a_sweep():
    """OPT-125M gains 8.7 % from concurrency 128 to 256 in its steady windows, less than a tenth; then it doubles."""
    sweep = measured(SPREAD, "opt-125m", lambda m: not check(m).noise)
    (dent,) = [gain for gain in plateau.gains(sweep.points) if gain.start == 128]
    assert dent.value < 0.10 and plateau.plateau(sweep.played().points).value is None
    best = max(fmean(p.repeats) for p in sweep.points)
    assert next(fmean(p.repeats) for p in sweep.points if p.concurrency == 128) < 0.5 * best


def published() -> Measured:
    """Its requests have 292 output tokens in the mean; the seconds are those that a sweep of ours would take."""
    points = tuple(point(load, [rate]) for load, rate, *_ in ROWS)
    return Measured(points, {load: 5.0 + 1.5 * 292 * load / rate for load, rate, *_ in ROWS})


def test_published_results_whose_loads_are_no_doublings():
    sweep = published()
    played = sweep.played()
    found = plateau.plateau(played.points).value
    assert sweep.plateau == 256 and sweep.apart(found) <= 1 and sweep.share(played.loads) <= SHARE
