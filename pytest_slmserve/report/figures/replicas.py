"""The pictures of replicas, each beside one engine alone under the load that all of them had together, and of several
GPUs.

What shares the device in one way, of one model under one load, is a line over the number of engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any, Literal

from pytest_slmserve.analysis.compare.deployments import Deployment, compared, deployments, on_several_gpus
from pytest_slmserve.analysis.compare.deployments import PairReplicas as Pair
from pytest_slmserve.analysis.points import Point, ReplicaPoint, figure_ratio, ratio
from pytest_slmserve.analysis.stats.estimates import Interval, grouped
from pytest_slmserve.report.figures import drawing
from pytest_slmserve.schema.errors import Sharing

TITLES: dict[Sharing, str] = {
    "time-slicing": "time slicing",
    "mps": "MPS",
    "mig": "MIG",
    "gpus": "a GPU each",
    "urls": "a URL each",
}
APART = ("gpus", "urls")  # ways in which replicas share no GPU, as far as is known
STROKES = ("-", "--", ":", "-.")  # of one model's lines
SPREAD = 0.4  # what stands side by side at one number of engines, where 1 is the distance between two numbers
SIDE = 0.5  # free space left and right of all
LEAST = (0.9, 1.1)  # what an axis of ratios shows at least, so that noise does not look like much
GAIN = "throughput over one engine's"
TURNS = "bound of engines that take turns"
ALONE = "one engine under the same load"
LINE_AT_1 = {"color": drawing.GREY, "linewidth": 0.8, "linestyle": ":", "label": ALONE}
INCOMPARABLE = "of no model replicas and one engine alone are valid under the same load"

NAMES = ("replica-gain", "replica-busy", "replica-latency", "replica-device")
Ratio = Callable[[Pair], Interval | None]
Value = tuple[int, Interval, bool]  # number of engines, what is seen of them, degraded?
OVER_ALL = "one engine over all"


@dataclass(frozen=True, slots=True)
class Line:
    """One model under one load, with all that is alike but for the number of replicas and the way of sharing. beside:
    how far right of a number of engines its dots stand."""

    sweep: drawing.Shown
    name: str
    stroke: str
    beside: float
    pairs: tuple[Pair, ...]

    def of(self, sharing: Sharing) -> list[Pair]:
        return sorted((p for p in self.pairs if p[0].sharing == sharing), key=lambda pair: pair[0].count)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Figure of the device. kind: a share from 0 to 100 %, an amount, or relative to what it is of one engine."""

    label: str
    of: str
    kind: Literal["share", "amount", "relative"] = "share"


BUSY, UTIL = Quantity("busy (some kernel ran)", "engine_active"), Quantity("GPU utilisation", "gpu_util")
DEVICE = (
    Quantity("SM active", "sm_active"),
    Quantity("DRAM active", "dram_active"),
    Quantity("power, W", "power_w", "amount"),
    Quantity("energy per token\nover one engine's", "energy_per_token_j", "relative"),
)


def replica_pictures(sweeps: Sequence[drawing.Shown]) -> list[drawing.Picture]:
    """None of them where no replicas of one model were measured."""
    if not any(sweep.curve.shared for sweep in sweeps):
        return []
    lines = _lines_of(sweeps)
    if not lines:
        return [drawing.Picture(name, None, INCOMPARABLE) for name in NAMES]
    return [_replica_gain(lines), _replica_busy(lines), _replica_latency(lines), _replica_device(lines)]


def _replica_gain(lines: Sequence[Line]) -> drawing.Picture:
    """Throughput over that of one engine against the number of replicas (arXiv:2404.03353, figure 5)."""
    drawn = [_ratio_panel(lines, sharing, _gain, [_gain], GAIN, TITLES[sharing]) for sharing in _ways(lines)]
    return drawing.picture("replica-gain", _hosts(lines), drawn, share_y=True)


def _gain(pair: Pair) -> Interval:
    return ratio(*pair)


