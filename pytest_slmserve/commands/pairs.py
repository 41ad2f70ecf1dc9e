"""`pairs` command: decide by the rule of `--slm-gate` whether a candidate is slower, from pairs of any tool."""

import argparse
from functools import partial
from pathlib import Path

from pytest_slmserve.analysis.gate import decision
from pytest_slmserve.analysis.gate.decision import MARGIN
from pytest_slmserve.analysis.gate.launch_pairs import SIDES
from pytest_slmserve.archive import external
from pytest_slmserve.commands import cli
from pytest_slmserve.options.table import percentage
from pytest_slmserve.report import gate as report
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.writer import write_page
from pytest_slmserve.report.section import Section, section_text
from pytest_slmserve.schema.errors import BadUsage

STATUS = (
    f"{cli.PASSES} it passes; {cli.FAILS} it fails; {cli.INCONCLUSIVE} inconclusive; {cli.USAGE} wrong usage, or a "
    "file without pairs."
)


def add_pairs(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "pairs", STATUS, run_pairs)
    columns = "a CSV with the columns baseline and candidate, one row per pair in the order measured"
    command.add_argument("path", metavar="PAIRS", type=Path, help=columns)
    better = "which values are better: higher for throughput, lower for latency"
    command.add_argument("--direction", choices=("higher", "lower"), required=True, help=better)
    margin = (
        "largest accepted slowdown: passes if shown to be less than this much worse; fails if shown to be "
        "worse by more than half of this"
    )
    margin += f" (default: {MARGIN})"
    command.add_argument("--margin", metavar="SHARE", type=cli.typed(percentage), default=MARGIN, help=margin)
    cli.add_formats(command)
    cli.add_html(command)


def run_pairs(given: argparse.Namespace) -> int:
    rows = external.read_results(given.path)
    if not rows:
        raise BadUsage(
            f"{given.path.name}: there are no pairs in it", "Pass a CSV file with the columns baseline and candidate."
        )
    external.check_columns(rows, SIDES)
    sides = ([external.number_in(row, side) if row.text(side) else None for row in rows] for side in SIDES)
    series = decision.PairSeries(given.path.name, given.direction, tuple(zip(*sides)), given.margin)
    (found,) = decision.gate([series], decision.GateCriteria(given.margin))
    parts, status = report.comparison_parts([found]), cli.EXIT_STATUS[found.outcome]
    text = section_text(Section("", parts)).lstrip("\n")
    cli.say(as_json(report.comparison_facts(found)) if given.json else text)
    if given.html:
        drawn = partial(report.gate_charts, [found])
        heading = f"{series.name}: {report.WORDS[found.outcome]}"
        section = Section(heading, parts, report.LOOKS[found.outcome], drawn)
        write_page(given.html, Findings(), status=status, sections={"Gate": [section]})
    return status
