"""A plan spread over many GPUs, on paper: when is the last engine through, and when could it be at the earliest?

An engine starts once and serves all of its cells where it started, so what is placed are engines with their cells. One
over several GPUs waits until as many are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.errors import BadUsage
from pytest_slmserve.plan import Cell, Engines, clock, engine_alone, engine_title, gpus_of, start_price_s
from pytest_slmserve.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class Group:
    """An engine, or a set of replicas, with all of its cells. seconds: its start and all cells."""

    engine: Engines
    cells: tuple[Cell, ...]
    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and when a group runs. gpus: which; begins_s, ends_s: since the beginning of the run."""

    group: Group
    gpus: tuple[int, ...]
    begins_s: float
    ends_s: float


def groups_of(cells: Sequence[Cell]) -> list[Group]:
    """By engine, in the order first met. Cells without one take no GPU: they read, or hold launches of their own."""
    found: dict[Engines, list[Cell]] = {}
    for cell in cells:
        if cell.engine is not None:
            found.setdefault(cell.engine, []).append(cell)
    return [
        Group(engine, tuple(its), gpus_of(engine), start_price_s(engine) + sum(cell.seconds for cell in its))
        for engine, its in found.items()
    ]


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


def spread(groups: Sequence[Group], gpus: int) -> list[Placement]:
    """In their order, each on the GPUs that are free soonest: at most twice the least possible where each takes one
    GPU, less 1/gpus (Graham 1966, "Bounds for certain multiprocessing anomalies").

    Raises BadUsage where an engine wants more GPUs than there are.
    """
    free = [(0.0, gpu) for gpu in range(gpus)]
    placed = []
    for group in in_order(groups):
        if group.gpus > gpus:
            raise BadUsage(f"an engine takes {group.gpus} GPUs, and the plan has {gpus}", f"{group.gpus} or more")
        taken = [heapq.heappop(free) for _ in range(group.gpus)]
        begins = max(at for at, _ in taken)
        ends = begins + group.seconds
        placed.append(Placement(group, tuple(sorted(gpu for _, gpu in taken)), begins, ends))
        for _, gpu in taken:
            heapq.heappush(free, (ends, gpu))
    return placed


def makespan_s(placed: Sequence[Placement]) -> float:
    return max((placement.ends_s for placement in placed), default=0.0)


def least_s(groups: Sequence[Group], gpus: int) -> float:
    """No order takes less: the longest group has to run, and all GPU seconds have to fit."""
    area = sum(group.seconds * group.gpus for group in groups)
    return max([area / gpus, *(group.seconds for group in groups)])


def spread_lines(cells: Sequence[Cell], gpus: int) -> list[str]:
    """The plan on so many GPUs, as text: each GPU's engines in order, then when all are through. Raises BadUsage."""
    groups = groups_of(cells)
    placed = spread(groups, gpus)
    on_each: dict[int, list[Placement]] = {gpu: [] for gpu in range(gpus)}
    for placement in placed:
        for gpu in placement.gpus:
            on_each[gpu].append(placement)
    lines = [
        f"GPU {gpu}: {', '.join(f'{clock(p.begins_s)} {title(p.group)}' for p in its) or 'nothing'}"
        for gpu, its in on_each.items()
    ]
    alone, plural = clock(sum(group.seconds for group in groups)), "s" if gpus != 1 else ""
    end = f"{clock(makespan_s(placed))} on {gpus} GPU{plural}, no order takes less than {clock(least_s(groups, gpus))}"
    return [*lines, f"spread by engine: {end}; one engine after the other: {alone}"]


def title(group: Group) -> str:
    count = len(group.cells)
    return f"{engine_title(group.engine)} ({count} cell{'s' if count != 1 else ''}, {clock(group.seconds)})"