def _replica_busy(lines: Sequence[Line]) -> drawing.Picture:
    """The same against the time in which one engine runs a kernel, by model, whatever the load. Engines that take turns
    on one GPU gain at most one over it."""
    on_one = [replace(line, pairs=tuple(pair for pair in line.pairs if pair[0].sharing not in APART)) for line in lines]
    lines = [line for line in on_one if line.pairs]
    pairs = list(chain.from_iterable(line.pairs for line in lines))
    if not pairs:
        return drawing.Picture("replica-busy", None, "no replicas shared a GPU")
    busy = BUSY.of if any(alone.engine_active for _, alone in pairs) else UTIL.of
    if not any(getattr(alone, busy) for _, alone in pairs):
        return drawing.Picture("replica-busy", None, "no sensor told when one engine runs a kernel")

    def finish(axes: Any) -> None:
        shares = [each / 100 for each in range(1, 101)]
        axes.plot(shares, [1 / share for share in shares], "--", color=drawing.GREY, linewidth=0.8, label=TURNS)
        axes.axhline(1, **LINE_AT_1)
        drawing.share_axis(axes, axes.xaxis)
        axes.set_xticks([0.25, 0.5, 0.75, 1.0])  # without 0 %, which would touch the 100 % of the panel before
        _reach(axes, lines, [_gain])

    def series(model: str, of_model: Sequence[Line], sharing: Sharing) -> drawing.Series:
        shown = [pair for line in of_model for pair in line.of(sharing) if getattr(pair[1], busy)]
        seen = [(getattr(pair[1], busy), _gain(pair), any(side.degraded for side in pair)) for pair in shown]
        return _series(of_model[0].sweep, model, seen, "")

    by_model = grouped(lines, lambda line: line.sweep.curve.subject)
    drawn = [
        drawing.Panel(
            [series(model, of_model, sharing) for model, of_model in by_model.items()],
            finish,
            "time in which one engine runs a kernel",
            GAIN,
            TITLES[sharing],
        )
        for sharing in _ways(lines)
    ]
    return drawing.picture("replica-busy", _hosts(lines), drawn, share_y=True)


def _replica_latency(lines: Sequence[Line]) -> drawing.Picture:
    """The largest of the replicas' mean E2E, and p99 of all, over one engine's (means: arXiv:2404.03353, figure 5)."""
    ratios: dict[str, Ratio] = {
        "largest mean E2E over one engine's": lambda pair: figure_ratio(pair[1], pair[0], "largest_e2e_s"),
        "99th percentile of E2E over one engine's": lambda pair: figure_ratio(pair[1], pair[0], "e2e_p99_s"),
    }
    known = {name: of for name, of in ratios.items() if any(_ratios(line.pairs, of) for line in lines)}
    if not known:
        return drawing.Picture("replica-latency", None, "no request ended in a window")
    ways, shown = _ways(lines), list(known.values())
    drawn = [_ratio_panel(lines, way, of, shown, TITLES[way], name) for way in ways for name, of in known.items()]
    return drawing.picture("replica-latency", _hosts(lines), drawn, len(ways), share_y=True)


def _replica_device(lines: Sequence[Line]) -> drawing.Picture:
    """Picture of the device's use by one engine and by each number of replicas (arXiv:2404.03353, figure 7). Busy comes
    from the profiling counters where they are known, else from NVML's samples."""
    busy = BUSY if any(_values(BUSY, line.pairs) for line in lines) else UTIL
    known = [each for each in (busy, *DEVICE) if any(_values(each, line.pairs) for line in lines)]
    if not known:
        return drawing.Picture("replica-device", None, "no sensor told what the device did while replicas ran")
    ways = _ways(lines)
    drawn = [_device_panel(lines, way, each) for way in ways for each in known]
    return drawing.picture("replica-device", _hosts(lines), drawn, len(ways), share_y="col")


def _hosts(lines: Sequence[Line]) -> list[str]:
    return [line.sweep.origin for line in lines]


