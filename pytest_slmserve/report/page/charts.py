"""Charts of a page as Vega-Lite specifications: plain dicts, whose values tests can read.

Colours of axes and texts are the page's; those of marks are told apart by all eyes on a light and on a dark ground.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.compare.changes import METRICS, Judgement, MetricChange
from pytest_slmserve.analysis.compare.history import NO_DIFFERENCE, NOT_COMPARABLE, WORDS, ReleaseHistory
from pytest_slmserve.analysis.gate.decision import Comparison, PairSeries
from pytest_slmserve.analysis.metrics.roofline import ceiling_tokens_per_s
from pytest_slmserve.analysis.points import Figure, Point, e2e_s, figure_named, output_rate, point_differences
from pytest_slmserve.analysis.stats.estimates import Interval, factor
from pytest_slmserve.analysis.sweep.curve import Curve, peaks_of_curve, work_of_curve
from pytest_slmserve.analysis.sweep.gains import Fit, fit
from pytest_slmserve.analysis.verdict import State, Verdict, above
from pytest_slmserve.report.tables.replicas import MemoryRow, memory_names
from pytest_slmserve.report.tables.sensors import STEP_PARTS, StepRow
from pytest_slmserve.report.text_table import figure as shown
from pytest_slmserve.report.text_table import gib, milliseconds
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import TooFewPoints
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

Spec = dict[str, Any]
Values = list[dict[str, Any]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: told apart by all eyes
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
GREY = "#8a8a8a"
STATES = [state.value for state in (State.PASSES, State.FAILS, State.INCONCLUSIVE)]
STATE_COLOURS = (COLOURS[2], COLOURS[1], GREY)
LATENCIES = (("E2E mean", "e2e_s"), ("E2E p99", "e2e_p99_s"), ("TTFT mean", "ttft_s"), ("TPOT mean", "tpot_s"))
IN_FLIGHT, TOKENS_PER_S = "requests in flight", "output tokens/s"
PLANE = "Throughput against latency"
PLANE_NOTE = (
    "Up and to the left is better. Numbers: requests in flight. Whiskers: 95 % intervals. Hollow: another load beats "
    "it."
)
DASHES = [5, 4]
STROKES = ([1, 0], [5, 4], [2, 3], [8, 3, 2, 3])  # solid, dashed, dotted, both
SAMPLES = 60  # of a smooth line
CONFIG: Spec = {  # the page's light theme, for pictures in files
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
FIRST_RELEASE = "first release"
STEP_LOOKS = {  # of a release, by what became of the metric since the one before: colour and shape
    FIRST_RELEASE: (COLOURS[0], "circle"),
    WORDS[Judgement.BETTER]: (COLOURS[2], "triangle-up"),
    WORDS[Judgement.WORSE]: (COLOURS[1], "cross"),
    Judgement.SAME.value: (COLOURS[0], "square"),
    Judgement.NO_WORSE.value: (COLOURS[0], "triangle-down"),
    NO_DIFFERENCE: (GREY, "circle"),
    NOT_COMPARABLE: (GREY, "diamond"),
}
FARTHEST = 3.0  # times the span of the estimates: an interval that goes on beyond leaves the chart
LINE = {"type": "line", "opacity": 0.7, "aria": False}
WHISKER = {"type": "rule", "strokeWidth": 1.5, "clip": True, "aria": False}
HAS_ENDS = {"filter": "isValid(datum.low) && isValid(datum.high)"}  # an interval, where the noise is known
STEP_COLOURS = {  # of the parts of a step, by their fields
    "weights": COLOURS[0],
    "kv": COLOURS[4],
    "flops": COLOURS[1],
    "kernels": COLOURS[5],
    "idle": STATE_COLOURS[2],
    "unsplit": COLOURS[3],
}
MEMORY_COLOURS = {
    "weights": COLOURS[0],
    "KV cache": COLOURS[4],
    "other": COLOURS[5],
    "free": STATE_COLOURS[2],
    "other and unused": COLOURS[3],
}
SENSED = (  # what a course of sensors shows: unit, name, number and factor
    ("%", "SM active", sensors.SM_ACTIVE, 100.0),
    ("%", "DRAM active", sensors.DRAM_ACTIVE, 100.0),
    ("%", "tensor active", sensors.TENSOR_ACTIVE, 100.0),
    ("%", "GPU util", sensors.GPU_UTIL, 100.0),
    ("W", "power", sensors.POWER, 1.0),
    ("MHz", "SM clock", sensors.SM_CLOCK, 1e-6),
    ("ms", "host-speed probe", sensors.PROBE, 1e3),
    ("ms", "its CPU time", sensors.PROBE_CPU, 1e3),
)
PARTS = 150  # of a window in time
PADDING = 10  # pixels between marks and the end of an axis
ROW = 26  # pixels of an interval's row


def intervals(points: Sequence[Point], what: Figure = output_rate) -> list[Interval]:
    """The 95 % interval of each point's mean; the noise is that of all these points."""
    if any(not what(point) for point in points):
        return [Interval(math.nan) for _ in points]
    seen = point_differences(points, what)
    return [factor(seen.mean(i)) for i in range(len(points))]


