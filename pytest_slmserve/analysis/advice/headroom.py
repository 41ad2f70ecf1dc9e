"""Upper bounds on the gain of several engines on one GPU over one, as none can use more of a unit than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pytest_slmserve.analysis.advice.batch_choice import ModelSweep
from pytest_slmserve.analysis.metrics.roofline import ceiling_tokens_per_s
from pytest_slmserve.analysis.metrics.step_time import REACHABLE_DRAM, REACHABLE_TENSOR
from pytest_slmserve.analysis.points.sweep_points import Point

Unit = Literal["host", "dram", "tensor", "roofline"]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """factor: at most so many times one engine's throughput. busy: its use of `unit`, of what can be used."""

    unit: Unit
    busy: float
    factor: float


@dataclass(frozen=True, slots=True)
class Gains:
    """Upper bounds for several engines, seen at the load `at`. time_slicing, mps: the tightest of each way to share,
    None where nothing bounds it. power_share: of the power limit."""

    at: int
    ceilings: tuple[Ceiling, ...]
    power_share: float | None

    @property
    def time_slicing(self) -> Ceiling | None:
        return min(self.ceilings, key=lambda c: c.factor, default=None)

    @property
    def mps(self) -> Ceiling | None:
        return min((c for c in self.ceilings if c.unit != "host"), key=lambda c: c.factor, default=None)


def gains_at(subject: ModelSweep, batch: int) -> Gains | None:
    """Upper bounds on the gain of several engines at this load, or else at the largest measured below it. The smallest
    measured load serves where none is below; None where no load is usable."""
    loads = [p for p in subject.usable if p.concurrency <= batch] or subject.usable[:1]
    if not loads:
        return None
    point = loads[-1]
    power = point.power_w / point.power_limit_w if point.power_w and point.power_limit_w else None
    return Gains(point.concurrency, tuple(ceilings(point, subject)), power)


def ceilings(point: Point, subject: ModelSweep) -> Iterator[Ceiling]:
    """Every unit that one engine is known to use in part. The kernels of engines that take turns run at most all of the
    time; those that overlap share the memory and the tensor cores, and nothing passes the data sheet's roofline: each
    engine reads its own weights, so more engines move no fewer bytes per token."""
    found: list[tuple[Unit, float | None]] = [
        ("host", point.engine_active),
        ("dram", None if point.dram_active is None else point.dram_active / REACHABLE_DRAM),
        ("tensor", None if point.tensor_active is None else point.tensor_active / REACHABLE_TENSOR),
        ("roofline", _roofline(point, subject)),
    ]
    for unit, busy in found:
        if busy is not None and busy > 0:
            yield Ceiling(unit, busy, max(1.0, 1 / busy))


def _roofline(point: Point, subject: ModelSweep) -> float | None:
    """Share of what no engine can pass at this batch, prompts hidden behind the decoding."""
    if subject.work is None or subject.peaks is None or subject.output_share is None:
        return None
    ceiling = ceiling_tokens_per_s(subject.work, subject.peaks, fmean(point.batch_repeats), overlap=True)
    return subject.output_share * fmean(point.repeats) / ceiling
