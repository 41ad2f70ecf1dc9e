"""An adaptive sweep played on a curve that is known beforehand: what it asks for, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean

from strategies import point

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.points import Point, points_of
from pytest_slmserve.analysis.sweep import plateau
from pytest_slmserve.analysis.sweep.plateau import Grid, Seconds, Wanted, next_measurement
from pytest_slmserve.schema.records import Measurement

Answer = Callable[[int], float]


@dataclass(frozen=True)
class Played:
    asked: tuple[Wanted, ...]
    points: tuple[Point, ...]

    @property
    def loads(self) -> list[int]:
        """In the order asked for, each as often as it was."""
        return [wanted.concurrency for wanted in self.asked]


def h200_seconds(concurrency: int, tokens_per_s: float) -> float:
    """A measurement with a staggered ramp-up, of requests of 256 tokens: half a ramp, settling, a window of 5 s."""
    return 5.0 + 1.5 * 256 * concurrency / tokens_per_s


def play(
    grid: Sequence[int],
    answer: Answer,
    *,
    repeats=2,
    tolerance=0.10,
    seconds: Seconds = h200_seconds,
    known=(),
    budget_s=math.inf,
) -> Played:
    """Until nothing is asked for. Each answer is a throughput; 0 stands for an invalid measurement."""
    points = {p.concurrency: p for p in known}
    asked: list[Wanted] = []
    left_s = budget_s
    while wanted := next_measurement(Grid(grid, tolerance, repeats, seconds, left_s=left_s), points.values()):
        assert len(asked) < len(grid) * repeats, "it goes on for ever"
        asked.append(wanted)
        load, rate = wanted.concurrency, answer(wanted.concurrency)
        left_s -= seconds(load, rate) if rate else 0.0
        before = points[load].repeats if load in points else ()
        points[load] = point(load, [*before, *([rate] if rate else [])])
    return Played(tuple(asked), tuple(sorted(points.values(), key=lambda p: p.concurrency)))


def steps_apart(grid: Sequence[int], one: int | None, other: int | None) -> int:
    """Grid points between two plateaus; none at all begins past the last."""
    first, second = (len(grid) if at is None else grid.index(at) for at in (one, other))
    return abs(first - second)


def in_turn(repeats: Mapping[int, Sequence[float]]) -> Answer:
    """Answers with the repeats of a load one after the other, from the first again when all have been."""
    turns = {load: cycle(values) for load, values in repeats.items()}
    return lambda load: next(turns[load])


@dataclass(frozen=True)
class Measured:
    """A sweep with every load measured, and the seconds that one measurement of each took."""

    points: tuple[Point, ...]
    seconds: dict[int, float]

    @classmethod
    def of(cls, group: Sequence[Measurement]) -> Measured:
        by_load = grouped(group, lambda m: m.load.concurrency)
        lasted = {load: fmean(m.run.window_s[1] for m in same) for load, same in by_load.items()}
        return cls(points_of(group), lasted)

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(p.concurrency for p in self.points)

    @property
    def plateau(self) -> int | None:
        return plateau.plateau(self.points).value

    def played(self) -> Played:
        """The measured repeats are the answers, their seconds the price."""
        answers = in_turn({p.concurrency: p.repeats for p in self.points})
        return play(self.grid, answers, seconds=lambda load, rate: self.seconds[load])
