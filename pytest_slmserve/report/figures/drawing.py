"""What all pictures share: their colours and axes, and how one is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.labels import labels
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: told apart by all eyes
MARKERS = ("o", "s", "^")  # the next one where the colours begin again
SIZE_INCHES = (11.0, 4.6)
ROW = 0.6  # height of each further row of panels, where the first with title and key is 1
DOTS_PER_INCH = 150
LABELLED_LOADS = 22  # of one picture, side by side
GREY = "#555555"


@dataclass(frozen=True, slots=True)
class Shown:
    """A sweep as every picture of one call shows it."""

    curve: Curve
    name: str
    colour: str
    marker: str


@dataclass(frozen=True, slots=True)
class Picture:
    """matplotlib's figure; or None, and one sentence on what is missing."""

    name: str
    figure: Any
    why_not: str = ""


def has_valid(curve: Curve) -> bool:
    """Is there something to draw, of a sweep or of replicas?"""
    return bool(curve.valid) or any(point.valid for point in curve.shared)


def shown(curves: Sequence[Curve]) -> list[Shown]:
    """Those that have a valid point, of a sweep or of replicas, in the order given. Raises BadUsage where none has."""
    found = list(filter(has_valid, curves))
    if not found:
        raise BadUsage("there is no valid point to draw", "python -m pytest_slmserve report says what is wrong")
    many = len(COLOURS)
    return [
        Shown(curve, name, COLOURS[number % many], MARKERS[number // many % len(MARKERS)])
        for number, (curve, name) in enumerate(zip(found, labels(found), strict=True))
    ]


def panels(
    count: int, sweeps: Sequence[Shown], *, rows: int = 1, share_y: bool | Literal["col"] = False
) -> tuple[Any, list[Any]]:
    """A figure under the name of its devices, and the axes in it, `count` side by side, row after row. Raises BadUsage
    without matplotlib."""
    return panels_of([where_of(sweep.curve.environment) for sweep in sweeps], count, rows=rows, share_y=share_y)


def panels_of(
    devices: Sequence[str], count: int, *, rows: int = 1, share_y: bool | Literal["col"] = False
) -> tuple[Any, list[Any]]:
    """The same for named devices."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadUsage("a figure needs matplotlib", "pip install 'pytest-slmserve[figures]'") from None
    width, height = SIZE_INCHES
    size = (width if count > 1 else 0.6 * width, height * (1 + ROW * (rows - 1)))
    figure: Any = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    figure.suptitle("; ".join(dict.fromkeys(devices)), fontsize=10, color=GREY)
    return figure, list(figure.subplots(rows, count, sharey=share_y, squeeze=False).flat)


def where_of(environment: Environment | None) -> str:
    if environment is None:
        return "unknown device"
    if environment.backend == "fake":
        return "SIMULATED, not measured on a device"
    if environment.backend == "remote":
        return environment.url or "an endpoint"
    return environment.gpu_name or environment.cpu or "unknown device"


def dress(axes: Any, x_label: str, y_label: str = "") -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_line(
    axes: Any, sweep: Shown, dots: Sequence[tuple[float, float, bool]], label: str = "", stroke: str = "-"
) -> None:
    """Dots at (x, y) in the order given, joined; those of what is degraded are empty. label: by default the sweep's
    name; it is in the key also where there are no dots."""
    look = {"color": sweep.colour, "marker": sweep.marker, "markersize": 4, "linewidth": 1, "linestyle": stroke}
    axes.plot([x for x, _, _ in dots], [y for _, y, _ in dots], label=label or sweep.name, **look)
    if doubtful := [(x, y) for x, y, degraded in dots if degraded]:
        axes.plot(*zip(*doubtful), **look | {"linestyle": "", "markerfacecolor": "white"})


def tell_degraded(axes: Any) -> None:
    """Once, in grey."""
    axes.plot([], [], "o", color=GREY, markersize=4, markerfacecolor="white", label="degraded")


def load_axis(axes: Any, sweeps: Sequence[Shown]) -> None:
    """A tick for each load that was measured, as many labels as there is room for."""
    loads = sorted({point.concurrency for sweep in sweeps for point in sweep.curve.valid})
    named = _apart(loads, LABELLED_LOADS // len(axes.figure.axes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) if load in named else "" for load in loads])
    axes.minorticks_off()


def _apart(loads: Sequence[int], most: int) -> set[int]:
    """At most so many of them, far enough from each other on a logarithmic axis; the largest always."""
    least = math.log(loads[-1] / loads[0]) / most
    kept = [loads[-1]]
    for load in reversed(loads):
        if math.log(kept[-1] / load) > least:
            kept.append(load)
    return set(kept)


def share_axis(axes: Any, axis: Any) -> None:
    """From 0 to 100 %, with room for the dots at the ends."""
    (axes.set_ylim if axis is axes.yaxis else axes.set_xlim)(-0.02, 1.04)
    axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def plain(value: float, position: int | None = None) -> str:
    """10,000 rather than a power of ten."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def key_below(figure: Any, more: Iterable[Any] = ()) -> None:
    """One key for all panels, where it hides nothing: what carries a label, once, and `more`."""
    named = {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels())}
    handles = [*named.values(), *more]
    columns = _columns(figure.get_figwidth(), [handle.get_label() for handle in handles])
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _columns(width_inches: float, names: Sequence[str]) -> int:
    """As few rows as fit into the width, all about as long."""
    most = max(1, int(width_inches / (0.6 + 0.07 * max(map(len, names)))))
    rows = math.ceil(len(names) / most)
    return math.ceil(len(names) / rows)


def save(figure: Any, path: Path) -> None:
    """In the format of the path's suffix. Raises BadUsage where that is none, or the path cannot be written."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "another path, in a folder that is there") from None
    except ValueError:
        raise BadUsage(f"{path}: no picture can be written in the format {path.suffix!r}", "a .png or .svg") from None
