"""Charts: their rows are the values of points, intervals and bounds are where they must be, what leaves the axis is
cut, and Vega-Lite knows each kind of chart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from html_pages import values_of
from hypothesis import assume, given
from hypothesis import strategies as st
from launches import pairs
from stored_records import KNOWN, engine_alone, repeats
from strategies import WELL, curves, law, measurement, noisy_curve, point
from vega import vega_lite

from pytest_slmserve.analysis.compare.changes import release_histories
from pytest_slmserve.analysis.estimates import Interval, factor
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.analysis.points import output_rate, point_differences
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.page import charts
from pytest_slmserve.schema import sensors

NUMBERS = st.floats(-1e6, 1e6)


def measured(rates: dict[int, float], wobbles=(0.99, 1, 1.01), name: str = "opt-1.3b", **more: object) -> Curve:
    made = [measurement(n, rate * w, repeat=i) for n, rate in rates.items() for i, w in enumerate(wobbles)]
    return curve_of(name, made, **more)  # type: ignore[arg-type]


SWEEP = measured({1: 100, 2: 180, 4: 300, 8: 305, 16: 308})


def dots(spec: dict) -> list[dict]:
    """Rows that all layers of a chart share."""
    return spec["data"]["values"]


def own(spec: dict) -> list[list[dict]]:
    """Rows of each layer that has its own."""
    return [layer["data"]["values"] for layer in spec["layer"] if "data" in layer]


def columns(rows: list[dict], *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in rows]


def is_known(spec: dict) -> bool:
    return vega_lite().is_valid(spec)


# Axes and bars


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.lists(st.none() | NUMBERS, max_size=6), st.floats(0.1, 1e6))
def test_an_axis_reaches_all_estimates_and_of_their_intervals_what_is_near(estimates, ends, reach):
    low, high = charts.axis_ends(estimates, ends, reach, 0.1)
    near = [min(max(end, min(estimates) - reach), max(estimates) + reach) for end in ends if end is not None]
    least, most = min([*estimates, *near]), max([*estimates, *near])
    room = 0.1 * ((most - least) or 1.0)
    assert (low, high) == pytest.approx((least - room, most + room))


SIZES = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y"]), st.floats(0.01, 1e3)), max_size=8)


@given(SIZES)
def test_parts_of_a_bar_lie_one_behind_the_other_and_add_up(sizes):
    parts = [{"subject": subject, "series": series, "size": size, "shown": ""} for subject, series, size in sizes]
    spec = charts.stacked_bars(parts, {"x": "red", "z": "grey", "y": "blue"}, "GiB", "memory")
    assert (spec is None) is (not parts)
    ends = {}
    for row in dots(spec) if spec else ():
        assert row["x"] == ends.get(row["subject"], 0.0) and row["end"] - row["x"] == pytest.approx(row["size"])
        ends[row["subject"]] = row["end"]
    for subject, end in ends.items():
        assert end == pytest.approx(sum(size for name, _, size in sizes if name == subject))
    if spec:  # its key has the parts that there are, in its own order
        scale = spec["layer"][0]["encoding"]["color"]["scale"]
        there = [name for name in ("x", "y") if name in {series for _, series, _ in sizes}]
        assert (scale["domain"], scale["range"]) == (there, [{"x": "red", "y": "blue"}[name] for name in there])


def test_loads_have_ticks_of_their_own_and_shares_reach_their_whole():
    assert charts.load_axis([8, 1, 8])["axis"]["values"] == [1, 8]
    low, high = charts.share_axis("busy")["scale"]["domain"]
    assert low == 0 and 1 < high < 1.1
    assert charts.axis("y", "ms", "log")["scale"]["type"] == "log" and "domain" not in charts.axis("y", "ms")["scale"]


def test_series_are_told_apart_by_color_and_shape_and_named_if_there_are_several():
    several = charts.series_looks([f"series {n}" for n in range(12)])
    looks = list(zip(several["color"]["scale"]["range"], several["shape"]["scale"]["range"]))
    assert len({*looks[:12]}) == 12 and several["color"]["legend"]["columns"] == 2
    assert charts.series_looks(["one"])["color"]["legend"] is None
    assert charts.series_looks(["one", "x" * 41])["color"]["legend"]["columns"] == 1


def test_bars_have_their_text_above_their_interval():
    row = {"y": 2.0, "series": "s", "text": "2"}
    spec = charts.bars([{"x": "a", "high": 3.0, **row}, {"x": "b", **row}], "model", "power, W")
    assert columns(dots(spec), "top") == [(3.0,), (2.0,)] and is_known(spec)


# Points and their intervals


def test_rows_have_the_interval_of_the_repeats_and_pass_over_what_is_not_known():
    rows = charts.point_rows(SWEEP.valid, "output_tokens_per_s", "a", 2.0, "u", extra=1)
    seen = [factor(point_differences(SWEEP.valid, output_rate).mean(i)) for i in range(5)]
    for row, one, p in zip(rows, seen, SWEEP.valid, strict=True):
        assert (row["x"], row["y"], row["extra"]) == (p.concurrency, 2 * p.output_tokens_per_s, 1)
        assert (row["low"], row["high"]) == pytest.approx((2 * one.low, 2 * one.high)) and row["shown"].endswith(" u")
    some = [replace(point(1, [9.0]), sm_active=0.5), point(2, [9.0]), replace(point(4, [9.0]), sm_active=math.inf)]
    (row,) = charts.point_rows(some, "sm_active", "a", 100.0, "%")
    assert (row["x"], row["y"], row["low"], row["shown"]) == (1, 50.0, None, "50.00 %")
    (hollow,) = charts.point_rows([replace(point(1, [9.0, 9.1]), degraded=("hot",))], "e2e_s", "a", noise=False)
    assert (hollow["hollow"], hollow["low"]) == (True, None)


def test_a_ratio_to_nothing_has_no_interval():
    points = [point(1, [0.0, 1.0], [1.0, 1.0]), point(2, [2.0, 2.1])]
    assert all(math.isnan(seen.value) and seen.low is None for seen in charts.intervals(points))


# Sweeps


def test_throughput_has_the_plateau_the_law_and_the_roofline():
    spec = charts.throughputs([(SWEEP.subject, SWEEP)], 4)
    shade, law_of, roof, ring = own(spec)
    assert shade == [{"from": 4, "to": 16}] and ring == [] == roof, "it lies far above"
    rows = dots(spec)
    assert columns(rows, "x", "y") == [(p.concurrency, p.output_tokens_per_s) for p in SWEEP.points]
    assert all(row["low"] < row["y"] < row["high"] for row in rows) and is_known(spec)
    assert spec["layer"][-1]["encoding"]["y"]["scale"]["domain"][1] >= max(row["high"] for row in rows)
    assert law_of == [] or {row["series"] for row in law_of} == {SWEEP.subject}
    assert own(charts.throughputs([(SWEEP.subject, SWEEP)], 16))[0] != shade, "nothing lies past the last load"


def test_several_sweeps_have_rings_where_they_are_flat_and_laws_that_describe_them():
    loads, wobbles = (1, 4, 16, 64, 256, 512), (1, 1.01)
    two = [measured({c: law(c, t) for c in loads}, wobbles, name) for name, t in (("a", 10_000.0), ("b", 5000.0))]
    laws, roofs, rings = own(charts.throughputs([(c.subject, c) for c in two]))
    assert columns(rings, "series", "x") == [(c.subject, c.plateau().value) for c in two]
    assert {row["series"] for row in laws} == {"a", "b"} and {row["series"] for row in roofs} == {"a"}, "they share it"
    for row in laws:
        assert row["y"] == pytest.approx(law(row["x"], {"a": 10_050.0, "b": 5025.0}[row["series"]]), rel=0.01)
    bent = noisy_curve({1: 10.0, 16: 160.0, 128: 1200.0, 256: 700.0, 512: 650.0})
    assert own(charts.throughputs([("bent", bent)]))[0] == [], "the law does not describe it"


def test_predicted_loads_are_hollow_and_their_intervals_dashed():
    grid = tuple(2**i for i in range(11))
    curve = measured({c: law(c) for c in (1, 128, 256, 1024)}, (1, 1.001), planned=grid, adaptive=0.1)
    spec = charts.throughputs([("a", curve)])
    predicted = [row for row in dots(spec) if row.get("predicted")]
    assert [row["x"] for row in predicted] == [2, 4, 8, 16, 32, 64, 512]
    assert all(row["hollow"] and row["low"] < row["y"] < row["high"] for row in predicted)
    assert [layer for layer in spec["layer"] if layer["encoding"].get("strokeDash", {}).get("value") == [1, 0]]


@pytest.mark.parametrize(("loads", "full"), [((64, 512), {227}), ((64, 227), set()), ((1, 4), set())])
def test_a_full_cache_is_a_line_between_the_loads(loads, full):
    made = measured({c: law(c) for c in loads}, (1,))
    lines = {row["x"] for rows in own(charts.throughputs([("a", made)])) for row in rows if "text" in row}
    assert (made.kv_capacity, lines) == (227, full), "requests of 96 in 1,365 blocks of 16"


@given(curves(fewest=2))
def test_points_that_another_one_beats_are_hollow(curve):
    rows = dots(charts.pareto([("a", curve)]))
    for row, p in zip(rows, curve.points, strict=True):
        beaten = any(
            q.output_tokens_per_s >= p.output_tokens_per_s and q.e2e_s <= p.e2e_s
            and (q.output_tokens_per_s, q.e2e_s) != (p.output_tokens_per_s, p.e2e_s)
            for q in curve.points
        )  # fmt: skip
        assert (row["x"], row["y"], row["load"]) == (p.e2e_s, p.output_tokens_per_s, p.concurrency)
        text = "" if beaten else str(p.concurrency)
        assert (row["hollow"], row["optimal"], row["text"]) == (beaten, not beaten, text)


def test_charts_of_a_sweep_have_the_figures_of_its_points_in_their_units():
    points = tuple(replace(p, sm_active=0.5, energy_per_token_j=0.05) for p in SWEEP.points)
    drawn = {chart.title: chart.spec for chart in charts.load_charts(replace(SWEEP, points=points))}
    held, waits = drawn["Batch held"], dots(drawn["Latency over load"])
    means = [row["y"] for row in waits if row["series"] == "E2E mean"]
    assert means == pytest.approx([1e3 * p.e2e_s for p in points])
    assert columns(dots(held), "y") == [(p.batch,) for p in points]
    assert columns(own(held)[0], "x", "y") == [(1, 1), (16, 16)]
    assert {row["y"] for row in dots(drawn["Energy"])} == {50.0} and all(map(is_known, drawn.values()))
    assert {row["y"] for row in dots(drawn["Use of the device"]) if row["series"] == "SM active"} == {50.0}
    assert next(chart for chart in charts.load_charts(SWEEP) if chart.title == "Energy").spec is None


def test_the_course_of_a_window_has_the_steps_and_the_sensors_in_it():
    made = engine_alone(columns={**WELL, sensors.POWER: lambda at: 300 + at, sensors.PROBE: 0.006})
    opens, closes = made.run.window_s
    drawn = {chart.title: chart.spec for chart in charts.timeline(made, "One window")}
    rows, pieces = dots(drawn["power"]), dots(drawn["host-speed probe, its CPU time"])
    assert {row["y"] for row in pieces if row["series"] == "host-speed probe"} == {6.0}
    assert rows and all(0 < row["x"] < closes - opens for row in rows)
    wanted = [300 + opens + row["x"] for row in rows]
    assert [row["y"] for row in rows] == pytest.approx(wanted, abs=(closes - opens) / 30 + 0.1)
    running = [row["y"] for row in dots(drawn["running, waiting"]) if row["series"] == "running"]
    assert max(running) == 8 and min(running) >= 7 and is_known(drawn["power"])


# Verdicts and gates


def test_an_interval_far_beyond_the_bound_leaves_the_chart_and_the_estimates_stay_apart():
    near = Verdict("claim", "near", State.PASSES, "", 0.05, 0.04, 0.06, 0.1)
    far = Verdict("claim", "far", State.INCONCLUSIVE, "", 0.2, -50.0, 90.0, 0.1)
    spec = charts.forest([near, far])
    low, high = spec["layer"][1]["encoding"]["x"]["scale"]["domain"]
    assert -2 < low < 0.04 and 0.2 < high < 2 and is_known(spec)
    names = ("subject", "x", "bound", "state")
    assert columns(dots(spec), *names) == [("near", 0.05, 0.1, "passes"), ("far", 0.2, 0.1, "inconclusive")]
    unknown = Verdict("claim", "none", State.INCONCLUSIVE, "")
    assert charts.forest([unknown]) is None and len(dots(charts.forest([unknown, near]))) == 1


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.lists(NUMBERS, max_size=3))
def test_a_chart_of_intervals_reaches_every_estimate_bound_and_further_value(values, others):
    assume(any(values + others))
    found = [(str(n), Interval(value), None, State.PASSES, "") for n, value in enumerate(values)]
    low, high = charts.interval_chart(found, "", "", others)["layer"][-1]["encoding"]["x"]["scale"]["domain"]
    assert low < min([*values, *others]) and max([*values, *others]) < high


def test_a_gate_has_its_ratios_pairs_and_margins():
    found = judge_gate(pairs(4, speed=0.9), GateCriteria()).compared
    spec = charts.gate_forest(found)
    ratios, apart = {row["subject"]: row for row in dots(spec)}, [row for rows in own(spec) for row in rows]
    for each in found:
        if each.ratio is not None:
            row, margin = ratios[each.name], 1 + each.margin if each.better == "lower" else 1 / (1 + each.margin)
            drawn = [pair["pair"] for pair in apart if pair.get("subject") == each.name]
            assert row["x"] == each.ratio.value and row["bound"] == (pytest.approx(margin) if each.gated else None)
            assert drawn == pytest.approx([after / before for before, after in each.pairs])
    assert any(row["bound"] == pytest.approx(1 / 1.03) for row in ratios.values()) and is_known(spec)
    assert charts.gate_forest(judge_gate(pairs(4, failures=1), GateCriteria()).compared) is None


def test_interim_analyses_have_their_means_and_boundaries():
    found = next(each for each in judge_gate(pairs(6), GateCriteria()).compared if each.interim)
    spec, looks = charts.interim(found), [each.pairs for each in found.interim]
    lines = {name: [(row["x"], row["y"]) for row in dots(spec) if row["series"] == name] for name in charts.INTERIM}
    assert lines["mean ratio"] == [(each.pairs, each.mean) for each in found.interim]
    assert all({x for x, _ in line} <= {*looks} for line in lines.values()) and is_known(spec)
    assert [row["y"] for rows in own(spec) for row in rows][:2] == [charts.margin_at(found), 1]
    seen = spec["layer"][-1]["encoding"]
    assert seen["color"]["scale"]["domain"] == list(charts.INTERIM)
    assert (seen["x"]["scale"]["domain"], seen["x"]["axis"]["values"]) == ([looks[0] - 1, looks[-1] + 1], looks)


# Releases


def history(rates: dict[str, tuple[float, ...]], elsewhere: str = ""):
    """elsewhere: a release that another host measured."""
    made = []
    for release, each in rates.items():
        where = replace(KNOWN, vllm=release, host="two" if release == elsewhere else KNOWN.host)
        made += repeats(each, environment=where, launch=release)
    return [charts.history(found) for found in release_histories(made)]


def test_a_step_is_marked_by_its_ratio_and_a_line_ends_where_the_host_changes():
    rates = {"0.9.0": (1000, 1001), "0.10.0": (900, 901), "0.11.0": (901, 902), "0.12.0": (700, 701)}
    (rate, _), (tpot, _) = history(rates, elsewhere="0.12.0")
    assert columns(dots(rate), "series", "run", "text") == [
        ("first release", 0, ""), ("regressed", 0, "0.9000"), ("same", 0, ""), ("not comparable", 1, ""),
    ]  # fmt: skip
    assert [row["text"] for row in dots(tpot)] == ["", "1.111", "", ""] and is_known(rate)
    x = rate["layer"][0]["encoding"]["x"]
    assert x["sort"] == list(rates) and x["axis"] == {"labelAngle": 0}


@pytest.mark.parametrize(
    ("rates", "least", "most", "cut"),
    [
        ({"0.9.0": (500, 1500), "0.10.0": (1020, 1021), "0.11.0": (900, 901)}, (600, 800), (1100, 1300), ["0.9.0"]),
        ({"0.9.0": (1000.0, 1000.1), "0.10.0": (1000.2, 1000.3)}, (900, 970), (1030, 1100), []),
    ],
)
def test_a_wide_whisker_is_cut_and_told_and_a_small_difference_looks_small(rates, least, most, cut):
    (spec, told), _ = history(rates)
    low, high = spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert least[0] < low < least[1] and most[0] < high < most[1] and told == cut
    assert any(values_of(spec))
