"""Pictures of archives as PNG and SVG files: charts of `charts` with a title, a width, and the theme of the page.

Every picture is one or more panels. `vl-convert-python` draws them offline.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pytest_slmserve.analysis.claims import evidence
from pytest_slmserve.analysis.claims.evidence import NO_DECODING, NO_PROFILE, PUBLISHED, at_table_1
from pytest_slmserve.analysis.compare.deployments import PairReplicas as Pair
from pytest_slmserve.analysis.compare.deployments import compared, deployments, on_several_gpus
from pytest_slmserve.analysis.estimates import Interval, grouped
from pytest_slmserve.analysis.gate.launch_pairs import GATED, SHOWN, SIDES, Gated, nothing_counts, series_of
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM, REACHABLE_TENSOR, idle_share
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.metrics.window import Slo, delay_of, goodput_of, steps_of
from pytest_slmserve.analysis.points import CONTINUOUS, JobPoint, Point, figure_named, figure_ratio, ratio, summarize
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.report.gate import title
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.page.charts import IN_FLIGHT, TOKENS_PER_S, Spec, Values, axis, line_chart
from pytest_slmserve.report.points import rate_series, served_on
from pytest_slmserve.report.text_table import figure as digits
from pytest_slmserve.schema.errors import BadUsage, Sharing
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import OpenLoop, WorkloadReference

WIDTH, SCALE = 900, 2  # of a picture in pixels, and of its PNG
MARGIN = 90  # pixels of a panel's width that its axis takes
CONFIG: Spec = {  # the page's light theme
    "font": "DejaVu Sans, Arial, sans-serif",
    "view": {"stroke": None},
    "title": {"color": "#1b1f24", "subtitleColor": "#57606a", "fontSize": 15, "subtitleFontSize": 11, "offset": 14},
    "axis": {
        "labelColor": "#57606a",
        "titleColor": "#57606a",
        "gridColor": "#d8dee4",
        "domainColor": "#d8dee4",
        "tickColor": "#d8dee4",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
    "legend": {"labelColor": "#1b1f24", "titleColor": "#57606a", "labelFontSize": 12, "titleFontWeight": "normal"},
    "rule": {"color": "#57606a"},
    "text": {"color": "#57606a"},
    "tick": {"color": "#1b1f24"},
    "point": {"strokeWidth": 1.5},
}
ENOUGH = 4  # loads of a model whose throughput is shown relative to its largest
PARTS = ("p50", "p99")
SHARINGS: dict[Sharing, str] = {
    "time-slicing": "time slicing",
    "mps": "MPS",
    "mig": "MIG",
    "gpus": "a GPU each",
    "urls": "a URL each",
}
APART = ("gpus", "urls")  # ways in which replicas share no GPU, as far as is known
GAIN, RATE = "throughput over one engine's", "output_tokens_per_s"
REPLICA_PICTURES = ("replica-gain", "replica-busy", "replica-latency", "replica-device")
BATCHINGS = ("none", "static", "dynamic", CONTINUOUS)
Named = Sequence[tuple[str, Curve]]  # curves with their labels


class Gauge(NamedTuple):
    """A figure that a panel shows, by a field of a point.

    kind: How it is shown: as a share from 0 to 1, as it is, or over the figure of one engine, each ("relative") or
        under the same load ("ratio").
    largest: Field of the largest readings of a sensor.
    reach: What a sensor reads at the achievable peak.
    """

    heading: str
    field: str
    kind: Literal["share", "amount", "ratio", "relative"] = "share"
    largest: str = ""
    reach: float | None = None


SMS = (
    Gauge("SMs with work (SM active)", "sm_active", largest="sm_active_max"),
    Gauge("resident warps (SM occupancy)", "sm_occupancy", largest="sm_occupancy_max"),
)
UNITS = (
    Gauge("DRAM active", "dram_active", reach=REACHABLE_DRAM),
    Gauge("tensor cores active", "tensor_active", reach=REACHABLE_TENSOR),
    Gauge("no kernel ran", "engine_active"),
)
DECODING = (
    Gauge("DRAM active", "decode_dram", reach=REACHABLE_DRAM),
    Gauge("tensor cores active", "decode_tensor", reach=REACHABLE_TENSOR),
)


GAINS = (Gauge(GAIN, RATE, "ratio"),)
WAITS = (
    Gauge("largest mean E2E over one engine's", "largest_e2e_s", "ratio"),
    Gauge("99th percentile of E2E over one engine's", "e2e_p99_s", "ratio"),
)
BUSY = (
    Gauge("busy (some kernel ran)", "engine_active"),
    Gauge("GPU utilisation", "gpu_util"),
)
DEVICE = (
    Gauge("SM active", "sm_active"),
    Gauge("DRAM active", "dram_active"),
    Gauge("power, W", "power_w", "amount"),
    Gauge("energy per token over one engine's", "energy_per_token_j", "relative"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, named as its file. origins: device, release and lengths of the requests, for the title. panels: its
    charts, in rows of `columns`; none if it cannot be drawn, and why_not says what is missing."""

    name: str
    origins: tuple[str, ...] = ()
    panels: tuple[Spec, ...] = ()
    columns: int = 2
    why_not: str = ""


