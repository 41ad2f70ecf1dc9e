"""The pictures of what the sensors saw: how much of the GPU a load uses, what binds it, what a token costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from textwrap import fill
from typing import Any

from pytest_slmserve.analysis.claims.claim import PUBLISHED
from pytest_slmserve.analysis.claims.gpu_claims import NO_DECODING, NO_PROFILE, at_table_1
from pytest_slmserve.analysis.metrics.roofline import REACHABLE_DRAM, REACHABLE_TENSOR, idle_share
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.report.figures import drawing
from pytest_slmserve.report.text_table import figure as digits

HATCHES = ("", "////", "....", "xxxx")  # of power limits, from the highest
UPRIGHT_LETTERS = 36  # of a line of a bar's name, where names side by side would overlap
BAR = 0.7  # width of a model's bars, where 1 is the distance between two models
BARE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind a number, so that no line crosses it

Ratio = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class Share:
    """Quantity from 0 to 100 %. most: its largest reading in a window. reach: what its unit reads at its end."""

    label: str
    mean: Ratio
    most: Ratio | None = None
    reach: float | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Repeats of one model at its largest batch of table 1, under one power limit in whole watts."""

    sweep: drawing.Shown
    concurrency: int
    limit_w: int | None
    power_w: tuple[float, ...]
    token_j: tuple[float, ...]
    degraded: bool


def sm_per_batch(sweeps: Sequence[drawing.Shown]) -> drawing.Picture:
    """SM active and SM occupancy, mean and largest, against the load (arXiv:2404.03353, figure 3)."""
    active = Share("SMs with work (SM active)", attrgetter("sm_active"), attrgetter("sm_active_max"))
    warps = Share("resident warps (SM occupancy)", attrgetter("sm_occupancy"), attrgetter("sm_occupancy_max"))
    return _against_load("sm-per-batch", sweeps, _known([active, warps], sweeps))


def memory_bound(sweeps: Sequence[drawing.Shown]) -> drawing.Picture:
    """DRAM and tensor cores against the load, each with what it can reach, and the time in which no kernel ran."""
    units = _known(_units("dram_active", "tensor_active"), sweeps)
    idle = _known([Share("no kernel ran", lambda point: idle_share(point.engine_active))], sweeps)
    return _against_load("memory-bound", sweeps, [*units, *idle] if units else [])


def decoding(sweeps: Sequence[drawing.Shown]) -> drawing.Picture:
    """DRAM and tensor cores against the load while no prompt is processed (arXiv:2503.08311)."""
    return _against_load("decoding", sweeps, _known(_units("decode_dram", "decode_tensor"), sweeps), NO_DECODING)


def utilisation(sweeps: Sequence[drawing.Shown]) -> drawing.Picture:
    """Throughput against GPU utilisation, and against SM active (arXiv:2404.03353, figure 8): the one is at its end
    where the other still grows. A model of which one load alone is known is left out."""
    util = Share("GPU utilisation (some kernel ran)", attrgetter("gpu_util"))
    several = [sweep for sweep in sweeps if len(_points(util.mean, sweep)) > 1]
    if not several:
        return drawing.Picture("utilisation", None, "GPU utilisation is not known at two loads of any model")
    known = [util, *_known([Share("SMs with work (SM active)", attrgetter("sm_active"))], several)]

    def panel(used: Share) -> drawing.Panel:
        def finish(axes: Any) -> None:
            drawing.share_axis(axes, axes.xaxis)
            drawing.share_axis(axes, axes.yaxis)
            drawing.label_loads(  # every other load, from the largest down
                axes,
                (
                    (x, share_of_most(p, sweep), p.concurrency, sweep.colour)
                    for sweep in several
                    for p, x in _points(used.mean, sweep)[::-2]
                ),
            )

        lines = [  # in the order of the loads; valid points have some output tokens/s
            sweep.line([(x, share_of_most(p, sweep), bool(p.degraded)) for p, x in _points(used.mean, sweep)])
            for sweep in several
        ]
        return drawing.Panel(lines, finish, used.label, "share of the most tokens/s (numbers: in flight)")

    drawn = [panel(used) for used in known]
    return drawing.picture("utilisation", [sweep.origin for sweep in several], drawn, share_y=True)


def share_of_most(point: Point, sweep: drawing.Shown) -> float:
    """Throughput of a point over that of the sweep's fastest."""
    return fmean(point.repeats) / max(fmean(each.repeats) for each in sweep.curve.valid)


def energy_per_token(sweeps: Sequence[drawing.Shown]) -> drawing.Picture:
    """Power and energy per output token of each model at its largest batch of table 1 (arXiv:2404.03353, figure 4).

    Bars are means of the repeats, lines reach from the smallest to the largest. What was measured under different
    power limits is of different cards, so each limit has bars of its own.
    """

    def place(spent: Spent) -> tuple[int, str]:  # from the smallest model on, sweeps of one model together
        return list(PUBLISHED).index(spent.sweep.curve.subject), spent.sweep.name

    spent = sorted((s for sweep in sweeps for s in _spent(sweep)), key=place)
    if not spent:
        return drawing.Picture(
            "energy-per-token", None, "power is not known of any model at its largest batch of table 1"
        )
    figure, (power, energy) = drawing.panels([s.sweep.origin for s in spent], 2)
    limits = sorted({s.limit_w for s in spent}, key=_descending)
    for axes, label, values in (
        (power, "power, W", attrgetter("power_w")),
        (energy, "energy per output token, J", attrgetter("token_j")),
    ):
        drawing.dress(axes, "requests in flight, and model", label)
        _draw_bars(axes, spent, values, limits)
    longest = max(power.get_xticklabels(), key=lambda name: name.get_window_extent().height)
    drawing.make_room(figure, longest, drawing.FOUR_ROWS)
    if len(limits) == 1 and limits[0] is not None:
        power.axhline(limits[0], color=drawing.GREY, linewidth=0.8, linestyle=":", label=f"power limit {limits[0]} W")
    drawing.key_below(figure, _limit_patches(limits) if len(limits) > 1 else ())
    return drawing.Picture("energy-per-token", figure)


