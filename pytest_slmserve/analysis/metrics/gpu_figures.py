"""Sensor figures of a GPU over a run's window, and the roofline: the upper bound of throughput by its data sheet.

None means "not known", also if there is no telemetry.
"""

import math
import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from pytest_slmserve.analysis.estimates import once, once_for_all, percentile
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.kv_cache import kv_bytes, kv_layout, quantization_of, value_bytes, weight_bytes
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, ReplicaGroup, Resolved, Run, Telemetry
from pytest_slmserve.schema.specs import EngineSpec, WorkloadReference


def all_bits(reasons: Sequence[float]) -> float:
    bits = 0
    for each in reasons:
        bits |= int(each)
    return float(bits)


WORST = (of.TEMPERATURE, of.XID, of.CAPPED_POWER, of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE)
# How columns of several GPUs become one, if not as a mean (ratios) or a sum. GPUs wait for the slowest clock.
JOINS: dict[int, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(WORST, max),
    **dict.fromkeys((of.SM_CLOCK, of.MEMORY_CLOCK), min),
    of.CLOCK_REASONS: all_bits,
}


def joined_gpus(telemetry: Telemetry) -> Telemetry:
    """Return the readings of all GPUs as those of one. A value is None if one of the GPUs has none."""
    if not telemetry.gpus:
        return telemetry
    columns = dict(telemetry.columns)
    for number in sorted(set.intersection(*map(set, telemetry.gpus))):
        is_ratio = number in of.SENSORS and of.SENSORS[number].unit == "ratio"
        join, rows = JOINS.get(number, fmean if is_ratio else sum), zip(*(gpu[number] for gpu in telemetry.gpus))
        known = ([value for value in row if value is not None] for row in rows)
        columns[number] = tuple(join(row) if len(row) == len(telemetry.gpus) else None for row in known)
    return replace(telemetry, columns=columns, gpus=())


