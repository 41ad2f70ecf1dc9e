"""An engine, a workload and a load make a measurement."""

from __future__ import annotations

from datetime import datetime, timezone

from pytest_slmserve.engines.base import Engine, Tell, silent
from pytest_slmserve.records import Environment, Measurement, Workload
from pytest_slmserve.spec import Load


def measure(
    engine: Engine, workload: Workload, load: Load, environment: Environment, tell: Tell = silent
) -> Measurement:
    """Run `load` once and keep every fact of it. Raises EngineFailed when the engine dies."""
    began = datetime.now(timezone.utc)
    run = engine.run(workload, load, tell)
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
