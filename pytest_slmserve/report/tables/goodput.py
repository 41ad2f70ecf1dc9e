"""Goodput of a sweep's requests: a table below that of its points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.metrics.goodput import Goodput, Slo
from pytest_slmserve.analysis.points.sweep_points import Point, concurrency_of
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.peak_goodput import ATTAINMENT, IN_FLIGHT, HighestLoad, Peak, highest_load, peak
from pytest_slmserve.report.numbers import figure, hundredths, whole
from pytest_slmserve.report.text_table import Column, hanging, table

LEGEND = (
    "good: of the requests that ended in the window, those that finished within every bound; of all repeats together. "
    "dropped: that failed, in all repeats."
)


@dataclass(frozen=True, slots=True)
class Served:
    """Row: requests under one load. goodput: None without a valid measurement. dropped: requests that failed."""

    load: float
    goodput: Goodput | None
    dropped: int


def slo_report(curve: Curve, slo: Slo) -> str:
    """A row per point, and where goodput peaks; nothing where nothing was measured."""
    if not curve.points:
        return ""
    rows = [served(curve, point, slo) for point in curve.points]
    columns = goodput_columns("in\nflight", slo, 3)
    columns.insert(1, Column("\nrequests", lambda s: whole(s.goodput.requests if s.goodput else None), rank=1))
    shown = table(rows, columns, always=len(columns))
    best, highest = found_in(rows)
    return "\n".join([f"good: {slo}", shown, *(hanging(e.why, 2) for e in (best, highest) if e), hanging(LEGEND, 0)])


def highest_good_load(curve: Curve, slo: Slo) -> HighestLoad | None:
    """The highest load of a sweep at which enough requests are good; None where nothing valid was measured."""
    return found_in([served(curve, point, slo) for point in curve.points])[1]


def goodput_columns(load: str, slo: Slo, digits: int) -> list[Column[Served]]:
    """Columns of goodput under the heading of its load. digits: of the goodput."""

    def within(name: str) -> Callable[[Served], str]:
        return lambda s: hundredths(dict(s.goodput.by_slo)[name] if s.goodput else None)

    return [
        Column(load, lambda s: f"{s.load:g}"),
        Column("goodput\n/s", lambda s: figure(s.goodput.per_s if s.goodput else None, digits)),
        Column("good\n%", lambda s: hundredths(s.goodput.attainment if s.goodput else None)),
        *(Column(f"{name}\n%", within(name)) for name in slo.bounds),
        Column("\ndropped", lambda s: str(s.dropped)),
    ]


def served(curve: Curve, point: Point, slo: Slo) -> Served:
    """Goodput of the repeats that count. Dropped are those of all repeats: failures are no secret."""
    dropped = sum(m.run.failures for m in curve.measurements if concurrency_of(m) == point.concurrency)
    return Served(point.concurrency, point.goodput(slo), dropped)


def found_in(
    rows: Sequence[Served], attainment: float = ATTAINMENT, unit: str = IN_FLIGHT
) -> tuple[Peak | None, HighestLoad | None]:
    """The peak of goodput, and the highest load at which enough requests are good. attainment: the share of them that
    suffices. unit: of the loads."""
    known = [(s.load, s.goodput) for s in rows if s.goodput]
    invalid = [s.load for s in rows if s.goodput is None]
    attained = [(load, each.attainment) for load, each in known if each.attainment is not None]
    best = peak([(load, each.per_s) for load, each in known], invalid, unit)
    return best, highest_load(attained, attainment, invalid, unit)
