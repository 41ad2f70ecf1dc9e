"""The lines that `--slm-plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_slmserve.plan.costs import PlannedItem, start_estimate_s
from pytest_slmserve.plan.schedule import Group, divided, groups_of, least_s, makespan_s, spread
from pytest_slmserve.plan.titles import Engines, clock, engine_title, gpus_of


def spread_lines(cells: Sequence[PlannedItem], gpus: int, whole: bool = False) -> list[str]:
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


def plan_lines(cells: Sequence[PlannedItem]) -> list[str]:
    """The plan as text: one line per cell in order, an engine's line before its first, the total last."""
    lines, total, gpu_seconds = list[str](), 0.0, 0.0
    engine: Engines | None = None
    for name, needed, seconds, _ in cells:
        if needed is not None and needed != engine:
            engine, start = needed, start_estimate_s(needed)
            lines.append(f"{clock(total):>7}  start {engine_title(needed)} ({needed.platform}, {start:.0f} s)")
            total += start
            gpu_seconds += start * gpus_of(needed)
        lines.append(f"{clock(total):>7}    {name}" + (f" ({seconds:.0f} s)" if needed or seconds else " (reads)"))
        total += seconds
        gpu_seconds += seconds * (gpus_of(needed) if needed else 1)
    on_gpus = f", {gpu_seconds:,.0f} GPU s" if engine and engine.platform == "cuda" else ""
    return [*lines, f"{clock(total):>7}  end: {len(cells)} items{on_gpus}"]
