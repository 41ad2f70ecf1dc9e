"""Telemetry of several GPUs as of one: what adds up is added, what is a ratio is the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from statistics import fmean

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Telemetry

Join = Callable[[Sequence[float]], float]
WORST = (of.TEMPERATURE, of.XID, of.CAPPED_POWER, of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE)
SLOWEST = (of.SM_CLOCK, of.MEMORY_CLOCK)  # the others wait for it


def together(telemetry: Telemetry) -> Telemetry:
    """All GPUs as one device, beside what the host said; unknown where one GPU's value is, for the rest is not all."""
    if not telemetry.gpus:
        return telemetry
    numbers = set.intersection(*(set(columns) for columns in telemetry.gpus))
    joined = {n: _joined(n, [columns[n] for columns in telemetry.gpus]) for n in sorted(numbers)}
    return replace(telemetry, columns={**telemetry.columns, **joined}, gpus=())


def each_gpu(telemetry: Telemetry) -> tuple[Telemetry, ...]:
    """The telemetry of each GPU; the first also has the host's columns and the notes."""
    return tuple(
        replace(
            telemetry,
            columns={**(telemetry.columns if not index else {}), **columns},
            notes=telemetry.notes if not index else (),
            gpus=(),
        )
        for index, columns in enumerate(telemetry.gpus)
    )


def _joined(number: int, columns: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    join = _how(number)
    rows = ([v for v in row if v is not None] for row in zip(*columns, strict=True))
    return tuple(join(known) if len(known) == len(columns) else None for known in rows)


def _how(number: int) -> Join:
    if number == of.CLOCK_REASONS:
        return lambda values: float(reduce(or_, map(int, values)))
    if number in SLOWEST:
        return min
    if number in WORST:
        return max
    return fmean if number in of.SENSORS and of.SENSORS[number].unit == "ratio" else sum


def imbalance(values: Sequence[float | None]) -> float | None:
    """(largest - smallest) / mean; None where one is not known, or there are not several."""
    known = [v for v in values if v is not None]
    if len(known) < 2 or len(known) < len(values) or fmean(known) <= 0:
        return None
    return (max(known) - min(known)) / fmean(known)
