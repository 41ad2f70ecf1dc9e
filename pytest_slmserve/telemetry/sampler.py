"""Selection of the available sensor sources, and their readings at even times during a measurement.

A thread of this process reads them, because the engine has its own process and this process is idle meanwhile. One
thread at a time uses a source, as the handles of NVML require.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.telemetry.gpu import ADDRESS, ExporterSource, open_dcgm, open_nvml
from pytest_slmserve.telemetry.host import MIN_SPAN_S, NO_GPU, HostSource, Reading, SensorSource, open_speed_probe

INTERVAL_S = 0.25  # long enough for a reading, which takes milliseconds, and for a late one
SHORT_S = 5.0  # a counter read once a second covers less than 80% of a shorter window
BEFORE = 4  # intervals kept before a window: the state when it began
AFTER = 1


@dataclass
class Recording:
    """Readings of all sources at successive times, and failures by the name of the source."""

    sources: Sequence[SensorSource]
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    rows: list[tuple[float, Reading]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # by the source's name

    def read(self) -> None:
        """Add one row. A source that fails is noted and not read again, and the measurement continues."""
        now = self.clock()
        readings = []
        for source in self.sources:
            if source.name not in self.failed:
                try:
                    readings.append(source.read(now))
                except Exception as error:  # even a bug must not cost a measurement
                    why = error.problem if isinstance(error, SensorFailed) else f"{type(error).__name__}: {error}"
                    self.failed[source.name] = f"{source.name} failed after {len(self.rows)} readings: {why}"
        if readings:
            self.rows.append((now, merged_readings(readings)))

    def read_until(self, over: threading.Event) -> None:
        """Read at even times until `over` is set, and then once more.

        Readings are at least half an interval apart, the last one at least MIN_SPAN_S.
        """
        due = read_at = self.clock()
        ended = False
        while not ended or self.clock() - read_at >= MIN_SPAN_S:
            read_at = self.clock()
            self.read()
            if ended:
                return
            earliest = max(self.clock(), read_at + self.interval_s / 2)
            due += self.interval_s * math.ceil((earliest - due) / self.interval_s)
            ended = over.wait(due - self.clock())

    def telemetry(self, began_s: float, window_s: tuple[float, float] | None = None) -> Telemetry:
        """Return the rows of a run, rounded as in results files, so that reports show the same numbers.

        Args:
            began_s: start of the run by `clock`.
            window_s: only the rows of this window.
        """
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
    """Return a column for each number that any row has."""
    numbers = sorted({number for row in rows for number in row})
    return {n: tuple(of.rounded(n, row.get(n)) for row in rows) for n in numbers}


def merged_readings(readings: Sequence[Reading]) -> Reading:
    """Return the readings of several sources as one. The first source that has a number or a span counts."""
    values: dict[int, float | None] = {}
    for reading in reversed(readings):
        values |= reading.values
    span = next((reading.span_s for reading in readings if reading.span_s is not None), None)
    gpus = next((reading.gpus for reading in readings if reading.gpus), ())
    return Reading(values, span, tuple(why for reading in readings for why in reading.missing), gpus)


class Sampler:
    """Sensor sources and their interval. Raise BadUsage if it is too short for the GPU's counters."""

    def __init__(self, sources: Sequence[SensorSource], interval_s: float = INTERVAL_S) -> None:
        if interval_s < MIN_SPAN_S:
            why = f"a telemetry interval of {interval_s:g} s: below {MIN_SPAN_S:g} s the GPU's counters are not valid"
            raise BadUsage(why, f"-o slm_telemetry_interval={INTERVAL_S:g}")
        self.sources, self.interval_s = tuple(sources), interval_s
        self.name = " + ".join(source.name for source in sources) or "none"
        self._under_way: Recording | None = None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record until the block ends. A nested block uses the same recording, because spans would be too short."""
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


class SeveralGpus(SensorSource):
    """Several GPUs as one source, with separate values, because a sum would hide a slow GPU.

    It fails if one GPU fails, because the rest would be taken for the whole.

    Args:
        gpus: sources of each GPU, in the engine's order.
    """

    def __init__(self, gpus: Sequence[Sequence[SensorSource]]) -> None:
        names = dict.fromkeys(" + ".join(source.name for source in sources) for sources in gpus)
        self.name = f"{len(gpus)} x {' or '.join(names)}"
        self._gpus = gpus

    def read(self, now_s: float) -> Reading:
        each = [merged_readings([source.read(now_s) for source in sources]) for sources in self._gpus]
        missing = tuple(f"GPU {i}: {why}" for i, reading in enumerate(each) for why in reading.missing)
        return Reading({}, each[0].span_s, missing, tuple(reading.values for reading in each))

    def close(self) -> None:
        for sources in self._gpus:
            for source in sources:
                source.close()


def open_sampler(
    choice: str, device: str, interval_s: float, others: Sequence[str] = (), window_s: float = math.inf
) -> tuple[Sampler | None, list[str]]:
    """Return a sampler of the chosen sources (None if "off"), and notes for the user.

    Args:
        choice: text of --slm-telemetry. "auto" uses the available sources and notes the missing ones.
        device: UUID of the measured GPU, or "cpu" or "none".
        others: further GPUs.
        window_s: shortest window. Below SHORT_S each reading has the energy counter.

    Raises:
        SensorFailed: if the chosen source is missing.
        BadUsage: if choice or interval are not possible.
    """
    if choice == "off":
        return None, []
    interval_s = Sampler((), interval_s).interval_s  # refuses the interval before anything is opened
    notes: list[str] = []
    host = [HostSource(), open_speed_probe(device)]
    if choice == "host" or (choice == "auto" and device in NO_GPU):
        return Sampler(host, interval_s), notes
    if device in NO_GPU:
        raise BadUsage(f"--slm-telemetry {choice} asks a GPU, and none is measured here", "--slm-telemetry auto")
    often = {of.ENERGY} if window_s < SHORT_S else set()
    each = [_sources_of_gpu(choice, gpu, interval_s, notes, often) for gpu in (device, *others)]
    sources = each[0]
    if others and all(each):
        sources = [SeveralGpus(each)]
    elif others:  # some of them would be taken for all
        SeveralGpus(each).close()
        sources = []
        notes.append("telemetry: not every GPU of the engine has sensors that answer, so none is read")
    return Sampler([*sources, *host], interval_s), list(dict.fromkeys(notes))


def _sources_of_gpu(
    choice: str, device: str, interval_s: float, notes: list[str], often: Collection[int]
) -> list[SensorSource]:
    match choice.partition("=")[::2]:
        case "auto", _:
            # NVML with the profiling counters of the GPU (Hopper and newer), or else with those of DCGM if it runs.
            found: list[SensorSource] = []
            try:
                found.append(open_nvml(device, profile=True, each_time=often))
                if found[0].name == "nvml-gpm":
                    return found
            except SensorFailed as error:
                notes.append(f"telemetry: {error.problem}")
            try:  # DCGM's value counts if both have one
                return [open_dcgm(device, interval_s=interval_s), *found]
            except SensorFailed as error:
                none = "no profiling counters (SM, DRAM and tensor activity): NVML has none for this GPU"
                notes.append(f"{none}; telemetry: {error.problem}")
                return found
        case "gpm", _:
            source = open_nvml(device, profile=True, each_time=often)
            if source.name != "nvml-gpm":
                source.close()
                hint = "Use --slm-telemetry dcgm or --slm-telemetry auto."
                raise SensorFailed("this GPU has no GPM counters (Hopper and newer have)", hint)
            return [source]
        case "nvml", _:
            return [open_nvml(device, profile=False, each_time=often)]
        case "dcgm", address:
            return [open_dcgm(device, interval_s=interval_s, address=address or ADDRESS)]
        case _:
            return [ExporterSource(choice, device)]


STEADY = {
    **{of.GPU_UTIL: 1.0, of.ENGINE_ACTIVE: 0.97, of.SM_ACTIVE: 0.7, of.POWER_LIMIT: 700.0, of.TEMPERATURE: 50.0},
    **{of.GPU_PROCESSES: 1.0, of.FOREIGN_PROCESSES: 0.0, of.SM_CLOCK: 1.98e9, of.CLOCK_REASONS: 0.0},
}
BUSY = {of.SM_OCCUPANCY: 0.15, of.TENSOR_ACTIVE: 0.05, of.DRAM_ACTIVE: 0.85}
POWER_W = 350.0


def simulated_values(at_s: float, power_w: float) -> dict[int, float | None]:
    """Return the constant readings of a busy GPU, `at_s` seconds after its energy counter began."""
    return {**STEADY, of.POWER: power_w, of.POWER_INSTANT: power_w, of.ENERGY: power_w * at_s}


class SimulatedSource(SensorSource):
    """A busy GPU with constant readings, used in a user's own block if nothing real is measured."""

    name = "simulated"

    def __init__(self) -> None:
        self._last_s: float | None = None

    def read(self, now_s: float) -> Reading:
        span_s = None if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        return Reading({**simulated_values(now_s, POWER_W), **BUSY}, span_s)
