"""`report` and `figures`: what archives hold, as text and as pictures, with no GPU, no vLLM and no pytest."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims.stored import judge_all, rows_from, stored_curves, stored_gates, unique
from pytest_slmserve.analysis.compare.runs import release_histories
from pytest_slmserve.analysis.gate.launch_pairs import Gated, weaker
from pytest_slmserve.analysis.metrics.latency import Slo, slo_of_requests
from pytest_slmserve.analysis.points import job_points, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, with_jobs
from pytest_slmserve.archive import store
from pytest_slmserve.archive.baselines import beside, find, place_of
from pytest_slmserve.archive.pages import embedded
from pytest_slmserve.archive.store import Contents, RunChoice, chosen, read, runs_of
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.gate import status_of
from pytest_slmserve.commands.judge import add_question, are_external, judge
from pytest_slmserve.report import compare as run_list
from pytest_slmserve.report.as_json import as_csv, as_json, facts, point_facts, sweep_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate.text import calibration_text, gate_facts
from pytest_slmserve.report.loads import (
    ValidityCriteria,
    facts_of_load,
    is_counted_loop,
    is_windowed,
    load_texts,
    rows_of_load,
)
from pytest_slmserve.report.page.content import TEXT_WIDTH
from pytest_slmserve.report.page.pictures import gate_pictures, pictures, save_picture
from pytest_slmserve.report.page.writer import rendered, write_page
from pytest_slmserve.report.screen import screen, tables
from pytest_slmserve.report.tables.run import outcome, verdict_facts
from pytest_slmserve.report.text_table import folded, laid_out
from pytest_slmserve.schema.errors import BadUsage, Detail
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Measurement

REPORT_STATUS = (
    f"{cli.PASSES} all verdicts are as expected and gates pass; {cli.FAILS} one is not or fails; {cli.INCONCLUSIVE} "
    f"none is wrong but one is inconclusive or nothing was measured; {cli.USAGE} wrong usage or an unreadable archive."
)
NOT_JUDGED = "claims that no test of these runs judges are left out; --strict judges all"
FIGURES_STATUS = (
    f"{cli.PASSES} something was drawn; {cli.USAGE} nothing was, wrong usage or an archive that cannot be read."
)


def add(commands: cli.Commands) -> None:
    report_ = cli.add_command(commands, "report", "print the tables and verdicts of archives", REPORT_STATUS, report)
    cli.add_archives(report_, "PATH")
    report_.add_argument("--list", action="store_true", help="name the runs: id, date, models, release, measurements")
    how = "summary (one screen), tables, or all (columns that do not fit follow below; default: tables)"
    report_.add_argument("--show", choices=get_args(Detail), default="tables", help=how)
    report_.add_argument(
        "--figure", metavar="OUT.png", type=Path, help="also draw the sweeps (needs vl-convert-python)"
    )
    cli.add_html(report_)
    report_.add_argument("--strict", action="store_true", help="expect every claim to hold, as published")
    cli.add_goodput(report_)
    cli.add_formats(report_, "each point, job and load")
    add_question(report_.add_argument_group("external results, as `judge` reads them"))
    words = "draw what archives hold: throughput, latency, rates, GPU use, energy, replicas, gates "
    words += "(needs vl-convert-python)"
    figures_ = cli.add_command(commands, "figures", words, FIGURES_STATUS, figures)
    cli.add_archives(figures_, "RECORDS")
    where = "where to write the pictures; made if it is not there (default: figures)"
    figures_.add_argument("--out", metavar="FOLDER", type=Path, default=Path("figures"), help=where)
    figures_.add_argument(
        "--format", choices=("png", "svg"), default="png", help="format of the pictures (default: png)"
    )
    cli.add_goodput(figures_, "goodput at each rate, and the bounds as lines")


def report(given: argparse.Namespace) -> int:
    """Tables and verdicts, and the sweeps' picture where one is wanted; of external results, what `judge` says."""
    if given.list:
        return list_runs(given)
    if are_external(given):
        if given.figure is not None:
            raise BadUsage("--figure draws archives of ours, and these are external results", "no --figure")
        return judge(given)
    terms = ValidityCriteria(slo_of_requests(given.goodput))
    archives = read_each(given)
    contents, (gates, remarks) = merged([each for _, each in archives]), gates_of(archives)
    loads = [m for m in contents.measurements if is_windowed(m.load) or is_counted_loop(m)]
    found = judged_again(contents, given.strict, terms.slo)
    notes = [*contents.notes, *remarks, *found.notes]
    if not (found.curves or found.jobs or gates or loads) and not (given.json or given.csv):
        notes.append("no sweep was measured")
    found = replace(found, gates=gates, notes=notes, archives=list(map(str, given.paths)), command=command_of(contents))
    if given.json:
        print(as_json(facts_of(found, loads, terms)))
    elif given.csv:
        print(as_csv(rows_of(found, loads, terms)), end="")
        cli.print_notes(notes, sys.stderr)
    else:
        print("\n".join(pieces(found, loads, terms, given.show)))
    beside = sys.stderr if given.json or given.csv else sys.stdout
    if given.figure is not None:
        sweeps = next((each for each in pictures(found.curves) if each.name == "sweeps"), None)
        if sweeps is None:
            raise BadUsage("there are replicas only, and no sweep", "slmserve figures draws them")
        save_picture(sweeps, given.figure)
        print(f"drawn: {given.figure}", file=beside)
    kinds = {"as expected": cli.PASSES, "unexpected": cli.FAILS, "inconclusive": cli.INCONCLUSIVE}
    statuses = {kinds[outcome(*pair, strict=given.strict)] for pair in found.judged}
    statuses |= {status_of(each.outcome) for each in gates}
    statuses |= {cli.PASSES} if found.curves or found.jobs or loads else set()  # where nothing is claimed of them
    status = next((each for each in (cli.FAILS, cli.INCONCLUSIVE, cli.PASSES) if each in statuses), cli.INCONCLUSIVE)
    if given.html is not None:
        with laid_out(TEXT_WIDTH):
            text = "\n".join(pieces(found, loads, terms, "all"))
        records = [one for path in given.paths for one in embedded(path)]
        write_page(given.html, rendered(found, contents.measurements, records, status=status, text=text))
        print(f"written: {given.html}", file=beside)
    return status


