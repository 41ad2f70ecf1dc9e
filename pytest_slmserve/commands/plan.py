"""`plan` command: print what a run would measure, in which order, on how many GPUs and for how long."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pytest_slmserve.commands.cli import PASSES, SUMMARIES, USAGE, Commands, Parser, say
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.schema.errors import BadUsage, single

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
    # All words are arguments of pytest.
    command = commands.add_parser(
        "plan", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=STATUS, prefix_chars="\0", add_help=False
    )
    command.add_argument("words", nargs="*", metavar="WORD", help=words)
    command.set_defaults(carry_out=partial(run_plan, command))


def run_plan(command: Parser, given: argparse.Namespace) -> int:
    if {"-h", "--help"} & set(given.words):
        command.print_help()
        return PASSES
    words = with_tests(given.words)
    mode = [] if has_mode(words) else [MODES[0]]
    command_line = [sys.executable, "-m", "pytest", *QUIET, *mode, "--slm-plan", *words]
    if sys.stdout.isatty():
        return subprocess.run(command_line, check=False).returncode
    done = subprocess.run(command_line, check=False, stdout=subprocess.PIPE, text=True)  # which pytest writes or fails
    say(done.stdout.removesuffix("\n"), sys.stdout)
    return done.returncode


def has_mode(words: Sequence[str]) -> bool:
    """Return whether arguments of pytest, or a variable, choose the engine on which to measure."""
    named = any(word.partition("=")[0] in MODES for word in words)
    return named or any(os.environ.get(mode.strip("-").replace("-", "_").upper()) for mode in MODES)


def run_pytest(words: Sequence[str], log: Path, option: str) -> tuple[int, str, str]:
    """Run pytest with its output in a file, and return its exit status, its first error (or last line), and its hint.

    Args:
        option: hint if the file cannot be written.

    Raises:
        KeyboardInterrupt: if pytest was interrupted.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        out = open(log, "w", encoding="utf-8", opener=single)  # noqa: SIM115 - closed below
    except OSError as error:
        raise BadUsage(f"cannot write {error.filename}: {error.strerror}", option) from None
    command = [sys.executable, "-m", "pytest", *words]
    with out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if status == 2:
        raise KeyboardInterrupt
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()] or [""]
    first = next((i for i, line in enumerate(lines) if line.startswith("ERROR")), len(lines) - 1)
    hint = "".join(lines[first + 1 : first + 2]).partition("try: ")[2]
    return status, lines[first] or "it printed nothing", hint


def with_tests(words: Sequence[str]) -> list[str]:
    """Return arguments of pytest, followed by the built-in benchmarks unless a path or `--pyargs` names tests.

    Options and their values are joined with "=", because pytest would read a separate path as tests.
    """
    flags = {opt.flag for opt in OPTS if not opt.is_flag and not opt.bare}
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in flags:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    named = any(not word.startswith("-") and Path(word.partition("::")[0]).exists() for word in joined)
    return joined if named or "--pyargs" in joined else [*joined, *SHIPPED]
