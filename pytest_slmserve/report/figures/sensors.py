"""The pictures of what the sensors saw: how much of the GPU a load uses, what binds it, what a token costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.claims.gpu_claims import NO_DECODING, NO_PROFILE, at_table_1
from pytest_slmserve.analysis.claims.table1 import PUBLISHED
from pytest_slmserve.analysis.metrics.step_time import REACHABLE_DRAM, REACHABLE_TENSOR, idle_share
from pytest_slmserve.analysis.metrics.summary import Summary
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.report.figures.drawing import (
    GREY,
    Picture,
    Shown,
    draw_line,
    dress,
    key_below,
    load_axis,
    panels,
    share_axis,
    tell_degraded,
)
from pytest_slmserve.report.numbers import figure as digits

HATCHES = ("", "////", "....", "xxxx")  # of power limits, from the highest
BAR = 0.7  # width of a model's bars, where 1 is the distance between two models

Ratio = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity, as a share. most: its largest reading in a window. reach: what it reads where its unit can do no
    more."""

    label: str
    mean: Ratio
    most: Ratio | None = None
    reach: float | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Repeats of one model at its largest batch of table 1, under one power limit in whole watts."""

    sweep: Shown
    concurrency: int
    limit_w: int | None
    power_w: tuple[float, ...]
    token_j: tuple[float, ...]
    degraded: bool


def sm_per_batch(sweeps: Sequence[Shown]) -> Picture:
    """SM active and SM occupancy, mean and largest, against the load (arXiv:2404.03353, figure 3)."""
    active = Panel("SMs with work (SM active)", attrgetter("sm_active"), attrgetter("sm_active_max"))
    warps = Panel("resident warps (SM occupancy)", attrgetter("sm_occupancy"), attrgetter("sm_occupancy_max"))
    return _against_load("sm-per-batch", sweeps, _known([active, warps], sweeps))


def memory_bound(sweeps: Sequence[Shown]) -> Picture:
    """DRAM and tensor cores against the load, each with what it can reach, and the time in which no kernel ran."""
    units = _known(_units("dram_active", "tensor_active"), sweeps)
    idle = _known([Panel("no kernel ran", _idle)], sweeps)
    return _against_load("memory-bound", sweeps, [*units, *idle] if units else [])


def decoding(sweeps: Sequence[Shown]) -> Picture:
    """DRAM and tensor cores against the load while no prompt is processed (arXiv:2503.08311)."""
    return _against_load("decoding", sweeps, _known(_units("decode_dram", "decode_tensor"), sweeps), NO_DECODING)


def utilisation(sweeps: Sequence[Shown]) -> Picture:
    """Throughput against GPU utilisation, and against SM active (arXiv:2404.03353, figure 8): the one is at its end
    where the other still grows. A model of which one load alone is known is left out."""
    util = Panel("GPU utilisation (some kernel ran)", attrgetter("gpu_util"))
    several = [sweep for sweep in sweeps if len(_points(util.mean, sweep)) > 1]
    if not several:
        return Picture("utilisation", None, "GPU utilisation is not known at two loads of any model")
    known = [util, *_known([Panel("SMs with work (SM active)", attrgetter("sm_active"))], several)]
    figure, places = panels(len(known), several, share_y=True)
    for axes, panel in zip(places, known):
        dress(axes, panel.label)
        for sweep in several:
            _draw_throughput(axes, panel, sweep)
        share_axis(axes, axes.xaxis)
    share_axis(places[0], places[0].yaxis)
    places[0].set_ylabel("throughput, of each model's largest")
    _tell_degraded(places[0], several)
    key_below(figure)
    return Picture("utilisation", figure)


def energy_per_token(sweeps: Sequence[Shown]) -> Picture:
    """Power and energy per output token of each model at its largest batch of table 1 (arXiv:2404.03353, figure 4).

    Bars are means of the repeats, lines reach from the smallest to the largest. What was measured under different
    power limits is of different cards, so each limit has bars of its own.
    """
    spent = sorted((s for sweep in sweeps for s in _spent(sweep)), key=_place)
    if not spent:
        return Picture("energy-per-token", None, "power is not known of any model at its largest batch of table 1")
    figure, (power, energy) = panels(2, [s.sweep for s in spent])
    limits = sorted({s.limit_w for s in spent}, key=_descending)
    for axes, label, values in (
        (power, "power, W", attrgetter("power_w")),
        (energy, "energy per output token, J", attrgetter("token_j")),
    ):
        dress(axes, "requests in flight, and model", label)
        _draw_bars(axes, spent, values, limits)
    key_below(figure, _limit_patches(limits))
    return Picture("energy-per-token", figure)


# Against the load


def _units(dram: str, tensor: str) -> list[Panel]:
    return [
        Panel("DRAM active", attrgetter(dram), reach=REACHABLE_DRAM),
        Panel("tensor cores active", attrgetter(tensor), reach=REACHABLE_TENSOR),
    ]


def _against_load(name: str, sweeps: Sequence[Shown], known: Sequence[Panel], unknown: str = NO_PROFILE) -> Picture:
    if not known:
        return Picture(name, None, unknown)
    seen = [sweep for sweep in sweeps if any(_points(panel.mean, sweep) for panel in known)]
    figure, places = panels(len(known), seen, share_y=True)
    for axes, panel in zip(places, known):
        dress(axes, "requests in flight")
        axes.set_title(panel.label, fontsize=10, loc="left")
        for sweep in seen:
            _draw_panel(axes, panel, sweep)
        load_axis(axes, seen)
    share_axis(places[0], places[0].yaxis)
    _tell_strokes(places, known)
    _tell_degraded(places[-1], seen)
    key_below(figure)
    return Picture(name, figure)


def _known(wanted: Sequence[Panel], sweeps: Sequence[Shown]) -> list[Panel]:
    return [panel for panel in wanted if any(_points(panel.mean, sweep) for sweep in sweeps)]


def _points(value: Ratio, sweep: Shown) -> list[tuple[Point, float]]:
    """Valid points at which it is known."""
    pairs = ((point, value(point)) for point in sweep.curve.valid)
    return [(point, share) for point, share in pairs if share is not None and math.isfinite(share)]


def _idle(point: Point) -> float | None:
    return idle_share(point.engine_active)


def _draw_panel(axes: Any, panel: Panel, sweep: Shown) -> None:
    """Means joined; the largest readings dashed."""
    seen = _points(panel.mean, sweep)
    draw_line(axes, sweep, [(p.concurrency, share, bool(p.degraded)) for p, share in seen])
    if panel.most and (most := _points(panel.most, sweep)):
        dashed = {"color": sweep.colour, "linestyle": "--", "linewidth": 0.8, "marker": "_", "markersize": 4}
        axes.plot([p.concurrency for p, _ in most], [share for _, share in most], **dashed)


def _tell_strokes(places: Sequence[Any], known: Sequence[Panel]) -> None:
    """Once, in grey."""
    for axes, panel in zip(places, known):
        if panel.reach is not None:
            axes.axhline(panel.reach, color=GREY, linewidth=0.8, linestyle=":", label="what it can reach")
    if any(panel.most for panel in known):
        places[-1].plot([], [], "o-", color=GREY, markersize=4, linewidth=1, label="mean")
        places[-1].plot([], [], "--", color=GREY, linewidth=0.8, marker="_", label="max")


def _tell_degraded(axes: Any, sweeps: Sequence[Shown]) -> None:
    if any(point.degraded for sweep in sweeps for point in sweep.curve.valid):
        tell_degraded(axes)


# Throughput


def _draw_throughput(axes: Any, panel: Panel, sweep: Shown) -> None:
    """Joined in the order of the loads."""
    most = max(_throughput(point) for point in sweep.curve.valid)
    known = _points(panel.mean, sweep)
    draw_line(axes, sweep, [(used, _throughput(p) / most, bool(p.degraded)) for p, used in known])


def _throughput(point: Point) -> float:
    """Output tokens/s: valid points have some."""
    return fmean(point.repeats)


# Energy


def _spent(sweep: Shown) -> Iterator[Spent]:
    """One for each power limit."""
    point = at_table_1(sweep.curve)
    if point is None:
        return
    known = [s for s in point.each if s.power_w is not None and s.energy_per_token_j is not None]
    for limit, group in groupby(sorted(known, key=lambda s: _descending(_limit(s))), key=_limit):
        pairs = [(s.power_w or 0.0, s.energy_per_token_j or 0.0) for s in group]
        power, energy = zip(*pairs)
        yield Spent(sweep, point.concurrency, limit, power, energy, bool(point.degraded))


def _limit(summary: Summary) -> int | None:
    return None if summary.power_limit_w is None else round(summary.power_limit_w)


def _descending(limit: int | None) -> int:
    return -(limit or 0)


def _place(spent: Spent) -> tuple[int, str]:
    """From the smallest model on, sweeps of one model side by side."""
    return list(PUBLISHED).index(spent.sweep.curve.subject), spent.sweep.name


def _draw_bars(
    axes: Any, spent: Sequence[Spent], values: Callable[[Spent], Sequence[float]], limits: Sequence[int | None]
) -> None:
    """A group of bars for each model, one for each limit; the mean is written above."""
    groups = [list(group) for _, group in groupby(spent, key=lambda s: s.sweep.name)]
    width = BAR / max(map(len, groups))
    for place, group in enumerate(groups):
        for number, one in enumerate(group):
            x = place + (number - (len(group) - 1) / 2) * width
            _draw_bar(axes, x, width, values(one), one.sweep.colour, HATCHES[limits.index(one.limit_w) % len(HATCHES)])
    axes.set_xticks(range(len(groups)), [_tick(group[0]) for group in groups], fontsize=8)
    axes.grid(False, axis="x")
    axes.margins(y=0.16)


def _tick(spent: Spent) -> str:
    """Narrow, since bars stand close together."""
    words = f"{spent.concurrency} {spent.sweep.name}{' degraded' if spent.degraded else ''}"
    return words.replace(",", "").replace(" ", "\n")


def _draw_bar(axes: Any, x: float, width: float, values: Sequence[float], colour: str, hatch: str) -> None:
    mean, largest = fmean(values), max(values)
    axes.bar(x, mean, 0.92 * width, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    if len(values) > 1:
        ends = [[mean - min(values)], [largest - mean]]
        axes.errorbar(x, mean, yerr=ends, color=GREY, linewidth=1, capsize=3, label="smallest to largest repeat")
    place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(digits(mean), (x, largest), fontsize=8, color=GREY, rotation=0 if width == BAR else 90, **place)


def _limit_patches(limits: Sequence[int | None]) -> list[Any]:
    from matplotlib.patches import Patch

    names = ["power limit not known" if limit is None else f"power limit {limit} W" for limit in limits]
    return [
        Patch(facecolor=GREY, edgecolor="white", linewidth=0, hatch=HATCHES[number % len(HATCHES)], label=name)
        for number, name in enumerate(names)
    ]
