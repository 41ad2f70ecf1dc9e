"""Where workers sit, and how they come by the GPUs: nobody has one that another has, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.archive.merge import folder_of_parts
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.options.read import read_options
from pytest_slmserve.run.gather import open_for
from pytest_slmserve.run.gpu_slots import (
    GpuLease,
    GpuSlot,
    Outcome,
    agreed,
    as_seen,
    equal_parts,
    outcomes_of,
    seats,
    sweep_up,
)
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.literals import Platform
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.telemetry.host_probe import Gpu, Host

NODES = st.lists(st.frozensets(st.integers(0, 63), min_size=1, max_size=16), min_size=1, max_size=4)


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 16))
def test_each_worker_has_as_many_cores_as_any_other_near_its_gpu(nodes, workers, cores):
    """GPUs in turn on NUMA nodes of the same size."""
    near = [frozenset(range(node * cores, (node + 1) * cores)) for node in range(nodes)]
    wanted = [near[i % nodes] for i in range(workers)]
    parts = equal_parts(wanted, sorted(set().union(*near)))
    assert len(set(map(len, parts))) == 1 and len(set().union(*map(set, parts))) == sum(map(len, parts))
    if cores >= -(-workers // nodes):
        assert parts[0] and all(set(part) <= there for part, there in zip(parts, wanted))


@given(NODES, st.integers(1, 8))
def test_no_core_is_given_twice_whatever_the_host(nodes, workers):
    near = [nodes[i % len(nodes)] for i in range(workers)]
    parts = equal_parts(near, sorted(set().union(*near)))
    assert len(set(map(len, parts))) == 1 and len(set().union(*map(set, parts))) == sum(map(len, parts))


def host(gpus: int, platform: Platform = "simulated") -> Host:
    found = tuple(Gpu(f"simulated-{i}", "simulated", 0, "", "") for i in range(gpus))
    return Host(Environment(platform=platform), "simulated", gpus=found)


def test_a_worker_sees_its_own_gpu_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    found = seats(host(4), 3, tmp_path / "records.jsonl")
    assert [slot.devices for slot in found] == [("simulated-0", "simulated-1", "simulated-2")] * 3
    assert [[gpu.uuid for gpu in as_seen(host(4), slot).gpus] for slot in found] == [
        ["simulated-0", "simulated-1", "simulated-2"],
        ["simulated-1", "simulated-0", "simulated-2"],
        ["simulated-2", "simulated-0", "simulated-1"],
    ]
    assert {tuple(map(len, slot.cores)) for slot in found} == {(5, 5, 5)}
    assert {as_seen(host(4), slot).environment.cores for slot in found} == {5}


@pytest.mark.parametrize(
    ("count", "blocks"), [(1, [(2,)]), (2, [(0, 1), (2, 3)]), (3, [(0, 1, 2)]), (4, [(0, 1, 2, 3)])]
)
def test_several_gpus_are_neighbours_in_one_order_for_all_workers(count, blocks):
    assert GpuSlot("r", 2, tuple("abcde")).blocks(count) == blocks


def test_gpus_of_different_kinds_have_no_workers_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    session = Session.from_options(
        read_options({"simulate": True, "records": str(tmp_path / "r.jsonl")}, {}, {}), tmp_path
    )
    other = Gpu("simulated-9", "NVIDIA L4", 0, "", "")
    session.planner.host = replace(session.host, gpus=(*session.host.gpus[:2], other))
    with pytest.raises(BadUsage, match=r"GPUs of different kinds are visible \(simulated, 0 GiB; NVIDIA L4, 0 GiB\)"):
        open_for(session, 3)
    assert not (tmp_path / "r.jsonl").exists()
    assert len(open_for(session, 2)) == 2
    session.close()


@pytest.mark.parametrize(
    ("given", "own", "both"),
    [("2,5", "5,2", "2,5"), ("GPU-a,GPU-b", "GPU-b,GPU-a", "GPU-a,GPU-b"), (None, "1,0", "0,1")],
)
def test_the_gpus_are_called_as_they_were(given, own, both, tmp_path, monkeypatch):
    """An engine on both has them in the same order whoever starts it, and then the worker's own is the first again."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": given} if given else {})
    lease = GpuLease(seats(host(2, "cuda"), 2, tmp_path / "r")[1], "gw1")
    lease.folder.mkdir()
    lease.take(1)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (own, "PCI_BUS_ID")
    lease.take(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == both and lease.held == ("simulated-0", "simulated-1")
    lease.leave()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_an_engine_on_several_gpus_has_the_cores_of_all_of_them(tmp_path, monkeypatch):
    """While it runs, and its record says so; one that shares a GPU has those of one."""
    sat = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: sat.append(sorted(cores)))
    places = seats(host(4), 4, tmp_path / "r")
    folder_of_parts(tmp_path / "r").mkdir()
    session = Session.from_options(read_options({"simulate": True}, {}, {}), tmp_path, GpuLease(places[1], "gw1"))
    one, two = (session.planner.spec("opt-125m", gpus) for gpus in (1, 2))
    each, both = (session.planner.replicas(["opt-125m"] * 2, how) for how in ("gpus", "time-slicing"))
    session.engine(two)
    session.devices.stop()
    assert sat == [[2, 3], [0, 1, 2, 3], [2, 3]]
    found = [session.planner.environment(spec) for spec in (one, two, each, both)]
    assert [where.cores for where in found] == [2, 4, 4, 2]
    assert len({where.per_gpu_key for where in found}) == 1, "they are compared"
    assert len({where.key for where in found}) == 2, "but not mixed"
    session.close()