def _units(dram: str, tensor: str) -> list[Share]:
    return [
        Share("DRAM active", attrgetter(dram), reach=REACHABLE_DRAM),
        Share("tensor cores active", attrgetter(tensor), reach=REACHABLE_TENSOR),
    ]


def _against_load(
    name: str, sweeps: Sequence[drawing.Shown], known: Sequence[Share], unknown: str = NO_PROFILE
) -> drawing.Picture:
    if not known:
        return drawing.Picture(name, None, unknown)
    seen = [sweep for sweep in sweeps if any(_points(share.mean, sweep) for share in known)]
    drawn = [_by_load(share, seen) for share in known]
    return drawing.picture(name, [sweep.origin for sweep in seen], drawn, share_y=True)


def _by_load(share: Share, sweeps: Sequence[drawing.Shown]) -> drawing.Panel:
    """Means joined; the largest readings dashed."""

    def finish(axes: Any) -> None:
        drawing.load_axis(axes, sweeps)
        drawing.share_axis(axes, axes.yaxis)
        if share.reach is not None:
            axes.axhline(share.reach, color=drawing.GREY, linewidth=0.8, linestyle=":", label="what it can reach")
        if share.most and axes.get_subplotspec().is_last_col():
            axes.plot([], [], "o-", color=drawing.GREY, markersize=4, linewidth=1, label="mean")
            axes.plot([], [], "--", color=drawing.GREY, linewidth=0.8, marker="_", label="max")

    lines = []
    for sweep in sweeps:
        means = [(p.concurrency, value, bool(p.degraded)) for p, value in _points(share.mean, sweep)]
        lines.append(sweep.line(means))
        if share.most and (most := _points(share.most, sweep)):
            dots = [(p.concurrency, value, False) for p, value in most]
            lines.append(drawing.Series("", sweep.colour, "_", dots, "--", width=0.8))
    return drawing.Panel(lines, finish, "requests in flight", title=share.label)


def _known(wanted: Sequence[Share], sweeps: Sequence[drawing.Shown]) -> list[Share]:
    return [share for share in wanted if any(_points(share.mean, sweep) for sweep in sweeps)]


def _points(value: Ratio, sweep: drawing.Shown) -> list[tuple[Point, float]]:
    """Valid points at which it is known."""
    pairs = ((point, value(point)) for point in sweep.curve.valid)
    return [(point, share) for point, share in pairs if share is not None and math.isfinite(share)]


def _spent(sweep: drawing.Shown) -> Iterator[Spent]:
    """One for each power limit."""
    point = at_table_1(sweep.curve)
    if point is None:
        return
    known = [s for s in point.each if s.power_w is not None and s.energy_per_token_j is not None]
    watts = grouped(known, lambda s: None if s.power_limit_w is None else round(s.power_limit_w))
    for limit in sorted(watts, key=_descending):
        power, energy = zip(*((s.power_w or 0.0, s.energy_per_token_j or 0.0) for s in watts[limit]))
        yield Spent(sweep, point.concurrency, limit, power, energy, bool(point.degraded))


def _descending(limit: int | None) -> int:
    return -(limit or 0)


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
    firsts = [group[0] for group in groups]
    names = [f"{s.concurrency} {s.sweep.name}{' degraded' if s.degraded else ''}" for s in firsts]
    letters = max(1, 48 // len(names))  # that stand side by side below a group
    upright = max(len(word) for name in names for word in name.split()) > 1.5 * letters
    lines = [fill(name, UPRIGHT_LETTERS if upright else letters, break_long_words=False) for name in names]
    axes.set_xticks(range(len(groups)), lines, fontsize=8, rotation=90 if upright else 0)
    axes.grid(False, axis="x")
    axes.margins(y=0.16)


def _draw_bar(axes: Any, x: float, width: float, values: Sequence[float], colour: str, hatch: str) -> None:
    mean, largest = fmean(values), max(values)
    axes.bar(x, mean, 0.92 * width, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    if len(values) > 1:
        ends = [[mean - min(values)], [largest - mean]]
        axes.errorbar(
            x, mean, yerr=ends, color=drawing.GREY, linewidth=1, capsize=3, label="smallest to largest repeat"
        )
    place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(
        digits(mean),
        (x, largest),
        fontsize=8,
        color=drawing.GREY,
        rotation=0 if width == BAR else 90,
        bbox=BARE,
        **place,
    )


def _limit_patches(limits: Sequence[int | None]) -> list[Any]:
    from matplotlib.patches import Patch

    names = ["power limit not known" if limit is None else f"power limit {limit} W" for limit in limits]
    return [
        Patch(facecolor=drawing.GREY, edgecolor="white", linewidth=0, hatch=HATCHES[number % len(HATCHES)], label=name)
        for number, name in enumerate(names)
    ]
