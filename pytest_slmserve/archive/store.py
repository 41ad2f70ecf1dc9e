"""The archive: measurements as lines of JSON, each on disk as soon as it is made; packed by the suffix `.gz` or `.xz`.

A line is an object with a `kind`, and ends with the CRC-32 of what is before it. `session` opens a run and holds the
format, the parameters of the claims and the plan; `engine` describes one launch, before its first measurement;
`measurement` holds the columns of one run. Other kinds, and fields that are not known here, are passed over.

An archive that cannot be written any more, or that is not at its path any more, loses nothing: the run goes on in a
second file, which gets all that it has measured so far.

`codec` turns a measurement into such objects and back. In a packed archive each write is a piece of its own (a member
of gzip, a stream of xz), so whatever was written before a kill can be read.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import os
import re
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from pytest_slmserve.analysis.compare.comparability import moment
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.archive.codec import converted, engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.archive.pages import archives_in
from pytest_slmserve.engines.launch.device_lock import try_lock
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadArchive, BadUsage
from pytest_slmserve.schema.files import content, regular
from pytest_slmserve.schema.printable import printable_value
from pytest_slmserve.schema.records import Measurement, Resolved
from pytest_slmserve.schema.specs import EngineSpec, short_hash
from pytest_slmserve.telemetry.host import own_version

OWN = ".slm"


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents. Where that makes our own, git is told to ignore it: results are kept elsewhere
    on purpose. Raises OSError."""
    own = next((each for each in (folder, *folder.parents) if each.name == OWN), None)
    is_new = own is not None and not own.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if own and is_new:
        (own / ".gitignore").write_text("*\n", "utf-8")


# 3: the words of the code, models, a checksum for each line. 2: stamps are ticks of a clock. 1: the first. Add a number
# only if an older release would misread what is written.
FORMAT = 3

ANOTHER = "--slm-records with another path"

_FIRST = b'{"kind":"session"'  # how every archive begins
BULK = b'{"kind":"measurement"'
_SEAL = re.compile(rb',"crc32":"([0-9a-f]{8})"\}$')  # how every line ends
_CHUNK = 1 << 12  # of xz it may become 30 MB
_UNPACKED = 1 << 30  # bytes that an archive may become: 10,000 measurements are some hundred million
_UNPACKING = 1 << 27  # bytes of memory that a piece may ask for: `xz -9` asks for half of it
_DAMAGE = (BadUsage, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Packing:
    """The packing of archives of one suffix. magic: how each piece begins. unpacker: a new one for each piece."""

    name: str
    magic: bytes
    pack: Callable[[bytes], bytes]
    unpacker: Callable[[], Any]


_PACKINGS = {
    ".gz": _Packing(
        "gzip", b"\x1f\x8b\x08", lambda data: gzip.compress(data, mtime=0), lambda: zlib.decompressobj(wbits=31)
    ),
    ".xz": _Packing(
        "xz", b"\xfd7zXZ\x00", lzma.compress, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKING)
    ),
}


@dataclass(frozen=True, slots=True)
class RunHeader:
    """One run that wrote to the archive. started: ISO 8601, UTC. claims, plan, id, resumes: as given to
    `Archive.begin`; an older release wrote no id."""

    format: int
    started: str
    pytest_slmserve: str | None
    claims: Mapping[str, Any]
    plan: Mapping[str, Any]
    id: str | None = None
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of an archive, in the order written. `notes`: one sentence for each thing that could not be used.
    `written_by`: for each measurement the index of its session, -1 where none stands before it."""

    measurements: tuple[Measurement, ...]
    sessions: tuple[RunHeader, ...]
    notes: tuple[str, ...] = ()
    written_by: tuple[int, ...] = ()

    @property
    def claims(self) -> Mapping[str, Any]:
        """Parameters of the claims in the last session that had some; empty if there was none."""
        return next((session.claims for session in reversed(self.sessions) if session.claims), {})

    @property
    def plans(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The plan of each session, with when it started."""
        return [(session.started, session.plan) for session in self.sessions]