POWER_CAP = 0x04  # bit of the clock event reasons (NVIDIA, nvml.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorFigures:
    """Sensor figures of one run over its window. Ratios and cores are means weighted by time.

    With several GPUs, power is the sum, ratios are means, and the clock is that of the slowest GPU.

    Attributes:
        engine_active: share of the time in which any kernel ran.
        power_w: by the energy counter, or else by power readings.
        power_limit_w: None if it changed.
        sm_clock_hz: median.
        probe_s: time of the host-speed probe's piece of work.
        power_capped: share of the time in which the power limit lowered the clock.
        power_imbalance: range of the GPUs' power, divided by their mean.
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
    power_limit_w: float | None = None
    sm_clock_hz: float | None = None
    own_cores: float | None = None
    stolen_cores: float | None = None
    probe_s: float | None = None
    probe_cpu_s: float | None = None
    power_capped: float | None = None
    power_imbalance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures(SensorFigures):
    """Sensor figures, and further ones that only the validity checks read.

    Attributes:
        energy_deviation: integrated power divided by the power of the energy counter, minus 1.
        memory_used_bytes: maximum.
        coverage: share of the window in which ratios are known.
    """

    energy_deviation: float | None = None
    memory_used_bytes: float | None = None
    host_cores: float | None = None
    coverage: float | None = None


@dataclass(frozen=True, slots=True)
class SensorWindow:
    """Telemetry, a window, and the indices of the rows in it."""

    telemetry: Telemetry
    window_s: tuple[float, float]
    rows: tuple[int, ...]

    def value(self, number: int, row: int) -> float | None:
        """Return a reading, or None if it is missing or not finite."""
        column = self.telemetry.columns.get(number, ())
        found = column[row] if row < len(column) else None
        return found if found is not None and math.isfinite(found) else None

    def values(self, number: int) -> list[float]:
        return [value for row in self.rows if (value := self.value(number, row)) is not None]

    def readings(self, number: int) -> tuple[list[float], list[float]]:
        """Return times and values of the known readings in the window."""
        known = [row for row in self.rows if self.value(number, row) is not None]
        return [self.telemetry.time_s[row] for row in known], self.values(number)

    def mean(self, number: int) -> float | None:
        """Return the mean weighted by the span of each reading."""
        spans, usual = self.telemetry.span_s, self.telemetry.interval_s
        known = [(value, spans[row] or 0.0) for row in self.rows if (value := self.value(number, row)) is not None]
        weighted = [(value, span if span > 0 else usual) for value, span in known]
        seconds = sum(weight for _, weight in weighted)
        return sum(value * weight for value, weight in weighted) / seconds if seconds > 0 else None

    def share_grown(self, counter: int) -> float | None:
        """Return the growth of a counter of seconds, divided by its time."""
        times, values = self.readings(counter)
        seconds = times[-1] - times[0] if times else 0.0
        return (values[-1] - values[0]) / seconds if seconds > 0 else None

    def with_before(self, number: int) -> list[float]:
        """Return the values in the window, preceded by the last one before it."""
        earlier = (self.value(number, row) for row in range(self.rows[0] - 1, -1, -1))
        return [*[v for v in earlier if v is not None][:1], *self.values(number)]


@once
def watched(run: Run) -> SensorWindow | None:
    """Return the readings in a run's window, or None if there are none.

    More than half of a reading's span is in the window, or without a span its time.
    """
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


@once_for_all
def device_figures(run: Run) -> DeviceFigures:
    watch = watched(run)
    if watch is None:
        return DeviceFigures()
    clocks, limits = watch.values(of.SM_CLOCK), set(watch.values(of.POWER_LIMIT))
    times, joules = watch.readings(of.ENERGY)
    counted = _counter_w(times, joules)
    # Averaged power misses nothing between two readings, but it lags: a load of a second or two ends before it rises.
    integrated = _integrated_w(watch, of.POWER, times[0], times[-1]) if counted else None
    if (capped := watch.share_grown(of.CAPPED_POWER)) is not None:
        capped = min(1.0, capped)  # its updates are 0.1 s apart, and a reading is taken at any time between
    elif reasons := watch.values(of.CLOCK_REASONS):
        capped = fmean(bool(int(each) & POWER_CAP) for each in reasons)
    watts = [device_figures(one).power_w for one in runs_of_each_gpu(run)]
    drawn = [each for each in watts if each is not None]
    compared = 1 < len(drawn) == len(watts) and fmean(drawn) > 0
    return DeviceFigures(
        gpu_util=watch.mean(of.GPU_UTIL),
        engine_active=watch.mean(of.ENGINE_ACTIVE),
        sm_active=watch.mean(of.SM_ACTIVE),
        sm_active_max=max(watch.values(of.SM_ACTIVE), default=None),
        sm_occupancy=watch.mean(of.SM_OCCUPANCY),
        sm_occupancy_max=max(watch.values(of.SM_OCCUPANCY), default=None),
        tensor_active=watch.mean(of.TENSOR_ACTIVE),
        dram_active=watch.mean(of.DRAM_ACTIVE),
        power_w=counted if len(times) > 1 else _integrated_w(watch, of.POWER_INSTANT),
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
        power_imbalance=(max(drawn) - min(drawn)) / fmean(drawn) if compared else None,
    )


@once
def runs_of_each_gpu(run: Run) -> tuple[Run, ...]:
    """Return a copy of the run for each GPU of several; none for a single GPU.

    The first copy also has the columns of the host and the notes.
    """
    if run.telemetry is None:
        return ()
    each = [replace(run.telemetry, columns=columns, notes=(), gpus=()) for columns in run.telemetry.gpus]
    if each:
        host = run.telemetry.columns
        each[0] = replace(each[0], columns={**host, **each[0].columns}, notes=run.telemetry.notes)
    return tuple(replace(run, telemetry=telemetry) for telemetry in each)


@once
def decode_window(run: Run) -> SensorWindow | None:
    """Return the readings during which no prompt was processed.

    If requests start one by one there are none, because a reading takes longer than the time between two prompts.
    """
    watch = watched(run)
    if watch is None or not len(run.steps):
        return None
    ends, spans, at = run.steps.time_s, watch.telemetry.span_s, watch.telemetry.time_s
    # A prompt's time includes the steps before and after its own, because a trace has the time at which a step's output
    # was seen, and an engine runs one step ahead.
    steps = (i for i, tokens in enumerate(run.steps.prompt_tokens) if tokens)
    prompts = [(ends[i - 2] if i > 1 else -math.inf, ends[min(i + 1, len(ends) - 1)]) for i in steps]
    over = [ended for _, ended in prompts]
    rows = []
    for row in watch.rows:
        if (span := spans[row]) is not None:
            after = bisect_right(over, at[row] - span)  # the first prompt that ends later
            if after == len(prompts) or prompts[after][0] >= at[row]:
                rows.append(row)
    return replace(watch, rows=tuple(rows))


def _counter_ends(joules: Sequence[float]) -> int:
    """Return how many readings to average at each end; 0 if the counter is unusable."""
    # A counter that falls was restarted or wrapped, and that of a powered GPU never stands still.
    if len(joules) < 2 or any(after < before for before, after in pairwise(joules)) or joules[0] == joules[-1]:
        return 0
    # The counter moves every 0.1 s, so of two readings 0.25 s apart one is 0.05 s staler.
    return 2 if len(joules) >= 8 else 1


def _growth(values: Sequence[float], ends: int) -> float:
    return sum(values[-ends:]) - sum(values[:ends])


def _counter_w(times: Sequence[float], joules: Sequence[float]) -> float | None:
    ends = _counter_ends(joules)
    return _growth(joules, ends) / _growth(times, ends) if ends else None


def energy_per_token_j(runs: Sequence[Run], tokens_per_s: float | None, is_whole: bool = False) -> float | None:
    """Return the energy per output token, or None if energy or throughput is unknown.

    The growth of the energy counter is divided by the tokens of exactly the same time, because throughput changes
    within a window. Without a counter, it is mean power divided by throughput.

    Args:
        runs: of all engines on the same GPUs; the first one has the sensors.
        is_whole: use mean power, because parts of the window differ in throughput.
    """
    if not tokens_per_s:
        return None
    watch, trace = watched(runs[0]), window.window_trace(runs[0])
    read = list(zip(*watch.readings(of.ENERGY))) if watch and trace.seconds else []
    # Tokens are known only within the steps.
    within = [(at, used) for at, used in read if trace.ends_s[0] <= at <= trace.ends_s[-1]]
    times, joules = [at for at, _ in within], [used for _, used in within]
    ends = _counter_ends(joules)
    if is_whole or not ends:
        power_w = device_figures(runs[0]).power_w
        return None if power_w is None else power_w / tokens_per_s
    tokens = 0.0
    for run in runs:  # each clock began with its run
        later = 0.0 if run.began_s is None or runs[0].began_s is None else runs[0].began_s - run.began_s
        moments = [at + later for at in times]
        tokens += window.tokens_between(run, moments[:ends], moments[-ends:])
    return _growth(joules, ends) / tokens if tokens > 0 else None


def _integrated_w(
    watch: SensorWindow, sensor: int, since_s: float = -math.inf, until_s: float = math.inf
) -> float | None:
    number = next(filter(watch.values, (sensor, of.POWER_INSTANT)), of.POWER)
    # A sensor repeats its value until its next update, so trapezoids would turn jumps into ramps.
    joules = seconds = 0.0
    for before, row in pairwise(watch.rows):
        began, ended, value = watch.telemetry.time_s[before], watch.telemetry.time_s[row], watch.value(number, row)
        if value is not None and since_s <= began < ended <= until_s:
            joules += value * (ended - began)
            seconds += ended - began
    return joules / seconds if seconds > 0 else None


def _coverage(watch: SensorWindow) -> float | None:
    """Return the share of the window that known spans cover."""
    telemetry, (opens, closes), covered = watch.telemetry, watch.window_s, 0.0
    if all(span is None for span in telemetry.span_s):
        return None
    # With profiled counters, a span is known only if one of them is.
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
    """Memory of one engine, over all of its GPUs."""

    model: str
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the GPUs of one or more engines.

    Attributes:
        used_bytes: maximum in use by all processes, if known.
    """

    engines: tuple[EngineMemory, ...]
    total_bytes: int
    used_bytes: int | None = None

    @property
    def engine_bytes(self) -> int:
        return sum(engine.weight_bytes + engine.kv_bytes for engine in self.engines)

    @property
    def other_bytes(self) -> int | None:
        """Memory in use for activations, captured graphs and contexts."""
        return None if self.used_bytes is None else self.used_bytes - self.engine_bytes

    @property
    def left_bytes(self) -> int:
        """Unused memory, including the driver's reserve; without a sensor, all but weights and KV caches."""
        return self.total_bytes - (self.engine_bytes if self.used_bytes is None else self.used_bytes)


