"""What a node does with an engine_task, without Ray: the same generator that a task runs."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import measurements

from pytest_slmserve.options.read import read_options
from pytest_slmserve.run.devices import Devices
from pytest_slmserve.run.ray.connect import (
    CaseEnded,
    CaseMeasured,
    carried_out,
    leave_threads_alone,
    packed_measurements,
    task_of,
    unpacked,
)
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import DeviceBusy, EngineFailed


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


def told(session, cases, known=None, environment=None):
    """All messages of an engine_task that has been through pickle, as one that travels has."""
    by_key, none = {case.key: case for case in cases}, [()] * len(cases)
    where, repeats = environment or session.host.environment, session.options.repeats
    engine_task = task_of(session.options, where, repeats, known or none)
    return list(carried_out(*pickle.loads(pickle.dumps((engine_task, by_key)))))


def test_each_repeat_is_told_as_it_ends_under_the_key_that_it_was_asked_by(asked):
    session, cases = asked(4, 8)
    messages = told(session, cases)
    kinds = [(type(m), m.key) for m in messages if not hasattr(m, "note")]
    first, second = (case.key for case in cases)
    assert kinds == [(CaseMeasured, first)] * 2 + [(CaseEnded, first)] + [(CaseMeasured, second)] * 2 + [
        (CaseEnded, second)
    ]
    found = [m for message in messages if isinstance(message, CaseMeasured) for m in unpacked(message.packed)]
    assert [m.key for m in found] == [first, first, second, second]
    assert len({m.launch for m in found}) == 1, "one engine for all of them"


def test_what_is_known_is_not_measured_again(asked):
    session, cases = asked(4)
    first = next(m for m in told(session, cases) if isinstance(m, CaseMeasured))
    again = told(session, cases, [(unpacked(first.packed),)])
    assert sum(isinstance(m, CaseMeasured) for m in again) == 1


def test_an_engine_that_dies_ends_its_question_and_no_other(asked):
    session, cases = asked(4, 64, 8, engine_arg=["die_at=64"])
    messages = told(session, cases)
    (failed,) = (m for m in messages if isinstance(m, CaseEnded) and m.error)
    assert failed.key == cases[1].key and isinstance(failed.error, EngineFailed)
    assert [m.key for m in messages if isinstance(m, CaseEnded) and not m.error] == [cases[0].key, cases[2].key]


def test_a_node_that_came_later_and_is_of_another_kind_measures_nothing(asked):
    session, cases = asked(4, 8)
    messages = told(session, cases, environment=replace(session.host.environment, gpu_name="H100"))
    assert [m.key for m in messages] == [case.key for case in cases]
    assert all(
        "is of another kind (gpu_name H100 on the others, simulated on this one)" in str(m.error) for m in messages
    )


def test_what_keeps_a_node_from_beginning_is_told_of_every_question(asked, monkeypatch):
    def busy(*_):
        raise DeviceBusy("this device is being measured by another run", "wait")

    monkeypatch.setattr(Devices, "hold", busy)
    assert [type(m.error) for m in told(*asked(4, 8))] == [DeviceBusy, DeviceBusy]


def test_several_engines_are_one_message(asked):
    session, _ = asked()
    spec = session.planner.replicas(["opt-125m"] * 2)
    case = session.planner.replicas_case(spec, 16)
    found = [unpacked(m.packed) for m in told(session, [case]) if isinstance(m, CaseMeasured)]
    assert [len(members) for members in found] == [2, 2]
    assert {m.replica.set for members in found for m in members} and all(m.replica.count == 2 for m in found[0])


def test_the_engine_of_a_node_does_not_inherit_what_ray_gives_a_task(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    leave_threads_alone()
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & os.environ.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    leave_threads_alone()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "the GPU that the task was given"


@given(measurements())
@settings(max_examples=20)
def test_what_is_unpacked_is_what_the_archive_would_hold(measurement):
    once = unpacked(packed_measurements([measurement]))
    assert unpacked(packed_measurements(once)) == once and once[0].key == measurement.key