class Archive:
    """An archive open for appending; made by `Archive.open`, by one run at a time.

    `notes` tells what had to be repaired when it was opened. moved: why and where a run goes on in a second file; ""
    where it does not. lost: why a measurement is nowhere; "" while none is.
    """

    def __init__(self, path: Path, file: io.FileIO, notes: tuple[str, ...] = (), *, moves: bool = False) -> None:
        self.path, self.notes = path, notes
        self.moved = self.lost = ""
        self._file = file
        self._moves = moves
        self._session: bytes | None = None  # its line, once it is written
        self._added: list[Measurement] = []
        self._size: int | None = None  # once something was written
        self._engines: dict[str, tuple[str, Resolved, Environment]] = {}

    @classmethod
    def open(cls, path: str | Path, *, moves: bool = False) -> Archive:
        """Open or create, with its folders. A torn end is moved to `<name>.torn` first, or it would swallow the next
        line. moves: to a second file, once it cannot be written any more. Raises BadUsage where it cannot be written or
        another run writes to it, BadArchive where the file is something else or of a newer format."""
        path = Path(path)
        try:
            make_folder(path.parent)
            file = open(path, "ab+", buffering=0, opener=regular)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            _cannot_write(path, error)
        try:
            if not try_lock(file):
                raise BadUsage(f"another run is writing to {path}", f"wait until it ends, or {ANOTHER}")
            return cls(path, file, _repair(path, file), moves=moves)
        except BaseException as error:
            file.close()
            if isinstance(error, OSError):
                _cannot_write(path, error)
            raise

    def begin(self, claims: Mapping[str, Any], plan: Mapping[str, Any], *, resumes: bool = False) -> None:
        """Note a session, in plain values, for a later report. resumes: it goes on with what the archive holds."""
        facts = {
            "kind": "session",
            "format": FORMAT,
            "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "pytest_slmserve": own_version(),
            "id": secrets.token_hex(4),
            "resumes": resumes,
            "claims": dict(claims),
            "plan": dict(plan),
        }
        session = line_of(facts)
        self._append([session])
        self._session = session

    def add(self, measurement: Measurement) -> None:
        """Append; it is on disk on return, if need be in a second file. Raises BadArchive, with nothing written, for
        what no reader would take, and BadUsage where it cannot be written."""
        written = _written(measurement)
        try:
            if self._session is None:
                self.begin({}, {})
            self._add(measurement, written)
        except BadUsage as error:
            self._move(error.problem, [*self._added, measurement])
        self._added.append(measurement)

    def _add(self, measurement: Measurement, written: tuple[bytes, bytes]) -> None:
        engine = (measurement.spec.key, measurement.resolved, measurement.environment)  # of specs False and 0 are equal
        known = self._engines.get(measurement.launch) == engine
        self._append([b"".join(written[known:])])
        self._engines[measurement.launch] = engine

    def _move(self, why: str, measurements: Sequence[Measurement]) -> None:
        """Go on in a second file. Raises BadUsage where that cannot be written either, or is not wanted."""
        if not self._moves or self.moved:
            raise BadUsage(why, ANOTHER)
        for folder in (Path(tempfile.gettempdir()), self.path.parent, Path.home()):
            try:
                second = self._second(folder, measurements)
            except (OSError, BadUsage):
                continue
            self._file.close()
            self.path, self._file, self._size, self._engines = second.path, second._file, second._size, second._engines
            self.moved = (
                f"{why}; all measurements of this run are in {second.path} "
                f"(--slm-resume={second.path} goes on with them)"
            )
            return
        self.lost = f"{why}, and no second file can be written"
        self.check_writable()

    def _second(self, folder: Path, measurements: Sequence[Measurement]) -> Archive:
        """A new archive with the session and the measurements. Raises OSError or BadUsage, and leaves nothing."""
        descriptor, name = tempfile.mkstemp(".jsonl", "pytest-slmserve-rescued-", folder)
        os.close(descriptor)
        second = Archive(Path(name), Path(name).open("ab+", buffering=0))  # noqa: SIM115 - closed by `close`
        try:
            second._append([self._session] if self._session else [])
            second._session = self._session
            for measurement in measurements:
                second.add(measurement)
        except BaseException:
            second._file.close()
            second.path.unlink(missing_ok=True)
            raise
        return second

    def check_writable(self) -> None:
        """Raises BadUsage once a measurement could be written nowhere: the next one would be lost, too."""
        if self.lost:
            raise BadUsage(self.lost, ANOTHER)

    def add_lines(self, pieces: Iterable[bytes]) -> None:
        """Append lines of another archive as they stand, on disk on return. pieces: lines that are packed together."""
        self._engines.clear()  # the lines may describe a launch anew
        self._append(pieces)

    def _append(self, pieces: Iterable[bytes]) -> None:
        if packing := _PACKINGS.get(self.path.suffix):
            pieces = map(packing.pack, pieces)
        try:
            self._check_there()
            _append(self._file, b"".join(pieces))
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            _cannot_write(self.path, error)

    def _check_there(self) -> None:
        """Raises OSError where the path names another file than the open one, or this one is shorter than it was."""
        there, ours = self.path.stat(), os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise OSError(errno.ESTALE, "another file was put in its place")
        if self._size is not None and ours.st_size < self._size:
            raise OSError(errno.ESTALE, "it was made shorter")

    def close(self) -> None:
        """Close the file. What it has lost since the last measurement goes to a second one."""
        if self._file.closed:
            return
        try:
            if self._moves and self._added and not self.moved:
                self._check_there()
        except OSError as error:
            with suppress(BadUsage):
                self._move(f"cannot write to {self.path}: {error.strerror}", self._added)
        self._file.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: str | Path, *, skip_damaged: bool = False) -> Contents:
    """All measurements of an archive, or of those inside a page. A torn end, as a kill leaves it, only makes a note.

    Raises BadArchive where the file cannot be read or is no archive, where a line is damaged (unless `skip_damaged`,
    which makes it a note) and where the format is newer than FORMAT.
    """
    each = [contents for _, contents in read_each(path, skip_damaged=skip_damaged)]
    before = accumulate((len(contents.sessions) for contents in each), initial=0)
    return Contents(
        tuple(m for contents in each for m in contents.measurements),
        tuple(session for contents in each for session in contents.sessions),
        tuple(note for contents in each for note in contents.notes),
        tuple(by if by < 0 else first + by for contents, first in zip(each, before) for by in contents.written_by),
    )


