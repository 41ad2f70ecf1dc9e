"""Figures of a GPU: of a run's window by its sensor readings, and the roofline, the highest throughput of a model that
the data sheet allows. Nothing is faster than its roofline. None is "not known", also where there was no telemetry."""

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
# How a column of several GPUs becomes one, if not as a mean of ratios or a sum: the others wait for the slowest.
JOINS: dict[int, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(WORST, max),
    **dict.fromkeys((of.SM_CLOCK, of.MEMORY_CLOCK), min),
    of.CLOCK_REASONS: all_bits,
}


def joined_gpus(telemetry: Telemetry) -> Telemetry:
    """Return all GPUs as one device, with the columns of the host. A value is None if one GPU has none."""
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
    """Over the window. Ratios and cores are means weighted by the time that each reading is a mean over.

    engine_active: share of time in which any kernel ran. power_w: of the energy counter if there is one, else of the
    instant power readings as steps (the averaged ones if there are no others). power_limit_w: None if it moved.
    sm_clock_hz: the median. power_capped: share of the window in which the power limit held the clock down, by its
    counter, or else share of the readings that said so. probe_s, probe_cpu_s: time of the host-speed probe's piece of
    work, and its CPU time (`telemetry/host.py`).

    Of several GPUs: power and memory are those of all together, ratios means over them, the clock that of the
    slowest. power_imbalance: power of the GPU that takes most less that of the one that takes least, over their mean.
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
    """The figures of sensors, and those that only checks read.

    energy_deviation: integrated power over the energy counter, less 1, both over the counter's time.
    memory_used_bytes: the largest. coverage: share of the window in which ratios were known.
    """

    energy_deviation: float | None = None
    memory_used_bytes: float | None = None
    host_cores: float | None = None
    coverage: float | None = None


@dataclass(frozen=True, slots=True)
class SensorWindow:
    """Telemetry and a window. rows: the rows of the telemetry that lie in the window, in the order taken."""

    telemetry: Telemetry
    window_s: tuple[float, float]
    rows: tuple[int, ...]

    def value(self, number: int, row: int) -> float | None:
        """Reading of one sensor in one row; None if it is missing or not finite."""
        column = self.telemetry.columns.get(number, ())
        found = column[row] if row < len(column) else None
        return found if found is not None and math.isfinite(found) else None

    def values(self, number: int) -> list[float]:
        """Return the known readings of one sensor in the window."""
        return [value for row in self.rows if (value := self.value(number, row)) is not None]

    def readings(self, number: int) -> tuple[list[float], list[float]]:
        """Return the times and the values of the known readings of one sensor in the window."""
        known = [row for row in self.rows if self.value(number, row) is not None]
        return [self.telemetry.time_s[row] for row in known], self.values(number)

    def mean(self, number: int) -> float | None:
        """Return the mean of one sensor's readings, weighted by their spans; None without readings."""
        spans, usual = self.telemetry.span_s, self.telemetry.interval_s
        known = [(value, spans[row] or 0.0) for row in self.rows if (value := self.value(number, row)) is not None]
        weighted = [(value, span if span > 0 else usual) for value, span in known]
        seconds = sum(weight for _, weight in weighted)
        return sum(value * weight for value, weight in weighted) / seconds if seconds > 0 else None

    def share_grown(self, counter: int) -> float | None:
        """Growth of a counter of seconds as a share of the time between its first and last reading; None below two."""
        times, values = self.readings(counter)
        seconds = times[-1] - times[0] if times else 0.0
        return (values[-1] - values[0]) / seconds if seconds > 0 else None

    def with_before(self, number: int) -> list[float]:
        """Return the window's values after the last known value before the window, so that a change is seen."""
        earlier = (self.value(number, row) for row in range(self.rows[0] - 1, -1, -1))
        return [*[v for v in earlier if v is not None][:1], *self.values(number)]


