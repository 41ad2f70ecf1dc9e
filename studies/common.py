"""Parts of several studies: paths of the checkout, results files, CPU times, and options of a study of an engine."""

from __future__ import annotations

import argparse
import json
import lzma
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
BASELINES = CHECKOUT / "benchmarks" / "baselines"


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the text on top of a study."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def engine_parser(doc: str | None) -> argparse.ArgumentParser:
    """The same with the options of a study that starts an engine, or prints again what it found once."""
    parser = parser_of(doc)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--model", default="opt-tiny")
    parser.add_argument("--concurrency", type=int, default=64)
    results_options(parser)
    return parser


def results_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="results file for all that was found, as JSON")
    parser.add_argument("--again", type=Path, metavar="FILE", help="print what a results file holds; measure nothing")


def results_in(path: Path) -> Any:
    """The content of a results file, packed or not."""
    raw = path.read_bytes()
    return json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)


def keep(path: Path | None, facts: object) -> None:
    """Write a results file, if one was asked for."""
    if path:
        path.write_text(json.dumps(facts, separators=(",", ":")) + "\n", "utf-8")


def cpu_s(words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> float:
    """CPU seconds, user and system, of one `python -m WORDS` and its children, in a folder of its own. Its bytecode is
    written, as an installation has it. Exits where the command does not end by itself with a status of ours."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode not in (0, 1, 10):
        sys.exit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