def read_each(path: str | Path, *, skip_damaged: bool = False) -> list[tuple[Path, Contents]]:
    """The archive at a path; or each of those inside a page, by a path below that of the page. Raises BadArchive, as
    `read`."""
    path = Path(path)
    try:
        raw = content(path)
    except OSError as error:
        raise BadArchive(f"cannot read {path}: {error.strerror}", "the file that --slm-records named") from None
    try:
        archives = archives_in(path, raw)
    except ValueError:
        raise BadArchive(f"the records in {path} are damaged", "the page as it was written") from None
    if not archives:
        raise BadArchive(f"{path} is a page without records", "a page that slmserve wrote, or an archive")
    return [(name, _contents(name, data, skip_damaged)) for name, data in archives]


def _contents(path: Path, raw: bytes, skip_damaged: bool) -> Contents:
    lines, whole = stored_in(path, raw)
    found = found_in(path, lines, decode)
    if found.damaged and not skip_damaged:
        more = f" (and {len(found.damaged) - 1} more)" if len(found.damaged) > 1 else ""
        raise BadArchive(f"{path}: {found.damaged[0]}{more}", "--skip-damaged, to go on without what is damaged")
    notes = [f"{path}: skipped: {what}" for what in found.damaged]
    if not raw:
        notes.append(f"{path} is empty")
    elif whole < len(raw):
        notes.append(f"{torn_end(path, lines)}; measurements used: {len(found.measurements)}")
    return Contents(tuple(found.measurements), tuple(found.sessions), tuple(notes), tuple(found.written_by))


def line_of(facts: Mapping[str, Any]) -> bytes:
    """A line of an archive, with its checksum and its end."""
    return sealed(json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()) + b"\n"


def sealed(body: bytes) -> bytes:
    """A JSON object with its checksum as the last entry: the CRC-32 of the object without it."""
    return b'%b,"crc32":"%08x"}' % (body[:-1], zlib.crc32(body))


def unsealed(line: bytes) -> bytes:
    """The JSON object of a line without its checksum. Raises ValueError if that is missing or of something else."""
    seal = _SEAL.search(line)
    if seal is None:
        facts_of(line)["kind"]  # of a line that is none of ours there is more to say
        raise ValueError("it has no checksum")
    body = line[: seal.start()] + b"}"
    if zlib.crc32(body) != int(seal[1], 16):
        raise ValueError("its checksum is that of another line: some of it was changed")
    return body


