"""Figures of a run's window from its sensor readings. None is "not known", also where there was no telemetry at all."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from operator import itemgetter, or_
from statistics import fmean, median
from typing import Any, NamedTuple

from pytest_slmserve.analysis.stats.estimates import mean_of_known, once, percentile
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.kv_cache import kv_bytes
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, Run, Telemetry
from pytest_slmserve.schema.sensors import PROBE_CPU, SPEED_PROBE

Join = Callable[[Sequence[float]], float]
WORST = (of.TEMPERATURE, of.XID, of.CAPPED_POWER, of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE)
SLOWEST = (of.SM_CLOCK, of.MEMORY_CLOCK)  # the others wait for it


def joined_gpus(telemetry: Telemetry) -> Telemetry:
    """All GPUs as one device, beside what the host said; unknown where one GPU's value is, for the rest is not all."""
    if not telemetry.gpus:
        return telemetry
    numbers = set.intersection(*(set(columns) for columns in telemetry.gpus))
    joined = {n: _joined(n, [columns[n] for columns in telemetry.gpus]) for n in sorted(numbers)}
    return replace(telemetry, columns={**telemetry.columns, **joined}, gpus=())


def each_gpu(telemetry: Telemetry) -> tuple[Telemetry, ...]:
    """The telemetry of each GPU; the first also has the host's columns and the notes."""
    return tuple(
        replace(
            telemetry,
            columns={**(telemetry.columns if not index else {}), **columns},
            notes=telemetry.notes if not index else (),
            gpus=(),
        )
        for index, columns in enumerate(telemetry.gpus)
    )


