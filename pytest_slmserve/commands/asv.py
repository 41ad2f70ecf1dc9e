"""`asv init|convert`: measurements as results of asv (airspeed velocity), to follow releases of vLLM."""

import argparse
import json
import subprocess
from pathlib import Path

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.points import concurrency_of
from pytest_slmserve.commands.cli import PASSES, SUMMARIES, USAGE, Commands, add_archives, add_command, print_notes
from pytest_slmserve.commands.report import read_all
from pytest_slmserve.report.export import asv as export
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.schema.errors import UNUSABLE, BadUsage, content

STATUS = f"{PASSES} results were written; {USAGE} there was nothing to write, or wrong usage; nothing is changed then."
INIT_STATUS = f"{PASSES} the folder is ready; {USAGE} its list of releases is not usable, or git is missing."
HINT = "--into with another folder"


def add_asv(commands: Commands) -> None:
    words = "Follow releases of vLLM on a page of asv, from records that are there already (needs asv and git)."
    command = commands.add_parser("asv", help=SUMMARIES["asv"], description=words)
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    words = "make a folder for asv, or bring it up to date: its configuration and the releases of vLLM"
    init_ = add_command(actions, "init", INIT_STATUS, init_asv, words)
    words = "write results for asv, beside those that other archives gave"
    convert_ = add_command(actions, "convert", STATUS, convert_to_asv, words)
    add_archives(convert_, "RECORDS")
    for each in (init_, convert_):
        folder = "folder of asv, with the releases and results/ (default: benchmarks/asv)"
        each.add_argument("--into", metavar="FOLDER", type=Path, default=Path("benchmarks/asv"), help=folder)
    name = "name of the machine that was measured on (default: that of its GPU, or CPU)"
    convert_.add_argument("--machine", metavar="NAME", help=name)


def init_asv(given: argparse.Namespace) -> int:
    """Write the files that are missing, add new releases to the list, and make the repository of all."""
    folder: Path = given.into
    listed, repository, files = folder / export.RELEASES, folder / export.REPOSITORY, export.initial_files()
    try:
        own = export.releases_in(listed.read_text("utf-8")) if listed.exists() else []
        shipped = export.releases_in(files[export.RELEASES])
        rows = shipped if shipped[: len(own)] == own else own
        folder.mkdir(parents=True, exist_ok=True)
        added = export.make_repository(repository, rows)
        new = {name: text for name, text in files.items() if not (folder / name).exists()}
        if rows != own:
            new[export.RELEASES] = export.releases_text(rows)
        for name, text in new.items():
            (folder / name).write_text(text, "utf-8")
            print(f"written: {folder / name}")
    except (ValueError, TypeError) as error:
        raise BadUsage(f"{listed}: {error}", 'rows such as ["0.26.0", "2026-07-25"], new ones at the end') from None
    except subprocess.CalledProcessError as error:
        raise BadUsage(f"git cannot make {repository}: {error.stderr.strip()}", HINT) from None
    except OSError as error:
        raise BadUsage(f"cannot make {folder}: {error.strerror or error} ({error.filename})", HINT) from None
    print(f"{repository}: {counted(len(rows), 'release')}, {added} added")
    return PASSES


def convert_to_asv(given: argparse.Namespace) -> int:
    """Write a result file for each release and machine, the machine's own, and the list of benchmarks. Notes tell of
    measurements left out, and of hosts whose launches were taken together."""
    export.statistics()  # before what else may be missing: without them there is nothing to write
    contents = read_all(given)
    found = export.steady_measurements(contents.measurements)
    if not found:
        raise BadUsage("there is no valid measurement of a sweep of one engine", "records of --slm-gpu or --slm-cpu")
    name = given.machine  # it becomes the name of a folder
    if name is not None and (name != Path(name).name or name in ("", "..")):
        raise BadUsage(f"--machine {name!r} is no name of a folder", "--machine gpu-runner-1")
    measured, commits = export.values(found, name), export.release_commits(given.into)
    for release in (place.release for place in measured if place.release not in commits):
        row = f'a row ["{release}", "YYYY-MM-DD"] at the end of {given.into / export.RELEASES}'
        hint = f"{row}, then slmserve asv init --into {given.into}"
        raise BadUsage(f"vLLM {release} is not in the repository of releases", hint)
    notes, folder = list(contents.notes), given.into / "results"
    if invalid := sum(concurrency_of(m) is not None for m in contents.measurements) - len(found):
        notes.append(f"left out: {counted(invalid, 'measurement')}, invalid")
    places = grouped([m.environment for m in found], lambda e: (export.indexed_release(e), name or export.kind(e)))
    files: dict[Path, export.File] = {}  # to be written
    for (release, machine), alike in places.items():
        if (hosts := len({each.host for each in alike})) > 1:
            together = f"vLLM {release} on {machine}: launches of {hosts} hosts are taken together"
            notes.append(f"{together}; hosts of one kind can differ by some per cent")
        if not (path := folder / machine / "machine.json").exists():
            known = {"cpu": alike[-1].cpu, "gpu": alike[-1].gpu_name, "num_cpu": alike[-1].cores}
            told = {key: str(value) for key, value in known.items() if value is not None}
            files[path] = {"machine": machine, "version": 1, **told}
    written = {folder / place.path(commits[place.release]): (place, rows) for place, rows in measured.items()}
    listed = folder / "benchmarks.json"
    try:  # all that is there is read before anything is written
        there: dict[Path, export.File] = {}
        for path in [*(each for each in folder.glob("*/*.json") if each.name != "machine.json"), listed]:
            if path.exists():
                there[path] = json.loads(content(path))
                if not isinstance(there[path], dict):
                    raise TypeError("no object")
        benchmarks = there.pop(listed, None)
        for path, (place, rows) in written.items():
            there[path] = files[path] = export.result_file(place, commits[place.release], rows, there.get(path))
        path = folder
        files[listed] = export.benchmarks_file(there.values(), benchmarks)
    except UNUSABLE as error:
        raise BadUsage(f"{path} does not hold results of asv ({type(error).__name__}: {error})", HINT) from None
    except OSError as error:
        raise BadUsage(f"cannot read {path}: {error.strerror}", HINT) from None
    try:
        for path, file in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(file, separators=(",", ":")) + "\n", "utf-8")
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", HINT) from None
    print_notes(notes)
    for path, (_, rows) in written.items():
        print(f"written: {path} ({counted(sum(map(len, rows.values())), 'value')})")
    return PASSES
