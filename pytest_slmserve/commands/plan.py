"""`plan`: what a run would measure, in which order, on how many GPUs and for how long, before anything starts."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pytest_slmserve.commands.cli import PASSES, SUMMARIES, USAGE, Commands, Parser, say
from pytest_slmserve.options.table import OPTS

MODES = ("--slm-gpu", "--slm-cpu", "--slm-simulate")
SHIPPED = ("--pyargs", "pytest_slmserve.benchmarks")
QUIET = ("-q", "--no-header", "-p", "no:cacheprovider")
STATUS = (
    "Such as: slmserve plan --slm-gpu --slm-models=opt-1.3b. `pytest --help` has all options, in the "
    f"groups that begin with slmserve. Exit status: {PASSES} planned; {USAGE} wrong usage."
)


def add_plan(commands: Commands) -> None:
    text = SUMMARIES["plan"]
    words = "arguments as for pytest (default: --slm-gpu and the built-in benchmarks)"
    # No word is one of ours: all of them are pytest's.
    command = commands.add_parser(
        "plan", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=STATUS, prefix_chars="\0", add_help=False
    )
    command.add_argument("words", nargs="*", metavar="WORD", help=words)
    command.set_defaults(carry_out=partial(run_plan, command))


def run_plan(command: Parser, given: argparse.Namespace) -> int:
    """Let pytest collect the items that it would run, and print the plan. Starts no engine."""
    if {"-h", "--help"} & set(given.words):
        command.print_help()
        return PASSES
    words = with_tests(given.words)
    mode = [] if any(word in MODES for word in words) else [MODES[0]]
    command_line = [sys.executable, "-m", "pytest", *QUIET, *mode, "--slm-plan", *words]
    if sys.stdout.isatty():
        return subprocess.run(command_line, check=False).returncode
    done = subprocess.run(command_line, check=False, stdout=subprocess.PIPE, text=True)  # which pytest writes or fails
    say(done.stdout.removesuffix("\n"), sys.stdout)
    return done.returncode


def with_tests(words: Sequence[str]) -> list[str]:
    """Return words for pytest, followed by the built-in benchmarks unless some of them name tests: a path, or what
    follows `--pyargs`. Values of our options are put behind "=", because a path that stands alone is one of tests."""
    flags = {opt.flag for opt in OPTS if not opt.is_flag and not opt.bare}
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in flags:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    named = any(not word.startswith("-") and Path(word.partition("::")[0]).exists() for word in joined)
    return joined if named or "--pyargs" in joined else [*joined, *SHIPPED]
