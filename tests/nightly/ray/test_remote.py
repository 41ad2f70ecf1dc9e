"""What an engine on a node does with each call, without Ray."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import measurements

from pytest_slmserve.options.read import read_options
from pytest_slmserve.run import cluster
from pytest_slmserve.run.cluster import RemoteEngine, look_around, packed_measurements, unpacked
from pytest_slmserve.run.executor import Devices
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import DeviceBusy, EngineFailed


@pytest.fixture(autouse=True)
def on_a_node(monkeypatch):
    monkeypatch.setattr(cluster, "process_place", lambda: ("node", 1))


@pytest.fixture
def asked(tmp_path):
    """A session with its cases: `session, cases = asked()`."""
    sessions = []

    def of(*loads, **words):
        given = {"simulate": True, "records": str(tmp_path / "records.jsonl"), "window": "1", **words}
        session = Session.from_options(read_options(given, {}, {}), tmp_path)
        sessions.append(session)
        spec, workload = session.planner.spec("opt-125m"), session.planner.workload("opt-125m")
        return session, [session.planner.case(spec, [workload], [session.planner.load(n)]) for n in loads]

    yield of
    for session in sessions:
        session.close()


class Node:
    """An engine whose arguments have been through pickle, as those that travel have."""

    def __init__(self, session, cases, environment=None):
        where = environment or session.host.environment
        self.engine = RemoteEngine(*pickle.loads(pickle.dumps((session.options, where))))
        self.cases = pickle.dumps({case.key: case for case in cases})

    def measure(self, key):
        return self.engine.measure(key, pickle.loads(self.cases))


def test_each_call_is_one_repeat_under_the_key_that_it_was_asked_by(asked):
    session, cases = asked(4, 8)
    node, keys = Node(session, cases), [case.key for case in cases]
    found = [m for key in (*keys, *keys) for m in unpacked(node.measure(key).packed)]
    assert [m.key for m in found] == keys * 2
    assert len({m.launch for m in found}) == 1, "one engine for all of them"
    assert node.engine.close().notes == tuple(node.engine.session.notes) and node.engine.started().place == ("node", 1)


def test_an_engine_that_dies_ends_its_case_and_no_other(asked):
    session, cases = asked(4, 64, 8, engine_arg=["die_at=64"])
    node = Node(session, cases)
    answers = [node.measure(case.key) for case in (*cases, cases[1])]
    assert [type(answer.error) for answer in answers] == [type(None), EngineFailed, type(None), EngineFailed]
    assert answers[1].error is answers[3].error, "it is not tried again"


def test_a_node_that_came_later_and_is_of_another_kind_measures_nothing(asked):
    session, cases = asked(4, 8)
    node = Node(session, cases, replace(session.host.environment, gpu_name="H100"))
    said = "is of another kind (gpu_name H100 on the others, simulated on this one)"
    assert all(said in str(node.measure(case.key).error) for case in cases)


def test_what_keeps_a_node_from_beginning_is_told_of_every_case(asked, monkeypatch):
    def busy(*_):
        raise DeviceBusy("this device is being measured by another run", "wait")

    monkeypatch.setattr(Devices, "hold", busy)
    session, cases = asked(4, 8)
    node = Node(session, cases)
    assert [type(node.measure(case.key).error) for case in cases] == [DeviceBusy, DeviceBusy]


def test_several_engines_are_one_answer(asked):
    session, _ = asked()
    case = session.planner.replicas_case(session.planner.replicas(["opt-125m"] * 2), 16)
    found = unpacked(Node(session, [case]).measure(case.key).packed)
    assert len(found) == 2 and len({m.replica.set for m in found}) == 1 and found[0].replica.count == 2


def test_the_engine_of_a_node_does_not_inherit_what_ray_gives_a_task(monkeypatch):
    options = read_options({"simulate": True}, {}, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    look_around(options)
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & os.environ.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    look_around(options)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "the GPU that the task was given"


@given(measurements())
@settings(max_examples=20)
def test_what_is_unpacked_is_what_the_archive_would_hold(measurement):
    once = unpacked(packed_measurements([measurement]))
    assert unpacked(packed_measurements(once)) == once and once[0].key == measurement.key
