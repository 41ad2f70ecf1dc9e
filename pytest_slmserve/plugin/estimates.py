"""Estimates of the time that the items of a run take, in seconds: what they measure, less what is measured already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.stats.group_sequential import FIRST_LOOKS
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.costs import (
    ADAPTIVE_ESTIMATE,
    ENDPOINT_ESTIMATE,
    PlannedItem,
    repeat_estimate_s,
    start_estimate_s,
)
from pytest_slmserve.plugin.items import (
    asks_as_it_goes,
    asks_the_engine,
    case_of,
    engine_of,
    is_measured,
    is_planned_point,
    is_skipped,
)
from pytest_slmserve.run.gate import launches_left, loads_of
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.records import Progress


def plan_rows(session: Session, items: Sequence[Any]) -> list[PlannedItem]:
    """A cell for each item that is not skipped. A point that several items ask for is paid by the first; one that is
    known needs no engine."""
    return list(_priced(session, [item for item in items if not is_skipped(item)]))


def _priced(session: Session, items: Sequence[Any]) -> Iterator[PlannedItem]:
    paid = set[str]()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if case := case_of(item):
            left = session.executor.count_missing(case)
            depends = session.options.sweep == "adaptive" and is_planned_point(item)
            load = None if depends or asks_as_it_goes(item) else case.loads[0]
            seconds = 0.0 if case.key in paid else left * case.estimate_s
            yield PlannedItem(item.name, case.engine if left else None, seconds, load)
            paid.add(case.key)
        elif sides := parameters.get("slm_gate"):
            again = sides[0] in paid
            paid.add(sides[0])
            yield PlannedItem(item.name, None, 0.0 if again else gate_estimate_s(session, sides[0]))
        elif is_measured(item) and asks_the_engine(item):
            yield PlannedItem(item.name, engine_of(session, item), 0.0)
        else:
            yield PlannedItem(item.name, None, 0.0)


def gate_estimate_s(session: Session, model: str) -> float:
    """Seconds that a model's gate takes in a clear case, which ends at the next look at its pairs."""
    uncounted, measured = launches_left(session, model)
    spec, workload = session.planner.spec(model), session.planner.workload(model)
    each = sum(repeat_estimate_s(spec, workload, load) for load in loads_of(session, model))
    return (uncounted + measured) * start_estimate_s(spec) + measured * each


def estimate_notes(options: Options) -> list[str]:
    """Notes on what the estimates of a plan leave open."""
    adaptive = options.sweep == "adaptive" and not options.gate
    clear = (
        f"a gate is priced as a clear case, {FIRST_LOOKS[0]} pairs; one that is not takes up to {options.gate_pairs}"
    )
    notes = {ADAPTIVE_ESTIMATE: adaptive, clear: options.gate, ENDPOINT_ESTIMATE: bool(options.endpoint)}
    return [note for note, holds in notes.items() if holds]


def seconds_left(session: Session, items: Sequence[Any]) -> Callable[[Progress], float]:
    """A function from the progress of a measurement to the seconds until `items` end; the measurement belongs to the
    first item.

    The items are priced once: that hashes each of their keys, too much to do twice a second beside what is measured.
    """
    rows = plan_rows(session, items)
    starts = sum(map(start_estimate_s, {row.engine for row in rows if row.engine} - {session.devices.pool.current}))
    points = sum(row.seconds for row in rows)
    return lambda progress: max(0.0, points - progress.elapsed_s) + starts
