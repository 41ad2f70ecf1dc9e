"""The cells of a run by engine: what starts together, and in which order it begins where there are several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_slmserve.plan import Cell, Engines, engine_alone, gpus_of, start_price_s
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.specs import EngineSpec


@dataclass(frozen=True)
class Group:
    """An engine, or a set of replicas, with all of its cells or a part of them. seconds: its start and these cells."""

    engine: Engines
    cells: tuple[Cell, ...]
    gpus: int
    seconds: float

    @classmethod
    def of(cls, engine: Engines, cells: Sequence[Cell]) -> Group:
        seconds = start_price_s(engine) + seconds_of(cells)
        return cls(engine, tuple(cells), gpus_of(engine), seconds)

    @cached_property
    def by_load(self) -> Mapping[Load | None, Sequence[Cell]]:
        found: dict[Load | None, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.load, []).append(cell)
        return found

    @property
    def divisible(self) -> bool:
        """May its cells be served apart? Those under one load may be one measurement, so they stay together; and where
        it is not known beforehand what a cell asks for, another may ask for the same."""
        alone = isinstance(self.engine, EngineSpec) and self.gpus == 1
        return alone and len(self.by_load) > 1 and None not in self.by_load

    @property
    def least_s(self) -> float:
        """It takes no less, however it is divided."""
        if not self.divisible:
            return self.seconds
        return start_price_s(self.engine) + max(map(seconds_of, self.by_load.values()))


def seconds_of(cells: Sequence[Cell]) -> float:
    return sum(cell.seconds for cell in cells)


def groups_of(cells: Sequence[Cell]) -> list[Group]:
    """By engine, in the order first met. Cells without one take no GPU: they read, or hold launches of their own."""
    found: dict[Engines, list[Cell]] = {}
    for cell in cells:
        if cell.engine is not None:
            found.setdefault(cell.engine, []).append(cell)
    return [Group.of(engine, its) for engine, its in found.items()]


def in_order(groups: Sequence[Group]) -> list[Group]:
    """As they are to begin: first what others are compared with, so that a run that is cut off can say what more GPUs
    gain; then the widest, for an engine on many GPUs would wait long for the last of them; then the longest, for one
    that begins late is what all wait for."""
    spans: dict[tuple[str, str], set[int]] = {}
    for group in groups:
        spans.setdefault(_subject(group), set()).add(group.gpus)

    def rank(group: Group) -> tuple[bool, int, float]:
        span = spans[_subject(group)]
        compared_with = isinstance(group.engine, EngineSpec) and group.gpus == min(span) < max(span)
        return not compared_with, -group.gpus, -group.seconds

    return sorted(groups, key=rank)


def _subject(group: Group) -> tuple[str, str]:
    """Model and door: what on fewer GPUs is compared with the same on more."""
    engine = engine_alone(group.engine)
    return engine.model, engine.door