def test_more_workers_than_gpus_or_cores(tmp_path, monkeypatch):
    with pytest.raises(BadUsage, match="each worker has a GPU of its own, and 1 GPU visible"):
        seats(host(1), 2, tmp_path / "r")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(BadUsage, match="each worker needs a core, and there are 1"):
        seats(host(2), 2, tmp_path / "r")


def test_an_engine_on_more_than_the_workers_have(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5})
    assert len(seats(host(8), 4, tmp_path / "r", widest=4)) == 4
    with pytest.raises(BadUsage, match="-n 2: an engine on 4 GPUs is asked for, and the workers have 2 in all") as many:
        seats(host(8), 2, tmp_path / "r", widest=4)
    assert many.value.hint == "-n 4"
    cpu = Host(Environment(platform="cpu"), "cpu")
    assert len(seats(cpu, 2, tmp_path / "r", widest=2)) == 2
    with pytest.raises(BadUsage, match="-n 4: an engine of 2 processes needs a core for each, and a worker has 1"):
        seats(cpu, 4, tmp_path / "r", widest=2)


def slot(tmp_path, own: int, devices: str) -> GpuSlot:
    folder_of_parts(tmp_path / "r").mkdir(exist_ok=True)
    return GpuSlot(str(tmp_path / "r"), own, tuple(devices))


def test_a_desk_has_its_devices_until_it_leaves_or_takes_others(tmp_path):
    one, two = GpuLease(slot(tmp_path, 0, "ab"), "gw0"), GpuLease(slot(tmp_path, 1, "ab"), "gw1")
    one.take(1)
    assert (one.neighbours, two.neighbours) == (0, 1)
    two.take(1)
    assert (one.neighbours, two.neighbours) == (1, 1)
    one.leave()
    two.take(2)
    assert (one.neighbours, two.neighbours) == (2, 0) and two.held == ("a", "b")
    two.leave()


def test_who_wants_several_has_those_that_are_free(tmp_path):
    """Neither the first nor its own."""
    one, two = GpuLease(slot(tmp_path, 1, "abcd"), "gw1"), GpuLease(slot(tmp_path, 0, "abcd"), "gw0")
    one.take(1)
    two.take(2)
    assert two.held == ("c", "d")


