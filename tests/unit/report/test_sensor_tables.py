"""Tables of what the sensors saw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripts import BASELINES, in_checkout
from strategies import H200, WELL, law, measurement, planted_telemetry, point

from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.points import Point, Summary
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.archive.store import read
from pytest_slmserve.report import text_table
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.report.section import Legend, section_text
from pytest_slmserve.report.sweeps import SENSOR_LEGEND as LEGEND
from pytest_slmserve.report.sweeps import (
    STEP,
    STEP_LEGEND,
    SWEEP_LEGEND,
    energy_sections,
    step_rows,
    sweep_section,
    sweep_sections,
)
from pytest_slmserve.report.sweeps import sensor_table as sensor_section
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Measurement

BATCHES = (1, 8, 1024)
LIFELIKE = {
    "gpu_util": 1.0,
    "engine_active": 0.972,
    "sm_active": 0.718,
    "sm_active_max": 0.884,
    "sm_occupancy": 0.135,
    "sm_occupancy_max": 0.149,
    "dram_active": 0.613,
    "tensor_active": 0.0521,
    "power_w": 412.345,
    "power_limit_w": 700.0,
    "energy_per_token_j": 1.23456,
    "sm_clock_hz": 1.98e9,
    "power_capped": 0.954,
    "own_cores": 2.31,
    "probe_s": 0.0048,
    "probe_cpu_s": 0.0045,
    "unexplained": 0.412,
    "bound": "compute",
    "decode_dram": 0.713,
    "decode_tensor": 0.0321,
    "saturation_gap": 3.16,
}


def seen(concurrency: int = 8, **figures: object) -> Point:
    return replace(point(concurrency, [100.0, 101.0]), **figures)


def sweep(**figures: object) -> Curve:
    return Curve(subject="opt-1.3b", points=tuple(seen(c, **figures) for c in BATCHES))


def sweep_report(curve: Curve) -> str:
    return section_text(sweep_section(curve, curve.subject, Findings()))


def sensor_table(curve: Curve) -> str:
    shown = sensor_section(curve, "", Findings(curves=[curve]))
    return text_table.table(shown.rows, shown.columns) if shown.rows else ""


def legend(curves: list[Curve]) -> str:
    texts = [each.text for each in sweep_sections(Findings(curves=curves)) if isinstance(each, Legend)]
    return "".join(text for text in texts if text not in (SWEEP_LEGEND, STEP_LEGEND))


def step_table(curve: Curve) -> str:
    rows = step_rows(curve)
    return text_table.table(rows, STEP) if rows else ""


def energy_report(curves: list[Curve]) -> list[str]:
    return list(map(section_text, energy_sections(Findings(curves=curves))))


def head(table: str) -> str:
    """The words of the two lines above the rule, each column's together."""
    first, second, rule = table.splitlines()[:3]
    columns, at = [], 0
    for dashes in rule.split("  "):
        columns.append(
            f"{first[at : at + len(dashes)].strip()} {second[at : at + len(dashes)].strip()}".strip().replace("- ", "")
        )
        at += len(dashes) + 2
    return "|".join(columns)


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()[3:]]


def test_a_row_shows_the_figures_of_its_point():
    table = sensor_table(sweep(**LIFELIKE))
    assert len(rows(table)) == 3
    assert rows(table)[1] == [
        *["8", "100.0", "97.2", "71.8", "88.4", "13.5", "14.9", "61.3", "5.2", "412", "1,235", "1,980", "95.4"],
        *["2.31", "6.2", "41.2", "compute", "ok"],
    ]
    assert head(table) == (
        "concurrency|GPU util %|busy %|SM % mean|SM % max|warp % mean|warp % max|DRAM %|tensor %|power W|mJ/ token|"
        "clock MHz|cap %|own cores|host wait %|rest %|bound|sensors"
    )


@pytest.mark.parametrize("figures", [{}, {"unexplained": 0.3, "bound": "memory"}])
def test_without_sensors_there_is_no_table(figures):
    """What shapes say alone needs no table of sensors."""
    curve = sweep(**figures)
    assert sensor_table(curve) == legend([curve]) == "" and (energy_report([curve])) == []
    text = sweep_report(curve)
    assert "sensors" not in text and "power" not in text


def test_loads_without_sensors_have_no_row():
    curve = Curve(subject="x", points=(seen(1), seen(2, power_w=300.0), point(4, ())))
    assert [row[0] for row in rows(sensor_table(curve))] == ["2"]


def test_degraded_loads_are_told_from_sound_ones():
    curve = Curve(subject="x", points=(seen(1, power_w=300.0), seen(2, power_w=300.0, degraded=("it was slow",))))
    assert [row[-1] for row in rows(sensor_table(curve))] == ["ok", "degraded"]
    text = sweep_report(curve)
    assert "degraded: concurrency 2: it was slow" in text
    assert [line.split()[-1] for line in text.splitlines() if line.split()[:1] in (["1"], ["2"])][:2] == [
        "yes",
        "degraded",
    ]


def test_the_legend_is_of_the_columns_shown():
    assert legend([sweep(gpu_util=1.0)]) == LEGEND["GPU util %"]
    both = legend([sweep(gpu_util=1.0), sweep(own_cores=1.0, power_capped=0.0)])
    assert both == " ".join(LEGEND[name] for name in ("GPU util %", "cap %", "own cores"))
    assert legend([sweep(**LIFELIKE)]) == " ".join(LEGEND[name] for name in LEGEND if name != "host speed %")
    assert legend([]) == ""


# Energy


