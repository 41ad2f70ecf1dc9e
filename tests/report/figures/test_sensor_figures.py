"""What is drawn, by matplotlib's artists: data of the lines and bars, and words; nothing here looks at pixels."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import H200, measurement, point

from pytest_slmserve.analysis.metrics.summary import Summary
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.figures.drawing import COLOURS, load_axis, panels, shown
from pytest_slmserve.report.figures.sensors import decoding, energy_per_token, memory_bound, sm_per_batch, utilisation
from pytest_slmserve.report.figures.sweeps import pictures
from pytest_slmserve.schema.environment import Environment

to_hex = pytest.importorskip("matplotlib.colors").to_hex

CPU = Environment(platform="cpu", cpu="Imagined CPU")
ORIGIN = "NVIDIA H200, vLLM 0.26.0, 64 prompt and 32 output tokens"
SENSED = {
    "gpu_util": 0.99,
    "engine_active": 0.75,
    "sm_active": 0.5,
    "sm_active_max": 0.6,
    "sm_occupancy": 0.1,
    "sm_occupancy_max": 0.2,
    "dram_active": 0.4,
    "tensor_active": 0.05,
    "decode_dram": 0.6,
    "decode_tensor": 0.1,
}


def sensed(concurrency: int, rate: float = 1000.0, **figures: object) -> Point:
    return replace(point(concurrency, [rate, rate]), ttft_p50_s=0.01, **figures)


def powered(concurrency: int, *repeats: tuple[float, float, float | None]) -> Point:
    """repeats: power, joules per token and power limit of each."""
    each = tuple(
        Summary(power_w=power, energy_per_token_j=joules, power_limit_w=limit) for power, joules, limit in repeats
    )
    return replace(point(concurrency, [1000.0]), each=each)


def curve(subject: str, *points: Point, environment: Environment = H200) -> Curve:
    return Curve(subject=subject, points=points, measurements=(measurement(model=subject, environment=environment),))


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Points of each line that the key names, the grey ones of the key left out."""
    named = {line.get_label(): list(zip(*line.get_data())) for line in axes.lines}
    return {name: dots for name, dots in named.items() if dots and not name.startswith("_")}


