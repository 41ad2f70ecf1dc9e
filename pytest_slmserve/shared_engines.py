"""What the fixtures of replicas hand out: several engines on one device, started when they are first measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pytest_slmserve.agenda import uneven
from pytest_slmserve.analysis import sharing
from pytest_slmserve.analysis.replication import SharedPoint
from pytest_slmserve.analysis.validity import trustworthy
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.errors import BadUsage
from pytest_slmserve.items import GpusPlan, ReplicaPlan, gpus_engine
from pytest_slmserve.plan import engine_title
from pytest_slmserve.session import Session
from pytest_slmserve.spec import ReplicaSpec


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, started when they are first measured."""

    session: Session
    spec: ReplicaSpec

    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> SharedPoint:
        """Put `concurrency` requests in flight in all, the same number in each; more words are fields of ClosedLoop."""
        if why := uneven(concurrency, len(self.spec)):
            raise BadUsage(why, "a multiple, such as 96, 192 or 384")
        agenda = self.session.agenda
        loads = [replace(agenda.load(concurrency // len(self.spec)), **load)] * len(self.spec)
        workloads = [agenda.workload(engine.model) for engine in self.spec.engines]
        return self.session.measure_replicas(self.spec, workloads, loads, repeats or self.session.options.repeats)

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"


@dataclass(frozen=True, repr=False)
class ReplicaPoint:
    """One engine, or several replicas, under one load in all."""

    session: Session
    plan: ReplicaPlan

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted."""
        session, plan, repeats = self.session, self.plan, self.session.options.repeats
        if plan.count == 1:
            spec, workload = session.agenda.spec(plan.model), session.agenda.workload(plan.model)
            found = session.measure_one(spec, workload, session.agenda.load(plan.concurrency), repeats)
            return trustworthy(str(plan), found, repeats)
        engines = SharedEngines(session, session.agenda.replicas([plan.model] * plan.count, plan.sharing))
        return sharing.trustworthy(str(plan), engines.measure(plan.concurrency), repeats)

    def __repr__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True, repr=False)
class GpusPoint:
    """One engine over several GPUs, or a replica on each, under one load in all."""

    session: Session
    plan: GpusPlan

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted."""
        session, plan, repeats = self.session, self.plan, self.session.options.repeats
        engine, load = gpus_engine(session, plan)
        if isinstance(engine, ReplicaSpec):
            return sharing.trustworthy(str(plan), SharedEngines(session, engine).measure(plan.concurrency), repeats)
        found = session.measure(engine, session.agenda.workload(plan.model), load, repeats)
        return trustworthy(str(plan), found, repeats)

    def __repr__(self) -> str:
        return str(self.plan)
