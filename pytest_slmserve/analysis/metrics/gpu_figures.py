"""Figures of a run's window from its sensor readings. None is "not known", also where there was no telemetry at all."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from operator import itemgetter, or_
from statistics import fmean, median
from typing import Any, NamedTuple

from pytest_slmserve.analysis.estimates import mean_of_known, once, percentile
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.kv_cache import kv_bytes
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, Run, Telemetry

WORST = (of.TEMPERATURE, of.XID, of.CAPPED_POWER, of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE)
SLOWEST = (of.SM_CLOCK, of.MEMORY_CLOCK)  # the others wait for it


def joined_gpus(telemetry: Telemetry) -> Telemetry:
    """All GPUs as one device, with the columns of the host. A value is None if it is not known of every GPU."""
    if not telemetry.gpus:
        return telemetry
    columns = dict(telemetry.columns)
    for number in sorted(set.intersection(*map(set, telemetry.gpus))):
        unit = of.SENSORS[number].unit if number in of.SENSORS else ""
        joined: list[float | None] = []
        for row in zip(*(gpu[number] for gpu in telemetry.gpus), strict=True):
            known = [value for value in row if value is not None]
            if len(known) < len(row):
                joined.append(None)
            elif number == of.CLOCK_REASONS:
                joined.append(float(reduce(or_, map(int, known))))
            elif number in SLOWEST:
                joined.append(min(known))
            elif number in WORST:
                joined.append(max(known))
            else:
                joined.append(fmean(known) if unit == "ratio" else sum(known))
        columns[number] = tuple(joined)
    return replace(telemetry, columns=columns, gpus=())


def each_gpu(telemetry: Telemetry) -> tuple[Telemetry, ...]:
    """The telemetry of each GPU; the first also has the host's columns and the notes."""
    each = [replace(telemetry, columns=columns, notes=(), gpus=()) for columns in telemetry.gpus]
    if each:
        each[0] = replace(each[0], columns={**telemetry.columns, **telemetry.gpus[0]}, notes=telemetry.notes)
    return tuple(each)


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

    probe_s, probe_cpu_s: time of the host-speed probe's piece of work, and its CPU time (`telemetry/host.py`).
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
    """Telemetry and a window. rows: the rows of the telemetry that lie in the window, in the order taken."""

    telemetry: Telemetry
    window_s: tuple[float, float]
    rows: tuple[int, ...]

    def value(self, number: int, row: int) -> float | None:
        """Reading of one sensor in one row; None where it is missing or not finite."""
        column = self.telemetry.columns.get(number, ())
        found = column[row] if row < len(column) else None
        return found if found is not None and math.isfinite(found) else None

    def values(self, number: int) -> list[float]:
        """The known readings of one sensor in the window's rows."""
        return [value for row in self.rows if (value := self.value(number, row)) is not None]

    def readings(self, number: int) -> list[WeightedReading]:
        """The known readings of one sensor with their times and weights."""
        at, spans, usual = self.telemetry.time_s, self.telemetry.span_s, self.telemetry.interval_s
        known = ((row, spans[row] or 0.0, self.value(number, row)) for row in self.rows)
        return [WeightedReading(at[row], s if s > 0 else usual, value) for row, s, value in known if value is not None]

    def mean(self, number: int) -> float | None:
        """Mean of one sensor's readings, weighted by time; None without readings."""
        readings = self.readings(number)
        weights = sum(reading.weight_s for reading in readings)
        return sum(reading.value * reading.weight_s for reading in readings) / weights if weights > 0 else None

    def share_grown(self, counter: int) -> float | None:
        """Growth of a counter of seconds as a share of the time between its first and last reading; None below two."""
        readings = self.readings(counter)
        seconds = readings[-1].at_s - readings[0].at_s if readings else 0.0
        return (readings[-1].value - readings[0].value) / seconds if seconds > 0 else None

    def with_before(self, number: int) -> list[float]:
        """The window's values after the last known value before the window, so that a change is seen."""
        earlier = (self.value(number, row) for row in range(self.rows[0] - 1, -1, -1))
        return [*[v for v in earlier if v is not None][:1], *self.values(number)]