def key(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def words(figure: Any) -> str:
    return " ".join(figure.get_suptitle().split())


def heights(axes: Any) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def ticks(axes: Any) -> list[str]:
    return [" ".join(tick.get_text().split()) for tick in axes.get_xticklabels()]


def five_models(*limits: float | None) -> list[Curve]:
    batches = {"opt-13b": 16, "opt-125m": 512, "opt-2.7b": 128, "opt-1.3b": 256, "opt-6.7b": 64}
    repeats = [(300.0 + i, 0.1 * i + 0.01, limit) for limit in limits for i in range(2)]
    return [curve(model, powered(batch, *repeats)) for model, batch in batches.items()]


# SM active and occupancy


def test_means_are_dots_on_a_line_and_the_largest_readings_dashed_in_the_same_colour():
    small = curve("opt-125m", sensed(1, **SENSED), sensed(8, **SENSED | {"sm_active": 0.7, "sm_active_max": 0.8}))
    large = curve("opt-1.3b", sensed(4, **SENSED))
    figure = sm_per_batch(shown([small, large])).figure
    active, warps = figure.axes
    assert "SM active" in active.get_title("left") and "SM occupancy" in warps.get_title("left")
    assert lines(active)["opt-125m"] == [(1, 0.5), (8, 0.7)] and lines(active)["opt-1.3b"] == [(4, 0.5)]
    assert lines(warps)["opt-125m"] == [(1, 0.1), (8, 0.1)]
    mean, most = (line for line in active.lines if line.get_color() == COLOURS[0])
    assert (mean.get_marker(), mean.get_linestyle(), most.get_linestyle()) == ("o", "-", "--")
    assert list(zip(*most.get_data())) == [(1, 0.6), (8, 0.8)] and most.get_linewidth() < mean.get_linewidth()
    assert key(figure) == ["opt-125m", "opt-1.3b", "mean", "max"] and words(figure) == ORIGIN


def test_a_quantity_that_no_sensor_gave_has_no_panel():
    figure = sm_per_batch(shown([curve("opt-125m", sensed(1, sm_occupancy=0.1))])).figure
    assert [axes.get_title("left") for axes in figure.axes] == ["resident warps (SM occupancy)"]


def test_a_load_without_its_reading_is_passed_over():
    figure = sm_per_batch(shown([curve("x", sensed(1, **SENSED), sensed(2), sensed(4, **SENSED))])).figure
    assert lines(figure.axes[0])["x"] == [(1, 0.5), (4, 0.5)]


def test_a_sweep_without_sensors_is_not_in_the_picture_nor_its_device_in_the_title():
    blind = curve("opt-tiny", sensed(1), environment=CPU)
    figure = sm_per_batch(shown([blind, curve("opt-125m", sensed(2, **SENSED))])).figure
    assert words(figure) == ORIGIN and "opt-tiny" not in key(figure)
    assert ticks(figure.axes[0]) == ["2"] and figure.axes[0].lines[0].get_color() == COLOURS[1]


def test_a_degraded_point_is_an_empty_dot():
    points = sensed(1, **SENSED), sensed(2, degraded=("the SM clock moved",), **SENSED)
    figure = sm_per_batch(shown([curve("opt-125m", *points)])).figure
    empty = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [list(zip(*line.get_data())) for line in empty] == [[(2, 0.5)]] and "degraded" in key(figure)


# DRAM and tensor cores


def test_memory_and_tensor_cores_stand_beside_the_time_without_a_kernel():
    figure = memory_bound(shown([curve("opt-125m", sensed(1, **SENSED), sensed(2, **SENSED))])).figure
    drawn = {axes.get_title("left"): lines(axes)["opt-125m"] for axes in figure.axes}
    expected = {"DRAM active": 0.4, "tensor cores active": 0.05, "no kernel ran": 0.25}
    assert drawn == {title: [(1, share), (2, share)] for title, share in expected.items()}


def test_each_unit_has_a_line_at_what_it_can_reach():
    figure = memory_bound(shown([curve("opt-125m", sensed(1, **SENSED))])).figure
    reach = [[line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"] for axes in figure.axes]
    assert reach == [[0.89], [0.94], []] and "what it can reach" in key(figure)


def test_where_it_is_not_known_whether_a_kernel_ran_there_are_two_panels():
    figure = memory_bound(shown([curve("opt-125m", sensed(1, dram_active=0.4, tensor_active=0.1))])).figure
    assert [axes.get_title("left") for axes in figure.axes] == ["DRAM active", "tensor cores active"]


def test_decoding_alone_is_drawn_where_some_reading_was_free_of_prompts():
    figure = decoding(shown([curve("opt-125m", sensed(1, **SENSED), sensed(2, dram_active=0.4))])).figure
    drawn = {axes.get_title("left"): lines(axes)["opt-125m"] for axes in figure.axes}
    assert drawn == {"DRAM active": [(1, 0.6)], "tensor cores active": [(1, 0.1)]}
    assert "what it can reach" in key(figure)


# Throughput against utilisation


def test_throughput_is_a_share_of_the_models_own_largest():
    loads = [(1, 100.0, 0.95, 0.2), (8, 400.0, 1.0, 0.5), (64, 300.0, 1.0, 0.4)]
    swept = curve("opt-1.3b", *(sensed(c, rate, gpu_util=util, sm_active=sm) for c, rate, util, sm in loads))
    alone = curve("opt-13b", sensed(16, **SENSED))
    figure = utilisation(shown([alone, swept])).figure
    util, active = figure.axes
    assert lines(util) == {"opt-1.3b": [(0.95, 0.25), (1.0, 1.0), (1.0, 0.75)]}
    assert lines(active) == {"opt-1.3b": [(0.2, 0.25), (0.5, 1.0), (0.4, 0.75)]}
    assert [(text.get_text(), text.xy) for text in util.texts] == [("64", (1.0, 0.75)), ("1", (0.95, 0.25))]
    assert "GPU utilisation" in util.get_xlabel() and "SM active" in active.get_xlabel()


def test_utilisation_stands_alone_where_there_is_no_profile():
    figure = utilisation(shown([curve("opt-1.3b", sensed(1, gpu_util=0.9), sensed(2, gpu_util=1.0))])).figure
    assert len(figure.axes) == 1 and lines(figure.axes[0])["opt-1.3b"] == [(0.9, 1.0), (1.0, 1.0)]


# Energy


def test_models_stand_in_order_of_size_with_the_spread_of_their_repeats():
    figure = energy_per_token(shown(five_models(700.0))).figure
    power, energy = figure.axes
    assert (
        ticks(power) == ["512 opt-125m", "256 opt-1.3b", "128 opt-2.7b", "64 opt-6.7b", "16 opt-13b"] == ticks(energy)
    )
    assert heights(power) == [300.5] * 5 and heights(energy) == pytest.approx([0.06] * 5)
    ends = [
        container.lines[2][0].get_segments()[0][:, 1] for container in energy.containers if hasattr(container, "lines")
    ]
    assert [list(pair) for pair in ends] == [pytest.approx([0.01, 0.11])] * 5
    assert [text.get_text() for text in energy.texts] == ["0.0600"] * 5
    assert key(figure) == ["power limit 700 W", "smallest to largest repeat"]
    assert [line.get_ydata()[0] for line in power.lines if line.get_label() == "power limit 700 W"] == [700]


def test_one_repeat_has_no_spread():
    figure = energy_per_token(shown([curve("opt-13b", powered(16, (400.0, 0.5, None)))])).figure
    assert heights(figure.axes[1]) == [0.5] and not figure.legends


def test_each_power_limit_has_bars_of_its_own_also_within_one_point():
    mixed = curve("opt-1.3b", powered(256, (500.0, 0.05, 700.0), (400.0, 0.04, 500.0), (510.0, 0.07, 700.0)))
    figure = energy_per_token(shown([mixed, curve("opt-125m", powered(512, (300.0, 0.01, 700.0)))])).figure
    bars = figure.axes[1].patches
    assert [bar.get_height() for bar in bars] == pytest.approx([0.01, 0.06, 0.04])
    assert bars[0].get_hatch() == bars[1].get_hatch() != bars[2].get_hatch()
    assert bars[1].get_facecolor() == bars[2].get_facecolor() != bars[0].get_facecolor()
    assert bars[1].get_x() + bars[1].get_width() <= bars[2].get_x()
    assert key(figure)[-2:] == ["power limit 700 W", "power limit 500 W"]
    patches = figure.legends[0].legend_handles[-2:]
    assert [patch.get_hatch() for patch in patches] == [bars[0].get_hatch(), bars[2].get_hatch()]


def test_the_energy_of_a_degraded_point_says_so():
    doubtful = replace(powered(16, (400.0, 0.5, 700.0)), degraded=("the SM clock moved",))
    assert ticks(energy_per_token(shown([curve("opt-13b", doubtful)])).figure.axes[0]) == ["16 opt-13b degraded"]


# All of them


@pytest.mark.parametrize("limits", [(700.0,), (700.0, 500.0)])
def test_words_do_not_overlap_and_stay_in_the_picture(limits):
    figure = energy_per_token(shown(five_models(*limits))).figure
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in (*axes.get_xticklabels(), *axes.texts)]
        assert [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])] == []
        assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_a_key_of_many_long_names_fits():
    swept = [curve(f"a-model-with-a-rather-long-name-{i}", sensed(1, **SENSED)) for i in range(9)]
    figure = memory_bound(shown(swept)).figure
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    assert (
        len({(line.get_color(), line.get_marker()) for line in figure.axes[0].lines if line.get_label()[0] == "a"}) == 9
    )


