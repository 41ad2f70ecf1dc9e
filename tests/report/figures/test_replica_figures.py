"""What is drawn of replicas, by matplotlib's artists: data of lines and intervals, and words; no pixels."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import H200, measurement, planted_telemetry, point, shared_point

from pytest_slmserve.analysis.claims.stored import stored_curves
from pytest_slmserve.analysis.compare.deployments import HOW
from pytest_slmserve.analysis.metrics.summary import Summary
from pytest_slmserve.analysis.points import Point, ReplicaPoint, ratio
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.figures.drawing import COLOURS, Picture, shown
from pytest_slmserve.report.figures.replicas import TITLES, replica_pictures
from pytest_slmserve.report.figures.sweeps import draw_sweeps, pictures
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage, Sharing
from pytest_slmserve.schema.records import Measurement, Replica, Run

pytest.importorskip("matplotlib")

NAMES = ["replica-gain", "replica-busy", "replica-latency", "replica-device"]
SENSED = {"gpu_util": 1.0, "engine_active": 0.9, "sm_active": 0.5, "dram_active": 0.4, "power_w": 300.0}
WATCHED = SENSED | {"energy_per_token_j": 0.02}
MODELS = {"opt-125m": 384, "opt-1.3b": 192, "opt-2.7b": 96, "opt-6.7b": 48, "opt-13b": 12}
WAYS = ("time-slicing", "mps", "mig")


def alone(rates=(1000.0, 1000.0), concurrency: int = 96, **figures: object) -> Point:
    waits = [256 * concurrency / rate for rate in rates]
    each = tuple(Summary(e2e_s=wait, e2e_p99_s=2 * wait) for wait in waits)
    return replace(point(concurrency, rates), each=each, **figures)


def curve(*shared: ReplicaPoint, points=(), model: str = "opt-1.3b", environment: Environment = H200) -> Curve:
    made = (measurement(model=model, environment=environment),)
    return Curve(subject=model, points=tuple(points) or (alone(),), shared=shared, measurements=made)


def drawn(*curves: Curve) -> dict[str, Picture]:
    return {picture.name: picture for picture in replica_pictures(shown(curves))}


def gain(*curves: Curve) -> Any:
    return drawn(*curves)["replica-gain"].figure


def dots(axes: Any) -> dict[str, list[tuple[int, float]]]:
    """Number of engines and value, of each line that the key names."""
    counts = [int(tick.get_text()) for tick in axes.get_xticklabels()]
    return {name: [(counts[round(x)], y) for x, y in data] for name, data in marked(axes).items()}


def marked(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The dots of each line that the key names."""
    named = {line.get_label(): [*zip(*line.get_data())] for line in axes.lines if line.get_marker() not in ("", "None")}
    return {name: data for name, data in named.items() if data and name[0] != "_"}


def values(axes: Any) -> dict[int, float]:
    """Of a panel with one line."""
    (only,) = dots(axes).values()
    return dict(only)


def intervals(axes: Any) -> list[tuple[float, float]]:
    return [tuple(bar.lines[2][0].get_segments()[0][:, 1]) for bar in axes.containers if bar.lines[2][0].get_segments()]