def spent(model: str, concurrency: int, joules: float, limit: float | None = 700.0, **where: object) -> Curve:
    made = measurement(concurrency, 1000.0, model=model, **where)
    figures = {"energy_per_token_j": joules, "power_w": 350.0, "power_limit_w": limit}
    shown = replace(seen(concurrency, **figures), each=(Summary(**figures),) * 2)
    return Curve(subject=model, points=(shown,), measurements=(made,))


def test_energy_of_each_model_at_its_largest_batch_of_the_table():
    curves = [spent("opt-125m", 512, 0.00843), spent("opt-1.3b", 256, 0.0476), spent("opt-2.7b", 64, 0.1)]
    [text] = energy_report(curves)
    title, _, names, _, *lines = text.splitlines()
    assert title == (
        "Energy per output token at the largest batch of arXiv:2404.03353, table 1, under a power limit of 700 W"
    )
    assert names.split("  ")[0] == "model"
    assert [line.split() for line in lines] == [
        ["opt-125m", "512", "100.5", "350", "0.00843"],
        ["opt-1.3b", "256", "100.5", "350", "0.0476"],
    ]


def test_a_table_for_each_power_limit():
    curves = [
        spent("opt-125m", 512, 0.01),
        spent("opt-1.3b", 256, 0.05, limit=500.0),
        spent("opt-2.7b", 128, 0.09),
        spent("opt-6.7b", 64, 0.2, limit=None),
    ]
    texts = energy_report(curves)
    assert [text.splitlines()[0].partition("under ")[2] for text in texts] == [
        "a power limit of 700 W",
        "a power limit of 500 W",
        "an unknown power limit",
    ]
    models = [[line.split()[0] for line in text.splitlines()[4:]] for text in texts]
    assert models == [["opt-125m", "opt-2.7b"], ["opt-1.3b"], ["opt-6.7b"]]


def test_one_model_on_two_devices_is_told_apart():
    other = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
    [text] = energy_report([spent("opt-125m", 512, 0.01), spent("opt-125m", 512, 0.02, environment=other)])
    assert "opt-125m, NVIDIA H200 " in text and "opt-125m, NVIDIA H100 80GB HBM3 " in text


def test_repeats_under_two_limits_are_under_no_known_one():
    limits = [planted_telemetry({**WELL, sensors.POWER_LIMIT: limit}, interval_s=0.1) for limit in (700.0, 500.0)]
    made = [measurement(512, 1e4, repeat=i, model="opt-125m", steps=120) for i in range(2)]
    both = [replace(m, run=replace(m.run, telemetry=limits[i])) for i, m in enumerate(made)]
    [text] = energy_report([curve_of("opt-125m", both)])
    assert "under an unknown power limit" in text


# The host


def slower(concurrency: int, cpu_ms: float, model: str = "opt-1.3b") -> Measurement:
    """A measurement beside which a host-speed probe took so long, and waited as long again."""
    made = measurement(concurrency, law(concurrency), model=model)
    pieces = {sensors.OWN_CORES: 1.0, sensors.PROBE: 2e-3 * cpu_ms, sensors.PROBE_CPU: 1e-3 * cpu_ms}
    return replace(made, run=replace(made.run, telemetry=planted_telemetry(pieces, interval_s=0.001, until_s=0.7)))


def test_the_speed_of_the_host_is_shown_beside_each_load():
    table = sensor_table(curve_of("opt-1.3b", [slower(1, 4.0), slower(2, 5.0), slower(4, 4.0)]))
    assert head(table) == "concurrency|own cores|host speed %|host wait %|rest %|sensors"
    assert [row[2:4] for row in rows(table)] == [["100.0", "50.0"], ["80.0", "50.0"], ["100.0", "50.0"]]
    assert "host speed: " in legend([curve_of("opt-1.3b", [slower(1, 4.0)])])


def test_the_speed_of_the_host_is_relative_to_its_best_in_the_whole_run():
    curves = [curve_of(model, [slower(c, ms, model) for c in (1, 2, 4)]) for model, ms in (("a", 4.0), ("b", 8.0))]
    [first, second] = [
        text for text, _ in tables(Findings(curves=curves)) if "concurrency" in text and "batch:" not in text
    ][:2]
    assert " 100.0 " in first and " 50.0 " in second.split("wait")[1]


@in_checkout
def test_parts_of_a_step_agree_with_the_sensors_beside_them():
    (curve,) = stored_curves(read(BASELINES / "h200-vllm-0.26.0-core-opt-2.7b.jsonl.xz").measurements, ())
    with text_table.laid_out(400):
        table, sensed = step_table(curve), sensor_table(curve)
    assert head(table) == "concurrency|step ms|weights %|KV %|other kernels %|no kernel %"
    busy, rest = (head(sensed).split("|").index(name) for name in ("busy %", "rest %"))
    for parts, seen in zip(rows(table), rows(sensed), strict=True):
        _, _, weights, kv, kernels, idle = map(float, parts)
        assert weights + kv + kernels + idle == pytest.approx(100, abs=0.25)
        assert idle == pytest.approx(100 - float(seen[busy]), abs=0.11)
        assert kernels + idle == pytest.approx(float(seen[rest]), abs=0.11)


def test_parts_of_a_step_are_told_with_their_legend():
    made = curve_of("opt-1.3b", [measurement(load, 100.0, environment=H200) for load in (1, 2)])
    assert head(step_table(made)) == "concurrency|step ms|weights %|KV %|kernels and host %"
    assert "Parts of a step: weights" in "".join(text for text, _ in tables(Findings(curves=[made])))
    unknown = curve_of("opt-1.3b", [measurement(1, 100.0, environment=replace(H200, gpu_name="another"))])
    assert step_table(unknown) == ""
    assert "Parts of a step" not in "".join(text for text, _ in tables(Findings(curves=[unknown])))
