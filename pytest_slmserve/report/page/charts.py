"""Charts as Vega-Lite specifications: plain dicts, whose values tests can read.

The colors of marks are distinct with any color vision, on a light and on a dark background.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.compare import changes
from pytest_slmserve.analysis.estimates import Interval, factor, grouped
from pytest_slmserve.analysis.gate.decision import Comparison
from pytest_slmserve.analysis.gate.diagnosis import is_of_cores
from pytest_slmserve.analysis.metrics.gpu_figures import ceiling_tokens_per_s
from pytest_slmserve.analysis.points import (
    Figure,
    Point,
    busy_rate,
    e2e_s,
    figure_named,
    output_rate,
    point_differences,
)
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.plateau import fit
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.section import Chart
from pytest_slmserve.report.text_table import figure as shown
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import TooFewPoints
from pytest_slmserve.schema.records import Measurement

Spec = dict[str, Any]
Values = list[dict[str, Any]]

# Okabe and Ito: distinct with any color vision.
BLUE, RED, GREEN, PINK, SKY, YELLOW = COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
GREY = "#8a8a8a"
STATES = {  # color and shape of a verdict
    State.PASSES.value: (GREEN, "circle"),
    State.FAILS.value: (RED, "cross"),
    State.INCONCLUSIVE.value: (GREY, "diamond"),
}
PERCENTILES = ("p50", "p99")  # of a latency, as solid and dashed lines
LATENCIES = {"E2E mean": "e2e_s", "E2E p99": "e2e_p99_s", "TTFT mean": "ttft_s", "TPOT mean": "tpot_s"}
SHARES = {
    "of the roofline": "roofline_fraction",
    "SM active": "sm_active",
    "DRAM active": "dram_active",
    "tensor active": "tensor_active",
    "KV cache used": "kv_usage",
}
INTERIM = {"mean ratio": "mean", "fails if worse than": "fails_beyond", "passes if better than": "passes_within"}
CONCURRENCY, TOKENS_PER_S = "concurrent requests", "output tokens/s"
SEEN, PER_BUSY_S = "output tokens per second", "output tokens per second in which a kernel ran"
PLANE = "Throughput against latency"
PLANE_NOTE = (
    "Up and to the left is better. Numbers: concurrent requests. Whiskers: 95% intervals. Hollow: another load beats "
    "it."
)
DASHES = [5, 4]
STROKES = ([1, 0], [5, 4], [2, 3], [8, 3, 2, 3])  # solid, dashed, dotted, both
SAMPLES = 60  # points of a smooth line
FIRST_RELEASE = "first release"
STEP_LOOKS = {  # color and shape of a release, by the change since the one before
    FIRST_RELEASE: (BLUE, "circle"),
    changes.WORDS[changes.Judgement.BETTER]: (GREEN, "triangle-up"),
    changes.WORDS[changes.Judgement.WORSE]: (RED, "cross"),
    changes.Judgement.SAME.value: (BLUE, "square"),
    changes.Judgement.NO_WORSE.value: (BLUE, "triangle-down"),
    changes.NO_DIFFERENCE: (GREY, "circle"),
    changes.TOO_FEW: (GREY, "triangle-right"),
    changes.NOT_COMPARABLE: (GREY, "diamond"),
}
FARTHEST = 3.0  # times the span of the estimates, then an interval is cut
SENSED = (  # unit, name, number and factor of each sensor over time
    ("%", "SM active", sensors.SM_ACTIVE, 100.0),
    ("%", "DRAM active", sensors.DRAM_ACTIVE, 100.0),
    ("%", "tensor active", sensors.TENSOR_ACTIVE, 100.0),
    ("%", "GPU util", sensors.GPU_UTIL, 100.0),
    ("W", "power", sensors.POWER, 1.0),
    ("MHz", "SM clock", sensors.SM_CLOCK, 1e-6),
    ("ms", "host-speed probe", sensors.PROBE, 1e3),
    ("ms", "its CPU time", sensors.PROBE_CPU, 1e3),
)
PARTS = 150  # of a window, the most that a reader can distinguish
PADDING = 10  # pixels between marks and the end of an axis
ROW = 26  # pixels of an interval's row

LINE: Spec = {"type": "line", "opacity": 0.7, "aria": False}
POINT: Spec = {"type": "point", "filled": True, "opacity": 1}
RULE: Spec = {"type": "rule", "aria": False}
TEXT: Spec = {"type": "text", "fontSize": 10, "aria": False}
TICK: Spec = {"type": "tick", "aria": False}


# Rows


def intervals(points: Sequence[Point], what: Figure = output_rate) -> list[Interval]:
    """Return the 95% interval of each point's mean, by the noise of all these points."""
    if any(not (values := what(point)) or min(values) <= 0 for point in points):  # a ratio to 0 has no interval
        return [Interval(math.nan) for _ in points]
    seen = point_differences(points, what)
    return [factor(seen.mean(i)) for i in range(len(points))]


