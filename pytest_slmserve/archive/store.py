"""Results files: measurements as lines of JSON, each on disk at once; packed by the suffix `.gz` or `.xz`.

A line is an object with a `kind` and its CRC-32. `session` begins a run and has the format, the parameters of the
claims and the plan; `engine` describes a launch before its first measurement; `measurement` has the columns of one run.
Other kinds and unknown fields are ignored.

If a results file cannot be written any more, or is not at its path, the run continues in a second file, with all its
earlier measurements. Each write to a packed file is a separate piece, so it can be read after a kill.
"""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import re
import secrets
import tempfile
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.archive.codec import converted, engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.archive.lines import (
    FIRST,
    PACKINGS,
    SEAL,
    ArchiveLines,
    archives_in,
    facts_of,
    line_of,
    not_an_archive,
    unreadable,
    unsealed,
)
from pytest_slmserve.archive.shelf import SHELF
from pytest_slmserve.schema.errors import (
    UNUSABLE,
    BadArchive,
    BadUsage,
    regular,
    single,
    try_lock,
    write_file,
)
from pytest_slmserve.schema.records import Environment, Measurement, Resolved, moment
from pytest_slmserve.schema.specs import EngineSpec, short_hash
from pytest_slmserve.telemetry.host import own_version

OWN = ".slm"


def make_folder(folder: Path) -> None:
    """Create a folder with its parents; in a new `.slm` folder, git ignores everything."""
    own = next((each for each in (folder, *folder.parents) if each.name == OWN), None)
    is_new = own is not None and not own.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if own and is_new:
        write_file(own / ".gitignore", "*\n")


# 3: names as in the code, models, a checksum for each line. 2: timestamps are ticks of a clock. Increase it only if an
# older release would misread the file.
FORMAT = 3

ANOTHER = "Choose another path with --slm-records."

BULK = b'{"kind":"measurement"'
_RUN = b',"run":{'  # the last entry of a measurement, and nearly all of it
_NUMBERS = re.compile(rb"\[[-0-9,nultrefas]*\]")  # and null, true, false
_DAMAGE = (BadUsage, *UNUSABLE)
MOST_TOLD = 100  # reported damaged lines of one file
MERGED = 1 << 24  # bytes of one write in a merge


ID_DIGITS = 8


@dataclass(frozen=True, slots=True)
class RunHeader:
    """Header of one run in a results file.

    Attributes:
        started: ISO 8601, UTC.
        known: False if an older release wrote no ID, which is then derived from the start.
    """

    format: int
    started: str
    pytest_slmserve: str | None
    claims: Mapping[str, Any]
    plan: Mapping[str, Any]
    id: str = ""
    resumes: bool = False
    known: bool = True

    @property
    def command(self) -> str:
        """Command of the run, or "" if it is not known."""
        return str(self.plan.get("command", ""))


