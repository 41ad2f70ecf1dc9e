"""Pictures of archives as PNG and SVG files: the charts of the page, and those of jobs, rates, sensors and replicas.

Every picture is one or more panels, each a Vega-Lite specification of `charts`. `vl-convert-python` draws them offline.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.claims.claim import PUBLISHED
from pytest_slmserve.analysis.claims.gpu_claims import NO_DECODING, NO_PROFILE, at_table_1
from pytest_slmserve.analysis.claims.job_claims import (
    SIZED_AS,
    caches_of,
    grid_of,
    kv_blocks_of_job,
    limits_of,
    ways_of,
)
from pytest_slmserve.analysis.compare.deployments import PairReplicas as Pair
from pytest_slmserve.analysis.compare.deployments import compared, deployments, on_several_gpus
from pytest_slmserve.analysis.gate.launch_pairs import GATED, SHOWN, SIDES, Gated, nothing_counts, series_of
from pytest_slmserve.analysis.metrics.latency import Slo
from pytest_slmserve.analysis.metrics.roofline import REACHABLE_DRAM, REACHABLE_TENSOR, idle_share
from pytest_slmserve.analysis.metrics.summary import summarize
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.metrics.window import delay_of, steps_of
from pytest_slmserve.analysis.points import (
    CONTINUOUS,
    JobPoint,
    Point,
    figure_named,
    figure_ratio,
    output_rate,
    ratio,
)
from pytest_slmserve.analysis.stats.estimates import Interval, grouped
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.report.gate.text import title
from pytest_slmserve.report.loads import good, rate_series
from pytest_slmserve.report.page.charts import (
    CONFIG,
    IN_FLIGHT,
    TOKENS_PER_S,
    Spec,
    Values,
    axis,
    bars,
    gate_forest,
    intervals,
    line_chart,
    load_axis,
    pareto,
    share_axis,
    throughputs,
)
from pytest_slmserve.report.text_table import figure as digits
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage, Sharing
from pytest_slmserve.schema.loads import OpenLoop, WorkloadReference
from pytest_slmserve.schema.records import Measurement

WIDTH, SCALE = 900, 2  # of a picture in pixels, and of its PNG
MARGIN = 90  # pixels of a panel's width that its axis takes
ENOUGH = 4  # loads of a model whose throughput is shown relative to its largest
P50, P99 = "p50", "p99"
SHARINGS: dict[Sharing, str] = {
    "time-slicing": "time slicing",
    "mps": "MPS",
    "mig": "MIG",
    "gpus": "a GPU each",
    "urls": "a URL each",
}
APART = ("gpus", "urls")  # ways in which replicas share no GPU, as far as is known
GAIN = "throughput over one engine's"
REPLICA_PICTURES = ("replica-gain", "replica-busy", "replica-latency", "replica-device")
BATCHINGS = ("none", "static", "dynamic", CONTINUOUS)
Quantity = Callable[[Any], float | None]  # of a point


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
    origins = _origins(sweeps)
    drawn = [Picture("sweeps", origins, (throughputs(sweeps), pareto(sweeps)))]
    shaped = [(name, curve) for name, curve in sweeps if len(curve.valid) >= ENOUGH]
    if len(shaped) > 1:
        rows = [
            {"x": p.concurrency, "y": _share_of_most(p, curve), "series": name, "hollow": bool(p.degraded)}
            for name, curve in shaped
            for p in curve.valid
        ]
        panel = line_chart(rows, _load_axis(shaped), share_axis("throughput, of each model's largest"), _names(shaped))
        drawn.append(Picture("relative-throughput", _origins(shaped), (panel,)))
    drawn.append(_latency(sweeps, slo))
    drawn.append(
        _against_load(
            "sm-per-batch",
            sweeps,
            {
                "SMs with work (SM active)": attrgetter("sm_active"),
                "resident warps (SM occupancy)": attrgetter("sm_occupancy"),
            },
            most={
                "SMs with work (SM active)": attrgetter("sm_active_max"),
                "resident warps (SM occupancy)": attrgetter("sm_occupancy_max"),
            },
        )
    )
    drawn.append(_energy(sweeps))
    drawn.append(_utilisation(sweeps))
    reach = {"DRAM active": REACHABLE_DRAM, "tensor cores active": REACHABLE_TENSOR}
    units: dict[str, Quantity] = {
        "DRAM active": attrgetter("dram_active"),
        "tensor cores active": attrgetter("tensor_active"),
    }
    idle: dict[str, Quantity] = {"no kernel ran": lambda point: idle_share(point.engine_active)}
    drawn.append(_against_load("memory-bound", sweeps, units, reach=reach, beside=idle))
    units = {"DRAM active": attrgetter("decode_dram"), "tensor cores active": attrgetter("decode_tensor")}
    drawn.append(_against_load("decoding", sweeps, units, reach=reach, unknown=NO_DECODING))
    return [*drawn, *others]


def gate_pictures(gates: Sequence[Gated]) -> list[Picture]:
    """Return a picture for each gate: candidate over baseline of each endpoint, with its pairs and its margin."""
    often = Counter(gated.model for gated in gates)
    drawn = []
    for gated in gates:
        name = f"gate-{gated.model}" + (f"-{gated.gate}" if often[gated.model] > 1 else "")
        series = {each.name: each for each in series_of((*GATED, *SHOWN), gated.pairs)}
        spec = gate_forest([*gated.gated, *gated.shown], series, (each.name for each in gated.gated))
        if spec is None:
            drawn.append(Picture(name, why_not=nothing_counts(gated.dropped)))
            continue
        first = gated.pairs[0]
        before, after = (first.launch(side).measurements[0].environment for side in SIDES)
        compared_ = f"vLLM {after.vllm} against {before.vllm}" if before.vllm != after.vllm else f"vLLM {after.vllm}"
        drawn.append(Picture(name, (_device(before), title(gated), compared_), (spec,)))
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
    width = WIDTH // columns - MARGIN
    panels = []
    for panel in picture.panels:
        panel = {**panel, "width": width, "height": max(panel["height"], 300) if columns > 1 else panel["height"]}
        if "data" in panel:  # a name would be shared by all panels, and their values with it
            panel["data"] = {"values": panel["data"].get("values", [])}
        panels.append(panel)
    heading = {"text": picture.name.replace("-", " "), "subtitle": list(picture.origins), "anchor": "start"}
    resolve = {"scale": {"color": "shared", "shape": "shared", "strokeDash": "shared"}}
    spec: Spec = {"title": heading, "config": CONFIG, "background": "white", "padding": 12}
    return {**spec, "concat": panels, "columns": columns, "resolve": resolve, "spacing": 24}


def _origins(named: Iterable[tuple[str, Curve]]) -> tuple[str, ...]:
    """Origins of the curves, each once."""
    found = [_origin(c.environment, c.first.workload if c.first else None) for _, c in named]
    return tuple(dict.fromkeys(found))


def _origin(environment: Environment | None, workload: WorkloadReference | None = None) -> str:
    """Device, release of vLLM and lengths of the requests, as far as they are known."""
    device = _device(environment)
    if environment is None or environment.platform == "simulated":
        return device
    device += f", vLLM {environment.vllm}" if environment.vllm else ""
    if workload is None:
        return device
    return f"{device}, {workload.mean_prompt_tokens:.0f} prompt and {workload.mean_output_tokens:.0f} output tokens"


def _device(environment: Environment | None) -> str:
    if environment is None:
        return "unknown device"
    if environment.platform == "simulated":
        return "SIMULATED, not measured on a device"
    if environment.platform == "remote":
        return environment.url or "an endpoint"
    return environment.gpu_name or environment.cpu or "unknown device"


def _names(named: Sequence[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in named]


def _load_axis(named: Sequence[tuple[str, Curve]]) -> Spec:
    return load_axis(sorted({point.concurrency for _, curve in named for point in curve.valid}))


def _share_of_most(point: Point, curve: Curve) -> float:
    return fmean(point.repeats) / max(fmean(each.repeats) for each in curve.valid)


def _row(x: float, seen: Interval, series: str, hollow: object = False, **more: Any) -> dict[str, Any]:
    """Row of `line_chart`. hollow: whether the point is degraded."""
    return {
        "x": x,
        "y": seen.value,
        "low": seen.low,
        "high": seen.high,
        "series": series,
        "hollow": bool(hollow),
        **more,
    }


def _known(points: Sequence[Point], name: str) -> list[tuple[Point, Interval]]:
    """Points at which the figure is known, with its interval from the repeats."""
    found = [p for p in points if _finite(p, name) is not None]
    return [
        (p, Interval(getattr(p, name), seen.low, seen.high))
        for p, seen in zip(found, intervals(found, figure_named(name)))
    ]


def _in_ms(seen: Interval) -> Interval:
    return seen.mapped(lambda seconds: 1e3 * seconds)


def _limits(slo: Slo | None) -> dict[str, Values]:
    """The line across a chart at the limit of each latency, in ms, with how it was written; none without an SLO."""
    if slo is None:
        return {}
    written = zip(slo.bounds.items(), str(slo).split(","))
    return {name: [{"y": 1e3 * limit, "text": text}] for (name, limit), text in written}


def _latency(sweeps: Sequence[tuple[str, Curve]], slo: Slo | None) -> Picture:
    """p50 and p99 of TTFT and TPOT over the concurrency, of E2E too if the SLO limits it."""
    seen = [(name, c) for name, c in sweeps if sum(p.ttft_p50_s is not None for p in c.valid) > 1]
    if not seen:
        return Picture("latency", why_not="percentiles of TTFT are not known at two loads of any model")
    limits, panels = _limits(slo), []
    for latency in ("ttft", "tpot", *(["e2e"] if "e2e" in limits else [])):
        rows = [
            _row(point.concurrency, _in_ms(value), name, point.degraded, stroke=part)
            for name, curve in seen
            for part in (P50, P99)
            for point, value in _known(curve.valid, f"{latency}_{part}_s")
        ]
        if rows:
            y = axis("y", f"{latency.upper()}, ms", scale="log")
            x, rules = _load_axis(seen), limits.get(latency, ())
            panels.append(line_chart(rows, x, y, _names(seen), strokes=(P50, P99), rules=rules))
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
                loads.append((delay.achieved_per_s, summarize(m), bool(found.degradations), good(m, slo)))
        if loads:
            groups.append((group[0], loads))
    if not groups:
        return Picture("rates", why_not="no load at a request rate is valid")
    names = _names_of_rates([first for first, _ in groups])
    x = axis("x", "requests/s sent")
    most = max(sent for _, loads in groups for sent, *_ in loads)
    served = [
        {"x": sent, "y": value, "series": name, "hollow": degraded, "stroke": stroke}
        for name, (_, loads) in zip(names, groups)
        for sent, summary, degraded, kept in loads
        for stroke, value in (("served", summary.requests_per_s), (f"good: {slo}", kept.per_s if kept else None))
        if value is not None
    ]
    strokes = ("served", f"good: {slo}") if slo else ("served",)
    equal: Values = [{"x": 0, "y": 0}, {"x": most, "y": most}]
    panels = [line_chart(served, x, axis("y", "requests/s"), names, strokes=strokes, guide=equal)]
    limits = _limits(slo)
    for latency in ("ttft", "tpot", "e2e"):
        rows = [
            {"x": sent, "y": 1e3 * value, "series": name, "hollow": degraded, "stroke": part}
            for name, (_, loads) in zip(names, groups)
            for part in (P50, P99)
            for sent, summary, degraded, _ in loads
            if (value := getattr(summary, f"{latency}_{part}_s")) is not None
        ]
        if rows:
            y = axis("y", f"{latency.upper()}, ms", scale="log")
            panels.append(line_chart(rows, x, y, names, strokes=(P50, P99), rules=limits.get(latency, ())))
    return Picture("rates", tuple(dict.fromkeys(_origin(m.environment, m.workload) for m, _ in groups)), tuple(panels))


def _names_of_rates(firsts: Sequence[Measurement]) -> list[str]:
    """The model of each series, with the facts in which it differs from the others."""
    rows = []
    for m in firsts:
        assert isinstance(m.load, OpenLoop)
        process = "" if m.load.steps else m.load.arrivals.partition(",")[0].replace("gamma", "burstiness")
        timing = "ramp" if m.load.steps else f"each judged for {m.load.window_s:g} s after {m.load.settle_s:g} s"
        rows.append([short_name(m.spec.model), _origin(m.environment, m.workload), timing, process])
    differ = [len({*column} - {""}) > 1 for column in zip(*rows, strict=True)]
    return [", ".join([row[0], *(fact for fact, told in zip(row[1:], differ[1:]) if told and fact)]) for row in rows]


def _against_load(
    name: str,
    sweeps: Sequence[tuple[str, Curve]],
    quantities: dict[str, Quantity],
    *,
    most: dict[str, Quantity] | None = None,
    reach: dict[str, float] | None = None,
    beside: dict[str, Quantity] | None = None,
    unknown: str = NO_PROFILE,
) -> Picture:
    """Shares from 0 to 100 % over the concurrency, a panel for each quantity that is known; its largest readings are
    dashed. reach: what the unit reads at its end. beside: further quantities, shown only next to a known one."""
    strokes = ("mean", "max") if most else ()
    panels, seen = list[Spec](), list[tuple[str, Curve]]()
    for heading, of in (quantities | (beside or {})).items():
        rows = [
            {"x": p.concurrency, "y": value, "series": series, "hollow": stroke != "max" and bool(p.degraded)}
            | ({"stroke": stroke} if strokes else {})
            for series, curve in sweeps
            for stroke, get in (("mean", of), *([("max", most[heading])] if most else []))
            for p in curve.valid
            if (value := get(p)) is not None and math.isfinite(value)
        ]
        if rows and (panels or heading in quantities):
            there = {row["series"] for row in rows}
            seen += [pair for pair in sweeps if pair[0] in there and pair not in seen]
            rules = [{"y": reach[heading], "text": "achievable peak"}] if reach and heading in reach else []
            names = _names(sweeps)
            x, y = _load_axis(sweeps), share_axis(heading)
            panels.append(line_chart(rows, x, y, names, strokes=strokes, rules=rules))
    return Picture(name, _origins(seen), tuple(panels)) if panels else Picture(name, why_not=unknown)


def _utilisation(sweeps: Sequence[tuple[str, Curve]]) -> Picture:
    """Throughput over GPU utilisation and over SM active (arXiv:2404.03353, figure 8): the first is at its end while
    the other still grows. A model with one known load is excluded."""
    several = [(name, c) for name, c in sweeps if sum(p.gpu_util is not None for p in c.valid) > 1]
    if not several:
        return Picture("utilisation", why_not="GPU utilisation is not known at two loads of any model")
    panels = []
    for heading, field in (
        ("GPU utilisation (some kernel ran)", "gpu_util"),
        ("SMs with work (SM active)", "sm_active"),
    ):
        rows = [
            {"x": value, "y": _share_of_most(p, curve), "series": name, "hollow": bool(p.degraded)}
            | {"text": str(p.concurrency) if number % 2 == 0 else "", "order": p.concurrency}
            for name, curve in several
            for number, p in enumerate(reversed(curve.valid))
            if (value := getattr(p, field)) is not None
        ]
        if rows:
            y = share_axis(f"share of the most tokens/s (numbers: {IN_FLIGHT})")
            panels.append(line_chart(rows, share_axis(heading), y, _names(several)))
    return Picture("utilisation", _origins(several), tuple(panels))


def _energy(sweeps: Sequence[tuple[str, Curve]]) -> Picture:
    """Power and energy per output token of each model at its largest batch of table 1 (arXiv:2404.03353, figure 4).
    Bars are means of the repeats, lines reach from the smallest to the largest. Measurements under different power
    limits are of different cards, so each limit has bars of its own."""
    spent, seen = list[tuple[str, str, Any]](), list[tuple[str, Curve]]()
    for name, curve in sorted(sweeps, key=lambda pair: (_published(pair[1].subject), pair[0])):
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
            rows.append(
                {"x": label, "y": fmean(values), "series": power_limit, "text": digits(fmean(values)), **several}
            )
        panels.append(bars(rows, f"model, and {IN_FLIGHT}", heading))
    return Picture("energy-per-token", _origins(seen), tuple(panels))


def _published(model: str) -> int:
    return [*PUBLISHED, model].index(model)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Replicas of one model under one load, each beside one engine alone. pairs: by way of sharing, ascending."""

    name: str
    model: str
    pairs: dict[Sharing, list[Pair]]

    @property
    def all_pairs(self) -> list[Pair]:
        return [*chain.from_iterable(self.pairs.values())]