def interval_row(x: Any, seen: Interval, series: str, hollow: object = False) -> dict[str, Any]:
    return {"x": x, "y": seen.value, "low": seen.low, "high": seen.high, "series": series, "hollow": bool(hollow)}


def point_rows(
    points: Sequence[Any], field: str, series: str, scale: float = 1.0, unit: str = "", noise: bool = True, **more: Any
) -> Values:
    """Return a row of `line_chart` for each point with a known figure.

    Args:
        unit: of the figure times `scale`.
        noise: whether to compute intervals, which takes time.
        more: further entries of each row.
    """
    known = [p for p in points if (value := getattr(p, field, None)) is not None and math.isfinite(value)]
    own = {"output_tokens_per_s": output_rate, "tokens_per_busy_s": busy_rate, "e2e_s": e2e_s}
    what = own.get(field) or figure_named(field)
    rows = []
    for point, seen in zip(known, intervals(known, what) if noise else [Interval(math.nan)] * len(known)):
        value = Interval(getattr(point, field), seen.low, seen.high).mapped(lambda end: scale * end)
        row = interval_row(point.concurrency, value, series, point.degraded)
        rows.append({**row, "shown": f"{shown(value.value, 4)} {unit}".strip(), **more})
    return rows


# Axes and layers


def axis(channel: str, title: str, scale: str = "linear", domain: Sequence[float] = (), **ticks: Any) -> Spec:
    """Return an axis of numbers.

    Args:
        scale: "linear" from 0, or "log".
        domain: both ends; empty to take them from the data.
    """
    kind: Spec = {"type": scale, "nice": False, "padding": PADDING} if scale == "log" else {"type": scale, "zero": True}
    told: Spec = {"format": "~s" if title == TOKENS_PER_S else ",.6~r", "labelOverlap": True}
    told |= {"gridOpacity": 0.5} if scale == "log" else {}
    told |= {"tickCount": 6} if channel == "y" else {}
    kind = {"domain": [*domain], "nice": False, "zero": False} if domain else kind
    return {"type": "quantitative", "title": title or None, "scale": kind, "axis": told | ticks}


def share_axis(title: str) -> Spec:
    """Return an axis from 0 to 100%."""
    return axis("x", title, domain=(0, 1.02), format=".0%", values=[0, 0.25, 0.5, 0.75, 1], gridOpacity=0.7)


def load_axis(loads: Iterable[float], title: str = CONCURRENCY) -> Spec:
    """Return a logarithmic axis with a tick for each load."""
    return axis("x", title, "log", values=sorted({*loads}), grid=False, format="~d")


def row_axis(names: Iterable[str]) -> Spec:
    ticks = {"labelLimit": 240, "ticks": False}
    return {"field": "subject", "type": "nominal", "title": None, "sort": list(dict.fromkeys(names)), "axis": ticks}


def named_looks(field: str, names: Iterable[str], looks: Iterable[Any], legend: Spec | None = None) -> Spec:
    """Return an encoding of names as colors, shapes or dashes."""
    scale = {"domain": [*names], "range": [*looks]}
    return {"field": field, "type": "nominal", "title": None, "scale": scale, "legend": legend}


