"""`merge`: archives of several hosts, runs or processes as one file, each record once."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_slmserve.archive.merge import merge as merge_parts
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.commands.cli import FAILS, HOLDS, USAGE, Commands, add_command, print_notes
from pytest_slmserve.schema.errors import BadUsage, of_a_command
from pytest_slmserve.schema.files import is_file

STATUS = (
    f"{HOLDS} everything is in OUT; {FAILS} all but what the notes name; {USAGE} wrong usage or an archive that "
    "cannot be read."
)


def add(commands: Commands) -> None:
    command = add_command(commands, "merge", "make one archive of several, each record once", STATUS, merge)
    command.add_argument("paths", metavar="RECORDS", nargs="+", type=Path, help="an archive; it stays as it is")
    out = "the archive that they are added to, packed if it ends in .gz or .xz; made if it is not there"
    command.add_argument("--out", metavar="OUT", type=Path, required=True, help=out)


def merge(given: argparse.Namespace) -> int:
    for path in given.paths:
        if not is_file(path):  # or OUT would be made for nothing
            raise BadUsage(f"{path} is not there", "archives that --slm-records wrote")
    with of_a_command(BadUsage, records="--out"), Archive.open(given.out) as into:
        merged = merge_parts(given.paths, into)
    print_notes((*into.notes, *merged.notes))
    print(f"{given.out}: {merged.written} measurements added, {merged.known} were there")
    return FAILS if merged.notes else HOLDS
