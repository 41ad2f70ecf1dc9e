"""What a run knows: measurements by what was asked, whoever made them, and what this run has asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pytest_slmserve.analysis.points.job_points import JobPoint, job_points
from pytest_slmserve.analysis.points.replica_points import (
    ReplicaGroup,
    SharedPoint,
    group_key,
    shared_points,
    shared_runs,
)
from pytest_slmserve.schema.records import Measurement


@dataclass(repr=False)
class Results:
    """measured: by key. shared: runs of several engines at once, by theirs. asked, asked_shared: keys of both in the
    order asked for; what an archive knows beyond them is no part of this run."""

    measured: dict[str, list[Measurement]] = field(default_factory=dict)
    asked: dict[str, None] = field(default_factory=dict)
    shared: dict[str, list[ReplicaGroup]] = field(default_factory=dict)
    asked_shared: dict[str, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.measured or self.shared)

    def add(self, measurements: Sequence[Measurement]) -> None:
        """As if they had been made in this process."""
        for members in shared_runs(measurements):
            self.shared.setdefault(group_key(members), []).append(members)
        for m in measurements:
            if m.alone and m.paired is None:
                self.measured.setdefault(m.key, []).append(m)

    def measurements(self) -> Iterator[Measurement]:
        """Of all engines that ran alone in this run."""
        return (m for key in self.asked for m in self.measured[key])

    def shared_measurements(self) -> Iterator[Measurement]:
        """Of all engines that shared a device in this run."""
        return (m for key in self.asked_shared for members in self.shared[key] for m in members)

    def shared_points(self) -> tuple[SharedPoint, ...]:
        """What replicas served in this run, in the order asked."""
        return shared_points(self.shared_measurements())

    def job_points(self) -> tuple[JobPoint, ...]:
        """Jobs that were served in this run, in the order asked."""
        return job_points(self.measurements())
