"""What the serving stack costs: one load by two doors, engine, requests, environment and way of loading being equal.

Launches of one engine differ too, and so do two hours of one host, which repeats of one launch do not tell. So a
difference tells of the doors as far as each was launched more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval, factor, log_ratio, mean_of_known, pooled_relative_sd
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.schema.records import series_key


@dataclass(frozen=True, slots=True)
class AtBothDoors:
    """One load without and with the server. ratio: output tokens/s through the server over those without it; its noise
    is pooled over the repeats of all loads of both. prompt_steps: share of the steps that processed a prompt, offline
    and through the server: which arrive together there is a matter of the stack, and of throughput."""

    offline: Point
    server: Point
    ratio: Interval
    prompt_steps: tuple[float | None, float | None]

    @property
    def concurrency(self) -> int:
        return self.offline.concurrency


@dataclass(frozen=True, slots=True)
class Doors:
    """Two sweeps that differ in the door alone, and the loads that both have valid points of, ascending."""

    offline: Curve
    server: Curve
    loads: tuple[AtBothDoors, ...]


def at_both_doors(curves: Sequence[Curve]) -> list[Doors]:
    """Each sweep through the server with the one without it; those without a load in common are left out."""
    offline = {_but_for_the_door(curve): curve for curve in curves if _door(curve) == "offline"}
    pairs = [(offline.get(_but_for_the_door(curve)), curve) for curve in curves if _door(curve) == "server"]
    found = [Doors(without, served, _loads(without, served)) for without, served in pairs if without]
    return [doors for doors in found if doors.loads]


def _loads(offline: Curve, server: Curve) -> tuple[AtBothDoors, ...]:
    noise = pooled_relative_sd([p.repeats for p in (*offline.valid, *server.valid)])
    served = {p.concurrency: p for p in server.valid}
    pairs = [(p, served[p.concurrency]) for p in offline.valid if p.concurrency in served]
    return tuple(
        AtBothDoors(
            offline=p,
            server=q,
            ratio=factor(log_ratio(p.repeats, q.repeats, noise)),
            prompt_steps=(_prompt_steps(offline, p), _prompt_steps(server, q)),
        )
        for p, q in pairs
    )


def _prompt_steps(curve: Curve, point: Point) -> float | None:
    """Mean over the repeats on which a point rests."""
    return mean_of_known(steps_with_prompts(m.run) for m in curve.measurements if m.id in point.records)


def _door(curve: Curve) -> str | None:
    return curve.spec.door if curve.spec else None


def _but_for_the_door(curve: Curve) -> str | None:
    first, load = curve.first, curve.load
    if first is None or load is None:
        return None
    return series_key(first.spec.without_http, first.workload.hash, load, first.environment)
