"""What the items of a run will take, in seconds: what they measure, less what is known already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pytest_slmserve import jobs
from pytest_slmserve.agenda import AS_THE_OPTIONS_SAY, Agenda, Variant
from pytest_slmserve.ahead import question_of
from pytest_slmserve.analysis.sequential import FIRST_LOOKS
from pytest_slmserve.gating import launches_left, loads_of
from pytest_slmserve.items import (
    engine_of,
    is_measured,
    is_skipped,
    variant_asked_for,
)
from pytest_slmserve.options import Options
from pytest_slmserve.parameters import gpus_engine
from pytest_slmserve.plan import (
    ADAPTIVE_PRICE,
    ENDPOINT_PRICE,
    Cell,
    Engines,
    engine_alone,
    job_price_s,
    price_s,
    start_price_s,
)
from pytest_slmserve.records import Progress
from pytest_slmserve.session import Session
from pytest_slmserve.spec import ClosedLoop, EngineSpec


def plan_rows(session: Session, items: Sequence[Any]) -> list[Cell]:
    """A cell for each item that is not skipped. A point that several items ask for is paid by the first; one that is
    known needs no engine."""
    return list(_priced(session, [item for item in items if not is_skipped(item)]))


def _priced(session: Session, items: Sequence[Any]) -> Iterator[Cell]:
    paid = set[Any]()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if cost := _cost(session, item, parameters):
            what, engine, once_s = cost
            left = _left(session, item)
            yield Cell(item.name, engine if left else None, 0.0 if what in paid else left * once_s)
            paid.add(what)
        elif sides := parameters.get("slm_gate"):
            again = sides[0] in paid
            paid.add(sides[0])
            yield Cell(item.name, None, 0.0 if again else gate_price_s(session, sides[0]))
        elif is_measured(item) and not parameters.get("slm_model"):
            yield Cell(item.name, engine_of(session, item), 0.0)
        else:
            yield Cell(item.name, None, 0.0)


def _cost(session: Session, item: Any, parameters: Mapping[str, Any]) -> tuple[Any, Engines | None, float] | None:
    """What the parameter of an item has it measure, on which engine, and the seconds of one repeat; None where it has
    none."""
    agenda = session.agenda
    if point := parameters.get("slm_point"):
        (model, load), variant = point, variant_asked_for(item)
        return (model, load, variant), engine_of(session, item), point_price_s(agenda, model, load, variant)
    if replicas := parameters.get("slm_replica_point"):
        load = agenda.load(replicas.concurrency)  # as if one engine served all of it
        return replicas, engine_of(session, item), point_price_s(agenda, replicas.model, load)
    if gpus := parameters.get("slm_gpus_point"):
        engine, load = gpus_engine(session, gpus)
        return gpus, engine, point_price_s(agenda, gpus.model, load, spec=engine_alone(engine))
    if plan := parameters.get("slm_job_point"):
        spec, workload, job = jobs.asked_of(agenda, plan)
        return plan, spec, job_price_s(spec, job, workload)
    return None


def _left(session: Session, item: Any) -> int:
    """Repeats of an item's cell that are still to be made."""
    if not session.known:  # keys take their time
        return session.options.repeats
    question = question_of(session, item)
    assert question is not None, "its parameter says what it measures"
    return session.left(question)


def point_price_s(
    agenda: Agenda, model: str, load: ClosedLoop, variant: Variant = AS_THE_OPTIONS_SAY, spec: EngineSpec | None = None
) -> float:
    """Seconds that one repeat will take, warm-up included. spec: of another engine than the options have."""
    workload = agenda.workload(model, variant)
    context = workload.mean_prompt_tokens + workload.mean_output_tokens / 2
    return price_s(spec or agenda.spec(model), load, workload.mean_output_tokens, context)


def gate_price_s(session: Session, model: str) -> float:
    """Of a clear case: it ends at the next look at its pairs."""
    uncounted, measured = launches_left(session, model)
    each = sum(point_price_s(session.agenda, model, load) for load in loads_of(session, model))
    return (uncounted + measured) * start_price_s(session.agenda.spec(model)) + measured * each


def price_notes(options: Options) -> list[str]:
    """What the prices of a plan leave open."""
    adaptive = options.sweep == "adaptive" and not options.gate
    clear = (
        f"a gate is priced as a clear case, {FIRST_LOOKS[0]} pairs; one that is not takes up to {options.gate_pairs}"
    )
    notes = {ADAPTIVE_PRICE: adaptive, clear: options.gate, ENDPOINT_PRICE: bool(options.endpoint)}
    return [note for note, holds in notes.items() if holds]


def seconds_left(session: Session, items: Sequence[Any]) -> Callable[[Progress], float]:
    """From the progress of a measurement to the end of `items`, the first of which it belongs to.

    The items are priced once: that hashes each of their keys, too much to do twice a second beside what is measured.
    """
    rows = plan_rows(session, items)
    starts = sum(map(start_price_s, {spec for _, spec, _ in rows if spec} - {session.devices.pool.current}))
    points = sum(seconds for _, _, seconds in rows)
    return lambda progress: max(0.0, points - progress.elapsed_s) + starts
