"""Whatever happens to an archive, what was written whole is read again, in any packing, and nothing twice: a machine
adds, kills, resumes, merges and reads in any order. Damage is told by its line and never more than that is lost; what
is no archive is refused and left alone; an archive that cannot be written goes on elsewhere; runs are told apart."""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import math
import os
import random
import re
import resource
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from archives import CLAIMS, DISK, EACH, RUN, change, example, write, written
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule
from refusals import refused
from scripts import DATA
from sealed_lines import reseal, resealed
from strategies import measurement, measurements

from pytest_slmserve.archive import store
from pytest_slmserve.archive.store import (
    BEFORE_ALL,
    FORMAT,
    LEFT_OUT,
    POOLED,
    Archive,
    Contents,
    Merged,
    RunHeader,
    as_one,
    chosen,
    embedded,
    make_folder,
    merge,
    read,
    read_each,
    runs_of,
)
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica, Resolved

PACKED = pytest.mark.parametrize(
    ("name", "magic", "pack"),
    [("a.jsonl.gz", b"\x1f\x8b\x08\x00", gzip.compress), ("a.jsonl.xz", b"\xfd7zXZ\x00", lzma.compress)],
)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Lines: session, engine, then measurements with concurrency 1, 2, 4."""
    return write(tmp_path / "records.jsonl", example(1), example(2), example(4))


def concurrencies(path: Path, **how: bool) -> list[int]:
    return [m.load.concurrency for m in read(path, **how).measurements]


def merged_into(path: Path, *parts: Path) -> Merged:
    with Archive.open(path) as into:
        return merge(parts, into)


# A machine that does to archives what users and disks do


@dataclass(slots=True)
class Held:
    """What is known of an archive. ends: each measurement, with the size of the file once it was written whole."""

    path: Path
    ends: list[tuple[int, Measurement]] = field(default_factory=list)
    torn: bool = False
    sessions: list[int] = field(default_factory=list)  # sizes once each was written

    def cut(self, size: int) -> None:
        self.ends = [(end, m) for end, m in self.ends if end <= size]
        self.sessions = [end for end in self.sessions if end <= size]
        self.torn = size not in {0, *(end for end, _ in self.ends), *self.sessions}

    def size(self) -> int:
        return self.path.stat().st_size


class Archives(RuleBasedStateMachine):
    archives = Bundle("archives")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()  # as packed bytes are compared again, nothing in them may be of chance
        ids = map("{:08x}".format, count())
        self.patch.setattr(store, "secrets", SimpleNamespace(token_hex=lambda _: next(ids)))
        self.patch.setattr(store, "datetime", SimpleNamespace(now=lambda zone: datetime(2026, 1, 1, tzinfo=zone)))
        self.count = 0
        self.known: list[Measurement] = []

    def teardown(self) -> None:
        self.folder.cleanup()
        self.patch.undo()

    @initialize(target=archives)
    def first(self) -> Held:
        return self.create(".jsonl")

    @rule(target=archives, suffix=st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.xz"]))
    def create(self, suffix: str) -> Held:
        self.count += 1
        held = Held(Path(self.folder.name, f"{self.count}{suffix}"))
        Archive.open(held.path).close()
        return held

    def opened(self, held: Held) -> Archive:
        """Opens it as a run does, which puts a torn end aside."""
        before, aside = held.path.read_bytes(), held.path.with_name(f"{held.path.name}.torn")
        was = aside.read_bytes() if aside.exists() else b""
        archive = Archive.open(held.path)
        assert bool(archive.notes) is held.torn is (held.size() < len(before))
        moved = aside.read_bytes()[len(was) :] if aside.exists() else b""
        assert held.path.read_bytes() + moved == before
        held.torn = False
        return archive

    @rule(archive=archives, m=measurements(), more=st.integers(0, 2), resumes=st.booleans(), old=st.booleans())
    def add(self, archive: Held, m: Measurement, more: int, resumes: bool, old: bool) -> None:
        """A run of some measurements, of which one may be known elsewhere."""
        with self.opened(archive) as file:
            file.begin({"n": 1}, {}, resumes=resumes)
            archive.sessions.append(archive.size())
            for each in range(more):
                self.count += 1
                stamp = f"2026-01-01T00:00:00.{self.count:06d}+00:00"
                known = old and self.known and each == 0
                added = self.known[self.count % len(self.known)] if known else replace(m, measured_at=stamp)
                if any(added.id == there.id for _, there in archive.ends):
                    continue
                file.add(added)
                self.known.append(added)
                archive.ends.append((archive.size(), added))

    @rule(archive=archives, share=st.floats(0, 1), back=st.integers(0, 3), late=st.booleans())
    def kill(self, archive: Held, share: float, back: int, late: bool) -> None:
        """Cuts it anywhere, or some bytes before its end."""
        size = max(archive.size() - back, 0) if late else int(share * archive.size())
        os.truncate(archive.path, size)
        archive.cut(size)

    @rule(archive=consumes(archives), into=archives)
    def merge_whole(self, archive: Held, into: Held) -> None:
        self.merge(archive, into)

    @rule(archive=archives, into=archives)
    def merge(self, archive: Held, into: Held) -> None:
        there = {m.id for _, m in into.ends}
        new = [m for _, m in archive.ends if m.id not in there]
        with self.opened(into) as file:
            merged = merge([archive.path], file)
        if archive is into:
            assert merged == Merged()
            return
        assert (merged.written, merged.known) == (len(new), len(archive.ends) - len(new))
        assert bool(merged.notes) is archive.torn
        size = into.size()
        assert read(into.path).measurements == (*(m for _, m in into.ends), *new)
        with Archive.open(into.path) as file:
            assert merge([archive.path], file).written == 0
        assert into.size() == size, "again adds nothing"
        self.settle(into, [*(m for _, m in into.ends), *new])

    def settle(self, held: Held, kept: list[Measurement]) -> None:
        """Writes the archive anew, one line a piece, so that the size after each is known again."""
        sessions = len(read(held.path).sessions)
        held.path.unlink()
        held.ends, held.sessions = [], []
        with Archive.open(held.path) as file:
            for _ in range(sessions or 1):
                file.begin({"n": 1}, {})
                held.sessions.append(held.size())
            for m in kept:
                file.add(m)
                held.ends.append((held.size(), m))

    @rule(archive=archives)
    def read(self, archive: Held) -> None:
        contents = read(archive.path)
        assert contents.measurements == tuple(m for _, m in archive.ends)
        assert [m.id for m in contents.measurements] == [m.id for _, m in archive.ends]
        assert len(contents.notes) == (archive.torn or not archive.size())
        assert contents.claims == ({"n": 1} if contents.sessions else {}) and len(contents.sessions) == len(
            archive.sessions
        )
        assert sorted(m.id for run in runs_of(contents) for m in run.measurements) == sorted(
            m.id for _, m in archive.ends
        )
        assert chosen(contents, "all").measurements == contents.measurements


TestArchives = Archives.TestCase
TestArchives.settings = settings(DISK, stateful_step_count=20)


# What is written


def test_lines_of_an_archive_and_their_order(tmp_path):
    path = write(tmp_path / "a.jsonl", example(1), example(2), example(1, launch="9999"))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["kind"] for line in lines] == [
        "session",
        "engine",
        "measurement",
        "measurement",
        "engine",
        "measurement",
    ]
    session = lines[0]
    assert (session["format"], session["claims"], session["plan"], session["resumes"]) == (
        3,
        CLAIMS,
        {"batches": [1, 2]},
        False,
    )
    assert abs(datetime.fromisoformat(session["started"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert re.fullmatch("[0-9a-f]{8}", session["id"]) and session["pytest_slmserve"]


@EACH
def test_each_measurement_is_there_as_soon_as_it_is_added(tmp_path, name):
    with Archive.open(tmp_path / "new" / "folder" / name) as archive:
        for concurrency in (1, 2):
            archive.add(example(concurrency))
            assert len(read(archive.path).measurements) == concurrency
            assert len(read(archive.path).sessions) == 1, "the first measurement begins what nobody began"


@EACH
def test_a_line_may_be_longer_than_what_is_unpacked_at_once(tmp_path, name):
    plan = {"salt": random.Random(1).randbytes(20_000).hex()}
    with Archive.open(tmp_path / name) as archive:
        archive.begin({}, plan)
        archive.add(example())
    contents = read(tmp_path / name)
    assert contents.sessions[0].plan == plan and contents.measurements == (example(),)


def test_a_launch_that_is_described_anew_keeps_what_it_was_when_it_was_measured(tmp_path):
    was = example(1)
    now = replace(example(2), environment=replace(was.environment, driver="570"))
    into = write(tmp_path / "into.jsonl", was)
    with Archive.open(into) as archive:
        archive.add(replace(was, measured_at="2025-11-21T11:00:00.000+00:00"))
        merge([write(tmp_path / "part.jsonl", was, now)], archive)
        archive.add(replace(was, measured_at="2025-11-21T13:00:00.000+00:00"))
    assert [m.environment.driver for m in read(into).measurements] == [None, None, "570", None]


@pytest.mark.parametrize("bad", [4.25, "4", [4]])
def test_what_could_not_be_read_again_is_not_written(three, bad):
    before = three.read_bytes()
    with Archive.open(three) as archive:
        with refused(kind=BadArchive):
            archive.add(replace(example(8), run=replace(RUN, samples=replace(RUN.samples, output_tokens=(bad, 0)))))
        assert three.read_bytes() == before
        archive.add(example(16))
    assert concurrencies(three) == [1, 2, 4, 16]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_number_that_json_does_not_know_is_written(three, number):
    before = three.read_bytes()
    bad_run = replace(RUN, steps=replace(RUN.steps, time_s=(0.1, number, 0.3)))
    with Archive.open(three) as archive:
        for bad in (replace(example(), run=bad_run), replace(example(), resolved=Resolved(ready_s=number))):
            with refused(kind=BadArchive):
                archive.add(bad)
    assert three.read_bytes() == before


def test_the_last_session_that_has_claims_tells_them(three):
    with Archive.open(three) as archive:
        archive.begin({"plateau": {"tolerance": 0.2}}, {"n": 1})
        archive.begin({}, {"claims": []})  # as `slmserve measure` does: it judges none
    contents = read(three)
    assert contents.claims == {"plateau": {"tolerance": 0.2}}
    assert [plan for _, plan in contents.plans] == [{"batches": [1, 2]}, {"n": 1}, {"claims": []}]
    assert [at for at, _ in contents.plans] == [session.started for session in contents.sessions]


@pytest.mark.parametrize("folder", [".slm", ".slm/baselines", "deep/.slm", "deep/.slm/x"])
def test_a_new_folder_of_ours_is_ignored_by_git_and_an_old_one_is_left_as_it_is(tmp_path, folder):
    for _ in range(2):
        make_folder(tmp_path / folder)
        (own,) = tmp_path.rglob(".slm")
        assert (tmp_path / folder).is_dir() and (own / ".gitignore").read_text("utf-8") == "*\n"
    (own / ".gitignore").unlink()
    make_folder(tmp_path / folder / "more")
    assert not (own / ".gitignore").exists()


def test_a_folder_of_another_name_is_the_user_s(tmp_path):
    Archive.open(tmp_path / "results" / "a.jsonl").close()
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["a.jsonl"]


# Torn ends


@EACH
@DISK
@given(data=st.data())
def test_cut_anywhere_a_prefix_is_read_and_merged_and_the_rest_set_aside(name, data):
    whole, kept = written(name, 1, 2, 4), (example(1), example(2), example(4))
    left = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with tempfile.TemporaryDirectory() as folder:
        path, torn, into = Path(folder, name), Path(folder, f"{name}.torn"), Path(folder, "into.jsonl")
        path.write_bytes(left)
        contents, merged = read(path), merged_into(into, path)
        assert read(into).measurements == contents.measurements == kept[: len(contents.measurements)]
        again = read(write(path, example(8)))
        moved = torn.read_bytes() if torn.exists() else b""
    assert len(contents.measurements) < 3 and left.endswith(moved)
    assert again.measurements == (*contents.measurements, example(8)) and again.notes == ()
    assert bool(contents.notes) is (bool(moved) or not left) and bool(merged.notes) is bool(moved)


def test_the_note_says_what_was_lost_and_where_the_rest_is(three):
    with three.open("rb+") as file:
        file.truncate(three.stat().st_size - 1)
    rest = len(three.read_bytes().splitlines()[-1])
    (note,) = read(three).notes
    assert all(fact in note for fact in (str(three), "line 5", "used: 2"))
    with Archive.open(three) as archive:
        (note,) = archive.notes
    assert all(fact in note for fact in (str(three), "line 5", f"{rest} bytes", f"{three}.torn"))


def test_a_torn_end_that_cannot_be_set_aside_stays_where_it_is(three, tmp_path):
    (tmp_path / "records.jsonl.torn").mkdir()
    os.truncate(three, three.stat().st_size - 1)
    before = three.read_bytes()
    with refused(three, "Is a directory"):
        Archive.open(three)
    assert three.read_bytes() == before
    (tmp_path / "records.jsonl.torn").rmdir()
    Archive.open(three).close()
    assert concurrencies(three) == [1, 2]


def test_an_empty_file_is_an_archive_without_measurements(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch()
    assert len(read(path).notes) == 1 and read(path).claims == {}
    for run in ("", "all", "last"):
        assert chosen(read(path), run).measurements == ()
    assert read(write(path, example())).measurements == (example(),)


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Files may become no larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_half_line(three):
    with Archive.open(three) as archive:
        archive.begin({}, {})
        began = three.read_bytes()
        with at_most(len(began) + 100), refused(three, "File too large", hint="--slm-records"):
            archive.add(example(8))
        assert three.read_bytes() == began
        archive.add(example(16))
    assert concurrencies(three) == [1, 2, 4, 16]


# Damage


@pytest.mark.parametrize(
    ("number", "new", "facts", "left"),
    [
        (4, '{"kind":"measurement"', ("line 4 ", "JSON"), [1, 4]),
        (4, '{"kind":"measurement"}', ("line 4 ", "'engine'"), [1, 4]),
        (4, '{"kind":"measurement","engine":"none"}', ("line 4 ", "'none'"), [1, 4]),
        (4, '{"kind":"session","format":3}', ("line 4 ",), [1, 4]),
        (4, '{"kind":"session","format":"3"}', ("line 4 ", "int"), [1, 4]),
        (4, "[1]", ("line 4 ", "object"), [1, 4]),
        (4, '{"kind":NaN}', ("line 4 ", "JSON"), [1, 4]),
        (4, "\udcff", ("line 4 ", "JSON"), [1, 4]),
        (2, "\x00", ("line 2 ", "JSON", "and 3 more"), []),
        (
            2,
            '{"kind":"engine","id":"4f1d","spec":{},"resolved":{},"environment":{}}',
            ("line 2 ", "model", "and 3"),
            [],
        ),
    ],
)
def test_a_damaged_line_is_named_and_can_be_skipped(three, number, new, facts, left):
    lines = three.read_bytes().splitlines()
    lines[number - 1] = resealed(new).encode("utf-8", "surrogateescape")
    three.write_bytes(b"".join(line + b"\n" for line in lines))
    with refused(three, *facts, kind=BadArchive, hint="--skip-damaged"):
        read(three)
    contents = read(three, skip_damaged=True)
    assert [m.load.concurrency for m in contents.measurements] == left
    assert f"line {number} " in contents.notes[0] and str(three) in contents.notes[0]


def test_of_several_damaged_lines_the_first_is_named_and_the_others_counted(three):
    change(three, 3, "x")
    with refused("line 3 ", kind=BadArchive) as caught:
        read(three)
    assert " more)" not in caught.value.problem
    change(three, 4, "x")
    with refused("line 3 ", "1 more", kind=BadArchive):
        read(three)
    assert len(read(three, skip_damaged=True).notes) == 2


def test_a_line_without_its_checksum_is_damaged(three):
    three.write_text(re.sub(r',"crc32":"[0-9a-f]{8}"', "", three.read_text("utf-8"), count=1), "utf-8")
    with refused("line 1 ", "checksum", kind=BadArchive):
        read(three)


@given(st.data())
def test_a_flipped_bit_is_found_wherever_it_is(data):
    """In a line that is not packed nothing else would tell."""
    raw = bytearray(written("a.jsonl", 1, 2))
    at = data.draw(st.integers(0, len(raw) - 1).filter(lambda at: raw[at : at + 1] != b"\n"))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(raw)
        try:
            assert read(path, skip_damaged=True).notes
        except BadArchive as error:
            assert "format" in error.problem or "not an archive" in error.problem


@EACH
@DISK
@given(data=st.data())
def test_whatever_bytes_change_only_our_errors_come(name, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        raw = bytearray(written(name, 1, 2))
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=5)):
            raw[at] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        try:
            assert len(read(path, skip_damaged=True).measurements) <= 2
        except BadArchive as error:
            assert error.hint


@PACKED
def test_damage_inside_a_packed_piece_costs_that_piece(tmp_path, name, magic, pack):
    path = write(tmp_path / name, example(1), example(2), example(4))
    raw = bytearray(path.read_bytes())
    starts = [at for at in range(len(raw)) if raw.startswith(magic, at)]
    raw[starts[2] + 60] ^= 0xFF
    path.write_bytes(raw)
    with refused("line 4 ", "unpacked", kind=BadArchive):
        read(path)
    assert concurrencies(path, skip_damaged=True) == [1, 4]
    merged = merged_into(tmp_path / "into.jsonl", path)
    assert concurrencies(tmp_path / "into.jsonl") == [1, 4] and "line 4 " in merged.notes[0]


@PACKED
def test_an_archive_compressed_by_hand_is_read_and_continued(three, tmp_path, name, magic, pack):
    path = tmp_path / name
    path.write_bytes(pack(three.read_bytes()))
    write(path, example(8))
    assert concurrencies(path) == [1, 2, 4, 8]


def test_what_later_releases_add_is_passed_over(three):
    lines = [json.loads(line) for line in three.read_text("utf-8").splitlines()]
    lines[0]["new"] = lines[1]["new"] = 1
    lines.insert(2, {"kind": "weather", "rain": True})
    three.write_text("".join(json.dumps(line) + "\n\n" for line in lines), "utf-8")
    reseal(three)
    assert read(three).measurements == (example(1), example(2), example(4)) and read(three).notes == ()


@EACH
@pytest.mark.parametrize("coded", [True, False])
def test_a_terminal_obeys_nothing_that_a_record_says(tmp_path, name, coded):
    """Neither where JSON has written the character as \\u001b, nor where it stands there itself."""
    plain, path = tmp_path / "plain.jsonl", tmp_path / name
    with Archive.open(plain) as archive:
        archive.begin({}, {"title": "TITLE"})
        archive.add(replace(example(), run=replace(RUN, first_failure="FAILURE")))
    told = json.dumps("\x1b]0;pwned\x07\x9b2J\u202e")[1:-1] if coded else "\x7f\x9b2J\u202e"
    text = re.sub("TITLE|FAILURE|opt-125m", lambda word: word[0] + told, plain.read_text("utf-8"))
    text = "".join(f"{resealed(line)}\n" for line in text.split("\n")[:-1])
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(text.encode()))
    found = read(path)
    (kept,) = found.measurements
    for shown in (kept.spec.model, kept.run.first_failure, found.sessions[0].plan["title"]):
        assert shown.isprintable() and "x9b2J" in shown


# What is no archive, or of another time


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_a_newer_format_is_never_skipped_and_left_as_it_is(three, tmp_path, skip_damaged):
    with three.open("a", encoding="utf-8") as file:
        file.write('{"kind":"session","format":7}\n')
    before = three.read_bytes()
    for opening in (lambda: read(three, skip_damaged=skip_damaged), lambda: Archive.open(three)):
        with refused(three, "format 7", f"format {FORMAT}", kind=BadArchive, hint="pip install --upgrade"):
            opening()
    with refused("format 7", kind=BadArchive):
        merged_into(tmp_path / "into.jsonl", three)
    assert three.read_bytes() == before


@pytest.mark.parametrize("number", [1, 2])
def test_an_older_format_is_refused_and_the_script_that_writes_it_anew_is_named(number):
    path = DATA / f"archive-format-{number}.jsonl"
    for opening in (read, Archive.open):
        with refused(f"format {number}", f"format {FORMAT}", kind=BadArchive, hint=f"studies/migrate.py {path} "):
            opening(path)


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("notes.txt", b"nothing like it\nat all\n", "line 1 "),
        ("one-line", b"no end of line", ""),
        ("other.json", b'{"machine_info": {}}', ""),
        ("other.jsonl", b'{"a": 1}\n{"a": 2}\n', "'kind'"),
        ("plain.jsonl.gz", b'{"kind":"session","format":1}\n', "not gzip"),
        ("plain.jsonl.xz", b'{"kind":"session","format":1}\n', "not xz"),
        ("other.gz", gzip.compress(b"nothing like it\n", mtime=0), ""),
        ("other.xz", lzma.compress(b"nothing like it\n"), ""),
        ("cut.gz", gzip.compress(b"nothing like it\n" * 99, mtime=0)[:-12], ""),
        ("zip.jsonl", gzip.compress(b'{"kind":"session"}\n', mtime=0), ""),
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path, name, content, fact):
    path = tmp_path / name
    path.write_bytes(content)
    for opening in (read, Archive.open, lambda part: merged_into(tmp_path / "into.jsonl", part)):
        with refused(path, fact, kind=BadArchive):
            opening(path)
    assert path.read_bytes() == content and {*tmp_path.iterdir()} == {path, tmp_path / "into.jsonl"}


def test_what_is_no_file_is_neither_read_nor_written_nor_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "file").touch()
    places = {tmp_path / "pipe.jsonl": "device", tmp_path: "Is a directory", tmp_path / "file/a": ""}
    for path, why in (places | dict.fromkeys(map(Path, ("/dev/zero", "/dev/full", "/dev/null")), "device")).items():
        with refused(path, why, kind=BadArchive, hint="--slm-records"):
            read(path)
        with refused(path, why, hint="--slm-records with another path"):
            Archive.open(path)
    with refused("No such file", kind=BadArchive):
        read(tmp_path / "missing.jsonl")


@PACKED
def test_what_unpacks_to_more_than_an_archive_may_take_is_refused(tmp_path, monkeypatch, name, magic, pack):
    monkeypatch.setattr(store, "_UNPACKED", 1 << 18)
    path = tmp_path / name
    for content, opening in (
        (pack(b'{"kind":"session"' + b" " * (1 << 20)), read),
        (pack(b" " * (1 << 17) + b"\n") * 3, Archive.open),
    ):
        path.write_bytes(content)
        with refused(path, "memory", kind=BadArchive):
            opening(path)
    path.write_bytes(
        pack(write(tmp_path / "a.jsonl", example()).read_bytes().replace(b"\n", b"\n" + b"\n" * (1 << 16)))
    )
    assert concurrencies(path) == [1], "as much as it may take it takes"


# Pages


PAGE = '<!DOCTYPE html><p>x</p><script type="application/octet-stream" data-records="{}">{}</script>'


def test_a_page_has_the_archives_that_its_numbers_were_made_of(tmp_path):
    """Each is read below the path of the page; together each measurement is there once, and sessions are by start."""
    parts = [
        write(tmp_path / "a.jsonl", example(1), example(2)),
        write(tmp_path / "b&b.jsonl.xz", example(2), example(4)),
    ]
    (name, text), (other, packed) = (embedded(part)[0] for part in parts)
    assert (name, other) == ("a.jsonl.gz", "b&b.jsonl.xz") and b64decode(packed) == parts[1].read_bytes()
    assert gzip.decompress(b64decode(text)) == parts[0].read_bytes()
    page = tmp_path / "page.html"
    page.write_text(PAGE.format("b&amp;b.jsonl.xz", packed) + PAGE.format("../evil/" + name, text)[15:])
    assert [(path, len(contents.measurements)) for path, contents in read_each(page)] == [
        (page / "b&b.jsonl.xz", 2),
        (page / "a.jsonl.gz", 2),
    ]
    found = read(page)
    assert [m.load.concurrency for m in found.measurements] == [2, 4, 1]
    assert [run.started for run in found.sessions] == sorted(run.started for run in found.sessions)
    assert len(found.sessions) == 2 and found.claims == CLAIMS
    assert [named for named, _ in embedded(page)] == ["b&b.jsonl.xz", "a.jsonl.gz"]


def test_a_torn_end_is_not_embedded(three):
    whole = three.read_bytes()
    three.write_bytes(whole + b'{"kind":"measure')
    ((_, text),) = embedded(three)
    assert gzip.decompress(b64decode(text)) == whole


@pytest.mark.parametrize("text", ["", "<script data-records>", PAGE.format("a.jsonl", "A")])
def test_a_page_without_records_or_with_damaged_ones_is_refused(tmp_path, text):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html>" + text)
    with refused(page, "records", kind=BadArchive):
        read(page)
    page.write_text(PAGE.format("a.jsonl", b64encode(b"nothing\n").decode()))
    with refused(page / "a.jsonl", kind=BadArchive):
        read(page)


def test_notes_of_several_archives_are_told_once():
    one, other = Contents(notes=("a", "b")), Contents(notes=("b", "c"))
    assert as_one([one, other]).notes == ("a", "b", "c")


# Writers


def test_one_writer_at_a_time(three):
    with Archive.open(three), refused(three, "another run", hint="--slm-records"):
        Archive.open(three)
    Archive.open(three).close()


def made_shorter(path: Path) -> None:
    os.truncate(path, 10)


def replaced(path: Path) -> None:
    path.unlink()
    path.write_text("another's", "utf-8")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """The folder of temporary files."""
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    return tmp_path / "t"


@pytest.mark.parametrize("plant", [Path.unlink, replaced, made_shorter])
@pytest.mark.parametrize("at", ["before the next", "at the end"])
def test_an_archive_that_is_lost_in_the_middle_goes_on_in_a_second_file(tmp_path, elsewhere, plant, at):
    kept, path = [example(1), example(2), example(4)], tmp_path / "a.jsonl.gz"
    with Archive.open(path, moves=True) as archive:
        archive.begin(CLAIMS, {"batches": [1]})
        for m in kept[:2]:
            archive.add(m)
        if at == "before the next":
            plant(path)
        archive.add(kept[2])
        if at == "at the end":
            plant(path)
    [second] = elsewhere.iterdir()
    found = read(second)
    assert found.measurements == tuple(kept) and found.claims == CLAIMS and len(found.sessions) == 1
    assert all(fact in archive.moved for fact in (f"{path}: ", f"--slm-resume={second}")) and archive.path == second
    assert second.stat().st_mode & 0o077 == 0 and second.suffix == ".jsonl"


@pytest.mark.parametrize("moves", [False, True])
def test_an_archive_that_was_removed_when_nothing_was_measured_goes_nowhere(tmp_path, elsewhere, moves):
    with Archive.open(tmp_path / "a.jsonl", moves=moves) as archive:
        archive.begin({}, {})
        (tmp_path / "a.jsonl").unlink()
    archive.close()
    assert not [*elsewhere.iterdir()] and not archive.moved


def test_without_a_wish_to_move_a_lost_archive_is_an_error(three):
    with Archive.open(three) as archive:
        archive.add(example(8))
        made_shorter(three)
        with refused(three, "shorter", hint="--slm-records with another path"):
            archive.add(example(16))
    assert not archive.moved and len(three.read_bytes()) == 10


def no_room(monkeypatch, *full: Path) -> None:
    """No file can be written any more, or only none of these."""
    appended = store._append

    def append(file: io.FileIO, data: bytes) -> None:
        if not full or Path(file.name) in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        appended(file, data)

    monkeypatch.setattr(store, "_append", append)


def test_a_full_disk_loses_no_measurement_and_moves_once(three, elsewhere, monkeypatch):
    before = three.read_bytes()
    no_room(monkeypatch, three)
    with Archive.open(three, moves=True) as archive:
        archive.add(example(8))
        archive.add(example(16))
        assert three.read_bytes() == before and "No space left on device" in archive.moved
        [second] = elsewhere.iterdir()
        no_room(monkeypatch)
        with refused(second, "No space left on device"):
            archive.add(example(32))
    assert read(second).measurements == (example(8), example(16))


def test_a_second_file_is_beside_the_first_if_there_is_no_folder_for_temporary_ones(three, elsewhere, monkeypatch):
    no_room(monkeypatch, three)
    elsewhere.rmdir()
    with Archive.open(three, moves=True) as archive:
        archive.add(example(8))
    assert archive.path.parent == three.parent and read(archive.path).measurements == (example(8),)


def test_what_can_be_written_nowhere_is_said_before_more_is_measured(three, tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: elsewhere)
    with Archive.open(three, moves=True) as archive:
        archive.check_writable()
        no_room(monkeypatch)
        for again in (lambda: archive.add(example(8)), archive.check_writable):
            with refused("No space left on device", "second", hint="--slm-records"):
                again()
    assert not [*elsewhere.iterdir()] and {*tmp_path.iterdir()} == {three, elsewhere}


def test_an_interrupt_while_it_moves_leaves_no_second_file(three, elsewhere, monkeypatch):
    no_room(monkeypatch, three)
    with Archive.open(three, moves=True) as archive:
        monkeypatch.setattr(Archive, "_append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            archive._move("planted", example(8))
    assert not [*elsewhere.iterdir()]


# Archives made one; the machine above proves that nothing is lost and nothing is there twice


def test_lines_keep_their_bytes_and_sessions_come_along(three, tmp_path):
    into = tmp_path / "into.jsonl"
    assert merged_into(into, three) == Merged(3, 0)
    assert into.read_bytes() == three.read_bytes() and merged_into(into, three, three) == Merged(0, 6)
    assert into.read_bytes() == three.read_bytes()


def test_what_the_archive_has_is_not_written_twice_and_its_own_runs_go_on(three, tmp_path):
    into = write(tmp_path / "into.jsonl", example(1), example(8))
    with Archive.open(into) as archive:
        assert merge([three], archive) == Merged(2, 1)
        archive.begin({}, {})
        archive.add(example(16, "f00d"))
    assert concurrencies(into) == [1, 8, 2, 4, 16]


def test_replicas_of_one_moment_are_two_measurements(tmp_path):
    both = [replace(example(), replica=Replica("g", index, 2, "s", "mps")) for index in (0, 1)]
    merged_into(tmp_path / "into.jsonl", write(tmp_path / "a.jsonl", *both))
    assert [m.replica.index for m in read(tmp_path / "into.jsonl").measurements] == [0, 1]


def test_lines_of_other_kinds_and_other_writers_are_kept(three, tmp_path):
    lines = [json.dumps(json.loads(line)) for line in three.read_text("utf-8").splitlines()]
    three.write_text("".join(f"{line}\n" for line in [*lines, '{"kind":"weather","rain":true}', ""]), "utf-8")
    reseal(three)
    into = tmp_path / "into.jsonl"
    merged_into(into, three, DATA / "archive-format-3.jsonl", three)
    assert into.read_text("utf-8").count("weather") == 1 and len(read(into).sessions) == 2
    assert concurrencies(into) == [1, 2, 4, 1, 2], "what others wrote with spaces is another line"


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
        "two lines",
    ],
)
def test_a_damaged_line_is_a_note_and_nothing_else_is_lost(three, tmp_path, bad):
    lines = three.read_text("utf-8").splitlines()
    change(three, 4, lines[3][: len(lines[3]) // 2] + lines[3] if bad == "two lines" else bad)
    into = tmp_path / "into.jsonl"
    merged = merged_into(into, three)
    assert concurrencies(into) == [1, 4] and read(into).notes == ()
    assert [str(three) in note and "line 4 " in note for note in merged.notes] == ([True] if bad else [])


def test_where_the_archive_cannot_be_written_the_part_is_as_it_was(three, tmp_path, monkeypatch):
    before = three.read_bytes()
    with Archive.open(tmp_path / "into.jsonl") as into:
        no_room(monkeypatch)
        with refused(into.path, "No space left on device"):
            merge([three], into)
    assert three.read_bytes() == before


# Runs


def at(second: int, concurrency: int = 8, day: int = 1) -> Measurement:
    return replace(measurement(concurrency), measured_at=f"2026-01-{day:02d}T00:00:{second:02d}.000+00:00")


def header(day: int, name: str, resumes: bool = False, known: bool = True) -> RunHeader:
    return RunHeader(FORMAT, f"2026-01-{day:02d}T00:00:00.000+00:00", None, {}, {}, name, resumes, known)


def runs(*sessions: tuple[str, list[Measurement]], known: bool = True) -> Contents:
    """One run a day, each with its id, of which a "+" says that it resumes, and its measurements."""
    headers = [header(day, name.strip("+"), "+" in name, known) for day, (name, _) in enumerate(sessions, 1)]
    measured = tuple((m, head) for head, (_, each) in zip(headers, sessions) for m in each)
    return Contents(measured, tuple(headers))


def seconds(contents: Contents) -> list[int]:
    return [int(m.measured_at[17:19]) for m in contents.measurements]


TWO = runs(("aaaa0001", [at(1), at(2)]), ("bbbb0002", [at(3, day=2), at(4, 16, day=2)]))


def dated(path: Path, *facts: dict[str, object]) -> Path:
    """The archive with other facts in each of its sessions, as an older release or another day would write it."""
    lines, left = [json.loads(line) for line in path.read_text("utf-8").splitlines()], list(facts)
    for line in lines:
        if line["kind"] == "session" and left:
            line |= left.pop(0)
    kept = [{name: value for name, value in line.items() if value is not None} for line in lines]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept), "utf-8")
    reseal(path)
    return path


def test_a_measurement_belongs_to_the_last_session_before_it_that_had_begun(tmp_path):
    """A part is merged after another run has begun: its measurement is older than that."""
    path = tmp_path / "r.jsonl"
    write(path, at(1))
    write(path, at(2, day=2), at(9, day=1), at(0, day=2))
    dated(path, {"id": "a", "started": header(1, "").started}, {"id": "b", "started": header(2, "").started})
    found = runs_of(read(path))
    assert [(run.header.id, run.header.known, len(run.measurements)) for run in found] == [
        ("a", True, 2),
        ("b", True, 2),
    ]


def test_measurements_before_any_session_are_a_run_without_a_start(tmp_path):
    path = write(tmp_path / "r.jsonl", at(1))
    write(path, at(2))
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    first, second = runs_of(read(path))
    assert (first.header, len(first.measurements), len(second.measurements)) == (BEFORE_ALL, 1, 1)
    assert BEFORE_ALL.started == "" and len(BEFORE_ALL.id) == 8 and not BEFORE_ALL.known
    assert [run.header for run in runs_of(Contents(sessions=(second.header,)))] == [second.header]


def test_a_session_of_an_older_release_gets_an_id_of_its_start(tmp_path):
    path = write(tmp_path / "r.jsonl", at(1))
    write(path, at(2))
    dated(path, *({"id": None, "resumes": None, "started": header(day, "").started} for day in (1, 2)))
    first, second = (run.header for run in runs_of(read(path)))
    assert not first.known and not first.resumes and len(first.id) == len(second.id) == 8 and first.id != second.id
    assert len(read(path).measurements) == 2


@pytest.mark.parametrize(
    ("contents", "left", "notes"),
    [
        (TWO, [3, 4], (LEFT_OUT,)),
        (runs(("a", [at(1), at(2, 32)]), ("b", [at(3)])), [2, 3], (LEFT_OUT,)),
        (runs(("a", [at(1)]), ("b", [at(2, 16)])), [1, 2], ()),
        (runs(("a", [at(1)]), ("b+", [at(2)]), ("c", [at(3, 16)])), [1, 2, 3], ()),
        (runs(("a", [at(1)]), ("b", [at(2)]), ("c+", [])), [1, 2], ()),
        (runs(("a", [at(1)]), ("b+", [at(2)]), ("c", [at(3)])), [3], (LEFT_OUT,)),
        (runs(("a", [at(1)]), ("b", [at(2)]), known=False), [1, 2], (POOLED,)),
        (runs(("a", [at(1)]), ("b", [at(2, 16)]), known=False), [1, 2], ()),
    ],
    ids=["last", "only earlier", "apart", "resumed", "resumed, nothing measured", "after", "pooled", "apart, older"],
)
def test_of_each_case_the_last_run_counts_and_a_run_that_resumes_goes_on_with_all_before_it(contents, left, notes):
    found = chosen(contents)
    assert (seconds(found), found.notes) == (left, notes)


def test_a_run_after_older_ones_is_a_run_of_its_own():
    older = runs(("a", [at(1), at(2)]), ("b", [at(3)]), known=False)
    newest = header(3, "c")
    both = replace(older, measured=(*older.measured, (at(9), newest)), sessions=(*older.sessions, newest))
    assert (seconds(chosen(both)), chosen(both).notes) == ([9], (LEFT_OUT, POOLED))
    apart = replace(older, measured=(*older.measured, (at(9, 16), newest)), sessions=(*older.sessions, newest))
    assert (seconds(chosen(apart)), chosen(apart).notes) == ([1, 2, 3, 9], (POOLED,))


def test_launches_of_gates_stay():
    """They are told apart by their gates."""
    one, two = (replace(at(n), paired=GateLaunch(f"g{n}", 1, "baseline", False)) for n in (1, 2))
    found = chosen(runs(("a", [one]), ("b", [two])))
    assert (seconds(found), found.notes) == ([1, 2], ())


@pytest.mark.parametrize(
    ("run", "left"),
    [("aaaa", [1, 2]), ("bbbb0002", [3, 4]), ("last", [3, 4]), ("all", [1, 2, 3, 4])],
)
def test_a_run_by_its_id_or_its_beginning(run, left):
    found = chosen(replace(TWO, notes=("n",)), run)
    assert (seconds(found), found.notes) == (left, ("n",))


def test_the_last_run_is_the_last_that_measured_or_resumed_something():
    assert seconds(chosen(runs(("a", [at(1)]), ("b", [])), "last")) == [1]
    resumed = runs(("a", [at(1)]), ("b", [at(2)]), ("c+", []), ("d", []))
    assert seconds(chosen(resumed, "last")) == seconds(chosen(resumed, "c")) == [1, 2]
    assert seconds(chosen(runs(("a", []), ("b", [])), "last")) == []


def test_a_run_that_is_not_there_or_not_the_only_one_is_refused():
    with refused("cccc", hint="aaaa0001, bbbb0002"):
        chosen(TWO, "cccc")
    with refused("ab", "2 runs", hint="ab1, ab2"):
        chosen(runs(("ab1", []), ("ab2", [])), "ab")
    with refused("x", hint="an archive with runs"):
        store.run_named((), "x")


def test_since_a_date():
    assert seconds(chosen(TWO, "all", "2026-01-02")) == [3, 4]
    assert seconds(chosen(TWO, "all", "2026-01-01T00:00:02")) == [2, 3, 4]
    assert seconds(chosen(TWO, "aaaa", "2026-01-02")) == []
    with refused("'yesterday'", hint="--since"):
        chosen(TWO, "", "yesterday")