def _replicas(named: Sequence[tuple[str, Curve]]) -> list[Picture]:
    """The four pictures of replicas; none if no replicas of one model were measured."""
    if not any(curve.shared for _, curve in named):
        return []

    def setting(pair: Pair) -> str:
        part = f", {pair[0].thread_percentage} % of the SMs each" if pair[0].thread_percentage else ""
        return f"{pair[0].concurrency} in flight{', pinned' if pair[0].pinned else ''}{part}"

    found = []
    for name, curve in named:
        alike = grouped(chain.from_iterable(compared(curve, sharing) for sharing in SHARINGS), setting)
        for told, pairs in alike.items():
            by_way = {
                way: sorted((p for p in pairs if p[0].sharing == way), key=lambda p: p[0].count) for way in SHARINGS
            }
            shared = {way: each for way, each in by_way.items() if each}
            found.append(_Compared(f"{name}, {told}", curve.subject, shared))
    if not found:
        why = "of no model replicas and one engine alone are valid under the same load"
        return [Picture(name, why_not=why) for name in REPLICA_PICTURES]
    origins = _origins([(name, curve) for name, curve in named if curve.shared])
    ways = [way for way in SHARINGS if any(way in each.pairs for each in found)]
    gain: dict[str, Callable[[Pair], Interval | None]] = {GAIN: lambda pair: ratio(*pair)}
    drawn = [_ratios("replica-gain", origins, found, ways, gain, len(ways)), _replica_busy(origins, found, ways)]
    of_latency: dict[str, Callable[[Pair], Interval | None]] = {
        "largest mean E2E over one engine's": lambda pair: figure_ratio(pair[1], pair[0], "largest_e2e_s"),
        "99th percentile of E2E over one engine's": lambda pair: figure_ratio(pair[1], pair[0], "e2e_p99_s"),
    }
    drawn.append(_ratios("replica-latency", origins, found, ways, of_latency, 2))
    drawn.append(_replica_device(origins, found, ways))
    return drawn


