"""Runs of an archive: whose a measurement is, and that no two are pooled without being asked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sealed_lines import reseal
from strategies import measurement

from pytest_slmserve.archive.store import LEFT_OUT, POOLED, Archive, chosen, read, runs_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import GateLaunch


def at(second: int, concurrency: int = 8, day: int = 1):
    return replace(measurement(concurrency), measured_at=f"2026-01-{day:02d}T00:00:{second:02d}.000+00:00")


def archive(path, *sessions):
    """sessions: pairs of facts (`run`: its id, `resumes`) and measurements. Each begins on its day."""
    for day, (words, measurements) in enumerate(sessions, 1):
        with Archive.open(path) as opened:
            opened.begin({}, {}, resumes=words.get("resumes", False))
            for m in measurements:
                opened.add(m)
        dated(path, day, words.get("run"))
    return path


def dated(path, day, name=None):
    """Sets the start of the last session, and its id."""
    lines = path.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith('{"kind":"session"'))
    facts = json.loads(lines[last]) | {"started": f"2026-01-{day:02d}T00:00:00.000+00:00"}
    facts |= {"id": name} if name else {}
    lines[last] = json.dumps(facts, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    reseal(path)


def without_ids(path):
    """As an older release wrote it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "session":
            del line["id"], line["resumes"]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    reseal(path)
    return path


def seconds(contents):
    return [int(m.measured_at[17:19]) for m in contents.measurements]


@pytest.fixture
def two(tmp_path):
    """Two runs of one case, the second also of another."""
    first, second = [at(1), at(2)], [at(3, day=2), at(4, 16, day=2)]
    return archive(tmp_path / "r.jsonl", ({"run": "aaaa0001"}, first), ({"run": "bbbb0002"}, second))


def test_a_measurement_belongs_to_the_session_before_it(two):
    first, second = runs_of(read(two))
    assert (first.header.id, second.header.id, first.header.known) == ("aaaa0001", "bbbb0002", True)
    assert first.header.started.startswith("2026-01-01") and first.header.pytest_slmserve
    assert [len(run.measurements) for run in (first, second)] == [2, 2]


def test_each_run_has_an_id_of_its_own(tmp_path):
    path = archive(tmp_path / "r.jsonl", ({}, [at(1)]), ({}, [at(2)]))
    ids = [run.header.id for run in runs_of(read(path))]
    assert len(set(ids)) == 2 and all(len(name) == 8 for name in ids)


def test_merged_lines_go_to_the_session_that_had_begun(tmp_path):
    """A part is merged again after another run has begun: its measurement is older than that."""
    path = archive(tmp_path / "r.jsonl", ({"run": "a"}, [at(1)]), ({"run": "b"}, [at(2, day=2)]))
    with Archive.open(path) as opened:
        opened._session = b""
        opened.add(at(9, day=1))
    assert [len(run.measurements) for run in runs_of(read(path))] == [2, 1]


def test_of_each_case_the_last_run_counts(two):
    found = chosen(read(two))
    assert seconds(found) == [3, 4] and found.notes == (LEFT_OUT,)


def test_what_only_an_earlier_run_measured_stays(tmp_path):
    path = archive(tmp_path / "r.jsonl", ({}, [at(1), at(2, 32)]), ({}, [at(3, day=2)]))
    assert seconds(chosen(read(path))) == [2, 3]


def test_cases_apart_need_no_note(tmp_path):
    path = archive(tmp_path / "r.jsonl", ({}, [at(1)]), ({}, [at(2, 16, day=2)]))
    found = chosen(read(path))
    assert (seconds(found), found.notes) == ([1, 2], ())