def series_looks(names: Sequence[str], looks: Mapping[str, tuple[str, str]] | None = None) -> Spec:
    """Return the encodings of color and shape that distinguish series.

    Args:
        looks: color and shape of each name; None for default ones.
    """
    several = len(COLOURS)
    numbers = range(max(len(names), 2 * several))  # a report that is compared with this one adds names
    each = [(COLOURS[i % several], SHAPES[(i + i // several) % len(SHAPES)]) for i in numbers]
    colours, shapes = zip(*([looks[name] for name in names] if looks else each))
    long = max(map(len, names), default=0) > 40
    key = {"orient": "bottom", "columns": 1 if long else 2, "symbolSize": 70, "labelLimit": 400}
    legend = key if len(names) > 1 else None
    return {
        "color": named_looks("series", names, colours, legend),
        "shape": named_looks("series", names, shapes, legend),
    }


def layer(mark: Spec, values: Values | None = None, where: str = "", **encoding: Any) -> Spec:
    """Return a layer of a chart.

    Args:
        values: rows; None for those of the chart.
        where: expression that chooses rows.
        encoding: by channel; a text names a field.
    """
    encoded = {channel: {"field": what} if isinstance(what, str) else what for channel, what in encoding.items()}
    made: Spec = {"mark": mark, "encoding": encoded}
    if values is not None:
        made["data"] = {"values": values}
    if where:
        made["transform"] = [{"filter": where}]
    return made


def whiskers(low: str = "low", high: str = "high", along: str = "y", width: float = 1.5, **encoding: Any) -> Spec:
    """Return the layer of the intervals between two fields."""
    ends: Spec = {along: low, f"{along}2": high}
    mark = {**RULE, "strokeWidth": width, "clip": True}
    return layer(mark, where=f"isValid(datum.{low}) && isValid(datum.{high})", **ends, **encoding)


def guide(values: Values) -> Spec:
    """Return the layer of a dashed gray line."""
    return layer({**LINE, "color": GREY, "strokeDash": DASHES, "strokeWidth": 1.2}, values, x="x", y="y")


def chart(
    layers: Sequence[Spec], x: Spec, y: Spec, description: str, values: Values | None = None, height: int = 300
) -> Spec:
    """Return layers on shared axes, as wide as there is room."""
    axes = {"x": x, "y": y}
    drawn = [
        {**each, "encoding": {c: {**axes.get(c, {}), **e} if "field" in e else e for c, e in each["encoding"].items()}}
        for each in layers
    ]
    data = {"name": "rows", "values": values or []}
    return {"description": description, "width": "container", "height": height, "layer": drawn, "data": data}


def line_chart(
    rows: Values,
    x: Spec,
    y: Spec,
    names: Sequence[str] = (),
    *,
    looks: Mapping[str, tuple[str, str]] | None = None,
    strokes: Sequence[str] = (),
    rules: Iterable[Mapping[str, Any]] = (),
    joined: bool = True,
    dots: bool = True,
    under: Sequence[Spec] = (),
    description: str = "",
    height: int = 300,
) -> Spec:
    """Return a chart of series: points with their intervals, joined in the order of x.

    Args:
        rows: x, y, low and high (optional), series, hollow (not filled), stroke, order and text (optional), predicted
            (dashed interval), shown (the value in the tooltip).
        names: all series in the order of their colors. By default those of the rows.
        looks: color and shape of each series, if they have a meaning.
        strokes: kinds of line, solid first; `stroke` of each row is one of them.
        rules: lines across the chart at an x or a y, with an optional text.
        dots: whether points and intervals are drawn.
        under: layers behind all others.
    """
    look = series_looks(names or list(looks or dict.fromkeys(row["series"] for row in rows)), looks)
    color = look["color"]
    line: Spec = {"color": color, "order": {"field": "order" if any("order" in row for row in rows) else "x"}}
    line["order"]["type"] = "quantitative"
    if len(strokes) > 1:
        legend = {"orient": "bottom", "symbolType": "stroke"}
        line["strokeDash"] = named_looks("stroke", strokes, STROKES[: len(strokes)], legend)
    layers = list(under)
    for rule in rules:
        across = "x" if "x" in rule else "y"
        layers.append(layer({**RULE, "strokeDash": [2, 3]}, [dict(rule)], **{across: across}))
        if rule.get("text"):
            mark = {**TEXT, "align": "right", "dx": -3, "dy": -6}
            edge = {"x": {"value": "width"}} if across == "y" else {"y": {"value": 10}}
            layers.append(layer(mark, [dict(rule)], text="text", **{across: across}, **edge))
    if joined:
        layers.append(layer(LINE if dots else {"type": "line", "aria": False}, x="x", y="y", **line))
    if any(row.get("low") is not None for row in rows):
        dashed = {"condition": {"test": "datum.predicted", "value": [3, 3]}, "value": [1, 0]}
        dashes: Spec = {"strokeDash": dashed} if any(row.get("predicted") for row in rows) else {}
        layers.append(whiskers(x="x", color=color, **dashes))
    if dots:
        told = [{"field": "series", "title": ""}, {"field": "x", "title": "at"}, {"field": "shown", "title": "value"}]
        fill = {"condition": {"test": "datum.hollow", "value": 0}, "value": 1}
        points = {**look, "stroke": color, "fillOpacity": fill, "tooltip": told}
        layers.append(layer({**POINT, "size": 50}, x="x", y="y", **points))
    if any(row.get("text") for row in rows):
        mark = {**TEXT, "align": "left", "dx": 6, "dy": 9}
        layers.append(layer(mark, where="datum.text", x="x", y="y", color=color, text="text"))
    return chart(layers, x, y, description or f"{y['title']} over {x['title']}", rows, height)


# Charts of sweeps


def throughputs(named: Sequence[tuple[str, Curve]], flat: int | None = None) -> Spec:
    """Return the throughput of sweeps over the load.

    Fitted laws are solid. Rooflines and predicted loads are dashed, and sweeps with one roofline share its line. Rings
    mark where plateaus begin. A single sweep has its tokens per busy second (dotted) and a shaded plateau.

    Args:
        flat: load at which the plateau of a single sweep begins.
    """
    names, axes, single = [name for name, _ in named], named[0][1].axes, named[0][1] if len(named) == 1 else None
    of, points, rings, laws, predicted = ", ".join(names), *(list[dict[str, Any]]() for _ in range(4))
    busy = point_rows(single.valid, "tokens_per_busy_s", PER_BUSY_S, unit="tokens/s") if single else []
    if single and busy:
        named, names = [(SEEN, single)], [SEEN, PER_BUSY_S]
    roofs: dict[tuple[float, float], dict[str, Any]] = {}
    for name, curve in named:
        first, last = curve.valid[0].concurrency, curve.valid[-1].concurrency
        loads = [first * (last / first) ** (i / (SAMPLES - 1)) for i in range(SAMPLES)]
        seen = point_rows(curve.valid, "output_tokens_per_s", name, unit="tokens/s")
        points += seen
        knee = None if single else curve.plateau().value
        rings += [row for row in seen if row["x"] == knee]
        try:
            law = fit(curve.points)
        except TooFewPoints:
            law = None
        if law and law.describes and law.identified:
            laws += [{"x": load, "y": law.tokens_per_s(load), "series": name} for load in loads]
        if (work := curve.work) and (peaks := curve.peaks):
            bound = [(load, ceiling_tokens_per_s(work, peaks, load)) for load in loads]
            roofs |= {at: {"x": at[0], "y": at[1], "series": name} for at in bound if at not in roofs}
        for p in curve.predictions:
            row = interval_row(p.concurrency, p.tokens_per_s, name, hollow=True)
            predicted.append(row | {"predicted": True, "shown": f"{shown(row['y'])} tokens/s, predicted"})
    points += busy
    highest = max(min(row["high"] or row["y"], 2 * row["y"]) for row in points)  # wider intervals leave the chart
    most = max(1.3 * max(row["y"] for row in points), 1.15 * highest)
    highest = max([most, *(1.05 * row["y"] for row in predicted)])
    y = axis("y", axes.throughput if axes.knob else TOKENS_PER_S, domain=(0, highest))
    x = load_axis((row["x"] for row in (*points, *predicted)), axes.knob or CONCURRENCY)
    color = series_looks(names)["color"]
    below = [row for row in roofs.values() if row["y"] <= most]
    thin = {**LINE, "strokeWidth": 1.2}
    ring = {"type": "point", "filled": False, "size": 260, "strokeWidth": 2, "aria": False}
    under = [
        layer(thin, laws, x="x", y="y", color=color),
        layer({**thin, "strokeDash": DASHES}, below, x="x", y="y", color=color),
        layer(ring, rings, x="x", y="y", color=color),
    ]
    if busy:
        dotted = {**LINE, "strokeDash": STROKES[2]}
        under.append(layer(dotted, where=f"datum.series == '{PER_BUSY_S}'", x="x", y="y", color=color))
    rules: Values = []
    if single:
        least, largest, full = single.valid[0].concurrency, single.valid[-1].concurrency, single.kv_capacity
        if flat is not None and flat < largest:  # shades the loads of the plateau
            shade = {"type": "rect", "opacity": 0.12, "color": GREEN, "aria": False}
            under.insert(0, layer(shade, [{"from": flat, "to": largest}], x="from", x2="to"))
        if full and least < full < largest:
            rules = [{"x": full, "text": "KV cache full"}]
    words = f"{y['title']} over {x['title']}, {of}"
    return line_chart([*points, *predicted], x, y, names, rules=rules, joined=False, under=under, description=words)


def load_charts(curve: Curve) -> Iterator[Chart]:
    """Yield latencies, batch, use of the device, and energy per token over the loads of a sweep."""
    x = load_axis([*(p.concurrency for p in curve.valid), *(p.concurrency for p in curve.predictions)])

    def drawn(rows: Values, y: Spec, words: str, height: int = 200, **more: Any) -> Spec | None:
        described = f"{words}, {curve.subject}"
        return line_chart(rows, x, y, description=described, height=height, **more) if rows else None

    waits = [row for name, field in LATENCIES.items() for row in point_rows(curve.valid, field, name, 1e3, "ms")]
    held = point_rows(curve.valid, "batch", "batch held", noise=False)
    full: Values = [{"x": row["x"], "y": row["x"]} for row in (*held[:1], *held[-1:])]
    used = [
        row for name, field in SHARES.items() for row in point_rows(curve.valid, field, name, 100.0, "%", noise=False)
    ]
    known = [point for point in curve.valid if point.energy_per_token_j]
    spent = point_rows(known, "energy_per_token_j", "energy", 1e3, "mJ", noise=False)
    latency = drawn(waits, axis("y", "ms", "log"), f"latency over {CONCURRENCY}", 300)
    yield Chart("Latency over load", latency, "Whiskers: 95% interval of the mean. Both axes are logarithmic.")
    sequences, joules = axis("y", "batch, sequences", "log"), axis("y", "mJ per output token", "log")
    batches = drawn(held, sequences, f"batch held over {CONCURRENCY}", joined=False, under=[guide(full)])
    yield Chart("Batch held", batches, "Dashed: every concurrent request is in the batch.")
    yield Chart("Use of the device", drawn(used, axis("y", "%"), "use of the device"))
    yield Chart("Energy", drawn(spent, joules, f"energy over {CONCURRENCY}", joined=False))


def pareto(curves: Sequence[tuple[str, Curve]]) -> Spec:
    """Return output tokens/s over mean E2E. Points are hollow if another one beats them."""
    rows: Values = []
    for label, curve in curves:
        front = {point.concurrency for point in curve.pareto_front()}
        seen = point_rows(curve.valid, "output_tokens_per_s", label, unit="tokens/s")
        for point, row, wait in zip(curve.valid, seen, intervals(curve.valid, e2e_s), strict=True):
            best, load = row["x"] in front, row["x"]
            more = {"hollow": not best, "optimal": best, "left": wait.low, "right": wait.high, "load": load}
            rows.append({**row, "x": point.e2e_s, **more, "text": str(load) if best else ""})
    names = [label for label, _ in curves]
    x, y = axis("x", "mean E2E latency, s", scale="log"), axis("y", TOKENS_PER_S, scale="log")
    color = series_looks(names)["color"]
    front_line = layer(LINE, where="datum.optimal", x="x", y="y", color=color)
    under = [front_line, whiskers("left", "right", "x", y="y", color=color)]
    return line_chart(rows, x, y, names, joined=False, under=under, description=PLANE.lower(), height=320)


def stacked_bars(parts: Values, looks: Mapping[str, str], title: str, description: str) -> Spec | None:
    """Return a stacked bar for each subject; None without parts.

    Args:
        looks: color of each series, in the order of the legend.
    """
    if not parts:
        return None
    ends: dict[str, float] = {}
    rows: Values = []
    for part in parts:
        begin = ends.get(part["subject"], 0.0)
        ends[part["subject"]] = begin + part["size"]
        rows.append({**part, "x": begin, "end": ends[part["subject"]]})
    named = [name for name in looks if any(row["series"] == name for row in rows)]
    key = {"orient": "bottom", "columns": 3, "symbolType": "square", "symbolSize": 110}
    color = named_looks("series", named, (looks[name] for name in named), key)
    said = {"subject": "", "engine": "of", "series": "part", "shown": "has"}
    told = [{"field": name, "title": words} for name, words in said.items() if name in rows[0]]
    y, domain = row_axis(ends), (0, round(max(ends.values()), 6))
    x = axis("x", title, domain=domain, labelSeparation=8, labelFlush=False)
    bar = layer({"type": "bar", "height": {"band": 0.7}}, x="x", x2="end", y=y, color=color, tooltip=told)
    return chart([bar], x, y, description, rows, ROW * len(ends))


def bars(rows: Values, x_title: str, y_title: str) -> Spec:
    """Return bars, side by side for each name.

    Args:
        rows: x (a name), y, series, and optional low, high and text.
    """
    names = list(dict.fromkeys(row["series"] for row in rows))
    sort = list(dict.fromkeys(row["x"] for row in rows))
    ticks = {"labelAngle": -25 if sum(map(len, sort)) > 50 else 0, "labelLimit": 200}
    x = {"field": "x", "type": "nominal", "title": x_title, "sort": sort, "axis": ticks}
    beside: dict[str, Any] = {"xOffset": {"field": "series", "type": "nominal", "sort": names}}
    color = series_looks(names)["color"]
    layers = [
        layer({"type": "bar", "opacity": 0.85}, x=x, y="y", color=color, **beside),
        whiskers(x=x, color={"value": "#1b1f24"}, **beside),
    ]
    if any(row.get("text") for row in rows):
        rows = [row | {"top": max(row["y"], row.get("high") or 0.0)} for row in rows]
        layers.append(layer({**TEXT, "dy": -8}, x=x, y="top", text="text", **beside))
    return chart(layers, x, axis("y", y_title), f"{y_title} by {x_title}", rows)


def quantiles(name: str, values: Values, of: str = CONCURRENCY) -> Spec:
    """Return the share of requests over their latency, by load.

    Args:
        of: name of a load in the legend.
    """
    legend = {"orient": "bottom", "columns": 6, "symbolType": "stroke"}
    scale = {"scheme": {"name": "viridis", "extent": [0.15, 0.9]}}
    color = {"field": "load", "type": "ordinal", "title": of, "scale": scale, "legend": legend}
    line = layer({"type": "line", "aria": False}, x="x", y="y", color=color, order={"field": "y"})
    x, y = axis("x", f"{name}, ms", scale="log"), axis("y", "share of requests, %")
    return chart([line], x, y, f"{name} quantiles", values, 220)


def timeline(measurement: Measurement, group: str) -> Iterator[Chart]:
    """Yield engine steps and sensors of one window, as means over equal parts of it.

    Args:
        group: heading of the charts.
    """
    run, sensed = measurement.run, measurement.run.telemetry
    steps, (opens, closes) = run.steps, run.window_s
    courses: list[tuple[str, str, Sequence[float], Sequence[float | None], float]] = [
        ("sequences", "running", steps.time_s, steps.running, 1.0),
        ("sequences", "waiting", steps.time_s, steps.waiting, 1.0),
        ("%", "KV cache used", steps.time_s, steps.kv_usage, 100.0),
    ]
    if sensed:
        known = [each for each in SENSED if each[2] in sensed.columns]
        courses += [(unit, name, sensed.time_s, sensed.columns[number], times) for unit, name, number, times in known]
    for unit, lines in grouped(courses, lambda course: course[0]).items():
        rows: Values = []
        for _, name, at, values, times in lines:
            inside = [(t, value) for t, value in zip(at, values) if value is not None and opens <= t < closes]
            parts = grouped(inside, lambda pair: int(PARTS * (pair[0] - opens) / (closes - opens)))
            for part, pairs in sorted(parts.items()):
                x, y = (part + 0.5) / PARTS * (closes - opens), fmean(times * value for _, value in pairs)
                rows.append({"x": round(x, 3), "y": float(f"{y:.4g}"), "series": name})
        if rows:
            place = axis("x", "seconds in the window"), axis("y", unit)
            spec = line_chart(rows, *place, dots=False, description=f"{unit} over time", height=150)
            yield Chart(", ".join(dict.fromkeys(row["series"] for row in rows)), spec, group=group)


# Charts of verdicts

Estimate = tuple[str, Interval, float | None, State, str]  # subject, value, threshold, state, value as text


def axis_ends(
    estimates: Sequence[float], ends: Iterable[float | None], reach: float, room: float
) -> tuple[float, float]:
    """Return the ends of an axis for estimates and their intervals.

    Args:
        reach: distance from the estimates beyond which intervals are cut.
        room: margin, as a share of the axis.
    """
    known = [end for end in ends if end is not None]
    least = min([*estimates, max(min(estimates) - reach, min(known, default=math.inf))])
    most = max([*estimates, min(max(estimates) + reach, max(known, default=-math.inf))])
    margin = room * ((most - least) or 1.0)
    return least - margin, most + margin


def interval_chart(
    found: Sequence[Estimate], x_title: str, description: str, others: Sequence[float] = (), under: Sequence[Spec] = ()
) -> Spec | None:
    """Return a row for each estimate with its interval and threshold; None without any.

    Args:
        others: further values on the axis.
    """
    if not found:
        return None
    values: Values = []
    for subject, seen, bound, state, text in found:
        ends = {"x": seen.value, "low": seen.low, "high": seen.high, "bound": bound}
        values.append({"subject": subject, **ends, "state": state.value, "shown": text})
    known = [*others, *(row[name] for row in values for name in ("x", "bound") if row[name] is not None)]
    reach = FARTHEST * ((max(known) - min(known)) or abs(known[0]) or 1.0)
    domain = axis_ends(known, [row[name] for row in values for name in ("low", "high")], reach, 0.06)
    x = axis("x", x_title, domain=domain, format="~s" if max(map(abs, domain)) >= 1000 else "~r", tickCount=6)
    y = row_axis(row["subject"] for row in values)
    color, shape = (named_looks("state", STATES, looks) for looks in zip(*STATES.values()))
    told = [{"field": "subject", "title": ""}, {"field": "shown", "title": "value"}, {"field": "state", "title": "it"}]
    layers = [
        *under,
        layer({**TICK, "thickness": 2, "height": ROW - 4}, where="isValid(datum.bound)", x="bound", y=y),
        whiskers(along="x", width=2.5, y=y, color=color),
        layer({**POINT, "size": 90}, x="x", y=y, color=color, shape=shape, tooltip=told),
    ]
    return chart(layers, x, y, description, values, ROW * len(values))


def forest(verdicts: Sequence[Verdict]) -> Spec | None:
    """Return the interval of each verdict with its threshold; None if no verdict has a value."""
    found = [
        (v.subject, Interval(v.value, v.low, v.high), v.threshold, v.state, shown(v.value))
        for v in verdicts
        if v.value is not None and math.isfinite(v.value)
    ]
    return interval_chart(found, "", f"{verdicts[0].claim}: intervals and thresholds")


def gate_forest(compared: Sequence[Comparison]) -> Spec | None:
    """Return candidate over baseline of each endpoint: pairs, interval, and margin.

    Own cores are left out, because they can change so much that the margins would vanish.
    """
    found: list[Estimate] = []
    pairs: Values = []
    for each in filterfalse(is_of_cores, compared):
        if each.ratio is not None:
            bound = margin_at(each) if each.gated else None
            found.append((each.name, each.ratio, bound, each.outcome, f"{each.ratio.value:.4f}"))
            both = [(before, after) for before, after in each.pairs if before and after is not None]
            pairs += [{"subject": each.name, "pair": after / before} for before, after in both]
    mark = {**TICK, "thickness": 1.5, "height": 8, "yOffset": 8, "opacity": 0.6}
    under = [layer(RULE, [{"one": 1}], x="one"), layer(mark, pairs, x="pair", y=row_axis(name for name, *_ in found))]
    reached = [1.0, *(row["pair"] for row in pairs)]
    return interval_chart(found, "candidate / baseline", "candidate over baseline of each endpoint", reached, under)


def margin_at(seen: Comparison) -> float:
    return 1 + seen.margin if seen.better == "lower" else 1 / (1 + seen.margin)


def interim(found: Comparison) -> Spec:
    """Return the mean ratio at each interim analysis, with boundaries and margin."""
    rows = [
        {"x": each.pairs, "y": ratio, "series": name, "shown": f"{ratio:.4f}"}
        for name, field in INTERIM.items()
        for each in found.interim
        if math.isfinite(ratio := getattr(each, field))
    ]
    looks = [each.pairs for each in found.interim]
    x = axis("x", "pairs", domain=(looks[0] - 1, looks[-1] + 1), values=looks, grid=False)
    y = axis("y", "candidate / baseline") | {"scale": {"zero": False}}
    fixed: Values = [{"y": margin_at(found)}, {"y": 1}]
    return line_chart(rows, x, y, [*INTERIM], rules=fixed, description=f"interim analyses of {found.name}", height=200)


def history(found: changes.ReleaseHistory) -> tuple[Spec, list[str]]:
    """Return a metric over releases with lines between comparable ones, and releases whose interval is cut."""
    metric, run, rows = changes.METRICS[found.metric], 0, list[dict[str, Any]]()
    for each in found.releases:
        run += each.step_words == changes.NOT_COMPARABLE  # number of the line that the release lies on
        mean = each.mean.mapped(lambda end: metric.scale * end)
        ratio = shown(each.step.ratio.value, 4) if each.step else ""
        more = {"shown": shown(mean.value, 4), "ratio": ratio, "run": run}
        certain = each.step is not None and each.step.verdict in changes.WORDS
        row = interval_row(each.release, mean, each.step_words or FIRST_RELEASE)
        rows.append({**row, **more, "text": ratio if certain else ""})
    means = [row["y"] for row in rows]
    margin = found.tolerance * max(means)
    reach = max(max(means) - min(means), FARTHEST * margin) - margin
    ends = [row[end] for row in rows for end in ("low", "high")]
    domain = axis_ends([min(means) - margin, max(means) + margin], ends, reach, 0.1)  # room for the number at a step
    cut = [row["x"] for row in rows if row["low"] is not None and (row["low"] < domain[0] or row["high"] > domain[1])]
    ticks = {"labelAngle": 0 if len(rows) < 6 else -30}
    scale = {"type": "point", "padding": 0.5}
    x = {"type": "ordinal", "title": "vLLM", "sort": [row["x"] for row in rows], "scale": scale, "axis": ticks}
    better = "more" if metric.higher_is_better else "less"
    y = axis("y", f"{metric.heading} ({better} is better)", domain=domain)
    line = layer({**LINE, "color": BLUE}, x="x", y="y", detail={"field": "run", "type": "nominal"})
    known = {words: look for words, look in STEP_LOOKS.items() if any(row["series"] == words for row in rows)}
    words = f"{metric.heading} over releases, {found.subject}"
    return line_chart(rows, x, y, looks=known, joined=False, under=[line], description=words, height=220), cut