def _replica_device(origins: tuple[str, ...], found: Sequence[_Compared], ways: Sequence[Sharing]) -> Picture:
    """Use of the device by one engine and by each number of replicas (arXiv:2404.03353, figure 7). Busy comes from the
    profiling counters if they are known, else from NVML's samples."""
    counters = any(shared.engine_active for each in found for shared, _ in each.all_pairs)
    busy = ("busy (some kernel ran)", "engine_active") if counters else ("GPU utilisation", "gpu_util")
    device = [
        (*busy, "share"),
        ("SM active", "sm_active", "share"),
        ("DRAM active", "dram_active", "share"),
        ("power, W", "power_w", "amount"),
        ("energy per token over one engine's", "energy_per_token_j", "relative"),
    ]
    counts = sorted({1, *(shared.count for each in found for shared, _ in each.all_pairs)})
    panels = []
    for way in ways:
        for heading, field, kind in device:
            rows: Values = []
            for number, each in enumerate(found):
                pairs = [pair for pair in each.pairs.get(way, ()) if _finite(pair[0], field) is not None]
                first = _finite(pairs[0][1], field) if pairs else None
                over = first if kind == "relative" else 1.0
                sides: list[tuple[int, Point]] = [(shared.count, shared) for shared, _ in pairs]
                sides = [*([(1, pairs[0][1])] if first else []), *sides]
                for count, side in sides if over else []:
                    x = _beside(counts, count, number, len(found))
                    seen = Interval((_finite(side, field) or 0.0) / (over or 1.0))
                    rows.append(_row(x, seen, each.name, side.degraded))
            if rows:
                y = share_axis(heading) if kind == "share" else axis("y", heading)
                rules = [{"y": 1, "text": "one engine"}] if kind == "relative" else []
                names = [each.name for each in found]
                panels.append(line_chart(rows, _counts(counts, f"engines, {SHARINGS[way]}"), y, names, rules=rules))
    why = "" if panels else "no sensor told what the device did while replicas ran"
    return Picture("replica-device", origins, tuple(panels), columns=3, why_not=why)


