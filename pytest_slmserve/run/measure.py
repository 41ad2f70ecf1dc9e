"""An engine, a workload and a load make a measurement; several engines at once make one each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone

from pytest_slmserve.engines.base import Engine, ProgressCallback, ignore_progress
from pytest_slmserve.engines.replicas.replica_set import ReplicaEngines
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import ClosedLoop, Load
from pytest_slmserve.schema.records import Measurement, Replica, Run, replica_set
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
    """Run `load` once, with the sensors read beside it, and keep every fact. Raises EngineFailed when the engine
    dies; sensors that fail leave a note in the record, nothing more."""
    began = datetime.now(timezone.utc)
    run = _sampled(engine, workload, load, on_progress, sampler) if sampler else engine.run(workload, load, on_progress)
    return _record(engine, workload, load, environment, run, began)


def measure_together(
    replicas: ReplicaEngines,
    workloads: Sequence[Workload],
    loads: Sequence[ClosedLoop],
    environment: Environment,
    on_progress: ProgressCallback = ignore_progress,
    sampler: Sampler | None = None,
) -> tuple[Measurement, ...]:
    """The same for several engines at once: a record for each. What the sensors said is of all of them, and stands in
    the first."""
    began = datetime.now(timezone.utc)
    runs = _sampled_together(replicas, workloads, loads, on_progress, sampler)
    spec, group = replicas.spec, uuid.uuid4().hex[:12]
    asked = replica_set(spec, [w.hash for w in workloads], loads)
    return tuple(
        _record(
            engine, workload, load, environment, run, began,
            Replica(group, i, len(spec), asked, spec.sharing, spec.pinned, spec.thread_percentage),
        )
        for i, (engine, workload, load, run) in enumerate(zip(replicas.engines, workloads, loads, runs))
    )  # fmt: skip


def _record(
    engine: Engine,
    workload: Workload,
    load: Load,
    environment: Environment,
    run: Run,
    began: datetime,
    replica: Replica | None = None,
) -> Measurement:
    return Measurement(
        spec=engine.spec,
        resolved=engine.resolved,
        environment=environment.of(engine.spec),
        workload=workload.reference(),
        load=load,
        run=run,
        launch=engine.launch,
        measured_at=began.isoformat(timespec="milliseconds"),
        replica=replica,
    )


def _sampled_together(
    replicas: ReplicaEngines,
    workloads: Sequence[Workload],
    loads: Sequence[ClosedLoop],
    on_progress: ProgressCallback,
    sampler: Sampler | None,
) -> tuple[Run, ...]:
    if not sampler:
        return replicas.run(workloads, loads, on_progress)
    with sampler.recording() as recording:
        first, *rest = replicas.run(workloads, loads, on_progress)
    if first.began_s is not None:
        first = replace(first, telemetry=recording.telemetry(first.began_s, first.window_s))
    return first, *rest


def _sampled(engine: Engine, workload: Workload, load: Load, on_progress: ProgressCallback, sampler: Sampler) -> Run:
    with sampler.recording() as recording:
        run = engine.run(workload, load, on_progress)
    if run.began_s is None:  # its clock is not the sensors'
        return run
    return replace(run, telemetry=recording.telemetry(run.began_s, run.window_s))