# Header of measurements before the first one.
BEFORE_ALL = RunHeader(FORMAT, "", None, {}, {}, id=short_hash([""])[:ID_DIGITS], known=False)


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a results file: measurements with their runs, in the order written, and notes on unusable parts."""

    measured: tuple[tuple[Measurement, RunHeader], ...] = ()
    sessions: tuple[RunHeader, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return tuple(m for m, _ in self.measured)

    @property
    def claims(self) -> Mapping[str, Any]:
        """Parameters of the claims in the last run that had some."""
        return next((session.claims for session in reversed(self.sessions) if session.claims), {})

    @property
    def plans(self) -> list[tuple[str, Mapping[str, Any]]]:
        return [(session.started, session.plan) for session in self.sessions]


class Archive(AbstractContextManager["Archive"]):
    """Results file that one run has open for appending; made by `Archive.open`.

    Attributes:
        notes: repairs at the opening.
        moved: why and where the run continues in a second file.
        lost: why a measurement could not be written anywhere.
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
        """Open or create a results file; a torn end, which would damage the next line, is moved to `<name>.torn`.

        Args:
            moves: continue in a second file if writing fails.

        Raises:
            BadUsage: if it cannot be written, another run writes to it, or a package is missing.
            BadArchive: if it is something else, or of another format.
        """
        path = Path(path)
        try:
            import msgspec  # noqa: F401 - before an engine starts, not after its first measurement
        except ImportError:
            raise BadUsage("results files need the package msgspec", "pip install msgspec") from None
        try:
            make_folder(path.parent)
            file = open(path, "ab+", buffering=0, opener=regular)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            _cannot_write(path, error)
        try:
            if not try_lock(file):
                raise BadUsage(
                    f"another run is writing to {path}",
                    "Wait until it ends, or choose another path with --slm-records.",
                )
            with open(path, "rb", opener=regular) as stored:
                lines = ArchiveLines(path, stored)
                # Raises if the file is not ours, or has another format.
                scan(path, (line for line in lines if not line or not line.startswith(BULK)))
                stored.seek(lines.whole)
                torn_bytes = stored.read()
            if not torn_bytes:
                return cls(path, file, moves=moves)
            aside = path.with_name(f"{path.name}.torn")
            with open(aside, "ab", buffering=0, opener=single) as torn:
                _append(torn, torn_bytes)
            file.truncate(lines.whole)
            note = f"{torn_end(lines)}; these {len(torn_bytes)} bytes were moved to {aside}"
            return cls(path, file, (note,), moves=moves)
        except BaseException as error:
            file.close()
            if isinstance(error, OSError):
                _cannot_write(Path(error.filename or path), error)
            raise

    def begin(self, claims: Mapping[str, Any], plan: Mapping[str, Any], *, resumes: bool = False) -> None:
        """Write the header of a run.

        Args:
            resumes: the run continues the earlier ones in the file.
        """
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

    def add(self, m: Measurement) -> Measurement:
        """Write a measurement to disk, if necessary in a second file, and return it as it will be read.

        Raises:
            BadArchive: if it could not be read again; it is then not written.
            BadUsage: if no file can be written.
        """
        try:
            engine = line_of(engine_line(m.launch, m.spec, m.resolved, m.environment))
            line, found = line_of(measurement_line(m)), ScannedLines()
            decode(found, engine)
            decode(found, line)
            [(read, _)] = found.measured
        except _DAMAGE as error:
            why = f"a measurement is not written, for no reader would take it: it {_what(error)}"
            raise BadArchive(why, "Report this message as a bug.") from None
        try:
            if self._session is None:
                self.begin({}, {})
            described = (m.spec.key, m.resolved, m.environment)  # of specs False and 0 are equal
            self._append([line if self._engines.get(m.launch) == described else engine + line])
            self._engines[m.launch] = described
        except BadUsage as error:
            self._move(error.problem, m)
        self._added.append(replace(m, run=read.run))
        return self._added[-1]

    def _move(self, why: str, *last: Measurement) -> None:
        if not self._moves or self.moved:
            raise BadUsage(why, ANOTHER)
        for folder in (Path(tempfile.gettempdir()), self.path.parent, Path.home()):
            second = None
            try:
                descriptor, name = tempfile.mkstemp(".jsonl", "pytest-slmserve-rescued-", folder)
                os.close(descriptor)
                file = open(name, "ab+", buffering=0, opener=single)  # noqa: SIM115 - closed by `close`
                second = Archive(Path(name), file)
                second._append([self._session] if self._session else [])
                second._session = self._session
                for measurement in (*self._added, *last):
                    second.add(measurement)
            except BaseException as error:
                if second:
                    second._file.close()
                    second.path.unlink(missing_ok=True)
                if isinstance(error, (OSError, BadUsage)):
                    continue
                raise
            self._file.close()
            self.path, self._file, self._size, self._engines = second.path, second._file, second._size, second._engines
            self.moved = (
                f"{why}; all measurements of this run are in {second.path} "
                f"(--slm-resume={second.path} goes on with them)"
            )
            return
        self.lost = f"{why}, and no second file can be written"
        self.check_writable()

    def check_writable(self) -> None:
        """Raise BadUsage if a measurement was lost, because the next one would be, too."""
        if self.lost:
            raise BadUsage(self.lost, ANOTHER)

    def _append(self, pieces: Iterable[bytes]) -> None:
        match self.path.suffix:
            case ".gz":
                pieces = [gzip.compress(piece, mtime=0) for piece in pieces]
            case ".xz":
                pieces = map(lzma.compress, pieces)
        try:
            self._check_there()
            _append(self._file, b"".join(pieces))
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            _cannot_write(self.path, error)

    def _check_there(self) -> None:
        """Raise OSError if the path names another file than the open one, or if this one was shortened."""
        there, ours = self.path.stat(), os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise OSError(errno.ESTALE, "another file was put in its place")
        if self._size is not None and ours.st_size < self._size:
            raise OSError(errno.ESTALE, "it was made shorter")

    def close(self) -> None:
        """Close the file. If it was replaced or shortened, all measurements of the run go to a second file."""
        if self._file.closed:
            return
        try:
            if self._moves and self._added and not self.moved:
                self._check_there()
        except OSError as error:
            with suppress(BadUsage):
                self._move(f"cannot write to {self.path}: {error.strerror}")
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: str | Path, *, skip_damaged: bool = False) -> Contents:
    """Return the contents of a results file, or of all in an HTML report. A torn end only makes a note.

    Args:
        skip_damaged: make only a note of damaged lines.

    Raises:
        BadArchive: if the file is unreadable, something else, damaged or of another format.
    """
    each = [contents for _, contents in read_each(path, skip_damaged=skip_damaged)]
    return each[0] if len(each) == 1 else as_one(each)


