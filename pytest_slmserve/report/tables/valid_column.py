"""The column "valid" of a table, and the remarks that give its reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.metrics.validity import CheckResult
from pytest_slmserve.analysis.points.job_points import JobPoint
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.report.text_table import hanging

AnyPoint = Point | ReplicaPoint | JobPoint


def valid_cell(point: AnyPoint) -> str:
    """partly: some repeats were left out. degraded: all that are left have something against them. noisy: the host was
    disturbed; all repeats count."""
    if not point.valid:
        return "NO"
    if point.degraded:
        return "degraded"
    return "partly" if point.left_out else "noisy" if point.noise else "yes"


def word_for(found: CheckResult) -> str:
    """The cell of one measurement."""
    return "NO" if found.problems else "degraded" if found.degradations else "noisy" if found.noise else "yes"


def lines_of(found: CheckResult, name: str = "") -> list[str]:
    """Lines on one measurement: a finding each, the worst first."""
    kinds = zip(("INVALID", "degraded", "noisy"), found[:3], strict=True)
    return [f"{kind}: {name}{text}" for kind, texts in kinds for text in texts]


def reasons(point: AnyPoint, name: str, used: str = "") -> Iterator[str]:
    """Lines on what was left out, on what is degraded and on noise. used: how many repeats count."""
    if point.left_out or not point.valid:
        kind = "left out" if point.valid else "INVALID"
        yield hanging(": ".join([f"{kind}: {name}", *filter(None, (used, "; ".join(point.problems)))]), 2)
    if point.degraded:
        yield hanging(f"degraded: {name}: {'; '.join(point.degraded)}", 2)
    if point.noise:
        yield hanging(f"noisy, kept: {name}: {'; '.join(first_of_each_kind(point.noise))}", 2)


def first_of_each_kind(texts: Sequence[str]) -> list[str]:
    """The first of the texts that differ only in their figures, and how many more there are."""
    kinds = grouped(texts, kind_of).values()
    return [f"{first}{f', and {len(more)} more like it' if more else ''}" for first, *more in kinds]


def kind_of(text: str) -> str:
    """A reason without its figures."""
    return re.split(r":| [-+.\d]+ ", text, maxsplit=1)[0]
