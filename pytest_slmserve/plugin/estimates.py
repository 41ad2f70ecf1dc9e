"""What the items of a run will take, in seconds: what they measure, less what is known already."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_slmserve.analysis.stats.group_sequential import FIRST_LOOKS
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import gpus_engine
from pytest_slmserve.plan.costs import (
    ADAPTIVE_ESTIMATE,
    ENDPOINT_ESTIMATE,
    PlannedItem,
    job_estimate_s,
    point_estimate_s,
    start_estimate_s,
)
from pytest_slmserve.plan.titles import Engines, engine_alone
from pytest_slmserve.plugin.items import (
    asks_as_it_goes,
    asks_the_engine,
    engine_of,
    is_measured,
    is_named_point,
    is_skipped,
    marker_overrides,
    question_of,
)
from pytest_slmserve.run.gate import launches_left, loads_of
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.records import Progress


def plan_rows(session: Session, items: Sequence[Any]) -> list[PlannedItem]:
    """A cell for each item that is not skipped. A point that several items ask for is paid by the first; one that is
    known needs no engine."""
    return list(_priced(session, [item for item in items if not is_skipped(item)]))


def _priced(session: Session, items: Sequence[Any]) -> Iterator[PlannedItem]:
    paid = set[Any]()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if cost := _cost(session, item, parameters):
            left = _left(session, item)
            seconds = 0.0 if cost.what in paid else left * cost.once_s
            yield PlannedItem(
                item.name, cost.engine if left else None, seconds, None if asks_as_it_goes(item) else cost.load
            )
            paid.add(cost.what)
        elif sides := parameters.get("slm_gate"):
            again = sides[0] in paid
            paid.add(sides[0])
            yield PlannedItem(item.name, None, 0.0 if again else gate_estimate_s(session, sides[0]))
        elif is_measured(item) and asks_the_engine(item):
            yield PlannedItem(item.name, engine_of(session, item), 0.0)
        else:
            yield PlannedItem(item.name, None, 0.0)


class Cost(NamedTuple):
    """What the parameter of an item has it measure. engine, load: as of a Cell; once_s: seconds of one repeat."""

    what: Hashable
    engine: Engines | None
    load: Load | None
    once_s: float


def _cost(session: Session, item: Any, parameters: Mapping[str, Any]) -> Cost | None:
    """None where it has no such parameter."""
    planner = session.planner
    if point := parameters.get("slm_point"):
        (model, load), variant = point, marker_overrides(item)
        depends = session.options.sweep == "adaptive" and not is_named_point(item)
        once_s = point_estimate_s(planner, model, load, variant)
        return Cost((model, load, variant), engine_of(session, item), None if depends else load, once_s)
    if replicas := parameters.get("slm_replica_point"):
        load = planner.load(replicas.concurrency)  # as if one engine served all of it
        return Cost(replicas, engine_of(session, item), load, point_estimate_s(planner, replicas.model, load))
    if gpus := parameters.get("slm_gpus_point"):
        engine, load = gpus_engine(planner, gpus)
        return Cost(gpus, engine, load, point_estimate_s(planner, gpus.model, load, spec=engine_alone(engine)))
    if plan := parameters.get("slm_job_point"):
        spec, workload, job = cases.job_case(planner, plan)
        return Cost(plan, spec, job, job_estimate_s(spec, job, workload))
    return None


def _left(session: Session, item: Any) -> int:
    """Repeats of an item's cell that are still to be made."""
    if not session.known:  # keys take their time
        return session.options.repeats
    question = question_of(session, item)
    assert question is not None, "its parameter says what it measures"
    return session.left(question)


def gate_estimate_s(session: Session, model: str) -> float:
    """Of a clear case: it ends at the next look at its pairs."""
    uncounted, measured = launches_left(session, model)
    each = sum(point_estimate_s(session.planner, model, load) for load in loads_of(session, model))
    return (uncounted + measured) * start_estimate_s(session.planner.spec(model)) + measured * each


def estimate_notes(options: Options) -> list[str]:
    """What the prices of a plan leave open."""
    adaptive = options.sweep == "adaptive" and not options.gate
    clear = (
        f"a gate is priced as a clear case, {FIRST_LOOKS[0]} pairs; one that is not takes up to {options.gate_pairs}"
    )
    notes = {ADAPTIVE_ESTIMATE: adaptive, clear: options.gate, ENDPOINT_ESTIMATE: bool(options.endpoint)}
    return [note for note, holds in notes.items() if holds]


def seconds_left(session: Session, items: Sequence[Any]) -> Callable[[Progress], float]:
    """From the progress of a measurement to the end of `items`, the first of which it belongs to.

    The items are priced once: that hashes each of their keys, too much to do twice a second beside what is measured.
    """
    rows = plan_rows(session, items)
    starts = sum(map(start_estimate_s, {row.engine for row in rows if row.engine} - {session.devices.pool.current}))
    points = sum(row.seconds for row in rows)
    return lambda progress: max(0.0, points - progress.elapsed_s) + starts
