"""`compare` command: compare runs of one or several results files with the first, and manage stored baselines."""

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.compare.changes import METRICS, TOLERANCE, compare, compared_cases
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import all_of
from pytest_slmserve.archive import baselines, store
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.report import judged_again, read_all, report_lines
from pytest_slmserve.options.table import percentage
from pytest_slmserve.report import compare as report
from pytest_slmserve.report.as_json import as_json, facts, point_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.writer import write_page
from pytest_slmserve.report.section import in_units, section_text
from pytest_slmserve.report.text_table import ABSENT, Column, counted, named_lines, table
from pytest_slmserve.schema.errors import BadUsage, is_file
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

STATUS = (
    f"{cli.PASSES} no metric is worse; {cli.FAILS} one is; {cli.INCONCLUSIVE} none is for certain but one is "
    f"inconclusive, or nothing could be compared; {cli.USAGE} wrong usage or an unreadable results file."
)
# Fields of the environment that are shown, by line.
LINES = {
    "device": (("", "gpu_name"), ("", "gpu_memory_bytes"), ("driver ", "driver")),
    "software": (("vLLM ", "vllm"), ("torch ", "torch"), ("CUDA ", "cuda"), ("Python ", "python")),
    "host": (("", "cpu"), ("cores: ", "cores"), ("", "operating_system"), ("", "host")),
}


def add_compare(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "compare", STATUS, run_compare)
    archives = "results files or names of saved baselines: first the baseline, then candidates; with one file, its runs"
    command.add_argument("paths", metavar="RECORDS", nargs="*", type=Path, help=archives)
    run = "a run of one results file, as `slmserve report --list` names it: first the baseline, then each candidate"
    command.add_argument("--run", metavar="ID", action="append", default=[], help=run)
    cli.add_since(command)
    tolerance = f"smallest change that matters (default: {TOLERANCE:g}, which is {100 * TOLERANCE:g}%%)"
    command.add_argument("--tolerance", metavar="SHARE", type=cli.typed(percentage), default=TOLERANCE, help=tolerance)
    metric = "compare only this metric, by its JSON name, for example output_tokens_per_s; can be given several times"
    command.add_argument("--metric", metavar="NAME", action="append", default=[], help=metric)
    command.add_argument("--skip-damaged", action="store_true", help="skip damaged lines, and name them")
    cli.add_formats(command, "each metric of each case")
    cli.add_html(command)
    stored = command.add_argument_group("stored baselines, each of one device and release of vLLM")
    action = stored.add_mutually_exclusive_group()
    kept = "save the valid measurements of the results files as baselines, and stop"
    action.add_argument("--save", action="store_true", help=kept)
    action.add_argument("--list", action="store_true", help="list the saved baselines, and stop")
    action.add_argument("--show", metavar="NAME", help="print one saved baseline, and stop")
    stored.add_argument("--replace", action="store_true", help="with --save: overwrite a baseline of the same name")
    where = f"folder of the saved baselines (default: {baselines.FOLDER})"
    stored.add_argument("--folder", metavar="FOLDER", type=Path, default=baselines.FOLDER, help=where)


def run_compare(given: argparse.Namespace) -> int:
    """Print each candidate next to the baseline, or manage baselines. The worst candidate sets the status."""
    if given.list:
        return list_baselines(given)
    if given.show is not None:
        return show_baseline(given)
    if not given.paths:
        raise BadUsage("the following arguments are required: RECORDS", "slmserve compare --help")
    if given.save and len(given.run) > 1:
        raise BadUsage("--save takes one --run, or all", "--save --run ID")
    if given.save:
        return save_baselines(given)
    if unknown := [name for name in given.metric if name not in METRICS]:
        raise BadUsage(f"--metric {unknown[0]} is not compared", f"Use one of {', '.join(METRICS)}.")
    baseline, *candidates = sides_of(given)
    found = [
        (baseline, each, compare(baseline.measurements, each.measurements, given.tolerance, given.metric or METRICS))
        for each in candidates
    ]
    unit = baseline.measurements[0].workload.unit if baseline.measurements else "token"
    sections = [in_units(report.comparison_section(*each), unit) for each in found]
    rows = (
        {"baseline_run": one.name, "candidate_run": other.name, **facts(change)}
        for one, other, compared in found
        for change in compared.changes
    )
    comparisons = {"tolerance": given.tolerance, "comparisons": (report.change_facts(*each) for each in found)}
    cli.print_result(given, comparisons, rows, ["\n\n".join(map(section_text, sections))])
    status = cli.EXIT_STATUS[all_of(comparison.state for *_, comparison in found)]
    if given.html:
        once = {m.id: m for side in (baseline, *candidates) for m in side.measurements}  # a copy is no repeat
        sides = Findings(measurements=list(once.values()))
        write_page(given.html, sides, given.paths, status=status, sections={"Comparison": sections})
    return status


