"""Titles of engines and points."""

from __future__ import annotations

from pytest_slmserve.analysis.points.replica_points import engines
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import ClosedLoop, Load
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec

Engines = EngineSpec | ReplicaSpec


def engine_title(spec: Engines) -> str:
    """A short title of an engine or a set of replicas, for people: "opt-125m on 2 GPUs"."""
    if isinstance(spec, EngineSpec):
        if spec.interface == "transformers":
            return f"{spec.model} in Transformers, batching {dict(spec.extra).get('batching')}"
        return spec.model if spec.tensor_parallel_size == 1 else f"{spec.model} on {spec.tensor_parallel_size} GPUs"
    how = "a GPU each" if spec.sharing == "gpus" else f"by {spec.sharing}"
    return f"{engines([engine.model for engine in spec.engines])}, {how}"


def point_title(spec: EngineSpec, load: Load) -> str:
    """A short title of a model under a load, for people: "opt-125m at 64"."""
    name = short_name(spec.model)
    return f"{name} at {load.concurrency}" if isinstance(load, ClosedLoop) else f"{name}, {load.title}"


def clock(seconds: float) -> str:
    """Minutes and seconds: 3:07."""
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d}"


def each_of(engine: Engines) -> tuple[EngineSpec, ...]:
    """The engines of a set, or the one that is none."""
    return engine.engines if isinstance(engine, ReplicaSpec) else (engine,)


def gpus_of(engine: Engines) -> int:
    """GPUs that are taken while it runs."""
    return len(engine.gpus)
