"""Memory of a GPU by engine: weights and KV cache as the engines told them, and what sensors saw in use beyond."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_slmserve.analysis.device.gpu_figures import device_figures
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.kv_cache import kv_bytes
from pytest_slmserve.schema.records import Measurement, ReplicaGroup


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of the weights and of the KV cache of one engine, over all of its GPUs."""

    model: str
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the GPUs of one or more engines. used_bytes: in use at most, by anybody; None where no sensor told it,
    or less than weights and KV caches take."""

    engines: tuple[EngineMemory, ...]
    total_bytes: int
    used_bytes: int | None = None

    @property
    def engine_bytes(self) -> int:
        """Weights and KV caches of all engines."""
        return sum(engine.weight_bytes + engine.kv_bytes for engine in self.engines)

    @property
    def other_bytes(self) -> int | None:
        """In use beyond weights and KV caches: activations, captured graphs, contexts. None where that is not known."""
        return None if self.used_bytes is None else self.used_bytes - self.engine_bytes

    @property
    def left_bytes(self) -> int:
        """Free memory, with what the driver keeps; where use is not known, all that weights and KV caches leave."""
        return self.total_bytes - (self.engine_bytes if self.used_bytes is None else self.used_bytes)


def memory_in_use(groups: Iterable[ReplicaGroup]) -> GpuMemory | None:
    """The repeat with the most memory in use; None where of none the parts are known."""
    known = [memory for group in groups if (memory := gpu_memory(group))]
    return max(known, key=lambda memory: memory.used_bytes or 0, default=None)


def gpu_memory(group: ReplicaGroup) -> GpuMemory | None:
    """Memory of one run. None where an engine did not tell its weights, or a cache or the GPU's memory is not known;
    and of MIG instances, of which each has a memory of its own."""
    first = group[0]
    engines = [engine for m in group if (engine := _engine_memory(m))]
    each = first.environment.gpu_memory_bytes
    if each is None or len(engines) < len(group) or (first.replica and first.replica.sharing == "mig"):
        return None
    apart = bool(first.replica and first.replica.sharing == "gpus")
    gpus = sum(m.spec.tensor_parallel_size for m in (group if apart else group[:1]))
    memory = GpuMemory(tuple(engines), each * gpus)
    used = int(memory_used(group) or 0.0)
    if memory.engine_bytes > memory.total_bytes:
        return None
    return GpuMemory(memory.engines, memory.total_bytes, used) if used >= memory.engine_bytes else memory


def memory_used(measurements: Iterable[Measurement]) -> float | None:
    """Bytes of the device in use at most, by anybody; None where no sensor tells."""
    seen = (device_figures(m.run).memory_used_bytes for m in measurements)
    return max((used for used in seen if used is not None), default=None)


def _engine_memory(measurement: Measurement) -> EngineMemory | None:
    weights, cache = measurement.resolved.weight_bytes, kv_bytes(measurement.spec, measurement.resolved)
    if not weights or not cache:
        return None
    return EngineMemory(short_name(measurement.spec.model), weights, cache)