def throughput(curve: Curve, flat: int | None) -> Spec:
    """Output tokens/s over the load: intervals, the fitted law, the plateau from `flat` on, predictions, roofline."""
    valid, last = curve.valid, curve.valid[-1].concurrency
    loads = loads_between(valid[0].concurrency, last)
    law, work, peaks = saturation_law(curve), work_of_curve(curve), peaks_of_curve(curve)
    most = 1.15 * max(end for i in intervals(valid) for end in (i.high, i.value) if end and math.isfinite(end))
    layers: list[Spec] = []
    if flat is not None and flat < last:  # the loads of the plateau, shaded
        x = {**_loads(curve), "field": "from"}
        shade = {"type": "rect", "opacity": 0.12, "color": COLOURS[2], "aria": False}
        data = {"values": [{"from": flat, "to": last}]}
        layers.append({"data": data, "mark": shade, "encoding": {"x": x, "x2": {"field": "to"}}})
    if work and peaks:
        bound = [{"x": load, "y": ceiling_tokens_per_s(work, peaks, load)} for load in loads]
        layers.append(_line([row for row in bound if row["y"] <= most], strokeDash=DASHES, opacity=0.7))
    if law:
        layers.append(_line([{"x": load, "y": law.tokens_per_s(load)} for load in loads]))
    if curve.kv_capacity and valid[0].concurrency < curve.kv_capacity < last:
        # A line at the number of requests that the KV cache has room for.
        full: Spec = {"values": [{"x": curve.kv_capacity, "text": "KV cache full"}]}
        at = {"x": {"field": "x", "type": "quantitative"}}
        text = {"type": "text", "align": "right", "dx": -4, "baseline": "bottom", "fontSize": 10}
        layers.append({"data": full, "mark": {"type": "rule", "strokeDash": [2, 3]}, "encoding": at})
        words = {"y": {"value": 12}, "text": {"field": "text"}}
        layers.append({"data": full, "mark": text, "encoding": at | words})
    layers += _dots([_point_row(point, seen, curve.subject) for point, seen in zip(valid, intervals(valid))])
    if curve.predictions:
        told = [
            (p.concurrency, p.tokens_per_s, f"{shown(p.tokens_per_s.value)} tokens/s, predicted")
            for p in curve.predictions
        ]
        predicted = [{"x": x, "y": y.value, "low": y.low, "high": y.high, "shown": text} for x, y, text in told]
        layers += _dots(predicted, predicted=True)
    knob = curve.axes.knob
    y, of = curve.axes.throughput if knob else TOKENS_PER_S, knob or IN_FLIGHT
    return _chart(layers, _loads(curve), axis("y", y), f"{y} over {of}, {curve.subject}")


def throughputs(named: Sequence[tuple[str, Curve]]) -> Spec:
    """Return output tokens/s of several sweeps over the load: intervals, fitted laws (solid), rooflines (dashed), and a
    ring where a plateau begins. Sweeps with the same roofline share its line."""
    points: Values = []
    laws: Values = []
    roofs: Values = []
    knees: Values = []
    for name, curve in named:
        valid, flat = curve.valid, curve.plateau().value
        loads = loads_between(valid[0].concurrency, valid[-1].concurrency)
        points += [_point_row(p, seen, name) | {"hollow": bool(p.degraded)} for p, seen in zip(valid, intervals(valid))]
        knees += [{"x": flat, "y": p.output_tokens_per_s, "series": name} for p in valid if p.concurrency == flat]
        if law := saturation_law(curve):
            laws += [{"x": load, "y": law.tokens_per_s(load), "series": name} for load in loads]
        if (work := work_of_curve(curve)) and (peaks := peaks_of_curve(curve)):
            drawn = {(row["x"], row["y"]) for row in roofs}
            bound = [(load, ceiling_tokens_per_s(work, peaks, load)) for load in loads]
            roofs += [{"x": load, "y": most, "series": name} for load, most in bound if (load, most) not in drawn]
    most = 1.3 * max(row["y"] for row in points)
    x = load_axis(sorted({row["x"] for row in points}))
    y = axis("y", TOKENS_PER_S) | {"scale": {"domain": [0, most], "nice": False}}  # wide intervals leave the chart
    names = [name for name, _ in named]
    spec = line_chart(points, x, y, names, joined=False)
    at = {channel: {"field": channel, "type": "quantitative"} for channel in "xy"} | {"color": _series(names)["color"]}
    ring = {"type": "point", "filled": False, "size": 260, "strokeWidth": 2, "aria": False}
    under = [row for row in roofs if row["y"] <= most]
    spec["layer"] += [
        {"data": {"values": laws}, "mark": LINE, "encoding": at},
        {"data": {"values": under}, "mark": {**LINE, "strokeDash": DASHES}, "encoding": at},
        {"data": {"values": knees}, "mark": ring, "encoding": at},
    ]
    return spec


def saturation_law(curve: Curve) -> Fit | None:
    """Return the fitted law; None if there is none, or it does not describe the curve."""
    try:
        law = fit(curve.points)
    except TooFewPoints:
        return None
    return law if law.describes and law.identified else None


def loads_between(first: float, last: float) -> list[float]:
    """Return loads for a smooth line on a logarithmic axis."""
    return [first * (last / first) ** (i / (SAMPLES - 1)) for i in range(SAMPLES)]


def ratios(series: PairSeries) -> list[float]:
    """Return candidate over baseline of each pair of a gate."""
    return [after / before for before, after in series.pairs if before and after is not None]


def margin_at(seen: Comparison) -> float:
    """Return the ratio at which the candidate costs more by the margin."""
    return 1 + seen.margin if seen.better == "lower" else 1 / (1 + seen.margin)