def test_a_long_key_and_title_leave_the_axes_their_height():
    devices = [replace(H200, gpu_name=f"A device with the number {number}") for number in range(3)]
    swept = [curve(f"model-{i}, {'as ' * 50}measured", sensed(1), environment=devices[i % 3]) for i in range(30)]
    figure = next(drawn.figure for drawn in pictures(swept) if drawn.name == "sweeps")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in (figure._suptitle, *figure.legends[0].get_texts())]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert figure.axes[0].bbox.height > 2.5 * figure.dpi


def test_long_names_below_bars_do_not_overlap():
    models = [f"opt-125m, ramp-up staggered, enable_chunked_prefill {i}" for i in range(8)]
    swept = [curve("opt-125m", powered(512, (300.0, 0.01, 700.0))) for _ in models]
    sweeps = [replace(one, name=name) for one, name in zip(shown(swept), models, strict=True)]
    figure = energy_per_token(sweeps).figure
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert figure.axes[0].bbox.height > 2.5 * figure.dpi


@given(loads=st.sets(st.integers(1, 4096), min_size=1, max_size=40), count=st.integers(1, 3))
def test_loads_are_labelled_as_far_as_there_is_room(loads, count):
    sweeps = shown([curve("x", *(sensed(load) for load in sorted(loads)))])
    _, places = panels([sweep.origin for sweep in sweeps], count)
    load_axis(places[0], sweeps)
    named = [text for text in ticks(places[0]) if text]
    assert len(ticks(places[0])) == len(loads) and named[-1] == str(max(loads)) and len(named) <= 22 // count + 1


