"""`python -m pytest_slmserve report PATH`: tables and verdicts of an archive again, with no GPU, no vLLM, no pytest.

`python -m pytest_slmserve figures RECORDS`: pictures of what was measured, and of what the sensors saw.

`python -m pytest_slmserve judge FILE`: the same questions to results that are not ours, a CSV or vLLM's own JSON.

`python -m pytest_slmserve doctor`: what this host can measure, and what would spoil it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_slmserve.errors import BadUsage, SlmError

if TYPE_CHECKING:
    from pytest_slmserve.analysis.curve import Curve
    from pytest_slmserve.report.judging import Question
    from pytest_slmserve.report.rejudge import Judged
    from pytest_slmserve.store import Contents

HOLDS, FAILS, USAGE, UNDECIDED = 0, 1, 4, 10
EPILOG = (
    f"Exit status: {HOLDS} all verdicts are as expected, {FAILS} one is not, {UNDECIDED} none is wrong but one is "
    f"undecided or nothing was measured, {USAGE} wrong usage or an archive that cannot be read."
)
FIGURES_EPILOG = (
    f"Exit status: {HOLDS} something was drawn, {USAGE} nothing was, wrong usage or an archive that cannot be read."
)
JUDGE_EPILOG = f"Exit status: {HOLDS} it could be judged, {USAGE} wrong usage, or a file that cannot be judged."
DOCTOR_EPILOG = f"Exit status: {HOLDS} nothing is a problem, {FAILS} something is, {USAGE} wrong usage."

COLUMN_OPTIONS = (
    ("knob", True, "column of the load: max_num_seqs, max_concurrency"),
    ("throughput", True, "column of tokens/s, of whatever tokens"),
    ("latency", True, "column of the latency, best the time per output token"),
    ("preemptions", False, "column of preemptions: a point with any is shown, and never chosen"),
    ("running", False, "column of the mean number of running requests, to be checked by Little's law"),
    ("output-throughput", False, "column of output tokens/s, for Little's law"),
)


class Parser(argparse.ArgumentParser):
    """Wrong usage is an error like every other."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(message, f"{self.prog} --help")