def as_one(archives: Sequence[Contents]) -> Contents:
    """Return the contents of several results files: each measurement once, and runs in the order of their start."""
    measured: dict[str, tuple[Measurement, RunHeader]] = {}
    for m, run in chain.from_iterable(contents.measured for contents in archives):
        measured.setdefault(m.id, (m, run))
    return Contents(
        tuple(measured.values()),
        tuple(sorted((run for each in archives for run in each.sessions), key=lambda session: session.started)),
        tuple(dict.fromkeys(note for each in archives for note in each.notes)),
    )


def read_each(path: str | Path, *, skip_damaged: bool = False) -> list[tuple[Path, Contents]]:
    """Return the contents of a results file, or of each in an HTML report, with their paths."""
    found = []
    for name, file in archives_in(Path(path)):
        lines = ArchiveLines(name, file)
        seen = scan(name, lines)
        damaged = seen.told_damage()
        if damaged and not skip_damaged:
            more = f" (and {seen.damaged_lines - 1} more)" if seen.damaged_lines > 1 else ""
            raise BadArchive(f"{name}: {damaged[0]}{more}", "Add --skip-damaged to continue without the damaged lines.")
        notes = [f"{name}: skipped: {what}" for what in damaged]
        if not lines.size:
            notes.append(f"{name} is empty")
        elif lines.whole < lines.size:
            notes.append(f"{torn_end(lines)}; measurements used: {len(seen.measured)}")
        found.append((name, Contents(tuple(seen.measured), tuple(seen.sessions), tuple(notes))))
    return found


def embedded(path: Path) -> list[tuple[str, str]]:
    """Return the results file at a path, or those in an HTML report, as names and bytes in base64, packed."""
    found = []
    for archive, file in archives_in(path):
        try:
            file.seek(0)
            name, raw = archive.name, file.read()
        except OSError as error:
            raise unreadable(archive, error) from None
        if archive.suffix not in PACKINGS:
            name, raw = f"{name}.gz", gzip.compress(raw[: raw.rfind(b"\n") + 1], 6, mtime=0)
        found.append((name, b64encode(raw).decode()))
    return found


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


