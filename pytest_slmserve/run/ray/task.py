"""A task on a node: a session of its own, which measures one engine's cells and reports each as it ends by
messages."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_slmserve.archive.codec import engine_line, engine_of, measurement_line, measurement_of
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run.gpu_slots import GpuSlots
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadUsage, SlmError
from pytest_slmserve.schema.records import Measurement, ReplicaGroup
from pytest_slmserve.telemetry.host_probe import Host, probe


@dataclass(frozen=True, slots=True)
class EngineTask:
    """The work of one task. known: the repeats of each of its cases that the session has already. environment: of the
    other nodes. slots, at: where the task runs on the host of the session, whose process has locked the devices."""

    options: Options
    environment: Environment
    repeats: int
    known: tuple[tuple[ReplicaGroup, ...], ...]
    slots: GpuSlots | None = None
    at: tuple[int, ...] = ()


def task_of(
    options: Options, environment: Environment, repeats: int, known: Sequence[Sequence[ReplicaGroup]]
) -> EngineTask:
    """A task without an archive, which resumes nothing, and sees no GPUs but those that its engine was given."""
    there = replace(options, ray="", ray_env="", ray_resource="", records="", export="", resume=False, plan=False)
    there = replace(there, tensor_parallel_size=(1,), baseline="")
    return EngineTask(there, environment, repeats, tuple(map(tuple, known)))


def run_task(engine_task: EngineTask, cases: Mapping[str, Case]) -> Iterator[Message]:
    """Messages of a Ray task. cases: of one engine, by their keys, in the order in which they are measured."""
    import ray

    yield TaskStarted(ray.get_runtime_context().get_node_id())
    yield from carried_out(engine_task, cases)


def carried_out(engine_task: EngineTask, cases: Mapping[str, Case]) -> Iterator[Message]:
    """Messages until the engine has stopped."""
    open_keys = list(cases)
    try:
        with closing(_session(engine_task)) as session:
            session.devices.hold()
            for (key, case), known in zip(cases.items(), engine_task.known):
                case = replace(case, environment=session.planner.environment(case.engine))
                for group in known:
                    session.executor.keep(case, group)
                yield from _measured(session, key, case, engine_task.repeats)
                open_keys.remove(key)
            yield from map(UserNote, session.notes)
    except SlmError as error:
        for key in open_keys:
            yield CaseEnded(key, error)


def _measured(session: Session, key: str, case: Case, repeats: int) -> Iterator[Message]:
    """Measures one case and yields its messages. An error ends no other case: the next may have an engine that runs."""
    try:
        for group in session.executor.iter_repeats(case, repeats):
            yield CaseMeasured(key, packed(group))
    except SlmError as error:
        yield CaseEnded(key, error)
    else:
        yield CaseEnded(key)


def _session(engine_task: EngineTask) -> Session:
    """Raises BadUsage where the node is of another kind than those that were looked at before."""
    slots = engine_task.slots
    if slots:
        slots.pin(engine_task.at)
    host = look_around(engine_task.options)
    if isinstance(host, SlmError):
        raise host
    if slots:
        host = slots.host(host, engine_task.at)
    environment = replace(host.environment, git_commit=engine_task.environment.git_commit)
    if unlike := differences(engine_task.environment.kind, environment.kind, ("on the others", "on this one")):
        raise BadUsage(
            f"a node that came later is of another kind ({'; '.join(unlike)})",
            "--slm-ray-resource, or nodes of one kind",
        )
    session = Session.from_options(engine_task.options, Path.cwd(), replace(host, environment=environment))
    session.devices.locked_for_us = slots is not None
    return session


def look_around(options: Options) -> Host | SlmError:
    """The node as engines will find it; an error as a value, since Ray would wrap it into one of its own."""
    leave_threads_alone()
    python, variables = options.engine
    assert options.platform is not None
    try:
        return probe(options.platform, python, dict(variables))
    except SlmError as error:
        return error


def leave_threads_alone() -> None:
    """Ray gives a task as many threads as it has CPUs, often one, and hides the GPUs from one that asked for none. An
    engine would inherit both."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The first message. node: Ray's id of where it is from."""

    node: str


@dataclass(frozen=True, slots=True)
class CaseMeasured:
    """One repeat of a case. packed: as `packed` makes it, one measurement for each engine."""

    key: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class CaseEnded:
    """The end of a case, no more of it comes. error: what ended it; None: all that was requested has been sent."""

    key: str
    error: SlmError | None = None


@dataclass(frozen=True, slots=True)
class UserNote:
    """A sentence for the user."""

    note: str


Message = TaskStarted | CaseMeasured | CaseEnded | UserNote


def packed(found: Sequence[Measurement]) -> bytes:
    """Measurements encoded as in the archive: small, and read by its rules."""
    lines = [line for m in found for line in (engine_line(m), measurement_line(m))]
    return gzip.compress(json.dumps(lines, allow_nan=False).encode(), mtime=0)


def unpacked(data: bytes) -> tuple[Measurement, ...]:
    lines = json.loads(gzip.decompress(data))
    return tuple(measurement_of(run, *engine_of(engine)) for engine, run in zip(lines[::2], lines[1::2]))
