"""Picture of what several GPUs serve: in all, per GPU, and against the KV blocks that they have room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.compare.deployments import Deployment, deployments, on_several_gpus
from pytest_slmserve.report.figures.drawing import Picture, Shown, draw_line, dress, key_below, load_axis, panels, plain
from pytest_slmserve.report.tables.several_gpus import name_of

STROKES = {1: "-", 2: "--", 4: "-.", 8: ":"}
Line = tuple[str, str, list[Deployment]]  # its name, its stroke, and what stands on it


def gpus_pictures(known: Sequence[Shown]) -> list[Picture]:
    """One picture, where any model was served on several GPUs; points without a valid repeat are left out."""
    several = [one for one in known if on_several_gpus(one.curve)]
    return [Picture("gpus", _draw(several))] if several else []


def _draw(several: Sequence[Shown]) -> Any:
    figure, (total, each, blocks) = panels(3, several)
    for one in several:
        for name, stroke, line in _lines(one):
            label = f"{one.name.split(',')[0]}, {name}"
            _draw_line(total, one, label, stroke, [(d.concurrency, d.tokens_per_s, d) for d in line])
            _draw_line(each, one, label, stroke, [(d.concurrency, d.tokens_per_s / d.gpus, d) for d in line])
        most = [max(line, key=lambda d: d.tokens_per_s) for _, _, line in _lines(one) if line[0].kv_blocks]
        found = sorted((d.kv_blocks or 0, d.tokens_per_s, d) for d in most)
        _draw_line(blocks, one, f"{one.name.split(',')[0]}, {_named_gpus(found)}", "-", found)
    dress(total, "requests in flight", "output tokens/s")
    dress(each, "requests in flight", "output tokens/s per GPU")
    dress(blocks, "KV blocks of the engine", "most output tokens/s")
    for axes in (total, each):
        load_axis(axes, several)
    blocks.set_xscale("log", base=2)
    blocks.xaxis.set_major_formatter(plain)
    for axes in (total, each, blocks):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain)
    key_below(figure)
    return figure


def _lines(one: Shown) -> Iterator[Line]:
    """A line for each deployment, engines alone before replicas."""
    found: dict[str, list[Deployment]] = {}
    for deployment in sorted(deployments(one.curve), key=lambda d: (d.sharing is not None, d.gpus)):
        found.setdefault(name_of(deployment), []).append(deployment)
    for name, line in found.items():
        yield name, STROKES.get(line[0].gpus, "-"), line


def _named_gpus(found: Sequence[tuple[int, float, Deployment]]) -> str:
    return f"{', '.join(str(d.gpus) for _, _, d in found)} GPUs"


def _draw_line(axes: Any, one: Shown, label: str, stroke: str, dots: Sequence[tuple[float, float, Deployment]]) -> None:
    draw_line(axes, one, [(x, y, bool(d.served.degraded)) for x, y, d in dots], label, stroke)
