"""Whatever happens to an archive, what was written whole is read again, in any packing, and nothing twice: a machine
adds, kills, resumes, merges and reads in any order. Damage is told by its line and never more than that is lost; what
is no archive is refused and left alone; an archive that cannot be written goes on elsewhere; runs are told apart."""

import errno
import gzip
import json
import lzma
import math
import os
import random
import re
import resource
import sys
import tempfile
from base64 import b64decode, b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from archives import CLAIMS, EACH, PACK, RUN, example, write, written
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule
from refusals import refused
from scripts import DATA
from sealed_lines import reseal, resealed
from strategies import measurement, measurements

from pytest_slmserve.archive import store
from pytest_slmserve.archive.store import Archive, Contents, Merged, RunHeader, chosen, merge, read, runs_of
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica, Resolved


@pytest.fixture
def three(tmp_path) -> Path:
    """Lines: session, engine, then measurements with concurrency 1, 2, 4."""
    return write(tmp_path / "records.jsonl", example(1), example(2), example(4))


def concurrencies(path: Path, **how: bool) -> list[int]:
    return [m.load.concurrency for m in read(path, **how).measurements]


def merged_into(path: Path, *parts: Path) -> Merged:
    with Archive.open(path) as into:
        return merge(parts, into)


class Held:
    """What is known of an archive. ends: each measurement, or None for a session, with the size of the file once it was
    written whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.torn = path, False
        self.ends: list[tuple[int, Measurement | None]] = []
        Archive.open(path).close()

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def kept(self) -> list[Measurement]:
        return [m for _, m in self.ends if m]

    def write(self, file: Archive, *each: Measurement | None) -> None:
        for what in each:
            if what is None:
                file.begin({"n": 1}, {})
            else:
                file.add(what)
            self.ends.append((self.size, what))


class Archives(RuleBasedStateMachine):
    """Does to archives what users and disks do."""

    archives = Bundle("archives")

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.patch = tempfile.TemporaryDirectory(), pytest.MonkeyPatch()
        ids = map("{:08x}".format, count())  # nothing that is packed may be of chance, or sizes would be
        self.patch.setattr(store, "secrets", SimpleNamespace(token_hex=lambda _: next(ids)))
        self.patch.setattr(store, "datetime", SimpleNamespace(now=lambda zone: datetime(2026, 1, 1, tzinfo=zone)))
        self.numbers, self.known = count(1), list[Measurement]()

    def teardown(self) -> None:
        self.folder.cleanup()
        self.patch.undo()

    @rule(target=archives, suffix=st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.xz"]))
    def create(self, suffix: str) -> Held:
        return Held(Path(self.folder.name, f"{next(self.numbers)}{suffix}"))

    def opened(self, held: Held) -> Archive:
        """Opens it as a run does, which puts a torn end aside."""
        before, aside = held.path.read_bytes(), held.path.with_name(f"{held.path.name}.torn")
        was = aside.read_bytes() if aside.exists() else b""
        archive = Archive.open(held.path)
        assert bool(archive.notes) is held.torn is (held.size < len(before))
        moved = aside.read_bytes()[len(was) :] if aside.exists() else b""
        assert held.path.read_bytes() + moved == before
        held.torn = False
        return archive

    @rule(archive=archives, m=measurements(), more=st.integers(0, 2), old=st.booleans())
    def add(self, archive: Held, m: Measurement, more: int, old: bool) -> None:
        """A run of some measurements, of which one may be known elsewhere."""
        numbers = [next(self.numbers) for _ in range(more)]
        new = [replace(m, measured_at=f"2026-01-01T00:00:00.{number:06d}+00:00") for number in numbers]
        if old and new and self.known:
            new[0] = self.known[numbers[0] % len(self.known)]
        new = [m for m in new if m.id not in {there.id for there in archive.kept}]
        with self.opened(archive) as file:
            archive.write(file, None, *new)
        self.known += new

    @rule(archive=archives, share=st.floats(0, 1), back=st.integers(0, 3), late=st.booleans())
    def kill(self, archive: Held, share: float, back: int, late: bool) -> None:
        """Cuts it anywhere, or some bytes before its end."""
        size = max(archive.size - back, 0) if late else int(share * archive.size)
        os.truncate(archive.path, size)
        archive.ends = [(end, m) for end, m in archive.ends if end <= size]
        archive.torn = size not in {0, *(end for end, _ in archive.ends)}

    @rule(archive=archives, into=archives)
    def merge(self, archive: Held, into: Held) -> None:
        there = {m.id for m in into.kept}
        new = [m for m in archive.kept if m.id not in there]
        with self.opened(into) as file:
            merged = merge([archive.path], file)
        if archive is into:
            assert merged == Merged()
            return
        assert (merged.written, merged.known) == (len(new), len(archive.kept) - len(new))
        assert bool(merged.notes) is archive.torn
        size, kept, found = into.size, [*into.kept, *new], read(into.path)
        assert found.measurements == tuple(kept)
        assert merged_into(into.path, archive.path).written == 0 and into.size == size, "again adds nothing"
        # It is written anew, a piece for each line, so that the size after each is known again.
        into.path.unlink()
        into.ends = []
        with Archive.open(into.path) as file:
            into.write(file, *[None] * max(1, len(found.sessions)), *kept)

    @rule(archive=archives)
    def read(self, archive: Held) -> None:
        contents, kept = read(archive.path), tuple(archive.kept)
        assert contents.measurements == kept == chosen(contents, "all").measurements
        assert len(contents.notes) == (archive.torn or not archive.size)
        assert len(contents.sessions) == len(archive.ends) - len(kept)
        assert contents.claims == ({"n": 1} if contents.sessions else {})
        assert sorted(m.id for run in runs_of(contents) for m in run.measurements) == sorted(m.id for m in kept)


TestArchives = Archives.TestCase
TestArchives.settings = settings(stateful_step_count=20)


def test_missing_package_is_told_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with refused("msgspec", hint="pip install msgspec"):
        Archive.open(tmp_path / "records.jsonl")
    assert not [*tmp_path.iterdir()]


def test_results_file_lines_keep_order(tmp_path, three):
    path = write(tmp_path / "a.jsonl", example(1), example(2), example(1, launch="9999"))
    session, *others = map(json.loads, path.read_text("utf-8").splitlines())
    assert [line["kind"] for line in others] == ["engine", "measurement", "measurement", "engine", "measurement"]
    started, run = datetime.fromisoformat(session.pop("started")), session.pop("id")
    assert session.pop("pytest_slmserve") and session.pop("crc32")
    facts = {"kind": "session", "format": 3, "claims": CLAIMS, "plan": {"batches": [1, 2]}, "resumes": False}
    assert session == facts and re.fullmatch("[0-9a-f]{8}", run)
    assert abs(started - datetime.now(UTC)) < timedelta(minutes=5)
    with Archive.open(path) as archive:
        archive.begin({"plateau": {"tolerance": 0.2}}, {"n": 1})
        archive.begin({}, {"claims": []})  # as `slmserve measure` does: it judges none
    contents, plans = read(path), ({"batches": [1, 2]}, {"n": 1}, {"claims": []})
    assert contents.claims == {"plateau": {"tolerance": 0.2}}
    assert contents.plans == [(session.started, plan) for session, plan in zip(contents.sessions, plans, strict=True)]
    lines = [json.loads(line) for line in three.read_text("utf-8").splitlines()]
    lines[0]["new"] = lines[1]["new"] = 1
    lines.insert(2, {"kind": "weather", "rain": True})
    three.write_text("".join(json.dumps(line) + "\n\n" for line in lines), "utf-8")
    reseal(three)
    assert read(three).measurements == (example(1), example(2), example(4)) and read(three).notes == ()
    into = tmp_path / "into.jsonl"
    merged_into(into, three, DATA / "archive-format-3.jsonl", three)
    assert into.read_text("utf-8").count("weather") == 1 and len(read(into).sessions) == 2
    assert concurrencies(into) == [1, 2, 4, 1, 2], "what others wrote with spaces is another line"


@EACH
def test_added_measurement_reaches_disk(tmp_path, name, monkeypatch):
    on_disk, plan = [], {"salt": random.Random(1).randbytes(20_000).hex()}
    monkeypatch.setattr("os.fsync", lambda file: on_disk.append(os.fstat(file).st_size))
    with Archive.open(tmp_path / "new" / "folder" / name) as archive:
        for added in (1, 2):
            archive.add(example(added))
            assert (concurrencies(archive.path), len(read(archive.path).sessions)) == ([*range(1, added + 1)], 1)
            assert on_disk[-1] == archive.path.stat().st_size
        archive.begin({}, plan)
        archive.add(example(4))
    contents = read(archive.path)
    assert contents.measurements == (example(1), example(2), example(4)) and contents.sessions[1].plan == plan


@pytest.mark.parametrize("bad", [
    *({"run": replace(RUN, samples=replace(RUN.samples, output_tokens=(bad, 0)))} for bad in (4.25, "4", [4])),
    *({"run": replace(RUN, steps=replace(RUN.steps, time_s=(0.1, bad, 0.3)))} for bad in (math.nan, -math.inf, 1e306)),
    *({"resolved": Resolved(ready_s=bad)} for bad in (math.nan, math.inf)),
])  # fmt: skip
def test_unreadable_measurement_is_not_written(three, bad):
    before = three.read_bytes()
    with Archive.open(three) as archive:
        with refused(kind=BadArchive):
            archive.add(replace(example(), **bad))
        assert three.read_bytes() == before
        archive.add(example(16))
    assert concurrencies(three) == [1, 2, 4, 16]


@pytest.mark.parametrize("folder", [".slm", ".slm/baselines", "deep/.slm", "deep/.slm/x"])
def test_new_slm_folder_is_gitignored(tmp_path, folder):
    for _ in range(2):
        store.make_folder(tmp_path / folder)
        (own,) = tmp_path.rglob(".slm")
        assert (tmp_path / folder).is_dir() and (own / ".gitignore").read_text("utf-8") == "*\n"
    (own / ".gitignore").unlink()
    store.make_folder(tmp_path / folder / "more")
    Archive.open(tmp_path / "results" / "a.jsonl").close()
    assert not [*tmp_path.rglob(".gitignore")]


def test_torn_end_is_noted(three):
    os.truncate(three, three.stat().st_size - 1)
    before, aside = three.read_bytes(), three.with_name("records.jsonl.torn")
    lost = len(before.splitlines()[-1])
    aside.mkdir()
    with refused(three, "Is a directory"):
        Archive.open(three)
    assert three.read_bytes() == before
    aside.rmdir()
    told, archive = read(three).notes, Archive.open(three)
    archive.close()
    for notes, facts in ((told, ("used: 2",)), (archive.notes, (f"{lost} bytes", str(aside)))):
        assert len(notes) == 1 and all(fact in notes[0] for fact in (str(three), "line 5", *facts))
    assert concurrencies(three) == [1, 2]
    with Archive.open(three), refused(three, "another run", hint="--slm-records"):
        Archive.open(three)
    Archive.open(three).close()


def test_full_disk_leaves_no_fragment(three, tmp_path, elsewhere, monkeypatch):
    with Archive.open(three) as archive:
        archive.begin({}, {})
        began, (soft, hard) = three.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(began) + 100, hard))
        try:
            with refused(three, "File too large", hint="--slm-records"):
                archive.add(example(8))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert three.read_bytes() == began
        archive.add(example(16))
    assert concurrencies(three) == [1, 2, 4, 16]
    part = write(tmp_path / "part.jsonl", example(16))
    files, before = {*tmp_path.iterdir()}, part.read_bytes()
    monkeypatch.setattr(Path, "home", lambda: elsewhere)
    with Archive.open(three, moves=True) as archive:
        archive.check_writable()
        no_room(monkeypatch)
        with refused(three, "No space left on device"):
            merge([part], archive)
        for again in (lambda: archive.add(example(8)), archive.check_writable):
            with refused("No space left on device", "second", hint="--slm-records"):
                again()
    with Archive.open(three, moves=True) as archive:
        monkeypatch.setattr(Archive, "_append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            archive._move("planted", example(8))
    assert not [*elsewhere.iterdir()] and {*tmp_path.iterdir()} == files and part.read_bytes() == before


MEASURED = '{"kind":"measurement"'
OF_ENGINE = MEASURED + ',"engine":"4f1d","run":'
ENGINE = '{"kind":"engine","id":"4f1d","spec":{},"resolved":{},"environment":{}}'


@pytest.mark.parametrize(("number", "new", "facts"), [
    *((4, new, ("JSON",)) for new in ("{", "\0\0\0", "\udcff", '{"kind":NaN}', MEASURED)),
    *((4, f"{OF_ENGINE}{run}}}", ("JSON",)) for run in
      ('{"window_us":[1,2}', '{"window_us":[1,x2]}', '{"failures":NaN}')),
    *((4, new, ()) for new in (OF_ENGINE + "5}", MEASURED + ',"engine":["4f1d"],"run":{}}',
                               '{"kind":"session","format":3}', '{"kind":"engine","id":"f00d"}')),
    (4, MEASURED + ',"engine":"none","run":{}}', ("'none'",)), (4, MEASURED + "}", ("'engine'",)),
    (4, "[1]", ("object",)), (4, '{"kind":"session","format":"3"}', ("int",)),
    (4, lambda line: line[: len(line) // 2] + line, ("checksum",)),
    (1, lambda line: re.sub(rb',"crc32":"[0-9a-f]{8}"', b"", line), ("checksum",)),
    (2, "\x00", ("JSON", "and 3 more")), (2, ENGINE, ("model", "and 3")),
])  # fmt: skip
def test_damaged_line_is_skippable(three, tmp_path, number, new, facts):
    into, lines = tmp_path / "into.jsonl", three.read_bytes().splitlines()
    lines[number - 1] = new(lines[number - 1]) if callable(new) else resealed(new).encode("utf-8", "surrogateescape")
    three.write_bytes(b"".join(line + b"\n" for line in lines))
    with refused(three, f"line {number} ", *facts, kind=BadArchive, hint="--skip-damaged") as caught:
        read(three)
    left, count = {1: ([1, 2, 4], 1), 2: ([], 4), 4: ([1, 4], 1)}[number]  # without its engine no measurement is left
    assert (" more)" in caught.value.problem) is (count > 1)
    notes, merged = read(three, skip_damaged=True).notes, merged_into(into, three)
    assert concurrencies(three, skip_damaged=True) == concurrencies(into) == left
    assert (merged.written, len(notes), len(merged.notes)) == (len(left), count, count)
    assert all(f"line {number} " in note and str(three) in note for note in (notes[0], merged.notes[0]))


@EACH
@given(data=st.data())
def test_changed_bytes_raise_known_errors(name, data):
    raw = bytearray(written(name, 1, 2))
    changed = st.dictionaries(st.integers(0, len(raw) - 1), st.integers(1, 255), min_size=1, max_size=5)
    for at, flips in data.draw(changed).items():
        raw[at] ^= flips
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(raw)
        try:
            contents = read(path, skip_damaged=True)
        except BadArchive as error:
            assert error.hint
        else:
            assert len(contents.measurements) <= 2 and (contents.notes or path.suffix != ".jsonl")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz"])
def test_packed_damage_costs_one_piece(tmp_path, name):
    path, into = write(tmp_path / name, example(1), example(2), example(4)), tmp_path / "into.jsonl"
    raw, magic = bytearray(path.read_bytes()), PACK[path.suffix](b"")[:4]
    starts = [at for at in range(len(raw)) if raw.startswith(magic, at)]
    raw[starts[2] + 60] ^= 0xFF
    path.write_bytes(raw)
    with refused("line 4 ", "unpacked", kind=BadArchive):
        read(path)
    merged = merged_into(into, path)
    assert concurrencies(path, skip_damaged=True) == concurrencies(into) == [1, 4] and "line 4 " in merged.notes[0]


@pytest.mark.parametrize("told", [
    json.dumps("\x1b]0;pwned\x07\x9b2J\u202e")[1:-1], "\x7f\x9b2J\u202e"
], ids=["coded", "plain"])  # fmt: skip
def test_record_text_cannot_control_terminal(tmp_path, told):
    """Neither where JSON has written the character as \\u001b, nor where it stands there itself."""
    path, text = tmp_path / "a.jsonl", written("a.jsonl", 1).decode()
    text = re.sub("no answer|opt-125m|batches", lambda word: word[0] + told, text)
    path.write_text("".join(f"{resealed(line)}\n" for line in text.split("\n")[:-1]), "utf-8")
    contents = read(path)
    (kept,) = contents.measurements
    for shown in (kept.spec.model, kept.run.first_failure, *contents.sessions[0].plan):
        assert shown.isprintable() and "x9b2J" in shown


NOTHING = b"nothing like it\n"


@pytest.mark.parametrize(("name", "content", "fact", "hint"), [
    ("newer.jsonl", written("a.jsonl", 1) + b'{"kind":"session","format":7}\n', "format 7", "pip install --upgrade"),
    *((f"older-{number}.jsonl", (DATA / f"archive-format-{number}.jsonl").read_bytes(), f"format {number}",
       "studies/migrate.py {path} ") for number in (1, 2)),
    ("notes.txt", NOTHING + b"at all\n", "line 1 ", ""), ("one-line", b"no end of line", "", ""),
    ("other.json", b'{"machine_info": {}}', "", ""), ("other.jsonl", b'{"a": 1}\n{"a": 2}\n', "'kind'", ""),
    *((f"plain.jsonl.{packing}", b'{"kind":"session","format":1}\n', f"not {name}", "") for packing, name in
      (("gz", "gzip"), ("xz", "xz"))),
    ("other.gz", gzip.compress(NOTHING, mtime=0), "", ""), ("other.xz", lzma.compress(NOTHING), "", ""),
    ("cut.gz", gzip.compress(NOTHING * 99, mtime=0)[:-12], "", ""),
    ("zip.jsonl", gzip.compress(b'{"kind":"session"}\n', mtime=0), "", ""),
])  # fmt: skip
def test_foreign_file_is_refused(tmp_path, name, content, fact, hint):
    path, into = tmp_path / name, tmp_path / "into.jsonl"
    path.write_bytes(content)
    for opening in (read, partial(read, skip_damaged=True), Archive.open, lambda part: merged_into(into, part)):
        with refused(path, fact, kind=BadArchive, hint=hint.format(path=path)):
            opening(path)
    assert path.read_bytes() == content and {*tmp_path.iterdir()} == {path, into}


def test_special_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "file").touch()
    places = {tmp_path / "pipe.jsonl": "device", tmp_path: "Is a directory", tmp_path / "file/a": ""}
    for path, why in (places | dict.fromkeys(map(Path, ("/dev/zero", "/dev/full", "/dev/null")), "device")).items():
        with refused(path, why, kind=BadArchive, hint="--slm-records"):
            read(path)
        with refused(path, why, hint="another path with --slm-records"):
            Archive.open(path)
    with refused("No such file", kind=BadArchive):
        read(tmp_path / "missing.jsonl")


PAGE = '<!DOCTYPE html><p>x</p><script type="application/octet-stream" data-records="{}">{}</script>'


def test_report_page_holds_results_files(tmp_path):
    """Each is read below the path of the page; together each measurement is there once, and sessions are by start."""
    first = write(tmp_path / "a.jsonl", example(1), example(2))
    other = write(tmp_path / "b&b.jsonl.xz", example(2), example(4))
    whole = first.read_bytes()
    first.write_bytes(whole + b'{"kind":"measure')  # a torn end is not embedded
    ((name, text),), ((_, packed),) = store.embedded(first), store.embedded(other)
    assert (name, gzip.decompress(b64decode(text)), b64decode(packed)) == ("a.jsonl.gz", whole, other.read_bytes())
    page = tmp_path / "page.html"
    page.write_text(PAGE.format("b&amp;b.jsonl.xz", packed) + PAGE.format("../evil/" + name, text)[15:])
    each = [(path, [m.load.concurrency for m in contents.measurements]) for path, contents in store.read_each(page)]
    assert each == [(page / "b&b.jsonl.xz", [2, 4]), (page / "a.jsonl.gz", [1, 2])]
    assert [name for name, _ in store.embedded(page)] == ["b&b.jsonl.xz", "a.jsonl.gz"]
    found = read(page)
    started = [run.started for run in found.sessions]
    assert concurrencies(page) == [2, 4, 1] and found.claims == CLAIMS
    assert started == sorted(started) and len(started) == 2
    told = store.as_one([Contents(notes=("a", "b")), Contents(notes=("b", "c"))])
    assert told.notes == ("a", "b", "c"), "each note once"


@pytest.mark.parametrize("text", ["", "<script data-records>", PAGE.format("a.jsonl", "A")])
def test_page_without_records_is_refused(tmp_path, text):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html>" + text)
    with refused(page, "records", kind=BadArchive):
        read(page)
    page.write_text(PAGE.format("a.jsonl", b64encode(b"nothing\n").decode()))
    with refused(page / "a.jsonl", kind=BadArchive):
        read(page)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """The folder of temporary files."""
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    return tmp_path / "t"


@pytest.mark.parametrize("plant", [
    Path.unlink, lambda at: (at.unlink(), at.write_text("another's", "utf-8")), lambda at: os.truncate(at, 10),
], ids=["removed", "replaced", "truncated"])  # fmt: skip
@pytest.mark.parametrize("early", [True, False])
def test_lost_results_file_moves_elsewhere(tmp_path, elsewhere, plant, early):
    kept, path = (example(1), example(2), example(4)), tmp_path / "a.jsonl.gz"
    with Archive.open(path, moves=True) as archive:
        archive.begin(CLAIMS, {"batches": [1]})
        for m in kept:
            if early and m is kept[2]:
                plant(path)
            archive.add(m)
        if not early:
            plant(path)
    [second] = elsewhere.iterdir()
    found = read(second)
    assert (found.measurements, found.claims, len(found.sessions), second.suffix) == (kept, CLAIMS, 1, ".jsonl")
    assert all(fact in archive.moved for fact in (f"{path}: ", f"--slm-resume={second}")) and archive.path == second
    assert second.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("moves", [False, True])
def test_lost_empty_file_moves_nowhere(three, elsewhere, moves):
    with Archive.open(three, moves=moves) as archive:
        archive.begin({}, {})
        three.unlink()
    archive.close()
    assert not archive.moved
    with Archive.open(three) as archive:
        archive.add(example(8))
        os.truncate(three, 10)
        with refused(three, "shorter", hint="another path with --slm-records"):
            archive.add(example(16))
    assert not [*elsewhere.iterdir()] and not archive.moved and len(three.read_bytes()) == 10


def no_room(monkeypatch, *full: Path) -> None:
    """No file can be written any more, or only none of these."""
    appended = store._append

    def append(file, data):
        if not full or Path(file.name) in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        appended(file, data)

    monkeypatch.setattr(store, "_append", append)


@pytest.mark.parametrize("temporary", [True, False])
def test_full_disk_moves_once(three, elsewhere, monkeypatch, temporary):
    before = three.read_bytes()
    no_room(monkeypatch, three)
    if not temporary:
        elsewhere.rmdir()
    with Archive.open(three, moves=True) as archive:
        archive.add(example(8))
        archive.add(example(16))
        assert three.read_bytes() == before and "No space left on device" in archive.moved
        second = archive.path
        assert second.parent == (elsewhere if temporary else three.parent)
        no_room(monkeypatch)
        with refused(second, "No space left on device"):
            archive.add(example(32))
    assert read(second).measurements == (example(8), example(16))


def test_merge_copies_lines_unchanged(three, tmp_path):
    into = tmp_path / "into.jsonl"
    assert merged_into(into, three) == Merged(3, 0) and into.read_bytes() == three.read_bytes()
    assert merged_into(into, three, three) == Merged(0, 6) and into.read_bytes() == three.read_bytes()
    replicas = [replace(example(8), replica=Replica("g", index, 2, "s", "mps")) for index in (0, 1)]
    with Archive.open(write(tmp_path / "own.jsonl", example(1), *replicas)) as archive:
        assert merge([three], archive) == Merged(2, 1)
        archive.begin({}, {})
        archive.add(example(16, "f00d"))
    assert merged_into(into, archive.path) == Merged(3, 3), "replicas of one moment are two measurements"
    assert concurrencies(archive.path) == [1, 8, 8, 2, 4, 16] and concurrencies(into) == [1, 2, 4, 8, 8, 16]
    was = example(1)
    now = replace(example(2), environment=replace(was.environment, driver="570"))
    into = write(tmp_path / "other.jsonl", was)
    with Archive.open(into) as archive:
        archive.add(replace(was, measured_at="2025-11-21T11:00:00.000+00:00"))
        merge([write(tmp_path / "part.jsonl", was, now)], archive)
        archive.add(replace(was, measured_at="2025-11-21T13:00:00.000+00:00"))
    assert [m.environment.driver for m in read(into).measurements] == [None, None, "570", None]


def at(second: int, concurrency: int = 8, day: int = 1, **facts: object) -> Measurement:
    return replace(measurement(concurrency), measured_at=f"2026-01-{day:02d}T00:00:{second:02d}.000+00:00", **facts)


def runs(**sessions: list[Measurement]) -> Contents:
    """One run a day, each with its id and its measurements. "_on" says that it resumes, "_old" that it had no id."""
    measured, headers = [], []
    for day, (name, each) in enumerate(sessions.items(), 1):
        run, _, kind = name.partition("_")
        started = f"2026-01-{day:02d}T00:00:00.000+00:00"
        headers.append(RunHeader(3, started, None, {}, {}, run, kind == "on", kind != "old"))
        measured += [(m, headers[-1]) for m in each]
    return Contents(tuple(measured), tuple(headers), notes=("n",))


def seconds(measured: tuple[Measurement, ...]) -> list[int]:
    return [int(m.measured_at[17:19]) for m in measured]


def test_measurement_belongs_to_last_session(tmp_path, monkeypatch):
    """A part is merged after another run has begun: its measurement is older than that. Sessions of older releases get
    an id of their start, and what stands before all sessions is a run without one."""
    days, path = iter((1, 2)), tmp_path / "r.jsonl"
    monkeypatch.setattr(store, "datetime", SimpleNamespace(now=lambda zone: datetime(2026, 1, next(days), tzinfo=zone)))
    write(path, at(1))
    write(path, at(2, day=2), at(9), at(0, day=2))
    for known in (True, False):
        found = runs_of(read(path))
        assert [seconds(run.measurements) for run in found] == [[1, 9], [2, 0]]
        assert [(run.header.known, run.header.resumes, len(run.header.id)) for run in found] == [(known, False, 8)] * 2
        assert found[0].header.id != found[1].header.id
        path.write_text(re.sub('"id":"[0-9a-f]{8}","resumes":false,', "", path.read_text("utf-8")), "utf-8")
        reseal(path)
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[1:]))
    before, second = runs_of(read(path))
    assert (before.header, seconds(before.measurements)) == (store.BEFORE_ALL, [1])
    assert (before.header.started, len(before.header.id), before.header.known) == ("", 8, False)
    assert [run.header for run in runs_of(Contents(sessions=(second.header,)))] == [second.header]


LEFT_OUT, POOLED = store.LEFT_OUT, store.POOLED
TWO = {"aaaa0001": [at(1), at(2)], "bbbb0002": [at(3, day=2), at(4, 16, day=2)]}
UNTOLD = {"a_old": [at(1), at(2)], "b_old": [at(3)]}
GATES = [at(second, paired=GateLaunch(f"g{second}", 1, "baseline", False)) for second in (1, 2)]
GOES_ON = {"a": [at(1)], "b": [at(2)], "c_on": []}


@pytest.mark.parametrize(("sessions", "how", "left", "notes"), [
    *(({}, how, [], []) for how in ((), ("all",), ("last",))),
    (TWO, (), [3, 4], [LEFT_OUT]),
    ({"a": [at(1), at(2, 32)], "b": [at(3)]}, (), [2, 3], [LEFT_OUT]),
    ({"a": [at(1)], "b": [at(2, 16)]}, (), [1, 2], []),
    ({"a": [at(1)], "b_on": [at(2)], "c": [at(3, 16)]}, (), [1, 2, 3], []),
    (GOES_ON, (), [1, 2], []),
    ({"a": [at(1)], "b_on": [at(2)], "c": [at(3)]}, (), [3], [LEFT_OUT]),
    ({"a_old": [at(1)], "b_old": [at(2)]}, (), [1, 2], [POOLED]),
    ({"a_old": [at(1)], "b_old": [at(2, 16)]}, (), [1, 2], []), (UNTOLD | {"c": [at(9)]}, (), [9], [LEFT_OUT, POOLED]),
    (UNTOLD | {"c": [at(9, 16)]}, (), [1, 2, 3, 9], [POOLED]),
    ({"a": GATES[:1], "b": GATES[1:]}, (), [1, 2], []),  # told apart by their gates
    *((TWO, how, left, []) for how, left in (
        (("aaaa",), [1, 2]), (("bbbb0002",), [3, 4]), (("all",), [1, 2, 3, 4]), (("last",), [3, 4]),
        (("all", "2026-01-02"), [3, 4]), (("all", "2026-01-01T00:00:02"), [2, 3, 4]), (("aaaa", "2026-01-02"), []),
    )),
    ({"a": [at(1)], "b": []}, ("last",), [1], []), ({"a": [], "b": []}, ("last",), [], []),
    *((GOES_ON | {"d": []}, (name,), [1, 2], []) for name in ("last", "c")),
])  # fmt: skip
def test_last_run_of_case_counts(sessions, how, left, notes):
    """A run that resumes goes on with all before it, and neighbours without ids are one."""
    found = chosen(runs(**sessions), *how)
    assert (seconds(found.measurements), found.notes) == (left, ("n", *notes))


def test_unknown_run_is_refused():
    with refused("cccc", hint="aaaa0001, bbbb0002"):
        chosen(runs(**TWO), "cccc")
    with refused("ab", "2 runs", hint="ab1, ab2"):
        chosen(runs(ab1=[], ab2=[]), "ab")
    with refused("x", hint="a results file with runs"):
        store.run_named((), "x")
    with refused("'yesterday'", hint="--since"):
        chosen(runs(**TWO), "", "yesterday")
