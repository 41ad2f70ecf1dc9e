"""Picture of what several GPUs serve: in all, per GPU, and against the KV blocks that they have room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.compare.deployments import Deployment, deployments, on_several_gpus
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.report.figures.drawing import Panel, Picture, Series, Shown, load_axis, log_axis, picture
from pytest_slmserve.report.tables.several_gpus import name_of

STROKES = {1: "-", 2: "--", 4: "-.", 8: ":"}
Line = tuple[str, str, list[Deployment]]  # its name, its stroke, and what stands on it


def gpus_pictures(known: Sequence[Shown]) -> list[Picture]:
    """One picture, where any model was served on several GPUs; points without a valid repeat are left out."""
    several = [one for one in known if on_several_gpus(one.curve)]
    return [picture("gpus", [one.origin for one in several], _panels(several))] if several else []


def _panels(several: Sequence[Shown]) -> list[Panel]:
    total: list[Series] = []
    each: list[Series] = []
    blocks: list[Series] = []
    for one in several:
        model, lines = one.name.split(",")[0], list(_lines(one))
        for name, stroke, line in lines:
            dots = [(d.concurrency, d.tokens_per_s, bool(d.served.degraded)) for d in line]
            total.append(one.line(dots, f"{model}, {name}", stroke=stroke))
            per_gpu = [(load, rate / d.gpus, degraded) for (load, rate, degraded), d in zip(dots, line)]
            each.append(one.line(per_gpu, f"{model}, {name}", stroke=stroke))
        most = [max(line, key=lambda d: d.tokens_per_s) for _, _, line in lines if line[0].kv_blocks]
        most.sort(key=lambda d: (d.kv_blocks or 0, d.tokens_per_s))
        dots = [(d.kv_blocks or 0, d.tokens_per_s, bool(d.served.degraded)) for d in most]
        blocks.append(one.line(dots, f"{model}, {', '.join(str(d.gpus) for d in most)} GPUs"))

    def by_load(axes: Any) -> None:
        load_axis(axes, several)
        log_axis(axes, axes.yaxis)

    def by_blocks(axes: Any) -> None:
        log_axis(axes, axes.xaxis, base=2)
        log_axis(axes, axes.yaxis)

    return [
        Panel(total, by_load, "requests in flight", "output tokens/s"),
        Panel(each, by_load, "requests in flight", "output tokens/s per GPU"),
        Panel(blocks, by_blocks, "KV blocks of the engine", "most output tokens/s"),
    ]


def _lines(one: Shown) -> Iterator[Line]:
    """A line for each deployment, engines alone before replicas."""
    found = sorted(deployments(one.curve), key=lambda d: (d.sharing is not None, d.gpus))
    for name, line in grouped(found, name_of).items():
        yield name, STROKES.get(line[0].gpus, "-"), line
