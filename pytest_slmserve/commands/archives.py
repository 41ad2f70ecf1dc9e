"""`report` and `figures`: what archives hold, as text and as pictures, with no GPU, no vLLM and no pytest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_slmserve.commands.words import FAILS, HOLDS, UNDECIDED, USAGE, Commands, add_archives, add_command
from pytest_slmserve.errors import BadUsage

if TYPE_CHECKING:
    from pytest_slmserve.analysis.curve import Curve
    from pytest_slmserve.report.rejudge import Judged
    from pytest_slmserve.store import Contents

REPORT_STATUS = (
    f"{HOLDS} all verdicts are as expected, {FAILS} one is not, {UNDECIDED} none is wrong but one is "
    f"undecided or nothing was measured, {USAGE} wrong usage or an archive that cannot be read."
)
FIGURES_STATUS = f"{HOLDS} something was drawn, {USAGE} nothing was, wrong usage or an archive that cannot be read."


def add(commands: Commands) -> None:
    report_ = add_command(commands, "report", "print the tables and verdicts of archives", REPORT_STATUS, report)
    add_archives(report_, "PATH")
    report_.add_argument("--figure", metavar="OUT.png", type=Path, help="also draw the sweeps (needs matplotlib)")
    report_.add_argument("--strict", action="store_true", help="expect every claim to hold, as the papers make them")
    words = "draw what archives hold: throughput, GPU use, energy, replicas (needs matplotlib)"
    figures_ = add_command(commands, "figures", words, FIGURES_STATUS, figures)
    add_archives(figures_, "RECORDS")
    where = "where to write the pictures; made if it is not there (default: figures)"
    figures_.add_argument("--out", metavar="FOLDER", type=Path, default=Path("figures"), help=where)
    figures_.add_argument("--format", choices=("png", "svg"), default="png", help="of the pictures (default: png)")


def report(given: argparse.Namespace) -> int:
    """Tables and verdicts, and the sweeps' picture where one is wanted."""
    contents = read_all(given.paths, given.skip_damaged)
    curves, judged, text = judged_again(contents, given.strict)
    print(text)
    for note in contents.notes if curves else (*contents.notes, "no sweep was measured"):
        print(f"note: {note}")
    if given.figure is not None:
        from pytest_slmserve.report.figures import draw_sweeps

        draw_sweeps(curves, given.figure)
        print(f"drawn: {given.figure}")
    return exit_status(judged, given.strict) if curves else UNDECIDED


def figures(given: argparse.Namespace) -> int:
    """Every picture that the archives have the measurements for, and why there is no other."""
    from pytest_slmserve.report.drawing import save
    from pytest_slmserve.report.figures import pictures

    contents = read_all(given.paths, given.skip_damaged)
    for note in contents.notes:
        print(f"note: {note}")
    drawn = pictures(curves_of(contents))
    make(given.out)
    for picture in drawn:
        if picture.figure is None:
            print(f"not drawn: {picture.name}: {picture.why_not}")
        else:
            path = given.out / f"{picture.name}.{given.format}"
            save(picture.figure, path)
            print(f"drawn: {path}")
    return HOLDS


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadUsage(f"cannot make the folder {folder}: {error.strerror}", "--out with another folder") from None


def read_all(paths: Sequence[Path], skip_damaged: bool) -> Contents:
    """Archives are read as if they were one: their sweeps of one engine and workload are repeats of each other."""
    from pytest_slmserve.store import read

    return merged([read(path, skip_damaged=skip_damaged) for path in paths])


def curves_of(contents: Contents) -> Sequence[Curve]:
    """Raises BadArchive where the stored plans are none."""
    from pytest_slmserve.report.rejudge import stored_curves

    return stored_curves(contents.measurements, [(s.started, s.plan) for s in contents.sessions])


def judged_again(contents: Contents, strict: bool) -> tuple[Sequence[Curve], Sequence[Judged], str]:
    """Curves, verdicts and the text about them. Raises BadArchive where the stored claims or plans are none."""
    from pytest_slmserve.analysis.replication import shared_points
    from pytest_slmserve.report.rejudge import judge_all, rows_from
    from pytest_slmserve.report.tables import run_lines

    curves = curves_of(contents)
    judged = judge_all(curves, rows_from(contents.claims))
    shared = shared_points(contents.measurements)
    return curves, judged, "\n".join(text for text, _ in run_lines(curves, judged, shared=shared, strict=strict))


def merged(archives: Sequence[Contents]) -> Contents:
    """Records of all, each once; sessions by the time they started, so that the last one's claims rule."""
    from pytest_slmserve.report.rejudge import unique
    from pytest_slmserve.store import Contents

    return Contents(
        tuple(unique(m for contents in archives for m in contents.measurements)),
        tuple(sorted((s for contents in archives for s in contents.sessions), key=lambda session: session.started)),
        tuple(note for contents in archives for note in contents.notes),
    )


def exit_status(judged: Sequence[Judged], strict: bool) -> int:
    from pytest_slmserve.report.tables import outcome

    seen = {outcome(verdict, row, strict=strict) for verdict, row in judged}
    return FAILS if "unexpected" in seen else UNDECIDED if "undecided" in seen else HOLDS