def test_a_run_that_resumes_goes_on_with_all_before_it(tmp_path):
    resumed, another = [at(2, day=2)], [at(3, 16, day=3)]
    path = archive(tmp_path / "r.jsonl", ({}, [at(1)]), ({"resumes": True}, resumed), ({"run": "xx"}, another))
    found = chosen(read(path))
    assert (seconds(found), found.notes) == ([1, 2, 3], ())
    again = archive(tmp_path / "s.jsonl", ({}, [at(1)]), ({}, [at(2, day=2)]), ({"run": "xx", "resumes": True}, []))
    assert seconds(chosen(read(again))) == [1, 2], "it took over both, and measured nothing"
    assert seconds(chosen(read(again), "last")) == seconds(chosen(read(again), "xx")) == [1, 2]


def test_a_run_by_its_id_or_its_beginning(two):
    contents = read(two)
    assert seconds(chosen(contents, "aaaa")) == [1, 2]
    assert seconds(chosen(contents, "bbbb0002")) == seconds(chosen(contents, "last")) == [3, 4]
    assert seconds(chosen(contents, "all")) == [1, 2, 3, 4]
    assert chosen(contents, "all").notes == ()
    with pytest.raises(BadUsage, match="there is no run cccc") as error:
        chosen(contents, "cccc")
    assert error.value.hint == "one of aaaa0001, bbbb0002"


def test_a_beginning_of_two_ids_is_refused(tmp_path):
    path = archive(tmp_path / "r.jsonl", ({"run": "ab1"}, [at(1)]), ({"run": "ab2"}, [at(2)]))
    with pytest.raises(BadUsage, match="2 runs have ids that begin so"):
        chosen(read(path), "ab")


def test_since_a_date(two):
    contents = read(two)
    assert seconds(chosen(contents, "all", "2026-01-02")) == [3, 4]
    assert seconds(chosen(contents, "all", "2026-01-01T00:00:02")) == [2, 3, 4]
    assert seconds(chosen(contents, "aaaa", "2026-01-02")) == []
    with pytest.raises(BadUsage, match="'yesterday' is no date"):
        chosen(contents, "", "yesterday")


def test_an_older_archive_does_not_tell_what_resumed_and_is_pooled_with_a_note(two):
    contents = read(without_ids(two))
    found = chosen(contents)
    assert seconds(found) == [1, 2, 3, 4] and found.notes == (POOLED,)
    first, second = runs_of(contents)
    assert (
        not first.header.known and len(first.header.id) == 8 != first.header.id == second.header.id
    ) or first.header.id != second.header.id
    assert seconds(chosen(contents, first.header.id)) == [1, 2]


def test_an_older_archive_of_different_cases_needs_no_note(tmp_path):
    path = without_ids(archive(tmp_path / "r.jsonl", ({}, [at(1)]), ({}, [at(2, 16, day=2)])))
    assert chosen(read(path)).notes == ()


def test_a_run_after_older_ones_is_a_run_of_its_own(two):
    older = without_ids(two)
    with Archive.open(older) as opened:
        opened.begin({}, {})
        opened.add(at(9, 16, day=3))
    dated(older, 3)
    found = chosen(read(older))
    assert seconds(found) == [1, 2, 3, 9] and set(found.notes) == {LEFT_OUT, POOLED}


def test_launches_of_gates_stay(tmp_path):
    """They are told apart by their gates."""
    paired = [replace(at(n), paired=GateLaunch(f"g{n}", 1, "baseline", False)) for n in (1, 2)]
    path = archive(tmp_path / "r.jsonl", ({}, paired[:1]), ({}, paired[1:]))
    found = chosen(read(path))
    assert (seconds(found), found.notes) == ([1, 2], ())


def test_measurements_before_any_session_are_a_run_without_a_start(two):
    lines = two.read_text().splitlines(keepends=True)
    two.write_text("".join(line for line in lines if '"id":"aaaa0001"' not in line))
    first, second = runs_of(read(two))
    assert (first.header.started, first.header.known, len(first.measurements), second.header.id) == (
        "",
        False,
        2,
        "bbbb0002",
    )


def test_the_runs_of_an_empty_archive(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("")
    for run in ("", "all", "last"):
        assert chosen(read(path), run).measurements == ()
