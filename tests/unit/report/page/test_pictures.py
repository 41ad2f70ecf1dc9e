"""Pictures for files: their rows are the values of points, sets of engines are told apart, what cannot be drawn says
why, and Vega-Lite knows them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from gpus import on_gpus, replicas
from launches import pairs
from strategies import H200, job_point, law, measurement, noisy_curve, point, shared_point
from vega import vega_lite

from pytest_slmserve.analysis.compare.deployments import deployments
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.points import Point, ReplicaPoint, Summary, ratio
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.pictures import Picture, draw_pictures, pictures, whole_picture
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import EngineSpec

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
    "power_w": 300.0,
    "energy_per_token_j": 0.02,
}
OF_REPLICAS = ("gpu_util", "engine_active", "sm_active", "dram_active", "power_w")


def swept(model: str = "opt-1.3b", environment: Environment = H200, **numbers: float) -> Curve:
    made = [
        measurement(c, law(c, **numbers) * (1 + 0.01 * i), model=model, environment=environment, repeat=i)
        for c in (1, 4, 16, 64, 256, 512)
        for i in range(2)
    ]
    return curve_of(model, made)


def curve(subject: str, *points: Point, shared: tuple[ReplicaPoint, ...] = ()) -> Curve:
    return Curve(subject=subject, points=points, shared=shared, measurements=(measurement(model=subject),))


def sensed(concurrency: int, rate: float = 1000.0, **figures: object) -> Point:
    return replace(point(concurrency, [rate, rate]), ttft_p50_s=0.01, **figures)


def by_name(curves: list[Curve], **more: Any) -> dict[str, Picture]:
    return {picture.name: picture for picture in pictures(Findings(curves=curves, **more))}


def rows(panel: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of a panel: those that its layers share, then those of single layers."""
    own = [row for layer in panel["layer"] for row in layer.get("data", {}).get("values", [])]
    return [*panel["data"]["values"], *own]


