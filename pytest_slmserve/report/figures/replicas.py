"""The pictures of replicas on one device, each beside one engine alone under the load that all of them had together.

What shares the device in one way, of one model under one load, is a line over the number of engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, get_args

from pytest_slmserve.analysis.compare.replicas import Pair, compared
from pytest_slmserve.analysis.points.replica_points import SharedPoint, gain_over, latency_ratio
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.report.figures.drawing import (
    GREY,
    Picture,
    Shown,
    draw_line,
    dress,
    key_below,
    panels,
    share_axis,
    tell_degraded,
)
from pytest_slmserve.schema.literals import Sharing

SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
TITLES: dict[Sharing, str] = {
    "time-slicing": "time slicing",
    "mps": "MPS",
    "mig": "MIG",
    "gpus": "a GPU each",
    "urls": "a URL each",
}
STROKES = ("-", "--", ":", "-.")  # of one model's lines
SPREAD = 0.4  # what stands side by side at one number of engines, where 1 is the distance between two numbers
SIDE = 0.5  # free space left and right of all
LEAST = (0.9, 1.1)  # what an axis of ratios shows at least, so that noise does not look like much
ALONE = "one engine under the same load"
LINE_AT_1 = {"color": GREY, "linewidth": 0.8, "linestyle": ":", "label": ALONE}
INCOMPARABLE = "of no model replicas and one engine alone are valid under the same load"

Ratio = Callable[[Pair], Interval | None]
Figure = Callable[[Point | SharedPoint], float | None]


@dataclass(frozen=True, slots=True)
class ReplicaSeries:
    """One model under one load, with all that is alike but for the number of replicas and the way of sharing. beside:
    how far right of a number of engines its dots stand."""

    sweep: Shown
    name: str
    stroke: str
    beside: float
    pairs: tuple[Pair, ...]

    def of(self, sharing: Sharing) -> list[Pair]:
        return sorted((p for p in self.pairs if p[0].sharing == sharing), key=lambda pair: pair[0].count)


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity. share: of something, from 0 to 100 %. relative: to what it is of one engine."""

    label: str
    of: Figure
    share: bool = False
    relative: bool = False


Dot = tuple[int, float, bool]  # number of engines, value, degraded?


def replica_pictures(sweeps: Sequence[Shown]) -> list[Picture]:
    """None of them where no replicas of one model were measured."""
    if not any(sweep.curve.shared for sweep in sweeps):
        return []
    series = series_of(sweeps)
    if not series:
        return [Picture(name, None, INCOMPARABLE) for name in ("replica-gain", "replica-latency", "replica-device")]
    return [replica_gain(series), replica_latency(series), replica_device(series)]


def replica_gain(series: Sequence[ReplicaSeries]) -> Picture:
    """Throughput over that of one engine against the number of replicas (arXiv:2404.03353, figure 5)."""
    ways = _ways(series)
    figure, places = panels(len(ways), [s.sweep for s in series], share_y=True)
    for axes, sharing in zip(places, ways):
        dress(axes, "replicas")
        axes.set_title(TITLES[sharing], fontsize=10, loc="left")
        _draw_ratios(axes, series, sharing, _gain)
    _reach(places[0], series, [_gain])
    places[0].set_ylabel("throughput over one engine's")
    return _finished("replica-gain", figure, series)


def replica_latency(series: Sequence[ReplicaSeries]) -> Picture:
    """The largest of the replicas' mean E2E, and the 99th percentile over the requests of all, each over one engine's
    (arXiv:2404.03353, figure 6)."""
    ratios: dict[str, Ratio] = {
        "largest mean E2E over one engine's": lambda pair: latency_ratio(pair[1], pair[0], "largest_e2e_s"),
        "99th percentile of E2E over one engine's": lambda pair: latency_ratio(pair[1], pair[0], "e2e_p99_s"),
    }
    known = {name: of for name, of in ratios.items() if any(_ratios(s.pairs, of) for s in series)}
    if not known:
        return Picture("replica-latency", None, "no request ended in a window")
    ways = _ways(series)
    figure, places = panels(len(known), [s.sweep for s in series], rows=len(ways), share_y=True)
    for axes, (sharing, name) in zip(places, ((sharing, name) for sharing in ways for name in known)):
        _dress(axes, name, sharing, "replicas")
        _draw_ratios(axes, series, sharing, known[name])
    _reach(places[0], series, list(known.values()))
    return _finished("replica-latency", figure, series)