def _lines_of(sweeps: Sequence[drawing.Shown]) -> list[Line]:
    """Lines of each sweep, side by side."""

    def setting(pair: Pair) -> str:
        pinned = ", pinned" if pair[0].pinned else ""
        part = f", {pair[0].thread_percentage} % of the SMs each" if pair[0].thread_percentage else ""
        return f"{pair[0].concurrency} in flight{pinned}{part}"

    found: list[Line] = []
    for sweep in sweeps:
        alike = grouped(chain.from_iterable(compared(sweep.curve, sharing) for sharing in TITLES), setting)
        for (name, pairs), stroke in zip(alike.items(), cycle(STROKES)):
            found.append(Line(sweep, f"{sweep.name}, {name}", stroke, 0.0, tuple(pairs)))
    step = SPREAD / len(found) if found else 0.0
    return [replace(line, beside=(i - (len(found) - 1) / 2) * step) for i, line in enumerate(found)]


def _ways(lines: Sequence[Line]) -> list[Sharing]:
    return [sharing for sharing in TITLES if any(line.of(sharing) for line in lines)]


def _panel(
    lines: Sequence[Line],
    counts: Sequence[int],
    values: Callable[[Line], list[Value]],
    finish: Callable[[Any], None],
    **texts: str,
) -> drawing.Panel:
    """Lines over the numbers of engines, which stand one after the other, whatever lies between them."""
    found = {*counts, *(pair[0].count for line in lines for pair in line.pairs)}
    place = {count: x for x, count in enumerate(sorted(found))}

    def finished(axes: Any) -> None:
        axes.set_xticks(range(len(place)), [str(count) for count in place])
        axes.set_xlim(-SIDE, len(place) - 1 + SIDE)
        finish(axes)

    drawn = []
    for line in lines:
        seen = [(place[count] + line.beside, value, doubt) for count, value, doubt in values(line)]
        drawn.append(_series(line.sweep, line.name, seen, line.stroke))
    return drawing.Panel(drawn, finished, **texts)


def _series(
    sweep: drawing.Shown, name: str, seen: Sequence[tuple[float, Interval, bool]], stroke: str
) -> drawing.Series:
    """Dots with their intervals. seen: of each its x, the value, and whether it is degraded."""
    dots, intervals = [(x, value.value, doubt) for x, value, doubt in seen], [(x, value) for x, value, _ in seen]
    return sweep.line(dots, name, stroke=stroke, intervals=intervals)


def _ratios(pairs: Sequence[Pair], of: Ratio) -> list[Value]:
    seen = ((pair, of(pair)) for pair in pairs)
    return [
        (shared.count, ratio, bool(shared.degraded or alone.degraded))
        for (shared, alone), ratio in seen
        if ratio and math.isfinite(ratio.value)
    ]


def _ratio_panel(
    lines: Sequence[Line], sharing: Sharing, of: Ratio, all_drawn: Sequence[Ratio], y: str, title: str
) -> drawing.Panel:
    """Dots with their intervals, and a line at 1. all_drawn: ratios of all panels, which share an axis."""

    def finish(axes: Any) -> None:
        axes.axhline(1, **LINE_AT_1)
        _reach(axes, lines, all_drawn)

    return _panel(lines, [], lambda line: _ratios(line.of(sharing), of), finish, x="replicas", y=y, title=title)


def _reach(axes: Any, lines: Sequence[Line], drawn: Sequence[Ratio]) -> None:
    """Sets the limits of the axis that all panels share, to the ends of the intervals. An interval counts only from
    half of its value to twice it: what was repeated once has an interval of any width."""
    ratios = [ratio for line in lines for of in drawn for _, ratio, _ in _ratios(line.pairs, of)]
    lows = (max(r.value / 2, r.value if r.low is None else r.low) for r in ratios)
    highs = (min(r.value * 2, r.value if r.high is None else r.high) for r in ratios)
    low, high = min(LEAST[0], *lows), max(LEAST[1], *highs)
    free = 0.04 * (high - low)
    axes.set_ylim(low - free, high + free)


def _values(quantity: Quantity, pairs: Sequence[Pair]) -> list[Value]:
    """Values of one engine alone and of its replicas; nothing where it is not known of any replicas."""

    def known(point: Point | ReplicaPoint) -> float | None:
        value = getattr(point, quantity.of)
        return value if value is not None and math.isfinite(value) else None

    replicas = [(shared.count, v, bool(shared.degraded)) for shared, _ in pairs if (v := known(shared)) is not None]
    first = known(pairs[0][1]) if replicas else None
    relative = quantity.kind == "relative"
    if not replicas or (relative and not first):
        return []
    alone = [] if first is None else [(1, first, bool(pairs[0][1].degraded))]
    return [(n, Interval(v / first if relative and first else v), doubt) for n, v, doubt in (*alone, *replicas)]


