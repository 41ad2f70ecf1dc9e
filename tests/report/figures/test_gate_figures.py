"""The picture of a gate: what its table says, and each pair, against the margin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launches import pairs

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.report.figures.gates import gate_pictures

pytest.importorskip("matplotlib")


def gated(speed: float = 0.9, **facts: object) -> Gated:
    return judge_gate(pairs(4, speed=speed, **facts), GateCriteria())


def test_a_row_has_the_ratio_its_interval_each_pair_and_the_margin():
    one = gated()
    (picture,) = gate_pictures([one])
    (axes,) = picture.figure.axes
    assert picture.name == "gate-opt-1.3b" and axes.get_title(loc="left").startswith("opt-1.3b: FAIL after 4 pairs")
    rows = [text.get_text() for text in axes.get_yticklabels()]
    assert rows[:2] == ["output tokens/s, large load \u2191", "mean E2E, small load \u2193"]
    lines = {tuple(line.get_ydata()): [*line.get_xdata()] for line in axes.lines if len(line.get_xdata())}
    assert lines[(0.25,) * 4] == pytest.approx([0.9] * 4), "the pairs"
    assert lines[(0,)] == pytest.approx([one.gated[0].ratio.value])
    assert lines[(-0.35, 0.35)] == pytest.approx([1 / 1.03] * 2), "throughput that costs 3 % more"
    assert lines[(0.65, 1.35)] == pytest.approx([1.03] * 2), "a latency"
    words = [text.get_text() for text in axes.texts]
    assert words == ["fail", "fail", "fail", "pass"] and len(rows) > len(words), "what is shown has none"


def test_every_pair_is_in_the_picture():
    (axes,) = gate_pictures([gated(0.5)])[0].figure.axes
    low, high = axes.get_xlim()
    assert low < 0.5 and high > 2.0


def test_two_gates_of_one_model_are_two_pictures():
    one = gated()
    names = [picture.name for picture in gate_pictures([one, replace(one, gate="other"), replace(one, model="x")])]
    assert names == ["gate-opt-1.3b-gate", "gate-opt-1.3b-other", "gate-x"]


def test_a_gate_without_a_pair_that_counts_is_not_drawn():
    (picture,) = gate_pictures([gated(failures=1)])
    assert picture.figure is None and picture.why_not.startswith("no pair of launches counts; pair 1: ")


def archive(path: Path, **facts: object) -> Path:
    with Archive.open(path) as opened:
        for m in pairs(4, **facts):
            opened.add(m)
    return path


def test_figures_of_an_archive_of_a_gate_draws_it(tmp_path, capsys):
    path, out = archive(tmp_path / "a.jsonl"), tmp_path / "out"
    assert main(["figures", str(path), "--out", str(out)]) == 0
    assert f"drawn: {out}/gate-opt-1.3b.png\n" in capsys.readouterr().out
    assert (out / "gate-opt-1.3b.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_could_be_drawn_the_status_says_so(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", failures=1)
    assert main(["figures", str(path), "--out", str(tmp_path)]) == 4
    assert "not drawn: gate-opt-1.3b: no pair of launches counts" in capsys.readouterr().out
