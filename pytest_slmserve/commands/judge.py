"""`judge` and `replicas`: the same questions to results that are not ours, a CSV or vLLM's own JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_slmserve.commands.cli import HOLDS, USAGE, Commands, Parser, Taker, add_command, check_share
from pytest_slmserve.schema.errors import BadUsage

if TYPE_CHECKING:
    from pytest_slmserve.analysis.sweep.batching import Slo
    from pytest_slmserve.archive.external import Columns, Setting
    from pytest_slmserve.report.external.sweep import Question

STATUS = f"{HOLDS} it could be judged, {USAGE} wrong usage, or a file that cannot be judged."
COLUMN_OPTIONS = (
    ("knob", True, "column of the load: max_num_seqs, max_concurrency"),
    ("throughput", True, "column of tokens/s, of whatever tokens"),
    ("latency", True, "column of the latency, best the time per output token"),
    ("preemptions", False, "column of preemptions: a point with any is shown, and never chosen"),
    ("running", False, "column of the mean number of running requests, to be checked by Little's law"),
    ("output-throughput", False, "column of output tokens/s, for Little's law"),
)
REPLICA_OPTIONS = (
    ("replicas", True, "column of the number of engines that shared the device"),
    ("knob", True, "column of the limit, or the load, of each engine: max_num_seqs, max_concurrency"),
    *COLUMN_OPTIONS[1:4],
    ("power", False, "column of the device's power in W: adds energy per token"),
)


def add(commands: Commands) -> None:
    words = "judge results that are not ours: a CSV, or the JSON of `vllm bench serve`"
    judge_ = add_command(commands, "judge", words, STATUS, judge)
    add_files(judge_)
    add_question(judge_, required=True)
    words = "judge several engines on one device, in results that are not ours"
    replicas_ = add_command(commands, "replicas", words, STATUS, replicas)
    add_files(replicas_)
    for name, needed, meaning in REPLICA_OPTIONS:
        replicas_.add_argument(f"--{name}", metavar="NAME", required=needed, help=meaning)
    baseline = "what a row of one engine must have to be compared with; may be given again (default: any)"
    replicas_.add_argument("--baseline", metavar="NAME=VALUE", action="append", default=[], help=baseline)
    add_rows(replicas_)


def add_files(command: Parser) -> None:
    command.add_argument("paths", metavar="FILE", nargs="+", type=Path, help="a CSV with named columns, or JSON")


def add_question(command: Taker, *, required: bool) -> None:
    """All that `judge` asks of results that are not ours."""
    add_columns(command, required=required)
    flat = "gain per doubling below which throughput counts as flat (default: 0.1)"
    command.add_argument("--tolerance", metavar="SHARE", type=float, default=0.1, help=flat)


def add_columns(command: Taker, *, required: bool) -> None:
    """What the columns of results that are not ours mean, and what is asked of them."""
    for name, needed, meaning in COLUMN_OPTIONS:
        command.add_argument(f"--{name}", metavar="NAME", required=required and needed, help=meaning)
    add_rows(command)
    objective = "2x@32: at most twice the latency at 32; or 30ms, 0.03s"
    command.add_argument("--slo-itl", metavar="LIMIT", help=objective)
    share = "smallest batching efficiency T(B)/(B T(1)) of B_opt (default: 0.1)"
    command.add_argument("--efficiency", metavar="SHARE", type=float, default=0.1, help=share)
    half = "half-saturation batch where it is known, from shapes: then T_inf alone is fitted"
    command.add_argument("--b-half", metavar="BATCH", type=float, help=half)


def add_rows(command: Taker) -> None:
    """Which rows of results that are not ours are read, and how the answer looks."""
    command.add_argument("--latency-unit", choices=("ms", "s"), help="where the name does not end in _ms or _s")
    where = "only rows with this value; may be given again"
    command.add_argument("--where", metavar="NAME=VALUE", action="append", default=[], help=where)
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")


def are_foreign(given: argparse.Namespace) -> bool:
    """Columns are named: the files are no archives of ours."""
    return bool(given.knob or given.throughput or given.latency)


def judge(given: argparse.Namespace) -> int:
    """Plateau, Pareto front, saturation law and the batch to choose, from results that are not ours."""
    from pytest_slmserve.report.external import sweep

    question = question_of(given)
    settings, notes = read_foreign(given)
    found = sweep.judge(settings, question, notes)
    print(sweep.as_json(found) if given.json else sweep.text(found))
    return HOLDS


def replicas(given: argparse.Namespace) -> int:
    """What several engines on one device serve over one, from results that are not ours."""
    from pytest_slmserve.analysis.compare.external_replicas import compare
    from pytest_slmserve.archive import external, external_replicas
    from pytest_slmserve.report.external import replicas

    columns = external.Columns(
        knob=given.knob,
        throughput=given.throughput,
        latency=given.latency,
        latency_unit=given.latency_unit,
        preemptions=given.preemptions,
    )
    names = external_replicas.ReplicaColumns(columns=columns, replicas=given.replicas, power=given.power)
    rows = external.matching([row for path in given.paths for row in external.read(path)], given.where)
    found = compare(external_replicas.engine_sets(rows, names, given.baseline))
    notes = list(external_replicas.remarks(rows, names, given.baseline))
    print((replicas.as_json if given.json else replicas.text)(found, names, notes))
    return HOLDS


def read_foreign(given: argparse.Namespace) -> tuple[Sequence[Setting], Sequence[str]]:
    """What stands in the files, and what is odd about them. Raises BadUsage."""
    from pytest_slmserve.archive import external

    names = columns_of(given)
    rows = [row for path in given.paths for row in external.read(path)]
    external.check_columns(
        rows, [names.knob, names.throughput, names.latency, names.preemptions, names.running, names.output]
    )
    chosen = external.matching(rows, given.where)
    return external.settings_of(chosen, names), external.mixtures(chosen)


def question_of(given: argparse.Namespace) -> Question:
    """Raises BadUsage where a number is out of range."""
    from pytest_slmserve.report.external.sweep import Question

    slo = check_wanted(given)
    check_share("tolerance", given.tolerance)
    return Question(
        columns=columns_of(given),
        slo=slo,
        threshold=given.efficiency,
        tolerance=given.tolerance,
        b_half=given.b_half,
    )


def check_wanted(given: argparse.Namespace) -> Slo | None:
    """The latency objective, if any. Raises BadUsage where a number is out of range."""
    from pytest_slmserve.analysis.sweep.batching import parse_slo

    check_share("efficiency", given.efficiency)
    if given.b_half is not None and not 0 < given.b_half < 1e9:
        raise BadUsage(f"--b-half {given.b_half:g} is no batch", "a number above 0")
    return parse_slo(given.slo_itl) if given.slo_itl is not None else None


def columns_of(given: argparse.Namespace) -> Columns:
    """Raises BadUsage where one that is needed is not named."""
    from pytest_slmserve.archive.external import Columns

    if missing := [f"--{name}" for name in ("knob", "throughput", "latency") if getattr(given, name) is None]:
        raise BadUsage("results that are not ours need to be told their columns", f"{' '.join(missing)} NAME")
    return Columns(
        knob=given.knob,
        throughput=given.throughput,
        latency=given.latency,
        latency_unit=given.latency_unit,
        preemptions=given.preemptions,
        running=given.running,
        output=given.output_throughput,
    )