def pictures(
    curves: Sequence[Curve],
    jobs: Sequence[JobPoint] = (),
    at_rates: Sequence[Measurement] = (),
    slo: Slo | None = None,
) -> list[Picture]:
    """Return all pictures of the sweeps, replicas, jobs and loads at a rate, in the order of the documentation.

    Raises:
        BadUsage: There are curves only, and none of them has a valid point.
    """
    known = [curve for curve in curves if curve.valid or any(point.valid for point in curve.shared)]
    named = list(zip(labels(known), known))
    others = [
        *_replicas(named),
        *_several_gpus(named),
        *([rates_picture(at_rates, slo)] if at_rates else []),
        *_jobs([job for job in jobs if job.valid]),
    ]
    if not (known or others):
        problem = "there is no valid point to draw" if curves else "there is no sweep to draw"
        raise BadUsage(problem, "slmserve report prints what there is")
    sweeps = [(name, curve) for name, curve in named if curve.valid]
    if not sweeps:
        return others
    drawn = [Picture("sweeps", _origins(sweeps), (charts.throughputs(sweeps), charts.pareto(sweeps)))]
    shaped = [(name, curve) for name, curve in sweeps if len(curve.valid) >= ENOUGH]
    if len(shaped) > 1:
        rows: Values = []
        for name, curve in shaped:
            most = _most(curve)
            rows += charts.point_rows(curve.valid, "output_tokens_per_s", name, 1 / most, noise=False)
        y = charts.share_axis("throughput, of each model's largest")
        drawn.append(Picture("relative-throughput", _origins(shaped), (_over_load(shaped, rows, y),)))
    return [
        *drawn,
        _latency(sweeps, slo),
        _gauges("sm-per-batch", sweeps, SMS, NO_PROFILE),
        _energy(sweeps),
        _utilisation(sweeps),
        _gauges("memory-bound", sweeps, UNITS, NO_PROFILE),
        _gauges("decoding", sweeps, DECODING, NO_DECODING),
        *others,
    ]


def gate_pictures(gates: Sequence[Gated]) -> list[Picture]:
    """Return a picture for each gate: candidate over baseline of each endpoint, with its pairs and its margin."""
    often = Counter(gated.model for gated in gates)
    drawn = []
    for gated in gates:
        name = f"gate-{gated.model}" + (f"-{gated.gate}" if often[gated.model] > 1 else "")
        spec = charts.gate_forest(gated.gated, gated.shown, series_of((*GATED, *SHOWN), gated.pairs))
        if spec is None:
            drawn.append(Picture(name, why_not=nothing_counts(gated.dropped)))
            continue
        first = gated.pairs[0]
        before, after = (first.launch(side).measurements[0].environment for side in SIDES)
        compared_ = f"vLLM {after.vllm} against {before.vllm}" if before.vllm != after.vllm else f"vLLM {after.vllm}"
        drawn.append(Picture(name, (_origin(replace(before, vllm=None)), title(gated), compared_), (spec,)))
    return drawn


