"""A plan spread over many GPUs, on paper: when is the last engine through, and when could it be at the earliest?

An engine starts once and serves all of its cells where it started, so what is placed are engines with their cells. One
over several GPUs waits until as many are free. Where whole engines fit badly, the one that all would wait for is
divided: it starts on several GPUs, and each serves a part of its cells. That is for the GPUs of one host: two hosts of
one kind were seen to be 4 % apart, which no curve should have between its points.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_slmserve.groups import Group, groups_of, in_order, seconds_of
from pytest_slmserve.plan import Cell, Engines, clock, engine_title
from pytest_slmserve.schema.errors import BadUsage

WORTH = 0.05  # more divisions have to end so much sooner, for each costs a start, and prices are rough


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and when a group runs. gpus: which; begins_s, ends_s: since the beginning of the run."""

    group: Group
    gpus: tuple[int, ...]
    begins_s: float
    ends_s: float


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
    """No order takes less, nor any division: the longest group has to run, and all GPU seconds have to fit."""
    area = sum(group.seconds * group.gpus for group in groups)
    return max([area / gpus, *(group.least_s for group in groups)])


def divided(groups: Sequence[Group], gpus: int) -> list[Group]:
    """The same groups, each of another engine, with those in parts that all would wait for: the fewest divisions whose
    end is within WORTH of that of more. Raises BadUsage as `spread` does."""
    whole = {group.engine: group for group in groups}
    steps = [spread(groups, gpus)]
    while step := _one_divided(steps[-1], whole, gpus):
        steps.append(step)
    enough = makespan_s(steps[-1]) / (1 - WORTH)
    return [placement.group for placement in next(placed for placed in steps if makespan_s(placed) <= enough)]


def _one_divided(placed: Sequence[Placement], whole: Mapping[Engines, Group], gpus: int) -> list[Placement]:
    """With more parts of an engine that all wait for, so that it ends sooner and the whole no later; nothing where no
    number of parts does that."""
    awaited = next((p.group.engine for p in _awaited(placed) if whole[p.group.engine].divisible), None)
    if awaited is None:
        return []
    others = [placement.group for placement in placed if placement.group.engine != awaited]
    others_placed, ends = spread(others, gpus), _end_s(placed, awaited)
    found = []
    for count in range(len(placed) - len(others) + 1, min(gpus, len(whole[awaited].by_load)) + 1):
        tried = spread([*others, *_parts(whole[awaited], others_placed, gpus, count)], gpus)
        sooner = _end_s(tried, awaited) < ends and makespan_s(tried) <= makespan_s(placed)
        if sooner and len(tried) > len(placed):  # each step has more groups, so there is a last one
            found.append(tried)
        if makespan_s(tried) <= makespan_s(others_placed):
            break  # more parts can do no better
    return min(found, key=makespan_s, default=[])


def _awaited(placed: Sequence[Placement]) -> Iterator[Placement]:
    """What ends last, what that waited for, and so on."""
    ends_s = makespan_s(placed)
    while before := [placement for placement in placed if placement.ends_s == ends_s]:
        yield from before
        if (begins_s := min(placement.begins_s for placement in before)) == ends_s:
            return
        ends_s = begins_s


def _end_s(placed: Sequence[Placement], engine: Engines) -> float:
    """When all parts of an engine are through."""
    return max(placement.ends_s for placement in placed if placement.group.engine == engine)


def _parts(whole: Group, others: Sequence[Placement], gpus: int, count: int) -> list[Group]:
    """Up to so many, on the GPUs that the others leave soonest, which end at the same time as nearly as loads allow."""
    free = dict.fromkeys(range(gpus), 0.0)
    for placement in others:
        free |= dict.fromkeys(placement.gpus, placement.ends_s)
    ends = sorted(free.values())[:count]  # less the start, which is the same for each
    parts: list[list[Cell]] = [[] for _ in ends]
    for cells in sorted(whole.by_load.values(), key=seconds_of, reverse=True):
        soonest = min(range(len(ends)), key=ends.__getitem__)
        ends[soonest] += seconds_of(cells)
        parts[soonest] += cells
    return [Group.of(whole.engine, cells) for cells in parts if cells]


def spread_lines(cells: Sequence[Cell], gpus: int, whole: bool = False) -> list[str]:
    """The plan on so many GPUs, as text: each GPU's engines in order, then when all are through. whole: no engine is
    divided. Raises BadUsage."""
    groups = groups_of(cells)
    in_all = {group.engine: len(group.cells) for group in groups}
    placed = spread(groups if whole else divided(groups, gpus), gpus)
    on_each: dict[int, list[str]] = {gpu: [] for gpu in range(gpus)}
    for placement in placed:
        what = _title(placement.group, in_all[placement.group.engine])
        for gpu in placement.gpus:
            on_each[gpu].append(f"{clock(placement.begins_s)} {what}")
    lines = [f"GPU {gpu}: {', '.join(its) or 'nothing'}" for gpu, its in on_each.items()]
    alone, plural = clock(sum(group.seconds for group in groups)), "s" if gpus != 1 else ""
    end = f"{clock(makespan_s(placed))} on {gpus} GPU{plural}, no order takes less than {clock(least_s(groups, gpus))}"
    return [*lines, f"spread by engine: {end}; one engine after the other: {alone}"]


def _title(group: Group, in_all: int) -> str:
    """in_all: cells of this engine, of which some may be elsewhere."""
    count = len(group.cells)
    part = f"{count} of {in_all}" if count < in_all else f"{count}"
    return f"{engine_title(group.engine)} ({part} cell{'s' if in_all != 1 else ''}, {clock(group.seconds)})"
