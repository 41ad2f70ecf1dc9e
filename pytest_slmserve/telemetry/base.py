"""The seam between us and whatever has sensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

NO_GPU = ("cpu", "none")  # devices that have no sensors of a GPU
MIN_SPAN_S = 0.1  # below, the GPU's profiling counters are not valid (NVIDIA/DCGM issue 310)


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of a source at one moment, by number (`pytest_slmserve.schema.sensors`), in SI units and ratios of 1.

    A number that a source has and that is not known now is None, and `missing` says why, one sentence for each; one
    that it never has is not in `values`. span_s: length of the time, up to now, that the ratios are means over.
    gpus: the values of each GPU, where several are asked.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    span_s: float | None = None
    missing: tuple[str, ...] = ()
    gpus: tuple[dict[int, float | None], ...] = ()


class SensorSource(Protocol):
    """Answers when asked; made by a function that raises SensorFailed where it is not there. name: as recorded."""

    name: str

    def read(self, now_s: float) -> Reading:
        """One reading. now_s: `time.monotonic()`. Raises SensorFailed where it cannot answer any more."""

    def close(self) -> None:
        """Let go; may be called twice."""


def known(number: int, value: float | None, missing: list[str]) -> float | None:
    """The value, or None and the reason added to `missing` where it is not a number (NaN, infinity)."""
    if value is None or math.isfinite(value):
        return value
    missing.append(f"{number}: {value}")
    return None
