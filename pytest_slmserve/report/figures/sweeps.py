"""The pictures of some sweeps; the one that needs no sensors is made here: throughput against load and latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.metrics.latency import Slo
from pytest_slmserve.analysis.metrics.roofline import ceiling_tokens_per_s
from pytest_slmserve.analysis.points import JobPoint, Point
from pytest_slmserve.analysis.sweep.curve import Curve, peaks_of_curve, work_of_curve
from pytest_slmserve.analysis.sweep.gains import Fit, fit
from pytest_slmserve.report.figures import drawing, sensors
from pytest_slmserve.report.figures.jobs import job_pictures
from pytest_slmserve.report.figures.latencies import latency, rates
from pytest_slmserve.report.figures.replicas import gpus_pictures, replica_pictures
from pytest_slmserve.schema.errors import BadUsage, TooFewPoints
from pytest_slmserve.schema.records import Measurement

SAMPLES = 60  # of a smooth line
SHAPE = 4  # loads from which a curve has one


def pictures(
    curves: Sequence[Curve],
    jobs: Sequence[JobPoint] = (),
    at_rates: Sequence[Measurement] = (),
    slo: Slo | None = None,
) -> list[drawing.Picture]:
    """All pictures of the sweeps, jobs and loads at a rate; one that cannot be drawn holds the reason instead. Raises
    BadUsage where matplotlib is missing, or no point is valid."""
    others = [*([rates(at_rates, slo)] if at_rates else []), *job_pictures(jobs)]
    known = [] if others and not any(map(drawing.has_valid, curves)) else drawing.shown(curves)
    others = [*replica_pictures(known), *gpus_pictures(known), *others]
    if not (sweeps := _swept(known)):
        return others
    sensed = (
        draw(sweeps)
        for draw in (
            sensors.sm_per_batch,
            sensors.energy_per_token,
            sensors.utilisation,
            sensors.memory_bound,
            sensors.decoding,
        )
    )
    return [drawing.Picture("sweeps", _draw(sweeps)), *_relative(sweeps), latency(sweeps, slo), *sensed, *others]


def draw_sweeps(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture to `path`, in the format of its suffix; points without a valid repeat are left out.

    Left: output tokens/s against requests in flight, with the fitted law and the roofline's bound. Right: the Pareto
    plane, output tokens/s against mean E2E. Raises BadUsage where matplotlib is missing, where `path` cannot be
    written, and where there is no valid point.
    """
    sweeps = _swept(drawing.shown(curves))
    if not sweeps:
        raise BadUsage("there are replicas only, and no sweep", "slmserve figures draws them")
    drawing.save(_draw(sweeps), path)


def _swept(known: Sequence[drawing.Shown]) -> list[drawing.Shown]:
    """Not those of which replicas alone were measured."""
    return [one for one in known if one.curve.valid]


def _draw(sweeps: Sequence[drawing.Shown]) -> Any:
    figure, (load, plane) = drawing.panels([sweep.origin for sweep in sweeps], 2)
    for sweep in sweeps:
        _draw_load(load, sweep)
        look = {"color": sweep.colour, "marker": sweep.marker, "markersize": 4}
        plane.plot(*_xy(sweep.curve.valid, "e2e_s"), linestyle="", alpha=0.5, **look)
        plane.plot(*_xy(_front(sweep), "e2e_s"), linewidth=1, **look)
    load.set_ylim(0, 1.08 * max(p.output_tokens_per_s or 0.0 for sweep in sweeps for p in sweep.curve.valid))
    _draw_roofs(load, sweeps)
    drawing.dress(load, "requests in flight", "output tokens/s")
    load.yaxis.set_major_formatter(drawing.plain)
    drawing.load_axis(load, sweeps)
    drawing.dress(plane, "mean E2E latency, s (numbers: requests in flight)", "output tokens/s")
    drawing.decade_axis(plane, plane.xaxis)
    drawing.decade_axis(plane, plane.yaxis)
    drawing.label_loads(  # every other load of the front, from the largest down
        plane,
        (
            (p.e2e_s or 0.0, p.output_tokens_per_s or 0.0, p.concurrency, sweep.colour)
            for sweep in sweeps
            for p in _front(sweep)[::-2]
        ),
    )
    _key(load, [sweep.curve for sweep in sweeps])
    drawing.key_below(figure)
    return figure


