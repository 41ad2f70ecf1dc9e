"""One picture of some sweeps: throughput against load, and against latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.curve import Curve
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.roofline import ceiling_tokens_per_s
from pytest_slmserve.analysis.saturation import Fit, fit
from pytest_slmserve.errors import BadUsage, TooFewPoints
from pytest_slmserve.report.findings import labels, peaks_of_curve, work_of_curve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: told apart by all eyes
SIZE_INCHES = (11.0, 4.6)
DOTS_PER_INCH = 150
SAMPLES = 60  # of a smooth line
GREY = "#555555"


def draw_sweeps(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture to `path`, in the format of its suffix; points without a valid repeat are left out.

    Left: output tokens/s against requests in flight, with the fitted law and the roofline's bound. Right: the Pareto
    plane, output tokens/s against mean E2E. Raises BadUsage where matplotlib is missing, where `path` cannot be
    written, and where there is no valid point.
    """
    shown = [curve for curve in curves if curve.valid]
    if not shown:
        raise BadUsage("there is no valid point to draw", "the report without --figure says what is wrong")
    figure = _figure()
    load, plane = figure.subplots(1, 2)
    for number, (curve, name) in enumerate(zip(shown, labels(shown), strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        _draw_load(load, curve, name, colour)
        _draw_plane(plane, curve, name, colour)
    _dress(load, "requests in flight", {c for curve in shown for c in map(_load, curve.valid)})
    _dress(plane, "mean E2E latency, s")
    _key(load, shown)
    figure.suptitle("; ".join(dict.fromkeys(_where(curve) for curve in shown)), fontsize=10, color=GREY)
    _save(figure, path)


def _where(curve: Curve) -> str:
    if curve.environment is None:
        return "unknown device"
    if curve.environment.backend == "fake":
        return "SIMULATED, not measured on a device"
    return curve.environment.gpu_name or curve.environment.cpu or "unknown device"


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadUsage("a figure needs matplotlib", "pip install 'pytest-slmserve[figures]'") from None
    return Figure(figsize=SIZE_INCHES, layout="constrained")


def _load(point: Point) -> int:
    return point.concurrency


def _xy(points: Sequence[Point], x: str) -> tuple[list[float], list[float]]:
    return [getattr(p, x) for p in points], [p.output_tokens_per_s or 0.0 for p in points]


def _draw_load(axes: Any, curve: Curve, name: str, colour: str) -> None:
    """Points, the law (solid, where it describes them), the roofline (dashed), a ring where the plateau begins."""
    axes.plot(*_xy(curve.valid, "concurrency"), "o", color=colour, markersize=4, label=name)
    loads = _between(curve.valid[0].concurrency, curve.valid[-1].concurrency)
    if law := _law(curve):
        axes.plot(loads, [law.tokens_per_s(load) for load in loads], "-", color=colour, linewidth=1)
    work, peaks = work_of_curve(curve), peaks_of_curve(curve)
    if work and peaks:
        bound = [ceiling_tokens_per_s(work, peaks, load) for load in loads]
        axes.plot(loads, bound, "--", color=colour, linewidth=1, alpha=0.6)
    knee = [p for p in curve.valid if p.concurrency == curve.plateau().value]
    axes.plot(*_xy(knee, "concurrency"), "o", color=colour, markersize=10, fillstyle="none")


def _law(curve: Curve) -> Fit | None:
    """The fitted law, None where there is none or it does not describe the curve."""
    try:
        law = fit(curve.points)
    except TooFewPoints:
        return None
    return law if law.describes else None


def _draw_plane(axes: Any, curve: Curve, name: str, colour: str) -> None:
    """All points, those of the front joined and the load written beside every other one of them."""
    axes.plot(*_xy(curve.valid, "e2e_s"), "o", color=colour, markersize=4, alpha=0.5, label=name)
    front = sorted(curve.pareto_front(), key=lambda p: p.e2e_s or 0.0)
    axes.plot(*_xy(front, "e2e_s"), "o-", color=colour, markersize=4, linewidth=1)
    for p in front[::-2]:
        where = (p.e2e_s, p.output_tokens_per_s)
        axes.annotate(f"{p.concurrency}", where, (5, -9), textcoords="offset points", fontsize=7, color=colour)


def _between(first: float, last: float) -> list[float]:
    """Loads as far apart as eyes on a logarithmic axis want them."""
    return [first * (last / first) ** (i / (SAMPLES - 1)) for i in range(SAMPLES)]


def _dress(axes: Any, x_label: str, loads: set[int] | None = None) -> None:
    """Logarithmic both ways: models differ tenfold, loads a thousandfold."""
    axes.set_xscale("log", base=2 if loads else 10)
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel("output tokens/s")
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.yaxis, *(() if loads else (axes.xaxis,))):
        axis.set_major_formatter(_plain)
    if loads:
        axes.set_xticks(sorted(loads), [str(load) for load in sorted(loads)])
        axes.minorticks_off()


def _plain(value: float, position: int | None = None) -> str:
    """10,000 rather than a power of ten."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _key(axes: Any, curves: Sequence[Curve]) -> None:
    """Colours are models; the strokes are told once, in grey."""
    if any(map(_law, curves)):
        axes.plot([], [], "-", color=GREY, linewidth=1, label="fitted law")
    if any(peaks_of_curve(curve) and work_of_curve(curve) for curve in curves):
        axes.plot([], [], "--", color=GREY, linewidth=1, alpha=0.6, label="roofline")
    if any(curve.plateau().value is not None for curve in curves):
        axes.plot([], [], "o", color=GREY, markersize=10, fillstyle="none", label="plateau from here")
    axes.legend(frameon=False, fontsize=8)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "--figure with another path") from None
    except ValueError:
        raise BadUsage(f"{path}: no picture can be written in the format {path.suffix!r}", "a .png or .svg") from None