def save_picture(picture: Picture, path: Path) -> None:
    """Write a picture as the suffix of `path` says, PNG or SVG.

    Raises:
        BadUsage: vl-convert-python is not installed, the suffix is neither, or the file cannot be written.
    """
    try:
        import vl_convert
    except ImportError:
        raise BadUsage("a picture needs vl-convert-python", "pip install vl-convert-python") from None
    spec = json.dumps(whole_picture(picture))
    match path.suffix:
        case ".png":
            drawn: bytes = vl_convert.vegalite_to_png(spec, scale=SCALE)
        case ".svg":
            drawn = vl_convert.vegalite_to_svg(spec).encode()
        case suffix:
            raise BadUsage(f"{path}: no picture can be written in the format {suffix!r}", "a .png or .svg")
    try:
        path.write_bytes(drawn)
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "another path, in a folder that is there") from None


def whole_picture(picture: Picture) -> Spec:
    """Return one specification of all panels, 900 pixels wide, with title, legend and the theme of the page."""
    columns = min(picture.columns, len(picture.panels))
    panels = []
    for panel in picture.panels:
        height = max(panel["height"], 300) if columns > 1 else panel["height"]
        values = panel["data"].get("values", [])  # without a name, which all panels would share, and the values with it
        panels.append({**panel, "width": WIDTH // columns - MARGIN, "height": height, "data": {"values": values}})
    heading = {"text": picture.name.replace("-", " "), "subtitle": list(picture.origins), "anchor": "start"}
    resolve = {"scale": {"color": "shared", "shape": "shared", "strokeDash": "shared"}}
    spec: Spec = {"title": heading, "config": CONFIG, "background": "white", "padding": 12}
    return {**spec, "concat": panels, "columns": columns, "resolve": resolve, "spacing": 24}


def _origins(named: Iterable[tuple[str, Curve]]) -> tuple[str, ...]:
    """Return the origins of the curves, each once."""
    found = [_origin(c.environment, c.first.workload if c.first else None) for _, c in named]
    return tuple(dict.fromkeys(found))


def _origin(where: Environment | None, workload: WorkloadReference | None = None) -> str:
    """Return the device, the release of vLLM and the lengths of the requests, as far as they are known."""
    if where and where.platform == "simulated":
        return "SIMULATED, not measured on a device"
    if where is None or workload is None:
        return served_on(where)
    prompt, output = workload.mean_prompt_tokens, workload.mean_output_tokens
    return f"{served_on(where)}, {prompt:.0f} prompt and {output:.0f} output tokens"


def _most(curve: Curve) -> float:
    """Return the largest output tokens/s of a curve."""
    return max(fmean(each.repeats) for each in curve.valid)


def _over_load(named: Named, rows: Values, y: Spec, **more: Any) -> Spec:
    """Return a panel over the loads of all curves, in which each curve has the color of its place."""
    x = charts.load_axis(point.concurrency for _, curve in named for point in curve.valid)
    return line_chart(rows, x, y, [name for name, _ in named], **more)


def _latency_panels(latencies: Mapping[str, Values], x: Spec, names: Sequence[str], slo: Slo | None) -> list[Spec]:
    """Return a panel for each latency that is known, with its p50 and p99 in ms, and a line at its limit in the words
    of the SLO."""
    limits: dict[str, Values] = {}
    for (name, limit), text in zip(slo.bounds.items(), str(slo).split(",")) if slo else ():
        limits[name] = [{"y": 1e3 * limit, "text": text}]
    return [
        line_chart(rows, x, axis("y", f"{name.upper()}, ms", "log"), names, strokes=PARTS, rules=limits.get(name, ()))
        for name, rows in latencies.items()
        if rows
    ]


def _latency(sweeps: Named, slo: Slo | None) -> Picture:
    """p50 and p99 of TTFT and TPOT over the concurrency, of E2E too if the SLO limits it."""
    seen = [(name, c) for name, c in sweeps if sum(p.ttft_p50_s is not None for p in c.valid) > 1]
    if not seen:
        return Picture("latency", why_not="percentiles of TTFT are not known at two loads of any model")
    rows: dict[str, Values] = {"ttft": [], "tpot": [], **({"e2e": []} if slo and "e2e" in slo.bounds else {})}
    for latency, (name, curve), part in product(rows, seen, PARTS):
        rows[latency] += charts.point_rows(curve.valid, f"{latency}_{part}_s", name, 1e3, "ms", stroke=part)
    x = charts.load_axis(point.concurrency for _, curve in seen for point in curve.valid)
    panels = _latency_panels(rows, x, [name for name, _ in seen], slo)
    return Picture("latency", _origins(seen), tuple(panels))


def rates_picture(measurements: Sequence[Measurement], slo: Slo | None) -> Picture:
    """Requests served per second, and those within the SLO, over the rate sent; p50 and p99 of TTFT, TPOT and E2E. A
    ramp is a line by itself; loads that differ only in their rate are another."""
    groups = []
    for group in rate_series(measurements):
        loads = []
        for m in steps_of(group[0]) or group:
            found, delay = check(m), delay_of(m.run)
            if not found.problems and delay is not None:
                loads.append(
                    (delay.achieved_per_s, summarize(m), bool(found.degradations), goodput_of(m, slo) if slo else None)
                )
        if loads:
            groups.append((group[0], loads))
    if not groups:
        return Picture("rates", why_not="no load at a request rate is valid")
    facts = []
    for first, _ in groups:
        assert isinstance(first.load, OpenLoop)
        process = "" if first.load.steps else first.load.arrivals.partition(",")[0].replace("gamma", "burstiness")
        judged = f"each judged for {first.load.window_s:g} s after {first.load.settle_s:g} s"
        timing = "ramp" if first.load.steps else judged
        facts.append([short_name(first.spec.model), _origin(first.environment, first.workload), timing, process])
    differ = [True, *(len({*column} - {""}) > 1 for column in [*zip(*facts, strict=True)][1:])]
    names = [", ".join(fact for fact, told in zip(row, differ) if told and fact) for row in facts]
    x, within = axis("x", "requests/s sent"), f"good: {slo}"
    served: Values = []
    latencies: dict[str, Values] = {"ttft": [], "tpot": [], "e2e": []}
    for name, (_, loads) in zip(names, groups):
        for sent, summary, degraded, kept in loads:
            for stroke, rate in (("served", summary.requests_per_s), (within, kept.per_s if kept else None)):
                if rate is not None:
                    served.append(charts.interval_row(sent, Interval(rate), name, degraded) | {"stroke": stroke})
            for latency, part in product(latencies, PARTS):
                if (value := getattr(summary, f"{latency}_{part}_s")) is not None:
                    row = charts.interval_row(sent, Interval(1e3 * value), name, degraded)
                    latencies[latency].append(row | {"stroke": part})
    most = max(row["x"] for row in served)
    strokes = ("served", within) if slo else ("served",)
    equal: Values = [{"x": 0, "y": 0}, {"x": most, "y": most}]
    panels = [line_chart(served, x, axis("y", "requests/s"), names, strokes=strokes, guide=equal)]
    panels += _latency_panels(latencies, x, names, slo)
    origins = dict.fromkeys(_origin(first.environment, first.workload) for first, _ in groups)
    return Picture("rates", tuple(origins), tuple(panels))


def _gauges(name: str, sweeps: Named, gauges: Iterable[Gauge], unknown: str) -> Picture:
    """Shares from 0 to 100 % over the concurrency, a panel for each gauge that is known; its largest readings are
    dashed. The time without a kernel is shown only next to another gauge."""
    panels, seen = list[Spec](), dict[str, Curve]()
    for gauge in gauges:
        rows = []
        for series, curve in sweeps:
            mean = charts.point_rows(curve.valid, gauge.field, series, noise=False, stroke="mean")
            largest = charts.point_rows(curve.valid, gauge.largest, series, noise=False, stroke="max")
            if gauge.field == "engine_active":
                mean = [row | {"y": idle_share(row["y"])} for row in mean]
            rows += [*mean, *(row | {"hollow": False} for row in largest)]
        if rows and (panels or gauge.field != "engine_active"):
            there = {row["series"] for row in rows}
            seen |= {series: curve for series, curve in sweeps if series in there}
            rules = [{"y": gauge.reach, "text": "achievable peak"}] if gauge.reach else []
            strokes = ("mean", "max") if gauge.largest else ()
            panels.append(_over_load(sweeps, rows, charts.share_axis(gauge.heading), strokes=strokes, rules=rules))
    return Picture(name, _origins(seen.items()), tuple(panels)) if panels else Picture(name, why_not=unknown)


def _utilisation(sweeps: Named) -> Picture:
    """Throughput over GPU utilisation and over SM active (arXiv:2404.03353, figure 8): the first is at its end while
    the other still grows. A model with one known load is excluded."""
    several = [(name, c) for name, c in sweeps if sum(p.gpu_util is not None for p in c.valid) > 1]
    if not several:
        return Picture("utilisation", why_not="GPU utilisation is not known at two loads of any model")
    panels = []
    for heading, field in (("GPU utilisation (some kernel ran)", "gpu_util"), (SMS[0].heading, SMS[0].field)):
        rows = [
            charts.interval_row(value, Interval(fmean(p.repeats) / _most(curve)), name, p.degraded)
            | {"text": str(p.concurrency) if number % 2 == 0 else "", "order": p.concurrency}
            for name, curve in several
            for number, p in enumerate(reversed(curve.valid))
            if (value := getattr(p, field)) is not None
        ]
        if rows:
            y = charts.share_axis(f"share of the most tokens/s (numbers: {IN_FLIGHT})")
            panels.append(line_chart(rows, charts.share_axis(heading), y, [name for name, _ in several]))
    return Picture("utilisation", _origins(several), tuple(panels))


def _energy(sweeps: Named) -> Picture:
    """Power and energy per output token of each model at its largest batch of table 1 (arXiv:2404.03353, figure 4).
    Bars are means of the repeats, lines reach from the smallest to the largest. Measurements under different power
    limits are of different cards, so each limit has bars of its own."""
    spent, seen = list[tuple[str, str, Any]](), list[tuple[str, Curve]]()
    for name, curve in sorted(sweeps, key=lambda pair: ([*PUBLISHED, pair[1].subject].index(pair[1].subject), pair[0])):
        if (point := at_table_1(curve)) is None:
            continue
        known = [s for s in point.each if s.power_w is not None and s.energy_per_token_j is not None]
        by_limit = grouped(known, lambda s: None if s.power_limit_w is None else round(s.power_limit_w))
        for limit in sorted(by_limit, key=lambda limit: -(limit or 0)):
            told = "power limit not known" if limit is None else f"power limit {limit} W"
            label = f"{name}, {point.concurrency}{' (degraded)' if point.degraded else ''}"
            spent.append((label, told, by_limit[limit]))
            seen.append((name, curve))
    if not spent:
        return Picture("energy-per-token", why_not="power is not known of any model at its largest batch of table 1")
    panels = []
    for heading, field in (("power, W", "power_w"), ("energy per output token, J", "energy_per_token_j")):
        rows = []
        for label, power_limit, each in spent:
            values = [getattr(s, field) for s in each]
            several = {"low": min(values), "high": max(values)} if len(values) > 1 else {}
            mean = fmean(values)
            rows.append({"x": label, "y": mean, "series": power_limit, "text": digits(mean), **several})
        panels.append(charts.bars(rows, f"model, and {IN_FLIGHT}", heading))
    return Picture("energy-per-token", _origins(seen), tuple(panels))


class ReplicaSet(NamedTuple):
    """Replicas of one model under one load, each beside one engine alone."""

    name: str
    model: str
    pairs: dict[Sharing, list[Pair]]  # by way of sharing, ascending by the number of replicas


def _replicas(named: Named) -> list[Picture]:
    """The four pictures of replicas; none if no replicas of one model were measured. The use of the device is that of
    arXiv:2404.03353, figure 7: busy comes from the profiling counters if they are known, else from NVML's samples."""
    if not any(curve.shared for _, curve in named):
        return []

    def setting(pair: Pair) -> str:
        part = f", {pair[0].thread_percentage} % of the SMs each" if pair[0].thread_percentage else ""
        return f"{pair[0].concurrency} in flight{', pinned' if pair[0].pinned else ''}{part}"

    found = []
    for name, curve in named:
        pairs = [pair for way in SHARINGS for pair in sorted(compared(curve, way), key=lambda pair: pair[0].count)]
        for words, alike in grouped(pairs, setting).items():
            found.append(ReplicaSet(f"{name}, {words}", curve.subject, grouped(alike, lambda pair: pair[0].sharing)))
    if not found:
        why = "of no model replicas and one engine alone are valid under the same load"
        return [Picture(name, why_not=why) for name in REPLICA_PICTURES]
    origins = _origins([(name, curve) for name, curve in named if curve.shared])
    counters = any(pair[0].engine_active for each in found for pairs in each.pairs.values() for pair in pairs)
    device = [BUSY[0 if counters else 1], *DEVICE]
    ways = [way for way in SHARINGS if any(way in each.pairs for each in found)]
    drawn = [
        _over_counts("replica-gain", found, ways, GAINS, "replicas", min(len(ways), 3)),
        _replica_busy(found, ways),
        _over_counts("replica-latency", found, ways, WAITS, "replicas"),
        _over_counts("replica-device", found, ways, device, "engines", 3),
    ]
    return [replace(picture, origins=origins) for picture in drawn]


def _by_count(figure: Gauge, pairs: Sequence[Pair]) -> Iterator[tuple[int, Interval, bool]]:
    """Yield numbers of engines with a figure and whether it is degraded: ratios to one engine, or one engine and then
    each number of replicas."""
    field = figure.field
    if figure.kind == "ratio":
        for shared, alone in pairs:
            seen = ratio(shared, alone) if field == RATE else figure_ratio(alone, shared, field)
            if seen is not None and math.isfinite(seen.value):
                yield shared.count, seen, bool(shared.degraded or alone.degraded)
        return
    known = [pair for pair in pairs if math.isfinite(_known(pair[0], field))]
    first = _known(known[0][1], field) if known else math.nan
    over = first if figure.kind == "relative" else 1.0
    if first > 0 and over:
        yield 1, Interval(first / over), bool(known[0][1].degraded)
    for shared, _ in known if over > 0 else []:
        yield shared.count, Interval(_known(shared, field) / over), bool(shared.degraded)


def _known(point: Point, field: str) -> float:
    """Return a figure of a point, NaN if it is not known."""
    value = getattr(point, field, None)
    return math.nan if value is None else float(value)


def _over_counts(
    name: str,
    found: Sequence[ReplicaSet],
    ways: Sequence[Sharing],
    figures: Sequence[Gauge],
    engines: str,
    columns: int = 2,
) -> Picture:
    """Figures by the number of engines, a panel for each way and figure, in which the sets stand side by side. All
    ratios have one axis: as far as the intervals, which count only from half of their value to twice it."""
    placed = []
    for way, figure in product(ways, figures):
        each = [(number, *one) for number, of in enumerate(found) for one in _by_count(figure, of.pairs.get(way, []))]
        placed += [(way, figure, each)] if each else []
    if not placed:
        why = "no request ended in a window"
        if engines == "engines":
            why = "no sensor told what the device did while replicas ran"
        return Picture(name, why_not=why)
    counts = sorted({count for *_, each in placed for _, count, *_ in each})
    seen_ends = [0.9, 1.1]
    for seen in (seen for *_, each in placed for _, _, seen, _ in each):
        seen_ends += [seen.value, *(end for end in (seen.low, seen.high) if end and 0.5 <= end / seen.value <= 2)]
    domain = [min(seen_ends) - 0.02, max(seen_ends) + 0.02]
    ticks = {"values": list(range(len(counts))), "labelExpr": f"{[str(n) for n in counts]}[datum.value]", "grid": False}
    scale = {"domain": [-0.5, len(counts) - 0.5], "nice": False, "zero": False}
    names, panels = [each.name for each in found], []
    for way, figure, each in placed:
        x = {"type": "quantitative", "title": f"{engines}, {SHARINGS[way]}", "scale": scale, "axis": ticks}
        y = charts.share_axis(figure.heading) if figure.kind == "share" else axis("y", figure.heading)
        y |= {"scale": {"domain": domain, "zero": False, "nice": False}} if figure.kind == "ratio" else {}
        rows = []
        for number, count, seen, degraded in each:
            place = counts.index(count) + 0.4 * (number - (len(found) - 1) / 2) / len(found)
            rows.append(charts.interval_row(place, seen, names[number], degraded))
        one = {"ratio": "one engine under the same load", "relative": "one engine"}.get(figure.kind)
        panels.append(line_chart(rows, x, y, names, rules=[{"y": 1, "text": one}] if one else ()))
    return Picture(name, (), tuple(panels), columns)


def _replica_busy(found: Sequence[ReplicaSet], ways: Sequence[Sharing]) -> Picture:
    """Gain of replicas over the time in which one engine runs a kernel, whatever the load. Engines that take turns on
    one GPU gain at most one over that share."""
    name, on_one_gpu = "replica-busy", [way for way in ways if way not in APART]
    on_one = {way: [(each.model, pair) for each in found for pair in each.pairs.get(way, [])] for way in on_one_gpu}
    alone = [pair[1] for pairs in on_one.values() for _, pair in pairs]
    if not alone:
        return Picture(name, why_not="no replicas shared a GPU")
    busy = "engine_active" if any(point.engine_active for point in alone) else "gpu_util"
    if not any(getattr(point, busy) for point in alone):
        return Picture(name, why_not="no sensor told when one engine runs a kernel")
    rows = {
        way: [
            charts.interval_row(getattr(pair[1], busy), ratio(*pair), model, any(side.degraded for side in pair))
            for model, pair in pairs
            if getattr(pair[1], busy)
        ]
        for way, pairs in on_one.items()
    }
    gains = [row["y"] for each in rows.values() for row in each]
    domain = [min(0.9, *gains) - 0.05, 1.1 * max(gains)]
    y = axis("y", GAIN) | {"scale": {"domain": domain, "zero": False, "nice": False}}
    turns: Values = [{"x": each / 100, "y": 100 / each} for each in range(math.ceil(100 / domain[1]), 101)]
    models = list(dict.fromkeys(each.model for each in found))
    one = [{"y": 1, "text": "one engine"}]
    panels = []
    for way, each in rows.items():
        if each:
            x = charts.share_axis(f"time in which one engine runs a kernel, {SHARINGS[way]}")
            panels.append(line_chart(each, x, y, models, joined=False, rules=one, guide=turns))
    return Picture(name, (), tuple(panels), columns=min(3, len(panels)))


def _several_gpus(named: Named) -> list[Picture]:
    """What each number of GPUs serves, in all and of each GPU, and what the KV blocks of one engine serve, each under
    the load with the most tokens/s. Ways: one engine over all GPUs, and replicas on GPUs of their own."""
    over_all = "one engine over all"
    several = [(name, curve) for name, curve in named if on_several_gpus(curve)]
    total, blocks = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, curve in several:
        model, found = name.split(",")[0], deployments(curve)
        alone = [one for one in found if one.sharing is None]
        ways = {over_all: alone}
        replicas = grouped((one for one in found if one.sharing == "gpus"), lambda one: one.tensor_parallel_size)
        for gpus, sets in sorted(replicas.items()):
            first = [one for one in alone if one.gpus == gpus]
            ways["a replica on each" if gpus == 1 else f"a replica on each {gpus}"] = [*first, *sets]
        for way, line in ways.items():
            most = [max(same, key=lambda d: d.tokens_per_s) for same in grouped(line, lambda d: d.gpus).values()]
            for one in sorted(most, key=lambda d: d.gpus):
                (seen,) = charts.intervals([one.served])
                seen = Interval(one.tokens_per_s, seen.low, seen.high)
                total.append(charts.interval_row(one.gpus, seen, f"{model}, {way}", one.served.degraded))
                if way == over_all and one.kv_blocks:
                    blocks.append(total[-1] | {"x": one.kv_blocks})
    if not several:
        return []
    each = [
        row | {name: row[name] / row["x"] for name in ("y", "low", "high") if row[name] is not None} for row in total
    ]
    names = list(dict.fromkeys(row["series"] for row in total))
    gpus_ = charts.load_axis((row["x"] for row in total), "GPUs")
    served = axis("y", "most output tokens/s", scale="log")
    per_gpu = axis("y", "most output tokens/s per GPU", scale="log")
    panels = [line_chart(total, gpus_, served, names), line_chart(each, gpus_, per_gpu, names)]
    if blocks:
        panels.append(line_chart(blocks, axis("x", "KV blocks of the engine", scale="log"), served, names))
    return [Picture("gpus", _origins(several), tuple(panels), columns=3)]


def _jobs(valid: Sequence[JobPoint]) -> list[Picture]:
    """Fixed-size workloads: output length against arrivals, models of one size, batch limits, KV blocks, batching."""

    def by_model(
        chosen: Callable[[Sequence[JobPoint]], list[JobPoint]], varied: Callable[[JobPoint], Any]
    ) -> list[list[JobPoint]]:
        """Comparable jobs of each model and host, if the drawn quantity takes more than one value."""
        groups = [chosen(group) for group in grouped(valid, lambda p: (p.model, p.environment.key)).values()]
        return [group for group in groups if len({varied(p) for p in group}) > 1]

    length, limit = attrgetter("output_tokens"), attrgetter("spec.max_num_seqs")
    lengths, limits = by_model(evidence.grid_of, length), by_model(evidence.limits_of, limit)
    others = [group for group in lengths if group[0].model not in evidence.SIZED_AS]
    # Models that are compared for their size, all at once, beside their reference.
    sized = {*evidence.SIZED_AS, *evidence.SIZED_AS.values()} if len(others) < len(lengths) else ()
    of_one_size = [[p for p in group if p.load.at_once] for group in lengths if group[0].model in sized]
    tokens = {"output_tokens_per_s": TOKENS_PER_S, "e2e_s": "mean E2E latency, s"}
    served = {"requests_per_s": "requests/s", "e2e_s": "mean E2E latency, s"}
    held = {"output_tokens_per_s": TOKENS_PER_S, "batch": "requests in the engine", "preemptions": "preemptions"}
    blocks = attrgetter("kv_blocks")
    caches = by_model(evidence.caches_of, blocks)
    found = [
        _job_picture("output-length", others, length, "output tokens of a request", served),
        _job_picture("models-of-one-size", [*filter(None, of_one_size)], length, "output tokens of a request", served),
        _job_picture("batch-limit", limits, limit, "max_num_seqs", tokens),
        _job_picture("kv-blocks", caches, blocks, "KV blocks", held),
    ]
    ways = by_model(evidence.ways_of, lambda p: p.batching)
    jobs = [p for g in ways for p in sorted(g, key=lambda p: (-p.load.rate, BATCHINGS.index(p.batching)))]
    panels = []
    for field, heading in tokens.items() if jobs else ():
        rows = [_job_row(f"{p.model}, {p.load.pace}", p, field, p.batching) for p in jobs]
        panels.append(charts.bars(rows, "model and arrivals", heading))
    found.append(Picture("batching", tuple(dict.fromkeys(_origin(p.environment) for p in jobs)), tuple(panels)))
    return [picture for picture in found if picture.panels]


def _job_picture(
    name: str,
    groups: Sequence[Sequence[JobPoint]],
    x: Callable[[JobPoint], Any],
    heading: str,
    what: dict[str, str],
) -> Picture:
    """A panel for each figure over `x`, a line for each model (and rate or card, if they differ)."""
    jobs = [p for group in groups for p in sorted(group, key=x)]
    rates, cards = len({p.load.rate for p in jobs}) > 1, len({p.environment.gpu_name for p in jobs}) > 1
    series = {
        id(p): p.model
        + (f", {p.load.pace}" if rates else "")
        + (f", {p.environment.gpu_name}" if cards and name == "batch-limit" else "")
        for group in groups
        for p in group
    }
    names = list(dict.fromkeys(series.values()))
    fitting: Values = [{"x": x(p), "text": "all fit"} for p in jobs if p.fits and name == "kv-blocks"][:1]
    panels = []
    for field, title_ in what.items() if jobs else ():
        rows = [
            _job_row(x(p), p, field, series[id(p)])
            for group in groups
            for points in grouped(group, attrgetter("load.rate")).values()
            for p in sorted(points, key=x)
            if getattr(p, field) is not None
        ]
        place = (
            axis("x", heading, "log") if name == "kv-blocks" else charts.load_axis((row["x"] for row in rows), heading)
        )
        y = axis("y", title_, scale="log" if name in ("output-length", "models-of-one-size") else "linear")
        panels.append(line_chart(rows, place, y, names, rules=fitting))
    origins = tuple(dict.fromkeys(_origin(p.environment) for p in jobs))
    return Picture(name, origins, tuple(panels))


def _job_row(x: Any, point: JobPoint, field: str, series: str) -> dict[str, Any]:
    """Return a row of a figure of a job, with its interval from the repeats."""
    value = getattr(point, field)
    (seen,) = charts.intervals([point], figure_named(field)) if value else (Interval(value),)
    return charts.interval_row(x, Interval(value, seen.low, seen.high), series)
