"""Slots of a host: equal shares of its cores, GPUs next to each other, and one sentence for what is not there."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.engines.pool import equal_parts
from pytest_slmserve.options.read import read_options
from pytest_slmserve.run import cluster
from pytest_slmserve.run.executor import GpuSlots, slot_count
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, Platform
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.telemetry.host import Gpu, Host

NODES = st.lists(st.frozensets(st.integers(0, 63), min_size=1, max_size=16), min_size=1, max_size=4)


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 16))
def test_each_slot_has_as_many_cores_as_any_other_near_its_gpu(nodes, workers, cores):
    """GPUs in turn on NUMA nodes of the same size."""
    near = [frozenset(range(node * cores, (node + 1) * cores)) for node in range(nodes)]
    wanted = [near[i % nodes] for i in range(workers)]
    parts = equal_parts(wanted, frozenset().union(*near))
    assert len(set(map(len, parts))) == 1 and len(set().union(*map(set, parts))) == sum(map(len, parts))
    if cores >= -(-workers // nodes):
        assert parts[0] and all(set(part) <= there for part, there in zip(parts, wanted))


@given(NODES, st.integers(1, 8))
def test_no_core_is_given_twice_whatever_the_host(nodes, workers):
    near = [nodes[i % len(nodes)] for i in range(workers)]
    parts = equal_parts(near, frozenset().union(*near))
    assert len(set(map(len, parts))) == 1 and len(set().union(*map(set, parts))) == sum(map(len, parts))


def host(gpus: int, platform: Platform = "simulated") -> Host:
    found = tuple(Gpu(f"simulated-{i}", "simulated", 0, "", "") for i in range(gpus))
    return Host(Environment(platform=platform), "simulated", gpus=found)


def test_a_slot_sees_its_gpu_and_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    slots = GpuSlots.from_host(host(4), 3)
    assert slots.devices == ("simulated-0", "simulated-1", "simulated-2") and list(map(len, slots.cores)) == [5, 5, 5]
    there = slots.host(host(4), (1,))
    assert [gpu.uuid for gpu in there.gpus] == ["simulated-1"] and there.environment.cores == 5


@pytest.mark.parametrize(
    ("count", "free", "block"),
    [
        (1, {2, 3}, (2,)),
        (1, set(), None),
        (2, {0, 1, 2, 3}, (0, 1)),
        (2, {1, 2, 3}, (2, 3)),
        (2, {1, 2}, None),
        (4, {0, 1, 2, 3, 4}, (0, 1, 2, 3)),
    ],
)
def test_several_gpus_are_neighbours_in_the_order_of_the_host(count, free, block):
    assert GpuSlots(tuple("abcde")).block(count, free) == block


def test_gpus_of_different_kinds_do_not_serve_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    other = Gpu("simulated-9", "NVIDIA L4", 0, "", "")
    mixed = replace(host(2), gpus=(*host(2).gpus, other))
    monkeypatch.setattr(cluster, "probe", lambda *_: mixed)
    with pytest.raises(BadUsage, match=r"GPUs of different kinds are visible \(simulated, 0 GiB; NVIDIA L4, 0 GiB\)"):
        cluster.RayEngines.from_options(read_options({"simulate": True, "ray": "local:3"}, {}, {}), tmp_path)
    two = cluster.RayEngines.from_options(read_options({"simulate": True, "ray": "local:2"}, {}, {}), tmp_path)
    assert two.where == "on 2 GPUs of this host at once"


@pytest.mark.parametrize(
    ("given", "second", "both"),
    [("2,5", "5", "2,5"), ("GPU-a,GPU-b", "GPU-b", "GPU-a,GPU-b"), (None, "1", "0,1")],
)
def test_the_gpus_are_called_as_they_were(given, second, both, monkeypatch):
    pinned = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(sorted(cores)))
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": given} if given else {})
    slots = GpuSlots.from_host(host(2, "cuda"), 2)
    slots.pin((1,))
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (second, "PCI_BUS_ID")
    slots.pin((0, 1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == both and pinned == [[2, 3], [0, 1, 2, 3]]


def test_an_engine_on_several_gpus_has_the_cores_of_all_of_them(tmp_path, monkeypatch):
    """One that shares a GPU has those of one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    slots = GpuSlots.from_host(host(4), 4)
    session = Session.from_options(read_options({"simulate": True}, {}, {}), tmp_path, slots.host(host(4), range(4)))
    one, two = (session.planner.spec("opt-125m", gpus) for gpus in (1, 2))
    each, both = (session.planner.replicas(["opt-125m"] * 2, how) for how in ("gpus", "time-slicing"))
    found = [session.planner.environment(spec) for spec in (one, two, each, both)]
    assert [where.cores for where in found] == [2, 4, 4, 2]
    assert len({where.per_gpu_key for where in found}) == 1, "they are compared"
    assert len({where.key for where in found}) == 2, "but not mixed"
    session.close()


def test_more_slots_than_gpus_or_cores(monkeypatch):
    with pytest.raises(BadUsage, match="--slm-ray local:2: 1 GPU is visible"):
        GpuSlots.from_host(host(1), 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(BadUsage, match="each engine needs a core, and there are 1"):
        GpuSlots.from_host(host(2), 2)


def test_an_engine_that_is_wider_than_the_slots(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5})
    assert len(GpuSlots.from_host(host(8), 4, widest=4).devices) == 4
    with pytest.raises(BadUsage, match="--slm-ray local:2: an engine takes 4 GPUs") as many:
        GpuSlots.from_host(host(8), 2, widest=4)
    assert many.value.hint == "--slm-ray local:4"
    cpu = Host(Environment(platform="cpu"), "cpu")
    assert len(GpuSlots.from_host(cpu, 2, widest=2).devices) == 2
    with pytest.raises(BadUsage, match="an engine of 2 processes needs a core for each, and has 1"):
        GpuSlots.from_host(cpu, 4, widest=2)


def test_a_system_that_does_not_say_our_cores_has_slots_with_all_of_them(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert GpuSlots.from_host(host(4), 2).cores == ((), ())


@pytest.mark.parametrize(
    ("word", "platform", "count"),
    [("local", "simulated", 3), ("local:7", "simulated", 7), ("local", "cuda", 8), ("local", "cpu", 2)],
)
def test_all_slots_of_a_host_unless_fewer_are_named(word, platform, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("pytest_slmserve.run.executor.numa_nodes", lambda: 2)
    assert slot_count(read_options({"simulate": True, "ray": word}, {}, {}), host(8, platform)) == count