def _joined(number: int, columns: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    join = _how(number)
    rows = ([v for v in row if v is not None] for row in zip(*columns, strict=True))
    return tuple(join(known) if len(known) == len(columns) else None for known in rows)


def _how(number: int) -> Join:
    if number == of.CLOCK_REASONS:
        return lambda values: float(reduce(or_, map(int, values)))
    if number in SLOWEST:
        return min
    if number in WORST:
        return max
    return fmean if number in of.SENSORS and of.SENSORS[number].unit == "ratio" else sum


def imbalance(values: Sequence[float | None]) -> float | None:
    """(largest - smallest) / mean; None where one is not known, or there are not several."""
    known = [v for v in values if v is not None]
    if len(known) < 2 or len(known) < len(values) or fmean(known) <= 0:
        return None
    return (max(known) - min(known)) / fmean(known)


POWER_CAP = 0x04  # bit of the clock event reasons (NVIDIA, nvml.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Over the window. Ratios and cores are means weighted by the time that each reading is a mean over.

    engine_active: share of time in which any kernel ran. power_w: of the energy counter where there is one, else
    of the instant power readings as steps (the averaged ones where there are no others). energy_deviation: integrated
    over counter, less 1, both over the counter's time. power_limit_w: None where it moved. sm_clock_hz: the median.
    power_capped: share of the window in which the power limit held the clock down, by its counter, or else share of the
    readings that said so. memory_used_bytes: the largest. coverage: share of the window in which ratios were known.

    Of several GPUs: power and memory are those of all together, ratios means over them, the clock that of the
    slowest. power_imbalance: power of the GPU that takes most less that of the one that takes least, over their mean.

    probe_s, probe_cpu_s: time of the host-speed probe's piece of work, and its CPU time (`telemetry/host_counters.py`).
    """

    gpu_util: float | None = None
    engine_active: float | None = None
    sm_active: float | None = None
    sm_active_max: float | None = None
    sm_occupancy: float | None = None
    sm_occupancy_max: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    power_w: float | None = None
    energy_deviation: float | None = None
    power_limit_w: float | None = None
    sm_clock_hz: float | None = None
    power_capped: float | None = None
    memory_used_bytes: float | None = None
    own_cores: float | None = None
    host_cores: float | None = None
    stolen_cores: float | None = None
    probe_s: float | None = None
    probe_cpu_s: float | None = None
    coverage: float | None = None
    power_imbalance: float | None = None


class WeightedReading(NamedTuple):
    """One value of one sensor. weight_s: how much time it stands for in a mean."""

    at_s: float
    weight_s: float
    value: float


@dataclass(frozen=True, slots=True)
class SensorWindow:
    """Telemetry and the window it is asked about. rows: those that tell of the window, in the order taken."""

    telemetry: Telemetry
    window_s: tuple[float, float]
    rows: tuple[int, ...]

    @property
    def length_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    def value(self, number: int, row: int) -> float | None:
        """Reading of one sensor in one row; None where it is missing or not finite."""
        column = self.telemetry.columns.get(number, ())
        found = column[row] if row < len(column) else None
        return found if found is not None and math.isfinite(found) else None

    def known(self, number: int) -> list[WeightedReading]:
        """All that the window's rows say of one sensor."""
        at, spans = self.telemetry.time_s, self.telemetry.span_s
        return [WeightedReading(at[row], self._weight_s(spans[row]), value) for row, value in self._told(number)]

    def _told(self, number: int) -> list[tuple[int, float]]:
        """Row and value, as `value` has it, of each row that says something of one sensor."""
        column, finite = self.telemetry.columns.get(number, ()), math.isfinite
        return [(i, v) for i in self.rows if i < len(column) and (v := column[i]) is not None and finite(v)]

    def _weight_s(self, span_s: float | None) -> float:
        return span_s if span_s is not None and span_s > 0 else self.telemetry.interval_s

    def values(self, number: int) -> list[float]:
        return [value for _, value in self._told(number)]

    def mean(self, number: int) -> float | None:
        """Mean of one sensor's readings, weighted by time; None without readings."""
        readings = self.known(number)
        weights = sum(reading.weight_s for reading in readings)
        return sum(reading.value * reading.weight_s for reading in readings) / weights if weights > 0 else None

    def share_grown(self, counter: int) -> float | None:
        """Growth of a counter of seconds as a share of the time between its first and last reading; None below two."""
        readings = self.known(counter)
        seconds = readings[-1].at_s - readings[0].at_s if readings else 0.0
        return (readings[-1].value - readings[0].value) / seconds if seconds > 0 else None

    def largest(self, number: int) -> float | None:
        return max(self.values(number), default=None)

    def with_before(self, number: int) -> list[float]:
        """The window's values, after the last one known before it: what a change is told by."""
        earlier = (self.value(number, row) for row in range(self.rows[0] - 1, -1, -1))
        first = next((v for v in earlier if v is not None), None)
        return [*(() if first is None else (first,)), *self.values(number)]


def watched(run: Run) -> SensorWindow | None:
    """The run's telemetry with its window; None where no row tells of the window."""
    if run.telemetry is None:
        return None
    telemetry = joined_gpus(run.telemetry)
    stamps = enumerate(zip(telemetry.time_s, telemetry.span_s))
    rows = tuple(row for row, (at, span) in stamps if _belongs(at, span, run.window_s))
    return SensorWindow(telemetry, run.window_s, rows) if rows and run.window_s[1] > run.window_s[0] else None


@once
def device_figures(run: Run) -> DeviceFigures:
    """The figures of one run."""
    watch = watched(run)
    if watch is None:
        return DeviceFigures()
    clocks, limits = watch.values(of.SM_CLOCK), set(watch.values(of.POWER_LIMIT))
    return DeviceFigures(
        gpu_util=watch.mean(of.GPU_UTIL),
        engine_active=watch.mean(of.ENGINE_ACTIVE),
        sm_active=watch.mean(of.SM_ACTIVE),
        sm_active_max=watch.largest(of.SM_ACTIVE),
        sm_occupancy=watch.mean(of.SM_OCCUPANCY),
        sm_occupancy_max=watch.largest(of.SM_OCCUPANCY),
        tensor_active=watch.mean(of.TENSOR_ACTIVE),
        dram_active=watch.mean(of.DRAM_ACTIVE),
        power_w=_counter_w(watch) if len(watch.known(of.ENERGY)) > 1 else _integrated_w(watch),
        energy_deviation=_energy_deviation(watch),
        power_limit_w=limits.pop() if len(limits) == 1 else None,
        sm_clock_hz=median(clocks) if clocks else None,
        power_capped=_power_capped(watch),
        memory_used_bytes=watch.largest(of.MEMORY_USED),
        own_cores=watch.mean(of.OWN_CORES),
        host_cores=watch.mean(of.HOST_CORES),
        stolen_cores=watch.mean(of.STOLEN_CORES),
        probe_s=watch.mean(of.PROBE),
        probe_cpu_s=watch.mean(of.PROBE_CPU),
        coverage=_coverage(watch),
        power_imbalance=imbalance([figures.power_w for figures in figures_of_each_gpu(run)]),
    )


def sensed(kind: type, run: Run, tokens_per_s: float | None) -> dict[str, Any]:
    """Fields of the dataclass `kind` by name that sensors tell of a run, and the energy of a token at this
    throughput."""
    seen = device_figures(run)
    names = {f.name for f in fields(kind)} & {f.name for f in fields(DeviceFigures)}
    energy = seen.power_w / tokens_per_s if seen.power_w is not None and tokens_per_s else None
    return {name: getattr(seen, name) for name in names} | {"energy_per_token_j": energy}


def figures_of_each_gpu(run: Run) -> tuple[DeviceFigures, ...]:
    """The figures of each GPU of an engine that has several; none of one that has one."""
    gpus = each_gpu(run.telemetry) if run.telemetry else ()
    return tuple(device_figures(replace(run, telemetry=telemetry)) for telemetry in gpus)


@once
def decode_window(run: Run) -> SensorWindow | None:
    """The readings of the decoding alone: those of the window in which no prompt was processed. There are some where
    requests begin together: no reading is short enough to fall between the prompts of requests that begin one by one.
    None without telemetry or steps."""
    watch = watched(run)
    if watch is None or not len(run.steps):
        return None
    prompts, spans, at = _prompt_times(run), watch.telemetry.span_s, watch.telemetry.time_s
    rows = tuple(
        row for row in watch.rows if (span := spans[row]) is not None and not _meets(prompts, at[row] - span, at[row])
    )
    return replace(watch, rows=rows)


def _prompt_times(run: Run) -> list[tuple[float, float]]:
    """Start and end times of the steps that processed prompts, with the step before and the one after. A trace has the
    time at which a step's output was seen, and an engine runs a step ahead of it."""
    times = run.steps.time_s
    ends = len(times) - 1
    steps = (i for i, tokens in enumerate(run.steps.prompt_tokens) if tokens)
    return [(times[i - 2] if i > 1 else -math.inf, times[min(i + 1, ends)]) for i in steps]


def _meets(times: Sequence[tuple[float, float]], began: float, ended: float) -> bool:
    """Does the span from `began` to `ended` overlap any of these, which are in order?"""
    first = bisect_right(times, began, key=itemgetter(1))
    return first < len(times) and times[first][0] < ended


def _belongs(at_s: float, span_s: float | None, window_s: tuple[float, float]) -> bool:
    """Does more than half of a reading's span lie in the window? Without a span: does its moment?"""
    opens, closes = window_s
    if span_s is None or span_s <= 0:
        return opens <= at_s <= closes
    return min(at_s, closes) - max(at_s - span_s, opens) > span_s / 2


def _counter_w(watch: SensorWindow) -> float | None:
    """Mean power in W by the energy counter; None below two readings. None too where it falls (restarted or wrapped),
    or stands still, which no powered GPU does.

    From the mean of the first two readings to that of the last two, if these are few of all: the counter moves every
    0.1 s, so of readings every 0.25 s one of two neighbours is 0.05 s staler. The slope of a fit would do too, but
    counts the middle of a window more than its ends.
    """
    readings = watch.known(of.ENERGY)
    if len(readings) < 2 or any(b.value < a.value for a, b in pairwise(readings)):
        return None
    ends = 2 if len(readings) >= 8 else 1
    first, last = readings[:ends], readings[-ends:]
    seconds = sum(r.at_s for r in last) - sum(r.at_s for r in first)
    joules = sum(r.value for r in last) - sum(r.value for r in first)
    return joules / seconds if seconds > 0 and joules > 0 else None


def _integrated_w(watch: SensorWindow, since_s: float = -math.inf, until_s: float = math.inf) -> float | None:
    """Mean of the power readings, each holding from its moment back to the reading before; unknown ones are left out.

    Steps, not trapezoids: a sensor repeats what it last saw until its next update, and a straight line between two
    readings makes a ramp of each jump of the load.
    """
    number = of.POWER_INSTANT if watch.known(of.POWER_INSTANT) else of.POWER
    joules = seconds = 0.0
    for before, row in pairwise(watch.rows):
        began, ended, value = watch.telemetry.time_s[before], watch.telemetry.time_s[row], watch.value(number, row)
        if value is not None and since_s <= began < ended <= until_s:
            joules += value * (ended - began)
            seconds += ended - began
    return joules / seconds if seconds > 0 else None


def _power_capped(watch: SensorWindow) -> float | None:
    if (share := watch.share_grown(of.CAPPED_POWER)) is not None:
        return min(1.0, share)  # its updates are 0.1 s apart, and a reading is taken at any time between
    told = [bool(int(reasons) & POWER_CAP) for reasons in watch.values(of.CLOCK_REASONS)]
    return sum(told) / len(told) if told else None


def _energy_deviation(watch: SensorWindow) -> float | None:
    counted, readings = _counter_w(watch), watch.known(of.ENERGY)
    if not counted:
        return None
    integrated = _integrated_w(watch, readings[0].at_s, readings[-1].at_s)
    return None if integrated is None else integrated / counted - 1


def _coverage(watch: SensorWindow) -> float | None:
    """Time in the window that known spans cover, counted once where two overlap; None where no reading has a span.

    A span at the window's edge counts with its part inside. Where there are profiled counters, a span is known if one
    of them is.
    """
    if all(span is None for span in watch.telemetry.span_s):
        return None
    (reached, closes), covered = watch.window_s, 0.0
    for began, ended in sorted(_spans(watch)):
        first, last = max(began, reached), min(ended, closes)
        if last > first:
            covered, reached = covered + last - first, last
    return covered / watch.length_s


def _spans(watch: SensorWindow) -> list[tuple[float, float]]:
    telemetry = watch.telemetry
    profiled = [number for number in of.PROFILED if number in telemetry.columns]
    return [
        (at - span, at)
        for row, (at, span) in enumerate(zip(telemetry.time_s, telemetry.span_s))
        if span is not None and (not profiled or any(watch.value(n, row) is not None for n in profiled))
    ]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of the weights and of the KV cache of one engine, over all of its GPUs."""

    model: str
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the GPUs of one or more engines. used_bytes: in use at most, by anybody; None where no sensor told it,
    or less than weights and KV caches take."""

    engines: tuple[EngineMemory, ...]
    total_bytes: int
    used_bytes: int | None = None

    @property
    def engine_bytes(self) -> int:
        """Weights and KV caches of all engines."""
        return sum(engine.weight_bytes + engine.kv_bytes for engine in self.engines)

    @property
    def other_bytes(self) -> int | None:
        """In use beyond weights and KV caches: activations, captured graphs, contexts. None where that is not known."""
        return None if self.used_bytes is None else self.used_bytes - self.engine_bytes

    @property
    def left_bytes(self) -> int:
        """Free memory, with what the driver keeps; where use is not known, all that weights and KV caches leave."""
        return self.total_bytes - (self.engine_bytes if self.used_bytes is None else self.used_bytes)


def memory_in_use(groups: Iterable[ReplicaGroup]) -> GpuMemory | None:
    """The repeat with the most memory in use; None where of none the parts are known."""
    known = [memory for group in groups if (memory := gpu_memory(group))]
    return max(known, key=lambda memory: memory.used_bytes or 0, default=None)


def gpu_memory(group: ReplicaGroup) -> GpuMemory | None:
    """Memory of one run. None where an engine did not tell its weights, or a cache or the GPU's memory is not known;
    and of MIG instances, of which each has a memory of its own."""
    first = group[0]
    engines = [engine for m in group if (engine := _engine_memory(m))]
    each = first.environment.gpu_memory_bytes
    if each is None or len(engines) < len(group) or (first.replica and first.replica.sharing == "mig"):
        return None
    apart = bool(first.replica and first.replica.sharing == "gpus")
    gpus = sum(m.spec.tensor_parallel_size for m in (group if apart else group[:1]))
    memory = GpuMemory(tuple(engines), each * gpus)
    used = int(most_memory_used(group) or 0.0)
    if memory.engine_bytes > memory.total_bytes:
        return None
    return GpuMemory(memory.engines, memory.total_bytes, used) if used >= memory.engine_bytes else memory


def most_memory_used(measurements: Iterable[Measurement]) -> float | None:
    """Bytes of the device in use at most, by anybody; None where no sensor tells."""
    seen = (device_figures(m.run).memory_used_bytes for m in measurements)
    return max((used for used in seen if used is not None), default=None)


def _engine_memory(measurement: Measurement) -> EngineMemory | None:
    weights, cache = measurement.resolved.weight_bytes, kv_bytes(measurement.spec, measurement.resolved)
    if not weights or not cache:
        return None
    return EngineMemory(short_name(measurement.spec.model), weights, cache)


FASTEST = 0.05  # percentile of all pieces: the fastest alone may be a stroke of luck

Place = tuple[
    str | None, tuple[str, ...]
]  # a host, and sources: a host-speed probe's name has its Python, which sets its speed


def fastest_pieces(measurements: Iterable[Measurement]) -> dict[Place, float]:
    """CPU time of the host-speed probe's fastest pieces in the windows of each host, in seconds."""
    found: dict[Place, list[float]] = {}
    for m in measurements:
        if (place := _place(m)) and (watch := watched(m.run)):
            found.setdefault(place, []).extend(watch.values(PROBE_CPU))
    return {place: fastest for place, values in found.items() if (fastest := percentile(values, FASTEST))}


def host_speed(measurements: Iterable[Measurement], fastest: Mapping[Place, float]) -> float | None:
    """Mean speed beside these windows: 1 where the host was as fast as in its fastest pieces."""
    speeds = []
    for m in measurements:
        cpu_s, best = device_figures(m.run).probe_cpu_s, fastest.get(_place(m) or (None, ()))
        speeds.append(best / cpu_s if best and cpu_s else None)
    return mean_of_known(speeds)


def probe_waiting(probe_s: float | None, probe_cpu_s: float | None) -> float | None:
    """Share of a piece's time in which it had no core."""
    return max(0.0, 1 - probe_cpu_s / probe_s) if probe_s and probe_cpu_s is not None else None


def _place(measurement: Measurement) -> Place | None:
    seen = measurement.run.telemetry
    if seen is None or PROBE_CPU not in seen.columns:
        return None
    return measurement.environment.host, tuple(name for name in seen.sources if name.startswith(SPEED_PROBE))
