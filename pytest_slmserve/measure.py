"""An engine, a workload and a load make a measurement."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from pytest_slmserve.engines.base import Engine, Tell, silent
from pytest_slmserve.records import Environment, Measurement, Run, Workload
from pytest_slmserve.spec import Load
from pytest_slmserve.telemetry.sampler import Sampler


def measure(
    engine: Engine,
    workload: Workload,
    load: Load,
    environment: Environment,
    tell: Tell = silent,
    sampler: Sampler | None = None,
) -> Measurement:
    """Run `load` once, with the sensors read beside it, and keep every fact. Raises EngineFailed when the engine
    dies; sensors that fail leave a note in the record, nothing more."""
    began = datetime.now(timezone.utc)
    run = _sampled(engine, workload, load, tell, sampler) if sampler else engine.run(workload, load, tell)
    return Measurement(
        spec=engine.spec,
        resolved=engine.resolved,
        environment=environment,
        workload=workload.reference(),
        load=load,
        run=run,
        launch=engine.launch,
        measured_at=began.isoformat(timespec="milliseconds"),
    )


def _sampled(engine: Engine, workload: Workload, load: Load, tell: Tell, sampler: Sampler) -> Run:
    with sampler.recording() as recording:
        run = engine.run(workload, load, tell)
    if run.began_s is None:  # its clock is not the sensors'
        return run
    return replace(run, telemetry=recording.telemetry(run.began_s, run.window_s))
