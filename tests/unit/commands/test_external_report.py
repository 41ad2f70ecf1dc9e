"""What is said of one curve of external results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from published import ROWS, served
from strategies import law

from pytest_slmserve.analysis.advice.advisor import ModelSweep, Objectives, plan
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.batching import RelativeSlo, Slo
from pytest_slmserve.analysis.sweep.curve import TOLERANCE, Axes, Curve
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.commands.external import ExternalResults, external_report
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out

COLUMNS = Columns(
    knob="max_num_seqs",
    throughput="total",
    latency="itl_ms",
    preemptions="lost",
    running="running",
    output_throughput="out",
)
PLAIN = Columns(knob="n", throughput="rate", latency="itl_s")
LAW_OF_TWO = RelativeSlo(2.0, 32)
PUBLISHED = [
    served(knob, [total], [ms / 1e3], batch=output * ms / 1e3, little=running / (output * ms / 1e3) - 1)
    for knob, output, total, ms, running in ROWS
]
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Said:
    """The report as text and as JSON."""

    text: str
    json: dict

    @property
    def notes(self) -> list[str]:
        return self.json["notes"]

    @property
    def unbroken(self) -> str:
        return " ".join(self.text.split())


def said(
    points: Sequence[Point],
    slo: Slo | None = None,
    *,
    columns: Columns = PLAIN,
    threshold: float = 0.1,
    b_half: float | None = None,
) -> Said:
    axes = Axes(columns.knob, columns.throughput, columns.latency)
    curve = Curve(subject="external results", points=tuple(points), axes=axes)
    found = plan(
        [ModelSweep(name="results", points=curve.points, b_half=b_half)], Objectives(slo=slo, threshold=threshold)
    )
    with laid_out(150):
        section, facts = external_report(ExternalResults(curve, columns, ["planted note"], None), found, TOLERANCE)
        return Said(section_text(section), json.loads(as_json(facts)))


def planted(knob: int, *scales: float, lost: float = 0.0, **facts: object) -> Point:
    rates = [scale * law(knob) for scale in scales or (1.0,)]
    return served(knob, rates, [knob / rate for rate in rates], lost, **facts)


def test_the_published_results_as_text():
    found = said(PUBLISHED, LAW_OF_TWO, columns=COLUMNS)
    lines = found.text.splitlines()
    [chosen] = [line for line in lines if line.split()[:2] == ["96", "91.04"]]
    assert chosen.split() == ["96", "91.04", "9,033", "13.9", "+19.4", "*", "yes"]
    assert lines[3].split()[:5] == ["max_num_seqs", "batch", "total", "itl", "ms"]
    assert "plateau         from max_num_seqs 256: past it a doubling gains less than 10 %; not certain" in found.text
    assert "most total      11,145 at max_num_seqs 384" in found.text
    assert (
        "Pareto-optimal  max_num_seqs 1, 8, 32, 64, 96, 128, 256, 384 (from the means of total and itl_ms" in found.text
    )
    assert (
        "B_opt is 96 concurrent requests, the largest measured with an efficiency above 10 % and at most 15 ms"
        in found.unbroken
    )
    assert "81.1 % of the most that was measured" in found.unbroken and lines[-1].startswith("note")
    assert all(line == line.rstrip() and len(line) <= 150 for line in lines)


def test_littles_law_exposes_the_biased_mean():
    notes = said(PUBLISHED, columns=COLUMNS).notes
    [bias] = [note for note in notes if "biased" in note]
    assert "-21.4 to -2.1 % off out x itl_ms (Little's law), most at max_num_seqs 768: 459 reported, 584" in bias
    [short] = [note for note in notes if "not the batch" in note]
    assert "at max_num_seqs 768 only 584 requests were concurrent (76.1 % of it)" in short


def test_littles_law_agrees_is_missing_or_cannot_be_applied():
    sound = [planted(b, batch=float(b), little=-0.01) for b in GRID]
    notes = said(sound, columns=COLUMNS).notes
    assert any("running agrees with" in note and "within 1 %" in note for note in notes)
    unknown = [replace(point, batch=None, little=None) for point in sound]
    notes = said(unknown, columns=replace(COLUMNS, output_throughput=None)).notes
    assert any("running is not checked" in note for note in notes)
    slow = [replace(point, batch=100.0 * point.concurrency) for point in sound]
    [note] = [note for note in said(slow, columns=COLUMNS).notes if "not the time per output token" in note]
    assert "out x itl_ms is more than max_num_seqs at 1, 2, 4" in note


def test_json_has_every_answer():
    found = said(PUBLISHED, LAW_OF_TWO, columns=COLUMNS).json
    [sweep] = found["sweeps"]
    assert sweep["plateau"] == {"value": 256, "low": None, "high": None, "known": False}
    assert found["b_opt"]["value"] == 96 and found["limit_s"] == 2 * 7.509587e-3
    assert found["saturation_law"]["error_mean"] < 0.03 and found["saturation_law"]["error_max"] < 0.06
    assert {"value", "low", "high"} == found["saturation_law"]["t_inf_tokens_per_s"].keys()
    assert found["objectives"]["threshold"] == 0.1 and found["caps"]["slo"] == pytest.approx(105, rel=0.06)
    assert sweep["pareto"] == [1, 8, 32, 64, 96, 128, 256, 384] and found["columns"]["knob"] == "max_num_seqs"
    assert len(found["points"]) == len(ROWS) and found["points"][0]["output_tokens_per_s"] == ROWS[0][2]
    assert found["points"][-1]["little"] == pytest.approx(-0.214, abs=1e-3)
    assert found["advised"]["share"] == pytest.approx(0.8105, abs=1e-4) and "planted note" in found["notes"]


def test_repeats_give_intervals():
    found = said([planted(b, 0.99, 1.01, 1.0) for b in GRID], LAW_OF_TWO)
    for name in ("t_inf_tokens_per_s", "b_half"):
        seen = found.json["saturation_law"][name]
        assert seen["low"] < seen["value"] < seen["high"]
    assert [found.json["b_opt"][end] for end in ("value", "low", "high")] == [64, 64, 64]
    assert found.json["sweeps"][0]["plateau"]["low"] <= found.json["sweeps"][0]["plateau"]["value"] == 256
    assert "B_opt is 64 concurrent requests (95 %: 64 to 64)" in found.text and "not certain" not in found.text


def test_a_half_saturation_that_is_known_is_not_fitted():
    found = said([planted(b, 0.99, 1.01) for b in GRID], b_half=45.0)
    assert found.json["saturation_law"]["b_half"] == {"value": 45.0, "low": None, "high": None}
    assert (
        found.json["saturation_law"]["t_inf_tokens_per_s"]["low"] is not None
        and "b_half 45.0 sequences; off" in found.text
    )


def test_a_point_that_preempted_is_shown_and_never_chosen():
    found = said([planted(b) for b in GRID[:-1]] + [planted(512, 2.0, lost=178.0)], threshold=0.01)
    assert found.json["b_opt"]["value"] == 256 and 512 not in found.json["sweeps"][0]["pareto"]
    assert found.json["sweeps"][0]["plateau"]["value"] is None
    [row] = [line.split() for line in found.text.splitlines() if line.split()[:1] == ["512"]]
    assert (
        row[-1] == "NO"
        and "*" not in row
        and "INVALID: n 512: 0 of 1 measurements are used: 178 preemptions" in found.text
    )
    entry = found.json["points"][-1]
    assert not entry["valid"] and entry["output_tokens_per_s"] == 2 * law(512)
    assert entry["problems"] == ["178 preemptions"]
    assert any("left out, for they preempted: n 512" in note for note in found.notes)


def test_what_is_not_measured_is_said():
    notes = said([planted(b) for b in GRID[2:]], RelativeSlo(2.0, 24)).notes
    assert any("no valid point at 1: T(1) is by the saturation law" in note for note in notes)
    assert any("no valid point at 24: its latency is interpolated between 16 and 32" in note for note in notes)
    assert any("by efficiency alone" in note for note in said([planted(b) for b in GRID]).notes)


def test_a_law_that_cannot_be_is_not_identified():
    found = said([served(b, [rate], [b / rate]) for b, rate in ((1, 10_400.0), (16, 10_300.0), (256, 10_000.0))])
    assert found.json["saturation_law"] is None
    assert any("not identified: the points fit a b_half below 0" in note for note in found.notes)


def test_a_curve_without_a_law_keeps_its_other_answers():
    steep = [served(b, [100.0 * b], [0.01]) for b in (2, 4, 8)]
    found = said(steep)
    assert found.json["saturation_law"] is None and found.json["sweeps"][0]["plateau"]["value"] is None
    assert found.json["b_opt"]["value"] is None and found.json["advised"] is None
    assert any("the saturation law is not fitted: throughput grows as fast" in note for note in found.notes)
    assert "batch           none: batching efficiency needs T(1)" in found.text
    assert "not reached: the last doubling (4 to 8) still gains 100 %" in found.text
    with_one = said([served(1, [100.0], [0.01]), *steep])
    assert with_one.json["b_opt"]["value"] == 8 and "closed form" not in with_one.text


def test_a_law_that_does_not_describe_is_said():
    found = said([planted(b, 0.4 if b == 32 else 1.0) for b in GRID])
    assert "does not describe this curve" in found.text
    assert any("the saturation law is off by up to" in note for note in found.notes)


def test_nothing_within_the_limits():
    found = said([planted(b) for b in GRID], RelativeSlo(0.5, 1))
    assert found.json["b_opt"]["value"] is None
    assert "none: no load that was measured has an efficiency above 10 % and at most" in found.unbroken


def test_a_choice_that_a_smaller_load_beats_is_said():
    falling = [planted(b, 0.7 if b == 512 else 1.0) for b in GRID]
    assert any("but concurrency 256 has" in note for note in said(falling, threshold=0.01).notes)
