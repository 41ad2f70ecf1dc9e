"""An engine on a node of Ray, or on some GPUs of this host: what its process does, and what it answers."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_slmserve.archive.codec import engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run.devices import GpuSlots
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, SlmError
from pytest_slmserve.schema.records import Environment, Measurement, ReplicaGroup, differences
from pytest_slmserve.telemetry.host import Host, probe


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answer of an engine to one call.

    Attributes:
        place: Ray's identifier of the node, and the process there.
        packed: One repeat, as `packed_measurements` makes it.
        error: The error that kept the engine from measuring; an exception would be wrapped by Ray.
        notes: Sentences for the user.
    """

    place: tuple[str, int]
    packed: bytes = b""
    error: SlmError | None = None
    notes: tuple[str, ...] = ()


def process_place() -> tuple[str, int]:
    """Ray's identifier of the node of this process, and the process."""
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


class RemoteEngine:
    """An engine as an actor of Ray: each call measures one repeat. It keeps no records and resumes nothing.

    Attributes:
        environment: Environment of the other nodes, of whose kind this one has to be.
        slots, at: Slots of the session's host, and those on which the engine runs. The session has locked its devices.
    """

    def __init__(
        self, options: Options, environment: Environment, slots: GpuSlots | None = None, at: Sequence[int] = ()
    ) -> None:
        own = options._replace(ray="", ray_env="", ray_resource="", records="", export="", resume=False, plan=False)
        self.options = own._replace(tensor_parallel_size=(1,), baseline="")
        self.environment, self.slots, self.at = environment, slots, at
        self.session: Session | None = None
        self.failed: dict[str, SlmError] = {}  # by the key of a case; under "" why there is no session

    def started(self) -> EngineAnswer:
        """The place where the engine will run."""
        return EngineAnswer(process_place())

    def measure(self, key: str, cases: Mapping[str, Case]) -> EngineAnswer:
        """Measure one repeat of the case of this key. A case that failed is not tried again."""
        error = self.failed.get("") or self.failed.get(key)
        try:
            if error is None:
                session = self.session or self._open()
                case = cases[key]
                case = replace(case, environment=session.planner.environment(case.engine))
                group = session.executor.measure_once(case, case.title)
                return EngineAnswer(process_place(), packed_measurements(group))
        except SlmError as raised:
            self.failed[key if self.session else ""] = error = raised
        return EngineAnswer(process_place(), error=error)

    def _open(self) -> Session:
        """Open the session, whose host is this node as its engine will find it. Raises BadUsage if the node is of
        another kind than those that were looked at before, or DeviceBusy."""
        if self.slots:
            self.slots.pin(self.at)
        host = look_around(self.options)
        if isinstance(host, SlmError):
            raise host
        if self.slots:
            host = self.slots.host(host, self.at)
        environment = replace(host.environment, git_commit=self.environment.git_commit)
        if unlike := differences(self.environment.kind, environment.kind, ("on the others", "on this one")):
            why = f"a node that came later is of another kind ({'; '.join(unlike)})"
            raise BadUsage(why, "-o slm_ray_resource=NAME, or nodes of one kind")
        session = Session.from_options(self.options, Path.cwd(), replace(host, environment=environment))
        session.devices.locked_for_us = self.slots is not None
        session.devices.hold()
        self.session = session
        return session

    def close(self) -> EngineAnswer:
        """Stop the engine."""
        if self.session is None:
            return EngineAnswer(process_place())
        self.session.close()
        return EngineAnswer(process_place(), notes=tuple(self.session.notes))


def look_around(options: Options) -> Host | SlmError:
    """The node as engines will find it; an error as a value, because Ray would wrap an exception. Ray gives a task as
    many threads as it has CPUs, often one, and hides the GPUs from a task that takes none: an engine must not inherit
    either."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    python, variables = options.engine
    assert options.platform is not None
    try:
        return probe(options.platform, python, dict(variables))
    except SlmError as error:
        return error


def packed_measurements(found: Sequence[Measurement]) -> bytes:
    """Measurements encoded as in the archive: small, and read by its rules."""
    lines = [
        line for m in found for line in (engine_line(m.launch, m.spec, m.resolved, m.environment), measurement_line(m))
    ]
    return gzip.compress(json.dumps(lines, allow_nan=False).encode(), mtime=0)


def unpacked(data: bytes) -> ReplicaGroup:
    """The measurements that `packed_measurements` encoded."""
    lines = json.loads(gzip.decompress(data))
    return tuple(measurement_of(run, *engine_from_record(engine)) for engine, run in zip(lines[::2], lines[1::2]))