@dataclass(slots=True)
class ScannedLines:
    sessions: list[RunHeader] = field(default_factory=list)
    engines: dict[str, tuple[EngineSpec, Resolved, Environment]] = field(default_factory=dict)
    measured: list[tuple[Measurement, RunHeader]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    damaged_lines: int = 0

    def note_damage(self, what: str) -> None:
        self.damaged_lines += 1
        if len(self.damaged) < MOST_TOLD:
            self.damaged.append(what)

    def told_damage(self) -> list[str]:
        """Return a sentence for each damaged line, and one for those beyond MOST_TOLD."""
        more = self.damaged_lines - len(self.damaged)
        return [*self.damaged, *([f"{more} more lines"] if more else [])]


def scan(path: Path, lines: Iterable[bytes | None], *, columns: bool = True) -> ScannedLines:
    """Decode the lines of a results file; None is an unreadable piece.

    Raises:
        BadArchive: if a run has another format, or no line belongs to a results file.
    """
    found = ScannedLines()
    for _ in scanned(path, lines, found, columns=columns):
        pass
    return found


def scanned(
    path: Path, lines: Iterable[bytes | None], found: ScannedLines, *, columns: bool = True
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each undamaged line with its facts, after decoding it into `found`; see `scan`."""
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            if line is None:
                raise ValueError("cannot be unpacked")
            facts = decode(found, line, columns=columns)
        except _DAMAGE as error:
            found.note_damage(f"line {number} {_what(error)}")
            continue
        if found.sessions and (other := found.sessions[-1].format) != FORMAT:
            if other > FORMAT:
                problem = f"{path} was written by a newer release (format {other}; this one reads format {FORMAT})"
                raise BadArchive(problem, "pip install --upgrade pytest-slmserve")
            problem = f"{path} has format {other}, and this release reads format {FORMAT}"
            raise BadArchive(problem, f"Run python studies/migrate.py {path} NEW.jsonl in a clone of pytest-slmserve.")
        yield line, facts
    if number and not (found.sessions or found.engines or found.measured):
        raise not_an_archive(path, *found.damaged[:1])


def torn_end(lines: ArchiveLines) -> str:
    return f"{lines.path}: line {lines.count + 1} ends early, as when a run is killed while it writes"


def _what(error: Exception) -> str:
    import msgspec

    if isinstance(error, KeyError):
        return f"has no entry {error}"
    is_json = isinstance(error, msgspec.ValidationError)  # a subclass of the next
    if not is_json and isinstance(error, (msgspec.DecodeError, UnicodeDecodeError)):
        return f"is not JSON ({error})"
    return f"cannot be used ({error.problem if isinstance(error, BadUsage) else error})"


def decode(found: ScannedLines, line: bytes, *, columns: bool = True) -> dict[str, Any]:
    """Decode one line into `found`, and return its facts. Raise one of _DAMAGE for a damaged line.

    Args:
        columns: if False, only check a measurement's checksum, engine and form.
    """
    sealed_otherwise = line.startswith(FIRST) and not SEAL.search(line)  # as in other formats
    body = line if sealed_otherwise or not line.strip() else unsealed(line)
    checked_only = not columns and line.startswith(BULK)
    facts = facts_of(_NUMBERS.sub(b"[]", body) if checked_only else body)
    match facts["kind"]:
        case "session":
            # Another format may have other fields, so only its number is read.
            is_ours = converted(int, facts["format"]) == FORMAT
            session = converted(RunHeader, facts) if is_ours else RunHeader(facts["format"], "", None, {}, {})
            if is_ours and sealed_otherwise:
                unsealed(line)  # which raises
            if not session.id:
                session = replace(session, id=short_hash([session.started])[:ID_DIGITS], known=False)
            found.sessions.append(session)
        case "engine":
            found.engines[facts["id"]] = engine_from_record(facts)
        case "measurement":
            if facts["engine"] not in found.engines:
                raise ValueError(f"no line before it describes its engine {facts['engine']!r}")
            if checked_only:
                if not isinstance(facts["run"], dict):
                    raise ValueError("its run is no object")
                return facts
            m, before = measurement_of(facts, *found.engines[facts["engine"]]), [*reversed(found.sessions), BEFORE_ALL]
            SHELF.put(m.run, body)
            # The last run before it that had begun by then, because merged files have lines of other runs in between.
            run = next((run for run in before[:-1] if run.started <= m.measured_at), before[0])
            found.measured.append((m, run))
    return facts


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge: new and known measurements, and notes on unusable lines."""

    written: int = 0
    known: int = 0
    notes: tuple[str, ...] = ()


def merge(parts: Iterable[Path], into: Archive) -> Merged:
    """Add measurements and runs that are missing in `into`. Damaged lines and torn ends only make notes.

    Raises:
        BadArchive: if a part is unreadable, something else or of another format.
    """
    seen, engines = set[bytes](), dict[str, bytes]()  # heads of known lines, and the line of each launch

    def others(lines: Iterable[bytes | None]) -> Iterator[bytes]:
        for line in filter(None, lines):
            seen.add(line.partition(_RUN)[0])
            if not line.startswith(BULK):
                yield line

    for name, file in archives_in(into.path):
        for line, facts in scanned(name, others(ArchiveLines(name, file)), ScannedLines()):
            if facts["kind"] == "engine":
                engines[facts["id"]] = line
    written, known, notes = 0, 0, list[str]()
    for part in parts:
        for name, file in () if part.samefile(into.path) else archives_in(part):
            lines, found, own, pieces = ArchiveLines(name, file), ScannedLines(), dict[str, bytes](), list[bytes]()
            waiting = 0
            into._engines.clear()  # the lines may describe a launch again
            for line, facts in scanned(name, lines, found, columns=False):
                if facts["kind"] == "engine":  # added with its first measurement
                    own[facts["id"]] = line
                    continue
                head, added = line.partition(_RUN)[0], [line]
                if facts["kind"] == "measurement":
                    known, written, launch = known + (head in seen), written + (head not in seen), facts["engine"]
                    if head not in seen and engines.get(launch) != own[launch]:
                        added, engines[launch] = [own[launch], line], own[launch]
                if head not in seen and facts["kind"] is not None:
                    seen.add(head)
                    pieces.append(b"".join(each + b"\n" for each in added))
                    waiting += len(pieces[-1])
                if waiting > MERGED:
                    into._append(pieces)
                    pieces, waiting = [], 0
            into._append(pieces)
            notes += [f"{name}: not merged: {what}" for what in found.told_damage()]
            notes += [torn_end(lines)] if lines.whole < lines.size else []
    return Merged(written, known, tuple(notes))


LEFT_OUT = (
    "several runs measured the same cases, and only the last run counts: `report --list` names the runs, --run all "
    "pools them"
)
POOLED = (
    "several runs measured the same cases and are pooled: this older results file does not say which resumed; "
    "`report --list` names them, --run ID separates"
)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Run of a results file with its measurements; one that resumes continues all earlier ones."""

    header: RunHeader
    measurements: tuple[Measurement, ...]


def runs_of(contents: Contents) -> tuple[RecordedRun, ...]:
    """Return the runs in the order written, including empty ones; measurements before the first header are one run."""
    measured = grouped(contents.measured, lambda pair: pair[1].id)
    headers = {BEFORE_ALL.id: BEFORE_ALL} if BEFORE_ALL.id in measured else {}
    for session in contents.sessions:
        headers.setdefault(session.id, session)
    return tuple(RecordedRun(run, tuple(m for m, _ in measured.get(run.id, ()))) for run in headers.values())


def chosen(contents: Contents, run: str = "", since: str = "") -> Contents:
    """Return the contents with only the chosen measurements, and a note if runs were left out or pooled.

    Args:
        run: ID or its beginning, "last" or "all"; "" for the last run that measured each case.
        since: ISO 8601; earlier measurements are left out.
    """
    runs = runs_of(contents)
    notes: list[str] = []
    match run:
        case "":
            kept, notes = _last_of_each_case(runs)
        case "all":
            kept = list(contents.measurements)
        case _:
            last = runs.index(run_named(runs, run)) if runs else 0
            first = 0 if runs and runs[last].header.resumes else last  # it continues all earlier runs
            kept = [m for each in runs[first : last + 1] for m in each.measurements]
    if since:
        begin = _moment(since)
        kept = [m for m in kept if _moment(m.measured_at) >= begin]
    ids = set(map(id, kept))
    measured = tuple(pair for pair in contents.measured if id(pair[0]) in ids)
    return replace(contents, measured=measured, notes=(*contents.notes, *notes))


def run_named(runs: Sequence[RecordedRun], name: str) -> RecordedRun:
    """Return the run whose ID begins like this, or for "last" the last run that measured or resumed something."""
    if name == "last":
        return next((run for run in reversed(runs) if run.measurements or run.header.resumes), runs[-1])
    found = [run for run in runs if run.header.id.startswith(name)]
    if len(found) != 1:
        problem = f"--run {name}: {len(found)} runs have ids that begin so" if found else f"there is no run {name}"
        hint = f"Use one of {', '.join(run.header.id for run in runs)}." if runs else "Pass a results file with runs."
        raise BadUsage(problem, hint)
    return found[0]


def _last_of_each_case(runs: Sequence[RecordedRun]) -> tuple[list[Measurement], list[str]]:
    """Return the measurements of each case in the last group of runs that measured it, and notes."""
    # A run that resumes is in one group with all runs before it, and so are neighbors without IDs.
    groups: list[list[RecordedRun]] = []
    for run in runs:
        if run.header.resumes:
            groups = [[*chain.from_iterable(groups), run]]
        elif groups and not run.header.known and not groups[-1][-1].header.known:
            groups[-1].append(run)
        else:
            groups.append([run])
    measured = [(number, run, m) for number, group in enumerate(groups) for run in group for m in run.measurements]
    last: dict[str, tuple[int, RecordedRun]] = {}  # number of the group that counts, and its first run
    pooled = False
    for number, run, m in measured:
        if m.paired is None:  # all measurements of gates are kept
            if m.key not in last or last[m.key][0] != number:
                last[m.key] = number, run
            pooled |= not run.header.known and last[m.key][1] is not run
    kept = [m for number, _, m in measured if m.paired is not None or last[m.key][0] == number]
    return kept, ([LEFT_OUT] if len(kept) < len(measured) else []) + ([POOLED] if pooled else [])


def _moment(text: str) -> datetime:
    try:
        return moment(text)
    except ValueError:
        raise BadUsage(f"{text!r} is not a date", "--since 2026-01-31, or --since 2026-01-31T12:00") from None
