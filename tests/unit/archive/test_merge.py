"""Archives made one: nothing is lost, nothing is there twice, and what is damaged is told."""

from __future__ import annotations

import errno
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_lines import reseal, resealed
from strategies import measurements
from test_store import DATA, DISK, EACH, change, example, write, written

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import Archive, Merged, merge, read
from pytest_slmserve.schema.errors import BadArchive, BadUsage
from pytest_slmserve.schema.records import Replica


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Lines: session, engine, then measurements with concurrency 1, 2, 4."""
    return write(tmp_path / "three.jsonl", example(1), example(2), example(4))


def merged_into(path: Path, *parts: Path) -> Merged:
    with Archive.open(path) as into:
        return merge(parts, into)


def launches(path: Path) -> list[tuple[str, int]]:
    return [(m.launch, m.load.concurrency) for m in read(path).measurements]


@EACH
@settings(DISK, max_examples=25)
@given(st.lists(measurements(), max_size=4), st.data())
def test_all_of_several_archives_is_in_one_and_each_measurement_once(name, made, data):
    every = [replace(m, measured_at=f"2026-01-01T00:00:{second:02d}") for second, m in enumerate(made)]
    held = [[m for m in every if data.draw(st.booleans())] for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        parts = [write(Path(folder, f"{i}{name}"), *each) for i, each in enumerate(held)]
        into = Path(folder, name)
        first, again = merged_into(into, *parts), merged_into(into, *parts)
        found = read(into).measurements
        assert all(part.exists() for part in parts)
    expected = {m.id: m for each in held for m in each}
    assert len(found) == len(expected) and {m.id: m for m in found} == expected
    assert (first.written, first.known) == (len(found), sum(map(len, held)) - len(found))
    assert (again.written, again.known) == (0, sum(map(len, held)))
    assert (first.notes, again.notes) == ((), ())


def test_lines_keep_their_bytes_and_sessions_come_along(three, tmp_path):
    into = tmp_path / "into.jsonl"
    assert merged_into(into, three).written == 3
    assert into.read_bytes() == three.read_bytes()
    merged_into(into, three)
    assert into.read_bytes() == three.read_bytes()


def test_what_the_archive_has_is_not_written_twice_and_its_own_runs_go_on(three, tmp_path):
    into = write(tmp_path / "into.jsonl", example(1), example(8))
    with Archive.open(into) as archive:
        merged = merge([three], archive)
        archive.begin({}, {})
        archive.add(example(16, "f00d"))
    assert (merged.written, merged.known) == (2, 1)
    assert launches(into) == [("4f1d", 1), ("4f1d", 8), ("4f1d", 2), ("4f1d", 4), ("f00d", 16)]


def test_replicas_of_one_moment_are_two_measurements(tmp_path):
    both = [replace(example(), replica=Replica("g", index, 2, "s", "mps")) for index in (0, 1)]
    merged_into(tmp_path / "into.jsonl", write(tmp_path / "a.jsonl", *both))
    assert [m.replica.index for m in read(tmp_path / "into.jsonl").measurements] == [0, 1]


def test_a_launch_that_is_described_anew_keeps_what_it_was_when_it_was_measured(tmp_path):
    was = example(1)
    now = replace(example(2), environment=replace(was.environment, driver="570"))
    into = write(tmp_path / "into.jsonl", was)
    with Archive.open(into) as archive:
        archive.add(replace(was, measured_at="2025-11-21T11:00:00.000+00:00"))
        merge([write(tmp_path / "part.jsonl", was, now)], archive)
        archive.add(replace(was, measured_at="2025-11-21T13:00:00.000+00:00"))
    assert [m.environment.driver for m in read(into).measurements] == [None, None, "570", None]


def test_lines_of_other_kinds_and_older_archives_are_kept(tmp_path):
    part = write(tmp_path / "part.jsonl", example())
    with part.open("a", encoding="utf-8") as file:
        file.write(resealed('{"kind":"weather","rain":true}') + "\n\n")
    into = tmp_path / "into.jsonl"
    merged_into(into, part, DATA / "archive-format-3.jsonl", part)
    assert into.read_text("utf-8").count("weather") == 1
    assert len(read(into).sessions) == 2 and len(read(into).measurements) == 2


def test_lines_that_others_wrote_anew_are_merged_too(three, tmp_path):
    spaced = [json.dumps(json.loads(line)) for line in three.read_text("utf-8").splitlines()]
    three.write_text("".join(f"{line}\n" for line in spaced), "utf-8")
    reseal(three)
    into = tmp_path / "into.jsonl"
    assert merged_into(into, three).written == 3
    assert launches(into) == [("4f1d", 1), ("4f1d", 2), ("4f1d", 4)]


# What is damaged


@EACH
@settings(DISK, max_examples=25)
@given(data=st.data())
def test_cut_anywhere_all_that_was_written_whole_is_merged(name, data):
    whole = written(name, 1, 2, 4)
    left = whole[: data.draw(st.integers(1, len(whole)))]
    with tempfile.TemporaryDirectory() as folder:
        part, into = Path(folder, name), Path(folder, "into.jsonl")
        part.write_bytes(left)
        held = read(part)
        merged = merged_into(into, part)
        assert read(into).measurements == held.measurements
    assert bool(merged.notes) == bool(held.notes)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "nonsense",
        '{"kind":"measurement"}',
        '{"kind":"measurement","engine":"none","run":{}}',
        '{"kind":"measurement","engine":"4f1d","run":5}',
        '{"kind":"measurement","engine":["4f1d"],"run":{}}',
        '{"kind":"measurement","engine":"4f1d","run":{"window_us":[1,2}}',
        '{"kind":"measurement","engine":"4f1d","run":{"window_us":[1,x2]}}',
        '{"kind":"measurement","engine":"4f1d","run":{"failures":NaN}}',
        '{"kind":"engine","id":"f00d"}',
        "\0\0\0",
    ],
)
def test_a_damaged_line_is_a_note_and_nothing_else_is_lost(three, tmp_path, bad):
    change(three, 4, bad)
    into = tmp_path / "into.jsonl"
    merged = merged_into(into, three)
    assert launches(into) == [("4f1d", 1), ("4f1d", 4)] and read(into).notes == ()
    assert [f"{three}: not merged: line 4 " in note for note in merged.notes] == ([True] if bad else [])


def test_half_a_line_that_swallowed_the_next_is_a_note(three, tmp_path):
    lines = three.read_text("utf-8").splitlines()
    change(three, 4, lines[3][: len(lines[3]) // 2] + lines[4])
    merged = merged_into(tmp_path / "into.jsonl", three)
    assert launches(tmp_path / "into.jsonl") == [("4f1d", 1), ("4f1d", 4)] and "line 4 " in merged.notes[0]


def test_a_damaged_piece_of_a_packed_part_is_a_note(tmp_path):
    part = write(tmp_path / "part.jsonl.xz", *map(example, (1, 2, 4)))
    raw = bytearray(part.read_bytes())
    raw[raw.rfind(b"\xfd7zXZ\x00", 0, raw.rfind(b"\xfd7zXZ\x00")) + 40] ^= 0xFF
    part.write_bytes(raw)
    merged = merged_into(tmp_path / "into.jsonl", part)
    assert launches(tmp_path / "into.jsonl") == [("4f1d", 1), ("4f1d", 4)]
    assert "cannot be unpacked" in merged.notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,value\n", "is not an archive"),
        ('{"kind":"session","format":99,"started":"2030-01-01","claims":{},"plan":{}}\n', "by a newer release"),
    ],
)
def test_what_is_no_archive_of_ours_is_an_error_and_stays_as_it_is(tmp_path, text, says):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(text)
    with pytest.raises(BadArchive, match=says):
        merged_into(tmp_path / "into.jsonl", wrong)
    assert wrong.read_text() == text


def test_where_the_archive_cannot_be_written_the_part_is_as_it_was(three, tmp_path, monkeypatch):
    records, before = tmp_path / "records.jsonl", three.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Archive.open(records) as into:
        monkeypatch.setattr("pytest_slmserve.archive.store._append", full)
        with pytest.raises(BadUsage, match=f"cannot write to {records}: No space left on device"):
            merge([three], into)
    assert three.read_bytes() == before


def test_the_archive_itself_among_the_parts_is_passed_over(three):
    before = three.read_bytes()
    with Archive.open(three) as into:
        assert merge([three], into).written == 0
    assert three.read_bytes() == before


# The command


def test_the_command_says_how_many_came_and_leaves_the_others_as_they_are(three, tmp_path, capsys):
    more, out = write(tmp_path / "more.jsonl.xz", example(1), example(8)), tmp_path / "all.jsonl.gz"
    before = three.read_bytes(), more.read_bytes()
    assert main(["report", str(three), str(more), "--merge", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 4 measurements added, 1 were there\n"
    assert [concurrency for _, concurrency in launches(out)] == [1, 2, 4, 8]
    assert (three.read_bytes(), more.read_bytes()) == before
    assert main(["report", str(three), str(out), "--merge", str(out)]) == 0
    assert "0 measurements added, 3 were there" in capsys.readouterr().out


def test_what_could_not_be_merged_is_its_exit_status(three, tmp_path, capsys):
    change(three, 4, "nonsense")
    assert main(["report", str(three), "--merge", str(tmp_path / "all.jsonl")]) == 1
    assert f"note: {three}: not merged: line 4 is not JSON" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "none.jsonl"), "--merge", str(tmp_path / "new.jsonl")]) == 4
    assert "none.jsonl is not there" in capsys.readouterr().err and not (tmp_path / "new.jsonl").exists()
    assert main(["report", str(three), "--merge", str(tmp_path)]) == 4
    said = f"error: cannot write to {tmp_path}: Is a directory\n  try: --merge with another path\n"
    assert capsys.readouterr().err == said
