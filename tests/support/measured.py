"""One load on one engine that runs, measured once."""

from typing import Any

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import Load, Workload


def measure(engine: Engine, workload: Workload, load: Load, here: Environment, *on: Any, **more: Any) -> Measurement:
    """on, more: what `measure_case` takes besides the case."""
    [found] = measure_case(engine, Case(engine.spec, (workload,), (load,), here), *on, **more)
    return found