def line_chart(
    rows: Values,
    x: Spec,
    y: Spec,
    names: Sequence[str],
    *,
    strokes: Sequence[str] = (),
    rules: Sequence[Mapping[str, Any]] = (),
    guide: Values | None = None,
    joined: bool = True,
) -> Spec:
    """Return a chart of several series: points with their intervals, joined in the order of x.

    Args:
        rows: x, y, low and high (optional), series, hollow (degraded points), stroke and text (optional).
        names: All series in the order of their colors.
        strokes: Kinds of line of one series, solid first; `stroke` of each row is one of them.
        rules: Lines across the chart at an x or a y, each with a text.
        guide: Points of a dashed gray line behind the series.
    """
    look, place = _series(names), {"x": {**x, "field": "x"}, "y": {**y, "field": "y"}}
    colour = {"color": look["color"]}
    order = {"order": {"field": "order" if any("order" in row for row in rows) else "x", "type": "quantitative"}}
    dash = {}
    if len(strokes) > 1:
        scale = {"domain": list(strokes), "range": [*STROKES[: len(strokes)]]}
        legend = {"orient": "bottom", "symbolType": "stroke"}
        dash = {"strokeDash": {"field": "stroke", "type": "nominal", "title": None, "scale": scale, "legend": legend}}
    layers: list[Spec] = []
    if guide:
        layers.append(_line(guide, color=GREY, strokeDash=DASHES, opacity=0.8))
    for rule in rules:
        channel = "x" if "x" in rule else "y"
        data, at = {"values": [dict(rule)]}, {channel: {"field": channel, "type": "quantitative"}}
        text = {"type": "text", "align": "right", "dx": -3, "dy": -6, "fontSize": 10, "aria": False}
        edge = {"x": {"value": "width"}} if channel == "y" else {"y": {"value": 10}}
        layers.append({"data": data, "mark": {"type": "rule", "strokeDash": [2, 3], "aria": False}, "encoding": at})
        layers.append({"data": data, "mark": text, "encoding": {**at, **edge, "text": {"field": "text"}}})
    if joined:
        layers.append({"mark": LINE, "encoding": place | colour | dash | order})
    if any(row.get("low") is not None for row in rows):
        ends = {"x": place["x"], "y": {**y, "field": "low"}, "y2": {"field": "high"}, **colour}
        layers.append({"mark": WHISKER, "encoding": ends, "transform": [HAS_ENDS]})
    fill = {"condition": {"test": "datum.hollow", "value": 0}, "value": 1}
    points = {**place, **look, "stroke": look["color"], "fillOpacity": fill}
    layers.append({"mark": {"type": "point", "filled": True, "size": 45, "opacity": 1}, "encoding": points})
    if any(row.get("text") for row in rows):
        text = {"type": "text", "align": "left", "dx": 6, "dy": 9, "fontSize": 9, "aria": False}
        layers.append({"mark": text, "encoding": {**place, **colour, "text": {"field": "text"}}})
    return _chart(layers, x, y, f"{y['title']} over {x['title']}", rows)


