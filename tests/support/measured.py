"""One load on one engine that runs, measured once."""

from pytest_slmserve.engines.base import Engine, ProgressCallback
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import Load, Workload
from pytest_slmserve.telemetry.sampler import Sampler


def measure(
    engine: Engine,
    workload: Workload,
    load: Load,
    environment: Environment,
    on_progress: ProgressCallback = None,
    sampler: Sampler | None = None,
) -> Measurement:
    [found] = measure_case(engine, Case(engine.spec, (workload,), (load,), environment), on_progress, sampler)
    return found
