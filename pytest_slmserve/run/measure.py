"""An engine, a workload and a load make a measurement; several engines at once make one each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime

from pytest_slmserve.engines.base import Engine, ProgressCallback, ignore_progress
from pytest_slmserve.engines.replicas.replica_set import ReplicaEngines
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import ClosedLoop, Load
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, Run
from pytest_slmserve.schema.workloads import Workload
from pytest_slmserve.telemetry.sampler import Sampler


def measure(
    engine: Engine,
    workload: Workload,
    load: Load,
    environment: Environment,
    on_progress: ProgressCallback = ignore_progress,
    sampler: Sampler | None = None,
) -> Measurement:
    """Measure one load on one engine that runs; see `measure_case`."""
    [found] = measure_case(engine, Case(engine.spec, (workload,), (load,), environment), on_progress, sampler)
    return found


def measure_case(
    running: Engine | ReplicaEngines,
    case: Case,
    on_progress: ProgressCallback = ignore_progress,
    sampler: Sampler | None = None,
) -> ReplicaGroup:
    """Run the loads of a case once, with the sensors read beside them, and keep every fact: a record for each engine.

    What the sensors said is of all engines, and stands in the first record; where that engine has a clock of its own
    it is left out. Raises EngineFailed when an engine dies; sensors that fail leave a note in the record, nothing more.
    """
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    engines: Sequence[Engine]
    runs: Sequence[Run]
    with sampler.recording() if sampler else nullcontext() as recording:
        if isinstance(running, ReplicaEngines):
            loads = [load for load in case.loads if isinstance(load, ClosedLoop)]  # replicas have no other
            engines, runs = running.engines, running.run(case.workloads, loads, on_progress)
        else:
            engines, runs = [running], [running.run(case.workloads[0], case.loads[0], on_progress)]
    first = runs[0]
    if recording and first.began_s is not None:
        first = replace(first, telemetry=recording.telemetry(first.began_s, first.window_s))
    return tuple(
        Measurement(
            spec=engine.spec,
            resolved=engine.resolved,
            environment=case.environment.of(engine.spec),
            workload=workload.reference(),
            load=load,
            run=run,
            launch=engine.launch,
            measured_at=began,
            replica=replica,
        )
        for engine, workload, load, run, replica in zip(
            engines, case.workloads, case.loads, (first, *runs[1:]), case.replicas(), strict=True
        )
    )
