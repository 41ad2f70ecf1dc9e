"""Objects that the fixtures of points and jobs hand out: a case of this run that can be measured, and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, shared_points
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.titles import engine_title
from pytest_slmserve.plugin.calls import OF_A_LOAD, checked
from pytest_slmserve.run.session import Session
from pytest_slmserve.run.sweeps import Sweeps
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ReplicaSpec

Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to whoever else is there


@dataclass(frozen=True, repr=False)
class PlannedCase:
    """The case of a test. sweeps: those of the run, where it is a point of one."""

    session: Session
    case: Case
    carry: Carry = lambda measurements: None
    sweeps: Sweeps | None = None

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted. The test
        is skipped where an adaptive sweep does not need this point."""
        wanted = self._repeats()
        repeats = self.session.executor.measure(self.case, wanted)
        self.carry([m for group in repeats for m in group])
        return trustworthy(repr(self), repeats, wanted)

    def _repeats(self) -> int:
        if self.sweeps is None:
            return self.session.options.repeats
        model, concurrency = self.case.model, self.case.concurrency
        wanted = self.sweeps.repeats(model, concurrency)
        if wanted is None:
            pytest.skip(self.sweeps.why_not(model, concurrency))
        return wanted

    def __repr__(self) -> str:
        return self.case.id


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, started when they are first measured."""

    session: Session
    spec: ReplicaSpec

    @checked("slm_replicas(...).measure", *OF_A_LOAD)
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> ReplicaPoint:
        """Put `concurrency` requests in flight in all, the same number in each; more words are fields of ClosedLoop."""
        case = self.session.planner.replicas_case(self.spec, concurrency, load)
        groups = self.session.executor.measure(case, repeats)
        return shared_points(m for group in groups for m in group)[0]

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"
