"""A reading of sensors, and the interface of whatever has sensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

NO_GPU = ("cpu", "none")  # devices that have no sensors of a GPU
MIN_SPAN_S = 0.1  # below, the GPU's profiling counters are not valid (NVIDIA/DCGM issue 310)

Answer = float | str  # the value of a number, or the reason why it is not known


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of a source at one moment, by number (`pytest_slmserve.schema.sensors`), in SI units and ratios of 1.

    A number that a source has and that is not known now is None, and `missing` has one sentence with the reason; a
    number that it never has is not in `values`. span_s: length of the time, up to now, that the ratios are means over.
    gpus: the values of each GPU, if the source has several.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    span_s: float | None = None
    missing: tuple[str, ...] = ()
    gpus: tuple[dict[int, float | None], ...] = ()


class SensorSource(Protocol):
    """A source of readings. Opening one raises SensorFailed if it is not there. name: as recorded."""

    name: str

    def read(self, now_s: float) -> Reading:
        """One reading. now_s: `time.monotonic()`. Raises SensorFailed if the source cannot answer any more."""

    def close(self) -> None:
        """Release the source; may be called twice."""


def reading_of(answers: Mapping[int, Answer], span_s: float | None = None) -> Reading:
    """Return the reading of these answers. A value that is not finite (NaN, infinity) is not known."""
    values = {n: a if not isinstance(a, str) and math.isfinite(a) else None for n, a in answers.items()}
    return Reading(values, span_s, tuple(f"{n}: {answers[n]}" for n, value in values.items() if value is None))
