"""Cases: what can be measured, with the key, the title and the estimated time of each."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cached_property

from pytest_slmserve.plan.costs import repeat_estimate_s
from pytest_slmserve.plan.titles import Engines, each_of, engine_title, point_title
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import ClosedLoop, Load
from pytest_slmserve.schema.records import Replica, measurement_key, replica_set
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec, short_hash
from pytest_slmserve.schema.workloads import Workload

NOWHERE = Environment()


@dataclass(frozen=True, eq=False)  # no slots: its key takes a while to compute, and is kept
class Case:
    """One thing to measure: an engine, or several that share a device, with a workload and a load for each.

    engines: as they are to share the device. A set of one is an engine that larger sets are compared with, and no point
    of a sweep. None: this host cannot have them, and skip_reason says why.
    model, id: as the options or a marker name the model, and the id of the test; "" for what a test's body requests.
    """

    engines: Engines | None = None
    workloads: tuple[Workload, ...] = ()
    loads: tuple[Load, ...] = ()
    environment: Environment = NOWHERE
    model: str = ""
    id: str = ""
    skip_reason: str | None = None

    @property
    def engine(self) -> Engines:
        """The engines to start: the replicas, or of a set of one its engine, which may run for other cases already."""
        return self.engines if isinstance(self.engines, ReplicaSpec) and len(self.engines) > 1 else self.each[0]

    @property
    def each(self) -> tuple[EngineSpec, ...]:
        """Specifications of the case's engines. Raises ValueError where this host cannot have them."""
        if self.engines is None:
            raise ValueError(f"{self.id} has no engine: {self.skip_reason}")
        return each_of(self.engines)

    def replicas(self) -> tuple[Replica | None, ...]:
        """The part of each engine in one repeat, which gets a name of its own; None for an engine of no set."""
        if not isinstance(self.engines, ReplicaSpec):
            return (None,)
        spec, group = self.engines, uuid.uuid4().hex[:12]
        key = replica_set(spec, [workload.hash for workload in self.workloads], self.loads)
        how = spec.sharing, spec.pinned, spec.thread_percentage
        return tuple(Replica(group, i, len(spec), key, *how) for i in range(len(spec)))

    @cached_property
    def key(self) -> str:
        """Equal keys, one case: a stored repeat with this key is a repeat of this case."""
        first = self.replicas()[0]
        if first and first.count > 1:
            return short_hash([first.set, self.environment.key])
        alone = measurement_key(self.each[0], self.workloads[0].hash, self.loads[0], self.environment)
        return first.key(alone) if first else alone

    @property
    def title(self) -> str:
        """A short title for people: the model and its load, or the set of replicas and its requests in flight."""
        if isinstance(self.engine, EngineSpec):
            return point_title(self.engine, self.loads[0])
        return f"{engine_title(self.engine)} at {self.concurrency}"

    @property
    def concurrency(self) -> int:
        """Requests in flight in all engines of a case of closed loops."""
        return sum(load.concurrency for load in self.loads if isinstance(load, ClosedLoop))

    @property
    def estimate_s(self) -> float:
        """Seconds that one repeat takes, roughly, without the engine's start."""
        shares = isinstance(self.engines, ReplicaSpec) and self.engines.sharing != "gpus"
        in_all = self.concurrency if shares else None
        return repeat_estimate_s(self.each[0], self.workloads[0], self.loads[0], in_all)