def bars(rows: Values, x_title: str, y_title: str) -> Spec:
    """Return a chart of bars, side by side for each name. rows: x (a name), y, series, low and high, text."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    sort = list(dict.fromkeys(row["x"] for row in rows))
    crowded = sum(map(len, sort)) > 50
    ticks = {"labelAngle": -25 if crowded else 0, "labelLimit": 200}
    x = {"field": "x", "type": "nominal", "title": x_title, "sort": sort, "axis": ticks}
    y = axis("y", y_title)
    beside = {"xOffset": {"field": "series", "type": "nominal", "sort": names}}
    place = {"x": x, "y": {**y, "field": "y"}, **beside}
    ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, **beside}
    text = {"type": "text", "dy": -8, "fontSize": 10, "aria": False}
    layers: list[Spec] = [
        {"mark": {"type": "bar", "opacity": 0.85}, "encoding": {**place, "color": _series(names)["color"]}},
        {"mark": {**WHISKER, "color": "#1b1f24"}, "encoding": ends, "transform": [HAS_ENDS]},
    ]
    if any(row.get("text") for row in rows):
        rows = [row | {"top": max(row["y"], row.get("high") or 0.0)} for row in rows]
        at = {**place, "y": {**y, "field": "top"}, "text": {"field": "text"}}
        layers.append({"mark": text, "encoding": at})
    return _chart(layers, x, y, f"{y_title} by {x_title}", rows)


def share_axis(title: str) -> Spec:
    """Return an axis from 0 to 100 % for shares."""
    scale = {"domain": [0, 1.02], "nice": False, "zero": True}
    ticks = {"format": ".0%", "values": [0, 0.25, 0.5, 0.75, 1], "gridOpacity": 0.7}
    return {"type": "quantitative", "title": title, "scale": scale, "axis": ticks}


def latency(curve: Curve) -> Spec:
    """Latencies over the load, in ms."""
    values: Values = []
    for name, field in LATENCIES:
        points = [point for point in curve.valid if getattr(point, field) is not None]
        for point, seen in zip(points, intervals(points, e2e_s if field == "e2e_s" else figure_named(field))):
            low, high = (None if end is None else 1e3 * end for end in (seen.low, seen.high))
            ms = getattr(point, field)
            row = {"x": point.concurrency, "y": 1e3 * ms, "low": low, "high": high, "series": name}
            values.append(row | {"shown": f"{milliseconds(ms)} ms"})
    names = _drawn(dict(LATENCIES), values)
    layers = _dots(values, series=_series(names))
    return _chart(layers, _loads(curve), axis("y", "ms", scale="log"), f"latency over {IN_FLIGHT}, {curve.subject}")


def pareto(curves: Sequence[tuple[str, Curve]]) -> Spec:
    """Output tokens/s against mean E2E; points that another one beats are hollow."""
    values: Values = []
    for label, curve in curves:
        front = {point.concurrency for point in curve.pareto_front()}
        rates, waits = intervals(curve.valid), intervals(curve.valid, e2e_s)
        for point, rate, wait in zip(curve.valid, rates, waits):
            row = _point_row(point, rate, label) | {"x": point.e2e_s, "optimal": point.concurrency in front}
            values.append(row | {"left": wait.low, "right": wait.high, "load": point.concurrency})
    series = _series([label for label, _ in curves])
    x, y = axis("x", "mean E2E latency, s", scale="log"), axis("y", TOKENS_PER_S, scale="log")
    optimal = {"filter": "datum.optimal"}
    across = {
        "mark": {"type": "rule", "strokeWidth": 1.5, "aria": False},
        "encoding": _xy(x, y, series) | {"x": {**x, "field": "left"}, "x2": {"field": "right"}},
        "transform": [{"filter": "isValid(datum.left) && isValid(datum.right)"}],
    }
    layers = [
        {"mark": LINE, "encoding": _xy(x, y, series), "transform": [optimal]},
        across,
        *_dots(None, series=series, hollow="!datum.optimal"),
        {
            "mark": {"type": "text", "align": "left", "dx": 8, "dy": 9, "fontSize": 10, "aria": False},
            "encoding": _xy(x, y, {}) | {"text": {"field": "load"}},
            "transform": [optimal],
        },
    ]
    return _chart(layers, x, y, "throughput against latency", values, height=320)


def batch(curve: Curve) -> Spec | None:
    """Sequences of an engine step over the load, beside the line on which all requests are in the batch."""
    values = [
        {"x": p.concurrency, "y": p.batch, "shown": shown(p.batch, 4)} for p in curve.valid if p.batch is not None
    ]
    if not values:
        return None
    ends = [{"x": row["x"], "y": row["x"]} for row in (values[0], values[-1])]
    layers = [_line(ends, strokeDash=DASHES), *_dots(values)]
    y = axis("y", "batch, sequences", scale="log")
    return _chart(layers, _loads(curve), y, f"batch held over {IN_FLIGHT}, {curve.subject}", height=200)


def shares(curve: Curve) -> Spec | None:
    """What the sensors and the data sheet say, in per cent over the load."""
    names = {
        "of the roofline": "roofline_fraction",
        "SM active": "sm_active",
        "DRAM active": "dram_active",
        "tensor active": "tensor_active",
        "KV cache used": "kv_usage",
    }
    values = [
        {"x": p.concurrency, "y": 100 * value, "series": name, "shown": f"{100 * value:.1f} %"}
        for name, field in names.items()
        for p in curve.valid
        if (value := getattr(p, field, None)) is not None
    ]
    if not values:
        return None
    present = _drawn(names, values)
    layers = _dots(values, series=_series(present))
    return _chart(layers, _loads(curve), axis("y", "%"), f"use of the device, {curve.subject}", height=200)


def step_parts_chart(rows: Sequence[StepRow], subject: str) -> Spec | None:
    """Parts of the mean step of each load, in per cent, one behind the other; None where none is known."""
    values: Values = []
    for row in rows:
        name, end = f"{row.point.concurrency} in flight", 0.0
        for field, column in STEP_PARTS.items():
            if text := column.cell(row):
                begin, end = end, end + 100 * getattr(row.parts, field)
                part = {"subject": name, "series": column.name.removesuffix(" %"), "x": begin, "end": end}
                values.append(part | {"shown": f"{text} % of {milliseconds(row.point.step_s)} ms"})
    looks = {column.name.removesuffix(" %"): STEP_COLOURS[field] for field, column in STEP_PARTS.items()}
    x = axis("x", "% of the step") | {"scale": {"domain": [0, 100]}}
    return _stacked(values, looks, x, f"parts of a step over {IN_FLIGHT}, {subject}") if values else None


def memory(rows: Sequence[MemoryRow]) -> Spec | None:
    """Memory of the GPUs of each set of engines, in GiB: of one engine behind the other, then what is left."""
    values: Values = []
    for row, name in zip(rows, memory_names(rows)):
        end = 0.0
        seen, several = row.memory, len(row.memory.engines) > 1
        parts: list[tuple[str, str, int]] = []  # whose, what, and how many bytes
        for number, engine in enumerate(seen.engines, 1):
            whose = f"engine {number}, {engine.model}" if several else engine.model
            parts += [(whose, "weights", engine.weight_bytes), (whose, "KV cache", engine.kv_bytes)]
        parts += [] if seen.other_bytes is None else [("all", "other", seen.other_bytes)]
        parts.append(("", "other and unused" if seen.used_bytes is None else "free", seen.left_bytes))
        for whose, series, size in parts:
            begin, end = end, end + size / GIB
            part = {"subject": name, "engine": whose, "series": series, "x": begin, "end": end}
            values.append(part | {"shown": f"{gib(size)} GiB"})
    most = max((row["end"] for row in values), default=0.0)
    x = axis("x", "GiB of the memory") | {"scale": {"domain": [0, most], "nice": False}}
    return _stacked(values, MEMORY_COLOURS, x, "memory of the GPU by engine") if values else None


def quantiles(name: str, values: Values, of: str = IN_FLIGHT) -> Spec:
    """Share of the requests over their latency, a line for each load. values: ms, share, load. of: what a load is."""
    x = axis("x", f"{name}, ms", scale="log")
    y = axis("y", "share of requests, %")
    legend = {"orient": "bottom", "columns": 6, "symbolType": "stroke"}
    scale = {"scheme": {"name": "viridis", "extent": [0.15, 0.9]}}
    colour = {"field": "load", "type": "ordinal", "title": of, "scale": scale, "legend": legend}
    encoding = _xy(x, y, {"color": colour}) | {"order": {"field": "y"}}
    layers: list[Spec] = [{"mark": {"type": "line", "aria": False}, "encoding": encoding}]
    return _chart(layers, x, y, f"{name} quantiles", values, height=220)


def goodput_chart(names: Sequence[str], loads: Iterable[int], field: str, title: str) -> Spec:
    """Goodput, or the share of good requests, over the load. The page's script fills it in."""
    series, y = _series(names), axis("y", title)
    x = load_axis(sorted(set(loads)))
    layers = [{"mark": LINE, "encoding": _xy(x, y, series)}, *_dots(None, series=series)]
    return _chart(layers, x, y, f"{title} over {IN_FLIGHT}", height=240) | {"usermeta": {"field": field}}


