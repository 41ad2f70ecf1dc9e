"""What the fixtures of points and jobs hand out: one thing to be measured, named by the options or a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_slmserve.analysis.compare import replicas
from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.points.replica_points import SharedPoint
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import GpusPlan, JobPlan, Question, ReplicaPlan, gpus_engine, point_id
from pytest_slmserve.plan.planner import MarkerOverrides, uneven
from pytest_slmserve.plan.titles import engine_title
from pytest_slmserve.run.adaptive import AdaptiveSweeps
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ReplicaSpec

Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to whoever else is there


@dataclass(frozen=True, repr=False)
class PlannedPoint:
    """One point of a planned sweep, or one that a marker names. adaptive: those sweeps, where this is a part of one."""

    session: Session
    model: str
    load: ClosedLoop
    variant: MarkerOverrides
    carry: Carry
    adaptive: AdaptiveSweeps | None = None

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted. The test
        is skipped where an adaptive sweep does not need this point."""
        spec, workload = self.session.planner.spec(self.model), self.session.planner.workload(self.model, self.variant)
        repeats = self._repeats()
        found = self.session.measure(spec, workload, self.load, repeats)
        self.carry(found)
        return trustworthy(repr(self), found, repeats)

    def _repeats(self) -> int:
        if self.adaptive is None:
            return self.session.options.repeats
        wanted = self.adaptive.repeats(self.model, self.load.concurrency)
        if wanted is None:
            pytest.skip(self.adaptive.why_not(self.model, self.load.concurrency))
        return wanted

    def __repr__(self) -> str:
        return point_id(self.model, self.load)


@dataclass(frozen=True, repr=False)
class PlannedJob:
    """One job that a marker names."""

    session: Session
    plan: JobPlan
    carry: Carry

    def measure(self) -> Verdict:
        """Serve it (unless it is known already). The verdict tells whether the measurements can be trusted."""
        repeats = self.session.options.repeats
        found = self.session.measure(*cases.job_case(self.session.planner, self.plan), repeats)
        self.carry(found)
        return trustworthy(repr(self), found, repeats)

    def __repr__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, started when they are first measured."""

    session: Session
    spec: ReplicaSpec

    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> SharedPoint:
        """Put `concurrency` requests in flight in all, the same number in each; more words are fields of ClosedLoop."""
        return self.session.answered_together(
            self.question(concurrency, **load), repeats or self.session.options.repeats
        )

    def question(self, concurrency: int, **load: Any) -> Question:
        if why := uneven(concurrency, len(self.spec)):
            raise BadUsage(why, "a multiple, such as 96, 192 or 384")
        planner = self.session.planner
        loads = [replace(planner.load(concurrency // len(self.spec)), **load)] * len(self.spec)
        workloads = [planner.workload(engine.model) for engine in self.spec.engines]
        return self.session.question_of_replicas(self.spec, workloads, loads)

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"


@dataclass(frozen=True, repr=False)
class ReplicaPoint:
    """One engine, or several replicas, under one load in all."""

    session: Session
    plan: ReplicaPlan

    def question(self) -> Question:
        plan, planner = self.plan, self.session.planner
        if plan.count == 1:
            spec, workload = planner.spec(plan.model), planner.workload(plan.model)
            return self.session.question_of_one(spec, workload, planner.load(plan.concurrency))
        engines = planner.replicas([plan.model] * plan.count, plan.sharing)
        return SharedEngines(self.session, engines).question(plan.concurrency)

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted."""
        return _trusted(self.session, str(self.plan), self.question())

    def __repr__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True, repr=False)
class GpusPoint:
    """One engine over several GPUs, or a replica on each, under one load in all."""

    session: Session
    plan: GpusPlan

    def question(self) -> Question:
        session, plan = self.session, self.plan
        engine, load = gpus_engine(session.planner, plan)
        if isinstance(engine, ReplicaSpec):
            return SharedEngines(session, engine).question(plan.concurrency)
        return session.question(engine, session.planner.workload(plan.model), load)

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted."""
        return _trusted(self.session, str(self.plan), self.question())

    def __repr__(self) -> str:
        return str(self.plan)


def _trusted(session: Session, subject: str, question: Question) -> Verdict:
    repeats = session.options.repeats
    if isinstance(question.engine, ReplicaSpec):
        return replicas.trustworthy(subject, session.answered_together(question, repeats), repeats)
    return trustworthy(subject, session.answered(question, repeats), repeats)