def _relative(sweeps: Sequence[drawing.Shown]) -> list[drawing.Picture]:
    """Throughput against the load as a share of each sweep's largest, so that models of any speed are on one scale."""
    several = [sweep for sweep in sweeps if len(sweep.curve.valid) >= SHAPE]
    if len(several) < 2:
        return []

    def finish(axes: Any) -> None:
        drawing.load_axis(axes, several)
        drawing.share_axis(axes, axes.yaxis)

    lines = [
        sweep.line([(p.concurrency, sensors.share_of_most(p, sweep), bool(p.degraded)) for p in sweep.curve.valid])
        for sweep in several
    ]
    panel = drawing.Panel(lines, finish, "requests in flight", "throughput, of each model's largest")
    return [drawing.picture("relative-throughput", [sweep.origin for sweep in several], [panel])]


def _xy(points: Sequence[Point], x: str) -> tuple[list[float], list[float]]:
    return [getattr(p, x) for p in points], [p.output_tokens_per_s or 0.0 for p in points]


def _draw_load(axes: Any, sweep: drawing.Shown) -> None:
    """Points, the law (solid, where it describes them), a ring where the plateau begins."""
    curve, colour = sweep.curve, sweep.colour
    axes.plot(*_xy(curve.valid, "concurrency"), sweep.marker, color=colour, markersize=4, label=sweep.name)
    loads = loads_between(curve.valid[0].concurrency, curve.valid[-1].concurrency)
    if law := saturation_law(curve):
        axes.plot(loads, [law.tokens_per_s(load) for load in loads], "-", color=colour, linewidth=1)
    knee = [p for p in curve.valid if p.concurrency == curve.plateau().value]
    axes.plot(*_xy(knee, "concurrency"), "o", color=colour, markersize=10, fillstyle="none")


def _draw_roofs(axes: Any, sweeps: Sequence[drawing.Shown]) -> None:
    """The roofline (dashed), once for all sweeps that have the same; far above them it leaves the picture."""
    drawn: list[list[float]] = []
    for sweep in sweeps:
        work, peaks, valid = work_of_curve(sweep.curve), peaks_of_curve(sweep.curve), sweep.curve.valid
        loads = loads_between(valid[0].concurrency, valid[-1].concurrency)
        bound = [ceiling_tokens_per_s(work, peaks, load) for load in loads] if work and peaks else []
        if bound not in drawn:
            axes.plot(loads[: len(bound)], bound, "--", color=sweep.colour, linewidth=1, alpha=0.6)
            drawn.append(bound)


def saturation_law(curve: Curve) -> Fit | None:
    """The fitted law, None where there is none or it does not describe the curve."""
    try:
        law = fit(curve.points)
    except TooFewPoints:
        return None
    return law if law.describes and law.identified else None


def _front(sweep: drawing.Shown) -> list[Point]:
    return sorted(sweep.curve.pareto_front(), key=lambda p: p.e2e_s or 0.0)


def loads_between(first: float, last: float) -> list[float]:
    """Loads as far apart as eyes on a logarithmic axis want them."""
    return [first * (last / first) ** (i / (SAMPLES - 1)) for i in range(SAMPLES)]


def _key(axes: Any, curves: Sequence[Curve]) -> None:
    """Colours are models; the strokes are told once, in grey."""
    if any(map(saturation_law, curves)):
        axes.plot([], [], "-", color=drawing.GREY, linewidth=1, label="fitted law")
    if any(peaks_of_curve(curve) and work_of_curve(curve) for curve in curves):
        axes.plot([], [], "--", color=drawing.GREY, linewidth=1, alpha=0.6, label="roofline")
    if any(curve.plateau().value is not None for curve in curves):
        axes.plot([], [], "o", color=drawing.GREY, markersize=10, fillstyle="none", label="plateau from here")
