"""Memory of a GPU by engine: what engines told and sensors saw, and where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripts import BASELINES, in_checkout
from strategies import H200, RESOLVED, measurement, planted_telemetry

from pytest_slmserve.analysis.metrics.gpu_figures import GpuMemory, memory_in_use
from pytest_slmserve.analysis.points import all_groups
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Measurement, Replica
from pytest_slmserve.schema.specs import GIB

BLOCK = 16 * 2 * 24 * 2048 * 2  # bytes of 16 tokens' keys and values: 24 layers of 2,048 numbers of OPT-1.3B


def engine(used: float | None = None, **facts: object) -> Measurement:
    """An engine of OPT-1.3B with 3 GiB of weights and 1,000 KV blocks. used: bytes that sensors saw."""
    told = replace(RESOLVED, weight_bytes=3 * GIB, kv_blocks=1000, block_size=16)
    made = measurement(model="opt-1.3b", environment=replace(H200, gpu_memory_bytes=140 * GIB), resolved=told)
    until = made.run.window_s[1]
    columns = {} if used is None else {sensors.MEMORY_USED: used}
    readings = planted_telemetry(columns, until_s=until, interval_s=until / 40)
    return replace(made, run=replace(made.run, telemetry=readings), **facts)


def together(sharing: str, *engines: Measurement) -> tuple[Measurement, ...]:
    count = len(engines)
    return tuple(replace(m, replica=Replica("g", i, count, "s", sharing)) for i, m in enumerate(engines))


def memory_of(group: tuple[Measurement, ...]) -> GpuMemory | None:
    return memory_in_use([group])


def test_parts_add_up_to_the_memory():
    memory = memory_of(together("mps", engine(15.0 * GIB), engine()))
    assert [(e.weight_bytes, e.kv_bytes) for e in memory.engines] == [(3 * GIB, 1000 * BLOCK)] * 2
    assert memory.other_bytes == 15 * GIB - 2 * (3 * GIB + 1000 * BLOCK)
    assert memory.engine_bytes + memory.other_bytes + memory.left_bytes == memory.total_bytes == 140 * GIB


@pytest.mark.parametrize("used", [None, 1.0 * GIB])
def test_what_no_sensor_tells_is_not_split(used):
    memory = memory_of((engine(used),))
    assert memory.used_bytes is memory.other_bytes is None
    assert memory.left_bytes == 137 * GIB - 1000 * BLOCK


def test_engines_with_a_gpu_each_have_the_memory_of_all():
    assert memory_of(together("gpus", engine(), engine())).total_bytes == 280 * GIB
    assert memory_of(together("time-slicing", engine(), engine())).total_bytes == 140 * GIB


def test_nothing_is_said_where_a_part_is_not_known():
    told = engine()
    blind = replace(told, resolved=replace(told.resolved, weight_bytes=None))
    unknown = replace(told, environment=replace(told.environment, gpu_memory_bytes=None))
    small = replace(told, environment=replace(told.environment, gpu_memory_bytes=GIB))
    assert [memory_of((m,)) for m in (blind, unknown, small)] == [None] * 3
    assert memory_of(together("mps", told, blind)) is None
    assert memory_of(together("mig", told, told)) is None
    assert memory_in_use([(blind,), (engine(9.0 * GIB),), (engine(12.0 * GIB),)]).used_bytes == 12 * GIB


@in_checkout
def test_committed_replicas_leave_room_and_use_more_than_weights_and_cache():
    found = read(BASELINES / "h200-vllm-0.26.0-replicas.jsonl.xz").measurements
    groups = [group for group in all_groups(found) if len(group) > 1]
    seen = [memory_of(group) for group in groups]
    assert {len(memory.engines) for memory in seen} == {2, 3}
    assert all(1.5 < memory.other_bytes / GIB / len(memory.engines) < 3 for memory in seen)
    assert all(15 * GIB < memory.left_bytes < 21 * GIB for memory in seen)
