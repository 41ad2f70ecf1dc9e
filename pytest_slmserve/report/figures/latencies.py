"""Pictures for an SLO: latency percentiles against requests in flight or their rate, with its bounds, and goodput."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pytest_slmserve.analysis.metrics.latency import Slo
from pytest_slmserve.analysis.metrics.summary import Summary, summarize
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.metrics.window import delay_of, steps_of
from pytest_slmserve.report.figures import drawing
from pytest_slmserve.report.loads import good, rate_series
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import OpenLoop
from pytest_slmserve.schema.records import Measurement

STROKES = {"p50": "-", "p99": "--"}


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures under one valid load. x: requests in flight, or sent per second. good_per_s: None without an SLO."""

    x: float
    figures: Summary
    degraded: bool
    good_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """Loads in their order, and how they look."""

    name: str
    colour: str
    marker: str
    loads: Sequence[LoadFigures]

    def line(self, value: Callable[[LoadFigures], float | None], stroke: str, factor: float = 1.0) -> drawing.Series:
        """Line through a figure, times `factor`, of the loads at which it is known."""
        known = ((load, value(load)) for load in self.loads)
        dots = [(load.x, factor * y, load.degraded) for load, y in known if y is not None and math.isfinite(y)]
        return drawing.Series(self.name if stroke == "-" else "", self.colour, self.marker, dots, stroke)


def latency(sweeps: Sequence[drawing.Shown], slo: Slo | None = None) -> drawing.Picture:
    """p50 and p99 of TTFT and TPOT against requests in flight, of E2E too where the SLO bounds it."""
    seen = [sweep for sweep in sweeps if sum(p.ttft_p50_s is not None for p in sweep.curve.valid) > 1]
    if not seen:
        return drawing.Picture("latency", None, "percentiles of TTFT are not known at two loads of any model")
    series = []
    for one in seen:
        loads = [LoadFigures(p.concurrency, p, bool(p.degraded)) for p in one.curve.valid]
        series.append(LoadSeries(one.name, one.colour, one.marker, loads))
    names = ["ttft", "tpot", *(["e2e"] if slo and slo.e2e_s else [])]
    drawn = _percentiles(names, series, slo, "requests in flight", lambda axes: drawing.load_axis(axes, seen))
    return drawing.picture("latency", [sweep.origin for sweep in seen], list(drawn))


def rates(measurements: Sequence[Measurement], slo: Slo | None = None) -> drawing.Picture:
    """Requests served, and those that are good, per second against the rate that was sent, with p50 and p99 of TTFT,
    TPOT and E2E. A ramp is a line by itself; loads that differ in their rate alone are another."""
    groups = [(group, loads) for group in rate_series(measurements) if (loads := list(_loads(group, slo)))]
    if not groups:
        return drawing.Picture("rates", None, "no load at a request rate is valid")
    names = _names([group[0] for group, _ in groups])
    looks = {name: drawing.look(number) for number, name in enumerate(dict.fromkeys(names))}
    series = [LoadSeries(name, *looks[name], loads) for name, (_, loads) in zip(names, groups, strict=True)]
    most = max(load.x for one in series for load in one.loads)

    def scale(axes: Any) -> None:
        axes.set_xlim(0, 1.04 * most)

    def finish(axes: Any) -> None:
        scale(axes)
        axes.set_ylim(bottom=0)
        axes.plot([0, most], [0, most], ":", color=drawing.GREY, linewidth=1, label="as many as were sent")
        axes.plot([], [], "-", color=drawing.GREY, linewidth=1, label="served")
        if slo:
            axes.plot([], [], "--", color=drawing.GREY, linewidth=1, label=f"good: {slo}")

    lines = [one.line(lambda load: load.figures.requests_per_s, "-") for one in series]
    lines += [one.line(lambda load: load.good_per_s, "--") for one in series if slo]
    x = "requests/s sent"
    drawn = [
        drawing.Panel(lines, finish, x, "requests/s"),
        *_percentiles(("ttft", "tpot", "e2e"), series, slo, x, scale),
    ]
    origins = [drawing.origin(group[0].environment, group[0].workload) for group, _ in groups]
    return drawing.picture("rates", origins, drawn, rows=1 + (len(drawn) == 4))


def _loads(group: Sequence[Measurement], slo: Slo | None) -> Iterator[LoadFigures]:
    """The valid loads of a series, of a ramp its steps."""
    for m in steps_of(group[0]) or group:
        found, delay = check(m), delay_of(m.run)
        if found.problems or delay is None:
            continue
        served = good(m, slo)
        yield LoadFigures(
            delay.achieved_per_s, summarize(m), bool(found.degradations), served.per_s if served else None
        )


def _names(firsts: Sequence[Measurement]) -> list[str]:
    """The model of each series, with what tells it from the others."""
    rows = []
    for m in firsts:
        assert isinstance(m.load, OpenLoop)
        process = "" if m.load.steps else m.load.arrivals.partition(",")[0].replace("gamma", "burstiness")
        timing = "ramp" if m.load.steps else f"each judged for {m.load.window_s:g} s after {m.load.settle_s:g} s"
        rows.append([short_name(m.spec.model), drawing.origin(m.environment, m.workload), timing, process])
    differ = [len({*column} - {""}) > 1 for column in zip(*rows, strict=True)]
    return [", ".join([row[0], *(fact for fact, told in zip(row[1:], differ[1:]) if told and fact)]) for row in rows]


def _percentiles(
    names: Sequence[str], series: Sequence[LoadSeries], slo: Slo | None, x: str, scale: Callable[[Any], None]
) -> Iterator[drawing.Panel]:
    """A panel for each latency that is known: p50 solid, p99 dashed, and a line at its bound. scale: sets axis x."""
    bounds = dict(zip(slo.bounds, str(slo).split(","), strict=True)) if slo else {}
    for name in names:
        lines = [
            one.line(attrgetter(f"figures.{name}_{part}_s"), stroke, 1e3)
            for one in series
            for part, stroke in STROKES.items()
        ]

        def finish(axes: Any, name: str = name) -> None:
            scale(axes)
            if slo and name in bounds:
                axes.axhline(1e3 * slo.bounds[name], color=drawing.GREY, linewidth=1.2, linestyle="-.")
                # The words stand beside the axes, where they hide no dot, in two rows.
                at, words = (1, 1e3 * slo.bounds[name]), bounds[name].replace(":", ":\n")
                place = {"xycoords": axes.get_yaxis_transform(), "xytext": (3, 0), "textcoords": "offset points"}
                axes.annotate(words, at, fontsize=8, color=drawing.GREY, va="center", **place)
            drawing.decade_axis(axes, axes.yaxis)
            for part, stroke in STROKES.items():
                axes.plot([], [], stroke, color=drawing.GREY, linewidth=1, label=part)

        if any(line.dots for line in lines):
            yield drawing.Panel(lines, finish, x, f"{name.upper()}, ms")