@once
def watched(run: Run) -> SensorWindow | None:
    """Return the readings of a run's window; None without any. A reading belongs to the window if more than half of its
    span lies in it, or without a span its moment."""
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
    """Return the figures of one run."""
    watch = watched(run)
    if watch is None:
        return DeviceFigures()
    clocks, limits = watch.values(of.SM_CLOCK), set(watch.values(of.POWER_LIMIT))
    times, joules = watch.readings(of.ENERGY)
    counted = _counter_w(times, joules)
    # Average power misses nothing between two readings, but lags: a job of a second or two ends before it has risen.
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
    """Return the run with the telemetry of each GPU, the first with the host's columns and the notes too. An engine on
    one GPU has none."""
    if run.telemetry is None:
        return ()
    each = [replace(run.telemetry, columns=columns, notes=(), gpus=()) for columns in run.telemetry.gpus]
    if each:
        host = run.telemetry.columns
        each[0] = replace(each[0], columns={**host, **each[0].columns}, notes=run.telemetry.notes)
    return tuple(replace(run, telemetry=telemetry) for telemetry in each)


@once
def decode_window(run: Run) -> SensorWindow | None:
    """Return the readings of the window during which no prompt was processed; None without telemetry or steps. If
    requests begin one by one there are none, because no reading is short enough to fall between their prompts.

    A prompt takes the time of its step with the step before and the one after, because a trace has the time at which a
    step's output was seen, and an engine runs a step ahead of it.
    """
    watch = watched(run)
    if watch is None or not len(run.steps):
        return None
    ends, spans, at = run.steps.time_s, watch.telemetry.span_s, watch.telemetry.time_s
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
    """How many readings of the energy counter to take the mean of at each end; 0 below two readings, and if it falls
    (restarted or wrapped) or stands still, which no powered GPU does.

    Of many readings two: the counter moves every 0.1 s, so of readings every 0.25 s one of two neighbours is 0.05 s
    staler.
    """
    if len(joules) < 2 or any(after < before for before, after in pairwise(joules)) or joules[0] == joules[-1]:
        return 0
    return 2 if len(joules) >= 8 else 1


def _growth(values: Sequence[float], ends: int) -> float:
    return sum(values[-ends:]) - sum(values[:ends])


def _counter_w(times: Sequence[float], joules: Sequence[float]) -> float | None:
    """Return the mean power in W by the energy counter; None if it tells none."""
    ends = _counter_ends(joules)
    return _growth(joules, ends) / _growth(times, ends) if ends else None


def energy_per_token_j(runs: Sequence[Run], tokens_per_s: float | None, is_whole: bool = False) -> float | None:
    """Joules per output token of the engines that share the GPUs which the first run's sensors read.

    It is the growth of the energy counter over the tokens of the very same time, because throughput changes within a
    window, of which readings once a second may span but half. Without a counter, or if the window is a whole job or
    whole convoys, of which a part makes other tokens than the rest: mean power over the throughput. None if energy or
    throughput are unknown, or no token came.
    """
    if not tokens_per_s:
        return None
    watch, trace = watched(runs[0]), window.window_trace(runs[0])
    read = list(zip(*watch.readings(of.ENERGY))) if watch and trace.seconds else []
    # Those within the steps: no tokens are known beyond, as after the end of a run.
    within = [(at, used) for at, used in read if trace.ends_s[0] <= at <= trace.ends_s[-1]]
    times, joules = [at for at, _ in within], [used for _, used in within]
    ends = _counter_ends(joules)
    if is_whole or not ends:
        power_w = device_figures(runs[0]).power_w
        return None if power_w is None else power_w / tokens_per_s
    tokens = 0.0
    for run in runs:  # each has a clock of its own, which began with it
        later = 0.0 if run.began_s is None or runs[0].began_s is None else runs[0].began_s - run.began_s
        moments = [at + later for at in times]
        tokens += window.tokens_between(run, moments[:ends], moments[-ends:])
    return _growth(joules, ends) / tokens if tokens > 0 else None


