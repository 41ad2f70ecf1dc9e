"""`asv`: what archives hold, as results of asv (airspeed velocity), to follow across releases of vLLM."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pytest_slmserve.analysis.points.sweep_points import concurrency_of
from pytest_slmserve.commands.cli import HOLDS, USAGE, Commands, add_archives, add_command
from pytest_slmserve.commands.report import read_all
from pytest_slmserve.report.export import asv as export
from pytest_slmserve.report.export import asv_files
from pytest_slmserve.report.export.asv import BenchmarkHost, Seen, Value, kind, release_of
from pytest_slmserve.report.export.asv_files import UNUSABLE, Commit, File
from pytest_slmserve.report.numbers import counted
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement

STATUS = f"{HOLDS} results were written, {USAGE} there was nothing to write, or wrong usage; nothing is changed then."
HINT = "--into with another folder"


def add(commands: Commands) -> None:
    words = "write results for asv, whose page shows one release of vLLM after the other (needs asv)"
    command = add_command(commands, "asv", words, STATUS, asv)
    add_archives(command, "RECORDS")
    folder = "that has the ledger of releases, and gets results/ (default: benchmarks/asv)"
    command.add_argument("--into", metavar="FOLDER", type=Path, default=Path("benchmarks/asv"), help=folder)
    name = "of the machine that was measured on (default: that of its GPU, or CPU)"
    command.add_argument("--machine", metavar="NAME", help=name)


def asv(given: argparse.Namespace) -> int:
    """A file for each release and machine, the machine's own, and the list of benchmarks."""
    asv_files.statistics()  # before what else may be missing: without them there is nothing to write
    contents = read_all(given)
    found = export.seen(contents.measurements)
    if not found:
        raise BadUsage("there is no valid measurement of a sweep of one engine", "records of --slm-gpu or --slm-cpu")
    places = export.values(found, checked_name(given.machine))
    ledger = read_ledger(given.into)
    commits = {place: commit_of(place.release, ledger, given.into) for place in places}
    written = write(given.into / "results", places, commits, machines(found, given.machine))
    for note in (*contents.notes, *notes(contents.measurements, found, given.machine)):
        print(f"note: {note}")
    for path, count in written.items():
        print(f"written: {path} ({counted(count, 'value')})")
    return HOLDS


def notes(measurements: Sequence[Measurement], found: Sequence[Seen], machine: str | None) -> Iterator[str]:
    """Notes on measurements left out, and on hosts whose launches were taken together."""
    if invalid := sum(concurrency_of(m) is not None for m in measurements) - len(found):
        yield f"left out: {counted(invalid, 'measurement')}, invalid"
    hosts: dict[tuple[str, str], set[str | None]] = {}
    for where in (each.measurement.environment for each in found):
        hosts.setdefault((release_of(where), machine or kind(where)), set()).add(where.host)
    for (release, name), several in hosts.items():
        if len(several) > 1:
            yield (
                f"vLLM {release} on {name}: launches of {len(several)} hosts are taken together; hosts of one kind "
                "can differ by some per cent"
            )


def machines(found: Sequence[Seen], machine: str | None) -> dict[str, Environment]:
    """Each by its name."""
    where = (each.measurement.environment for each in found)
    return {machine or kind(environment): environment for environment in where}


def checked_name(machine: str | None) -> str | None:
    """Returns the machine's name, which becomes the name of a folder. Raises BadUsage where it cannot be one."""
    if machine is not None and (machine != Path(machine).name or machine in ("", "..")):
        raise BadUsage(f"--machine {machine!r} is no name of a folder", "--machine gpu-runner-1")
    return machine


def read_ledger(folder: Path) -> dict[str, Commit]:
    """The commit of each release. Raises BadUsage where there is no ledger."""
    form = "--format=%(refname:strip=2) %(objectname) %(authordate:unix)"
    command = ["git", "--git-dir", str(folder / "ledger"), "for-each-ref", form, "refs/tags/v*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        make = f"python {folder / 'make_ledger.py'}, or --into with another folder"
        raise BadUsage(f"there is no ledger of releases in {folder}", make) from None
    rows = [line.split() for line in done.stdout.splitlines()]
    return {tag.removeprefix("v"): Commit(commit, int(at)) for tag, commit, at in rows}


def commit_of(release: str, ledger: Mapping[str, Commit], folder: Path) -> Commit:
    if release not in ledger:
        row = f'a row ["{release}", "YYYY-MM-DD"] at the end of {folder / "releases.json"}, then python '
        raise BadUsage(f"vLLM {release} has no row in the ledger", f"{row}{folder / 'make_ledger.py'}")
    return ledger[release]


def write(
    folder: Path,
    places: Mapping[BenchmarkHost, Sequence[Value]],
    commits: Mapping[BenchmarkHost, Commit],
    machines: Mapping[str, Environment],
) -> dict[Path, int]:
    """Number of values by the result file that got them. What is there is read before anything is written; a machine
    that is described already stays as it is."""
    there = {path: load(path) for path in folder.glob("*/*.json") if path.name != "machine.json"}
    made: dict[Path, File] = {}
    for place, values in places.items():
        path = folder / asv_files.path_of(place, commits[place])
        with readable(path):
            made[path] = asv_files.result_file(place, commits[place], values, there.get(path))
    descriptions = {folder / name / "machine.json": asv_files.machine_file(name, w) for name, w in machines.items()}
    listed = folder / "benchmarks.json"
    with readable(folder):
        benchmarks = asv_files.benchmarks_file((there | made).values(), load(listed) if listed.exists() else None)
    new = {path: file for path, file in descriptions.items() if not path.exists()}
    for path, file in {**new, **made, listed: benchmarks}.items():
        save(path, file)
    return {folder / asv_files.path_of(place, commits[place]): len(values) for place, values in places.items()}


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises BadUsage where what is there is not what asv or this command writes."""
    try:
        yield
    except UNUSABLE as error:
        raise BadUsage(f"{path} does not hold results of asv ({type(error).__name__}: {error})", HINT) from None


def load(path: Path) -> File:
    with readable(path):
        try:
            file: File = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise BadUsage(f"cannot read {path}: {error.strerror}", HINT) from None
        if not isinstance(file, dict):
            raise TypeError("no object")
    return file


def save(path: Path, file: File) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(file, separators=(",", ":")) + "\n", "utf-8")
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", HINT) from None