def forest(verdicts: Sequence[Verdict]) -> Spec | None:
    """The interval of each verdict of a claim against its bound; None where none has a value."""
    values = [
        _estimate(v.subject, Interval(v.value, v.low, v.high), v.threshold, v.state, shown(v.value))
        for v in verdicts
        if v.value is not None and math.isfinite(v.value)
    ]
    return _intervals(values, "", f"{verdicts[0].claim}: intervals and bounds") if values else None


def gate_forest(compared: Sequence[Comparison], series: Mapping[str, PairSeries], gated: Iterable[str]) -> Spec | None:
    """Candidate over baseline of each endpoint: every pair, the estimate with its interval, and the margin."""
    judged = set(gated)
    values: Values = []
    pairs: Values = []
    for each in compared:
        if each.ratio is None:
            continue
        state, bound = (each.outcome, margin_at(each)) if each.name in judged else (State.INCONCLUSIVE, None)
        values.append(_estimate(each.name, each.ratio, bound, state, f"{each.ratio.value:.4f}"))
        pairs += [{"subject": each.name, "pair": ratio} for ratio in ratios(series[each.name])]
    if not values:
        return None
    drawn = [1.0, *(row["pair"] for row in pairs)]
    spec = _intervals(values, "candidate / baseline", "candidate over baseline of each endpoint", drawn)
    names = _rows(row["subject"] for row in values)
    dots = {
        "data": {"values": pairs},
        "mark": {"type": "tick", "thickness": 1.5, "height": 8, "yOffset": 8, "opacity": 0.6, "aria": False},
        "encoding": {"x": {"field": "pair", "type": "quantitative"}, "y": names},
    }
    one = {"x": {"field": "one", "type": "quantitative"}}
    same = {"data": {"values": [{"one": 1}]}, "mark": {"type": "rule", "aria": False}, "encoding": one}
    spec["layer"] = [same, dots, *spec["layer"]]
    return spec


def interim(found: Comparison) -> Spec:
    """Mean ratio of an endpoint at each interim analysis, the boundaries beyond which it decides, and the margin."""
    named = {"mean ratio": "mean", "fails if worse than": "fails_beyond", "passes if better than": "passes_within"}
    values = [
        {"x": each.pairs, "y": ratio, "series": name, "shown": f"{ratio:.4f}"}
        for name, field in named.items()
        for each in found.interim
        if math.isfinite(ratio := getattr(each, field))
    ]
    looks = [each.pairs for each in found.interim]
    scale = {"domain": [looks[0] - 1, looks[-1] + 1], "nice": False}
    x = {"type": "quantitative", "title": "pairs", "scale": scale, "axis": {"values": looks, "grid": False}}
    y = axis("y", "candidate / baseline") | {"scale": {"zero": False}}
    fixed = {
        "data": {"values": [{"y": margin_at(found)}, {"y": 1}]},
        "mark": {"type": "rule", "strokeDash": DASHES, "aria": False},
        "encoding": {"y": {"field": "y", "type": "quantitative"}},
    }
    layers = [fixed, *_dots(values, series=_series(list(named)))]
    return _chart(layers, x, y, f"interim analyses of {found.name}", height=200)


def energy(curve: Curve) -> Spec | None:
    """Energy of an output token over the load, in mJ."""
    known = [(p.concurrency, p.energy_per_token_j) for p in curve.valid if p.energy_per_token_j]
    if not known:
        return None
    values = [{"x": load, "y": 1e3 * joules, "shown": f"{milliseconds(joules)} mJ"} for load, joules in known]
    y = axis("y", "mJ per output token", scale="log")
    return _chart(_dots(values), _loads(curve), y, f"energy over {IN_FLIGHT}, {curve.subject}", height=200)


def gain_chart(found: Sequence[tuple[str, Interval]], over: str = "one engine") -> Spec | None:
    """Throughput of several engines over that of one, by the name of the deployment."""
    values = [_estimate(name, gain, 1.0, above(gain, 1.0), f"{shown(gain.value)} times") for name, gain in found]
    return _intervals(values, "times the throughput of one engine", f"gain over {over}") if values else None


