"""Objects that fixtures hand out: a case of this run that can be measured, replicas, and the sensors beside a block of
a test: the rows, the figures over the block, and whether to believe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_slmserve.analysis.device.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.device.sensor_health import Health, health
from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, shared_points
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.titles import engine_title
from pytest_slmserve.plugin.calls import checked
from pytest_slmserve.run.session import Session
from pytest_slmserve.run.sweeps import Sweeps
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit
from pytest_slmserve.schema.records import Measurement, Run, Samples, Steps, Telemetry
from pytest_slmserve.schema.specs import ReplicaSpec
from pytest_slmserve.telemetry.sampler import Sampler

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
        is skipped where an adaptive sweep does not need this point, or the engine turns out to have no room for it."""
        try:
            wanted = self._repeats()
            repeats = self.session.executor.measure(self.case, wanted)
        except DoesNotFit as error:
            pytest.skip(error.problem)
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

    @checked("slm_replicas(...).measure")
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> ReplicaPoint:
        """Put `concurrency` requests in flight in all, the same number in each; more words are fields of ClosedLoop."""
        case = self.session.planner.replicas_case(self.spec, concurrency, load)
        groups = self.session.executor.measure(case, repeats)
        return shared_points(m for group in groups for m in group)[0]

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"


NOBODY, NOTHING = Samples(*[()] * 8), Steps(*[()] * 7)


@dataclass(repr=False)
class SampledBlock:
    """Sensor readings over a block; there are none before the block has ended, and reading them raises BadUsage."""

    environment: Environment
    run: Run | None = None

    @property
    def seen(self) -> Run:
        if self.run is None:
            raise BadUsage("the block that is watched has not ended", "ask after the with statement")
        return self.run

    @property
    def telemetry(self) -> Telemetry:
        """Rows; their times are seconds since the block began."""
        assert self.seen.telemetry is not None
        return self.seen.telemetry

    @property
    def figures(self) -> DeviceFigures:
        return device_figures(self.seen)

    @property
    def health(self) -> Health:
        return health(self.seen, self.environment)


@contextmanager
def watching(sampler: Sampler, environment: Environment) -> Iterator[SampledBlock]:
    """Reads the sensors until the block ends, by an exception too."""
    watched = SampledBlock(environment)
    with sampler.recording() as recording:
        began_s = recording.clock()
        try:
            yield watched
        finally:
            window_s = 0.0, recording.clock() - began_s
    watched.run = Run(NOBODY, NOTHING, window_s, began_s=began_s, telemetry=recording.telemetry(began_s, window_s))
