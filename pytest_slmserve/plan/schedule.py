"""The cells of a run by engine: what starts together, and in which order it begins where there are several GPUs; and
the lines that `--slm-plan` prints of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.plan.cases import (
    Engines,
    PlannedItem,
    clock,
    engine_title,
    engines_of_set,
    gpus_of,
    start_estimate_s,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.specs import EngineSpec


@dataclass(frozen=True)
class Group:
    """An engine, or a set of replicas, with all of its cells or a part of them. seconds: its start and these cells."""

    engine: Engines
    cells: tuple[PlannedItem, ...]
    gpus: int
    seconds: float

    @classmethod
    def from_items(cls, engine: Engines, cells: Sequence[PlannedItem]) -> Group:
        seconds = start_estimate_s(engine) + seconds_of(cells)
        return cls(engine, tuple(cells), gpus_of(engine), seconds)

    @cached_property
    def by_load(self) -> Mapping[Load | None, Sequence[PlannedItem]]:
        return grouped(self.cells, lambda cell: cell.load)

    @property
    def divisible(self) -> bool:
        """May its cells be served apart? Those under one load may be one measurement, so they stay together; and where
        it is not known beforehand what a cell asks for, another may ask for the same."""
        alone = isinstance(self.engine, EngineSpec) and self.gpus == 1
        return alone and len(self.by_load) > 1 and None not in self.by_load

    @property
    def least_s(self) -> float:
        """Seconds that the group takes at least, however it is divided."""
        if not self.divisible:
            return self.seconds
        return start_estimate_s(self.engine) + max(map(seconds_of, self.by_load.values()))


def seconds_of(cells: Sequence[PlannedItem]) -> float:
    """Expected seconds of cells, without the start of their engine."""
    return sum(cell.seconds for cell in cells)


def groups_of(cells: Sequence[PlannedItem]) -> list[Group]:
    """Groups of cells by engine, in the order in which the engines first occur. Cells without an engine are left out,
    for they take no GPU: they read, or hold launches of their own."""
    found = grouped(cells, lambda cell: cell.engine)
    return [Group.from_items(engine, its) for engine, its in found.items() if engine is not None]


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Groups in the order in which they are to begin. First are those that others are compared with, so that a run that
    is cut off can say what more GPUs gain. Then come the widest, for an engine on many GPUs would wait long for the
    last of them. Within one width the longest is first, for all wait for one that begins late."""

    def subject(group: Group) -> tuple[str, str]:
        engine = engines_of_set(group.engine)[0]
        return engine.model, engine.interface

    alike = grouped(groups, subject)

    def rank(group: Group) -> tuple[bool, int, float]:
        span = {other.gpus for other in alike[subject(group)]}
        compared_with = isinstance(group.engine, EngineSpec) and group.gpus == min(span) < max(span)
        return not compared_with, -group.gpus, -group.seconds

    return sorted(groups, key=rank)


WORTH = 0.05  # more divisions have to end so much sooner, for each costs a start, and prices are rough


@dataclass(frozen=True, slots=True)
class Placement:
    """A group's run. gpus: their indices; begins_s, ends_s: seconds since the beginning of the run."""

    group: Group
    gpus: tuple[int, ...]
    begins_s: float
    ends_s: float