def test_what_does_not_start_leaves_its_gpus_to_the_others(tmp_path):
    """Who waits for them may be who this worker waits for. To be told why once more it does not wait again."""

    def fails(spec: EngineSpec) -> NoReturn:
        raise EngineFailed("no memory")

    slot(tmp_path, 0, "")
    both = GpuSlot(str(tmp_path / "r"), 0, ("simulated-0", "simulated-1"))
    session = Session.from_options(read_options({"simulate": True}, {}, {}), tmp_path, GpuLease(both, "gw0"))
    session.devices.pool, other = Pool(start_engine=fails), GpuLease(both, "gw1")
    for problem in ("^no memory", "not tried again: no memory"):
        with pytest.raises(EngineFailed, match=problem):
            session.engine(session.planner.spec("opt-125m", 2))
        assert other.neighbours == 0
        other.take(2)
    session.close()


def test_the_first_that_asks_decides_for_all(tmp_path):
    first, other = (GpuLease(slot(tmp_path, i, "ab"), f"gw{i}") for i in range(2))
    with suppress(BadUsage):
        first.agreed("order", refused)
    assert first.agreed("order", lambda: ["a", "b"]) == ["a", "b"]
    assert other.agreed("order", refused) == agreed(other.folder, "order") == ["a", "b"]
    sweep_up(first.folder)
    assert not list(first.folder.iterdir())


def refused() -> NoReturn:
    raise BadUsage("nothing can be decided", "")


def test_sensors_of_several_gpus_are_in_the_same_order_in_each_worker(tmp_path, monkeypatch):
    """The first of a record is the same card whoever has made it."""
    folder_of_parts(tmp_path / "r").mkdir()
    lease, asked = GpuLease(GpuSlot(str(tmp_path / "r"), 1, ("simulated-0", "simulated-1")), "gw1"), []
    session = Session.from_options(read_options({"simulate": True}, {}, {}), tmp_path, lease)
    monkeypatch.setattr(session.devices, "_sampler_on", asked.append)
    for gpus in (1, 2):
        session.engine(spec := session.planner.spec("opt-125m", gpus))
        session.devices.sampler_of(spec)
    assert asked == [("simulated-1",), ("simulated-0", "simulated-1")]
    session.close()


def work(slot: GpuSlot, name: str, seed: int) -> None:
    """Takes one or more devices many times, and notes when it had which."""
    lease, draws, held = GpuLease(slot, name), random.Random(seed), []
    for _ in range(30):
        lease.take(draws.choice([1, 1, 2, len(slot.devices)]))
        began = time.monotonic()
        time.sleep(draws.random() * 0.004)
        held.append((lease.held, began, time.monotonic()))
        lease.leave()
    lease.save(Outcome(judged=tuple(held)))


def test_no_device_has_two_owners_and_nobody_waits_for_ever(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(slot(tmp_path, i, "abcd"), f"gw{i}", i)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        if alive := worker.is_alive():
            worker.kill()
        assert not alive
    told = [turn for outcome in outcomes_of(folder_of_parts(tmp_path / "r")) for turn in outcome.judged]
    assert len(told) == 120
    for name in "abcd":
        turns = sorted((began, ended) for devices, began, ended in told if name in devices)
        assert all(ended <= begins for (_, ended), (begins, _) in pairwise(turns))


def test_what_a_worker_told_is_whole_and_goes_when_the_run_is_over(tmp_path):
    lease = GpuLease(slot(tmp_path, 0, "a"), "gw0")
    lease.save(Outcome(notes=("one",)))
    lease.save(Outcome(notes=("two",)))
    assert [outcome.notes for outcome in outcomes_of(lease.folder)] == [("two",)]
    lease.part.write_text("records")
    lease.take(1)
    lease.leave()
    sweep_up(lease.folder)
    assert [path.name for path in lease.folder.iterdir()] == ["gw0.jsonl"]