def list_runs(given: argparse.Namespace) -> int:
    """A line for each run of the archives."""
    archives = {path: read(path, skip_damaged=given.skip_damaged) for path in given.paths}
    rows = [
        {
            "path": path,
            **facts(run, "id", "started", "resumes", "pytest_slmserve"),
            **run_list.measured_facts(run.measurements),
        }
        for path, contents in archives.items()
        for run in runs_of(contents)
    ]
    if given.json:
        print(as_json({"runs": rows}))
    elif given.csv:
        print(as_csv(rows), end="")
    else:
        print(run_list.run_table(rows, several=len(archives) > 1) if rows else "no run has measured anything")
        cli.print_notes(note for contents in archives.values() for note in contents.notes)
    return cli.PASSES


def pieces(found: Findings, loads: Sequence[Measurement], terms: ValidityCriteria, detail: Detail) -> Iterator[str]:
    """The text, as wide as the terminal: one screen, or the tables, with a page for each load that is no point."""
    with laid_out(every_column=detail == "all"):
        yield from (text for text, _ in (screen(found) if detail == "summary" else tables(found)))
        yield from (f"{folded(page)}\n" for page in load_texts(loads, terms))
        if detail != "summary":
            yield from (folded(f"note: {note}") for note in found.notes)


def facts_of(found: Findings, loads: Sequence[Measurement], terms: ValidityCriteria) -> dict[str, Any]:
    """All that the text tells, for JSON."""
    return {
        "points": point_facts(found.curves, found.shared, found.jobs, terms.slo),
        "loads": [facts_of_load(m, terms) for m in loads],
        "sweeps": sweep_facts(found.curves),
        "verdicts": [verdict_facts(verdict, row, strict=found.strict) for verdict, row in found.judged],
        "gates": map(gate_facts, found.gates),
        "history": found.history,
        "notes": found.notes,
    }


def rows_of(found: Findings, loads: Sequence[Measurement], terms: ValidityCriteria) -> Iterator[dict[str, Any]]:
    """A row for each point, job and load."""
    yield from point_facts(found.curves, found.shared, found.jobs, terms.slo)
    for m in loads:
        yield from ({"kind": "load", **row} for row in rows_of_load(m, terms))


