"""What is drawn for an SLO, by matplotlib's artists: the values that `report` tells of the committed archives."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from scripts import BASELINES, needs_checkout
from strategies import measurement, noisy_curve

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.goodput import parse_slo
from pytest_slmserve.analysis.stored.claims import stored_curves
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.report.figures.drawing import shown
from pytest_slmserve.report.figures.latencies import latency, rates
from pytest_slmserve.report.loads import ValidityCriteria, is_windowed, rows_of_load
from pytest_slmserve.report.point_facts import point_facts
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement

pytest.importorskip("matplotlib")
needs_checkout()

SWEEPS, SERVER = BASELINES / "h200-vllm-0.26.0-spread.jsonl.xz", BASELINES / "cpu-vllm-0.32.0-server.jsonl.xz"
SLO = "ttft:50ms,tpot:20ms"


def at_rates() -> list[Measurement]:
    return [m for m in read(SERVER).measurements if is_windowed(m.load)]


def lines(axes: Any, stroke: str) -> list[list[tuple[float, float]]]:
    """Points of each line with markers, in the order drawn."""
    drawn = [line for line in axes.lines if line.get_marker() != "None" and line.get_linestyle() == stroke]
    return [list(zip(*line.get_data())) for line in drawn]


def key(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bounds(figure: Any) -> dict[str, tuple[str, float]]:
    """What stands beside the line of each bound, and at which value the line is, by the name of the axis."""
    found = {}
    for axes in figure.axes:
        at = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "-."]
        found |= {axes.get_ylabel(): (text.get_text(), value) for text, value in zip(axes.texts, at, strict=True)}
    return found


def test_percentiles_of_sweeps_are_those_that_the_report_tells():
    curves = stored_curves(read(SWEEPS).measurements, [])
    told = [point for point in point_facts(curves, (), ()) if point["valid"]]
    figure = latency(shown(curves)).figure
    models = list(dict.fromkeys(map(itemgetter("subject"), told)))
    assert len(models) == 3 and key(figure) == [*models, "p50", "p99"] and bounds(figure) == {}
    assert [axes.get_ylabel() for axes in figure.axes] == ["TTFT, ms", "TPOT, ms"]
    for axes, name in zip(figure.axes, ("ttft", "tpot"), strict=True):
        assert axes.get_yscale() == "log"
        for part, stroke in (("p50", "-"), ("p99", "--")):
            wanted = [
                [(p["concurrency"], 1e3 * p[f"{name}_{part}_s"]) for p in told if p["subject"] == model]
                for model in models
            ]
            assert lines(axes, stroke) == wanted


def test_each_bound_is_a_line_with_its_words_and_e2e_has_a_panel_where_it_is_bounded():
    sweeps = shown(stored_curves(read(SWEEPS).measurements, []))
    drawn = bounds(latency(sweeps, parse_slo("ttft:200ms,e2e:5s")).figure)
    assert drawn == {"TTFT, ms": ("ttft:\n200ms", 200.0), "E2E, ms": ("e2e:\n5s", 5000.0)}


def test_without_percentiles_at_two_loads_nothing_is_drawn():
    """As of points that were read from a table."""
    picture = latency(shown([noisy_curve({1: 1.0, 2: 2.0, 4: 4.0})]))
    assert picture.figure is None and picture.why_not.startswith("percentiles of TTFT are not known at two loads")


def test_rates_are_those_that_the_report_tells():
    criteria = ValidityCriteria(parse_slo(SLO))
    short, *plain, ramp = [rows_of_load(m, criteria) for m in at_rates()]
    series = [short, sorted((row for rows in plain for row in rows), key=lambda row: row["load"]["rate"]), ramp]
    figure = rates(at_rates(), criteria.slo).figure

    def told(value: Any) -> list[list[tuple[float, float]]]:
        return [[(row["schedule_delay"].achieved_per_s, value(row)) for row in rows] for rows in series]

    served, *waits = figure.axes
    assert lines(served, "-") == told(itemgetter("requests_per_s"))
    assert lines(served, "--") == told(lambda row: row["goodput"]["per_s"])
    assert [axes.get_ylabel() for axes in waits] == ["TTFT, ms", "TPOT, ms", "E2E, ms"]
    for axes, name in zip(waits, ("ttft", "tpot", "e2e"), strict=True):
        assert lines(axes, "-") == told(lambda row, name=name: 1e3 * row[f"{name}_p50_s"])
        assert lines(axes, "--") == told(lambda row, name=name: 1e3 * row[f"{name}_p99_s"])
    (diagonal,) = [line for line in served.lines if line.get_label() == "as many as were sent"]
    most = max(row["schedule_delay"].achieved_per_s for rows in series for row in rows)
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, most]
    names = ["slm, each judged for 10 s after 5 s", "slm, each judged for 20 s after 5 s", "slm, ramp"]
    assert key(figure) == [*names, "as many as were sent", "served", f"good: {SLO}", "p50", "p99"]
    assert bounds(figure) == {"TTFT, ms": ("ttft:\n50ms", 50.0), "TPOT, ms": ("tpot:\n20ms", 20.0)}


def test_without_bounds_nothing_is_good_and_one_series_is_named_by_its_model():
    figure = rates([m for m in at_rates() if m.load.steps]).figure
    assert key(figure) == ["slm", "as many as were sent", "served", "p50", "p99"]
    assert lines(figure.axes[0], "--") == [] and bounds(figure) == {}


def test_words_stay_in_the_picture_and_off_the_axes():
    figure = rates(at_rates(), parse_slo(f"{SLO},e2e:12345ms")).figure
    figure.draw_without_rendering()
    for axes in figure.axes[1:]:
        (box,) = [text.get_window_extent() for text in axes.texts]
        assert box.x1 <= figure.bbox.x1 and box.x0 >= axes.bbox.x1
        assert not any(box.overlaps(other.get_tightbbox()) for other in figure.axes if other is not axes)


def test_a_latency_that_is_not_known_has_no_panel():
    """As TPOT of answers of one token."""
    known = noisy_curve({1: 1.0, 2: 2.0})
    points = tuple(replace(p, ttft_p50_s=0.1 * p.concurrency, ttft_p99_s=0.5) for p in known.points)
    (axes,) = latency(shown([replace(known, points=points)]), parse_slo("tpot:20ms")).figure.axes
    assert axes.get_ylabel() == "TTFT, ms" and lines(axes, "-") == [[(1, 100.0), (2, 200.0)]]


def failed(m: Measurement) -> Measurement:
    return replace(m, run=replace(m.run, failures=1 + len(m.run.samples)))


def test_a_rate_that_is_not_valid_is_left_out():
    first, *others = at_rates()
    assert key(rates([failed(first), *others]).figure)[:2] == ["slm, each judged for 20 s after 5 s", "slm, ramp"]


def archive(path: Path, measurements: list[Measurement]) -> Path:
    with Archive.open(path) as opened:
        for m in measurements:
            opened.add(m)
    return path


def test_figures_of_an_archive_of_rates_draws_them(tmp_path, capsys):
    assert main(["figures", str(SERVER), "--out", str(tmp_path), "--goodput", SLO]) == 0
    assert capsys.readouterr().out == f"drawn: {tmp_path}/rates.png\n"
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_where_no_rate_is_valid_the_status_says_so(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", [failed(m) for m in at_rates()])
    assert main(["figures", str(path), "--out", str(tmp_path)]) == 4
    assert "not drawn: rates: no load at a request rate is valid\n" in capsys.readouterr().out


def test_a_number_of_requests_in_a_closed_loop_has_no_picture(tmp_path, capsys):
    """As `measure --max-concurrency 4 --num-prompts 40` keeps it."""
    path = archive(tmp_path / "a.jsonl", [measurement(4, load=ClosedLoop(4, requests=40))])
    assert main(["figures", str(path), "--out", str(tmp_path / "out")]) == 4
    assert "there is no sweep, no job, no request rate, no ramp and no gate to draw" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bounds_are_read_before_the_archive(tmp_path, capsys):
    assert main(["figures", str(tmp_path / "none"), "--goodput", "speed:1s"]) == 4
    assert "no latency is called 'speed'" in capsys.readouterr().err