def timeline(measurement: Measurement) -> list[tuple[str, Spec]]:
    """The course of one window: engine steps, then sensors, each as a title with its chart."""
    run, sensed = measurement.run, measurement.run.telemetry
    steps = run.steps
    groups: dict[str, dict[str, tuple[Sequence[float], Sequence[float | None], float]]] = {
        "sequences": {
            "running": (steps.time_s, steps.running, 1.0),
            "waiting": (steps.time_s, steps.waiting, 1.0),
        },
        "%": {"KV cache used": (steps.time_s, steps.kv_usage, 100.0)},
    }
    for unit, name, number, times in SENSED if sensed else ():
        if sensed and number in sensed.columns:
            groups.setdefault(unit, {})[name] = (sensed.time_s, sensed.columns[number], times)
    drawn = []
    for unit, lines in groups.items():
        values = [row for name, line in lines.items() for row in _course(name, *line, run.window_s)]
        names = _drawn(lines, values)
        if names:
            x, y = axis("x", "seconds in the window"), axis("y", unit)
            series = {"color": _series(names)["color"]}
            layers: list[Spec] = [{"mark": {"type": "line", "aria": False}, "encoding": _xy(x, y, series)}]
            drawn.append((", ".join(names), _chart(layers, x, y, f"{unit} over time", values, height=150)))
    return drawn


def _course(
    name: str, at: Sequence[float], values: Sequence[float | None], factor: float, window_s: tuple[float, float]
) -> Values:
    """Means over as many equal parts of the window as eyes tell apart."""
    opens, closes = window_s
    parts: dict[int, list[float]] = {}
    for moment, value in zip(at, values):
        if value is not None and opens <= moment < closes:
            parts.setdefault(int(PARTS * (moment - opens) / (closes - opens)), []).append(factor * value)
    return [
        {"x": round((part + 0.5) / PARTS * (closes - opens), 3), "y": float(f"{fmean(each):.4g}"), "series": name}
        for part, each in sorted(parts.items())
    ]


def change_chart(found: Sequence[MetricChange], tolerance: float, description: str) -> Spec:
    """Candidate over baseline of one metric at each load, and the ratio from which on it is worse by the margin."""
    states = {Judgement.WORSE: State.FAILS, Judgement.INCONCLUSIVE: State.INCONCLUSIVE}
    values = []
    for each in found:
        bound = 1 / (1 + tolerance) if METRICS[each.metric].higher_is_better else 1 + tolerance
        state = states.get(each.verdict, State.PASSES)
        values.append(_estimate(each.load, each.ratio, bound, state, shown(each.ratio.value, 4)))
    return _intervals(values, "candidate / baseline", description)


def history(found: ReleaseHistory) -> Spec:
    """One metric over releases: each with its interval and with what became of it since the release before. A line
    joins releases that can be compared."""
    heading = METRICS[found.metric].heading
    values = _history_rows(found)
    order = [row["release"] for row in values]
    ticks = {"labelAngle": 0 if len(order) < 6 else -30}
    scale = {"type": "point", "padding": 0.5}
    x = {"type": "ordinal", "title": "vLLM", "sort": order, "scale": scale, "axis": ticks}
    better = "more" if METRICS[found.metric].higher_is_better else "less"
    y = axis("y", f"{heading} ({better} is better)")
    y["scale"] = {"domain": _history_domain(found), "nice": False, "zero": False}
    place = {"x": {**x, "field": "release"}, "y": {**y, "field": "y"}}
    plain = {"color": {"value": COLOURS[0]}}
    told = [
        {"field": name, "title": title} for name, title in (("release", ""), ("shown", "value"), ("ratio", "ratio"))
    ]
    # Colour and shape of what became of each release, with a legend of those that are there.
    known = [words for words in STEP_LOOKS if any(row["step"] == words for row in values)]
    step = {"field": "step", "type": "nominal", "title": None}
    legend = {"orient": "bottom", "columns": 2, "symbolSize": 70}
    colours, shapes = ([STEP_LOOKS[words][i] for words in known] for i in (0, 1))
    looks = {
        channel: {**step, "scale": {"domain": known, "range": each}, "legend": legend}
        for channel, each in (("color", colours), ("shape", shapes))
    }
    points = {**place, **looks, "tooltip": [*told, {"field": "step", "title": "it"}]}
    layers: list[Spec] = [
        {"mark": LINE, "encoding": {**place, **plain, "detail": {"field": "run", "type": "nominal"}}},
        {
            "mark": WHISKER,
            "encoding": {"x": place["x"], "y": {**y, "field": "low"}, "y2": {"field": "high"}, **plain},
            "transform": [HAS_ENDS],
        },
        {"mark": {"type": "point", "filled": True, "size": 90, "opacity": 1}, "encoding": points},
        *(
            {
                "mark": {"type": "text", "dy": away, "fontSize": 12, "aria": False},
                "encoding": {**place, "text": {"field": field}},
            }
            for field, away in (("risen", -14), ("fallen", 16))
        ),
    ]
    return _chart(layers, x, y, f"{heading} over releases, {found.subject}", values, height=220)


