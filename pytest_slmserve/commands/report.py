"""`report` command: print results files as text, data, HTML report and charts, without a GPU, vLLM or pytest."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims.table import judge_all, rows_from, stored_curves, stored_gates
from pytest_slmserve.analysis.compare.changes import release_histories
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.metrics.window import Slo, parse_slo
from pytest_slmserve.analysis.points import job_points, shared_points
from pytest_slmserve.analysis.sweep.curve import with_jobs
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.archive import store
from pytest_slmserve.archive.baselines import judged_by_noise
from pytest_slmserve.archive.store import Contents
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.external import add_columns, external_results, report_external
from pytest_slmserve.options.table import percentage
from pytest_slmserve.report import compare, gate, loads
from pytest_slmserve.report.as_json import facts, point_facts, sweep_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.pictures import draw_pictures
from pytest_slmserve.report.page.writer import write_page
from pytest_slmserve.report.screen import screen, tables
from pytest_slmserve.report.section import in_units, section_text
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.errors import BadUsage, Detail, is_file, of_a_command
from pytest_slmserve.schema.printable import printable

REPORT_STATUS = (
    f"{cli.PASSES} all verdicts are as expected and gates pass; {cli.FAILS} one is not or fails; {cli.INCONCLUSIVE} "
    "none is wrong but one is inconclusive, a release seems to have regressed, or nothing was measured; "
    f"{cli.USAGE} wrong usage or an unreadable results file."
)
NOT_JUDGED = "claims that no test of these runs judges are skipped; --strict judges all"
MERGE_STATUS = (
    f"With --merge: {cli.PASSES} everything is in OUT; {cli.FAILS} all but what the notes name; {cli.USAGE} a results "
    "file cannot be read."
)


def add_report(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "report", f"{REPORT_STATUS} {MERGE_STATUS}", run_report)
    cli.add_archives(command, "PATH", "a results file that --slm-records wrote, or results of another tool")
    command.add_argument(
        "--list", action="store_true", help="list the runs with id, date, models, release and number of measurements"
    )
    how = "summary (one screen), tables, or all (columns that do not fit follow below; default: tables)"
    command.add_argument("--show", choices=get_args(Detail), default="tables", help=how)
    pictures_of = "also write each chart as a file in this folder (needs vl-convert-python)"
    command.add_argument("--figures", metavar="FOLDER", type=Path, help=pictures_of)
    formats = "format of the pictures (default: png)"
    command.add_argument("--format", choices=("png", "svg"), default="png", help=formats)
    cli.add_html(command)
    command.add_argument("--strict", action="store_true", help="expect every claim to pass, as published")
    cli.add_goodput(command)
    cli.add_formats(command, "each point, job and load")
    out = "merge all results files into this one without duplicates, and stop; compressed if it ends in .gz or .xz"
    command.add_argument("--merge", metavar="OUT", type=Path, help=out)
    external = command.add_argument_group("external results: a CSV, or the JSON of `vllm bench serve`")
    add_columns(external)
    flat = "gain per doubling below which throughput counts as flat (default: 0.1)"
    external.add_argument("--tolerance", metavar="SHARE", type=cli.typed(percentage), default=0.1, help=flat)


def run_report(given: argparse.Namespace) -> int:
    """Print tables and verdicts of results files or of external results, list their runs, or merge them."""
    if given.list:
        return list_runs(given)
    if given.merge is not None:
        return merge_archives(given)
    if results := external_results(given):
        if given.figures is not None:
            raise BadUsage(
                "--figures draws results files of pytest-slmserve, not external results", "Remove --figures."
            )
        return report_external(given, results)
    archives = read_archives(given)
    contents, (gates, remarks) = store.as_one([each for _, each in archives]), gates_of(archives)
    found = judged_again(contents, given.strict, parse_slo(given.goodput) if given.goodput else None)
    notes = [*contents.notes, *remarks, *found.notes]
    if not (found.curves or found.jobs or gates or found.loads) and not (given.json or given.csv):
        notes.append("no sweep was measured")
    kinds = {"as expected": State.PASSES, "unexpected": State.FAILS, "inconclusive": State.INCONCLUSIVE}
    states = [*(kinds[each.outcome] for each in found.outcomes), *(each.outcome for each in gate.answering(gates))]
    if found.curves or found.jobs or found.loads:
        states.append(State.INCONCLUSIVE if found.regression else State.PASSES)  # there is no claim about them
    commands = {typed_command(session) for session in contents.sessions}
    found = replace(
        found,
        gates=gates,
        notes=notes,
        archives=list(map(str, given.paths)),
        command=commands.pop() if len(commands) == 1 else "",
        gate_commands=gate_commands(contents),
        gate_archives={
            m.paired.gate: str(path if path in given.paths else path.parent)  # an HTML report has several
            for path, each in reversed(archives)
            for m in each.measurements
            if m.paired
        },
    )
    drawn = [] if given.figures is None else draw_pictures(found, given.figures, given.format)
    points, terms = point_facts(found), loads.ValidityCriteria(found.slo)
    shown = {
        "points": points,
        "loads": (loads.facts_of_load(m, terms) for m in found.loads),
        "sweeps": sweep_facts(found),
        "verdicts": ({**facts(each.verdict), **facts(each, "expected", "outcome")} for each in found.outcomes),
        "gates": [gate.gate_facts(each, found) for each in found.gates],
        "history": found.history,
        "notes": notes,
    }
    rows_of_loads = ({"kind": "load", **row} for m in found.loads for row in loads.rows_of_load(m, terms))
    notes = notes if given.csv else []  # the text has them
    cli.print_result(given, shown, chain(points, rows_of_loads), report_lines(found, given.show), notes)
    status = cli.EXIT_STATUS[all_of(states)]
    if given.html is not None:
        write_page(given.html, found, given.paths, status=status)
        drawn.append(f"written: {given.html}")
    for line in drawn:
        cli.say(line, sys.stderr if given.json or given.csv else None)
    return status


def gate_commands(contents: Contents) -> dict[str, str]:
    """Return the command of the run that measured each gate."""
    return {m.paired.gate: typed_command(run) for m, run in reversed(contents.measured) if m.paired}


def typed_command(run: store.RunHeader) -> str:
    """Return the command of a run, or "" if it is not known."""
    try:
        return printable(shlex.join(shlex.split(run.command)))
    except ValueError:  # a quotation without an end: none of ours
        return ""


def merge_archives(given: argparse.Namespace) -> int:
    """Merge results files into one, and print how many measurements were new."""
    if given.run or given.since:
        raise BadUsage("--merge takes whole results files", "Use --merge without --run and --since.")
    for path in given.paths:
        if not is_file(path):  # or OUT would be made for nothing
            raise BadUsage(f"{path} is not there", "Pass results files that --slm-records wrote.")
    with of_a_command(BadUsage, records="--merge"), store.Archive.open(given.merge) as into:
        merged = store.merge(given.paths, into)
    cli.print_notes((*into.notes, *merged.notes))
    cli.say(f"{given.merge}: {merged.written} measurements added, {merged.known} were there")
    return cli.FAILS if merged.notes else cli.PASSES


def list_runs(given: argparse.Namespace) -> int:
    archives = {path: store.read(path, skip_damaged=given.skip_damaged) for path in given.paths}
    rows = [
        {
            "path": path,
            **facts(run.header, "id", "started", "resumes", "pytest_slmserve"),
            **compare.measured_facts(run.measurements),
        }
        for path, contents in archives.items()
        for run in store.runs_of(contents)
    ]
    text = compare.run_table(rows, several=len(archives) > 1) if rows else "no run has measured anything"
    cli.print_result(given, {"runs": rows}, rows, [text], [note for each in archives.values() for note in each.notes])
    return cli.PASSES


def report_lines(found: Findings, detail: Detail) -> Iterator[str]:
    """Yield the text: all tables, or the summary and the loads that are not points of a sweep."""
    with laid_out(every_column=detail == "all"):
        yield from (text for text, _ in (screen(found) if detail == "summary" else tables(found)))
        if detail == "summary":
            yield from (
                f"{section_text(in_units(each, found.unit))}\n"
                for each in loads.load_sections(found.loads, loads.ValidityCriteria(found.slo))
            )


def read_archives(given: argparse.Namespace) -> list[tuple[Path, Contents]]:
    """Return the path and the selected runs of each results file, including those inside HTML reports."""
    found = [each for path in given.paths for each in store.read_each(path, skip_damaged=given.skip_damaged)]
    return [(path, store.chosen(contents, given.run, given.since)) for path, contents in found]


def read_all(given: argparse.Namespace) -> Contents:
    """Return the contents of all results files as one. Sweeps of the same engine and workload become repeats."""
    return store.as_one([contents for _, contents in read_archives(given)])


def gates_of(archives: Sequence[tuple[Path, Contents]]) -> tuple[list[Gated], list[str]]:
    """Return each gate of the results files once, with notes.

    A calibration next to a file has the noise for its gates.
    """
    found: dict[str, Gated] = {}
    notes: list[str] = []
    for path, contents in archives:
        for gated, note in stored_gates(contents.measurements, contents.plans):
            if gated.gate not in found:
                found[gated.gate], known = judged_by_noise(gated, path)
                notes += filter(None, (note, gate.calibration_text(known) if known else ""))
    return list(found.values()), notes


def judged_again(contents: Contents, strict: bool = False, slo: Slo | None = None) -> Findings:
    """Return the findings of measurements, with verdicts on the claims that their runs evaluated.

    Args:
        strict: evaluate all claims, as for a run that did not store its claims.
        slo: limits of a good request, for goodput.
    """
    measurements, jobs = contents.measurements, job_points(contents.measurements)
    sweeps = stored_curves(measurements, contents.plans)
    curves = with_jobs(sweeps, jobs)
    judged = judge_all(curves, table.ROWS, rows_from(contents.claims)) if curves else []
    # Claims that the tests of these runs evaluate; an older run may not have stored them.
    told = [names for session in contents.sessions if isinstance(names := session.plan.get("claims"), list)]
    all_tell = told and len(told) == len(contents.sessions)
    names = {str(name) for each in told for name in each} if all_tell and not strict else None
    kept = [pair for pair in judged if names is None or pair[0].claim in names]
    return Findings(
        curves=sweeps,
        judged=kept,
        shared=shared_points(measurements),
        jobs=jobs,
        history=release_histories(measurements),
        loads=[m for m in measurements if loads.is_windowed(m.load) or loads.is_counted_loop(m)],
        measurements=measurements,
        strict=strict,
        notes=[NOT_JUDGED] if len(kept) < len(judged) else [],
        slo=slo,
    )