def memory_in_use(groups: Iterable[ReplicaGroup]) -> GpuMemory | None:
    """Return the memory of the run that used most of it, or None if no run has known sizes.

    MIG instances are skipped, because each has its own memory.
    """
    found = []
    for group in groups:
        first, sharing = group[0], group[0].replica and group[0].replica.sharing
        sizes = [(short_name(m.spec.model), m.resolved.weight_bytes or 0, kv_bytes(m.spec, m.resolved)) for m in group]
        known = sharing != "mig" and all(weights and cache for _, weights, cache in sizes)
        if not known or (each := first.environment.gpu_memory_bytes) is None:
            continue
        gpus = sum(m.spec.tensor_parallel_size for m in (group if sharing == "gpus" else group[:1]))
        memory = GpuMemory(tuple(EngineMemory(*size) for size in sizes), each * gpus)
        if memory.engine_bytes <= memory.total_bytes:
            used = int(most_memory_used(group) or 0.0)
            found.append(replace(memory, used_bytes=used) if used >= memory.engine_bytes else memory)
    return max(found, key=lambda memory: memory.used_bytes or 0, default=None)


def most_memory_used(measurements: Iterable[Measurement]) -> float | None:
    """Return the maximum GPU memory in use by all processes, in bytes."""
    seen = (device_figures(m.run).memory_used_bytes for m in measurements)
    return max((used for used in seen if used is not None), default=None)