def replica_device(series: Sequence[ReplicaSeries]) -> Picture:
    """What the device did with one engine on it, and with each number of replicas (arXiv:2404.03353, figure 7)."""
    known = [panel for panel in _panels(series) if any(_values(panel, s.pairs) for s in series)]
    if not known:
        return Picture("replica-device", None, "no sensor told what the device did while replicas ran")
    ways = _ways(series)
    figure, places = panels(len(known), [s.sweep for s in series], rows=len(ways), share_y="col")
    for axes, (sharing, panel) in zip(places, ((sharing, panel) for sharing in ways for panel in known)):
        _dress(axes, panel.label, sharing, "engines")
        _draw_panel(axes, panel, series, sharing)
    return _finished("replica-device", figure, series)


# What is compared


def series_of(sweeps: Sequence[Shown]) -> list[ReplicaSeries]:
    """Those of each sweep, side by side."""
    found = [(sweep, name, stroke, pairs) for sweep in sweeps for name, stroke, pairs in _lines(sweep)]
    step = SPREAD / len(found) if found else 0.0
    return [ReplicaSeries(*one[:3], (i - (len(found) - 1) / 2) * step, one[3]) for i, one in enumerate(found)]


def _lines(sweep: Shown) -> Iterator[tuple[str, str, tuple[Pair, ...]]]:
    """Name, stroke and pairs of each line of one sweep."""
    lines: dict[str, list[Pair]] = {}
    for pair in chain.from_iterable(compared(sweep.curve, sharing) for sharing in SHARINGS):
        lines.setdefault(_setting(pair[0]), []).append(pair)
    for number, (setting, pairs) in enumerate(lines.items()):
        yield f"{sweep.name}, {setting}", STROKES[number % len(STROKES)], tuple(pairs)


def _setting(shared: SharedPoint) -> str:
    pinned = ", pinned" if shared.pinned else ""
    part = f", {shared.thread_percentage} % of the SMs each" if shared.thread_percentage else ""
    return f"{shared.concurrency} in flight{pinned}{part}"


def _ways(series: Sequence[ReplicaSeries]) -> list[Sharing]:
    return [sharing for sharing in SHARINGS if any(s.of(sharing) for s in series)]


def _doubtful(*points: Point | SharedPoint) -> bool:
    return any(point.degraded for point in points)


# Ratios to one engine


def _gain(pair: Pair) -> Interval:
    return gain_over(pair[1], pair[0])


def _ratios(pairs: Sequence[Pair], of: Ratio) -> list[tuple[Pair, Interval]]:
    seen = ((pair, of(pair)) for pair in pairs)
    return [(pair, ratio) for pair, ratio in seen if ratio and math.isfinite(ratio.value)]


def _draw_ratios(axes: Any, series: Sequence[ReplicaSeries], sharing: Sharing, of: Ratio) -> None:
    """Dots with their intervals, and a line at 1."""
    place = _count_axis(axes, _counts(series))
    for one in series:
        known = _ratios(one.of(sharing), of)
        dots = [(pair[0].count, ratio.value, _doubtful(*pair)) for pair, ratio in known]
        _draw_dots(axes, one, dots, place)
        for pair, ratio in known:
            _draw_interval(axes, place[pair[0].count] + one.beside, ratio, one.sweep.colour)
    axes.axhline(1, **LINE_AT_1)


def _draw_interval(axes: Any, x: float, ratio: Interval, colour: str) -> None:
    if ratio.low is not None and ratio.high is not None:
        below, above = ratio.value - ratio.low, min(ratio.high, 1e3 * ratio.value) - ratio.value
        axes.errorbar(x, ratio.value, [[below], [above]], fmt="none", ecolor=colour, elinewidth=1, capsize=2)


def _reach(axes: Any, series: Sequence[ReplicaSeries], drawn: Sequence[Ratio]) -> None:
    """Of the axis that all panels share: to the ends of the intervals, but not to less than half of a value or more
    than twice it: what was repeated once has an interval of any width."""
    ratios = [ratio for one in series for of in drawn for _, ratio in _ratios(one.pairs, of)]
    lows = (max(r.value / 2, r.value if r.low is None else r.low) for r in ratios)
    highs = (min(r.value * 2, r.value if r.high is None else r.high) for r in ratios)
    low, high = min(LEAST[0], *lows), max(LEAST[1], *highs)
    free = 0.04 * (high - low)
    axes.set_ylim(low - free, high + free)