def spread(groups: Sequence[Group], gpus: int) -> list[Placement]:
    """Placements of the groups, taken in the order of `in_order`, each on the GPUs that are free soonest. Where each
    takes one GPU, the last end is at most 2 - 1/gpus times the least possible (Graham 1966, "Bounds for certain
    multiprocessing anomalies").

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
    """Groups after division: an engine that all would wait for is served in parts, each a group of its own. They have
    the fewest divisions whose end is within WORTH of that of more. groups: each of another engine. Raises BadUsage as
    `spread` does."""
    whole = {group.engine: group for group in groups}
    steps = [spread(groups, gpus)]
    while step := _one_divided(steps[-1], whole, gpus):
        steps.append(step)
    enough = makespan_s(steps[-1]) / (1 - WORTH)
    return [placement.group for placement in next(placed for placed in steps if makespan_s(placed) <= enough)]


def _one_divided(placed: Sequence[Placement], whole: Mapping[Engines, Group], gpus: int) -> list[Placement]:
    """Placements with one awaited engine in more parts, so that it ends sooner, the whole no later; or none."""
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
    """Placements that delay the end: those that end last, those that they waited for, and so on."""
    ends_s = makespan_s(placed)
    while before := [placement for placement in placed if placement.ends_s == ends_s]:
        yield from before
        if (begins_s := min(placement.begins_s for placement in before)) == ends_s:
            return
        ends_s = begins_s


def _end_s(placed: Sequence[Placement], engine: Engines) -> float:
    """Seconds from the beginning of the run until all parts of an engine have ended."""
    return max(placement.ends_s for placement in placed if placement.group.engine == engine)


def _parts(whole: Group, others: Sequence[Placement], gpus: int, count: int) -> list[Group]:
    """Up to so many, on the GPUs that the others leave soonest, which end at the same time as nearly as loads allow."""
    free = dict.fromkeys(range(gpus), 0.0)
    for placement in others:
        free |= dict.fromkeys(placement.gpus, placement.ends_s)
    ends = sorted(free.values())[:count]  # less the start, which is the same for each
    parts: list[list[PlannedItem]] = [[] for _ in ends]
    for cells in sorted(whole.by_load.values(), key=seconds_of, reverse=True):
        soonest = min(range(len(ends)), key=ends.__getitem__)
        ends[soonest] += seconds_of(cells)
        parts[soonest] += cells
    return [Group.from_items(whole.engine, cells) for cells in parts if cells]


def spread_lines(cells: Sequence[PlannedItem], gpus: int) -> list[str]:
    """The plan on so many GPUs: each GPU's engines in order, then its end. Raises BadUsage."""
    groups = groups_of(cells)
    in_all = {group.engine: len(group.cells) for group in groups}
    placed = spread(divided(groups, gpus), gpus)
    on_each: dict[int, list[str]] = {gpu: [] for gpu in range(gpus)}
    for placement in placed:
        group, begins, seconds = placement.group, clock(placement.begins_s), clock(placement.group.seconds)
        count, of = len(group.cells), in_all[group.engine]  # some cells of an engine may be elsewhere
        items = f"{count}{f' of {of}' if count < of else ''} item{'s' if of != 1 else ''}"
        for gpu in placement.gpus:
            on_each[gpu].append(f"{engine_title(group.engine)} from {begins} ({items}, {seconds} min)")
    lines = [f"GPU {gpu}: {', '.join(its) or 'nothing'}" for gpu, its in on_each.items()]
    alone, plural = clock(sum(group.seconds for group in groups)), "s" if gpus != 1 else ""
    least = clock(least_s(groups, gpus))
    end = f"{clock(makespan_s(placed))} min on {gpus} GPU{plural}, no order takes less than {least} min"
    return [*lines, f"spread by engine: {end}; one engine after the other: {alone} min"]


def plan_lines(cells: Sequence[PlannedItem]) -> list[str]:
    """The plan as text: one line per cell in order, an engine's line before its first, the total last."""
    lines, total, gpu_seconds = [f"{'min:s':>7}  what begins then, and how long it takes"], 0.0, 0.0
    engine: Engines | None = None
    for name, needed, seconds, _ in cells:
        if needed is not None and needed != engine:
            engine, start = needed, start_estimate_s(needed)
            lines.append(f"{clock(total):>7}  start {engine_title(needed)} ({needed.platform}, {start:.0f} s)")
            total += start
            gpu_seconds += start * gpus_of(needed)
        lines.append(
            f"{clock(total):>7}    {name}" + (f" ({seconds:.0f} s)" if needed or seconds else " (measures nothing)")
        )
        total += seconds
        gpu_seconds += seconds * (gpus_of(needed) if needed else 1)
    on_gpus = f", {gpu_seconds:,.0f} GPU s" if engine and engine.platform == "cuda" else ""
    plural = "s" if len(cells) != 1 else ""
    return [*lines, f"{clock(total):>7}  end: {len(cells)} item{plural}{on_gpus}"]