FASTEST = 0.05  # percentile of all pieces, because the fastest one may be an outlier


def host_speeds(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Return the relative speed of the host in each window, by measurement ID.

    It is 1 if the host-speed probe needed the CPU time of the fastest pieces on the same host with the same Python.
    """
    pieces: dict[tuple[str | None, tuple[str, ...]], list[float]] = {}
    windows = []
    for m in measurements:
        watch, cpu_s = watched(m.run), device_figures(m.run).probe_cpu_s
        if watch and cpu_s:
            probes = (name for name in watch.telemetry.sources if name.startswith(of.SPEED_PROBE))
            place = m.environment.host, tuple(probes)
            pieces.setdefault(place, []).extend(watch.values(of.PROBE_CPU))
            windows.append((m.id, place, cpu_s))
    fastest = {place: percentile(values, FASTEST) for place, values in pieces.items()}
    return {key: best / cpu_s for key, place, cpu_s in windows if (best := fastest[place])}


def probe_waiting(probe_s: float | None, probe_cpu_s: float | None) -> float | None:
    """Return the share of the host-speed probe's time in which it had no core."""
    return max(0.0, 1 - probe_cpu_s / probe_s) if probe_s and probe_cpu_s is not None else None


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak rates of a GPU by its data sheet.

    Attributes:
        words: parts of its NVML name.
        flops_per_s: dense fp16/bf16 tensor rate with fp32 accumulation, never the sparse rate.
        fp8_flops_per_s: None if the GPU has no fp8.
        gigabytes: memory, if known.
    """

    family: str
    words: tuple[str, ...]
    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float | None = None
    gigabytes: int | None = None

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic limits a kernel."""
        return self.flops_per_s / self.bytes_per_s


_DATA_SHEETS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))
GPUS = tuple(Peaks(family, tuple(row.pop("words")), **row) for family, row in _DATA_SHEETS.items())
OTHER_WORDS = {"MIG", "NVL", "3E", "TI", "D", "LAPTOP"}  # a slice of the card, or a variant with other numbers


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one request on a GPU, in tokens and bytes.

    Attributes:
        parameters: weights that each token is multiplied with: of experts only its own, and no embeddings that are only
            looked up.
        lm_head: the part of them that only sampled tokens use, because engines skip the other logits of a prompt.
        weight_bytes: these weights with all experts.
        kv_bytes_per_token: read for each token of the mean context.
        heads_width: query heads x head size x layers; a sliding window counts by its share of the context.
        idle_share: share of the weights in experts that one token does not use.
        routed_share: share of the experts that one token uses.
    """

    parameters: float
    lm_head: float
    weight_bytes: float
    kv_bytes_per_token: float
    heads_width: float
    prompt_tokens: float
    output_tokens: float
    idle_share: float = 0.0
    routed_share: float = 1.0
    is_causal: bool = True

    @property
    def context(self) -> float:
        """Mean context while decoding: the prompt and half of the output.

        If lengths vary it is too low, because long outputs weigh more, so an upper bound stays one.
        """
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def b_half(self) -> float:
        """Number of sequences whose KV cache is as large as the weights; infinity without a cache."""
        each = self.context * self.kv_bytes_per_token
        return self.weight_bytes / each if each else math.inf

    @property
    def prefill_flops(self) -> float:
        """FLOPs of one request's prompt; causal attention takes half of the square."""
        layers = 2 * (self.parameters - self.lm_head) * self.prompt_tokens
        return layers + 2 * self.lm_head + (4 - 2 * self.is_causal) * self.heads_width * self.prompt_tokens**2

    @property
    def token_flops(self) -> float:
        """FLOPs of one decoded token at the mean context."""
        return 2 * self.parameters + 4 * self.heads_width * self.context

    @property
    def intensity(self) -> float:
        """FLOP per byte of decoding as the batch grows without limit.

        With 16-bit weights and caches it is b_half + query heads per KV head. Above the ridge of a GPU, arithmetic
        limits decoding, otherwise memory.
        """
        each = self.context * self.kv_bytes_per_token
        return self.token_flops / each if each else math.inf

    def weights_read(self, tokens: float) -> float:
        """Return the bytes of weights that a step reads if its tokens choose experts at random."""
        untouched: float = (1 - self.routed_share) ** max(0.0, tokens - 1)
        return self.weight_bytes * (1 - self.idle_share * untouched)