def _finite(point: Any, field: str) -> float | None:
    value = getattr(point, field, None)
    return value if value is not None and math.isfinite(value) else None


def _counts(counts: Sequence[int], heading: str) -> Spec:
    """An axis on which numbers of engines stand one after the other, whatever lies between them."""
    known = sorted({*counts})
    ticks = {"values": list(range(len(known))), "labelExpr": f"{[str(n) for n in known]}[datum.value]", "grid": False}
    scale = {"domain": [-0.5, len(known) - 0.5], "nice": False, "zero": False}
    return {"type": "quantitative", "title": heading, "scale": scale, "axis": ticks}


def _beside(counts: Sequence[int], count: int, number: int, several: int) -> float:
    """Place on `_counts` of one series among several, which stand side by side."""
    return sorted({*counts}).index(count) + 0.4 * (number - (several - 1) / 2) / several


def _ratios(
    name: str,
    origins: tuple[str, ...],
    found: Sequence[_Compared],
    ways: Sequence[Sharing],
    quantities: dict[str, Callable[[Pair], Interval | None]],
    columns: int,
) -> Picture:
    """Figures of replicas over those of one engine by the number of replicas, a panel for each way and quantity. All
    panels have one axis: as far as the intervals, which count only from half of their value to twice it."""
    counts = sorted({pair[0].count for each in found for pair in each.all_pairs})
    panels, ends = dict[tuple[Sharing, str], Values](), [0.9, 1.1]
    for way in ways:
        for heading, of in quantities.items():
            rows = []
            for number, each in enumerate(found):
                for pair in each.pairs.get(way, ()):
                    seen = of(pair)
                    if seen is None or not math.isfinite(seen.value):
                        continue
                    degraded = any(side.degraded for side in pair)
                    rows.append(_row(_beside(counts, pair[0].count, number, len(found)), seen, each.name, degraded))
                    ends += [
                        seen.value,
                        *(end for end in (seen.low, seen.high) if end and 0.5 <= end / seen.value <= 2),
                    ]
            if rows:
                panels[way, heading] = rows
    if not panels:
        return Picture(name, why_not="no request ended in a window")
    names = [each.name for each in found]
    scale = {"scale": {"domain": [min(ends) - 0.02, max(ends) + 0.02], "zero": False, "nice": False}}
    drawn = [
        line_chart(
            rows,
            _counts(counts, f"replicas, {SHARINGS[way]}"),
            axis("y", heading) | scale,
            names,
            rules=[{"y": 1, "text": "one engine under the same load"}],
        )
        for (way, heading), rows in panels.items()
    ]
    return Picture(name, origins, tuple(drawn), columns=min(columns, 3))


