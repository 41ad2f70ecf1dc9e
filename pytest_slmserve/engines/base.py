"""The seam between us and whatever serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pytest_slmserve.records import Resolved, Run, Workload
from pytest_slmserve.spec import EngineSpec, Load


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: phase is "ramp", "settle", "window" or "over"."""

    phase: str
    elapsed_s: float
    done: int
    in_flight: int
    tokens_per_s: float | None


Tell = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The listener of those who do not want to hear."""


class Engine(Protocol):
    """A started engine. `launch` is unique to this start; `resolved` is what it made of its specification."""

    spec: EngineSpec
    launch: str
    resolved: Resolved

    def run(self, workload: Workload, load: Load, tell: Tell = silent) -> Run:
        """Put `load` on the engine and wait for its end. Raises EngineFailed when the engine dies."""

    def close(self) -> None:
        """Stop it and free its device; may be called twice."""