def key(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def titles(figure: Any) -> list[str]:
    return [" ".join(axes.get_title("left").split()) for axes in figure.axes]


def empty_dots(axes: Any) -> list[float]:
    return [y for line in axes.lines if line.get_markerfacecolor() == "white" for y in line.get_ydata()]


def many(models=MODELS, counts=(2, 3, 4), ways=WAYS, **figures: object) -> list[Curve]:
    """Every model on every number of engines by each way of sharing."""
    return [
        curve(
            *(
                shared_point(n, (900.0 + n, 940.0), model=model, sharing=way, concurrency=load, **WATCHED | figures)
                for way in ways
                for n in counts
            ),
            points=[alone((1000.0, 1010.0), load, **WATCHED)],
            model=model,
        )
        for model, load in models.items()
    ]


# Gain


def test_each_way_of_sharing_has_a_panel_with_throughput_over_one_engines():
    turns, mps = (shared_point(2, (900.0, 900.0), sharing=way) for way in WAYS[:2])
    three = shared_point(3, (1200.0, 1200.0))
    figure = gain(curve(three, mps, turns, points=[alone((600.0, 600.0), 48), alone()]))
    assert titles(figure) == ["time slicing", "MPS"]
    assert [values(axes) for axes in figure.axes] == [{2: 0.9}, {2: 0.9, 3: 1.2}]
    assert "throughput over one engine's" in figure.axes[0].get_ylabel()
    assert key(figure)[:2] == ["opt-1.3b, 96 in flight", "one engine under the same load"]


def test_the_interval_is_that_of_the_gain_and_there_is_a_line_at_1():
    shared, one = shared_point(2, (1190.0, 1210.0)), alone((990.0, 1010.0))
    figure = gain(curve(shared, points=[one]))
    seen = ratio(shared, one)
    assert intervals(figure.axes[0]) == [pytest.approx((seen.low, seen.high))] and "95 % interval" in key(figure)
    assert [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"] == [1]


def test_without_repeats_there_is_no_interval_nor_a_word_of_it():
    figure = gain(curve(shared_point(2, (1200.0,)), points=[alone((1000.0,))]))
    assert intervals(figure.axes[0]) == [] and "95 % interval" not in key(figure)


@pytest.mark.parametrize("doubtful", ["alone", "replicas"])
def test_a_degraded_side_makes_the_ratio_an_empty_dot(doubtful):
    doubt = {"degraded": ("the SM clock moved",)}
    two = shared_point(2, (800.0, 800.0), **doubt if doubtful == "replicas" else {})
    one = alone(**doubt if doubtful == "alone" else {})
    figure = gain(curve(two, points=[one]))
    assert empty_dots(figure.axes[0]) == [0.8] and key(figure)[2] == "degraded"
    assert empty_dots(gain(curve(replace(two, degraded=()))).axes[0]) == []


def test_loads_and_settings_of_one_model_are_told_apart():
    shared = [
        shared_point(2, (900.0, 900.0)),
        shared_point(2, (700.0, 700.0), pinned=True),
        shared_point(2, (600.0, 600.0), thread_percentage=50),
        shared_point(2, (400.0, 400.0), concurrency=48),
    ]
    figure = gain(curve(*shared, points=[alone((500.0, 500.0), 48), alone()]))
    names = ["96 in flight", "96 in flight, pinned", "96 in flight, 50 % of the SMs each", "48 in flight"]
    expected = dict(zip([f"opt-1.3b, {name}" for name in names], [0.9, 0.7, 0.6, 0.8]))
    assert {name: data[0][1] for name, data in dots(figure.axes[0]).items()} == pytest.approx(expected)
    mine = [line for line in figure.axes[0].lines if line.get_label() in expected]
    assert len({line.get_linestyle() for line in mine}) == 4 and {line.get_color() for line in mine} == {COLOURS[0]}
    assert len({line.get_xdata()[0] for line in mine}) == 4, "side by side"


def test_invalid_replicas_and_those_without_one_engine_beside_them_are_left_out():
    shared = shared_point(2, (900.0, 900.0)), shared_point(3, ()), shared_point(4, (900.0,), concurrency=48)
    assert values(gain(curve(*shared)).axes[0]) == {2: 0.9}


def test_a_small_difference_looks_small_and_a_wild_interval_does_not_hide_the_rest():
    low, high = gain(curve(shared_point(2, (1001.0, 1003.0)))).axes[0].get_ylim()
    assert low < 0.9 and high > 1.1
    wild = gain(curve(shared_point(2, (900.0,)), points=[alone((500.0, 1500.0))]))
    assert intervals(wild.axes[0])[0][1] > 100 and wild.axes[0].get_ylim() == pytest.approx((0.396, 1.854))


@settings(max_examples=20)
@given(st.lists(st.floats(1, 1e5), min_size=1, max_size=4), st.floats(1, 1e5))
def test_every_dot_is_in_sight(rates, other):
    shared = [shared_point(n, (rate, 1.1 * rate), sharing=WAYS[n % 3]) for n, rate in enumerate(rates, 2)]
    for axes in gain(curve(*shared, points=[alone((other, 1.1 * other))])).axes:
        low, high = axes.get_ylim()
        assert low < 1 < high and all(low < y < high for data in dots(axes).values() for _, y in data)


# Gain against the time in which one engine runs a kernel


def test_the_gain_stands_over_the_time_in_which_one_engine_runs_a_kernel():
    two, three = shared_point(2, (900.0, 900.0)), shared_point(3, (1200.0, 1200.0))
    other = shared_point(2, (500.0, 500.0), model="opt-125m")
    figure = drawn(
        curve(two, three, points=[alone(engine_active=0.8)]),
        curve(other, points=[alone((250.0, 250.0), engine_active=0.4)], model="opt-125m"),
    )["replica-busy"].figure
    [axes] = figure.axes
    assert marked(axes) == {"opt-1.3b": [(0.8, 0.9), (0.8, 1.2)], "opt-125m": [(0.4, 2.0)]}
    [bound] = [line for line in axes.lines if line.get_label().startswith("bound of engines")]
    assert all(x * y == pytest.approx(1) for x, y in zip(*bound.get_data()))
    assert axes.get_xlabel() == "time in which one engine runs a kernel"
    low, high = axes.get_ylim()
    assert low < 0.9 and high > 2.0


def test_without_profiling_counters_utilisation_tells_when_a_kernel_runs():
    found = drawn(curve(shared_point(2, (900.0, 900.0)), points=[alone(gpu_util=0.7)]))["replica-busy"]
    assert marked(found.figure.axes[0]) == {"opt-1.3b": [(0.7, 0.9)]}


def test_an_engine_whose_kernels_nobody_watched_has_no_dot():
    watched = curve(shared_point(2, (900.0, 900.0)), points=[alone(engine_active=0.7)])
    other = curve(shared_point(2, (500.0, 500.0), model="opt-125m"), points=[alone()], model="opt-125m")
    assert list(marked(drawn(watched, other)["replica-busy"].figure.axes[0])) == ["opt-1.3b"]
    found = drawn(curve(shared_point(2, (900.0, 900.0))))["replica-busy"]
    assert (found.figure, found.why_not) == (None, "no sensor told when one engine runs a kernel")


# Latency


def test_the_largest_mean_and_the_tail_are_each_over_one_engines():
    shared = [shared_point(2, (800.0, 800.0), sharing=way) for way in WAYS]
    figure = drawn(curve(*shared))["replica-latency"].figure
    assert titles(figure)[:2] == ["largest mean E2E over one engine's", "99th percentile of E2E over one engine's"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["time slicing", "", "MPS", "", "MIG", ""]
    assert [values(axes) for axes in figure.axes] == [pytest.approx(row) for row in ({2: 1.25}, {2: 0.625})] * 3
    assert len(intervals(figure.axes[0])) == 1


def test_a_latency_that_is_not_known_has_no_panel():
    shared = shared_point(2, (800.0, 800.0))
    half = replace(shared, each=tuple(replace(s, e2e_p99_s=None) for s in shared.each))
    assert titles(drawn(curve(half))["replica-latency"].figure) == ["largest mean E2E over one engine's"]
    none = drawn(curve(replace(shared, each=())))["replica-latency"]
    assert none.figure is None and none.why_not == "no request ended in a window"


# The device


def device(*curves: Curve) -> dict[str, Any]:
    """Panels of the first way of sharing, by their titles."""
    figure = drawn(*curves)["replica-device"].figure
    return {title: axes for title, axes in zip(titles(figure), figure.axes) if title}


def test_the_device_with_one_engine_and_with_each_number_of_replicas():
    more = WATCHED | {"sm_active": 0.6, "power_w": 450.0, "energy_per_token_j": 0.018}
    seen = device(
        curve(shared_point(2, (900.0,), **more), shared_point(4, (900.0,), **WATCHED), points=[alone(**WATCHED)])
    )
    assert {title: values(axes) for title, axes in seen.items()} == {
        "busy (some kernel ran)": {1: 0.9, 2: 0.9, 4: 0.9},
        "SM active": {1: 0.5, 2: 0.6, 4: 0.5},
        "DRAM active": {1: 0.4, 2: 0.4, 4: 0.4},
        "power, W": {1: 300.0, 2: 450.0, 4: 300.0},
        "energy per token over one engine's": pytest.approx({1: 1.0, 2: 0.9, 4: 1.0}),
    }
    assert [axes.get_ylim()[0] for axes in seen.values()] == [-0.02, -0.02, -0.02, 0, 0]
    assert all(axes.get_ylim()[1] > max(values(axes).values()) for axes in seen.values())


def test_the_axes_reach_as_far_as_every_way_of_sharing_needs():
    weak, strong = (shared_point(2, (900.0,), sharing=way, power_w=w) for way, w in zip(WAYS, (300.0, 600.0)))
    for order in ([weak, strong], [strong, weak]):
        figure = drawn(curve(*order, points=[alone(power_w=200.0)]))["replica-device"].figure
        assert [axes.get_ylim() for axes in figure.axes] == [(0, pytest.approx(636))] * 2


def test_without_profiling_counters_there_is_utilisation():
    figures = {"gpu_util": 1.0, "power_w": 300.0}
    seen = device(curve(shared_point(2, (900.0,), **figures), points=[alone(**figures)]))
    assert list(seen) == ["GPU utilisation", "power, W"]


def test_what_one_engine_alone_did_need_not_be_known_but_for_a_ratio():
    seen = device(curve(shared_point(2, (900.0,), **WATCHED)))
    assert values(seen["power, W"]) == {2: 300.0} and "energy per token over one engine's" not in seen


def test_a_degraded_engine_alone_is_an_empty_dot_of_its_own():
    one = alone(power_w=200.0, degraded=("the SM clock moved",))
    (axes,) = device(curve(shared_point(2, (900.0,), power_w=300.0), points=[one])).values()
    assert empty_dots(axes) == [200.0]


def test_without_sensors_it_says_so():
    picture = drawn(curve(shared_point(2, (900.0,))))["replica-device"]
    assert picture.figure is None and picture.why_not == "no sensor told what the device did while replicas ran"


# All of them


def test_where_no_replicas_were_measured_nothing_is_said_of_them():
    assert drawn(curve()) == {}


def test_replicas_are_drawn_where_no_sweep_was_measured(tmp_path):
    made = (measurement(),)
    only = Curve(subject="opt-1.3b", shared=(shared_point(2, [1200.0]),), alone=(alone(),), measurements=made)
    found = pictures([only])
    assert [picture.name for picture in found] == NAMES and found[0].figure
    with pytest.raises(BadUsage, match="replicas only"):
        draw_sweeps([only], tmp_path / "sweeps.png")
    swept = curve(points=[alone()], model="opt-125m")
    assert next(picture.name for picture in pictures([only, swept])) == "sweeps"


def test_replicas_that_cannot_be_compared_are_excused():
    for shared in (shared_point(2, ()), shared_point(2, (900.0,), concurrency=48)):
        seen = drawn(curve(shared))
        why = "of no model replicas and one engine alone are valid under the same load"
        assert [(picture.name, picture.figure, picture.why_not) for picture in seen.values()] == [
            (name, None, why) for name in NAMES
        ]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_colour_that_it_has_in_the_sweeps(name):
    bare, *rest = many(models=dict(list(MODELS.items())[:3]))
    figure = drawn(replace(bare, shared=()), *rest)[name].figure
    seen = {
        line.get_label().split(",")[0]: line.get_color()
        for axes in figure.axes
        for line in axes.lines
        if line.get_label().startswith("opt-")
    }
    assert seen == {"opt-1.3b": COLOURS[1], "opt-2.7b": COLOURS[2]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("curves", [many(), many(models={"opt-13b": 12}, counts=(2,), ways=("mps",))])
def test_words_do_not_overlap_and_stay_in_the_picture(name, curves):
    figure = drawn(*curves)[name].figure
    figure.draw_without_rendering()
    words = [text for axes in figure.axes for text in (axes._left_title, axes.xaxis.label, axes.yaxis.label)]
    words += [tick for axes in figure.axes for tick in axes.get_xticklabels()]
    boxes = [text.get_window_extent() for text in words if text.get_text()] + [figure.legends[0].get_window_extent()]
    assert len(boxes) > 3 and [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])] == []
    inside = figure.bbox
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 <= inside.y1 for box in boxes)


def test_lines_that_are_in_one_panel_alone_stand_in_the_key_where_their_model_does():
    first, second = many(models=dict(list(MODELS.items())[:2]), counts=(2,), ways=("time-slicing",))
    mps = shared_point(2, (900.0, 940.0), model="opt-125m", concurrency=384, thread_percentage=50)
    assert key(gain(replace(first, shared=(*first.shared, mps)), second))[:3] == [
        "opt-125m, 384 in flight",
        "opt-125m, 384 in flight, 50 % of the SMs each",
        "opt-1.3b, 192 in flight",
    ]


def test_records_of_replicas_become_pictures_beside_those_of_the_sweep():
    """Of simulated ones, so it is said in each."""
    fake = Environment(platform="simulated", gpu_name="simulated")

    def watched(m: Measurement) -> Run:
        return replace(m.run, telemetry=planted_telemetry(until_s=m.run.window_s[1], interval_s=0.02))

    alone = [measurement(16, 1000.0 + i, environment=fake, repeat=i) for i in range(2)]
    records = [replace(m, run=watched(m)) for m in alone]
    for i in range(2):
        for index in range(2):
            part = Replica(f"run-{i}", index, 2, "what was asked", "mps")
            m = measurement(8, 600.0 + i, environment=fake, repeat=i, launch=f"replica-{index}")
            records.append(replace(m, replica=part, run=m.run if index else watched(m)))
    found = {picture.name: picture.figure for picture in pictures(stored_curves(records, []))}
    assert list(found)[-4:] == NAMES and "sweeps" in found
    assert values(found["replica-gain"].axes[0]) == {2: pytest.approx(1201 / 1000.5)}
    assert {found[name].get_suptitle() for name in NAMES} == {"SIMULATED, not measured on a device"}


def test_every_way_of_sharing_has_a_title():
    assert TITLES.keys() == HOW.keys() == set(get_args(Sharing))