def parser() -> Parser:
    top = Parser("python -m pytest_slmserve", description="What pytest-slmserve measured, without measuring.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    words = "print the tables and verdicts of archives"
    report = commands.add_parser("report", help=words, description=f"{words[0].upper()}{words[1:]}.", epilog=EPILOG)
    add_archives(report, "PATH")
    report.add_argument("--figure", metavar="OUT.png", type=Path, help="also draw the sweeps (needs matplotlib)")
    report.add_argument("--strict", action="store_true", help="expect every claim to hold, as the papers make them")
    add_figures(commands)
    add_judge(commands)
    add_doctor(commands)
    return top


def add_archives(command: Parser, metavar: str) -> None:
    command.add_argument("paths", metavar=metavar, nargs="+", type=Path, help="an archive that --slm-records wrote")
    command.add_argument("--skip-damaged", action="store_true", help="leave out damaged lines, and say which")


def add_figures(commands: argparse._SubParsersAction[Parser]) -> None:
    words = "draw what archives hold: throughput, GPU use, energy (needs matplotlib)"
    figures = commands.add_parser(
        "figures", help=words, description=f"{words[0].upper()}{words[1:]}.", epilog=FIGURES_EPILOG
    )
    add_archives(figures, "RECORDS")
    where = "where to write the pictures; made if it is not there (default: figures)"
    figures.add_argument("--out", metavar="FOLDER", type=Path, default=Path("figures"), help=where)
    figures.add_argument("--format", choices=("png", "svg"), default="png", help="of the pictures (default: png)")


def add_judge(commands: argparse._SubParsersAction[Parser]) -> None:
    words = "judge results that are not ours: a CSV, or the JSON of `vllm bench serve`"
    judge = commands.add_parser("judge", help=words, description=f"{words[0].upper()}{words[1:]}.", epilog=JUDGE_EPILOG)
    judge.add_argument("paths", metavar="FILE", nargs="+", type=Path, help="a CSV with named columns, or JSON")
    for name, required, meaning in COLUMN_OPTIONS:
        judge.add_argument(f"--{name}", metavar="NAME", required=required, help=meaning)
    judge.add_argument("--latency-unit", choices=("ms", "s"), help="where the name does not end in _ms or _s")
    where = "only rows with this value; may be given again"
    judge.add_argument("--where", metavar="NAME=VALUE", action="append", default=[], help=where)
    objective = "2x@32: at most twice the latency at 32; or 30ms, 0.03s"
    judge.add_argument("--slo-itl", metavar="LIMIT", help=objective)
    share = "smallest batching efficiency T(B)/(B T(1)) of B_opt (default: 0.1)"
    judge.add_argument("--efficiency", metavar="SHARE", type=float, default=0.1, help=share)
    flat = "gain per doubling below which throughput counts as flat (default: 0.1)"
    judge.add_argument("--tolerance", metavar="SHARE", type=float, default=0.1, help=flat)
    half = "half-saturation batch where it is known, from shapes: then T_inf alone is fitted"
    judge.add_argument("--b-half", metavar="BATCH", type=float, help=half)
    judge.add_argument("--json", action="store_true", help="one JSON object instead of text")


def add_doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    words = "say what this host can measure, and what would spoil it"
    doctor = commands.add_parser(
        "doctor", help=words, description=f"{words[0].upper()}{words[1:]}.", epilog=DOCTOR_EPILOG
    )
    names = "an interpreter that may have vLLM; may be given again (default: the one that runs this)"
    doctor.add_argument("--python", metavar="PATH", action="append", default=[], help=names)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; every problem is one sentence on stderr."""
    top = parser()
    try:
        given = top.parse_args(arguments)
        if given.command is None:
            top.print_help()
            return USAGE
        return carry_out(given)
    except SlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def carry_out(given: argparse.Namespace) -> int:
    match given.command:
        case "doctor":
            from pytest_slmserve.doctor.page import doctor

            return doctor(given.python)
        case "figures":
            return figures(given.paths, given.skip_damaged, given.out, given.format)
        case "judge":
            return judge(given)
        case _:
            return report(given.paths, given.skip_damaged, given.figure, given.strict)


def report(paths: Sequence[Path], skip_damaged: bool, figure: Path | None, strict: bool) -> int:
    """Tables and verdicts, and the sweeps' picture where one is wanted."""
    contents = read_all(paths, skip_damaged)
    curves, judged, text = judged_again(contents, strict)
    print(text)
    for note in contents.notes if curves else (*contents.notes, "no sweep was measured"):
        print(f"note: {note}")
    if figure is not None:
        from pytest_slmserve.report.figures import draw_sweeps

        draw_sweeps(curves, figure)
        print(f"drawn: {figure}")
    return exit_status(judged, strict) if curves else UNDECIDED


def figures(paths: Sequence[Path], skip_damaged: bool, folder: Path, suffix: str) -> int:
    """Every picture that the archives have the measurements for, and why there is no other."""
    from pytest_slmserve.report.drawing import save
    from pytest_slmserve.report.figures import pictures

    contents = read_all(paths, skip_damaged)
    for note in contents.notes:
        print(f"note: {note}")
    drawn = pictures(curves_of(contents))
    make(folder)
    for picture in drawn:
        if picture.figure is None:
            print(f"not drawn: {picture.name}: {picture.why_not}")
        else:
            path = folder / f"{picture.name}.{suffix}"
            save(picture.figure, path)
            print(f"drawn: {path}")
    return HOLDS


def judge(given: argparse.Namespace) -> int:
    """Plateau, Pareto front, saturation law and the batch to choose, from results that are not ours."""
    from pytest_slmserve import foreign
    from pytest_slmserve.report import judging

    question = question_of(given)
    names = question.columns
    rows = [row for path in given.paths for row in foreign.read(path)]
    foreign.check_columns(
        rows, [names.knob, names.throughput, names.latency, names.preemptions, names.running, names.output]
    )
    chosen = foreign.matching(rows, given.where)
    found = judging.judge(foreign.settings_of(chosen, names), question, foreign.mixtures(chosen))
    print(judging.as_json(found) if given.json else judging.text(found))
    return HOLDS


def question_of(given: argparse.Namespace) -> Question:
    """Raises BadUsage where a number is out of range."""
    from pytest_slmserve.analysis.batching import parse_slo
    from pytest_slmserve.foreign import Columns
    from pytest_slmserve.report.judging import Question

    for name, share in (("efficiency", given.efficiency), ("tolerance", given.tolerance)):
        if not 0 < share < 1:
            raise BadUsage(f"--{name} {share:g} is no share between 0 and 1", f"--{name} 0.1")
    if given.b_half is not None and not 0 < given.b_half < 1e9:
        raise BadUsage(f"--b-half {given.b_half:g} is no batch", "a number above 0")
    columns = Columns(
        knob=given.knob,
        throughput=given.throughput,
        latency=given.latency,
        latency_unit=given.latency_unit,
        preemptions=given.preemptions,
        running=given.running,
        output=given.output_throughput,
    )
    slo = parse_slo(given.slo_itl) if given.slo_itl is not None else None
    return Question(
        columns=columns, slo=slo, threshold=given.efficiency, tolerance=given.tolerance, b_half=given.b_half
    )


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
    from pytest_slmserve.report.rejudge import judge_all, rows_from
    from pytest_slmserve.report.tables import run_lines

    curves = curves_of(contents)
    judged = judge_all(curves, rows_from(contents.claims))
    return curves, judged, "\n".join(text for text, _ in run_lines(curves, judged, strict=strict))


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


def run() -> int:
    """`main` where the reader of a pipe may leave early, and names may hold what the terminal cannot show."""
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILS
    return status


if __name__ == "__main__":
    sys.exit(run())
