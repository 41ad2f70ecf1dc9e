"""`slmserve COMMAND`: command line of pytest-slmserve. `commands.cli` lists the commands."""

import os
import sys
from argparse import SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from pytest_slmserve.commands.cli import COMMANDS, FAILS, INTERRUPTED, PASSES, SUMMARIES, USAGE, Parser, did_you_mean
from pytest_slmserve.engines.interrupts import as_interrupts
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, SlmError
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.secrecy import WITH_A_KEY, secret_in


def parser(command: str = "") -> Parser:
    """Return the parser of one command, whose module alone is imported, or of all if the name is unknown."""
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


def check_words(words: Sequence[str]) -> None:
    """Raise BadUsage if an argument has a secret, before it is printed or written to a results file."""
    option = "the command"
    for word in words:
        name = word.partition("=")[0]
        option = name if name.startswith("--") and not secret_in(name) else option
        if found := secret_in(word):
            raise BadUsage(f"{option} holds {found} and it goes into records", WITH_A_KEY)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Problems become one sentence on stderr.

    Args:
        arguments: None means those of the process.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    status = FAILS
    try:
        check_words(words)
        if words and not words[0].startswith("-") and words[0] not in SUMMARIES:
            problem = f"there is no command {words[0]!r}{did_you_mean(words[0], SUMMARIES)}"
            raise BadUsage(problem, "slmserve --help")
        top = parser(*words[:1])
        given = top.parse_args(words, Namespace(typed=words))
        if given.version:
            print(f"pytest-slmserve {version('pytest-slmserve')}")
            return PASSES
        if given.command is None:
            top.print_help()
            return USAGE
        return int(given.carry_out(given))
    except SlmError as error:
        problem, status = str(error), FAILS if isinstance(error, EngineFailed) else USAGE
    except BrokenPipeError:
        raise
    except OSError as error:
        problem = f"{error.filename or 'the output'}: {error.strerror or error}"
    except MemoryError:
        problem = "this takes more memory than there is"
    print(f"error: {printable(problem)}", file=sys.stderr)
    return status


def run() -> int:
    """Run `main`, and handle Ctrl-C, a closed pipe, and characters that the terminal cannot show."""
    try:
        sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - None where the caller has closed it
        sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        with as_interrupts():
            status = main()
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILS
    except KeyboardInterrupt:
        print("\ninterrupted: what had been measured to its end is kept", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(run())
