"""The script that packs an archive to be committed, and the archives that are."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from scripts import benchmark_script, loaded
from strategies import measurement

from pytest_slmserve.analysis.summary import summarize
from pytest_slmserve.errors import BadArchive
from pytest_slmserve.spec import ClosedLoop
from pytest_slmserve.store import FORMAT, Archive, read
from pytest_slmserve.workload.arrivals import job

SCRIPT = benchmark_script("pack")
OLD = Path(__file__).parent / "data" / "archive-format-1.jsonl"


@pytest.fixture(scope="module")
def script():
    with loaded(SCRIPT) as module:
        yield module


def test_an_old_archive_becomes_one_of_the_newest_format_that_reads_the_same(script, tmp_path, capsys):
    out = tmp_path / "new.jsonl.xz"
    assert script.main([str(OLD), str(out)]) == 0
    assert (
        f"{out}: 2 measurements, {OLD.stat().st_size:,} bytes became {out.stat().st_size:,}" in capsys.readouterr().out
    )
    before, after = read(OLD), read(out)
    assert after.measurements == before.measurements and [s.format for s in after.sessions] == [FORMAT]
    assert after.sessions[0].claims == before.sessions[0].claims


def test_lines_of_other_kinds_stay_as_they_are_and_packing_again_changes_nothing(script, tmp_path):
    path = tmp_path / "a.jsonl.xz"
    first, engine, *rest = OLD.read_bytes().splitlines()
    weather = b'{"kind": "weather",  "rain": true}'
    path.write_bytes(b"".join(lzma.compress(line + b"\n") for line in (first, weather, engine, *rest)))
    assert script.main([str(path), str(path)]) == 0
    lines = lzma.decompress(raw := path.read_bytes()).splitlines()
    assert lines[1:3] == [weather, engine] and raw.count(b"\xfd7zXZ\x00") == 1
    assert script.main([str(path), str(path)]) == 0 and path.read_bytes() == raw


def test_what_would_be_lost_is_not_written(script, tmp_path, monkeypatch, capsys):
    lossy = script.measurement_line

    def shorter(measurement):
        line = lossy(measurement)
        line["run"]["failures"] = 0
        return line

    monkeypatch.setattr(script, "measurement_line", shorter)
    assert script.main([str(OLD), str(tmp_path / "a.jsonl.xz")]) == 1
    assert "would be read as something else" in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.fixture
def long(tmp_path):
    """An archive of a closed loop that settled for a while, and of a job, which has no window."""
    with Archive.open(tmp_path / "long.jsonl") as archive:
        for load in (ClosedLoop(8), job(88)):
            archive.add(measurement(8, 8000.0, steps=320, load=load))
    return tmp_path / "long.jsonl"


def test_what_does_not_reach_into_the_window_may_go(script, long, tmp_path):
    out = tmp_path / "short.jsonl.xz"
    assert script.main([str(long), str(out), "--window"]) == 0
    (loop, served), (shorter, same) = read(long).measurements, read(out).measurements
    assert same == served and len(shorter.run.steps) < len(loop.run.steps)
    assert shorter.id == loop.id and summarize(shorter) == summarize(loop)
    opens, closes = loop.run.window_s
    inside = [at for at in loop.run.steps.time_s if opens <= at <= closes]
    assert [at for at in shorter.run.steps.time_s if opens <= at <= closes] == inside


def test_a_window_without_which_the_report_would_differ_is_not_cut(script, long, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "BESIDE", -170)
    assert script.main([str(long), str(tmp_path / "short.jsonl.xz"), "--window"]) == 1
    assert "would be read as something else" in capsys.readouterr().err and [*tmp_path.iterdir()] == [long]


def test_nor_one_without_which_a_summary_would_though_the_report_rounds_it_away(script, long, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "told", lambda path: "the same")
    assert script.main([str(long), str(tmp_path / "a.jsonl.xz"), "--window"]) == 0
    monkeypatch.setattr(script, "BESIDE", -170)
    assert script.main([str(long), str(tmp_path / "b.jsonl.xz"), "--window"]) == 1


def test_a_damaged_archive_is_not_packed(script, tmp_path):
    (path := tmp_path / "a.jsonl").write_bytes(OLD.read_bytes() + b"{\n")
    with pytest.raises(BadArchive, match="line 5 is not JSON"):
        script.main([str(path), str(path)])


def test_all_committed_records_stay_below_four_megabytes():
    assert sum(path.stat().st_size for path in (SCRIPT.parent / "baselines").iterdir()) < 4e6
