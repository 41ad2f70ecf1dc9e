"""Charts of planted figures are as they are kept: values of points, intervals and bounds where they must be. Axes and
bars hold for any numbers, and Vega-Lite knows each kind of chart."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st
from launches import pairs
from planted import gated, lawful, sweep
from sections import difference, in_layers, vega_lite
from stored_records import KNOWN, engine_alone, repeats
from strategies import WELL, noisy_curve, point

from pytest_slmserve.analysis import estimates, points
from pytest_slmserve.analysis.compare.changes import release_histories
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.page import charts
from pytest_slmserve.schema import sensors

NUMBERS = st.floats(-1e6, 1e6)
PARTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y"]), st.floats(0.01, 1e3)), max_size=8)
LOADS = (1, 4, 16, 64, 256, 512)

SWEEP = sweep({1: 100, 2: 180, 4: 300, 8: 305, 16: 308}, (0.99, 1, 1.01))
TWO = [replace(lawful(LOADS, (1, 1.01), t_inf=t), subject=name) for name, t in (("a", 10_000.0), ("b", 5000.0))]
ADAPTIVE = {"planned": tuple(2**i for i in range(11)), "adaptive": 0.1}
BENT = noisy_curve({1: 10.0, 16: 160.0, 128: 1200.0, 256: 700.0, 512: 650.0})
BARS = [{"x": "a", "y": 2.0, "high": 3.0, "series": "s", "text": "2"}, {"x": "b", "y": 1.0, "series": "s", "text": "1"}]
VERDICTS = [  # an interval far beyond the bound leaves the chart
    Verdict("claim", "near", State.PASSES, "", 0.05, 0.04, 0.06, 0.1),
    Verdict("claim", "far", State.INCONCLUSIVE, "", 0.2, -50.0, 90.0, 0.1),
    Verdict("claim", "none", State.INCONCLUSIVE, ""),
]
STEPS = {"0.9.0": (1000, 1001), "0.10.0": (900, 901), "0.11.0": (901, 902), "0.12.0": (700, 701)}
WIDE = {"0.9.0": (500, 1500), "0.10.0": (1020, 1021), "0.11.0": (900, 901)}  # a whisker is cut
CLOSE = {"0.9.0": (1000.0, 1000.1), "0.10.0": (1000.2, 1000.3)}  # and a small difference looks small


def history(rates: dict[str, tuple[float, ...]], elsewhere: str = "") -> tuple[dict, list[str]]:
    """The chart of the rate, and what is cut. elsewhere: a release that another host measured."""
    made = []
    for release, each in rates.items():
        where = replace(KNOWN, vllm=release, host="two" if release == elsewhere else KNOWN.host)
        made += repeats(each, environment=where, launch=release)
    return charts.history(release_histories(made)[0])


def test_charts_match_expected_file():
    known = {"sm_active": 0.5, "energy_per_token_j": 0.05, "tokens_per_busy_s": 400.0}
    sensed = replace(SWEEP, points=tuple(replace(p, **known) for p in SWEEP.points))
    window = engine_alone(columns={**WELL, sensors.POWER: lambda at: 300 + at, sensors.PROBE: 0.006})
    slower = gated(pairs(4, speed=0.9)).compared
    interim = next(each for each in gated(pairs(6)).compared if each.interim)
    drawn = {
        "a sweep, flat from 4 on": charts.throughputs([("opt-1.3b", SWEEP)], 4),
        "beside it the rate of the GPU": charts.throughputs([("opt-1.3b", sensed)], 4),
        "flat from its last load on": charts.throughputs([("opt-1.3b", SWEEP)], 16),
        "two sweeps": charts.throughputs([(c.subject, c) for c in TWO]),
        "no law": charts.throughputs([("bent", BENT)]),
        "predicted loads": charts.throughputs([("a", lawful((1, 128, 256, 1024), (1, 1.001), **ADAPTIVE))]),
        **{  # requests of 96 in 1,365 blocks of 16
            f"a full cache, {least} to {most}": charts.throughputs([("a", lawful((least, most), (1,)))])
            for least, most in ((64, 512), (64, 227), (1, 4))
        },
        "throughput against latency": charts.pareto([("a", BENT)]),
        "bars": charts.bars(BARS, "model", "power, W"),
        "verdicts": charts.forest(VERDICTS),
        "a gate": charts.gate_forest(slower),
        "interim analyses": charts.interim(interim),
        "releases, the last on another host": history(STEPS, elsewhere="0.12.0")[0],
        "releases, of which one is wide": history(WIDE)[0],
        "releases that are close": history(CLOSE)[0],
        **{f"load: {each.title}": each.spec for each in charts.load_charts(sensed)},
        **{f"window: {each.title}": each.spec for each in charts.timeline(window, "One window")},
    }
    assert [name for name, spec in drawn.items() if not vega_lite().is_valid(spec)] == []
    assert difference("charts", {name: in_layers(spec) for name, spec in drawn.items()}) == ""
    assert (history(WIDE)[1], history(CLOSE)[1]) == (["0.9.0"], [])


def test_chart_rows_show_intervals():
    lost = gated(pairs(4, failures=1)).compared
    energy = next(chart.spec for chart in charts.load_charts(SWEEP) if chart.title == "Energy")
    assert charts.forest(VERDICTS[2:]) is charts.gate_forest(lost) is charts.stacked_bars([], {}, "", "") is None
    assert energy is None
    several = charts.series_looks([f"series {n}" for n in range(12)])
    looks = list(zip(several["color"]["scale"]["range"], several["shape"]["scale"]["range"]))
    assert len({*looks[:12]}) == 12 and several["color"]["legend"]["columns"] == 2
    assert charts.series_looks(["one"])["color"]["legend"] is None
    assert charts.series_looks(["one", "x" * 41])["color"]["legend"]["columns"] == 1
    rows = charts.point_rows(SWEEP.valid, "output_tokens_per_s", "a", 2.0, "u", extra=1)
    seen = [estimates.factor(points.point_differences(SWEEP.valid, points.output_rate).mean(i)) for i in range(5)]
    for row, one, p in zip(rows, seen, SWEEP.valid, strict=True):
        assert (row["x"], row["y"], row["extra"]) == (p.concurrency, 2 * p.output_tokens_per_s, 1)
        assert (row["low"], row["high"]) == pytest.approx((2 * one.low, 2 * one.high)) and row["shown"].endswith(" u")
    some = [replace(point(1, [9.0]), sm_active=0.5), point(2, [9.0]), replace(point(4, [9.0]), sm_active=math.inf)]
    (row,) = charts.point_rows(some, "sm_active", "a", 100.0, "%")
    assert (row["x"], row["y"], row["low"], row["shown"]) == (1, 50.0, None, "50.00 %")
    (hollow,) = charts.point_rows([replace(point(1, [9.0, 9.1]), degraded=("hot",))], "e2e_s", "a", noise=False)
    assert (hollow["hollow"], hollow["low"]) == (True, None)
    unknown = charts.intervals([point(1, [0.0, 1.0], [1.0, 1.0]), point(2, [2.0, 2.1])])  # over nothing
    assert all(math.isnan(each.value) and each.low is None for each in unknown)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.lists(st.none() | NUMBERS, max_size=6), st.floats(0.1, 1e6))
def test_axis_covers_estimates_with_bounds(values, ends, reach):
    low, high = charts.axis_ends(values, ends, reach, 0.1)
    near = [min(max(end, min(values) - reach), max(values) + reach) for end in ends if end is not None]
    least, most = min([*values, *near]), max([*values, *near])
    room = 0.1 * ((most - least) or 1.0)
    assert (low, high) == pytest.approx((least - room, most + room))
    others = [end for end in ends if end is not None]
    assume(any(values + others))
    found = [(str(n), estimates.Interval(value), None, State.PASSES, "") for n, value in enumerate(values)]
    low, high = charts.interval_chart(found, "", "", others)["layer"][-1]["encoding"]["x"]["scale"]["domain"]
    assert low < min([*values, *others]) and max([*values, *others]) < high


@given(PARTS.filter(bool))
def test_stacked_bar_parts_add_up(sizes):
    parts = [{"subject": subject, "series": series, "size": size, "shown": ""} for subject, series, size in sizes]
    spec = charts.stacked_bars(parts, {"x": "red", "z": "grey", "y": "blue"}, "GiB", "memory")
    ends: dict[str, float] = {}
    for row in spec["data"]["values"]:
        assert row["x"] == ends.get(row["subject"], 0.0) and row["end"] - row["x"] == pytest.approx(row["size"])
        ends[row["subject"]] = row["end"]
    assert ends == {each: pytest.approx(sum(size for name, _, size in sizes if name == each)) for each in ends}
    scale, there = spec["layer"][0]["encoding"]["color"]["scale"], {series for _, series, _ in sizes}
    looks = [(name, color) for name, color in (("x", "red"), ("y", "blue")) if name in there]
    assert list(zip(scale["domain"], scale["range"], strict=True)) == looks, "in its own order"