@once
def watched(run: Run) -> SensorWindow | None:
    """The run's telemetry with its window; None if no reading belongs to the window. A reading belongs to the window if
    more than half of its span lies in it, or without a span its moment."""
    if run.telemetry is None:
        return None
    telemetry, rows, (opens, closes) = joined_gpus(run.telemetry), [], run.window_s
    for row, (at, span) in enumerate(zip(telemetry.time_s, telemetry.span_s)):
        if span is None or span <= 0:
            inside = opens <= at <= closes
        else:
            inside = min(at, closes) - max(at - span, opens) > span / 2
        if inside:
            rows.append(row)
    return SensorWindow(telemetry, run.window_s, tuple(rows)) if rows and closes > opens else None


@once
def device_figures(run: Run) -> DeviceFigures:
    """The figures of one run."""
    watch = watched(run)
    if watch is None:
        return DeviceFigures()
    clocks, limits, energy = watch.values(of.SM_CLOCK), set(watch.values(of.POWER_LIMIT)), watch.readings(of.ENERGY)
    counted = _counter_w(energy)
    integrated = _integrated_w(watch, energy[0].at_s, energy[-1].at_s) if counted else None
    if (capped := watch.share_grown(of.CAPPED_POWER)) is not None:
        capped = min(1.0, capped)  # its updates are 0.1 s apart, and a reading is taken at any time between
    elif reasons := watch.values(of.CLOCK_REASONS):
        capped = fmean(bool(int(each) & POWER_CAP) for each in reasons)
    return DeviceFigures(
        gpu_util=watch.mean(of.GPU_UTIL),
        engine_active=watch.mean(of.ENGINE_ACTIVE),
        sm_active=watch.mean(of.SM_ACTIVE),
        sm_active_max=max(watch.values(of.SM_ACTIVE), default=None),
        sm_occupancy=watch.mean(of.SM_OCCUPANCY),
        sm_occupancy_max=max(watch.values(of.SM_OCCUPANCY), default=None),
        tensor_active=watch.mean(of.TENSOR_ACTIVE),
        dram_active=watch.mean(of.DRAM_ACTIVE),
        power_w=counted if len(energy) > 1 else _integrated_w(watch),
        energy_deviation=integrated / counted - 1 if counted and integrated is not None else None,
        power_limit_w=limits.pop() if len(limits) == 1 else None,
        sm_clock_hz=median(clocks) if clocks else None,
        power_capped=capped,
        memory_used_bytes=max(watch.values(of.MEMORY_USED), default=None),
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


@once
def runs_of_each_gpu(run: Run) -> tuple[Run, ...]:
    """The run with the telemetry of each GPU of an engine that has several; none of an engine that has one."""
    gpus = each_gpu(run.telemetry) if run.telemetry else ()
    return tuple(replace(run, telemetry=telemetry) for telemetry in gpus)


def figures_of_each_gpu(run: Run) -> tuple[DeviceFigures, ...]:
    """The figures of each GPU of an engine that has several; none of one that has one."""
    return tuple(map(device_figures, runs_of_each_gpu(run)))


@once
def decode_window(run: Run) -> SensorWindow | None:
    """The readings of decoding: those of the window during which no prompt was processed. There are some if requests
    begin together: no reading is short enough to fall between the prompts of requests that begin one by one. None
    without telemetry or steps.

    A prompt takes the time of its step with the step before and the one after: a trace has the time at which a step's
    output was seen, and an engine runs a step ahead of it.
    """
    watch = watched(run)
    if watch is None or not len(run.steps):
        return None
    ends, spans, at = run.steps.time_s, watch.telemetry.span_s, watch.telemetry.time_s
    steps = (i for i, tokens in enumerate(run.steps.prompt_tokens) if tokens)
    prompts = [(ends[i - 2] if i > 1 else -math.inf, ends[min(i + 1, len(ends) - 1)]) for i in steps]
    rows = []
    for row in watch.rows:
        if (span := spans[row]) is not None:
            after = bisect_right(prompts, at[row] - span, key=itemgetter(1))  # the first prompt that ends later
            if after == len(prompts) or prompts[after][0] >= at[row]:
                rows.append(row)
    return replace(watch, rows=tuple(rows))


def _counter_w(readings: Sequence[WeightedReading]) -> float | None:
    """Mean power in W by the energy counter; None below two readings. None too where it falls (restarted or wrapped),
    or stands still, which no powered GPU does.

    From the mean of the first two readings to that of the last two, if these are few of all: the counter moves every
    0.1 s, so of readings every 0.25 s one of two neighbours is 0.05 s staler. The slope of a fit would do too, but
    counts the middle of a window more than its ends.
    """
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
    number = of.POWER_INSTANT if watch.values(of.POWER_INSTANT) else of.POWER
    joules = seconds = 0.0
    for before, row in pairwise(watch.rows):
        began, ended, value = watch.telemetry.time_s[before], watch.telemetry.time_s[row], watch.value(number, row)
        if value is not None and since_s <= began < ended <= until_s:
            joules += value * (ended - began)
            seconds += ended - began
    return joules / seconds if seconds > 0 else None


def _coverage(watch: SensorWindow) -> float | None:
    """Time in the window that known spans cover, counted once where two overlap; None where no reading has a span.

    A span at the window's edge counts with its part inside. Where there are profiled counters, a span is known if one
    of them is.
    """
    telemetry, (opens, closes), covered = watch.telemetry, watch.window_s, 0.0
    if all(span is None for span in telemetry.span_s):
        return None
    profiled, reached = [number for number in of.PROFILED if number in telemetry.columns], opens
    known = sorted(
        (at - span, at)
        for row, (at, span) in enumerate(zip(telemetry.time_s, telemetry.span_s))
        if span is not None and (not profiled or any(watch.value(n, row) is not None for n in profiled))
    )
    for began, ended in known:
        first, last = max(began, reached), min(ended, closes)
        if last > first:
            covered, reached = covered + last - first, last
    return covered / (closes - opens)


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
    sharing, each = first.replica and first.replica.sharing, first.environment.gpu_memory_bytes
    sizes = [(short_name(m.spec.model), m.resolved.weight_bytes or 0, kv_bytes(m.spec, m.resolved)) for m in group]
    if each is None or sharing == "mig" or not all(weights and cache for _, weights, cache in sizes):
        return None
    gpus = sum(m.spec.tensor_parallel_size for m in (group if sharing == "gpus" else group[:1]))
    memory = GpuMemory(tuple(EngineMemory(*size) for size in sizes), each * gpus)
    used = int(most_memory_used(group) or 0.0)
    if memory.engine_bytes > memory.total_bytes:
        return None
    return replace(memory, used_bytes=used) if used >= memory.engine_bytes else memory


def most_memory_used(measurements: Iterable[Measurement]) -> float | None:
    """Bytes of the device in use at most, by anybody; None where no sensor tells."""
    seen = (device_figures(m.run).memory_used_bytes for m in measurements)
    return max((used for used in seen if used is not None), default=None)


FASTEST = 0.05  # percentile of all pieces: the fastest alone may be a stroke of luck

# A host, and sources: the name of a host-speed probe has its Python, which sets its speed.
Place = tuple[str | None, tuple[str, ...]]


def fastest_pieces(measurements: Iterable[Measurement]) -> dict[Place, float]:
    """CPU time of the host-speed probe's fastest pieces in the windows of each host, in seconds."""
    found: dict[Place, list[float]] = {}
    for m in measurements:
        if (place := _place(m)) and (watch := watched(m.run)):
            found.setdefault(place, []).extend(watch.values(of.PROBE_CPU))
    return {place: fastest for place, values in found.items() if (fastest := percentile(values, FASTEST))}


def host_speed(measurements: Iterable[Measurement], fastest: Mapping[Place, float]) -> float | None:
    """Mean speed of the host during these windows: 1 where it was as fast as in its fastest pieces."""
    speeds = []
    for m in measurements:
        cpu_s, best = device_figures(m.run).probe_cpu_s, fastest.get(_place(m) or (None, ()))
        speeds.append(best / cpu_s if best and cpu_s else None)
    return mean_of_known(speeds)


def probe_waiting(probe_s: float | None, probe_cpu_s: float | None) -> float | None:
    """Share of a piece's time in which it had no core."""
    return max(0.0, 1 - probe_cpu_s / probe_s) if probe_s and probe_cpu_s is not None else None


def _place(measurement: Measurement) -> Place | None:
    """The host and its probe; None without a probe."""
    seen = measurement.run.telemetry
    if seen is None or of.PROBE_CPU not in seen.columns:
        return None
    return measurement.environment.host, tuple(name for name in seen.sources if name.startswith(of.SPEED_PROBE))
