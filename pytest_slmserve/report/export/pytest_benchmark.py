"""A point as pytest-benchmark carries it: a time per round, and metrics beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pytest_slmserve.analysis.points.job_points import JobPoint, job_points
from pytest_slmserve.analysis.points.sweep_points import Point, points_of
from pytest_slmserve.schema.records import Measurement


def seconds_per_request(measurements: Sequence[Measurement]) -> list[float]:
    """One figure per valid repeat: the window's seconds over the requests it completed."""
    output = measurements[0].workload.mean_output_tokens
    return [output / rate for point in _points(measurements) for rate in point.repeats]


def extra_info(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Every figure of the point that is a plain number, the ids of its records, and what identifies it."""
    point, first = _points(measurements)[0], measurements[0]
    numbers = {f.name: getattr(point, f.name) for f in fields(point)}
    plain = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    return {**plain, "records": list(point.records), "workload": first.workload.hash, "interface": first.spec.interface}


def _points(measurements: Sequence[Measurement]) -> Sequence[Point | JobPoint]:
    return points_of(measurements) or job_points(measurements)