def dots(panel: dict[str, Any], stroke: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """x and y of each series, in the order drawn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in panel["data"]["values"]:
        if stroke is None or row["stroke"] == stroke:
            found.setdefault(row["series"], []).append((row["x"], row["y"]))
    return found


def rules(panel: dict[str, Any]) -> list[tuple[str, float]]:
    return [(row["text"], row.get("y", row.get("x"))) for row in rows(panel) if "text" in row and "series" not in row][
        ::2
    ]


def test_the_sweeps_say_where_they_were_measured():
    picture = by_name([swept(), swept("opt-2.7b", t_inf=5000.0)])["sweeps"]
    assert picture.origins == ("NVIDIA H200, vLLM 0.26.0, 64 prompt and 32 output tokens",)
    load, plane = picture.panels
    assert list(dots(load)) == list(dots(plane)) == ["opt-1.3b", "opt-2.7b"]
    (origin,) = by_name([swept(environment=Environment(platform="simulated"))])["sweeps"].origins
    assert "SIMULATED" in origin


def test_models_of_any_speed_are_on_one_scale():
    fast, slow, short = swept("fast"), swept("slow", t_inf=10.0), noisy_curve({1: 1.0, 2: 2.0})
    (panel,) = by_name([fast, slow, short])["relative-throughput"].panels
    assert {name: values[-1][1] for name, values in dots(panel).items()} == {"fast": 1.0, "slow": 1.0}
    assert "relative-throughput" not in by_name([fast, short])


@pytest.mark.parametrize(("curves", "facts"), [([], "no sweep"), ([Curve(subject="x")], "no valid point")])
def test_nothing_to_draw(curves, facts, tmp_path):
    with pytest.raises(BadUsage, match=facts):
        draw_pictures(Findings(curves=curves), tmp_path / "out", "png")
    assert not [*tmp_path.iterdir()]


def test_without_a_picture_every_reason_is_told(tmp_path):
    with pytest.raises(BadUsage, match="gate-opt-1.3b: no pair"):
        draw_pictures(Findings(gates=[gated(failures=1)]), tmp_path, "svg")


def test_each_picture_is_a_file_of_its_form_or_says_why_not(tmp_path, monkeypatch):
    drawn = SimpleNamespace(vegalite_to_png=lambda spec, scale: b"png", vegalite_to_svg=lambda spec: f"svg {spec}")
    monkeypatch.setitem(sys.modules, "vl_convert", drawn)
    found = Findings(curves=[swept()])
    for form in ("png", "svg"):
        lines = draw_pictures(found, tmp_path / form, form)
        for line, picture in zip(lines, pictures(found), strict=True):
            path = tmp_path / form / f"{picture.name}.{form}"
            assert path.exists() is bool(picture.panels) and (str(path) in line or picture.why_not in line)
    assert json.loads((tmp_path / "svg" / "sweeps.svg").read_text("utf-8")[4:])["title"]["text"] == "sweeps"
    (tmp_path / "svg" / "sweeps.png").mkdir()
    with pytest.raises(BadUsage, match="sweeps.png"):
        draw_pictures(found, tmp_path / "svg", "png")


def test_a_picture_is_900_pixels_wide_and_names_no_values():
    one = by_name([swept()])
    for name, columns in (("sweeps", 2), ("latency", 2)):
        whole = whole_picture(one[name])
        assert len(whole["concat"]) == len(one[name].panels) and whole["columns"] == columns
        assert [panel["width"] for panel in whole["concat"]] == [900 // columns - 90] * len(whole["concat"])
        assert all("name" not in panel["data"] and panel["height"] >= 300 for panel in whole["concat"])
        assert whole["title"]["subtitle"] == list(one[name].origins) and vega_lite().is_valid(whole)
    single = whole_picture(Picture("one", (), one["sweeps"].panels[:1]))
    assert (single["columns"], single["concat"][0]["width"]) == (1, 810)


# Sensors


def test_means_and_largest_readings_of_the_sms():
    points = sensed(1, **SENSED), sensed(2), sensed(8, degraded=("the clock",), **SENSED | {"sm_active": 0.7})
    found = by_name([curve("opt-125m", *points), curve("opt-1.3b", sensed(4))])["sm-per-batch"]
    active, warps = found.panels
    assert dots(active, "mean") == {"opt-125m": [(1, 0.5), (8, 0.7)]}, "a load without its reading is passed over"
    assert dots(active, "max") == {"opt-125m": [(1, 0.6), (8, 0.6)]}
    assert dots(warps, "mean") == {"opt-125m": [(1, 0.1), (8, 0.1)]}
    assert [row["hollow"] for row in active["data"]["values"] if row["stroke"] == "mean"] == [False, True]


def test_memory_and_tensor_cores_with_their_peaks_beside_the_time_without_a_kernel():
    found = by_name([curve("opt-125m", sensed(1, **SENSED))])
    assert [dots(panel)["opt-125m"][0][1] for panel in found["memory-bound"].panels] == [0.4, 0.05, 0.25]
    assert [rules(panel) for panel in found["memory-bound"].panels] == [
        [("achievable peak", 0.89)],
        [("achievable peak", 0.94)],
        [],
    ]
    assert [dots(panel)["opt-125m"][0][1] for panel in found["decoding"].panels] == [0.6, 0.1]


def test_utilisation_stands_over_the_share_of_the_most_throughput():
    points = [sensed(c, rate, **SENSED) for c, rate in ((1, 250.0), (2, 500.0), (4, 1000.0))]
    util, active = by_name([curve("opt-125m", *points)])["utilisation"].panels
    assert dots(util)["opt-125m"] == [(0.99, 1.0), (0.99, 0.5), (0.99, 0.25)]
    assert [row["text"] for row in active["data"]["values"]] == ["4", "", "1"]


def test_energy_has_bars_of_each_power_limit_with_the_smallest_and_the_largest_repeat():
    repeats = [(300.0 + i, 0.1 * i + 0.01, limit) for limit in (700.0, 350.0) for i in range(2)]
    each = tuple(Summary(power_w=p, energy_per_token_j=j, power_limit_w=limit) for p, j, limit in repeats)
    found = by_name([curve("opt-1.3b", replace(point(256, [1000.0]), each=each))])["energy-per-token"]
    assert {row["x"] for row in found.panels[0]["data"]["values"]} == {"opt-1.3b, 256"}
    power, energy = (panel["data"]["values"] for panel in found.panels)
    assert [(row["series"], row["low"], row["y"], row["high"]) for row in power] == [
        ("power limit 700 W", 300.0, 300.5, 301.0),
        ("power limit 350 W", 300.0, 300.5, 301.0),
    ]
    assert [row["y"] for row in energy] == pytest.approx([0.06, 0.06])


# Latencies


def test_percentiles_of_sweeps_are_those_of_the_points_and_limits_are_lines():
    two = [swept(), swept("opt-2.7b", t_inf=5000.0)]
    panels = by_name(two, slo=parse_slo("ttft:200ms,e2e:5s"))["latency"].panels
    assert [rules(panel) for panel in panels] == [[("ttft:200ms", 200.0)], [], [("e2e:5s", 5000.0)]]
    for panel, name in zip(panels, ("ttft", "tpot", "e2e"), strict=True):
        for part in ("p50", "p99"):
            wanted = {
                c.subject: [(p.concurrency, pytest.approx(1e3 * getattr(p, f"{name}_{part}_s"))) for p in c.valid]
                for c in two
            }
            assert dots(panel, part) == wanted
    assert len(by_name(two)["latency"].panels) == 2, "E2E has a panel if it is limited"


def test_pictures_without_their_figures_say_what_is_missing():
    found = by_name([swept()])
    missing = ("sm-per-batch", "energy-per-token", "utilisation", "memory-bound", "decoding")
    assert [found[name].panels for name in missing] == [()] * len(missing)
    assert all(found[name].why_not for name in missing)
    latency = by_name([noisy_curve({1: 1.0, 2: 2.0, 4: 4.0})])["latency"]
    assert latency.panels == () and "TTFT" in latency.why_not
    lonely = by_name([curve("opt-1.3b", alone(concurrency=48), shared=(shared_point(2, (900.0,)),))])
    names = ("replica-gain", "replica-busy", "replica-latency", "replica-device")
    (why,) = {lonely[name].why_not for name in names}
    assert why and [lonely[name].panels for name in names] == [()] * 4


# Replicas and gates


def alone(rates: tuple[float, ...] = (1000.0, 1000.0), concurrency: int = 96, **figures: object) -> Point:
    waits = [256 * concurrency / rate for rate in rates]
    each = tuple(Summary(e2e_s=wait, e2e_p99_s=2 * wait) for wait in waits)
    return replace(point(concurrency, rates), each=each, **figures)


def test_each_way_of_sharing_has_a_panel_with_throughput_over_one_engines():
    turns, mps = (shared_point(2, (900.0, 900.0), sharing=way) for way in ("time-slicing", "mps"))
    three, one = shared_point(3, (1190.0, 1210.0)), alone((990.0, 1010.0))
    found = by_name([curve("opt-1.3b", one, shared=(three, mps, turns))])["replica-gain"]
    assert [panel["layer"][0]["data"]["values"][0]["y"] for panel in found.panels] == [1, 1], "a line at one engine's"
    assert [[row["y"] for row in panel["data"]["values"]] for panel in found.panels] == [
        pytest.approx([0.9]),
        pytest.approx([0.9, 1.2]),
    ]
    row, seen = found.panels[1]["data"]["values"][-1], ratio(three, one)
    assert (row["low"], row["high"]) == pytest.approx((seen.low, seen.high))


def test_loads_and_settings_of_one_model_are_told_apart():
    shared = (
        shared_point(2, (900.0, 900.0)),
        shared_point(2, (700.0, 700.0), pinned=True),
        shared_point(2, (600.0, 600.0), thread_percentage=50),
        shared_point(2, (400.0, 400.0), concurrency=48, degraded=("the clock",)),
        shared_point(3, ()),
    )
    one = curve("opt-1.3b", alone((500.0, 500.0), 48), alone(), shared=shared)
    (panel,) = by_name([one])["replica-gain"].panels
    names = ["concurrency 96", "concurrency 96, pinned", "concurrency 96, 50 % of the SMs each", "concurrency 48"]
    expected = dict(zip([f"opt-1.3b, {name}" for name in names], [0.9, 0.7, 0.6, 0.8]))
    assert {name: values[0][1] for name, values in dots(panel).items()} == pytest.approx(expected)
    assert len({x for values in dots(panel).values() for x, _ in values}) == 4, "side by side"
    assert [row["hollow"] for row in panel["data"]["values"]] == [False, False, False, True]


def test_the_gain_stands_over_the_time_in_which_one_engine_runs_a_kernel():
    two, three = shared_point(2, (900.0, 900.0)), shared_point(3, (1200.0, 1200.0))
    one = curve("opt-1.3b", alone(engine_active=0.8), shared=(two, three))
    (panel,) = by_name([one])["replica-busy"].panels
    assert dots(panel)["opt-1.3b"] == [(0.8, pytest.approx(0.9)), (0.8, pytest.approx(1.2))]
    turns = panel["layer"][0]["data"]["values"]
    assert turns and all(row["x"] * row["y"] == pytest.approx(1) for row in turns)
    utilised = curve("opt-1.3b", alone(gpu_util=0.7), shared=(two,))
    assert dots(by_name([utilised])["replica-busy"].panels[0])["opt-1.3b"] == [(0.7, pytest.approx(0.9))]
    blind = by_name([curve("opt-1.3b", alone(), shared=(two,))])["replica-busy"]
    assert blind.panels == () and "sensor" in blind.why_not


def test_the_device_of_replicas_is_shown_beside_that_of_one_engine():
    shared = shared_point(
        2, (900.0, 900.0), **{name: SENSED[name] for name in OF_REPLICAS} | {"energy_per_token_j": 0.01}
    )
    panels = by_name([curve("opt-1.3b", alone(**SENSED), shared=(shared,))])["replica-device"].panels
    seen = [[row["y"] for row in panel["data"]["values"]] for panel in panels]
    assert seen == [[0.75, 0.75], [0.5, 0.5], [0.4, 0.4], [300.0, 300.0], [1.0, 0.5]]


def gated(speed: float = 0.9, **facts: object) -> Gated:
    return judge_gate(pairs(4, speed=speed, **facts), GateCriteria())


def test_a_gate_has_its_outcome_and_releases_in_its_title():
    (picture,) = pictures(Findings(gates=[gated()]))
    place, outcome, release = picture.origins
    assert (picture.name, place, len(picture.panels)) == ("gate-opt-1.3b", "NVIDIA H200", 1)
    assert "FAIL after 4 pairs" in outcome and release == "vLLM 0.26.0"


def test_two_gates_of_one_model_are_two_pictures_and_one_without_pairs_says_why():
    one = gated()
    names = list(by_name([], gates=[one, replace(one, gate="other"), replace(one, model="x")]))
    assert names == ["gate-opt-1.3b-gate", "gate-opt-1.3b-other", "gate-x"]
    (empty,) = pictures(Findings(gates=[gated(failures=1)]))
    assert empty.panels == () and "pair 1: " in empty.why_not


# Jobs and several GPUs

GRID = [job_point(output_tokens=n, rate=r) for n in (32, 256) for r in (None, 10.0)]
CACHES = [
    job_point(spec=EngineSpec("opt-1.3b", kv_cache_bytes=n << 20), kv_blocks=n, batch=float(n), preemptions=3.0)
    for n in (64, 1024)
]
LIMITS = [job_point(spec=EngineSpec("opt-1.3b", max_num_seqs=n)) for n in (64, 128)]
SIZED = [job_point(spec=EngineSpec(model), output_tokens=n) for model in ("opt-6.7b", "gpt-j-6b") for n in (32, 256)]


@pytest.mark.parametrize(
    ("jobs", "name", "headings", "x"),
    [
        (GRID, "output-length", ["requests/s", "mean E2E latency, s"], [32, 256]),
        (LIMITS, "batch-limit", ["output tokens/s", "mean E2E latency, s"], [64, 128]),
        (CACHES, "kv-blocks", ["output tokens/s", "requests in the engine", "preemptions"], [64, 1024]),
    ],
)
def test_jobs_are_drawn_over_what_varies(jobs, name, headings, x):
    (picture,) = pictures(Findings(jobs=jobs))
    assert (picture.name, picture.origins) == (name, ("NVIDIA H200, vLLM 0.26.0",))
    assert [panel["layer"][-1]["encoding"]["y"]["title"] for panel in picture.panels] == headings
    first = dots(picture.panels[0])
    assert all([at for at, _ in line] == x for line in first.values()) and vega_lite().is_valid(whole_picture(picture))
    assert all(y is not None for panel in picture.panels for line in dots(panel).values() for _, y in line)


def test_ways_of_batching_stand_side_by_side_for_each_rate():
    ways = ("continuous", "none", "static")
    jobs = [
        job_point(rate=r, spec=EngineSpec("opt-1.3b", extra=() if way == "continuous" else (("batching", way),)))
        for r in (5.0, None)
        for way in ways
    ]
    (picture,) = pictures(Findings(jobs=[*jobs, job_point()]))
    rows_ = picture.panels[0]["data"]["values"]
    assert picture.name == "batching" and len(picture.panels) == 2
    paces = ["opt-1.3b, all at once"] * 3 + ["opt-1.3b, 5/s"] * 3
    assert [(row["x"], row["series"]) for row in rows_] == list(zip(paces, ["none", "static", "continuous"] * 2))


def test_models_of_one_size_have_a_picture_of_their_own():
    """In the other one they would hide each other."""
    lengths, sized = pictures(Findings(jobs=[*GRID, *SIZED]))
    assert (lengths.name, sized.name) == ("output-length", "models-of-one-size")
    assert list(dots(lengths.panels[0])) == ["opt-6.7b, all at once", "opt-6.7b, 10/s"]
    assert list(dots(sized.panels[0])) == ["opt-6.7b", "gpt-j-6b"]


def test_cards_are_told_apart_where_the_limit_of_the_batch_varies():
    other = [replace(job, environment=replace(job.environment, gpu_name="NVIDIA H100 80GB HBM3")) for job in LIMITS]
    (picture,) = pictures(Findings(jobs=[*LIMITS, *other]))
    assert list(dots(picture.panels[0])) == ["opt-1.3b, NVIDIA H200", "opt-1.3b, NVIDIA H100 80GB HBM3"]


def test_what_each_number_of_gpus_serves_most_is_drawn_in_all_and_per_gpu():
    planted = {"all_reduce_s": 1e-3, "imbalance": 0.2}
    curve = on_gpus((1, 2), shared=replicas(2, **planted), room={1: 4}, **planted)
    drawn = by_name([curve, *curve.wider])
    total, each, blocks = (panel["data"]["values"] for panel in drawn["gpus"].panels)
    found = deployments(curve)
    one, two = (max(d.tokens_per_s for d in found if d.gpus == n and not d.sharing) for n in (1, 2))
    [most] = [max(d.tokens_per_s for d in found if d.sharing == "gpus")]
    over_all, replicated = "opt-tiny, one engine over all", "opt-tiny, a replica on each"
    expected = [(over_all, 1, one), (over_all, 2, two), (replicated, 1, one), (replicated, 2, most)]
    assert [(row["series"], row["x"], row["y"]) for row in total] == expected
    assert [(row["series"], row["x"], row["y"]) for row in each] == [(name, n, rate / n) for name, n, rate in expected]
    assert [row["x"] for row in blocks] == sorted({d.kv_blocks for d in found if d.kv_blocks})
    assert drawn["replica-busy"].panels == () and drawn["replica-busy"].why_not, "they share no GPU"
    assert "gpus" not in by_name([replace(curve, wider=(), shared=())])
