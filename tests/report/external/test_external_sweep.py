"""What is said of results that are not ours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from published import ROWS
from strategies import law

from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.archive.external import Columns, Setting
from pytest_slmserve.report.external.sweep import Judgement, Question, as_json, judge, record, text
from pytest_slmserve.schema.errors import TooFewPoints

COLUMNS = Columns(
    knob="max_num_seqs", throughput="total", latency="itl_ms", preemptions="lost", running="running", output="out"
)
QUESTION = Question(columns=COLUMNS, slo=RelativeSlo(2.0, 32))
PUBLISHED = [
    Setting(
        knob=knob,
        throughput=(total,),
        latency_s=(ms / 1e3,),
        preemptions=0.0,
        running=(running,),
        output_per_s=(output,),
    )
    for knob, output, total, ms, running in ROWS
]
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def planted(knob: int, *scales: float, **facts: object) -> Setting:
    rates = tuple(scale * law(knob) for scale in scales or (1.0,))
    return replace(Setting(knob=knob, throughput=rates, latency_s=tuple(knob / rate for rate in rates)), **facts)


def plain(settings: list[Setting], **facts: object) -> Judgement:
    columns = Columns(knob="n", throughput="rate", latency="itl_s")
    return judge(settings, Question(columns=columns, **facts))


def test_the_published_results_as_text():
    out = text(judge(PUBLISHED, QUESTION))
    lines = out.splitlines()
    [chosen] = [line for line in lines if "<--" in line]
    assert chosen.split() == ["96", "9,033", "13.9", "+19.4", "24.7", "91.0", "*", "<--"]
    assert lines[0].split()[:4] == ["max_num_seqs", "total", "itl", "ms"]
    assert "plateau         from max_num_seqs 256: past it a doubling gains less than 10 %; not certain" in out
    assert "Pareto-optimal  max_num_seqs 1, 8, 32, 64, 96, 128, 256, 384 " in out
    assert "latency limit   15.0 ms" in out and "81.1 % of the largest throughput" in out
    assert all(line == line.rstrip() and len(line) <= 150 for line in lines)


def test_littles_law_exposes_the_biased_mean():
    notes = judge(PUBLISHED, QUESTION).notes
    [bias] = [note for note in notes if "biased" in note]
    assert (
        "-21.4 to -2.1 % off output rate x latency (Little's law), most at max_num_seqs 768: 459 reported, 584" in bias
    )
    [short] = [note for note in notes if "not the batch" in note]
    assert "at max_num_seqs 768 only 584 requests were in flight (76.1 % of it)" in short


def test_littles_law_agrees_is_missing_or_cannot_be_applied():
    sound = [planted(b, running=(0.99 * b,), output_per_s=(law(b),)) for b in GRID]
    assert any("running agrees with" in note and "within 1 %" in note for note in judge(sound, QUESTION).notes)
    unknown = [replace(s, output_per_s=()) for s in sound]
    assert any("running is not checked" in note for note in judge(unknown, QUESTION).notes)
    slow = [replace(s, latency_s=(100 * s.latency_s[0],)) for s in sound]
    [note] = [note for note in judge(slow, QUESTION).notes if "not the time per output token" in note]
    assert "itl_ms is more than max_num_seqs at 1, 2, 4" in note


def test_json_has_every_answer():
    found = json.loads(as_json(judge(PUBLISHED, QUESTION)))
    answers = ("plateau_from", "pareto", "t_inf", "b_half", "b_opt", "fit_error")
    assert all({"value", "low", "high"} <= found[name].keys() for name in answers)
    assert (found["plateau_from"]["value"], found["b_opt"]["value"], found["slo_s"]) == (256, 96, 2 * 7.509587e-3)
    assert found["fit_error"]["value"] < 0.03 and found["fit_error"]["max"] < 0.06
    assert found["efficiency"] == 0.1 and found["caps"]["slo"] == pytest.approx(105, rel=0.06)
    assert len(found["points"]) == len(ROWS) and found["points"][0]["gain"] is None
    assert found["share_of_largest"] == pytest.approx(0.8105, abs=1e-4)


def test_repeats_give_intervals():
    found = record(plain([planted(b, 0.99, 1.01, 1.0) for b in GRID], slo=RelativeSlo(2.0, 32)))
    for name in ("t_inf", "b_half"):
        assert found[name]["low"] < found[name]["value"] < found[name]["high"]
    assert found["b_opt"] == {"value": 64, "low": 64, "high": 64}
    assert found["plateau_from"]["low"] <= found["plateau_from"]["value"] == 256
    assert "(95 %: 64 to 64)" in text(plain([planted(b, 0.99, 1.01) for b in GRID], slo=RelativeSlo(2.0, 32)))


def test_a_point_that_preempted_is_shown_and_never_chosen():
    lost = [planted(b) for b in GRID[:-1]] + [planted(512, 2.0, preemptions=178.0)]
    found = plain(lost, threshold=0.01)
    assert found.choice.value == 256 and 512 not in found.front and found.plateau.value is None
    [row] = [line for line in text(found).splitlines() if "preempted 178 times" in line]
    assert row.split()[0] == "512" and "*" not in row and "<--" not in row
    entry = record(found)["points"][-1]
    assert entry["preempted"] and entry["throughput"] == 2 * law(512) and entry["efficiency"] is None
    assert any("left out, for they preempted: n 512" in note for note in found.notes)


def test_what_is_not_measured_is_said():
    found = plain([planted(b) for b in GRID[2:]], slo=RelativeSlo(2.0, 24))
    assert any("no valid point at 1: T(1) is by the saturation law" in note for note in found.notes)
    assert any("no valid point at 24: its latency is interpolated between 16 and 32" in note for note in found.notes)
    assert any("by efficiency alone" in note for note in plain([planted(b) for b in GRID]).notes)


def test_a_curve_without_a_law_keeps_its_other_answers():
    steep = [Setting(knob=b, throughput=(100.0 * b,), latency_s=(0.01,)) for b in (2, 4, 8)]
    found = plain(steep)
    assert found.law is None and found.batching is None and found.plateau.value is None
    assert record(found)["b_opt"] == {"value": None, "low": None, "high": None}
    assert "B_opt cannot be told: batching efficiency needs T(1)" in text(found)
    assert "not reached: from 4 to 8 throughput still gains 100 %" in text(found)
    with_one = plain([Setting(knob=1, throughput=(100.0,), latency_s=(0.01,)), *steep])
    assert with_one.choice.value == 8 and "closed form     -" in text(with_one)


def test_a_law_that_does_not_describe_is_said():
    bumpy = [planted(b, 0.4 if b == 32 else 1.0) for b in GRID]
    assert any("does not describe this curve" in note for note in plain(bumpy).notes)


def test_nothing_within_the_limits():
    found = plain([planted(b) for b in GRID], slo=RelativeSlo(0.5, 1))
    assert found.choice.value is None and "none: no n that was measured has efficiency above 10 %" in text(found)


def test_a_choice_that_a_smaller_load_beats_is_said():
    falling = [planted(b, 0.7 if b == 512 else 1.0) for b in GRID]
    assert "but 256 has" in text(plain(falling, threshold=0.01))


def test_too_few_points():
    with pytest.raises(TooFewPoints, match=r"2 values of n without preemption \(1 with\), 3 are needed"):
        plain([planted(1), planted(2), planted(4, preemptions=1.0)])
