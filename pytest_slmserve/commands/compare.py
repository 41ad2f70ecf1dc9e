"""`compare`: runs side by side, of several archives or of one; the first is what the others are held against."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_slmserve.analysis.claims.stored import unique
from pytest_slmserve.analysis.compare.runs import METRICS, Judgement, RunComparison, compare_runs
from pytest_slmserve.analysis.gate.decision import MARGIN
from pytest_slmserve.archive.store import Archive, RunChoice, chosen, read, run_named, runs_of
from pytest_slmserve.archive.store import merge as merge_parts
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.cli import FAILS, INCONCLUSIVE, PASSES, USAGE, Commands, add_command, print_notes
from pytest_slmserve.report import compare as report
from pytest_slmserve.report.as_json import as_csv, as_json
from pytest_slmserve.report.compare import RunSide
from pytest_slmserve.report.page.content import of_runs
from pytest_slmserve.report.page.writer import write_section
from pytest_slmserve.schema.errors import BadUsage, of_a_command
from pytest_slmserve.schema.files import is_file

STATUS = (
    f"{PASSES} no metric is worse; {FAILS} one is; {INCONCLUSIVE} none is for certain but one is inconclusive, or "
    f"nothing could be compared; {USAGE} wrong usage or an archive that cannot be read."
)


def add(commands: cli.Commands) -> None:
    add_merge(commands)
    words = "compare runs, case by case and metric by metric, with the first one"
    command = cli.add_command(commands, "compare", words, STATUS, compare)
    archives = "an archive that --slm-records wrote: the baseline, then candidates; of one alone its runs are compared"
    command.add_argument("paths", metavar="RECORDS", nargs="+", type=Path, help=archives)
    run = "a run of one archive, as `report --list` names it; the baseline first, then each candidate"
    command.add_argument("--run", metavar="ID", action="append", default=[], help=run)
    margin = f"smallest change that matters (default: {MARGIN:g}, which is {100 * MARGIN:g} %%)"
    command.add_argument("--margin", metavar="SHARE", type=float, default=MARGIN, help=margin)
    metric = "compare this metric alone, by its name in the JSON: output_tokens_per_s; may be given again"
    command.add_argument("--metric", metavar="NAME", action="append", default=[], help=metric)
    command.add_argument("--skip-damaged", action="store_true", help="leave out damaged lines, and say which")
    cli.add_formats(command, "each metric of each case")
    cli.add_html(command)


def compare(given: argparse.Namespace) -> int:
    """Prints each candidate beside the baseline; the status is that of the worst one."""
    cli.check_share("margin", given.margin)
    names = [metric.name for metric in METRICS]
    if unknown := [name for name in given.metric if name not in names]:
        raise BadUsage(f"--metric {unknown[0]} is not compared", f"one of {', '.join(names)}")
    baseline, *candidates = sides_of(given)
    found = [
        (baseline, each, compare_runs(baseline.measurements, each.measurements, given.margin, given.metric))
        for each in candidates
    ]
    if given.json:
        print(as_json({"margin": given.margin, "comparisons": [report.comparison_facts(*each) for each in found]}))
    elif given.csv:
        print(as_csv(row for each in found for row in report.comparison_rows(*each)), end="")
    else:
        print("\n\n".join(report.comparison_text(*each) for each in found))
    statuses = {status_of(each) for _, _, each in found}
    status = next(status for status in (FAILS, INCONCLUSIVE, PASSES) if status in statuses)
    if given.html:
        parts = [of_runs(*each) for each in found]
        measurements = unique(m for side in (baseline, *candidates) for m in side.measurements)
        write_section(given.html, "Comparison", parts, measurements, given.paths, status=status)
    return status


def sides_of(given: argparse.Namespace) -> list[RunSide]:
    """Sides to be compared, the baseline first. Raises BadUsage where there are fewer than two."""
    archives = [read(path, skip_damaged=given.skip_damaged) for path in given.paths]
    if len(archives) > 1:
        if given.run:
            raise BadUsage("--run chooses among the runs of one archive, and there are several", "one archive")
        return [RunSide(str(path), chosen(each, RunChoice()).measurements) for path, each in zip(given.paths, archives)]
    (path,), (contents,) = given.paths, archives
    there = [run for run in runs_of(contents) if run.measurements or run.resumes]
    wanted = [run_named(there, name) for name in given.run] or there
    if len(wanted) < 2:
        raise BadUsage(f"{path} has one run to compare, and two are needed", "compare BASELINE CANDIDATE")
    if len(wanted) > 2 and not given.run:
        raise BadUsage(f"{path} has {len(wanted)} runs: which two?", "--run ID --run ID, as `report --list` names them")
    return [RunSide(f"{path} run {run.id}", chosen(contents, RunChoice(run.id)).measurements) for run in wanted]


def status_of(found: RunComparison) -> int:
    if found.counts[Judgement.WORSE]:
        return FAILS
    return INCONCLUSIVE if found.counts[Judgement.INCONCLUSIVE] or not found.changes else PASSES


MERGE_STATUS = (
    f"{PASSES} everything is in OUT; {FAILS} all but what the notes name; {USAGE} wrong usage or an archive that "
    "cannot be read."
)


def add_merge(commands: Commands) -> None:
    command = add_command(commands, "merge", "make one archive of several, each record once", MERGE_STATUS, merge)
    command.add_argument("paths", metavar="RECORDS", nargs="+", type=Path, help="an archive; it stays as it is")
    out = "the archive that they are added to, packed if it ends in .gz or .xz; made if it is not there"
    command.add_argument("--out", metavar="OUT", type=Path, required=True, help=out)


def merge(given: argparse.Namespace) -> int:
    for path in given.paths:
        if not is_file(path):  # or OUT would be made for nothing
            raise BadUsage(f"{path} is not there", "archives that --slm-records wrote")
    with of_a_command(BadUsage, records="--out"), Archive.open(given.out) as into:
        merged = merge_parts(given.paths, into)
    print_notes((*into.notes, *merged.notes))
    print(f"{given.out}: {merged.written} measurements added, {merged.known} were there")
    return FAILS if merged.notes else PASSES