def _integrated_w(
    watch: SensorWindow, sensor: int, since_s: float = -math.inf, until_s: float = math.inf
) -> float | None:
    """Return the mean of the readings of a power sensor, or of the other one without any, each holding back to the
    reading before: a sensor repeats what it last saw until its next update, so trapezoids would make ramps of jumps."""
    number = next(filter(watch.values, (sensor, of.POWER_INSTANT)), of.POWER)
    joules = seconds = 0.0
    for before, row in pairwise(watch.rows):
        began, ended, value = watch.telemetry.time_s[before], watch.telemetry.time_s[row], watch.value(number, row)
        if value is not None and since_s <= began < ended <= until_s:
            joules += value * (ended - began)
            seconds += ended - began
    return joules / seconds if seconds > 0 else None


def _coverage(watch: SensorWindow) -> float | None:
    """Return the share of the window that known spans cover; None if no reading has a span. If there are profiled
    counters, a span is known if one of them is."""
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
    """Memory of the GPUs of one or more engines. used_bytes: in use at most, by anybody; None if no sensor told it, or
    less than weights and KV caches take."""

    engines: tuple[EngineMemory, ...]
    total_bytes: int
    used_bytes: int | None = None

    @property
    def engine_bytes(self) -> int:
        return sum(engine.weight_bytes + engine.kv_bytes for engine in self.engines)

    @property
    def other_bytes(self) -> int | None:
        """In use beyond weights and KV caches: activations, captured graphs, contexts."""
        return None if self.used_bytes is None else self.used_bytes - self.engine_bytes

    @property
    def left_bytes(self) -> int:
        """Free memory, with what the driver keeps; if use is not known, all that weights and KV caches leave."""
        return self.total_bytes - (self.engine_bytes if self.used_bytes is None else self.used_bytes)


def memory_in_use(groups: Iterable[ReplicaGroup]) -> GpuMemory | None:
    """Return the memory of the run that had most of it in use. A run has none where an engine did not tell its weights,
    or a cache or the GPU's memory is not known, and on MIG instances, of which each has a memory of its own. None: no
    run has."""
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
    """Return bytes of the device in use at most, by anybody; None where no sensor tells."""
    seen = (device_figures(m.run).memory_used_bytes for m in measurements)
    return max((used for used in seen if used is not None), default=None)


FASTEST = 0.05  # percentile of all pieces: the fastest alone may be a stroke of luck


