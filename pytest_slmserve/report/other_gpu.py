"""Predictions for another GPU, as text and as facts for JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.advice.other_gpu import CarriedLaw, carries, errors
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.report.numbers import ABSENT, figure, hundredths
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.text_table import Column, hanging, table


@dataclass(frozen=True, slots=True)
class PredictedSweep:
    """A prediction under the label of its sweep. there: sweeps measured on that GPU."""

    name: str
    prediction: CarriedLaw
    there: Sequence[Curve]

    @property
    def verdicts(self) -> list[Verdict]:
        return [carries(self.prediction, each) for each in self.there]


Row = dict[str, Any]  # a load; output_tokens_per_s: as measured here, None where only the other GPU has it


def rows_of(one: PredictedSweep, there: Curve | None) -> list[Row]:
    """Loads of the sweep and of the one there, ascending."""
    here = {p.concurrency: fmean(p.repeats) for p in one.prediction.curve.valid}
    seen: dict[int, tuple[Interval | None, Point]] = {p.concurrency: (None, p) for p in one.prediction.curve.valid}
    for error, point in errors(one.prediction, there) if there else ():
        seen[point.concurrency] = (error, point)
    return [
        {
            "subject": one.name,
            "gpu": one.prediction.gpu.family,
            "concurrency": load,
            "output_tokens_per_s": here.get(load),
            "predicted_tokens_per_s": one.prediction.tokens_per_s(fmean(point.batch_repeats)),
            "measured_tokens_per_s": error and fmean(point.repeats),
            "predicted_over_measured": error and error.value,
            "low": error and error.low,
            "high": error and error.high,
        }
        for load, (error, point) in sorted(seen.items())
    ]


def _ends(row: Row) -> str:
    known = row["low"] is not None and row["high"] is not None
    return f"{hundredths(row['low'])} to {hundredths(row['high'])}" if known else ABSENT


COLUMNS: tuple[Column[Row], ...] = (
    Column("tokens/s\nmeasured", lambda row: figure(row["output_tokens_per_s"], 4)),
    Column("predicted\nthere", lambda row: figure(row["predicted_tokens_per_s"], 4)),
    Column("measured\nthere", lambda row: figure(row["measured_tokens_per_s"], 4)),
    Column("predicted %\nof measured", lambda row: hundredths(row["predicted_over_measured"])),
    Column("95 %", _ends, "left"),
)


def prediction_text(one: PredictedSweep) -> Iterator[str]:
    """A table for each sweep there, or one without; then the law of both GPUs."""
    curve, law, gpu = one.prediction.curve, one.prediction.law, one.prediction.gpu.family
    yield hanging(f"{one.name}, measured on {served_on(curve.environment)}, predicted for {gpu}", 2)
    for there in one.there or (None,):
        load: Column[Row] = Column(curve.axes.knob or "in\nflight", lambda row: str(row["concurrency"]))
        yield table(rows_of(one, there), (load, *COLUMNS))
    here = f"T_inf {figure(law.t_inf.value, 4)} tokens/s, b_half {figure(law.b_half.value)} in flight"
    beyond = f"T_inf {figure(one.prediction.t_inf, 4)}, b_half {figure(one.prediction.b_half)}"
    yield hanging(f"law: here {here}; on {gpu} {beyond}", 2)
    for verdict in one.verdicts:
        yield hanging(f"{verdict.state.value}: {verdict.why}", 2)
    if not one.there:
        yield hanging(f"not checked: no archive has this sweep on {gpu}", 2)


def prediction_facts(one: PredictedSweep) -> dict[str, Any]:
    """Everything that the text tells, for JSON."""
    law = one.prediction.law
    return {
        "subject": one.name,
        "gpu": one.prediction.gpu.family,
        "t_inf": law.t_inf.value,
        "b_half": law.b_half.value,
        "predicted_t_inf": one.prediction.t_inf,
        "predicted_b_half": one.prediction.b_half,
        "loads": list(prediction_rows(one)),
        "verdicts": one.verdicts,
    }


def prediction_rows(one: PredictedSweep) -> Iterator[Row]:
    """A row for each load of each sweep there, or of the prediction alone."""
    for there in one.there or (None,):
        yield from rows_of(one, there)
