"""What the fixtures of points and jobs hand out: one thing to be measured, named by the options or a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import JobPlan, point_id
from pytest_slmserve.plan.planner import Variant
from pytest_slmserve.run.adaptive import AdaptiveSweeps
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement

Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to whoever else is there


@dataclass(frozen=True, repr=False)
class PlannedPoint:
    """One point of a planned sweep, or one that a marker names. adaptive: those sweeps, where this is a part of one."""

    session: Session
    model: str
    load: ClosedLoop
    variant: Variant
    carry: Carry
    adaptive: AdaptiveSweeps | None = None

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted. The test
        is skipped where an adaptive sweep does not need this point."""
        spec, workload = self.session.agenda.spec(self.model), self.session.agenda.workload(self.model, self.variant)
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
        found = self.session.measure(*cases.job_case(self.session.agenda, self.plan), repeats)
        self.carry(found)
        return trustworthy(repr(self), found, repeats)

    def __repr__(self) -> str:
        return str(self.plan)