def _history_rows(found: ReleaseHistory) -> Values:
    """A row for each release. run: number of the line that it lies on. risen, fallen: the ratio of a certain step."""
    times, run, values = METRICS[found.metric].scale, 0, list[dict[str, Any]]()
    for each in found.releases:
        step = each.step
        words = each.step_words or FIRST_RELEASE
        run += words == NOT_COMPARABLE
        low, high = (None if end is None else times * end for end in (each.mean.low, each.mean.high))
        row = {"release": each.release, "y": times * each.mean.value, "low": low, "high": high, "step": words}
        ratio = shown(step.ratio.value, 4) if step else ""
        row |= {"shown": shown(times * each.mean.value, 4), "ratio": ratio, "run": run}
        certain = step.ratio.value if step and step.verdict in WORDS else 1.0
        values.append(row | {"risen": ratio if certain > 1 else "", "fallen": ratio if certain < 1 else ""})
    return values


def cut_whiskers(found: ReleaseHistory) -> list[str]:
    """Releases whose interval goes on beyond the chart."""
    least, most = (end / METRICS[found.metric].scale for end in _history_domain(found))
    return [
        each.release
        for each in found.releases
        if each.mean.low is not None and each.mean.high is not None and (each.mean.low < least or each.mean.high > most)
    ]


def _history_domain(found: ReleaseHistory) -> list[float]:
    """Ends of the axis: every mean, the margin around them, and as much of the intervals as leaves steps visible."""
    times = METRICS[found.metric].scale
    means = [times * each.mean.value for each in found.releases]
    ends = [times * end for each in found.releases for end in (each.mean.low, each.mean.high) if end is not None]
    least, most, margin = min(means), max(means), found.tolerance * max(means)
    reach = max(most - least, FARTHEST * margin)
    low = min(least - margin, max(min(ends, default=least), least - reach))
    high = max(most + margin, min(max(ends, default=most), most + reach))
    room = 0.1 * (high - low)  # for the number at a step
    return [low - room, high + room]


def _estimate(subject: str, seen: Interval, bound: float | None, state: State, text: str) -> dict[str, Any]:
    """Row of `_intervals`. text: the value for people."""
    ends = {"x": seen.value, "low": seen.low, "high": seen.high, "bound": bound}
    return {"subject": subject, **ends, "state": state.value, "shown": text}


def _intervals(values: Values, x_title: str, description: str, others: Sequence[float] = ()) -> Spec:
    """Rows of estimates with their intervals, and the bound of each row as a line across it. others: that the axis
    reaches too."""
    known = [*others, *(row[name] for row in values for name in ("x", "bound") if row[name] is not None)]
    reach = FARTHEST * ((max(known) - min(known)) or abs(known[0]) or 1.0)
    ends = [row[name] for row in values for name in ("low", "high") if row[name] is not None]
    least = max(min(known) - reach, min(ends, default=min(known)))
    most = min(max(known) + reach, max(ends, default=max(known)))
    room = 0.06 * ((max(most, *known) - min(least, *known)) or 1.0)
    domain = [min(least, *known) - room, max(most, *known) + room]
    scale = {"domain": domain, "nice": False, "zero": False}
    axis = {"format": "~s" if max(map(abs, domain)) >= 1000 else "~r", "tickCount": 6, "labelOverlap": True}
    x = {"type": "quantitative", "title": x_title or None, "scale": scale, "axis": axis}
    y = _rows([row["subject"] for row in values])
    colour, shape = (
        {"field": "state", "type": "nominal", "scale": {"domain": STATES, "range": looks}, "legend": None}
        for looks in (STATE_COLOURS, ["circle", "cross", "diamond"])
    )
    told = [{"field": "subject", "title": ""}, {"field": "shown", "title": "value"}, {"field": "state", "title": "it"}]
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": colour}
    layers = [
        {
            "mark": {"type": "tick", "thickness": 2, "height": ROW - 4, "aria": False},
            "encoding": {"x": {**x, "field": "bound"}, "y": y},
            "transform": [{"filter": "isValid(datum.bound)"}],
        },
        {
            "mark": {"type": "rule", "clip": True, "strokeWidth": 2.5, "aria": False},
            "encoding": interval,
            "transform": [HAS_ENDS],
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"x": {**x, "field": "x"}, "y": y, "color": colour, "shape": shape, "tooltip": told},
        },
    ]
    data = {"name": "rows", "values": values}
    size = {"height": ROW * len(values), "width": "container"}
    return {"description": description, "data": data, **size, "layer": layers}


def _stacked(values: Values, looks: Mapping[str, str], x: Spec, description: str) -> Spec:
    """A bar for each subject, of parts from x to end. looks: the colour of each series, in the order of the key."""
    named = _drawn(looks, values)
    key = {"orient": "bottom", "columns": 3, "symbolType": "square", "symbolSize": 110}
    scale = {"domain": named, "range": [looks[name] for name in named]}
    colour = {"field": "series", "type": "nominal", "title": None, "scale": scale, "legend": key}
    said = {"subject": "", "engine": "of", "series": "part", "shown": "has"}
    told = [{"field": name, "title": title} for name, title in said.items() if name in values[0]]
    y = _rows(row["subject"] for row in values)
    x = x | {"field": "x", "axis": x["axis"] | {"labelSeparation": 8, "labelFlush": False}}
    encoding = {"x": x, "x2": {"field": "end"}, "y": y, "color": colour, "tooltip": told}
    layer = {"mark": {"type": "bar", "height": {"band": 0.7}}, "encoding": encoding}
    size = {"height": ROW * len(y["sort"]), "width": "container"}
    return {"description": description, "data": {"name": "rows", "values": values}, **size, "layer": [layer]}


