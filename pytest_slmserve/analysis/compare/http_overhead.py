"""Cost of the serving stack: one load by two interfaces, all else being equal.

Launches of one engine also differ, and so do two hours of one host; repeats of one launch do not show this. So a
difference is evidence on the interfaces only as far as each was launched more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points.sweep_points import Point, at_common_loads, ratio
from pytest_slmserve.analysis.stats.estimates import Interval, mean_of_known
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.schema.records import series_key


@dataclass(frozen=True, slots=True)
class AtBothInterfaces:
    """One load without and with the server. ratio: output tokens/s through the server over those without it; its noise
    is that of the repeats of all loads. prompt_steps: share of the steps that processed a prompt, without
    and with the server: which arrive together there is a matter of the stack, and of throughput."""

    engine: Point
    server: Point
    ratio: Interval
    prompt_steps: tuple[float | None, float | None]

    @property
    def concurrency(self) -> int:
        return self.engine.concurrency


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Two sweeps that differ in the interface alone, and the loads that both have valid points of, ascending."""

    engine: Curve
    server: Curve
    loads: tuple[AtBothInterfaces, ...]


def at_both_interfaces(curves: Sequence[Curve]) -> list[Interfaces]:
    """Each sweep through the server with the one without it; those without a load in common are left out."""
    engine = {_but_for_the_interface(curve): curve for curve in curves if _interface(curve) == "engine"}
    pairs = [(engine.get(_but_for_the_interface(curve)), curve) for curve in curves if _interface(curve) == "server"]
    found = [Interfaces(without, served, _loads(without, served)) for without, served in pairs if without]
    return [interfaces for interfaces in found if interfaces.loads]


def _loads(engine: Curve, server: Curve) -> tuple[AtBothInterfaces, ...]:
    pairs, among = at_common_loads(engine.valid, server.valid)
    return tuple(
        AtBothInterfaces(
            engine=p,
            server=q,
            ratio=ratio(q, p, among),
            prompt_steps=(_prompt_steps(engine, p), _prompt_steps(server, q)),
        )
        for p, q in pairs
    )


def _prompt_steps(curve: Curve, point: Point) -> float | None:
    """Mean over the repeats on which a point rests."""
    return mean_of_known(steps_with_prompts(m.run) for m in curve.measurements if m.id in point.records)


def _interface(curve: Curve) -> str | None:
    return curve.spec.interface if curve.spec else None


def _but_for_the_interface(curve: Curve) -> str | None:
    first, load = curve.first, curve.load
    if first is None or load is None:
        return None
    return series_key(first.spec.without_http, first.workload.hash, load, first.environment)