def figures(given: argparse.Namespace) -> int:
    """Every picture that the archives have the measurements for, and why there is no other."""
    slo = slo_of_requests(given.goodput)
    archives = read_each(given)
    contents, (gates, remarks) = merged([each for _, each in archives]), gates_of(archives)
    cli.print_notes((*contents.notes, *remarks))
    curves, jobs, drawn = curves_of(contents), job_points(contents.measurements), gate_pictures(gates)
    at_rates = [m for m in contents.measurements if is_windowed(m.load)]
    if not (drawn or curves or jobs or at_rates):
        why = "there is no sweep, no job, no request rate, no ramp and no gate to draw"
        raise BadUsage(why, "slmserve report prints what there is")
    drawn += pictures(curves, jobs, at_rates, slo) if curves or jobs or at_rates else []
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot make the folder {given.out}: {error.strerror}"
        raise BadUsage(why, "--out with another folder") from None
    for picture in drawn:
        if not picture.panels:
            print(f"not drawn: {picture.name}: {picture.why_not}")
        else:
            path = given.out / f"{picture.name}.{given.format}"
            save_picture(picture, path)
            print(f"drawn: {path}")
    return cli.PASSES if any(picture.panels for picture in drawn) else cli.USAGE


def read_each(given: argparse.Namespace) -> list[tuple[Path, Contents]]:
    """Path and contents of each archive, also of those inside a page, of the runs that are wanted."""
    wanted = RunChoice(given.run, given.since)
    found = [each for path in given.paths for each in store.read_each(path, skip_damaged=given.skip_damaged)]
    return [(path, chosen(contents, wanted)) for path, contents in found]


def read_all(given: argparse.Namespace) -> Contents:
    """Archives are read as if they were one: their sweeps of one engine and workload are repeats of each other."""
    return merged([contents for _, contents in read_each(given)])


def gates_of(archives: Sequence[tuple[Path, Contents]]) -> tuple[list[Gated], list[str]]:
    """Each gate of the archives once, in view of the noise that is known beside its archive; and what is to be said of
    them. Raises BadArchive where stored terms are none, BadUsage where the calibration beside one is none."""
    found: dict[str, Gated] = {}
    notes: list[str] = []
    for path, contents in archives:
        for gated, note in stored_gates(contents.measurements, contents.plans):
            if gated.gate not in found:
                found[gated.gate], noise = noted(gated, path)
                notes += filter(None, (note, noise))
    return list(found.values()), notes


def noted(gated: Gated, records: Path) -> tuple[Gated, str]:
    """A gate in view of its runner's noise, and what that is; nothing where it is not known."""
    if not gated.pairs:
        return gated, ""
    if (known := find(beside(records), place_of(gated))) is None:
        return gated, ""
    return weaker(gated, known.calibration), calibration_text(gated.model, known.calibration, known.measured_at)


def curves_of(contents: Contents) -> Sequence[Curve]:
    """Raises BadArchive where the stored plans are none."""
    return stored_curves(contents.measurements, contents.plans)


def judged_again(contents: Contents, strict: bool = False, slo: Slo | None = None) -> Findings:
    """Curves, points, the history over releases, and verdicts on the claims that the runs judged, or on all where one
    does not tell, and where `strict`. Raises BadArchive where the stored claims or plans are none."""
    jobs = job_points(contents.measurements)
    sweeps = curves_of(contents)
    curves = with_jobs(sweeps, jobs)
    judged = judge_all(curves, table.ROWS, rows_from(contents.claims)) if curves else []
    # Claims that the tests of these runs judge, unless one of them, an older one, does not tell.
    told = [names for session in contents.sessions if isinstance(names := session.plan.get("claims"), list)]
    all_tell = told and len(told) == len(contents.sessions)
    names = {str(name) for each in told for name in each} if all_tell and not strict else None
    kept = [pair for pair in judged if names is None or pair[0].claim in names]
    shared = shared_points(contents.measurements)
    history = release_histories(contents.measurements)
    notes = [NOT_JUDGED] if len(kept) < len(judged) else []
    return Findings(
        curves=sweeps, judged=kept, shared=shared, jobs=jobs, history=history, strict=strict, notes=notes, slo=slo
    )


def command_of(contents: Contents) -> str:
    """The command that made the run of these records; empty where they are of several commands, or none is stored."""
    told = [str(session.plan.get("command", "")) for session in contents.sessions]
    try:
        return printable(shlex.join(shlex.split(told[0]))) if len(set(told)) == 1 else ""
    except ValueError:  # a quotation without an end: none of ours
        return ""


def merged(archives: Sequence[Contents]) -> Contents:
    """Records of all, each once; sessions by their start: the last one's claims are those that were expected."""
    return Contents(
        tuple(unique(m for contents in archives for m in contents.measurements)),
        tuple(sorted((s for contents in archives for s in contents.sessions), key=lambda session: session.started)),
        tuple(dict.fromkeys(note for contents in archives for note in contents.notes)),
    )
