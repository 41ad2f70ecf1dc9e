"""How many requests of a sweep were served well enough: a table below that of its points."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_slmserve.analysis.metrics.goodput import Goodput, Slo, goodput_of, together
from pytest_slmserve.analysis.points.sweep_points import Point, concurrency_of
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.peak_goodput import IN_FLIGHT, highest_load, peak
from pytest_slmserve.report.numbers import ABSENT, figure, hundredths
from pytest_slmserve.report.text_table import grid, hanging

COLUMNS = ("in\nflight", "\nrequests", "goodput\n/s", "good\n%")
LEGEND = (
    "good: of the requests that ended in the window, those that finished within every bound; of all repeats together. "
    "dropped: that failed, in all repeats."
)


def slo_report(curve: Curve, slo: Slo) -> str:
    """A row per point, and where goodput peaks; nothing where nothing was measured."""
    if not curve.points:
        return ""
    rows = [(point, _goodput(curve, point, slo)) for point in curve.points]
    columns = [*COLUMNS, *(f"{name}\n%" for name in slo.bounds), "\ndropped"]
    table = grid([_row(curve, point, found, slo) for point, found in rows], columns, ["right"] * len(columns))
    found = [(point.concurrency, each) for point, each in rows if each]
    invalid = [point.concurrency for point, each in rows if each is None]
    return "\n".join([f"good: {slo}", table, *_findings(found, invalid), hanging(LEGEND, 0)])


def _goodput(curve: Curve, point: Point, slo: Slo) -> Goodput | None:
    """Of the repeats that count; None where none does."""
    used = [m for m in curve.measurements if m.id in point.records]
    return together([found for m in used if (found := goodput_of(m, slo))])


def _row(curve: Curve, point: Point, found: Goodput | None, slo: Slo) -> list[str]:
    """Dropped are those of all repeats: one with a failure does not count, and its failures are no secret."""
    dropped = sum(m.run.failures for m in curve.measurements if concurrency_of(m) == point.concurrency)
    if found is None:
        return [f"{point.concurrency}", *[ABSENT] * (len(COLUMNS) - 1 + len(slo.bounds)), f"{dropped}"]
    shares = [found.attainment, *(share for _, share in found.by_slo)]
    return [f"{point.concurrency}", f"{found.requests:,}", figure(found.per_s), *map(hundredths, shares), f"{dropped}"]


def _findings(found: list[tuple[int, Goodput]], invalid: list[int]) -> Iterator[str]:
    best = peak([(load, each.per_s) for load, each in found], invalid, IN_FLIGHT)
    attained = [(load, each.attainment) for load, each in found if each.attainment is not None]
    highest = highest_load(attained, invalid=invalid, unit=IN_FLIGHT)
    yield from (hanging(each.why, 2) for each in (best, highest) if each)