def test_a_model_has_one_colour_in_all_pictures():
    first = curve("opt-125m", sensed(1), sensed(512, **SENSED))
    second = curve(
        "opt-1.3b",
        sensed(1, **SENSED),
        replace(sensed(256, **SENSED), each=(Summary(power_w=9.0, energy_per_token_j=1.0),)),
    )
    drawn = {picture.name: picture.figure for picture in pictures([first, second])}
    sensors = ["sm-per-batch", "energy-per-token", "utilisation", "memory-bound", "decoding"]
    assert list(drawn) == ["sweeps", "latency", *sensors]
    bars = drawn.pop("energy-per-token").axes[0].patches
    assert [to_hex(bar.get_facecolor()).upper() for bar in bars] == [COLOURS[1]]
    for figure in drawn.values():
        seen = {line.get_color() for axes in figure.axes for line in axes.lines if line.get_label() == "opt-1.3b"}
        assert seen == {COLOURS[1]}


def test_simulated_sensors_say_so_in_every_picture():
    fake = Environment(platform="simulated", gpu_name="simulated")
    spent = replace(sensed(512, **SENSED), each=(Summary(power_w=9.0, energy_per_token_j=1.0),))
    drawn = pictures([curve("opt-125m", sensed(1, **SENSED), spent, environment=fake)])
    assert [words(picture.figure) for picture in drawn] == ["SIMULATED, not measured on a device"] * 7


@pytest.mark.parametrize(
    ("draw", "figures", "why"),
    [
        (sm_per_batch, {"gpu_util": 1.0}, "no sensor gave the profiling counters"),
        (memory_bound, {"engine_active": 1.0}, "no sensor gave the profiling counters"),
        (decoding, {"dram_active": 0.4, "tensor_active": 0.1}, "no reading of the sensors fell between prompts"),
        (utilisation, {"sm_active": 0.5}, "GPU utilisation is not known at two loads of any model"),
        (energy_per_token, SENSED, "power is not known of any model at its largest batch of table 1"),
    ],
)
def test_without_its_sensors_a_picture_says_why_it_is_not_there(draw, figures, why):
    picture = draw(shown([curve("opt-125m", sensed(1, **figures), sensed(512, **figures))]))
    assert picture.figure is None and why in picture.why_not
