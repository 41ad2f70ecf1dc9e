"""Charts as PNG and SVG files with the theme of the HTML report, which `vl-convert-python` draws offline."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pytest_slmserve.analysis.claims import evidence
from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.compare.deployments import PairReplicas, compared, deployments, on_several_gpus
from pytest_slmserve.analysis.estimates import Interval, grouped
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, Gated, nothing_counts
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM, REACHABLE_TENSOR, idle_share
from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.points import CONTINUOUS, JobPoint, Point, figure_ratio, ratio
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.report.findings import Findings, origin
from pytest_slmserve.report.gate import title
from pytest_slmserve.report.loads import is_windowed, rate_panels, slo_rule
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.page.charts import CONCURRENCY, PERCENTILES, TOKENS_PER_S, Spec, Values, axis, line_chart
from pytest_slmserve.report.text_table import figure as digits
from pytest_slmserve.schema.errors import BadUsage, Sharing, write_file

WIDTH, SCALE = 900, 2  # pixels of a picture, and factor of its PNG
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
ENOUGH = 4  # fewest loads of a model with relative throughput
SHARINGS: dict[Sharing, str] = {
    "time-slicing": "time slicing",
    "mps": "MPS",
    "mig": "MIG",
    "gpus": "a GPU each",
    "urls": "a URL each",
}
APART = ("gpus", "urls")  # ways in which replicas share no GPU, as far as is known
GAIN, RATE = "throughput over one engine's", "output_tokens_per_s"
BATCHINGS = ("none", "static", "dynamic", CONTINUOUS)
Named = Sequence[tuple[str, Curve]]  # curves with their labels


class Gauge(NamedTuple):
    """Figure of a panel, from a field of a point."""

    heading: str
    field: str
    # Share from 0 to 1; unchanged; ratio to one engine, under the same load ("ratio") or under any ("relative"). In a
    # sweep: relative to its largest throughput, or in ms.
    kind: Literal["share", "amount", "ratio", "relative", "ms"] = "share"
    second: str = ""  # field of a second line: the largest readings of a sensor, or another percentile
    reach: float | None = None  # value of a sensor at the achievable peak


SMS = (
    Gauge("SMs with work (SM active)", "sm_active", second="sm_active_max"),
    Gauge("resident warps (SM occupancy)", "sm_occupancy", second="sm_occupancy_max"),
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
BUSY = (Gauge("busy (some kernel ran)", "engine_active"), Gauge("GPU utilisation", "gpu_util"))
DEVICE = (
    Gauge("SM active", "sm_active"),
    Gauge("DRAM active", "dram_active"),
    Gauge("power, W", "power_w", "amount"),
    Gauge("energy per token over one engine's", "energy_per_token_j", "relative"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """Picture, named like its file.

    Attributes:
        origins: device, release and lengths of the requests.
        panels: in rows of `columns`; empty if nothing can be drawn.
        why_not: what is missing in that case.
    """

    name: str
    origins: tuple[str, ...] = ()
    panels: tuple[Spec, ...] = ()
    columns: int = 2
    why_not: str = ""


def pictures(found: Findings) -> list[Picture]:
    """Return all pictures, in the order of the documentation."""
    curves, slo = [c for c in found.curves if c.valid or any(point.valid for point in c.shared)], found.slo
    named = list(zip(labels(curves), curves))
    sweeps = [(name, curve) for name, curve in named if curve.valid]
    drawn = _gates(found.gates)
    if sweeps:
        drawn.append(Picture("sweeps", _origins(sweeps), (charts.throughputs(sweeps), charts.pareto(sweeps))))
        shaped = [(name, curve) for name, curve in sweeps if len(curve.valid) >= ENOUGH]
        if len(shaped) > 1:
            relative = Gauge("throughput, of each model's largest", RATE, "relative")
            drawn.append(_over_load("relative-throughput", shaped, [relative]))
        waiting = [(name, c) for name, c in sweeps if sum(p.ttft_p50_s is not None for p in c.valid) > 1]
        limited = ("ttft", "tpot", *(("e2e",) if slo and "e2e" in slo.bounds else ()))
        waits = [Gauge(f"{name.upper()}, ms", f"{name}_p50_s", "ms", f"{name}_p99_s") for name in limited]
        drawn += [
            _over_load("latency", waiting, waits, "percentiles of TTFT are not known at two loads of any model", slo),
            _over_load("sm-per-batch", sweeps, SMS, evidence.NO_PROFILE),
            _energy(sweeps),
            _utilisation(sweeps),
            _over_load("memory-bound", sweeps, UNITS, evidence.NO_PROFILE),
            _over_load("decoding", sweeps, DECODING, evidence.NO_DECODING),
        ]
    drawn += [*_replicas(named), *_several_gpus(named)]
    if at_rates := [m for m in found.loads if is_windowed(m.load)]:
        panels, origins = rate_panels(at_rates, slo)
        drawn.append(Picture("rates", origins, tuple(panels), why_not="no load at a request rate is valid"))
    return [*drawn, *_jobs([job for job in found.jobs if job.valid])]


def _gates(gates: Sequence[Gated]) -> list[Picture]:
    often = Counter(gated.model for gated in gates)
    drawn = []
    for gated in gates:
        name = f"gate-{gated.model}" + (f"-{gated.gate}" if often[gated.model] > 1 else "")
        spec = charts.gate_forest(gated.compared)
        if spec is None:
            drawn.append(Picture(name, why_not=nothing_counts(gated.dropped, gated.lost)))
            continue
        before, after = (gated.pairs[0].launch(side).measurements[0].environment for side in SIDES)
        releases = f"vLLM {after.vllm} against {before.vllm}" if before.vllm != after.vllm else f"vLLM {after.vllm}"
        drawn.append(Picture(name, (origin(replace(before, vllm=None)), title(gated), releases), (spec,)))
    return drawn


def draw_pictures(found: Findings, folder: Path, form: Literal["png", "svg"]) -> list[str]:
    """Draw every picture that has measurements, and return a line for each, drawn or not.

    Raises:
        BadUsage: if there is nothing to draw, vl-convert-python is missing, or a file cannot be written.
    """
    drawn, lines = pictures(found), []
    if not any(picture.panels for picture in drawn):
        why = "there is no sweep, no job, no request rate, no ramp and no gate to draw"
        if reasons := "; ".join(f"{picture.name}: {picture.why_not}" for picture in drawn):
            why = f"no picture can be drawn: {reasons}"
        elif found.curves or found.jobs:
            why = "there is no valid point to draw"
        raise BadUsage(why, "Run slmserve report without --figures.")
    try:
        import vl_convert
    except ImportError:
        raise BadUsage("a picture needs vl-convert-python", "pip install vl-convert-python") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in drawn:
            if not picture.panels:
                lines.append(f"not drawn: {picture.name}: {picture.why_not}")
                continue
            path, spec = folder / f"{picture.name}.{form}", json.dumps(whole_picture(picture))
            png = form == "png"
            write_file(path, vl_convert.vegalite_to_png(spec, scale=SCALE) if png else vl_convert.vegalite_to_svg(spec))
            lines.append(f"drawn: {path}")
    except OSError as error:
        doing = "write" if folder.is_dir() else "make the folder"
        why = f"cannot {doing} {error.filename}: {error.strerror}"
        raise BadUsage(why, "Choose another folder with --figures.") from None
    return lines


def whole_picture(picture: Picture) -> Spec:
    columns = min(picture.columns, len(picture.panels))
    panels = []
    for panel in picture.panels:
        height = max(panel["height"], 300) if columns > 1 else panel["height"]
        values = panel["data"].get("values", [])  # no name, because panels of one name share values
        panels.append({**panel, "width": WIDTH // columns - MARGIN, "height": height, "data": {"values": values}})
    heading = {"text": picture.name.replace("-", " "), "subtitle": list(picture.origins), "anchor": "start"}
    resolve = {"scale": {"color": "shared", "shape": "shared", "strokeDash": "shared"}}
    spec: Spec = {"title": heading, "config": CONFIG, "background": "white", "padding": 12}
    return {**spec, "concat": panels, "columns": columns, "resolve": resolve, "spacing": 24}


def _origins(named: Iterable[tuple[str, Curve]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(origin(c.environment, c.first.workload if c.first else None) for _, c in named))


def _over_load(name: str, sweeps: Named, gauges: Iterable[Gauge], unknown: str = "", slo: Slo | None = None) -> Picture:
    """Return a panel for each known gauge over the concurrency, with dashed lines for second fields."""
    panels, seen = list[Spec](), dict[str, Curve]()
    x = charts.load_axis(point.concurrency for _, curve in sweeps for point in curve.valid)
    for gauge in gauges:
        rows: Values = []
        waits, strokes = gauge.kind == "ms", PERCENTILES if gauge.kind == "ms" else ("mean", "max")
        for (series, curve), (stroke, field) in product(sweeps, zip(strokes, (gauge.field, gauge.second))):
            scale, unit = (1e3, "ms") if waits else (1.0, "")
            if gauge.kind == "relative":
                scale = 1 / max(fmean(point.repeats) for point in curve.valid)
            rows += charts.point_rows(curve.valid, field, series, scale, unit, noise=waits, stroke=stroke)
        if gauge.field == "engine_active":
            rows = [row | {"y": idle_share(row["y"])} for row in rows]
        # The time without a kernel is shown only next to another figure.
        if rows and (panels or gauge.field != "engine_active"):
            there = {row["series"] for row in rows}
            seen |= {series: curve for series, curve in sweeps if series in there}
            y = axis("y", gauge.heading, "log") if waits else charts.share_axis(gauge.heading)
            rules = [{"y": gauge.reach, "text": "achievable peak"}] if gauge.reach else slo_rule(gauge.heading, slo)
            told = strokes if gauge.second else ()
            panels.append(line_chart(rows, x, y, [name for name, _ in sweeps], strokes=told, rules=rules))
    return Picture(name, _origins(seen.items()), tuple(panels), why_not=unknown)


def _utilisation(sweeps: Named) -> Picture:
    """Return throughput over GPU utilization and SM active (arXiv:2404.03353, figure 8)."""
    several = [(name, c) for name, c in sweeps if sum(p.gpu_util is not None for p in c.valid) > 1]
    panels = []
    for heading, field in (("GPU utilisation (some kernel ran)", "gpu_util"), (SMS[0].heading, SMS[0].field)):
        rows = []
        for name, curve in several:
            most = max(fmean(point.repeats) for point in curve.valid)
            for number, p in enumerate(reversed(curve.valid)):
                if (value := getattr(p, field)) is not None:
                    row = charts.interval_row(value, Interval(fmean(p.repeats) / most), name, p.degraded)
                    told = {"text": str(p.concurrency) if number % 2 == 0 else "", "order": p.concurrency}
                    rows.append(row | told)
        if rows:
            y = charts.share_axis(f"share of the most tokens/s (numbers: {CONCURRENCY})")
            panels.append(line_chart(rows, charts.share_axis(heading), y, [name for name, _ in several]))
    why = "GPU utilisation is not known at two loads of any model"
    return Picture("utilisation", _origins(several), tuple(panels), why_not=why)


def _energy(sweeps: Named) -> Picture:
    """Return power and energy at the largest batches of table 1 (arXiv:2404.03353, figure 4)."""
    bars: dict[str, Values] = {"power_w": [], "energy_per_token_j": []}
    seen = []
    for name, curve in sorted(
        sweeps, key=lambda pair: ([*evidence.PUBLISHED, pair[1].subject].index(pair[1].subject), pair[0])
    ):
        point = evidence.at_table_1(curve)
        known = [s for s in point.each if s.power_w is not None and s.energy_per_token_j is not None] if point else []
        # Different power limits are not comparable, so each has its own bars.
        by_limit = grouped(known, lambda s: None if s.power_limit_w is None else round(s.power_limit_w))
        for limit in sorted(by_limit, key=lambda limit: -(limit or 0)):
            told = "power limit not known" if limit is None else f"power limit {limit} W"
            label = f"{name}, {point.concurrency}{' (questionable)' if point.degraded else ''}" if point else name
            seen.append((name, curve))
            for field, rows in bars.items():
                values = [getattr(s, field) for s in by_limit[limit]]
                several = {"low": min(values), "high": max(values)} if len(values) > 1 else {}
                mean = fmean(values)
                rows.append({"x": label, "y": mean, "series": told, "text": digits(mean), **several})
    headings = {"power_w": "power, W", "energy_per_token_j": "energy per output token, J"}
    panels = [charts.bars(rows, f"model, and {CONCURRENCY}", headings[field]) for field, rows in bars.items() if rows]
    why = "power is not known of any model at its largest batch of table 1"
    return Picture("energy-per-token", _origins(seen), tuple(panels), why_not=why)


class ReplicaSet(NamedTuple):
    """Replicas of one model under one load, each paired with a single engine."""

    name: str
    model: str
    pairs: dict[Sharing, list[PairReplicas]]  # by way of sharing, ascending by the number of replicas


def _replicas(named: Named) -> list[Picture]:
    def setting(pair: PairReplicas) -> str:
        part = f", {pair[0].thread_percentage}% of the SMs each" if pair[0].thread_percentage else ""
        return f"concurrency {pair[0].concurrency}{', pinned' if pair[0].pinned else ''}{part}"

    several = [(name, curve) for name, curve in named if curve.shared]
    found = []
    for name, curve in several:
        pairs = [pair for way in SHARINGS for pair in sorted(compared(curve, way), key=lambda pair: pair[0].count)]
        for words, alike in grouped(pairs, setting).items():
            found.append(ReplicaSet(f"{name}, {words}", curve.subject, grouped(alike, lambda pair: pair[0].sharing)))
    # arXiv:2404.03353, figure 7; busy by profiling counters if known, else by NVML
    counters = any(pair[0].engine_active for each in found for pairs in each.pairs.values() for pair in pairs)
    device, blind = [BUSY[0 if counters else 1], *DEVICE], "no sensor told what the device did while replicas ran"
    ways = [way for way in SHARINGS if any(way in each.pairs for each in found)]
    drawn = [
        _over_counts("replica-gain", found, ways, GAINS, "replicas", columns=min(len(ways), 3)),
        _replica_busy(found, [way for way in ways if way not in APART]),
        _over_counts("replica-latency", found, ways, WAITS, "replicas"),
        _over_counts("replica-device", found, ways, device, "engines", blind, columns=3),
    ]
    if several and not found:
        why = "of no model replicas and one engine alone are valid under the same load"
        return [replace(picture, why_not=why) for picture in drawn]
    return [replace(picture, origins=_origins(several)) for picture in drawn] if several else []


def _by_count(gauge: Gauge, pairs: Sequence[PairReplicas]) -> list[tuple[int, Interval, bool]]:
    """Return number of engines, figure and degradation; except for ratios, one engine is first."""
    field = gauge.field
    if gauge.kind == "ratio":
        ratios = [(pair, ratio(*pair) if field == RATE else figure_ratio(pair[1], pair[0], field)) for pair in pairs]
        known = [(pair, seen) for pair, seen in ratios if seen is not None and math.isfinite(seen.value)]
        return [(pair[0].count, seen, any(side.degraded for side in pair)) for pair, seen in known]
    several = [pair for pair in pairs if getattr(pair[0], field) is not None]
    first = (getattr(several[0][1], field) if several else None) or 0.0
    if gauge.kind == "relative" and not first:
        return []
    over = first if gauge.kind == "relative" else 1.0
    counts: list[tuple[int, Point]] = [(1, several[0][1])] if first else []
    counts += [(shared.count, shared) for shared, _ in several]
    return [(count, Interval(getattr(point, field) / over), bool(point.degraded)) for count, point in counts]


def _over_counts(
    name: str,
    found: Sequence[ReplicaSet],
    ways: Sequence[Sharing],
    figures: Sequence[Gauge],
    engines: str,
    why: str = "no request ended in a window",
    columns: int = 2,
) -> Picture:
    placed = []
    for way, figure in product(ways, figures):
        each = [(number, *one) for number, of in enumerate(found) for one in _by_count(figure, of.pairs.get(way, []))]
        placed += [(way, figure, each)] if each else []
    counts = sorted({count for *_, each in placed for _, count, *_ in each})
    ends = [0.9, 1.1]  # of the axis of all ratios, without far ends of intervals
    for seen in (seen for *_, each in placed for _, _, seen, _ in each):
        ends += [seen.value, *(end for end in (seen.low, seen.high) if end and 0.5 <= end / seen.value <= 2)]
    names, panels = [each.name for each in found], []
    for way, figure, each in placed:
        label = f"{[str(n) for n in counts]}[datum.value]"
        ticks: Spec = {"values": list(range(len(counts))), "labelExpr": label, "grid": False}
        x = axis("x", f"{engines}, {SHARINGS[way]}", domain=(-0.5, len(counts) - 0.5), **ticks)
        y = charts.share_axis(figure.heading)
        if figure.kind != "share":
            domain = (min(ends) - 0.02, max(ends) + 0.02) if figure.kind == "ratio" else ()
            y = axis("y", figure.heading, domain=domain)
        rows = []
        for number, count, seen, degraded in each:
            place = counts.index(count) + 0.4 * (number - (len(found) - 1) / 2) / len(found)
            rows.append(charts.interval_row(place, seen, names[number], degraded))
        one = {"ratio": "one engine under the same load", "relative": "one engine"}.get(figure.kind)
        panels.append(line_chart(rows, x, y, names, rules=[{"y": 1, "text": one}] if one else ()))
    return Picture(name, (), tuple(panels), columns, why)


def _replica_busy(found: Sequence[ReplicaSet], ways: Sequence[Sharing]) -> Picture:
    """Return the gain of replicas that share a GPU over the busy time of one engine."""
    pairs = {way: [(each.model, pair) for each in found for pair in each.pairs.get(way, [])] for way in ways}
    alone = [pair[1] for each in pairs.values() for _, pair in each]
    busy = "engine_active" if any(point.engine_active for point in alone) else "gpu_util"
    rows = {
        way: [
            charts.interval_row(share, ratio(*pair), model, any(side.degraded for side in pair))
            for model, pair in each
            if (share := getattr(pair[1], busy))
        ]
        for way, each in pairs.items()
    }
    gains = [row["y"] for each in rows.values() for row in each]
    least, most = min([0.9, *gains]) - 0.05, 1.1 * max(gains, default=1.0)
    # Engines that take turns gain at most one over the busy time.
    turns = charts.guide([{"x": each / 100, "y": 100 / each} for each in range(math.ceil(100 / most), 101)])
    y, names = axis("y", GAIN, domain=(least, most)), list(dict.fromkeys(each.model for each in found))
    one = [{"y": 1, "text": "one engine"}]
    panels = []
    for way, each in rows.items():
        if each:
            x = charts.share_axis(f"time in which one engine runs a kernel, {SHARINGS[way]}")
            panels.append(line_chart(each, x, y, names, joined=False, rules=one, under=[turns]))
    why = "no sensor told when one engine runs a kernel" if alone else "no replicas shared a GPU"
    return Picture("replica-busy", (), tuple(panels), min(3, len(panels)), why)


def _several_gpus(named: Named) -> list[Picture]:
    """Return the highest throughput by number of GPUs, in all and per GPU, and by KV blocks."""
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
                (row,) = charts.point_rows([one.served], RATE, f"{model}, {way}")
                total.append(row | {"x": one.gpus})
                if way == over_all and one.kv_blocks:
                    blocks.append(total[-1] | {"x": one.kv_blocks})
    ends = ("y", "low", "high")
    each = [row | {end: row[end] / row["x"] for end in ends if row[end] is not None} for row in total]
    names = list(dict.fromkeys(row["series"] for row in total))
    gpus_, served = charts.load_axis((row["x"] for row in total), "GPUs"), axis("y", "most output tokens/s", "log")
    panels = [
        line_chart(total, gpus_, served, names),
        line_chart(each, gpus_, axis("y", "most output tokens/s per GPU", "log"), names),
    ]
    if blocks:
        panels.append(line_chart(blocks, axis("x", "KV blocks of the engine", "log"), served, names))
    return [Picture("gpus", _origins(several), tuple(panels), columns=3)] if several else []


def _jobs(valid: Sequence[JobPoint]) -> list[Picture]:

    def by_model(
        chosen: Callable[[Sequence[JobPoint]], list[JobPoint]], varied: Callable[[JobPoint], Any]
    ) -> list[list[JobPoint]]:
        groups = [chosen(group) for group in grouped(valid, lambda p: (p.model, p.environment.key)).values()]
        # Only a quantity with several values is drawn.
        return [group for group in groups if len({varied(p) for p in group}) > 1]

    length, limit, blocks = attrgetter("output_tokens"), attrgetter("spec.max_num_seqs"), attrgetter("kv_blocks")
    lengths = by_model(evidence.grid_of, length)
    against = CLAIMS["alike-at-one-size"].against
    others = [group for group in lengths if group[0].model not in against]
    # Models of one size next to their reference, with all requests at once.
    sized = {*against, *chain(*against.values())} if len(others) < len(lengths) else ()
    of_one_size = [[p for p in group if p.load.at_once] for group in lengths if group[0].model in sized]
    tokens = {"output_tokens_per_s": TOKENS_PER_S, "e2e_s": "mean E2E latency, s"}
    served = {"requests_per_s": "requests/s", "e2e_s": "mean E2E latency, s"}
    held = {"output_tokens_per_s": TOKENS_PER_S, "batch": "requests in the engine", "preemptions": "preemptions"}
    ways = by_model(lambda of: [p for way in evidence.ways_of(of) for p in way.values()], lambda p: p.batching)
    jobs = [p for g in ways for p in sorted(g, key=lambda p: (-p.load.rate, BATCHINGS.index(p.batching)))]
    panels = []
    for field, heading in tokens.items() if jobs else ():
        rows = [
            row | {"x": f"{p.model}, {p.load.pace}"} for p in jobs for row in charts.point_rows([p], field, p.batching)
        ]
        panels.append(charts.bars(rows, "model and arrivals", heading))
    found = [
        _job_picture("output-length", others, length, "output tokens of a request", served),
        _job_picture("models-of-one-size", of_one_size, length, "output tokens of a request", served),
        _job_picture("batch-limit", by_model(evidence.limits_of, limit), limit, "max_num_seqs", tokens),
        _job_picture("kv-blocks", by_model(evidence.caches_of, blocks), blocks, "KV blocks", held),
        Picture("batching", tuple(dict.fromkeys(origin(p.environment) for p in jobs)), tuple(panels)),
    ]
    return [picture for picture in found if picture.panels]


def _job_picture(
    name: str, groups: Sequence[Sequence[JobPoint]], x: Callable[[JobPoint], Any], heading: str, what: dict[str, str]
) -> Picture:
    """Return a panel for each figure over `x`, with a line for each model, rate and card."""
    by_rate = [points for group in groups for points in grouped(group, attrgetter("load.rate")).values()]
    jobs = [p for points in by_rate for p in sorted(points, key=x)]
    rates = len({p.load.rate for p in jobs}) > 1
    cards = len({p.environment.gpu_name for p in jobs}) > 1 and name == "batch-limit"

    def series(p: JobPoint) -> str:
        return f"{p.model}{f', {p.load.pace}' if rates else ''}{f', {p.environment.gpu_name}' if cards else ''}"

    fitting: Values = [{"x": x(p), "text": "all fit"} for p in jobs if p.fits and name == "kv-blocks"][:1]
    panels = []
    for field, title_ in what.items() if jobs else ():
        rows = [row | {"x": x(p)} for p in jobs for row in charts.point_rows([p], field, series(p))]
        loads = charts.load_axis((row["x"] for row in rows), heading)
        place = axis("x", heading, "log") if name == "kv-blocks" else loads
        y = axis("y", title_, "log" if name in ("output-length", "models-of-one-size") else "linear")
        panels.append(line_chart(rows, place, y, list(dict.fromkeys(map(series, jobs))), rules=fitting))
    return Picture(name, tuple(dict.fromkeys(origin(p.environment) for p in jobs)), tuple(panels))