def _device_panel(lines: Sequence[Line], sharing: Sharing, quantity: Quantity) -> drawing.Panel:
    """Panel from 0 on, as what stands side by side is compared, and as far as any way of sharing needs."""

    def finish(axes: Any) -> None:
        if quantity.kind == "relative":
            axes.axhline(1, **LINE_AT_1)
        if quantity.kind == "share":
            drawing.share_axis(axes, axes.yaxis)
        else:
            most = max(seen.value for line in lines for _, seen, _ in _values(quantity, line.pairs))
            axes.set_ylim(0, max(LEAST[1], 1.06 * most))

    texts = {"x": "engines", "y": TITLES[sharing], "title": quantity.label}
    return _panel(lines, [1], lambda line: _values(quantity, line.of(sharing)), finish, **texts)


def gpus_pictures(known: Sequence[drawing.Shown]) -> list[drawing.Picture]:
    """One picture, where any model was served on several GPUs; points without a valid repeat are left out."""
    found = [one for one in known if on_several_gpus(one.curve)]
    # Colours in their order here: those of their curves on more GPUs, which are not drawn, are free.
    several = [drawing.Shown(one.curve, one.name, *drawing.look(i)) for i, one in enumerate(found)]
    return [drawing.picture("gpus", [one.origin for one in several], _panels(several))] if several else []


def _panels(several: Sequence[drawing.Shown]) -> list[drawing.Panel]:
    """What each number of GPUs serves, in all and of each GPU, and what the KV blocks of one engine serve; each under
    the load with the most tokens/s."""
    total, each, blocks = list[drawing.Series](), list[drawing.Series](), list[drawing.Series]()
    numbers = set[int]()
    for one in several:
        for (way, line), stroke in zip(_ways_to_deploy(deployments(one.curve)), cycle(STROKES)):
            name = f"{one.name.split(',')[0]}, {way}"
            seen = [(d.gpus, d.tokens_per_s, bool(d.served.degraded)) for d in line]
            total.append(one.line(seen, name, stroke=stroke))
            each.append(one.line([(gpus, rate / gpus, doubt) for gpus, rate, doubt in seen], name, stroke=stroke))
            numbers.update(d.gpus for d in line)
            if way == OVER_ALL:
                dots = [(d.kv_blocks, d.tokens_per_s, bool(d.served.degraded)) for d in line if d.kv_blocks]
                blocks.append(one.line(dots, name))

    def by_gpus(axes: Any) -> None:
        axes.set_xticks(sorted(numbers))
        drawing.decade_axis(axes, axes.yaxis)

    def by_blocks(axes: Any) -> None:
        drawing.log_axis(axes, axes.xaxis, base=2)
        drawing.decade_axis(axes, axes.yaxis)

    return [
        drawing.Panel(total, by_gpus, "GPUs", "most output tokens/s"),
        drawing.Panel(each, by_gpus, "GPUs", "most output tokens/s per GPU"),
        drawing.Panel(blocks, by_blocks, "KV blocks of the engine", "most output tokens/s"),
    ]


def _ways_to_deploy(found: Sequence[Deployment]) -> Iterator[tuple[str, list[Deployment]]]:
    """One engine over all GPUs, and replicas with GPUs of their own, which begin with one alone: of each number of GPUs
    what serves most."""
    alone = [one for one in found if one.sharing is None]
    replicas = grouped((one for one in found if one.sharing == "gpus"), lambda one: one.tensor_parallel_size)
    ways = {OVER_ALL: alone}
    for gpus, sets in sorted(replicas.items()):
        first = [one for one in alone if one.gpus == gpus]
        ways["a replica on each" if gpus == 1 else f"a replica on each {gpus}"] = [*first, *sets]
    for way, line in ways.items():
        most = [max(same, key=lambda d: d.tokens_per_s) for same in grouped(line, lambda d: d.gpus).values()]
        yield way, sorted(most, key=lambda d: d.gpus)