def sides_of(given: argparse.Namespace) -> list[report.RunSide]:
    """Return the sides of the comparison, the baseline first."""
    by_name = baselines.kept_archives(given.folder)
    paths = [path if is_file(path) else by_name.get(str(path), path) for path in given.paths]
    archives = [store.read(path, skip_damaged=given.skip_damaged) for path in paths]
    if len(archives) > 1:
        if given.run not in ([], ["all"]):
            problem = "--run chooses among the runs of one results file, and there are several files"
            raise BadUsage(problem, "Pass one results file, or --run all to take all runs of each.")
        chosen = (store.chosen(each, "".join(given.run), given.since) for each in archives)
        return [
            report.RunSide(str(path), each.measurements, command_of(each)) for path, each in zip(given.paths, chosen)
        ]
    (path,), (contents,) = given.paths, archives
    there = [run for run in store.runs_of(contents) if run.measurements or run.header.resumes]
    wanted = [store.run_named(there, name) for name in given.run] or there
    if len(wanted) < 2:
        raise BadUsage(
            f"{path} has one run to compare, and two are needed",
            "Pass two results files: slmserve compare BASELINE CANDIDATE.",
        )
    if len(wanted) > 2 and not given.run:
        raise BadUsage(
            f"{path} has {len(wanted)} runs: which two?",
            "Pass --run ID --run ID, as `slmserve report --list` names them.",
        )
    return [
        report.RunSide(f"{path} run {run.header.id}", store.chosen(contents, run.header.id).measurements)
        for run in wanted
    ]


def command_of(contents: store.Contents) -> str:
    """Return the `slmserve measure` command that last wrote to a results file, or "" if another program did."""
    commands = [run.command for run in contents.sessions]
    return commands[-1] if commands and commands[-1].startswith("slmserve measure ") else ""


def save_baselines(given: argparse.Namespace) -> int:
    """Save the valid measurements as baselines, and print where they are, and what was excluded and why."""
    given.run = "".join(given.run)
    contents = read_all(given)
    kept, left_out = baselines.accept(
        contents.measurements, given.folder, overwrite=given.replace, claims=contents.claims
    )

    def print_reasons(words: str, found: Iterable[tuple[Measurement, str]]) -> None:
        lines = Counter(f"{short_name(m.spec.model)} at {m.load.title}: {why}" for m, why in found)
        for text, count in sorted(lines.items()):
            cli.say(f"{words}: {text}{f' ({count} times)' if count > 1 else ''}")

    for path, measurements in kept.items():
        models = ", ".join(report.measured_facts(measurements)["models"])
        cli.say(f"kept: {path}: {counted(len(measurements), 'measurement')} of {models}")
        doubts = ((m, "; ".join(check(m).degradations)) for m in measurements)
        print_reasons("note: questionable (included)", (pair for pair in doubts if pair[1]))
    print_reasons("left out", left_out)
    cli.print_notes(contents.notes)
    return cli.PASSES


def list_baselines(given: argparse.Namespace) -> int:
    found = [_baseline_facts(*each) for each in baselines.baselines(given.folder).items()]
    if given.json:
        cli.say(as_json(found))
        return cli.PASSES
    rows = [each for each in found if each["measurements"] or not each["notes"]]
    columns: tuple[Column[dict[str, Any]], ...] = (
        Column("name", lambda row: row["name"], side="left"),
        Column("measured", lambda row: report.days_of(row["measured"]) or ABSENT, side="left"),
        Column("measurements", lambda row: str(row["measurements"])),
        Column("launches", lambda row: str(row["launches"])),
        Column("models", lambda row: ", ".join(row["models"]), side="left"),
    )
    cli.say(table(rows, columns, always=len(columns)) if rows else f"no baseline in {given.folder}")
    cli.print_notes(note for each in found for note in each["notes"])
    return cli.PASSES


def show_baseline(given: argparse.Namespace) -> int:
    path, found = baselines.baseline(given.folder, given.show)
    seen = _baseline_facts(path, found)
    tables = replace(judged_again(replace(found, sessions=())), judged=[], history=[])
    if given.json:
        cli.say(as_json({**seen, "points": point_facts(tables)}))
        return cli.PASSES
    launches, hosts = counted(seen["launches"], "launch"), counted(len(seen["environment"]["host"]), "host")
    count, days = counted(seen["measurements"], "measurement"), report.days_of(seen["measured"]) or ABSENT
    cli.say(f"{seen['name']}: {count}, {launches}, {hosts}, measured {days}")
    about = []
    for line, names in LINES.items():
        known = []
        for words, name in names:
            values = seen["environment"][name]
            shown = [f"{size / GIB:.0f} GiB" for size in values] if name == "gpu_memory_bytes" else map(str, values)
            known += [f"{words}{' and '.join(shown)}"] if values else []
        about.append((line, ", ".join(known) or ABSENT))
    cli.say("\n".join([f"{named_lines(about)}\n", *report_lines(tables, "tables")]))
    others = len(found.measurements) - sum(map(len, compared_cases(found.measurements, steady=True).values()))
    missing = f"{others} of loads without a window, or of engines among several of which some are missing"
    cli.print_notes([*found.notes, *([missing] if others else [])])
    return cli.PASSES


def _baseline_facts(path: Path, found: store.Contents) -> dict[str, Any]:
    """Return facts for JSON, with the first and last time ("measured") and the distinct values of the environment."""
    seen = found.measurements
    values = {
        name: dict.fromkeys(getattr(m.environment, name) for m in seen) for line in LINES.values() for _, name in line
    }
    return {
        "name": path.name.removesuffix(baselines.SUFFIX),
        "path": path,
        "notes": found.notes,
        **{name: report.measured_facts(seen)[name] for name in ("measurements", "launches", "models")},
        "measured": sorted(m.measured_at for m in seen)[:: max(len(seen) - 1, 1)],
        "environment": {name: [each for each in met if each is not None] for name, met in values.items()},
    }