def peaks_of(gpu_name: str | None) -> Peaks | None:
    """Return the data sheet for an NVML name such as "NVIDIA A100-SXM4-40GB", if listed."""
    words = set(re.split(r"[\s\-_]+", (gpu_name or "").upper()))
    others = words & OTHER_WORDS
    return next((gpu for gpu in GPUS if others <= set(gpu.words) <= words), None)


def peaks_of_engine(spec: EngineSpec, environment: Environment) -> Peaks | None:
    """Return the peak rates of all GPUs of an engine, by the user or the data sheet."""
    peaks = peaks_of(environment.gpu_name)
    if given := environment.gpu_peaks:
        peaks = Peaks("given", (), flops_per_s=given.tflops * 1e12, bytes_per_s=given.gbps * 1e9)
    return None if peaks is None else peaks_for(spec, peaks)


def peaks_for(spec: EngineSpec, peaks: Peaks) -> Peaks:
    """Return the `peaks` of one GPU times the GPUs of an engine, in fp8 if both support it."""
    gpus, method = spec.tensor_parallel_size, quantization_of(spec) or ""
    own = spec.model_facts and spec.model_facts.quantization
    in_fp8 = own and own.fp8_inputs if method == "compressed-tensors" else method.startswith("fp8")
    fp8 = peaks.fp8_flops_per_s if in_fp8 else None
    return replace(peaks, bytes_per_s=gpus * peaks.bytes_per_s, flops_per_s=gpus * (fp8 or peaks.flops_per_s))


