"""The script that packs an archive to be committed, and the archives that are."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from scripts import benchmark_script, loaded
from strategies import measurement

from pytest_slmserve.analysis.metrics.summary import summarize
from pytest_slmserve.archive.store import FORMAT, Archive, read
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.sensors import ENERGY, POWER, POWER_INSTANT
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
    monkeypatch.setattr(script, "told", lambda path: path.name)
    assert script.main([str(long), str(tmp_path / "short.jsonl.xz"), "--window"]) == 1
    assert "would be read as something else" in capsys.readouterr().err and [*tmp_path.iterdir()] == [long]


def test_a_measurement_that_would_have_another_summary_stays_whole(script, long, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "BESIDE", -170)
    assert script.main([str(long), str(tmp_path / "a.jsonl.xz"), "--window"]) == 0
    assert read(tmp_path / "a.jsonl.xz").measurements == read(long).measurements


@pytest.fixture
def noisy(tmp_path):
    """As `long`, with stamps that end in any digit, and a window that begins and ends with a step."""
    random = Random(3)

    with Archive.open(tmp_path / "noisy.jsonl") as archive:
        for load in (ClosedLoop(8), job(88)):
            found = measurement(8, 8000.0, steps=320, load=load)
            run, times = found.run, tuple(sorted(at + random.uniform(0, 1e-4) for at in found.run.steps.time_s))
            window_s = (times[60], times[-60]) if isinstance(load, ClosedLoop) else run.window_s
            archive.add(replace(found, run=replace(run, steps=replace(run.steps, time_s=times), window_s=window_s)))
    return tmp_path / "noisy.jsonl"


def inside(run, stamps):
    return [run.window_s[0] <= at <= run.window_s[1] for at in stamps if at is not None]


def test_stamps_may_be_rounded_and_stay_on_their_side_of_the_window(script, noisy, tmp_path):
    out, whole = tmp_path / "out.jsonl.xz", tmp_path / "whole.jsonl.xz"
    assert script.main([str(noisy), str(out), "--round", "16"]) == 0
    assert script.main([str(noisy), str(whole)]) == 0
    assert out.stat().st_size < 0.9 * whole.stat().st_size
    for before, after in zip(read(noisy).measurements, read(out).measurements, strict=True):
        times = after.run.steps.time_s
        assert all(round(at * 1e6) % 16 == 0 for at in (*times, *after.run.samples.last_token_s, *after.run.window_s))
        assert max(abs(a - b) for a, b in zip(times, before.run.steps.time_s)) < 33e-6 and [*times] == sorted(times)
        for name in ("sent_s", "last_token_s"):
            columns = [getattr(m.run.samples, name) for m in (before, after)]
            assert inside(before.run, columns[0]) == inside(after.run, columns[1])
        assert inside(before.run, before.run.steps.time_s) == inside(after.run, times)
        used = before.run.steps.kv_usage
        assert after.run.steps.kv_usage == tuple(round(share * 5000) / 5000 for share in used) != used


def test_stamps_that_were_rounded_to_half_as_much_move_one_way(script, noisy):
    for found in read(noisy).measurements:
        before = script.rounded(found, 16).run
        after = script.rounded(replace(found, run=before), 32).run
        pairs = zip(before.steps.time_s, after.steps.time_s, strict=True)
        opens, closes = before.window_s
        assert {round((b - a) * 1e6) for a, b in pairs if opens <= a <= closes} == {0, 16}


def test_readings_of_power_are_rounded_and_no_others(script):
    columns = {POWER: (300.123, None), POWER_INSTANT: (299.96,), ENERGY: (12_345.678,)}
    assert script.power_of(columns) == {**columns, POWER: (300.1, None), POWER_INSTANT: (300.0,)}


def test_stamps_so_coarse_that_a_figure_would_change_are_not_written(script, noisy, tmp_path, capsys):
    assert script.main([str(noisy), str(tmp_path / "out.jsonl.xz"), "--round", "8192"]) == 1
    assert "would be read as something else" in capsys.readouterr().err and [*tmp_path.iterdir()] == [noisy]


def test_nor_are_those_by_which_a_report_would_say_something_else(script, noisy, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "told", lambda path: "holds 1" if path == noisy else "holds 2")
    assert script.main([str(noisy), str(tmp_path / "out.jsonl.xz"), "--round", "16"]) == 0
    monkeypatch.setattr(script, "told", lambda path: "holds 1" if path == noisy else "fails 1")
    assert script.main([str(noisy), str(tmp_path / "out.jsonl.xz"), "--round", "16"]) == 1


def test_a_damaged_archive_is_not_packed(script, tmp_path):
    (path := tmp_path / "a.jsonl").write_bytes(OLD.read_bytes() + b"{\n")
    with pytest.raises(BadArchive, match="line 5 is not JSON"):
        script.main([str(path), str(path)])


def test_all_committed_records_stay_below_four_megabytes():
    assert sum(path.stat().st_size for path in (SCRIPT.parent / "baselines").iterdir()) < 4e6
