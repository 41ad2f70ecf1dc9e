"""Common parts of all commands: names, exit statuses, messages about wrong usage, and shared options."""

import argparse
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeAlias, TypeVar

from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.printable import printable

T = TypeVar("T")
PASSES, FAILS, USAGE, INCONCLUSIVE = 0, 1, 4, 10
INTERRUPTED = 130  # as in shells
EXIT_STATUS = {State.PASSES: PASSES, State.FAILS: FAILS, State.INCONCLUSIVE: INCONCLUSIVE}  # by outcome
COMMANDS = {  # by the user's purpose; the function add_NAME of a command's module adds it
    "before measuring": {
        "doctor": "check whether this host can produce reliable measurements",
        "plan": "print what a run would measure, in which order and for how long",
    },
    "measure": {"measure": "measure a server that already runs"},
    "read": {
        "report": "print tables and verdicts of results files, draw charts, or merge results files",
        "compare": "compare runs with a baseline; save, list and show baselines",
        "asv": "publish the history of vLLM releases with asv (airspeed velocity)",
    },
    "decide": {
        "advise": "recommend batch size, memory and number of engines for serving",
        "predict": "predict throughput and latency of a model on a GPU and a host that you do not have",
        "bisect": "find the first slow vLLM release between two releases with gates",
        "pairs": "decide whether a candidate is slower, from pairs of measurements of any tool",
    },
}
SUMMARIES = {name: summary for group in COMMANDS.values() for name, summary in group.items()}


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: the most similar name, if there is one."""
    near = [name for name in names if name.startswith(word)] or get_close_matches(word, names, 1)
    return f", did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises BadUsage.

    It does not accept prefixes, which may mean another option in a later release.
    """

    def __init__(self, prog: str | None = None, **words: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **words)

    def parse_known_args(self, *words: Any) -> Any:  # type: ignore[override]
        """Raise BadUsage for unknown arguments here, because the parser of the command knows its own options."""
        given, left_over = super().parse_known_args(*words)
        if left_over:
            options = [option for action in self._actions for option in action.option_strings]
            word = left_over[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(left_over)}{did_you_mean(word, options)}")
        return given, left_over

    def error(self, message: str) -> NoReturn:
        raise BadUsage(message, f"{self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse itself would ignore an OSError, for example because a pipe is closed.
        print(message, end="", file=file or sys.stderr, flush=True)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Taker: TypeAlias = "Parser | argparse._ArgumentGroup"  # of arguments


def add_command(
    commands: Commands, name: str, status: str, carry_out: Callable[[argparse.Namespace], int], summary: str = ""
) -> Parser:
    """Add a command, or an action of a command, and return its parser.

    Args:
        status: meaning of its exit statuses.
        carry_out: runs the command and returns the exit status.
        summary: of an action; a command has one already.
    """
    words = summary or SUMMARIES[name]
    description = f"{words[0].upper()}{words[1:]}."
    command = commands.add_parser(name, help=words, description=description, epilog=f"Exit status: {status}")
    command.set_defaults(carry_out=carry_out)
    return command


def add_archives(
    command: Parser, metavar: str, files: str = "a results file that --slm-records wrote", number: str = "+"
) -> None:
    """Add the results files as arguments."""
    command.add_argument("paths", metavar=metavar, nargs=number, type=Path, help=files)
    command.add_argument("--skip-damaged", action="store_true", help="skip damaged lines, and name them")
    run = "ID, last or all: a run as `report --list` names it (default: the last run that measured each configuration)"
    command.add_argument("--run", metavar="ID", default="", help=run)
    add_since(command)


def add_since(command: Parser) -> None:
    since = "use only measurements since this date: 2026-01-31, or 2026-01-31T12:00 (UTC)"
    command.add_argument("--since", metavar="DATE", default="", help=since)


def add_formats(command: Parser, csv: str = "") -> None:
    """Add the options that choose JSON or CSV.

    Args:
        csv: description of a CSV line; "" if the command prints no CSV.
    """
    formats = command.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="one JSON object instead of text")
    if csv:
        formats.add_argument("--csv", action="store_true", help=f"CSV instead of text: a line for {csv}")


def add_goodput(command: Parser) -> None:
    bounds = "latency limits that define a good request, for example ttft:200ms,tpot:50ms,e2e:5s; adds goodput"
    command.add_argument("--goodput", metavar="LIMITS", default="", help=bounds)


def add_html(command: Parser) -> None:
    page = "also write one page with charts, tables and the records, which needs no network (needs Jinja2)"
    command.add_argument("--html", metavar="OUT.html", type=Path, help=page)


def say(text: str, file: TextIO | None = None) -> None:
    """Print lines on stdout, or on `file`, which is flushed.

    Control characters are escaped, because a file name may contain some.
    """
    print("\n".join(printable(line, "\t") for line in text.split("\n")), file=file, flush=file is not None)


def print_notes(notes: Iterable[str], file: TextIO | None = None) -> None:
    """Print notes on stdout or `file`, wrapped at the width of the terminal."""
    from pytest_slmserve.report.text_table import folded

    for note in notes:
        say(folded(f"note: {printable(note, layout='')}"), file)


def print_result(
    given: argparse.Namespace, facts: Any, rows: Iterable[Any], text: Iterable[str], notes: Iterable[str] = ()
) -> None:
    """Print a result in the chosen format.

    Args:
        facts: for JSON, including the notes.
        rows: for CSV.
        text: parts of the text.
        notes: below the text, or with CSV on stderr.
    """
    from pytest_slmserve.report.as_json import as_csv, as_json

    if given.json:
        say(as_json(facts))
    elif given.csv:
        say(as_csv(rows).removesuffix("\n"))
        print_notes(notes, sys.stderr)
    else:
        say("\n".join(text))
        print_notes(notes)


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser of `options.table`, whose ValueError names the allowed values, as argparse needs it."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError as wanted:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return value
