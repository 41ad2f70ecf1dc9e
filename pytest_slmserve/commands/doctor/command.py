"""`doctor`: what this host can measure, and what would spoil it."""

from __future__ import annotations

import argparse

from pytest_slmserve.commands.cli import FAILS, HOLDS, USAGE, Commands, add_command

STATUS = f"{HOLDS} nothing is a problem, {FAILS} something is, {USAGE} wrong usage."


def add(commands: Commands) -> None:
    words = "say what this host can measure, and what would spoil it"
    command = add_command(commands, "doctor", words, STATUS, doctor)
    names = "an interpreter that may have vLLM; may be given again (default: the one that runs this)"
    command.add_argument("--python", metavar="PATH", action="append", default=[], help=names)


def doctor(given: argparse.Namespace) -> int:
    from pytest_slmserve.commands.doctor import page

    return page.doctor(given.python)