def work_of_workload(spec: EngineSpec, resolved: Resolved, workload: WorkloadReference) -> Work | None:
    """Return the work of a workload's mean request, or None if it cannot be computed.

    Prefix caching is excluded, and speculative decoding, whose steps make several tokens from one read of the weights.
    """
    model, each = spec.model_facts, value_bytes(spec, resolved)
    cached = spec.allow_prefix_cache and spec.caches_prefixes
    if model is None or each is None or cached or spec.speculation:
        return None
    weights = resolved.weight_bytes or weight_bytes(spec, each) or model.weight_bytes(each)
    context = workload.mean_prompt_tokens + workload.mean_output_tokens / 2
    read = model.kv_read_bytes(context, kv_layout(spec, resolved).value_bytes or each, spec.tensor_parallel_size)
    if weights is None or read is None:
        return None
    generates = workload.kind == "generate"
    lookups = 0 if model.tied and generates else model.lm_head  # embeddings of which a token reads one row
    return Work(
        parameters=(model.active or weights / each) - lookups,
        lm_head=model.lm_head if generates else 0,
        weight_bytes=weights - lookups * each,
        kv_bytes_per_token=read / context,
        heads_width=model.attention_width(context),
        prompt_tokens=workload.mean_prompt_tokens,
        output_tokens=workload.mean_output_tokens,
        idle_share=(model.parameters - (model.active or 0)) / (model.parameters - lookups) if model.parameters else 0.0,
        routed_share=model.experts_per_token / model.experts if model.experts else 1.0,
        is_causal=not model.is_encoder,
    )


def ceiling_tokens_per_s(work: Work, peaks: Peaks, batch: float, *, overlap: bool = False) -> float:
    """Return the upper bound of the output tokens/s (of pooling: the results/s) at a batch.

    A pooling result costs its prefill or its share of the weights that a step reads, whichever is slower. Any other
    request costs its prefill, and for each token after the first a decode step, limited by memory or arithmetic.

    Args:
        overlap: prefill may hide behind the memory traffic of decoding. Only this bound holds for every engine.
    """
    batch = max(batch, 1.0)
    decoded = max(work.output_tokens - 1, 0.0)
    prefill = work.prefill_flops / peaks.flops_per_s
    if not decoded:
        return 1 / max(prefill, work.weights_read(batch * work.prompt_tokens) / batch / peaks.bytes_per_s)
    token_bytes = work.weights_read(batch) / batch + work.context * work.kv_bytes_per_token
    by_bytes = decoded * token_bytes / peaks.bytes_per_s
    by_flops = decoded * work.token_flops / peaks.flops_per_s
    seconds = max(by_bytes, prefill + by_flops) if overlap else prefill + max(by_bytes, by_flops)
    return work.output_tokens / seconds


def roofline_fraction(
    measurement: Measurement, tokens_per_s: float | None, batch: float | None, *, overlap: bool = False
) -> float | None:
    """Return output tokens/s divided by their upper bound, or None if an input is unknown."""
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or tokens_per_s is None or batch is None:
        return None
    return tokens_per_s / ceiling_tokens_per_s(work, peaks, batch, overlap=overlap)


Bound = Literal["memory", "compute", "host", "mixed"]

# Achievable peaks of the counters: on an H200, 0.89 in plain copies (4.28 of the data sheet's 4.8 TB/s) and 0.94 in
# fp16 matrix products of 8192 (0.64 of 0.99 PFLOP/s, because the power limit lowers the clock, and the ratio is of the
# remaining cycles). On an H100 0.90 (3.01 of 3.35 TB/s) and 0.94. docs/accuracy.md has more.
REACHABLE_DRAM = 0.89
REACHABLE_TENSOR = 0.94
SATURATED = 0.5  # below half of its achievable peak, a unit leaves most of the step to something else
IDLE = 0.3  # arXiv:2503.08311, figure 7: gaps took 25% of a step of OPT-1.3B at batch 1, 37% at 512
EXPLAINED = 0.5  # by the model configuration only: at least half of the step is spent there


