"""`slmserve report PATH`: tables and verdicts of an archive again, with no GPU, no vLLM, no pytest.

`slmserve figures RECORDS`: pictures of what was measured, and of what the sensors saw.

`slmserve compare A B`: two runs side by side, each metric with its ratio, interval and verdict.

`slmserve merge RECORDS --out OUT`: archives of several runs or hosts as one, each record once.

`slmserve judge FILE`: a report on external results, a CSV or vLLM's own JSON.

`slmserve replicas FILE`: what several engines on one device serve over one, in such results.

`slmserve gate PAIRS`: whether a candidate is slower, from pairs of measurements of any tool.

`slmserve bisect --good A --bad B`: the first slow release of vLLM between two, by gates.

`slmserve baseline accept RECORDS`: keeps what later runs are held against; also `list` and `show`.

`slmserve advise RECORDS`: the batch, the memory and the number of engines to serve a model with; with
`--verify` it starts them and measures whether that holds.

`slmserve predict RECORDS --gpu NAME`: the throughput on a GPU that is not here.

`slmserve asv init`, `slmserve asv convert RECORDS`: the same records as results for asv, to follow releases of vLLM.

`slmserve measure --endpoint URL`: one load on a server that runs, without pytest.

`slmserve plan`: what a run would measure, in which order, on how many GPUs and for how long.

`slmserve doctor`: what this host can measure, and what would spoil it.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_slmserve.commands.cli import Parser

# What takes long to import is imported by `run`, where an interrupt is one line.
MODULES = {
    "report": "report",
    "figures": "report",
    "compare": "compare",
    "merge": "compare",
    "judge": "judge",
    "replicas": "judge",
    "gate": "gate",
    "bisect": "bisect",
    "baseline": "baseline",
    "advise": "advise",
    "predict": "predict",
    "asv": "asv",
    "measure": "measure",
    "plan": "plan",
    "doctor": "doctor.page",
}


def parser(command: str = "") -> Parser:
    """The parser of that command, or of all where it is none: what one needs is imported for no other."""
    from pytest_slmserve.commands.cli import Parser

    top = Parser(
        "slmserve", description="Report, compare and plot what was measured; measure loads on a running server."
    )
    top.add_argument("--version", action="store_true", help="print the version and end")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for module in [MODULES[command]] if command in MODULES else dict.fromkeys(MODULES.values()):
        import_module(f"pytest_slmserve.commands.{module}").add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; every problem is one sentence on stderr."""
    from pytest_slmserve.commands.cli import FAILS, PASSES, USAGE
    from pytest_slmserve.schema.errors import EngineFailed, SlmError

    words = sys.argv[1:] if arguments is None else list(arguments)
    top = parser(*words[:1])
    try:
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
    """`main` where the reader of a pipe may leave early, and names may hold what the terminal cannot show."""
    try:
        from pytest_slmserve.run.session import as_interrupts

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