def _written(measurement: Measurement) -> tuple[bytes, bytes]:
    """The lines of an engine and of its measurement. Raises BadArchive where they could not be read again."""
    m = measurement
    try:
        lines = line_of(engine_line(m.launch, m.spec, m.resolved, m.environment)), line_of(measurement_line(m))
        found = ScannedLines()
        for line in lines:
            decode(found, line)
    except _DAMAGE as error:
        why = f"a measurement is not written, for no reader would take it: it {_what(error)}"
        raise BadArchive(why, "an issue with this sentence: that is a bug") from None
    return lines


def _cannot_write(path: Path, error: OSError) -> NoReturn:
    raise BadUsage(f"cannot write to {path}: {error.strerror}", ANOTHER) from None


def _append(file: io.FileIO, data: bytes) -> None:
    end = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
    finally:
        if data:  # a full disk, or an interrupt: the rest of a line would swallow the next one
            file.truncate(end)
    os.fsync(file.fileno())


def _repair(path: Path, file: io.FileIO) -> tuple[str, ...]:
    file.seek(0)
    try:
        raw = file.readall()
    except (MemoryError, OverflowError):
        _too_large(path)
    lines, whole = stored_in(path, raw)
    found_in(path, [line for line in lines if not line or not line.startswith(BULK)], decode)  # ours, and not newer?
    if whole == len(raw):
        return ()
    aside = path.with_name(f"{path.name}.torn")
    with aside.open("ab", buffering=0) as torn:
        _append(torn, raw[whole:])
    file.truncate(whole)
    return (f"{torn_end(path, lines)}; these {len(raw) - whole} bytes were moved to {aside}",)