# What the device did


def _panels(series: Sequence[ReplicaSeries]) -> Iterator[Panel]:
    """Busy by the profiling counters, where they are known; else as NVML samples it."""
    busy = Panel("busy (some kernel ran)", attrgetter("engine_active"), share=True)
    util = Panel("GPU utilisation", attrgetter("gpu_util"), share=True)
    yield busy if any(_values(busy, s.pairs) for s in series) else util
    yield Panel("SM active", attrgetter("sm_active"), share=True)
    yield Panel("DRAM active", attrgetter("dram_active"), share=True)
    yield Panel("power, W", attrgetter("power_w"))
    yield Panel("energy per token\nover one engine's", attrgetter("energy_per_token_j"), relative=True)


def _values(panel: Panel, pairs: Sequence[Pair]) -> list[Dot]:
    """Of replicas, and first of one engine alone; nothing where it is not known of any replicas."""
    replicas = [
        (shared.count, value, _doubtful(shared)) for shared, _ in pairs if (value := _known(panel, shared)) is not None
    ]
    if not replicas:
        return []
    alone = pairs[0][1]
    first = _known(panel, alone)
    if not panel.relative:
        return replicas if first is None else [(1, first, _doubtful(alone)), *replicas]
    return [(1, 1.0, _doubtful(alone)), *((n, v / first, doubt) for n, v, doubt in replicas)] if first else []


def _known(panel: Panel, point: Point | SharedPoint) -> float | None:
    value = panel.of(point)
    return value if value is not None and math.isfinite(value) else None


def _draw_panel(axes: Any, panel: Panel, series: Sequence[ReplicaSeries], sharing: Sharing) -> None:
    """From 0 on, as what stands side by side is compared, and as far as any way of sharing needs."""
    place = _count_axis(axes, [1, *_counts(series)])
    for one in series:
        _draw_dots(axes, one, _values(panel, one.of(sharing)), place)
    if panel.relative:
        axes.axhline(1, **LINE_AT_1)
    if panel.share:
        share_axis(axes, axes.yaxis)
    else:
        most = max(value for one in series for _, value, _ in _values(panel, one.pairs))
        axes.set_ylim(0, max(LEAST[1], 1.06 * most))


# Axes and key


def _dress(axes: Any, title: str, sharing: Sharing, counted: str) -> None:
    """Quantities side by side, ways of sharing below each other: titles, names and numbers at the rims alone."""
    place = axes.get_subplotspec()
    dress(axes, counted if place.is_last_row() else "", TITLES[sharing] if place.is_first_col() else "")
    if place.is_first_row():
        axes.set_title(title, fontsize=10, loc="left")


def _counts(series: Sequence[ReplicaSeries]) -> list[int]:
    return [shared.count for one in series for shared, _ in one.pairs]


def _count_axis(axes: Any, counts: Sequence[int]) -> dict[int, int]:
    """Where each number of engines stands: one after the other, whatever lies between them."""
    place = {count: x for x, count in enumerate(sorted(set(counts)))}
    axes.set_xticks(range(len(place)), [str(count) for count in place])
    axes.set_xlim(-SIDE, len(place) - 1 + SIDE)
    return place


def _draw_dots(axes: Any, one: ReplicaSeries, dots: Sequence[Dot], place: Mapping[int, int]) -> None:
    placed = [(place[count] + one.beside, value, degraded) for count, value, degraded in dots]
    draw_line(axes, one.sweep, placed, one.name, one.stroke)


def _finished(name: str, figure: Any, series: Sequence[ReplicaSeries]) -> Picture:
    last = figure.axes[-1]
    if any(axes.containers for axes in figure.axes):
        last.errorbar([], [], [], color=GREY, elinewidth=1, capsize=2, fmt="none", label="95 % interval")
    if any(_doubtful(*pair) for one in series for pair in one.pairs):
        tell_degraded(last)
    key_below(figure)
    return Picture(name, figure)
