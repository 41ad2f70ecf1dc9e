"""Pictures for files: their rows are the values of points, Vega-Lite knows them, and they can be drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from launches import pairs
from scripts import BASELINES
from strategies import H200, law, measurement, noisy_curve, point, shared_point

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.points import Point, ReplicaPoint, Summary, job_points, ratio
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.report.as_json import point_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.loads import ValidityCriteria, is_windowed, rates_section, rows_of_load
from pytest_slmserve.report.page.pictures import Picture, draw_pictures, pictures, whole_picture
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import ClosedLoop

if not BASELINES.is_dir():
    pytest.skip("the baselines are in the checkout", allow_module_level=True)

SWEEPS, SERVER = BASELINES / "h200-vllm-0.26.0-staggered.jsonl.xz", BASELINES / "cpu-vllm-0.32.0-server.jsonl.xz"
SLO = "ttft:50ms,tpot:20ms"
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


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("h200-vllm-0.26.0-core", {"sweeps", "latency", "sm-per-batch", "energy-per-token", "utilisation", "decoding"}),
        ("h200-vllm-0.26.0-replicas", {"replica-gain", "replica-busy", "replica-latency", "replica-device"}),
        ("h200-vllm-0.26.0-jobs", {"output-length", "models-of-one-size", "kv-blocks"}),
        ("h200-vllm-0.26.0-several-gpus", {"gpus", "replica-gain"}),
        ("h200-vllm-0.26.0-batching", {"batching"}),
        ("cpu-vllm-0.32.0-server", {"rates"}),
    ],
)
def test_pictures_of_archives_are_specifications_that_vega_lite_knows(name, drawn, vega_lite):
    contents = read(BASELINES / f"{name}.jsonl.xz")
    curves, jobs = stored_curves(contents.measurements, contents.plans), job_points(contents.measurements)
    drawn_of = by_name(curves, jobs=jobs, loads=contents.measurements, slo=parse_slo(SLO))
    found = {name: picture for name, picture in drawn_of.items() if picture.panels}
    assert drawn <= found.keys()
    assert [name for name, picture in found.items() if not vega_lite.is_valid(whole_picture(picture))] == []
    assert all(picture.origins for picture in found.values())


def test_the_sweeps_have_points_intervals_law_roofline_and_plateau():
    one, two = swept(), swept("opt-2.7b", t_inf=5000.0)
    picture = by_name([one, two])["sweeps"]
    assert picture.origins == ("NVIDIA H200, vLLM 0.26.0, 64 prompt and 32 output tokens",)
    load, plane = picture.panels
    assert dots(load)["opt-1.3b"] == [(p.concurrency, p.output_tokens_per_s) for p in one.valid]
    assert all(row["low"] < row["y"] < row["high"] for row in load["data"]["values"])
    law_of, roof, ring = (layer["data"]["values"] for layer in load["layer"][:3])
    assert {row["series"] for row in law_of} == {"opt-1.3b", "opt-2.7b"} and roof
    assert [(row["series"], row["x"]) for row in ring] == [(c.subject, c.plateau().value) for c in (one, two)]
    assert {row["series"] for row in rows(plane)} == {"opt-1.3b", "opt-2.7b"}


def test_a_simulated_sweep_says_so_and_a_law_that_does_not_describe_is_not_drawn():
    simulated = by_name([swept(environment=Environment(platform="simulated"))])["sweeps"]
    assert simulated.origins == ("SIMULATED, not measured on a device",)
    bent = noisy_curve({1: 10.0, 16: 160.0, 128: 1200.0, 256: 700.0, 512: 650.0})
    law_of, _, _ = by_name([bent])["sweeps"].panels[0]["layer"][:3]
    assert law_of["data"]["values"] == []


def test_predicted_loads_are_hollow_and_their_intervals_dashed():
    contents = read(BASELINES / "h200-vllm-0.26.0-adaptive.jsonl.xz")
    load, _ = by_name(stored_curves(contents.measurements, contents.plans))["sweeps"].panels
    predicted = [row for row in load["data"]["values"] if row.get("predicted")]
    assert predicted and all(row["hollow"] and row["low"] < row["y"] < row["high"] for row in predicted)
    assert [layer for layer in load["layer"] if layer["encoding"].get("strokeDash", {}).get("value") == [1, 0]]


def test_models_of_any_speed_are_on_one_scale():
    fast, slow, short = swept("fast"), swept("slow", t_inf=10.0), noisy_curve({1: 1.0, 2: 2.0})
    (panel,) = by_name([fast, slow, short])["relative-throughput"].panels
    assert {name: values[-1][1] for name, values in dots(panel).items()} == {"fast": 1.0, "slow": 1.0}
    assert "relative-throughput" not in by_name([fast, short])


@pytest.mark.parametrize(
    ("curves", "why"), [([], "there is no sweep,"), ([Curve(subject="x")], "no valid point to draw")]
)
def test_nothing_to_draw(curves, why, tmp_path):
    with pytest.raises(BadUsage, match=why):
        draw_pictures(Findings(curves=curves), tmp_path / "out", "png")
    assert not [*tmp_path.iterdir()]


def test_a_png_is_900_pixels_wide_twice_over_and_an_svg_has_the_names(tmp_path):
    pytest.importorskip("vl_convert")
    found = Findings(curves=[swept(), swept("opt-2.7b", t_inf=5000.0)])
    for form in ("png", "svg"):
        assert f"drawn: {tmp_path}/sweeps.{form}" in draw_pictures(found, tmp_path, form)
    drawn = (tmp_path / "sweeps.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and 1600 <= int.from_bytes(drawn[16:20], "big") <= 1900
    text, origins = (tmp_path / "sweeps.svg").read_text("utf-8"), pictures(found)[0].origins
    assert [word for word in ("opt-1.3b", "opt-2.7b", "concurrent requests", *origins) if word not in text] == []


def test_what_cannot_be_written_is_a_usage_error(tmp_path, monkeypatch):
    pytest.importorskip("vl_convert")
    (tmp_path / "sweeps.png").mkdir()
    with pytest.raises(BadUsage, match="cannot write .*sweeps.png"):
        draw_pictures(Findings(curves=[swept()]), tmp_path, "png")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(BadUsage, match="pip install vl-convert-python"):
        draw_pictures(Findings(curves=[swept()]), tmp_path, "png")


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
    power, energy = (panel["data"]["values"] for panel in found.panels)
    assert [(row["series"], row["low"], row["y"], row["high"]) for row in power] == [
        ("power limit 700 W", 300.0, 300.5, 301.0),
        ("power limit 350 W", 300.0, 300.5, 301.0),
    ]
    assert [row["y"] for row in energy] == pytest.approx([0.06, 0.06])


# Latencies and rates


def test_percentiles_of_sweeps_are_those_that_the_report_tells():
    curves = stored_curves(read(SWEEPS).measurements, [])
    told = [each for each in point_facts(Findings(curves=curves)) if each["valid"]]
    panels = by_name(curves)["latency"].panels
    models = list(dict.fromkeys(map(itemgetter("subject"), told)))
    assert len(models) == 3 and [panel["layer"][0]["encoding"]["y"]["title"] for panel in panels] == [
        "TTFT, ms",
        "TPOT, ms",
    ]
    for panel, name in zip(panels, ("ttft", "tpot"), strict=True):
        for part in ("p50", "p99"):
            assert dots(panel, part) == {
                model: [(p["concurrency"], 1e3 * p[f"{name}_{part}_s"]) for p in told if p["subject"] == model]
                for model in models
            }


def test_each_limit_is_a_line_with_its_words_and_e2e_has_a_panel_if_it_is_limited():
    curves = stored_curves(read(SWEEPS).measurements, [])
    panels = by_name(curves, slo=parse_slo("ttft:200ms,e2e:5s"))["latency"].panels
    assert [rules(panel) for panel in panels] == [[("ttft:200ms", 200.0)], [], [("e2e:5s", 5000.0)]]


def test_pictures_without_their_figures_say_what_is_missing():
    found = by_name([swept()])
    missing = ("sm-per-batch", "energy-per-token", "utilisation", "memory-bound", "decoding")
    assert [found[name].panels for name in missing] == [()] * len(missing)
    assert all(found[name].why_not for name in missing)
    latency = by_name([noisy_curve({1: 1.0, 2: 2.0, 4: 4.0})])["latency"]
    assert latency.panels == () and latency.why_not.startswith("percentiles of TTFT are not known at two loads")
    replicas = by_name([curve("opt-1.3b", alone(concurrency=48), shared=(shared_point(2, (900.0,)),))])
    why = "of no model replicas and one engine alone are valid under the same load"
    names = ("replica-gain", "replica-busy", "replica-latency", "replica-device")
    assert {replicas[name].why_not for name in names} == {why}


def at_rates() -> list[Measurement]:
    return [m for m in read(SERVER).measurements if is_windowed(m.load)]


def test_rates_are_those_that_the_report_tells():
    criteria = ValidityCriteria(parse_slo(SLO))
    short, *plain, ramp = [rows_of_load(m, criteria) for m in at_rates()]
    series = [short, sorted((row for each in plain for row in each), key=lambda row: row["load"]["rate"]), ramp]
    served, *waits = by_name([], loads=at_rates(), slo=criteria.slo)["rates"].panels

    def told(value: Any) -> list[list[tuple[float, float]]]:
        return [[(row["schedule_delay"].achieved_per_s, value(row)) for row in each] for each in series]

    names = ["slm, each judged for 10 s after 5 s", "slm, each judged for 20 s after 5 s", "slm, ramp"]
    assert dots(served, "served") == dict(zip(names, told(itemgetter("requests_per_s"))))
    assert dots(served, f"good: {SLO}") == dict(zip(names, told(lambda row: row["goodput"].per_s)))
    for panel, name in zip(waits, ("ttft", "tpot", "e2e"), strict=True):
        for part in ("p50", "p99"):
            wanted = told(lambda row, key=f"{name}_{part}_s": 1e3 * row[key])
            assert dots(panel, part) == dict(zip(names, wanted))


def failed(m: Measurement) -> Measurement:
    return replace(m, run=replace(m.run, failures=1 + len(m.run.samples)))


def test_a_rate_that_is_not_valid_is_left_out():
    first, *others = at_rates()
    served = by_name([], loads=[failed(first), *others])["rates"].panels[0]
    assert list(dots(served)) == ["slm, each judged for 20 s after 5 s", "slm, ramp"]
    (nothing,) = pictures(Findings(loads=[failed(m) for m in at_rates()]))
    assert (nothing.panels, nothing.why_not) == ((), "no load at a request rate is valid")


def test_a_rate_with_as_many_failures_as_are_allowed_is_drawn():
    m = next(m for m in at_rates() if not m.load.steps)
    lossy = replace(m, run=replace(m.run, failures=len(m.run.samples) // 10))
    drawn = {
        share: [chart.title for chart in rates_section([lossy], ValidityCriteria(failed_share=share)).charts()]
        for share in (0.0, 0.5)
    }
    assert "requests/s over requests/s sent" in drawn[0.5] and "requests/s over requests/s sent" not in drawn[0.0]


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
    assert (blind.panels, blind.why_not) == ((), "no sensor told when one engine runs a kernel")


def test_the_device_of_replicas_is_shown_beside_that_of_one_engine():
    shared = shared_point(
        2, (900.0, 900.0), **{name: SENSED[name] for name in OF_REPLICAS} | {"energy_per_token_j": 0.01}
    )
    panels = by_name([curve("opt-1.3b", alone(**SENSED), shared=(shared,))])["replica-device"].panels
    seen = [[row["y"] for row in panel["data"]["values"]] for panel in panels]
    assert seen == [[0.75, 0.75], [0.5, 0.5], [0.4, 0.4], [300.0, 300.0], [1.0, 0.5]]


def gated(speed: float = 0.9, **facts: object) -> Gated:
    return judge_gate(pairs(4, speed=speed, **facts), GateCriteria())


def test_a_gate_has_its_ratios_pairs_and_margins():
    one = gated()
    (picture,) = pictures(Findings(gates=[one]))
    (panel,) = picture.panels
    assert picture.name == "gate-opt-1.3b" and any("FAIL after 4 pairs" in line for line in picture.origins)
    ratios = {row["subject"]: row for row in panel["data"]["values"]}
    first = one.gated[0]
    assert ratios[first.name]["x"] == pytest.approx(first.ratio.value)
    assert ratios[first.name]["bound"] == pytest.approx(1 / 1.03), "throughput that costs 3 % more"
    each = [row["pair"] for row in rows(panel) if row.get("subject") == first.name and "pair" in row]
    assert each == pytest.approx([0.9] * 4)


def test_two_gates_of_one_model_are_two_pictures_and_one_without_pairs_says_why():
    one = gated()
    names = list(by_name([], gates=[one, replace(one, gate="other"), replace(one, model="x")]))
    assert names == ["gate-opt-1.3b-gate", "gate-opt-1.3b-other", "gate-x"]
    (empty,) = pictures(Findings(gates=[gated(failures=1)]))
    assert empty.panels == () and empty.why_not.startswith("no pair of launches counts; pair 1: ")


# The command


def archive(path: Path, measurements: list[Measurement]) -> Path:
    with Archive.open(path) as opened:
        for m in measurements:
            opened.add(m)
    return path


def test_figures_of_an_archive_of_rates_draws_them(tmp_path, capsys):
    pytest.importorskip("vl_convert")
    assert main(["report", str(SERVER), "--figures", str(tmp_path), "--goodput", SLO]) == 0
    assert capsys.readouterr().out.endswith(f"drawn: {tmp_path}/rates.png\n")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_the_status_says_if_nothing_could_be_drawn(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", [failed(m) for m in at_rates()])
    assert main(["report", str(path), "--figures", str(tmp_path)]) == 4
    assert "no picture can be drawn: rates: no load at a request rate is valid\n" in capsys.readouterr().err


def test_a_number_of_requests_in_a_closed_loop_has_no_picture(tmp_path, capsys):
    """As `measure --max-concurrency 4 --num-prompts 40` keeps it."""
    path = archive(tmp_path / "a.jsonl", [measurement(4, load=ClosedLoop(4, requests=40))])
    assert main(["report", str(path), "--figures", str(tmp_path / "out")]) == 4
    assert "there is no sweep, no job, no request rate, no ramp and no gate to draw" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
