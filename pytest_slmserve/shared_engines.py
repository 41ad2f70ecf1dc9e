"""What the fixtures of replicas hand out: several engines on one device, started when they are first measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pytest_slmserve.analysis.compare import replicas
from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.points.replica_points import SharedPoint
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.cases import GpusPlan, Question, ReplicaPlan, gpus_engine
from pytest_slmserve.plan.planner import uneven
from pytest_slmserve.plan.titles import engine_title
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import ReplicaSpec


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
        agenda = self.session.agenda
        loads = [replace(agenda.load(concurrency // len(self.spec)), **load)] * len(self.spec)
        workloads = [agenda.workload(engine.model) for engine in self.spec.engines]
        return self.session.question_of_replicas(self.spec, workloads, loads)

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"


@dataclass(frozen=True, repr=False)
class ReplicaPoint:
    """One engine, or several replicas, under one load in all."""

    session: Session
    plan: ReplicaPlan

    def question(self) -> Question:
        plan, agenda = self.plan, self.session.agenda
        if plan.count == 1:
            spec, workload = agenda.spec(plan.model), agenda.workload(plan.model)
            return self.session.question_of_one(spec, workload, agenda.load(plan.concurrency))
        engines = agenda.replicas([plan.model] * plan.count, plan.sharing)
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
        engine, load = gpus_engine(session.agenda, plan)
        if isinstance(engine, ReplicaSpec):
            return SharedEngines(session, engine).question(plan.concurrency)
        return session.question(engine, session.agenda.workload(plan.model), load)

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