def _replica_busy(origins: tuple[str, ...], found: Sequence[_Compared], ways: Sequence[Sharing]) -> Picture:
    """Gain of replicas over the time in which one engine runs a kernel, whatever the load. Engines that take turns on
    one GPU gain at most one over that share."""
    on_one = [way for way in ways if way not in APART]
    pairs = [pair for each in found for way in on_one for pair in each.pairs.get(way, ())]
    if not pairs:
        return Picture("replica-busy", why_not="no replicas shared a GPU")
    busy = "engine_active" if any(alone.engine_active for _, alone in pairs) else "gpu_util"
    if not any(getattr(alone, busy) for _, alone in pairs):
        return Picture("replica-busy", why_not="no sensor told when one engine runs a kernel")
    models = list(dict.fromkeys(each.model for each in found))
    rows = {
        way: [
            _row(getattr(pair[1], busy), ratio(*pair), each.model, any(side.degraded for side in pair))
            for each in found
            for pair in each.pairs.get(way, ())
            if getattr(pair[1], busy)
        ]
        for way in on_one
    }
    most = max(row["y"] for each in rows.values() for row in each)
    scale = {"domain": [min(0.9, *(row["y"] for each in rows.values() for row in each)) - 0.05, 1.1 * most]}
    turns = [{"x": each / 100, "y": 100 / each} for each in range(math.ceil(100 / (1.1 * most)), 101)]
    panels = [
        line_chart(
            each,
            share_axis(f"time in which one engine runs a kernel, {SHARINGS[way]}"),
            axis("y", GAIN) | {"scale": scale | {"zero": False, "nice": False}},
            models,
            joined=False,
            rules=[{"y": 1, "text": "one engine"}],
            guide=turns,
        )
        for way, each in rows.items()
        if each
    ]
    return Picture("replica-busy", origins, tuple(panels), columns=min(3, len(panels)))