@dataclass(frozen=True, slots=True)
class StepTime:
    """Composition of the mean engine step of a measurement.

    Attributes:
        parts: shares of the step, if known. weights, kv: moving these at the data sheet's rate. flops: arithmetic
            beyond both. kernels: other time with a kernel. idle: time without one. unsplit: kernels and idle.
        unexplained: share beyond the larger of memory traffic and arithmetic.
        bound: limiting resource, by counters or else by the model configuration.
    """

    parts: dict[str, float]
    unexplained: float | None
    bound: Bound | None


def step_time(measurement: Measurement) -> StepTime:
    run, trace, step_s = measurement.run, window.window_trace(measurement.run), window.step_s(measurement.run)
    idle, bound = idle_share(device_figures(run).engine_active), bound_by_counters(run)
    steps = trace.steps[1:]
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or step_s is None:
        return StepTime({} if step_s is None or idle is None else {"kernels": 1 - idle, "idle": idle}, None, bound)
    # Each step reads the weights once and the contexts of the sequences that it decodes. A prompt's last step yields
    # its first token, so that token belongs to the prefill.
    rows, begins, ends = zip(run.samples.prompt_tokens, run.samples.first_token_s), trace.ends_s[0], trace.ends_s[-1]
    prompts = [tokens for tokens, first in rows if first is not None and begins < first <= ends]
    decoded = max(0, sum(run.steps.new_tokens[i] for i in steps) - len(prompts))
    kv_tokens = decoded * work.context + sum(prompts)
    prefill = sum(replace(work, prompt_tokens=tokens).prefill_flops for tokens in prompts)
    # A step with a prompt reads nearly all experts and a step without one few, so the mean is over steps.
    tokens = ((run.steps.new_tokens[i], run.steps.prompt_tokens[i]) for i in steps) if work.idle_share else [(0, 0)]
    weights_s = fmean(work.weights_read(max(each)) for each in tokens) / peaks.bytes_per_s
    kv_s = kv_tokens * work.kv_bytes_per_token / len(steps) / peaks.bytes_per_s
    flops_s = (decoded * work.token_flops + prefill) / len(steps) / peaks.flops_per_s
    explained = max(weights_s + kv_s, flops_s) / step_s
    if bound is None and explained >= EXPLAINED:
        bound = "memory" if weights_s + kv_s >= flops_s else "compute"
    rest = 1 - explained - (idle or 0.0)
    beyond_s = max(0.0, flops_s - (weights_s + kv_s))
    parts = {"weights": weights_s / step_s, "kv": kv_s / step_s, "flops": beyond_s / step_s}
    parts |= {"unsplit": rest} if idle is None else {"kernels": rest, "idle": idle}
    return StepTime(parts if rest >= 0 else {}, 1 - explained, bound)


def step_parts(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean parts over repeats; nothing if the repeats have different parts."""
    each = [step_time(m).parts for m in measurements]
    alike = len({tuple(parts) for parts in each}) == 1
    return {name: fmean(parts[name] for parts in each) for name in each[0]} if alike else {}


def idle_share(engine_active: float | None) -> float | None:
    """Return the share of time without a kernel."""
    return None if engine_active is None else max(0.0, 1 - engine_active)


def bound_by_counters(run: Run) -> Bound | None:
    """Return the limiting resource by the DRAM and tensor counters, or None without both.

    It is "host" if the GPU is idle for at least IDLE of the time, and for longer than its memory is busy. Otherwise it
    is the resource nearer to its achievable peak, or "mixed" if both are below half of it.
    """
    figures = device_figures(run)
    dram, tensor, idle = figures.dram_active, figures.tensor_active, idle_share(figures.engine_active)
    if dram is None or tensor is None:
        return None
    if idle is not None and idle >= IDLE and idle > dram:
        return "host"
    memory, compute = dram / REACHABLE_DRAM, tensor / REACHABLE_TENSOR
    if max(memory, compute) < SATURATED:
        return "mixed"
    return "memory" if memory >= compute else "compute"


def saturation_gap(dram: float | None, tensor: float | None) -> float | None:
    """Return the log ratio of memory to tensor activity, each relative to its achievable peak."""
    if dram is None or tensor is None or dram <= 0 or tensor <= 0:
        return None
    return math.log(dram / REACHABLE_DRAM) - math.log(tensor / REACHABLE_TENSOR)
