"""External results, a CSV or vLLM's own JSON, as `report` and `advise` read them: their options and their report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from pytest_slmserve.analysis.advice.advisor import ModelSweep, Objectives, plan
from pytest_slmserve.analysis.sweep.batching import Slo, parse_relative_slo
from pytest_slmserve.analysis.sweep.curve import FEWEST_POINTS, Curve
from pytest_slmserve.archive import external
from pytest_slmserve.archive.external import Columns, Row, read_results
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.cli import PASSES
from pytest_slmserve.report.as_json import as_csv
from pytest_slmserve.report.external import external_json, external_rows, external_text
from pytest_slmserve.report.page.content import of_sweep
from pytest_slmserve.report.page.writer import write_section
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.schema.errors import BadUsage, TooFewPoints

VLLMS = {  # columns of `vllm bench serve --save-result`, by the options that name them
    "knob": "max_concurrency",
    "throughput": "output_throughput",
    "latency": "mean_tpot_ms",
    "output_throughput": "output_throughput",
}
COLUMN_OPTIONS = (
    ("knob", "column of the load: max_num_seqs, max_concurrency"),
    ("throughput", "column of tokens/s: of output tokens, or of prompt and output together"),
    ("latency", "column of the latency, best the time per output token"),
    ("preemptions", "column of preemptions: a point with any is shown, and never chosen"),
    ("running", "column of the mean number of running requests, to be checked by Little's law"),
    ("output-throughput", "column of output tokens/s, for Little's law"),
)


def add_question(command: cli.Taker) -> None:
    """Add the options of a report on external results."""
    add_columns(command)
    flat = "gain per doubling below which throughput counts as flat (default: 0.1)"
    command.add_argument("--tolerance", metavar="SHARE", type=float, default=0.1, help=flat)


def add_columns(command: cli.Taker) -> None:
    """Arguments that say what the columns of external results mean, and which batch is wanted."""
    for name, meaning in COLUMN_OPTIONS:
        command.add_argument(f"--{name}", metavar="NAME", help=meaning)
    add_rows(command)
    objective = "2x@32: at most twice the latency at 32; or 30ms, 0.03s"
    command.add_argument("--slo-itl", metavar="LIMIT", help=objective)
    share = "smallest batching efficiency T(B)/(B T(1)) of B_opt (default: 0.1)"
    command.add_argument("--efficiency", metavar="SHARE", type=float, default=0.1, help=share)
    half = "half-saturation batch where it is known, from shapes: then T_inf alone is fitted"
    command.add_argument("--b-half", metavar="BATCH", type=float, help=half)


def add_rows(command: cli.Taker) -> None:
    """Arguments that say which rows of external results are read."""
    command.add_argument(
        "--latency-unit", choices=("ms", "s"), help="unit of that column, if its name does not end in _ms or _s"
    )
    where = "only rows with this value; may be given again"
    command.add_argument("--where", metavar="NAME=VALUE", action="append", default=[], help=where)


def are_external(given: argparse.Namespace) -> bool:
    """Return whether the files are results of another tool: columns are named, they are CSV, or JSON with the
    keys of `vllm bench serve`. Raises BadUsage if runs are wanted, because only archives of ours have any."""
    suffixes = {path.suffix for path in given.paths}
    named = bool(given.knob or given.throughput or given.latency) or suffixes == {".csv"}
    if not named and suffixes == {".json"}:
        with suppress(BadUsage):
            take_vllms_names(given)
            named = given.knob is not None
    if named and (given.run or given.since):
        why = "--run and --since choose among runs of ours, and these are external results"
        raise BadUsage(why, "--where NAME=VALUE")
    return named


def report_external(given: argparse.Namespace) -> int:
    """Print plateau, Pareto front, saturation law and the batch to choose, from external results, and return the exit
    status."""
    wish = Objectives(slo=check_wanted(given), threshold=given.efficiency)
    cli.check_share("tolerance", given.tolerance)
    curve, notes, _ = read_external(given)
    if len(curve.valid) < FEWEST_POINTS:
        lost = len(curve.points) - len(curve.valid)
        without = f" without preemption ({lost} with)" if lost else ""
        problem = f"{counted(len(curve.valid), 'value')} of {given.knob}{without}, {FEWEST_POINTS} are needed"
        raise TooFewPoints("; ".join([problem, *notes]), "results of more loads, or other conditions")
    found = plan([ModelSweep(name=curve.subject, points=curve.points, output_share=None, b_half=given.b_half)], wish)
    if given.csv:
        print_csv(external_rows(curve, found), notes)
        return PASSES
    print((external_json if given.json else external_text)(curve, found, _columns_of(given), given.tolerance, notes))
    if given.html:
        text = external_text(curve, found, _columns_of(given), given.tolerance, notes)
        write_section(given.html, "External results", [of_sweep(curve, given.tolerance, text)])
    return PASSES


def print_csv(rows: Iterable[Mapping[str, Any]], notes: Sequence[str]) -> None:
    """Prints the rows, and beside them what a table has no place for: rows that are left out, and the like."""
    print(as_csv(rows), end="")
    cli.print_notes(notes, sys.stderr)


def take_vllms_names(given: argparse.Namespace) -> None:
    """Names the columns that were not named, where all files are results of `vllm bench serve`."""
    if None not in (given.knob, given.throughput, given.latency):
        return
    cells = [row.cells for path in given.paths for row in read_results(path)]
    if cells and all(each.keys() >= set(VLLMS.values()) for each in cells):
        for option, name in VLLMS.items():
            setattr(given, option, getattr(given, option) or name)


def read_external(given: argparse.Namespace) -> tuple[Curve, list[str], int | None]:
    """The curve in the files, what is odd about them, and the KV blocks of the engine, if told. Raises BadUsage."""
    take_vllms_names(given)
    columns = _columns_of(given)
    rows, left_out = _rows_of(given, columns)
    curve = external.external_curve(rows, columns)
    notes = [*left_out, *external.mixtures(rows), *external.taken_as_repeats(rows, columns)]
    return curve, notes, external.kv_blocks_of(rows, columns)


def _rows_of(given: argparse.Namespace, columns: Columns) -> tuple[list[Row], list[str]]:
    """Rows of all files that meet the conditions and have a value in each column, and sentences on those that have not.
    Raises BadUsage where none does, or where a column is not there."""
    rows, left_out = external.results(given.paths)
    external.check_columns(rows, columns.names)
    left, without = external.with_values(external.matching(rows, given.where), columns)
    return left, [*left_out, *without]


def _columns_of(given: argparse.Namespace) -> Columns:
    """Columns as the arguments name them. Raises BadUsage where one that is needed is not named."""
    if missing := [f"--{name}" for name in ("knob", "throughput", "latency") if getattr(given, name) is None]:
        raise BadUsage("external results need to be told their columns", f"{' '.join(missing)} NAME")
    names: dict[str, Any] = {field.name: getattr(given, field.name, None) for field in fields(Columns)}
    return Columns(**names)


def check_wanted(given: argparse.Namespace) -> Slo | None:
    """The latency objective, if any. Raises BadUsage where a number is out of range."""
    cli.check_share("efficiency", given.efficiency)
    if given.b_half is not None and not 0 < given.b_half < 1e9:
        raise BadUsage(f"--b-half {given.b_half:g} is no batch", "a number above 0")
    return parse_relative_slo(given.slo_itl) if given.slo_itl is not None else None