@dataclass(slots=True)
class ScannedLines:
    sessions: list[RunHeader] = field(default_factory=list)
    engines: dict[str, tuple[EngineSpec, Resolved, Environment]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    written_by: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


Take = Callable[[ScannedLines, bytes], None]  # a line into what was found; raises one of _DAMAGE


def stored_in(path: Path, raw: bytes) -> tuple[list[bytes | None], int]:
    """The lines of a file, None for a packed piece that cannot be read, and the bytes before its torn end. Raises
    BadArchive where the file is something else, or takes more memory than there is."""
    try:
        return _stored_in(path, raw)
    except MemoryError:
        _too_large(path)


def _too_large(path: Path) -> NoReturn:
    raise BadArchive(f"{path} needs more memory than an archive may take", "the file that --slm-records named")


def _stored_in(path: Path, raw: bytes) -> tuple[list[bytes | None], int]:
    lines: list[bytes | None]
    if packing := _PACKINGS.get(path.suffix):
        if not packing.magic.startswith(raw[: len(packing.magic)]):
            wrong = f"{path} ends in {path.suffix} but is not {packing.name}"
            raise BadArchive(wrong, f"a name without {path.suffix}, or the file as it was written")
        lines, whole = _packed_lines(packing, raw)
        rest, _ = _unpack(packing, raw, whole)
    else:
        whole = raw.rfind(b"\n") + 1
        lines, rest = [*raw[:whole].split(b"\n")[:-1]], raw[whole:]  # splitlines looks at each byte, and takes its time
    if not lines and not _FIRST.startswith(rest[: len(_FIRST)]):
        _not_an_archive(path)
    return lines, whole


def _packed_lines(packing: _Packing, raw: bytes) -> tuple[list[bytes | None], int]:
    """Lines of all whole pieces, and where the last of them ends. Looks for the next one where one is damaged."""
    lines: list[bytes | None] = []
    start = whole = size = 0
    while 0 <= start < len(raw):
        text, end = _unpack(packing, raw, start)
        size += len(text)
        if size > _UNPACKED:
            raise MemoryError
        if end is None:
            start = raw.find(packing.magic, start + 1)
            continue
        if start > whole:
            lines.append(None)
        lines += text.splitlines()
        start = whole = end
    return lines, whole


def _unpack(packing: _Packing, raw: bytes, start: int) -> tuple[bytes, int | None]:
    """Text of the piece at `start`, and where it ends: None if it is damaged or the file ends before it."""
    unpack, text = packing.unpacker(), bytearray()
    try:
        while start < len(raw) and not unpack.eof:
            text += unpack.decompress(raw[start : start + _CHUNK])
            if len(text) > _UNPACKED:
                raise MemoryError
            start = min(start + _CHUNK, len(raw))
    except (zlib.error, lzma.LZMAError):
        return bytes(text), None
    return bytes(text), start - len(unpack.unused_data) if unpack.eof else None


def found_in(path: Path, lines: Iterable[bytes | None], take: Take) -> ScannedLines:
    """Results of `take` for the lines, and the reasons why it failed for some. Raises BadArchive where a session is of
    a newer format, or no line is one of an archive."""
    found = ScannedLines()
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            if line is None:
                raise ValueError("cannot be unpacked")
            take(found, line)
        except _DAMAGE as error:
            found.damaged.append(f"line {number} {_what(error)}")
        if found.sessions and (other := found.sessions[-1].format) != FORMAT:
            if other > FORMAT:
                problem = f"{path} was written by a newer release (format {other}; this one reads format {FORMAT})"
                raise BadArchive(problem, "pip install --upgrade pytest-slmserve")
            problem = f"{path} has format {other}, and this release reads format {FORMAT}"
            raise BadArchive(problem, f"python studies/migrate.py {path} NEW.jsonl, in a checkout of pytest-slmserve")
    if number and not (found.sessions or found.engines or found.measurements):
        _not_an_archive(path, *found.damaged)
    return found


def _not_an_archive(path: Path, *why: str) -> NoReturn:
    reason = f": {why[0]}" if why else ""
    hint = "the file that --slm-records named; for results of another tool: --knob, --throughput and --latency NAME"
    raise BadArchive(f"{path} is not an archive of pytest-slmserve{reason}", hint)


def torn_end(path: Path, lines: Sequence[bytes | None]) -> str:
    return f"{path}: line {len(lines) + 1} ends early, as when a run is killed while it writes"


def _what(error: Exception) -> str:
    import msgspec

    match error:
        case msgspec.ValidationError():  # a subclass of the next
            return f"cannot be used ({error})"
        case msgspec.DecodeError() | UnicodeDecodeError():
            return f"is not JSON ({error})"
        case KeyError():
            return f"has no entry {error}"
        case BadUsage():
            return f"cannot be used ({error.problem})"
        case _:
            return f"cannot be used ({error})"


def facts_of(line: bytes) -> dict[str, Any]:
    """The object that a line holds, without its checksum; an empty line has no kind. Raises one of _DAMAGE."""
    if not line.strip():
        return {"kind": None}
    import msgspec  # here, for an idle run reads no records

    facts = msgspec.json.decode(line)
    if not isinstance(facts, dict):
        raise ValueError("not an object with a kind")
    plain = line.isascii() and b"\\" not in line and b"\x7f" not in line
    return facts if plain else printable_value(facts)


def decode(found: ScannedLines, line: bytes) -> None:
    """Decode one line into `found`; raises one of _DAMAGE."""
    if line.startswith(_FIRST) and not _SEAL.search(line):  # as in other formats
        session = _session(facts_of(line))
        if session.format == FORMAT:
            unsealed(line)  # which raises
        found.sessions.append(session)
        return
    facts = facts_of(unsealed(line) if line.strip() else line)
    match facts["kind"]:
        case "session":
            found.sessions.append(_session(facts))
        case "engine":
            found.engines[facts["id"]] = engine_from_record(facts)
        case "measurement":
            found.measurements.append(measurement_of(facts, *engine_before(found, facts)))
            found.written_by.append(_writer(found))


def _writer(found: ScannedLines) -> int:
    """Index of the session that the last measurement belongs to: the last one before it that had begun by then, for a
    merged archive has lines of others between; -1 where there is none."""
    at, last = found.measurements[-1].measured_at, len(found.sessions) - 1
    return next((index for index in range(last, -1, -1) if found.sessions[index].started <= at), last)


def engine_before(found: ScannedLines, facts: dict[str, Any]) -> tuple[EngineSpec, Resolved, Environment]:
    """The engine of a measurement, as a line before it describes it. Raises ValueError where none does."""
    if facts["engine"] not in found.engines:
        raise ValueError(f"no line before it describes its engine {facts['engine']!r}")
    return found.engines[facts["engine"]]


def _session(facts: dict[str, Any]) -> RunHeader:
    """Another format may have other fields: then only its number is wanted."""
    if converted(int, facts["format"]) != FORMAT:
        return RunHeader(facts["format"], "", None, {}, {})
    made: RunHeader = converted(RunHeader, facts)
    return made


_NUMBERS = re.compile(rb"\[[-0-9,nultrefas]*\]")  # and null, true, false
_RUN = b',"run":{'  # the last entry of a measurement, and nearly all of it
_AT_ONCE = 1 << 23  # bytes that are written together


@dataclass(frozen=True, slots=True)
class Merged:
    """written, known: measurements that came into the archive, and that were there. notes: what could not be used."""

    written: int = 0
    known: int = 0
    notes: tuple[str, ...] = ()

    def __add__(self, other: Merged) -> Merged:
        return Merged(self.written + other.written, self.known + other.known, self.notes + other.notes)


def merge(parts: Iterable[Path], into: Archive) -> Merged:
    """Add what `into` does not have: measurements with their engines, and sessions. The parts stay as they are.

    A torn end, or a damaged line, only makes a note; all else of that part is added. Merging again, also after an
    interruption, adds what is missing. Raises BadArchive where a part cannot be read, is no archive or of a newer
    format, BadUsage where `into` cannot be written.
    """
    merged, union = Merged(), _Union(into)
    for part in parts:
        merged += union.merge(part)
    return merged


class _Union:
    """An archive to which lines of others are added, if it does not have them."""

    def __init__(self, into: Archive) -> None:
        self.into = into
        self._written = self._known = self._size = 0
        self._pieces: list[bytes] = []
        self._engines: dict[str, bytes] = {}  # the line that describes each launch
        lines = [line for line in stored_in(into.path, _read(into.path))[0] if line]
        self._seen = {_head(line) for line in lines}
        found_in(into.path, (line for line in lines if not line.startswith(BULK)), self._remember)

    def _remember(self, found: ScannedLines, line: bytes) -> None:
        if (facts := _checked(found, line))["kind"] == "engine":
            self._engines[facts["id"]] = line

    def merge(self, part: Path) -> Merged:
        raw = _read(part)
        if part.samefile(self.into.path):
            return Merged()
        self._written = self._known = 0
        lines, whole = stored_in(part, raw)
        found = found_in(part, lines, partial(self._take, {}))
        self._flush()
        notes = [f"{part}: not merged: {what}" for what in found.damaged]
        notes += [torn_end(part, lines)] if whole < len(raw) else []
        return Merged(self._written, self._known, tuple(notes))

    def _take(self, engines: dict[str, bytes], found: ScannedLines, line: bytes) -> None:
        """engines: the line that describes each launch, of the part so far. Raises where the line is damaged."""
        match (facts := _checked(found, line))["kind"]:
            case None:
                pass
            case "engine":  # added with its first measurement
                engines[facts["id"]] = line
            case "measurement" if _head(line) in self._seen:
                self._known += 1
            case "measurement":
                self._written += 1
                launch, known = facts["engine"], self._engines.get(facts["engine"])
                self._engines[launch] = engines[launch]
                self._add(_head(line), *([] if known == engines[launch] else [engines[launch]]), line)
            case _ if line not in self._seen:
                self._add(line, line)

    def _add(self, head: bytes, *lines: bytes) -> None:
        self._seen.add(head)
        self._pieces.append(b"".join(line + b"\n" for line in lines))
        self._size += len(self._pieces[-1])
        if self._size > _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        """All that was added is on disk on return."""
        self.into.add_lines(self._pieces)
        self._pieces, self._size = [], 0


def _checked(found: ScannedLines, line: bytes) -> dict[str, Any]:
    """Facts of a line, of a measurement without its numbers. Raises where the line is damaged."""
    if not line.startswith(BULK):
        decode(found, line)
        return facts_of(line)
    facts = facts_of(_NUMBERS.sub(b"[]", unsealed(line)))
    engine_before(found, facts)
    if not isinstance(facts["run"], dict):
        raise ValueError("its run is no object")
    return facts


def _head(line: bytes) -> bytes:
    return line.partition(_RUN)[0]


def _read(path: Path) -> bytes:
    try:
        return content(path)
    except OSError as error:
        raise BadArchive(f"cannot read {path}: {error.strerror}", "an archive that --slm-records wrote") from None


ID_DIGITS = 8
LEFT_OUT = (
    "several runs measured the same cases, and only the last run counts: `report --list` names the runs, --run all "
    "pools them"
)
POOLED = (
    "several runs measured the same cases and are pooled: this older archive does not tell which resumed; "
    "`report --list` names them, --run ID separates"
)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run of an archive. id: its own, or made of its start, where `known` says that it has none. resumes: it went
    on with all that was in the archive before it."""

    id: str
    started: str
    pytest_slmserve: str | None
    known: bool
    resumes: bool
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class RunChoice:
    """Runs that are wanted. run: an id or its beginning, "last", "all"; "": of each case the last run that measured it.
    since: only what was measured from then on, as ISO 8601; "": all."""

    run: str = ""
    since: str = ""


def runs_of(contents: Contents) -> tuple[RecordedRun, ...]:
    """Runs in the order written, also those that measured nothing; what stands before all is one without a start."""
    orphans = [RecordedRun(_made_id(""), "", None, False, False, ())] if -1 in contents.written_by else []
    found = {run.id: run for run in orphans}
    ids = {-1: _made_id("")}
    for index, session in enumerate(contents.sessions):
        ids[index] = session.id or _made_id(session.started)
        made = RecordedRun(ids[index], session.started, session.pytest_slmserve, bool(session.id), session.resumes, ())
        found.setdefault(made.id, made)
    measured = grouped(zip(contents.measurements, contents.written_by, strict=True), lambda pair: ids[pair[1]])
    return tuple(replace(run, measurements=tuple(m for m, _ in measured.get(run.id, ()))) for run in found.values())


def _made_id(started: str) -> str:
    return short_hash([started])[:ID_DIGITS]


def chosen(contents: Contents, wanted: RunChoice) -> Contents:
    """The part of an archive that is wanted, with a note where runs of the same cases were left out, or pooled. Raises
    BadUsage for a run that it does not have, or a time that is none."""
    runs = runs_of(contents)
    notes: list[str] = []
    match wanted.run:
        case "":
            kept, notes = _of_each_case(_continued(runs))
        case "all":
            kept = list(contents.measurements)
        case name:
            last = runs.index(run_named(runs, name)) if runs else 0
            first = 0 if runs and runs[last].resumes else last  # it goes on with all before it
            kept = [m for run in runs[first : last + 1] for m in run.measurements]
    if wanted.since:
        begin = _moment(wanted.since)
        kept = [m for m in kept if _moment(m.measured_at) >= begin]
    ids = set(map(id, kept))
    pairs = [pair for pair in zip(contents.measurements, contents.written_by) if id(pair[0]) in ids]
    return replace(
        contents,
        measurements=tuple(m for m, _ in pairs),
        written_by=tuple(index for _, index in pairs),
        notes=(*contents.notes, *notes),
    )


def run_named(runs: Sequence[RecordedRun], name: str) -> RecordedRun:
    """The run whose id begins so; "last" is the last that measured or resumed something. Raises BadUsage if not one."""
    if name == "last":
        return next((run for run in reversed(runs) if run.measurements or run.resumes), runs[-1])
    found = [run for run in runs if run.id.startswith(name)]
    if len(found) != 1:
        problem = f"--run {name}: {len(found)} runs have ids that begin so" if found else f"there is no run {name}"
        raise BadUsage(problem, f"one of {', '.join(run.id for run in runs)}" if runs else "an archive with runs")
    return found[0]


def _continued(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Runs that are read as one: one that resumes with all before it, and neighbours of which nothing is known."""
    groups: list[list[RecordedRun]] = []
    for run in runs:
        if run.resumes:
            groups = [[*(each for group in groups for each in group), run]]
        elif groups and not run.known and not groups[-1][-1].known:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _of_each_case(groups: Sequence[Sequence[RecordedRun]]) -> tuple[list[Measurement], list[str]]:
    """Of each case the measurements of the last group that has it, and notes. A gate is a case of its own."""
    measured = [(number, run, m) for number, group in enumerate(groups) for run in group for m in run.measurements]
    last: dict[str, int] = {}
    first: dict[str, str] = {}  # run of the group that counts
    pooled = False
    for number, run, m in measured:
        if m.paired is None:
            if last.get(m.key) != number:
                last[m.key], first[m.key] = number, run.id
            pooled |= not run.known and first[m.key] != run.id
    kept = [m for number, _, m in measured if m.paired is not None or last[m.key] == number]
    notes = [LEFT_OUT] if len(kept) < len(measured) else []
    return kept, notes + ([POOLED] if pooled else [])


def _moment(text: str) -> datetime:
    try:
        return moment(text)
    except ValueError:
        raise BadUsage(f"{text!r} is no date", "--since 2026-01-31, or 2026-01-31T12:00") from None