def host_speeds(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Return the speed of the host in each window with a host-speed probe, by the measurement's id: 1 where its CPU
    time was that of the fastest pieces in all windows of this host, by the same Python, which sets their speed too."""
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
    """A GPU by its data sheet. words: all of them are in its NVML name. flops_per_s: dense fp16/bf16 tensor with fp32
    accumulation, never the sparse number. fp8_flops_per_s: the same in fp8; None if the GPU has none. gigabytes: of its
    memory; None if rates were given alone."""

    family: str
    words: tuple[str, ...]
    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float | None = None
    gigabytes: int | None = None

    @property
    def ridge(self) -> float:
        """FLOP per byte above which a kernel is bound by arithmetic."""
        return self.flops_per_s / self.bytes_per_s


_DATA_SHEETS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))
GPUS = tuple(Peaks(family, tuple(row.pop("words")), **row) for family, row in _DATA_SHEETS.items())
OTHER_WORDS = {"MIG", "NVL", "3E", "TI", "D", "LAPTOP"}  # a slice of the card, or a variant with other numbers


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one request on a GPU, in tokens and bytes; of one for a result no token is generated. parameters: weights
    that each token is multiplied with: of experts those that it is sent to, and no embeddings that it is only looked up
    in. lm_head: those among them that only a sampled token is, for engines compute no logits of the rest of a prompt.
    weight_bytes: of these weights, with all experts. kv_bytes_per_token: read for each token of the mean context.
    heads_width: query heads x head size x layers; one that slides counts with the share of the context that it sees.
    idle_share: of the weights, experts that one token is not sent to. routed_share: of the experts, those that it is
    sent to. is_causal: no token looks ahead."""

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
        """Mean context while decoding: the prompt and half of the output. If lengths vary it is low, because long
        outputs weigh more, so a bound stays a bound."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def b_half(self) -> float:
        """Sequences whose KV cache weighs as much as the weights; infinity without a cache."""
        each = self.context * self.kv_bytes_per_token
        return self.weight_bytes / each if each else math.inf

    @property
    def prefill_flops(self) -> float:
        """FLOPs of one request's prompt; attention that is causal takes half of the square."""
        layers = 2 * (self.parameters - self.lm_head) * self.prompt_tokens
        return layers + 2 * self.lm_head + (4 - 2 * self.is_causal) * self.heads_width * self.prompt_tokens**2

    @property
    def token_flops(self) -> float:
        """FLOPs of one decoded token, at the mean context."""
        return 2 * self.parameters + 4 * self.heads_width * self.context

    @property
    def intensity(self) -> float:
        """FLOP per byte of decoding as the batch grows without limit, which is b_half + query heads per KV head. Above
        the ridge of a GPU, arithmetic bounds decoding, else memory."""
        each = self.context * self.kv_bytes_per_token
        return self.token_flops / each if each else math.inf

    def weights_read(self, tokens: float) -> float:
        """Return bytes of the weights that a step of so many tokens reads, if each token chooses its experts at
        random."""
        untouched: float = (1 - self.routed_share) ** max(0.0, tokens - 1)
        return self.weight_bytes * (1 - self.idle_share * untouched)


def peaks_of(gpu_name: str | None) -> Peaks | None:
    """Return the data sheet that an NVML name ("NVIDIA H200", "NVIDIA A100-SXM4-40GB") belongs to, None if not
    listed."""
    words = set(re.split(r"[\s\-_]+", (gpu_name or "").upper()))
    others = words & OTHER_WORDS
    return next((gpu for gpu in GPUS if others <= set(gpu.words) <= words), None)


def peaks_of_engine(spec: EngineSpec, environment: Environment) -> Peaks | None:
    """Return the peak rates of all GPUs of an engine, as the user or the data sheet says; None if not listed."""
    peaks = peaks_of(environment.gpu_name)
    if given := environment.gpu_peaks:
        peaks = Peaks("given", (), flops_per_s=given.tflops * 1e12, bytes_per_s=given.gbps * 1e9)
    return None if peaks is None else peaks_for(spec, peaks)


def peaks_for(spec: EngineSpec, peaks: Peaks) -> Peaks:
    """Return the peak rates of all GPUs of an engine, in fp8 if it multiplies weights and activations so and the GPU
    can. peaks: of one GPU."""
    gpus, method = spec.tensor_parallel_size, quantization_of(spec) or ""
    own = spec.model_facts and spec.model_facts.quantization
    in_fp8 = own and own.fp8_inputs if method == "compressed-tensors" else method.startswith("fp8")
    fp8 = peaks.fp8_flops_per_s if in_fp8 else None
    return replace(peaks, bytes_per_s=gpus * peaks.bytes_per_s, flops_per_s=gpus * (fp8 or peaks.flops_per_s))


def work_of_workload(spec: EngineSpec, resolved: Resolved, workload: WorkloadReference) -> Work | None:
    """Return the work of a workload's mean request; None if weights, layers or data type are not known, if prompts may
    come from a cache, or with speculative decoding, whose steps make several tokens of one reading of the weights."""
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
    """Upper bound of the output tokens/s of `batch` running sequences, or of the results/s.

    A result costs its prefill, or its share of the weights that the step reads, whichever is slower. Any other request
    costs its prefill (bound by arithmetic) and a decode step for each token after the first, bound by bytes
    or by arithmetic, whichever is slower. overlap: prefill may hide behind the memory traffic of decoding, as chunked
    prefill tries to; only then can no engine pass the bound. A batch under 1 has the bound of 1.
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
    """Measured output tokens/s over the bound, 0 to 1; None where GPU, model or throughput are unknown."""
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or tokens_per_s is None or batch is None:
        return None
    return tokens_per_s / ceiling_tokens_per_s(work, peaks, batch, overlap=overlap)


Bound = Literal["memory", "compute", "host", "mixed"]

# What a counter reads where its unit can do no more: on an H200, 0.89 in plain copies (4.28 of the 4.8 TB/s of the data
# sheet) and 0.94 in fp16 matrix products of 8192 (0.64 of 0.99 PFLOP/s: the power limit lowers the clock, and the ratio
# is of the cycles that are left). On an H100 0.90 (3.01 of 3.35 TB/s) and 0.94. docs/accuracy.md has more.
REACHABLE_DRAM = 0.89
REACHABLE_TENSOR = 0.94
SATURATED = 0.5  # a unit that is busy for less than half of what it can be leaves most of the step to something else
IDLE = 0.3  # arXiv:2503.08311, figure 7: gaps took 25 % of a step of OPT-1.3B at batch 1, 37 % at 512
EXPLAINED = 0.5  # by shapes alone: more than half of the step must go there at the very least


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean step of a measurement, in shares of its time.

    parts: shares by name, which add up to 1; none where neither data sheet nor counters tell, and where the counters
    saw kernels for less than the data sheet allows. weights, kv: to move the weights, and the keys and values, at the
    data sheet's rate. flops: what arithmetic takes beyond both, at its rate. kernels: further time in which a kernel
    ran. idle: time in which none did. unsplit: kernels and idle together, where no counter tells them apart.
    unexplained: what the larger of bytes and FLOPs does not fill; None if the GPU or the model's shape is unknown.
    bound: by counters, else by shapes; None: neither can tell.
    """

    parts: dict[str, float]
    unexplained: float | None
    bound: Bound | None


def step_time(measurement: Measurement) -> StepTime:
    """Return the mean step of a window.

    Each step reads the weights once and the contexts of the sequences it decodes; the keys and values of prompts are
    written. A prompt's last step yields its first token, so that token is the prefill's.
    """
    run, trace, step_s = measurement.run, window.window_trace(measurement.run), window.step_s(measurement.run)
    idle, bound = idle_share(device_figures(run).engine_active), bound_by_counters(run)
    steps = trace.steps[1:]
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or step_s is None:
        return StepTime({} if step_s is None or idle is None else {"kernels": 1 - idle, "idle": idle}, None, bound)
    rows, begins, ends = zip(run.samples.prompt_tokens, run.samples.first_token_s), trace.ends_s[0], trace.ends_s[-1]
    prompts = [tokens for tokens, first in rows if first is not None and begins < first <= ends]
    decoded = max(0, sum(run.steps.new_tokens[i] for i in steps) - len(prompts))
    kv_tokens = decoded * work.context + sum(prompts)
    prefill = sum(replace(work, prompt_tokens=tokens).prefill_flops for tokens in prompts)
    # Of experts a step with a prompt reads nearly all, and one without it few: no mean step has their mean.
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
    """Return the parts of the mean step, means over repeats; none if a repeat has none, or other ones than the
    others."""
    each = [step_time(m).parts for m in measurements]
    alike = len({tuple(parts) for parts in each}) == 1
    return {name: fmean(parts[name] for parts in each) for name in each[0]} if alike else {}


def idle_share(engine_active: float | None) -> float | None:
    """Return the share of the window in which no kernel ran: the host's part, as counters see it."""
    return None if engine_active is None else max(0.0, 1 - engine_active)


def bound_by_counters(run: Run) -> Bound | None:
    """Return host if the GPU idles for at least IDLE of the time, and longer than its memory is busy. Else memory or
    compute, whichever is nearer to what it can reach, if at least half way there. Else mixed: kernels wait for
    latencies and for each other. None without both counters."""
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
    """Return ln of how near the memory is to its reach over how near the tensor cores are to theirs, by counters; None
    if either was not busy at all."""
    if dram is None or tensor is None or dram <= 0 or tensor <= 0:
        return None
    return math.log(dram / REACHABLE_DRAM) - math.log(tensor / REACHABLE_TENSOR)