def _several_gpus(named: Sequence[tuple[str, Curve]]) -> list[Picture]:
    """What each number of GPUs serves, in all and of each GPU, and what the KV blocks of one engine serve, each under
    the load with the most tokens/s. Ways: one engine over all GPUs, and replicas on GPUs of their own."""
    over_all = "one engine over all"
    several = [(name, curve) for name, curve in named if on_several_gpus(curve)]
    total, each, blocks = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
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
                (seen,) = intervals([one.served], output_rate)
                seen = Interval(one.tokens_per_s, seen.low, seen.high)
                doubt, of = one.served.degraded, one.gpus
                total.append(_row(of, seen, f"{model}, {way}", doubt))
                low, high = (None if end is None else end / of for end in (seen.low, seen.high))
                each.append(_row(of, Interval(seen.value / of, low, high), f"{model}, {way}", doubt))
                if way == over_all and one.kv_blocks:
                    blocks.append(_row(one.kv_blocks, seen, f"{model}, {way}", doubt))
    if not several:
        return []
    names = list(dict.fromkeys(row["series"] for row in total))
    numbers = load_axis(sorted({row["x"] for row in total}), "GPUs")
    panels = [
        line_chart(total, numbers, axis("y", "most output tokens/s", scale="log"), names),
        line_chart(each, numbers, axis("y", "most output tokens/s per GPU", scale="log"), names),
    ]
    if blocks:
        x = axis("x", "KV blocks of the engine", scale="log")
        panels.append(line_chart(blocks, x, axis("y", "most output tokens/s", scale="log"), names))
    return [Picture("gpus", _origins(several), tuple(panels), columns=3)]


