"""Parts of a page for commands that compare runs or judge external results."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_slmserve.analysis.compare.external_replicas import ReplicaComparison
from pytest_slmserve.analysis.compare.runs import Judgement, RunComparison
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.stored.claims import stored_curves
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.report.compare import CHANGES, METRICS, RunSide, comparison_text, counts_text, rows_of
from pytest_slmserve.report.external import replicas
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.page.content import GAIN, NOTES, PLANE, TEXT_WIDTH, Chart, Part, as_table
from pytest_slmserve.report.text_table import laid_out

DRAWN = ("output_tokens_per_s", "ttft_s", "tpot_s", "e2e_s")


def of_runs(baseline: RunSide, candidate: RunSide, found: RunComparison) -> Part:
    """Both sides in the Pareto plane, ratios of the main metrics at each load, and every metric in tables."""
    sides = {"baseline": baseline, "candidate": candidate}
    curves = [
        (f"{name}, {curve.subject}", curve)
        for name, side in sides.items()
        for curve in stored_curves(side.measurements, ())
        if curve.valid
    ]
    drawn = [Chart(PLANE, charts.pareto(curves), NOTES[PLANE])] if curves else []
    tables = []
    for subject, changes in grouped(found.changes, lambda each: each.subject).items():
        for name in DRAWN:
            if alike := [each for each in changes if each.metric == name]:
                title = f"{subject}: {METRICS[name][0]}"
                drawn.append(Chart(title, charts.changes(alike, found.margin, title)))
        tables.append(as_table(subject, rows_of(changes), CHANGES))
    with laid_out(TEXT_WIDTH):
        text = comparison_text(baseline, candidate, found)
    look = "bad" if found.counts[Judgement.WORSE] else "open" if found.counts[Judgement.UNDECIDED] else "good"
    return Part(f"{candidate.name} against {baseline.name}: {counts_text(found)}", look, drawn, tables, text)


def of_sweep(curve: Curve, tolerance: float, text: str) -> Part:
    """A sweep of external results."""
    drawn = [Chart(f"{curve.axes.throughput} over the load", charts.throughput(curve, curve.plateau(tolerance).value))]
    return Part(curve.subject, "open", drawn, [], text)


def of_external_replicas(found: ReplicaComparison, columns: Columns, notes: Sequence[str]) -> Part:
    """Several engines on one device, against the best row of one."""
    over = replicas.called(found.baseline, found)
    gains = [
        (replicas.called(row.engines, found), row.gain.mapped(lambda end: end + 1)) for row in found.rows if row.gain
    ]
    spec = charts.gains(gains, over)
    rows = as_table("Engines on one device", found.rows, replicas.table_columns(found, columns))
    with laid_out(TEXT_WIDTH):
        text = replicas.text(found, columns, notes)
    drawn = [Chart(f"Gain in {columns.throughput}", spec, GAIN)] if spec else []
    return Part(f"Gain over {over}", "open", drawn, [rows], text)
