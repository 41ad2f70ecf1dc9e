"""`predict`: the throughput of a sweep on a GPU that is not here, and its error if that GPU was measured too."""

import argparse

from pytest_slmserve.analysis.advice.other_gpu import gpu_named, limit_sweeps, measured_there, predicted_elsewhere
from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_for
from pytest_slmserve.analysis.sweep.curve import labels
from pytest_slmserve.analysis.verdict import all_of
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.report import read_all
from pytest_slmserve.report.advice import prediction_report
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.section import in_units, section_text
from pytest_slmserve.schema.errors import TooFewPoints

STATUS = (
    f"{cli.PASSES} predicted, and within 10 % where the archives have that GPU; {cli.FAILS} farther off somewhere; "
    f"{cli.INCONCLUSIVE} too noisy to tell or nothing can be predicted; {cli.USAGE} wrong usage or an archive that "
    "cannot be read."
)


def add_predict(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "predict", STATUS, run_predict)
    cli.add_archives(command, "RECORDS")
    command.add_argument("--gpu", metavar="NAME", required=True, help="kind of the GPU: H200, A100-80, L40S ...")
    cli.add_formats(command, "each load")


def run_predict(given: argparse.Namespace) -> int:
    """Print predictions from all sweeps on other GPUs, of loads and of batch limits, checked by those on the GPU."""
    gpu, contents = gpu_named(given.gpu), read_all(given)
    sweeps = stored_curves(contents.measurements, contents.plans)
    curves = [curve for curve in (*sweeps, *limit_sweeps(contents.measurements)) if curve.valid]
    others = [c for c in curves if c.spec is None or c.peaks != peaks_for(c.spec, gpu)]
    found, notes = [], list(contents.notes)
    for curve, name in zip(others, labels(others), strict=True):
        try:
            prediction = predicted_elsewhere(curve, gpu)
        except TooFewPoints as error:
            notes.append(f"{name}: {error.problem}")
        else:
            found.append(prediction_report(name, prediction, measured_there(prediction, curves)))
    predictions = [facts for facts, _ in found]
    unit = Findings(curves=curves).unit
    text = "\n\n".join(section_text(in_units(each, unit)) for _, each in found) or "nothing can be predicted"
    rows = (row for one in predictions for row in one["loads"])
    cli.print_result(given, {"predictions": predictions, "notes": notes}, rows, [text], notes)
    checked = [verdict.state for one in predictions for verdict in one["verdicts"]]
    return cli.EXIT_STATUS[all_of(checked)] if checked else cli.PASSES if found else cli.INCONCLUSIVE
