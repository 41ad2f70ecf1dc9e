"""Sensors that are read when a test says so."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import Recording, Sampler


class CountedSource:
    """Gives the values of each reading, by its number from 1 on, for the tenth of a second before it, and counts what
    it was asked. It fails from one reading on."""

    def __init__(
        self,
        values: Callable[[int], Mapping[int, float]],
        name: str = "planted",
        fails_at: float = float("inf"),
        error: type[Exception] = SensorFailed,
    ) -> None:
        self.values, self.name, self.fails_at, self.error, self.asked = values, name, fails_at, error, 0

    def read(self, now_s: float) -> Reading:
        self.asked += 1
        if self.asked >= self.fails_at:
            raise self.error("as it was told to")
        return Reading(dict(self.values(self.asked)), 0.1)

    def close(self) -> None:
        pass


class Stepwise(Sampler):
    """Reads as often as `pass_by` says, on a clock of ten readings a second, in place of a thread on that of the
    host."""

    now_s = 100.0

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        self.under_way = Recording(self.sources, self.interval_s, lambda: self.now_s)
        yield self.under_way

    def pass_by(self, readings: int) -> None:
        for _ in range(readings):
            self.now_s += 0.1
            self.under_way.read()
