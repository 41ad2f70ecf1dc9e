"""The cells of a run by engine: what starts together, and in which order it begins where there are several GPUs; and
the lines that `--slm-plan` prints of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.plan.cases import (
    Engines,
    PlannedItem,
    clock,
    engine_title,
    engines_of_set,
    start_estimate_s,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import EngineSpec


@dataclass(frozen=True, slots=True)
class Group:
    """An engine, or a set of replicas, with all of its cells. seconds: its start and these cells."""

    engine: Engines
    cells: tuple[PlannedItem, ...]
    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A group's run. gpus: their indices; begins_s, ends_s: seconds since the beginning of the run."""

    group: Group
    gpus: tuple[int, ...]
    begins_s: float
    ends_s: float


def groups_of(cells: Sequence[PlannedItem]) -> list[Group]:
    """Return groups of cells by engine, in the order in which the engines first occur. Cells without an engine are left
    out because they take no GPU: they read, or hold launches of their own."""
    found = []
    for engine, its in grouped(cells, lambda cell: cell.engine).items():
        if engine is not None:
            seconds = start_estimate_s(engine) + sum(cell.seconds for cell in its)
            found.append(Group(engine, tuple(its), len(engine.gpus), seconds))
    return found


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Return groups in the order in which they are to begin.

    First are those that others are compared with, so that a run that is cut off can say what more GPUs gain. Then come
    the widest, because an engine on many GPUs would wait long for the last of them. Within one width the longest is
    first, because all wait for one that begins late.
    """

    def subject(group: Group) -> tuple[str, str]:
        engine = engines_of_set(group.engine)[0]
        return engine.model, engine.interface

    alike = grouped(groups, subject)

    def rank(group: Group) -> tuple[bool, int, float]:
        widths = {other.gpus for other in alike[subject(group)]}
        reference = isinstance(group.engine, EngineSpec) and group.gpus == min(widths) < max(widths)
        return not reference, -group.gpus, -group.seconds

    return sorted(groups, key=rank)


def spread(groups: Sequence[Group], gpus: int) -> list[Placement]:
    """Return placements of the groups, taken in the order of `in_order`, each on the GPUs that are free soonest.

    If each takes one GPU, the last end is at most 2 - 1/gpus times the least possible (Graham 1966, "Bounds for certain
    multiprocessing anomalies"). Raises BadUsage if an engine wants more GPUs than there are.
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
    """Return the seconds from the beginning of the run to its last end."""
    return max((placement.ends_s for placement in placed), default=0.0)


def spread_lines(cells: Sequence[PlannedItem], gpus: int) -> list[str]:
    """Return the plan on so many GPUs as text: each GPU's engines in order, then the end. Raises BadUsage."""
    groups = groups_of(cells)
    placed = spread(groups, gpus)
    on_each: dict[int, list[str]] = {gpu: [] for gpu in range(gpus)}
    for placement in placed:
        group, count = placement.group, len(placement.group.cells)
        items = f"{count} item{'s' if count != 1 else ''}, {clock(group.seconds)} min"
        for gpu in placement.gpus:
            on_each[gpu].append(f"{engine_title(group.engine)} from {clock(placement.begins_s)} ({items})")
    lines = [f"GPU {gpu}: {', '.join(its) or 'nothing'}" for gpu, its in on_each.items()]
    alone, plural = clock(sum(group.seconds for group in groups)), "s" if gpus != 1 else ""
    end = f"{clock(makespan_s(placed))} min on {gpus} GPU{plural}"
    return [*lines, f"spread by engine: {end}; one engine after the other: {alone} min"]


def plan_lines(cells: Sequence[PlannedItem]) -> list[str]:
    """Return the plan as text: one line per cell in order, an engine's line before its first, the total last."""
    lines, total, gpu_seconds = [f"{'min:s':>7}  what begins then, and how long it takes"], 0.0, 0.0
    engine: Engines | None = None
    for name, needed, seconds in cells:
        if needed is not None and needed != engine:
            engine, start = needed, start_estimate_s(needed)
            lines.append(f"{clock(total):>7}  start {engine_title(needed)} ({needed.platform}, {start:.0f} s)")
            total += start
            gpu_seconds += start * len(needed.gpus)
        takes = f" ({seconds:.0f} s)" if needed or seconds else " (measures nothing)"
        lines.append(f"{clock(total):>7}    {name}{takes}")
        total += seconds
        gpu_seconds += seconds * (len(needed.gpus) if needed else 1)
    on_gpus = f", {gpu_seconds:,.0f} GPU s" if engine and engine.platform == "cuda" else ""
    plural = "s" if len(cells) != 1 else ""
    return [*lines, f"{clock(total):>7}  end: {len(cells)} item{plural}{on_gpus}"]
