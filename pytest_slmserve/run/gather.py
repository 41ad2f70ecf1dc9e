"""Merges what several workers measured into one run, for the worker that judges last and for the controller."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytest_slmserve.analysis.compare import interference
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points.replica_points import all_groups, group_key
from pytest_slmserve.archive.merge import folder_of_parts, move_parts, parts_of
from pytest_slmserve.archive.store import read
from pytest_slmserve.plan.planner import check_there
from pytest_slmserve.run.gpu_slots import GpuSlot, Outcome, as_seen, outcomes_of, seats, sweep_up
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import is_steady
from pytest_slmserve.schema.records import Measurement

UNCHECKED = (
    "whether engines on several GPUs disturbed each other was not looked at: the shipped test_neighbours.py does, by "
    "two cells of each model alone"
)


def open_for(session: Session, workers: int) -> list[GpuSlot]:
    """The devices are ours, the archive is open: a place for each worker. Raises BadUsage, also for GPUs of
    different kinds, DeviceBusy, BadArchive."""
    records = Path(session.options.records)
    places = seats(session.host, workers, records, session.options.tensor_parallel_size[-1])
    check_there(session.host, range(workers))
    session.devices.lock([gpu.uuid for gpu in session.host.gpus[:workers]] or [session.host.device])
    session.open_archive()
    sweep_up(folder_of_parts(records))
    folder_of_parts(records).mkdir(exist_ok=True)
    session.planner.host = as_seen(session.host, places[0])
    return places


def gather_others(session: Session) -> None:
    """Adds to a worker's session what the other workers have measured and requested so far."""
    assert session.lease
    own, records = session.lease.part, Path(session.lease.slot.records)
    _know(session, _written(path for path in parts_of(records) if path != own))
    for outcome in outcomes_of(session.lease.folder):
        _ask_for(session, outcome)


def gather_all(session: Session) -> str:
    """Merges all that the workers have into the archive and the controller's session, at the end of the run. Returns
    the reason why the workers could not carry out their options, or an empty string."""
    records = Path(session.options.records)
    found, outcomes = _written(parts_of(records)), outcomes_of(folder_of_parts(records))
    order = {short_name(model): rank for rank, model in enumerate(session.planner.models)}
    found.sort(key=lambda m: order.get(short_name(m.spec.model), len(order)))  # whoever was through first
    _know(session, found)
    for outcome in outcomes:
        _ask_for(session, outcome)
        session.verdicts.judged.extend(outcome.judged)
        session.reused |= outcome.reused
        session.notes.extend(note for note in outcome.notes if note not in session.notes)
    for m in found if session.executor.export else ():
        session.executor.export.add(m)  # type: ignore[union-attr]
    judged = {each.verdict.claim for each in session.verdicts.judged}
    if any(m.neighbours for m in found) and interference.CLAIM not in judged:
        session.notes.append(UNCHECKED)
    sweep_up(folder_of_parts(records))
    if archive := session.executor.archive:
        session.notes.extend(move_parts(archive).notes)
    return next((outcome.problem for outcome in outcomes if outcome.problem), "")


def measure_alone(session: Session, model: str) -> None:
    """Two cells of a model's sweep once more, if all of it was measured beside others: its smallest load, where the CPU
    is most of a step, and its largest."""
    spec, workload = session.planner.spec(model), session.planner.workload(model)
    found = [m for m in session.verdicts.curve(model).measurements if not problems(m)]
    beside = sorted({m.load.concurrency for m in found if m.neighbours and is_steady(m.load)})
    for concurrency in dict.fromkeys(beside[:1] + beside[-1:]):
        case = session.planner.case(spec, [workload], [session.planner.load(concurrency)])
        known = session.results.repeats[case.key]
        if all(m.neighbours for (m,) in known if not problems(m)):
            known.append(session.executor.measure_once(case, f"{case.title}, alone"))


def save_outcome(session: Session, problem: str = "") -> None:
    """Saves a worker's outcome for the other workers and the controller. problem: why its options cannot be carried
    out."""
    assert session.lease
    session.lease.save(
        Outcome(
            requested=tuple(session.results.requested),
            swept=tuple(session.planner.sweeps),
            reused=frozenset(session.reused),
            judged=tuple(session.verdicts.judged),
            notes=tuple(session.notes),
            problem=problem,
        )
    )


def _written(parts: Iterable[Path]) -> list[Measurement]:
    return [m for path in parts if path.stat().st_size for m in read(path, skip_damaged=True).measurements]


def _know(session: Session, measurements: list[Measurement]) -> None:
    """Adds the measurements that the session does not have yet. Their cases count as requested, whatever became of the
    worker that measured them."""
    results = session.results
    ids = {m.id for repeats in results.repeats.values() for group in repeats for m in group}
    groups = all_groups([m for m in measurements if m.id not in ids])
    results.add(groups)
    results.requested.update((group_key(group), None) for group in groups)


def _ask_for(session: Session, outcome: Outcome) -> None:
    for key in outcome.requested:
        session.results.request(key)
    for model in outcome.swept:
        session.planner.sweep(model)
