"""`baseline accept|list|show`: the stored measurements that later runs are held against."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pytest_slmserve.analysis.compare.baseline import cells, served
from pytest_slmserve.archive import baselines
from pytest_slmserve.archive.baselines import Baseline, LeftOut
from pytest_slmserve.commands.cli import PASSES, USAGE, Commands, add_archives, add_command, print_notes
from pytest_slmserve.commands.report import read_all
from pytest_slmserve.report.as_json import as_json, facts
from pytest_slmserve.report.compare import days_of, measured_facts
from pytest_slmserve.report.text_table import ABSENT, Column, counted, figure, named, table
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import is_steady
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

ACCEPT_STATUS = f"{PASSES} something was kept; {USAGE} nothing was, wrong usage or an archive that cannot be read."
KEPT_IN = f"where baselines are kept (default: {baselines.FOLDER})"
STATUS = f"{PASSES} it was printed; {USAGE} wrong usage or an archive that cannot be read."
# What of the environment is shown, by the line it stands in.
LINES = {
    "device": (("", "gpu_name"), ("", "gpu_memory_bytes"), ("driver ", "driver")),
    "software": (("vLLM ", "vllm"), ("torch ", "torch"), ("CUDA ", "cuda"), ("Python ", "python")),
    "host": (("", "cpu"), ("cores: ", "cores"), ("", "operating_system"), ("", "host")),
}
COLUMNS = {
    "model": "model",
    "in flight": "in_flight",
    "ramp-up": "ramp_up",
    "window/s": "window_s",
    "in/out": "tokens",
    "repeats": "repeats",
    "launches": "launches",
    "tokens/s": "tokens_per_s",
}


def add(commands: Commands) -> None:
    words = "keep, list and show the measurements that later runs are held against"
    command = commands.add_parser("baseline", help=words, description=f"{words[0].upper()}{words[1:]}.")
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    words = "keep the valid measurements of archives as a baseline for each GPU (or platform) and release of vLLM"
    accept_ = add_command(actions, "accept", words, ACCEPT_STATUS, accept)
    add_archives(accept_, "RECORDS")
    accept_.add_argument("--into", metavar="FOLDER", type=Path, default=baselines.FOLDER, help=KEPT_IN)
    accept_.add_argument("--replace", action="store_true", help="overwrite a baseline of the same name")
    list_ = add_command(actions, "list", "name the baselines of a folder", STATUS, list_all)
    show_ = add_command(actions, "show", "print what one baseline holds", STATUS, show)
    where: dict[str, Any] = {"metavar": "FOLDER", "type": Path, "default": baselines.FOLDER, "help": KEPT_IN}
    list_.add_argument("folder", nargs="?", **where)
    show_.add_argument("name", metavar="NAME", help="as `baseline list` prints it, or the path of an archive")
    show_.add_argument("--from", dest="folder", **where)
    for each in (list_, show_):
        each.add_argument("--json", action="store_true", help="JSON instead of text")


def accept(given: argparse.Namespace) -> int:
    """Says what was kept where, and what was left out and why."""
    contents = read_all(given)
    kept, left_out = baselines.accept(contents.measurements, given.into, replace=given.replace, claims=contents.claims)
    for each in kept:
        kept_of = ", ".join(measured_facts(each.measurements)["models"])
        print(f"kept: {each.path}: {counted(len(each.measurements), 'measurement')} of {kept_of}")
        for line in _told(each.degraded):
            print(f"note: degraded, kept: {line}")
    for line in _told(left_out):
        print(f"left out: {line}")
    print_notes(contents.notes)
    return PASSES


def list_all(given: argparse.Namespace) -> int:
    """A line for each baseline; those that cannot be read too, with the reason."""
    found = baselines.baselines(given.folder)
    if given.json:
        print(as_json(map(_facts, found)))
        return PASSES
    columns: tuple[Column[Baseline], ...] = (
        Column("name", lambda each: each.name, "left"),
        Column("measured", lambda each: days_of(each.measurements) or ABSENT, "left"),
        Column("measurements", lambda each: str(len(each.measurements))),
        Column("launches", lambda each: str(measured_facts(each.measurements)["launches"])),
        Column("models", lambda each: ", ".join(measured_facts(each.measurements)["models"]), "left"),
    )
    rows = [each for each in found if each.measurements or not each.notes]
    print(table(rows, columns, always=len(columns)) if rows else f"no baseline in {given.folder}")
    print_notes(note for each in found for note in each.notes)
    return PASSES


def show(given: argparse.Namespace) -> int:
    """Models, loads, repeats, launches, dates and environment of one baseline."""
    found = baselines.baseline(given.folder, given.name)
    if given.json:
        print(as_json({**_facts(found), "loads": _rows(found.measurements)}))
    else:
        print(_page(found))
    return PASSES


def _page(found: Baseline) -> str:
    rows, seen = _rows(found.measurements), measured_facts(found.measurements)
    launches, hosts = counted(seen["launches"], "launch"), counted(len(seen["hosts"]), "host")
    count, days = counted(seen["measurements"], "measurement"), days_of(found.measurements) or ABSENT
    head = f"{found.name}: {count}, {launches}, {hosts}, measured {days}"
    about = [(name, _line(found.measurements, line) or ABSENT) for name, line in LINES.items()]

    def column(head: str, key: str) -> Column[dict[str, Any]]:
        side: Literal["left", "right"] = "left" if key in ("model", "ramp_up") else "right"
        return Column(head, lambda row: figure(v) if isinstance(v := row[key], float) else str(v), side)

    columns = [column(*pair) for pair in COLUMNS.items()]
    others = len(found.measurements) - sum(row["measured"] for row in rows)
    missing = f"{others} of loads without a window, or of engines among several of which some are missing"
    notes = [*found.notes, *([missing] if others else [])]
    text = [head, named(about), "", table(rows, columns, always=len(columns))]
    return "\n".join([*text, *(f"note: {note}" for note in notes)])


def _facts(found: Baseline) -> dict[str, Any]:
    """Facts on a baseline for JSON. measured: when, first and last."""
    seen, names = found.measurements, [name for line in LINES.values() for _, name in line]
    return {
        **facts(found, "name", "path", "notes"),
        **{name: measured_facts(seen)[name] for name in ("measurements", "launches", "models")},
        "measured": sorted(m.measured_at for m in seen)[:: max(len(seen) - 1, 1)],
        "environment": {name: _values(seen, name) for name in names},
    }


def _rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """A row for each model and load. repeats: the valid ones, of those measured."""
    rows = []
    for cell, group in cells(measurements).items():
        point, load, workload = served(cell, group), cell.loads[0], group[0].workload
        assert is_steady(load)
        rows.append(
            {
                "model": cell.engines,
                "in_flight": cell.concurrency,
                "ramp_up": load.ramp_up,
                "window_s": load.window_s,
                "tokens": f"{workload.mean_prompt_tokens:.0f}/{workload.mean_output_tokens:.0f}",
                "measured": len(group),
                "repeats": len(point.repeats),
                "launches": measured_facts(group)["launches"],
                "tokens_per_s": point.output_tokens_per_s,
            }
        )
    return sorted(
        rows, key=lambda row: (row["model"], row["ramp_up"], row["tokens"], row["window_s"], row["in_flight"])
    )


def _told(left_out: Iterable[LeftOut]) -> list[str]:
    """A line for each load and reason, with how often."""

    def title(each: LeftOut) -> str:
        m = each.measurement
        return f"{short_name(m.spec.model)} at {m.load.title}: {each.why}"

    lines = [(text, len(list(group))) for text, group in groupby(sorted(map(title, left_out)))]
    return [f"{text}{f' ({count} times)' if count > 1 else ''}" for text, count in lines]


def _line(measurements: Sequence[Measurement], facts: Iterable[tuple[str, str]]) -> str:
    """Known facts on one line, several values of one fact beside each other."""
    told = []
    for words, name in facts:
        values = _values(measurements, name)
        if name == "gpu_memory_bytes":
            values = [f"{size / GIB:.0f} GiB" for size in values]
        told += [f"{words}{' and '.join(map(str, values))}"] if values else []
    return ", ".join(told)


def _values(measurements: Iterable[Measurement], name: str) -> list[Any]:
    """The distinct values of one entry of the environment, in the order met; none where it is not known."""
    seen = (getattr(m.environment, name) for m in measurements)
    return list(dict.fromkeys(value for value in seen if value is not None))