def _rows(names: Iterable[str]) -> Spec:
    """A row for each name, in their order."""
    axis = {"labelLimit": 240, "ticks": False}
    return {"field": "subject", "type": "nominal", "title": None, "sort": list(dict.fromkeys(names)), "axis": axis}


def _point_row(point: Point, seen: Interval, label: str) -> dict[str, Any]:
    rate = point.output_tokens_per_s
    row = {"x": point.concurrency, "y": rate, "low": seen.low, "high": seen.high, "series": label}
    return row | {"degraded": bool(point.degraded), "shown": f"{shown(rate, 4)} tokens/s"}


def _line(values: Values, **look: Any) -> Spec:
    mark = {"type": "line", "color": COLOURS[0], "strokeWidth": 1.2, "aria": False, **look}
    x, y = ({"field": name, "type": "quantitative"} for name in "xy")
    return {"data": {"values": values}, "mark": mark, "encoding": {"x": x, "y": y}}


def _dots(
    values: Values | None, *, series: Spec | None = None, predicted: bool = False, hollow: str = "datum.degraded"
) -> list[Spec]:
    """Whiskers and points. values: None for those of the chart, whose points it joins itself. series: encoding that
    tells several apart. hollow: of which points."""
    x, y = ({"field": name, "type": "quantitative"} for name in "xy")
    look = series or {"color": {"value": COLOURS[0]}}
    colour = {"color": look["color"]}
    whiskers = {**WHISKER, **({"strokeDash": [3, 3]} if predicted else {})}
    ends = {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, **colour}
    told = [{"field": "series", "title": ""}] if series else []
    told += [{"field": "x", "title": "at"}, {"field": "shown", "title": "value"}]
    fill = {"condition": {"test": "true" if predicted else hollow, "value": 0}, "value": 1}
    points = {"x": x, "y": y, **look, "stroke": look["color"], "fillOpacity": fill, "tooltip": told}
    layers: list[Spec] = [
        {"mark": whiskers, "encoding": ends, "transform": [HAS_ENDS]},
        {"mark": {"type": "point", "filled": True, "size": 55, "opacity": 1}, "encoding": points},
    ]
    if values is None:
        return layers
    if series:
        layers.insert(0, {"mark": LINE, "encoding": {"x": x, "y": y, **colour}})
    return [{"data": {"values": values}, "layer": layers}]


def _drawn(names: Iterable[str], values: Values) -> list[str]:
    """Those of the names that a row is of, in their order."""
    present = {row["series"] for row in values}
    return [name for name in names if name in present]


def _series(names: Sequence[str]) -> Spec:
    """Colour and shape of each of several series."""
    several = len(COLOURS)
    numbers = range(max(len(names), 2 * several))  # a page that is laid beside this one has further names
    colours = [COLOURS[i % several] for i in numbers]
    shapes = [SHAPES[(i + i // several) % len(SHAPES)] for i in numbers]
    long = max(map(len, names), default=0) > 40
    key = {"orient": "bottom", "columns": 1 if long else 2, "symbolSize": 70, "labelLimit": 400}
    legend = key if len(names) > 1 else None
    encoding = {"field": "series", "type": "nominal", "title": None}
    return {
        channel: {**encoding, "scale": {"domain": list(names), "range": looks}, "legend": legend}
        for channel, looks in (("color", colours), ("shape", shapes))
    }


def _loads(curve: Curve) -> Spec:
    loads = {p.concurrency for p in curve.valid} | {p.concurrency for p in curve.predictions}
    return load_axis(sorted(loads), curve.axes.knob or IN_FLIGHT)


def load_axis(loads: Sequence[int], title: str = IN_FLIGHT) -> Spec:
    axis = {"values": loads, "labelOverlap": True, "grid": False, "format": "~d"}
    scale = {"type": "log", "base": 2, "nice": False, "padding": PADDING}
    return {"type": "quantitative", "title": title, "scale": scale, "axis": axis}


def axis(channel: str, title: str, scale: str = "linear") -> Spec:
    linear = scale == "linear"
    kind = {"type": scale, "zero": True} if linear else {"type": scale, "nice": False, "padding": PADDING}
    axis: Spec = {"format": "~s" if title == TOKENS_PER_S else ",.6~r", "labelOverlap": True}
    axis |= {} if linear else {"gridOpacity": 0.5}
    axis |= {"tickCount": 6} if channel == "y" else {}
    return {"type": "quantitative", "title": title, "scale": kind, "axis": axis}


def _xy(x: Spec, y: Spec, more: Spec) -> Spec:
    colour = {name: value for name, value in more.items() if name == "color"}
    return {"x": {**x, "field": "x"}, "y": {**y, "field": "y"}, **colour}


def _chart(
    layers: list[Spec], x: Spec, y: Spec, description: str, values: Values | None = None, height: int = 300
) -> Spec:
    """Layers on shared axes, as wide as there is room."""
    spec: Spec = {"description": description, "width": "container", "height": height, "layer": layers}
    spec["data"] = {"name": "rows", "values": values or []}
    for layer in (part for each in layers for part in each.get("layer", [each])):
        for channel, axis in (("x", x), ("y", y)):
            if (encoded := layer["encoding"].get(channel)) and "field" in encoded:
                encoded |= {name: value for name, value in axis.items() if name not in encoded}
    return spec
