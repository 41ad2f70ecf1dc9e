"""`slmserve COMMAND`: measure, report, compare and advise on the command line. `commands.cli` names all commands."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_slmserve.commands.cli import Parser


def parser(command: str = "") -> Parser:
    """Return the parser of that command, or of all if it is none of them: no command imports what others need."""
    from pytest_slmserve.commands.cli import COMMANDS, SUMMARIES, Parser

    groups = [
        f"{title}:\n" + "".join(f"  {name:<9} {summary}\n" for name, summary in group.items())
        for title, group in COMMANDS.items()
    ]
    top = Parser(
        "slmserve",
        usage="slmserve COMMAND [OPTION ...]",
        formatter_class=RawDescriptionHelpFormatter,
        description="\n".join(groups),
    )
    top.add_argument("--version", action="store_true", help="print the version and end")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", help=SUPPRESS, prog="slmserve")
    for name in [command] if command in SUMMARIES else SUMMARIES:
        getattr(import_module(f"pytest_slmserve.commands.{name}"), f"add_{name}")(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Every problem is one sentence on stderr."""
    from pytest_slmserve.commands.cli import FAILS, PASSES, SUMMARIES, USAGE
    from pytest_slmserve.schema.errors import BadUsage, EngineFailed, SlmError

    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words and not words[0].startswith("-") and words[0] not in SUMMARIES:
            near = get_close_matches(words[0], SUMMARIES, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise BadUsage(f"there is no command {words[0]!r}{hint}", "slmserve --help")
        top = parser(*words[:1])
        given = top.parse_args(words)
        if given.version:
            from importlib.metadata import version

            print(f"pytest-slmserve {version('pytest-slmserve')}")
            return PASSES
        if given.command is None:
            top.print_help()
            return USAGE
        status: int = given.carry_out(given)
        return status
    except SlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILS if isinstance(error, EngineFailed) else USAGE
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return FAILS
    except MemoryError:
        print("error: this takes more memory than there is", file=sys.stderr)
        return FAILS


def run() -> int:
    """Run `main`, although the reader of a pipe may leave early, and names may hold what the terminal cannot show."""
    try:
        from pytest_slmserve.run.interrupts import as_interrupts

        sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - None where the caller has closed it
        sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        with as_interrupts():
            status = main()
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: what had been measured to its end is kept", file=sys.stderr)
        return 130  # as shells have it
    return status


if __name__ == "__main__":
    sys.exit(run())
