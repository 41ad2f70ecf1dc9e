"""`plan`: what a run would measure, in which order, on how many GPUs and for how long, before anything starts."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pytest_slmserve.commands.cli import PASSES, USAGE, Commands, Parser
from pytest_slmserve.options.table import OPTS

MODES = ("--slm-gpu", "--slm-cpu", "--slm-simulate")
SHIPPED = ("--pyargs", "pytest_slmserve.benchmarks")
QUIET = ("-q", "--no-header", "-p", "no:cacheprovider")
STATUS = (
    "Such as: slmserve plan --slm-gpu --slm-models=opt-1.3b. `pytest --help` has all options, in the "
    f"groups that begin with slmserve. Exit status: {PASSES} planned; {USAGE} wrong usage."
)


def add(commands: Commands) -> None:
    text = "print what a run would measure, in which order, on how many GPUs and for how long"
    words = "what would be typed after pytest; without a mode --slm-gpu, without a path the shipped benchmarks"
    # No word is one of ours: all of them are pytest's.
    command = commands.add_parser(
        "plan", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=STATUS, prefix_chars="\0", add_help=False
    )
    command.add_argument("words", nargs="*", metavar="WORD", help=words)
    command.set_defaults(carry_out=partial(plan, command))


def plan(command: Parser, given: argparse.Namespace) -> int:
    """pytest collects the cells, so that they are those that it would run; nothing is started."""
    if {"-h", "--help"} & set(given.words):
        command.print_help()
        return PASSES
    done = subprocess.run([sys.executable, "-m", "pytest", *QUIET, *words_of(given.words)], check=False)
    return done.returncode


def words_of(words: Sequence[str]) -> list[str]:
    words = _joined(words)
    mode = [] if any(word in MODES for word in words) else [MODES[0]]
    named = any(not word.startswith("-") and Path(word.partition("::")[0]).exists() for word in words)
    return [*mode, "--slm-plan", *words, *([] if named or "--pyargs" in words else SHIPPED)]


def _joined(words: Sequence[str]) -> list[str]:
    """Words in which the value of each of our options stands behind "=": a path that stands alone is one of tests."""
    flags = {opt.flag for opt in OPTS if not opt.is_flag and not opt.bare}
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in flags:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
