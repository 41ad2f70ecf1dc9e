"""Elements that all pictures share: colours, axes, and the writer of files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import WorkloadReference

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: told apart by all eyes
MARKERS = ("o", "s", "^", "D", "v", "P")  # told apart in grey print; the next ones where the colours begin again
SIZE_INCHES = (11.0, 4.6)
ROW = 0.6  # height of each further row of panels, where the first with title and key is 1
DOTS_PER_INCH = 150
LETTER = 0.07  # width in inches, in a key
ONE_LINE, FOUR_ROWS = 0.2, 0.9  # inches that a figure has for its title, and for its key or its bars' names
LABELLED_LOADS = 22  # of one picture, side by side
LABEL_DOTS = (28, 14)  # width and height of a load written beside its dot
GREY = "#555555"
ShareY = bool | Literal["col"]
Dot = tuple[float, float, bool]  # x, y, degraded?


@dataclass(frozen=True, slots=True)
class Series:
    """Line through dots, in their order. name: in the key, also where there are no dots; empty for none. intervals: at
    their x."""

    name: str
    colour: str
    marker: str
    dots: Sequence[Dot]
    stroke: str = "-"
    width: float = 1.0
    intervals: Sequence[tuple[float, Interval]] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes with lines. x, y: what stands at them. finish: sets scales and limits, and draws what is no line."""

    series: Sequence[Series]
    finish: Callable[[Any], None]
    x: str = ""
    y: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """A sweep as every picture of one call shows it."""

    curve: Curve
    name: str
    colour: str
    marker: str

    @property
    def origin(self) -> str:
        first = self.curve.first
        return origin(self.curve.environment, first.workload if first else None)

    def line(self, dots: Sequence[Dot], name: str = "", **look: Any) -> Series:
        """Line of this sweep. name: by default the sweep's. look: other fields of the series."""
        return Series(name or self.name, self.colour, self.marker, dots, **look)


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
    """The curves with a valid point, of a sweep or of replicas, in the order given. Raises BadUsage where there
    is none."""
    if not curves:
        raise BadUsage("there is no sweep to draw", "slmserve report prints what there is")
    found = list(filter(has_valid, curves))
    if not found:
        raise BadUsage("there is no valid point to draw", "slmserve report says what is wrong")
    return [Shown(curve, name, *look(i)) for i, (curve, name) in enumerate(zip(found, labels(found), strict=True))]