def _jobs(valid: Sequence[JobPoint]) -> list[Picture]:
    """Fixed-size workloads: output length against arrivals, models of one size, batch limits, KV blocks, batching."""

    def by_model(
        chosen: Callable[[Sequence[JobPoint]], list[JobPoint]], varied: Callable[[JobPoint], Any]
    ) -> list[list[JobPoint]]:
        """Comparable jobs of each model and host, if the drawn quantity takes more than one value."""
        groups = [chosen(group) for group in grouped(valid, lambda p: (p.model, p.environment.key)).values()]
        return [group for group in groups if len({varied(p) for p in group}) > 1]

    length = attrgetter("output_tokens")
    lengths = by_model(grid_of, length)
    others = [group for group in lengths if group[0].model not in SIZED_AS]
    # Models that are compared for their size, all at once, beside their reference.
    sized = {*SIZED_AS, *SIZED_AS.values()} if len(others) < len(lengths) else ()
    of_one_size = [[p for p in group if p.load.at_once] for group in lengths if group[0].model in sized]
    limits = by_model(limits_of, attrgetter("spec.max_num_seqs"))
    cards = len({p.environment.gpu_name for group in limits for p in group}) > 1
    found = []

    def picture(
        name: str,
        groups: Sequence[Sequence[JobPoint]],
        x: Callable[[JobPoint], Any],
        heading: str,
        what: dict[str, str],
    ) -> None:
        """A panel for each figure over `x`, a line for each model (and rate or card, where they differ)."""
        if not groups:
            return
        panels, names = [], list[str]()
        for field, title_ in what.items():
            rows = list[dict[str, Any]]()
            for group in groups:
                for points in grouped(group, attrgetter("load.rate")).values():
                    pace = f", {points[0].load.pace}" if len({p.load.rate for g in groups for p in g}) > 1 else ""
                    card = f", {points[0].environment.gpu_name}" if cards and name == "batch-limit" else ""
                    series = f"{points[0].model}{pace}{card}"
                    names += [series] if series not in names else []
                    ordered = sorted(points, key=x)
                    rows += [_row(x(p), _of_job(p, field), series) for p in ordered if getattr(p, field) is not None]
            fitting = [{"x": x(p), "text": "all fit"} for g in groups for p in sorted(g, key=x) if p.fits][:1]
            scale = "log" if x is length else "linear"
            where = (
                load_axis(sorted({row["x"] for row in rows}), heading)
                if x is not kv_blocks_of_job
                else axis("x", heading, "log")
            )
            rules = fitting if name == "kv-blocks" else []
            panels.append(line_chart(rows, where, axis("y", title_, scale=scale), names, rules=rules))
        origins = tuple(dict.fromkeys(_origin(p.environment) for group in groups for p in group))
        found.append(Picture(name, origins, tuple(panels)))

    served = {"requests_per_s": "requests/s", "e2e_s": "mean E2E latency, s"}
    picture("output-length", others, length, "output tokens of a request", served)
    picture("models-of-one-size", [g for g in of_one_size if g], length, "output tokens of a request", served)
    tokens = {"output_tokens_per_s": TOKENS_PER_S, "e2e_s": "mean E2E latency, s"}
    picture("batch-limit", limits, attrgetter("spec.max_num_seqs"), "max_num_seqs", tokens)
    held = {"output_tokens_per_s": TOKENS_PER_S, "batch": "requests in the engine", "preemptions": "preemptions"}
    picture("kv-blocks", by_model(caches_of, lambda p: p.kv_blocks), kv_blocks_of_job, "KV blocks", held)
    ways = by_model(ways_of, lambda p: p.batching)
    if ways:
        jobs = [p for g in ways for p in sorted(g, key=lambda p: (-p.load.rate, BATCHINGS.index(p.batching)))]
        panels = []
        for field, heading in tokens.items():
            rows = []
            for _, same in groupby(jobs, key=lambda p: (p.model, p.load.pace)):
                for p in same:
                    seen = _of_job(p, field)
                    ends = {"low": seen.low, "high": seen.high}
                    rows.append({"x": f"{p.model}, {p.load.pace}", "y": seen.value, "series": p.batching, **ends})
            panels.append(bars(rows, "model and arrivals", heading))
        found.append(Picture("batching", tuple(dict.fromkeys(_origin(p.environment) for p in jobs)), tuple(panels)))
    return found


def _of_job(point: JobPoint, field: str) -> Interval:
    """A figure of a job with its interval from the repeats."""
    value = getattr(point, field)
    if not value:
        return Interval(value)
    (seen,) = intervals([point], figure_named(field))
    return Interval(value, seen.low, seen.high)
