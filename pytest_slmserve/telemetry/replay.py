"""Stored telemetry, played back: what a sampler and all that is behind it make of a record, without its host."""

from __future__ import annotations

from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.telemetry.base import Reading


class ReplaySource:
    """Each reading is the next row, whenever it is asked for."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.name = f"replay of {' + '.join(telemetry.sources) or 'nothing'}"
        self._telemetry, self._next = telemetry, 0

    def read(self, now_s: float) -> Reading:
        stored, row = self._telemetry, self._next
        if row >= len(stored):
            raise SensorFailed("the record has no more rows")
        self._next += 1
        values = {number: column[row] for number, column in stored.columns.items()}
        missing = tuple(f"{number}: not known in the record" for number, value in values.items() if value is None)
        return Reading(values, stored.span_s[row], missing)

    def close(self) -> None:
        """A record holds nothing open."""


def open_replay(telemetry: Telemetry | None) -> ReplaySource:
    """The telemetry of a run (`Run.telemetry`) as a source. Raises SensorFailed where the run has none."""
    if telemetry is None or not len(telemetry):
        raise SensorFailed("the record has no telemetry to replay", "a record that was measured with --slm-telemetry")
    return ReplaySource(telemetry)