def look(number: int) -> tuple[str, str]:
    """Colour and marker of a sweep or a model."""
    many = len(COLOURS)
    return COLOURS[number % many], MARKERS[(number + number // many) % len(MARKERS)]


def picture(
    name: str, origins: Iterable[str], drawn: Sequence[Panel], rows: int = 1, share_y: ShareY = False
) -> Picture:
    """Panels, row after row, above one key for all. Titles and names of x stand at the rims alone, as do those of y
    where the panels share it."""
    figure, places = panels(origins, len(drawn) // rows, rows, share_y)
    for axes, panel in zip(places, drawn, strict=True):
        at = axes.get_subplotspec()
        y = panel.y if at.is_first_col() or not share_y else ""
        dress(axes, panel.x if at.is_last_row() else "", y, panel.title if at.is_first_row() else "")
        for series in panel.series:
            draw_line(axes, series)
        panel.finish(axes)
    if any(axes.containers for axes in places):
        places[-1].errorbar([], [], [], color=GREY, elinewidth=1, capsize=2, fmt="none", label="95 % interval")
    if any(degraded for panel in drawn for series in panel.series for _, _, degraded in series.dots):
        places[-1].plot([], [], "o", color=GREY, markersize=4, markerfacecolor="white", label="degraded")
    key_below(figure)
    return Picture(name, figure)


def panels(origins: Iterable[str], count: int, rows: int = 1, share_y: ShareY = False) -> tuple[Any, list[Any]]:
    """A figure under the origins of what it shows, and the axes in it, `count` side by side, row after row. Raises
    BadUsage without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadUsage("a figure needs matplotlib", "pip install 'pytest-slmserve[figures]'") from None
    width, height = SIZE_INCHES
    size = (width if count > 1 else 0.6 * width, height * (1 + ROW * (rows - 1)))
    figure: Any = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    title = figure.suptitle("\n".join(dict.fromkeys(origins)), fontsize=10, color=GREY)
    make_room(figure, title, ONE_LINE)
    return figure, list(figure.subplots(rows, count, sharey=share_y, squeeze=False).flat)


def origin(environment: Environment | None, workload: WorkloadReference | None = None) -> str:
    """Device, release of vLLM and lengths of the requests, as far as they are known."""
    device = where_of(environment)
    if environment is None or environment.platform == "simulated":
        return device
    release = f", vLLM {environment.vllm}" if environment.vllm else ""
    if workload is None:
        return f"{device}{release}"
    lengths = f"{workload.mean_prompt_tokens:.0f} prompt and {workload.mean_output_tokens:.0f} output tokens"
    return f"{device}{release}, {lengths}"


def where_of(environment: Environment | None) -> str:
    if environment is None:
        return "unknown device"
    if environment.platform == "simulated":
        return "SIMULATED, not measured on a device"
    if environment.platform == "remote":
        return environment.url or "an endpoint"
    return environment.gpu_name or environment.cpu or "unknown device"


def dress(axes: Any, x: str, y: str = "", title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_line(axes: Any, series: Series) -> None:
    """Dots joined, those of what is degraded empty; then the intervals, up to a thousand times their value."""
    look = {"color": series.colour, "marker": series.marker, "markersize": 4, "linewidth": series.width}
    x, y = ([dot[i] for dot in series.dots] for i in (0, 1))
    axes.plot(x, y, label=series.name or None, linestyle=series.stroke, **look)
    if doubtful := [(x, y) for x, y, degraded in series.dots if degraded]:
        axes.plot(*zip(*doubtful), linestyle="", markerfacecolor="white", **look)
    for at, seen in series.intervals:
        if seen.low is not None and seen.high is not None:
            ends = [[seen.value - seen.low], [min(seen.high, 1e3 * seen.value) - seen.value]]
            axes.errorbar(at, seen.value, ends, fmt="none", ecolor=series.colour, elinewidth=1, capsize=2)


def load_axis(axes: Any, sweeps: Sequence[Shown]) -> None:
    """A tick for each load that was measured, as many labels as there is room for."""
    loads = sorted({point.concurrency for sweep in sweeps for point in sweep.curve.valid})
    # Labels are far enough apart on a logarithmic axis; the largest load always has one.
    least = math.log(loads[-1] / loads[0]) / (LABELLED_LOADS // len(axes.figure.axes))
    named = [loads[-1]]
    for load in reversed(loads):
        if math.log(named[-1] / load) > least:
            named.append(load)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) if load in named else "" for load in loads])
    axes.minorticks_off()


def label_loads(axes: Any, labelled: Iterable[tuple[float, float, int, str]]) -> None:
    """Write loads beside their dots, but for those that would stand on another. labelled: x, y, load and colour."""
    taken: list[tuple[float, float]] = []
    for x, y, load, colour in labelled:
        right, up = axes.transData.transform((x, y))
        if all(abs(right - a) > LABEL_DOTS[0] or abs(up - b) > LABEL_DOTS[1] for a, b in taken):
            axes.annotate(f"{load}", (x, y), (5, -9), textcoords="offset points", fontsize=7, color=colour)
            taken.append((right, up))


def share_axis(axes: Any, axis: Any) -> None:
    """Limits an axis to 0 to 100 %, with room for the dots at the ends."""
    (axes.set_ylim if axis is axes.yaxis else axes.set_xlim)(-0.02, 1.04)
    axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def log_axis(axes: Any, axis: Any, base: float = 10) -> None:
    """Logarithmic, with plain numbers."""
    (axes.set_yscale if axis is axes.yaxis else axes.set_xscale)("log", base=base)
    axis.set_major_formatter(plain)


def decade_axis(axes: Any, axis: Any) -> None:
    """Logarithmic, with numbers between the powers of ten too, as many as there is room for."""
    log_axis(axes, axis)
    low, high = axis.get_view_interval()
    named = "123456789" if high < 10 * low else "25" if high < 1e3 * low else ""
    axis.set_minor_formatter(lambda value, _: plain(value) if f"{value:e}"[0] in named else "")


def plain(value: float, position: int | None = None) -> str:
    """10,000 rather than a power of ten."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def key_below(figure: Any, more: Iterable[Any] = ()) -> None:
    """One key for all panels, where it hides nothing: what carries a label, once, and `more`."""
    named = {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels())}
    if not (handles := [*named.values(), *more]):
        return
    names = [fill(handle.get_label(), int((figure.get_figwidth() - 0.6) / LETTER)) for handle in handles]
    # As few rows as fit into the width, all about equally long.
    longest = max(len(line) for name in names for line in name.split("\n"))
    rows = math.ceil(len(handles) / max(1, int(figure.get_figwidth() / (0.6 + LETTER * longest))))
    columns = math.ceil(len(handles) / rows)
    key = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    make_room(figure, key, FOUR_ROWS)


def make_room(figure: Any, part: Any, usual: float) -> None:
    """Make the figure as much higher as the part is above its usual height in inches, so that the axes keep theirs."""
    extra = part.get_window_extent().height / figure.dpi - usual
    figure.set_figheight(figure.get_figheight() + max(0.0, extra))


def save(figure: Any, path: Path) -> None:
    """Writes the figure in the suffix's format. Raises BadUsage for no format, or a path not to be written."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "another path, in a folder that is there") from None
    except ValueError:
        raise BadUsage(f"{path}: no picture can be written in the format {path.suffix!r}", "a .png or .svg") from None
