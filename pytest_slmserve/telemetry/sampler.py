"""Read the sources at even times during a measurement.

In a thread of this process: the engine has a process of its own, so neither waits for the other, and while an engine is
measured this process does nothing else. One thread at a time uses a source, as the handles of NVML require.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.schema.sensors import rounded
from pytest_slmserve.telemetry.base import MIN_SPAN_S, Reading, SensorSource

INTERVAL_S = 0.25  # the shortest that leaves room for the cost of a reading, some milliseconds, and for a late one
BEFORE = 4  # intervals kept before a window: the state when it began
AFTER = 1


@dataclass
class Recording:
    """Rows as they come: the time of the reading, and the readings of all sources as one. Read it when it is over."""

    sources: Sequence[SensorSource]
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    rows: list[tuple[float, Reading]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # by the source's name

    def read(self) -> None:
        """Add one row. A source that fails is noted and not read again: the measurement goes on."""
        now = self.clock()
        readings = []
        for source in self.sources:
            if source.name not in self.failed:
                try:
                    readings.append(source.read(now))
                except Exception as error:  # a fault of ours must not cost a measurement either
                    why = error.problem if isinstance(error, SensorFailed) else f"{type(error).__name__}: {error}"
                    self.failed[source.name] = f"{source.name} failed after {len(self.rows)} readings: {why}"
        if readings:
            self.rows.append((now, merged_readings(readings)))

    def read_until(self, over: threading.Event) -> None:
        """Read at even times, and once more at the end. After a late reading the next one keeps its distance: two must
        not be too close."""
        due = read_at = self.clock()
        ended = False
        while not ended or self.clock() - read_at >= MIN_SPAN_S:
            read_at = self.clock()
            self.read()
            if ended:
                return
            due += self.interval_s * max(1, math.ceil((self.clock() - due) / self.interval_s))
            ended = over.wait(due - self.clock())

    def telemetry(self, began_s: float, window_s: tuple[float, float] | None = None) -> Telemetry:
        """The rows of a run that began at `began_s` of the clock; with a window, those that describe it. Values are
        rounded as an archive keeps them, so that a report on it says what the run said."""
        first, last = window_s or (-math.inf, math.inf)
        low, high = began_s + first - BEFORE * self.interval_s, began_s + last + AFTER * self.interval_s
        rows = [(at, reading) for at, reading in self.rows if low <= at <= high]
        gpus = max((len(reading.gpus) for _, reading in rows), default=0)
        return Telemetry(
            sources=tuple(source.name for source in self.sources),
            interval_s=self.interval_s,
            time_s=tuple(round(at - began_s, 6) for at, _ in rows),
            span_s=tuple(None if r.span_s is None else round(r.span_s, 6) for _, r in rows),
            columns=columns_of([reading.values for _, reading in rows]),
            missing=Counter(why for _, reading in rows for why in reading.missing),
            notes=tuple(self.failed.values()),
            gpus=tuple(columns_of([dict(*r.gpus[i : i + 1]) for _, r in rows]) for i in range(gpus)),
        )


def columns_of(rows: Sequence[Mapping[int, float | None]]) -> dict[int, tuple[float | None, ...]]:
    """A column for each number that any row has."""
    numbers = sorted({number for row in rows for number in row})
    return {n: tuple(rounded(n, row.get(n)) for row in rows) for n in numbers}


def merged_readings(readings: Sequence[Reading]) -> Reading:
    """Several sources' readings as one: the first that has a number or a span counts."""
    values: dict[int, float | None] = {}
    for reading in reversed(readings):
        values |= reading.values
    span = next((reading.span_s for reading in readings if reading.span_s is not None), None)
    gpus = next((reading.gpus for reading in readings if reading.gpus), ())
    return Reading(values, span, tuple(why for reading in readings for why in reading.missing), gpus)


class Sampler:
    """Sources, and how often they are read. Raises BadUsage for an interval too short for the GPU's counters."""

    def __init__(self, sources: Sequence[SensorSource], interval_s: float = INTERVAL_S) -> None:
        if interval_s < MIN_SPAN_S:
            raise BadUsage(
                f"a telemetry interval of {interval_s:g} s: below {MIN_SPAN_S:g} s the GPU's counters are not valid",
                f"-o slm_telemetry_interval={INTERVAL_S:g}",
            )
        self.sources, self.interval_s = tuple(sources), interval_s
        self.name = " + ".join(source.name for source in sources) or "none"
        self._under_way: Recording | None = None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record until the block ends, which is no later than one reading after it. Within another's block it is the
        same recording, because ratios would be over spans too short if both were read."""
        if self._under_way:
            yield self._under_way
            return
        found, over = Recording(self.sources, self.interval_s), threading.Event()
        thread = threading.Thread(target=found.read_until, args=(over,), name="slm-telemetry", daemon=True)
        thread.start()
        self._under_way = found
        try:
            yield found
        finally:
            self._under_way = None
            over.set()
            thread.join()

    def close(self) -> None:
        for source in self.sources:
            source.close()
