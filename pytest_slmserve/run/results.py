"""Results of a run: repeats by the key of their case, whoever made them, and the cases that this run requested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pytest_slmserve.analysis.points.job_points import JobPoint, job_points
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, group_key, shared_points
from pytest_slmserve.schema.records import Measurement, ReplicaGroup


@dataclass(repr=False)
class Results:
    """repeats: by the key of their case, in the order made. requested: keys of this run's cases, in the order that they
    were requested; what an archive knows beyond them is no part of this run."""

    repeats: dict[str, list[ReplicaGroup]] = field(default_factory=dict)
    requested: dict[str, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.repeats)

    def add(self, groups: Iterable[ReplicaGroup]) -> None:
        """Know these as if they had been made in this process. Repeats of a gate are no part of a run's results."""
        for group in groups:
            if group[0].paired is None:
                self.repeats.setdefault(group_key(group), []).append(group)

    def request(self, key: str) -> list[ReplicaGroup]:
        """The repeats of a case that this run requests; new ones are added to the same list."""
        self.requested.setdefault(key)
        return self.repeats.setdefault(key, [])

    def measurements(self, keys: Iterable[str] | None = None) -> Iterator[Measurement]:
        """All records of the cases with these keys; None: of those that this run requested."""
        for key in self.requested if keys is None else keys:
            yield from (m for group in self.repeats.get(key, ()) for m in group)

    def shared_points(self) -> tuple[ReplicaPoint, ...]:
        """Points that replicas served in this run, in the order measured."""
        return shared_points(self.measurements())

    def job_points(self) -> tuple[JobPoint, ...]:
        """Jobs that were served in this run, in the order requested."""
        return job_points(self.measurements())
