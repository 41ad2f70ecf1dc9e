"""The seam between us and whatever serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pytest_slmserve.records import Progress, Resolved, Run, Workload
from pytest_slmserve.spec import EngineSpec, Load

Tell = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The listener of those who do not want to hear."""


class Engine(Protocol):
    """A started engine. `launch` is unique to this start; `resolved` is what it made of its specification.

    ready: it waits for the next load. False while it serves one, and for ever when a load was broken off.
    """

    spec: EngineSpec
    launch: str
    resolved: Resolved
    ready: bool

    def run(self, workload: Workload, load: Load, tell: Tell = silent) -> Run:
        """Put `load` on the engine and wait for its end. Raises EngineFailed when the engine dies."""

    def close(self) -> None:
        """Stop it and free its device; may be called twice."""
