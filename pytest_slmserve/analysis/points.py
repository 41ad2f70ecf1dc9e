"""Points: figures of a load of one engine, a fixed-size workload (job), or several engines, over valid repeats."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain, compress
from operator import attrgetter
from statistics import fmean, mode
from typing import Any, TypeVar

from pytest_slmserve.analysis import objectives
from pytest_slmserve.analysis.estimates import TAIL, Differences, Interval, Repeat, factor, grouped, mean_of_known
from pytest_slmserve.analysis.metrics import gpu_figures, window
from pytest_slmserve.analysis.metrics.validity import CheckResult, check
from pytest_slmserve.analysis.metrics.window import Goodput, Slo
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema import records, sensors
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, ReplicaGroup, Resolved, Run
from pytest_slmserve.schema.specs import (
    EngineSpec,
    OpenLoop,
    WorkloadReference,
    is_burst,
    is_job,
    is_steady,
    short_hash,
)

FoundRepeat = tuple[ReplicaGroup, CheckResult]  # a repeat and the findings on it
CONTINUOUS = "continuous"  # vLLM's batching: a request joins at the next step, and leaves when it has ended
AT_ONCE_S = 0.05  # time in which a client can send hundreds of requests
# Variance of the logarithm of tokens per busy second in a window of 1 s; longer windows have less. In the committed
# results files, windows of 2.0, 2.5, 3.4 and 4.9 s of one load and launch have standard deviations of 2.4, 1.5, 1.2 and
# 0.8%. Parts of 1, 2 and 4 s of longer windows have 2.0, 1.3 and 0.6%.
COUNTED = 0.0004
# Figures of generated text. An embedding or a score arrives at once, so its only latency is E2E.
OF_TOKENS = re.compile(r"(ttft|tpot|itl)_.*|normalized_latency_s|little|decode_(dram|tensor)|saturation_gap")
# Figures of the device, which replicas share.
OF_THE_DEVICE = (
    *("gpu_util", "engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active"),
    *("power_w", "power_capped", "power_imbalance", "own_cores", "energy_per_token_j"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(gpu_figures.SensorFigures):
    """Figures over the steady window; None if not measured. `docs/metrics-and-terms.md` defines most of them.

    Attributes:
        little: relative deviation from Little's law.
        tokens_per_busy_s: None without profiling counters, or if kernels of several engines overlap (MPS).
        unexplained, bound: see `StepTime`.
        decode_dram, decode_tensor: activity while no prompt was processed, which `saturation_gap` compares.
    """

    e2e_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None
    normalized_latency_s: float | None = None
    ttft_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    itl_s: float | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    batch: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    tokens_per_busy_s: float | None = None
    step_s: float | None = None
    kv_usage: float | None = None
    acceptance_length: float | None = None
    roofline_fraction: float | None = None
    little: float | None = None
    energy_per_token_j: float | None = None
    unexplained: float | None = None
    decode_dram: float | None = None
    decode_tensor: float | None = None
    saturation_gap: float | None = None
    bound: gpu_figures.Bound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary(Summary):
    """Figures of one repeat of a fixed-size workload, over all of its time.

    Attributes:
        batch: mean number of admitted requests if they arrive at a rate, because the engine idles at times.
        rate: measured arrival rate; None if all requests arrived at once.
        waste: share of the computed tokens that are padding or of ended sequences; None with continuous batching.
    """

    rate: float | None = None
    seconds: float | None = None
    preemptions: float | None = None
    waste: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSummary(Summary):
    """Figures of several engines over the common span of their windows, or over lockstep cycles after a burst.

    Figures of sensors are those of the device. Latencies are pooled over all requests.

    Attributes:
        output_tokens_per_s: of all engines.
        sum_tokens_per_s: sum of the rates over each engine's own window (the paper's way).
        largest_e2e_s: largest mean E2E of an engine (the paper's way).
    """

    each_tokens_per_s: tuple[float, ...] = ()
    sum_tokens_per_s: float | None = None
    largest_e2e_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point(Summary):
    """Figures of one load: means over the repeats used (of percentiles too), or None if unknown.

    The clean repeats are used or, without any, the degraded ones, but never an invalid one.

    Attributes:
        concurrency: concurrent requests in all engines.
        repeats, e2e_repeats, batch_repeats: output tokens/s, mean E2E and mean batch of each repeat used.
        records: ids of the measurements used.
        each: figures of each repeat used.
        used: measurements of each repeat used, one per engine.
        left_out: number of other repeats.
        problems: why these are not used.
        degraded, noise: findings on the repeats used, by the sensors and on the host.
        told: receives the verdicts of `meets`.
    """

    concurrency: int = 0
    repeats: tuple[float, ...] = ()
    e2e_repeats: tuple[float, ...] = ()
    batch_repeats: tuple[float, ...] = ()
    records: tuple[str, ...] = ()
    each: tuple[Summary, ...] = field(default=(), repr=False)
    used: tuple[ReplicaGroup, ...] = field(default=(), repr=False, compare=False)
    left_out: int = 0
    problems: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    told: Callable[[Verdict], None] | None = field(default=None, repr=False, compare=False)

    @property
    def valid(self) -> bool:
        """Whether a claim may use the point, because it has a repeat, and all rates and latencies are positive."""
        numbers = (*self.repeats, *self.e2e_repeats)
        return 0 < len(self.repeats) == len(self.e2e_repeats) and all(0 < v < float("inf") for v in numbers)

    def goodput(self, slo: str | Slo) -> Goodput | None:
        """Return the share and the rate of the requests that met an SLO, or None without a valid repeat.

        Raises:
            BadUsage: if `slo` is not an SLO such as "ttft:200ms,tpot:50ms", or limits ITL.
        """
        limits = window.parse_slo(slo) if isinstance(slo, str) else slo
        return window.goodput_of(limits, *self.used) if self.used else None

    def meets(self, slo: str | Slo, share: float = objectives.SHARE) -> Verdict:
        """Return the verdict, to be asserted, on whether a share of the requests meets an SLO.

        Raises:
            BadUsage: if `slo` is not an SLO such as "ttft:200ms,tpot:50ms" or limits ITL, or `share` is not between 0
                and 1.
        """
        limits = objectives.slo_of(slo, share)
        model = short_name(self.used[0][0].spec.model) if self.used else "nothing measured"
        verdict = objectives.keeps(limits, share, f"{model} at concurrency {self.concurrency}", self.used, self.records)
        if self.told:
            self.told(verdict)
        return verdict

    def on_hosts_of(self, other: Point) -> Point | None:
        """Return the point of the repeats from hosts (and boots) of `other`, or None without any.

        If a host is unknown, it is the point itself. Hosts of one kind with the same GPU can differ by a factor of two.
        """
        mine = list(chain.from_iterable(self.used))
        here, there = records.hosts_of(mine), records.hosts_of(chain.from_iterable(other.used))
        if not there or None in here | there or here <= there:
            return self
        kept = [m for m in mine if m.environment.host in there]
        return point_of([(m,) for m in kept]) if kept else None


@dataclass(frozen=True, kw_only=True)
class JobPoint(Point, JobSummary):
    """Fixed-size workload: a number of requests that are served to the end."""

    spec: EngineSpec
    resolved: Resolved
    environment: Environment
    workload: WorkloadReference
    load: OpenLoop

    @property
    def model(self) -> str:
        return short_name(self.spec.model)

    @property
    def asked(self) -> tuple[str, str]:
        """Key that is equal for jobs with the same requests and arrivals."""
        return self.workload.hash, repr(self.load)

    @property
    def requests(self) -> int:
        return self.load.requests or 0

    @property
    def output_tokens(self) -> float:
        return self.workload.mean_output_tokens

    @property
    def kv_blocks(self) -> int | None:
        return self.resolved.kv_blocks

    @property
    def capacity(self) -> int | None:
        """Number of the longest requests that fit into the KV cache together."""
        return kv_capacity(self.spec, self.workload.longest, self.resolved)

    @property
    def fits(self) -> bool:
        """Whether the KV cache has room for all requests that run together."""
        return self.capacity is not None and self.capacity >= min(self.requests, self.spec.max_num_seqs)

    @property
    def slots(self) -> int:
        """Number of adapters that fit on the device together (`max_loras`)."""
        found = self.spec.arguments.get("max_loras", 0)
        return found if isinstance(found, int) else 0

    @property
    def batching(self) -> str:
        """Batching mode, which is "none", "static", "dynamic" or "continuous"."""
        return str(self.spec.arguments.get("batching", CONTINUOUS))


@dataclass(frozen=True, kw_only=True)
class ReplicaPoint(Point, ReplicaSummary):
    """Several engines under one load.

    Attributes:
        families: of the engines (`EngineSpec.family`).
        loads: concurrency of each engine.
        workload: hash of the requests; None if engines differ.
        tensor_parallel_size: GPUs of each engine.
    """

    each: tuple[ReplicaSummary, ...] = field(default=(), repr=False)
    models: tuple[str, ...]
    families: frozenset[str]
    sharing: Sharing
    loads: tuple[int, ...]
    pinned: bool = False
    thread_percentage: int | None = None
    environment: Environment
    workload: str | None = None
    ramp_up: str = "staggered"
    tensor_parallel_size: int = 1

    @property
    def count(self) -> int:
        return len(self.models)

    @property
    def model(self) -> str | None:
        """Model of all engines, or None if they differ."""
        return self.models[0] if len(set(self.models)) == 1 else None

    @property
    def valid(self) -> bool:
        return bool(self.repeats) and all(0 < rate < float("inf") for rate in self.repeats)


def summary_of(*group: Measurement) -> Summary:
    """Return the figures of one repeat. Sums are None if the rate of one engine is unknown."""
    if len(group) == 1:
        return summarize(group[0])
    runs = window.common_span(group)
    rates = [window.output_tokens_per_s(run) for run in runs]
    own = [window.output_tokens_per_s(m.run) for m in group]
    total, by_itself = (None if None in each else sum(filter(None, each)) for each in (rates, own))
    means = (window.latencies([run]).e2e_s.mean for run in runs)
    in_convoys = any(is_burst(m.load) for m in group)
    in_turns = all(m.replica and m.replica.sharing == "time-slicing" for m in group)
    device = sensed(sorted(runs, key=lambda run: run.telemetry is None), total, in_convoys)
    return ReplicaSummary(
        output_tokens_per_s=total,
        each_tokens_per_s=tuple(rate for rate in rates if rate is not None),
        sum_tokens_per_s=by_itself,
        largest_e2e_s=max((mean for mean in means if mean is not None), default=None),
        step_s=mean_of_known(window.step_s(run) for run in runs),
        **window.latencies(runs).figures,
        **{name: device[name] for name in OF_THE_DEVICE},
        tokens_per_busy_s=device["tokens_per_busy_s"] if in_turns else None,
    )


def summarize(measurement: Measurement) -> Summary:
    """Return the figures of one measurement.

    requests/s is tokens/s divided by the requested output tokens or, if some requests of one length ended early, by the
    mean of the finished ones. With a fixed number of requests, both rates are over the whole time.
    """
    run, load, workload = measurement.run, measurement.load, measurement.workload
    tokens_per_s, batch = window.output_tokens_per_s(run), window.mean_batch(run)
    each, finished = workload.mean_output_tokens, window.finished_output_tokens(run)
    if finished and (mean := fmean(finished)) < (workload.spec.output_tokens or 0):
        each = mean
    requests_per_s = tokens_per_s / each if tokens_per_s is not None and each else None
    at_window, seconds = tokens_per_s, run.window_s[1] - run.window_s[0]
    if load.requests is not None:
        requests_per_s = len(finished) / seconds if seconds > 0 else None
        tokens_per_s = sum(finished) / seconds if seconds > 0 else None
    decoding = gpu_figures.decode_window(run)
    dram, tensor = (decoding.mean(n) if decoding else None for n in (sensors.DRAM_ACTIVE, sensors.TENSOR_ACTIVE))
    step = gpu_figures.step_time(measurement)
    figures: dict[str, Any] = {
        "batch": batch,
        "requests_per_s": requests_per_s,
        "output_tokens_per_s": tokens_per_s,
        "step_s": window.step_s(run),
        "kv_usage": window.kv_usage(run),
        "acceptance_length": window.acceptance_length(run),
        "roofline_fraction": gpu_figures.roofline_fraction(
            measurement, at_window if is_job(load) else tokens_per_s, batch
        ),
        "little": window.littles_law(run),
        **window.latencies_of(measurement).figures,
        "unexplained": step.unexplained,
        "decode_dram": dram,
        "decode_tensor": tensor,
        "saturation_gap": gpu_figures.saturation_gap(dram, tensor),
        "bound": step.bound,
        **sensed([run], tokens_per_s, is_job(load) or is_burst(load)),
    }
    if workload.kind != "generate":
        figures |= {name: None for name in figures if OF_TOKENS.fullmatch(name)}
    if not is_job(load):
        return Summary(**figures)
    last, steps = max(run.samples.sent_s, default=0.0), run.steps
    rate = len(run.samples) / last if last > AT_ONCE_S else None
    figures["batch"] = batch if rate is None else window.requests_in_flight(run) or batch
    waste = None
    if "batching" in measurement.spec.arguments:
        # Share of the computed tokens that nobody requested. Batches may compute only the requested ones, or fewer.
        computed = sum(steps.prompt_tokens) + sum(n for n in steps.running if n is not None)
        wanted = sum(run.samples.prompt_tokens) + sum(steps.new_tokens)
        waste = max(0.0, 1 - wanted / computed) if computed else None
    preemptions = sum(steps.preempted) if len(steps) else None
    return JobSummary(**figures, rate=rate, seconds=seconds, preemptions=preemptions, waste=waste)


def sensed(runs: Sequence[Run], tokens_per_s: float | None, is_whole: bool = False) -> dict[str, Any]:
    """Return sensor figures of the first run by name, and tokens per busy second and energy per token of all runs."""
    seen = gpu_figures.device_figures(runs[0])
    return {f.name: getattr(seen, f.name) for f in fields(gpu_figures.SensorFigures)} | {
        "tokens_per_busy_s": tokens_per_s / seen.engine_active if tokens_per_s and seen.engine_active else None,
        "energy_per_token_j": gpu_figures.energy_per_token_j(runs, tokens_per_s, is_whole),
    }


def choose(groups: Iterable[ReplicaGroup]) -> tuple[list[FoundRepeat], list[FoundRepeat]]:
    """Return the repeats to use (the clean ones or, without any, the degraded ones), and the others."""
    judged = [(group, check(*group)) for group in groups]
    any_clean = any(not found.problems and not found.degradations for _, found in judged)
    counts = [not found.problems and not (any_clean and found.degradations) for _, found in judged]
    return list(compress(judged, counts)), [one for one, counted in zip(judged, counts) if not counted]


def point_of(groups: Sequence[ReplicaGroup]) -> Point:
    """Return the point of the repeats of one case: a `JobPoint` of a job, a `ReplicaPoint` of several engines.

    Figures are means, except the largest deviation from Little's law and the most frequent limiting resource. A power
    limit that changed is None.
    """
    used, others = choose(groups)
    each = tuple(summary_of(*group) for group, _ in used)

    def known(name: str) -> list[Any]:
        return [value for one in each if (value := getattr(one, name)) is not None]

    names = {f.name for summary in (Summary, *map(type, each)) for f in fields(summary)}
    figures: dict[str, Any] = {name: mean_of_known(known(name)) for name in names - {"bound", "each_tokens_per_s"}}
    figures["little"] = max(known("little"), key=abs, default=None)
    figures["bound"] = mode(known("bound")) if known("bound") else None
    limits = set(known("power_limit_w"))
    figures["power_limit_w"] = limits.pop() if len(limits) == 1 else None
    if "each_tokens_per_s" in names:
        by_engine = (mean_of_known(rates) for rates in zip(*known("each_tokens_per_s")))
        figures["each_tokens_per_s"] = tuple(rate for rate in by_engine if rate is not None)
    members, first = groups[0], groups[0][0]
    kind: type[Point] = Point
    if len(members) > 1 and (part := first.replica):
        kind, hashes = ReplicaPoint, {m.workload.hash for m in members}
        loads = tuple(m.load.max_concurrency or 0 for m in members)
        figures |= {
            "models": tuple(short_name(m.spec.model) for m in members),
            "families": frozenset(m.spec.family for m in members),
            "sharing": part.sharing,
            "concurrency": sum(loads),
            "loads": loads,
            "pinned": part.pinned,
            "thread_percentage": part.thread_percentage,
            "environment": first.environment,
            "workload": hashes.pop() if len(hashes) == 1 else None,
            "ramp_up": "burst" if isinstance(first.load, OpenLoop) else first.load.ramp_up,
            "tensor_parallel_size": first.spec.tensor_parallel_size,
        }
    elif is_job(first.load):
        kind, resolved = JobPoint, used[0][0][0].resolved if used else first.resolved
        figures |= {"spec": first.spec, "resolved": resolved, "environment": first.environment}
        figures |= {"workload": first.workload, "load": first.load}
    else:
        figures["concurrency"] = first.load.max_concurrency or 0
    return kind(
        repeats=tuple(known("output_tokens_per_s")),
        e2e_repeats=tuple(known("e2e_s")),
        batch_repeats=tuple(known("batch")),
        records=tuple(m.id for group, _ in used for m in group),
        each=each,
        used=tuple(group for group, _ in used),
        left_out=len(others),
        problems=tuple(dict.fromkeys(text for _, found in others for text in found.problems or found.degradations)),
        degraded=tuple(dict.fromkeys(text for _, found in used for text in found.degradations)),
        noise=tuple(dict.fromkeys(text for _, found in used for text in found.noise)),
        **figures,
    )


P = TypeVar("P", bound=Point)


def case_points(kind: type[P], groups: Iterable[ReplicaGroup]) -> tuple[P, ...]:
    """Return the points of this kind, one per case, in the order first met."""
    found = map(point_of, grouped(groups, group_key).values())
    return tuple(point for point in found if isinstance(point, kind))


def points_of(measurements: Iterable[Measurement]) -> tuple[Point, ...]:
    """Return one point per concurrency of a sweep, ascending."""
    by_load = grouped(sorted(measurements, key=lambda m: (m.measured_at, m.launch)), concurrency_of)
    return tuple(point_of([(m,) for m in by_load[load]]) for load in sorted(filter(None, by_load)))


def job_points(measurements: Iterable[Measurement]) -> tuple[JobPoint, ...]:
    """Return one point per job, in the order first met."""
    return case_points(JobPoint, ((m,) for m in measurements if is_job(m.load) and m.alone and m.paired is None))


def shared_points(measurements: Iterable[Measurement]) -> tuple[ReplicaPoint, ...]:
    """Return one point per set of engines, way of sharing and load, in the order first measured."""
    groups = all_groups(m for m in measurements if not m.alone)
    return case_points(ReplicaPoint, sorted(groups, key=lambda members: members[0].measured_at))


def concurrency_of(measurement: Measurement) -> int | None:
    """Return the concurrency of a measurement in a sweep; None for other loads, replicas and their reference."""
    return measurement.load.max_concurrency if is_steady(measurement.load) and not measurement.replica else None


def by_series(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Return the measurements of each curve, in the order first met, without jobs, gates and replicas."""
    found: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.alone and m.paired is None and is_steady(m.load):
            key = records.series_key(m.spec, m.workload.hash, m.load, m.environment)
            found.setdefault(key, []).append(m)
    return found


def all_groups(measurements: Iterable[Measurement]) -> list[ReplicaGroup]:
    """Return the complete repeats of single engines, then of several engines."""
    found: list[ReplicaGroup] = []
    parts: dict[tuple[str, int], dict[int, Measurement]] = {}
    for m in measurements:
        if m.replica is None or m.alone:
            found.append((m,))
        else:
            parts.setdefault((m.replica.group, m.replica.count), {})[m.replica.index] = m
    whole = (members for (_, count), members in parts.items() if len(members) == count)
    return [*found, *(tuple(members[index] for index in sorted(members)) for members in whole)]


def group_key(group: ReplicaGroup) -> str:
    """Return the key of the case to which a repeat belongs (`plan.cases.Case.key`)."""
    first = group[0]
    if first.alone:
        return first.key
    assert first.replica
    return short_hash([first.replica.set, first.environment.key])


def limit_groups(jobs: Iterable[JobPoint]) -> list[list[JobPoint]]:
    """Return groups of jobs that arrive at once and differ only in `max_num_seqs`, each ascending."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.load.at_once]
    alike = grouped(served, lambda p: (*p.asked, p.environment.key, replace(p.spec, max_num_seqs=1).key))
    return [sorted(group, key=lambda p: p.spec.max_num_seqs) for group in alike.values()]


def engines(models: Sequence[str]) -> str:
    """Return text such as "2 x opt-125m" or "opt-125m + 2 x opt-1.3b"."""
    return " + ".join(f"{n} x {model}" if n > 1 else model for model, n in Counter(models).items())


Figure = Callable[[Any], Sequence[float]]  # function that returns the values of the repeats of a point
output_rate: Figure = attrgetter("repeats")
e2e_s: Figure = attrgetter("e2e_repeats")


def busy_rate(point: Point) -> list[float]:
    """Return the tokens per busy second of each repeat used, or no values if one is unknown."""
    known = [value for s in point.each if (value := s.tokens_per_busy_s)]
    return known if len(known) == len(point.each) else []


def figure_named(name: str, least: float = -math.inf) -> Figure:
    """Return the function that reads this figure's finite values above `least`."""
    return lambda point: [v for s in point.each if (v := getattr(s, name)) is not None and least < v < math.inf]


# Cached because claims read the same points many times, and their common noise takes time to estimate.
_differences = lru_cache(maxsize=64)(Differences)


def busy_repeat(value: float, m: Measurement) -> Repeat:
    """Return tokens per busy second as a repeat, whose noise follows from the length of its window."""
    begin, end = m.run.window_s
    return Repeat(value, launch=m.launch, within=COUNTED / (end - begin))


def point_differences(points: Iterable[Point], what: Figure = output_rate) -> Differences:
    """Return the differences between points in a positive figure. Neighboring points must be similar.

    The course of a window shows noise only with one engine and a staggered load. Tokens per busy second follow neither
    that course nor the host's, so they are not paired in time.
    """
    samples: list[tuple[Repeat, ...]] = []
    for point in points:
        values, groups = what(point), point.used
        if len(groups) != len(values):
            samples.append(tuple(map(Repeat, values)))
            continue
        if what is busy_rate:
            samples.append(tuple(busy_repeat(v, m) for v, (m, *_) in zip(values, groups, strict=True)))
            continue
        even = all(len(g) == 1 and is_steady(g[0].load) and g[0].load.ramp_up == "staggered" for g in groups)
        told = [window.relative_variance(m.run) if even else None for m, *_ in groups]
        rows = zip(values, groups, told, strict=True)
        samples.append(tuple(Repeat(v, m.measured_at, m.launch, within) for v, (m, *_), within in rows))
    return _differences(tuple(samples))


def ratio(of: Point, to: Point, among: Sequence[Point] = (), what: Figure = output_rate, several: int = 1) -> Interval:
    """Return the ratio of two points in a figure.

    Args:
        among: points whose repeats show the noise; by default these two.
        several: number of ratios from which it is chosen (Bonferroni).
    """
    points = among or (to, of)
    return factor(point_differences(points, what).between(points.index(to), points.index(of), TAIL / several))


def figure_ratio(alone: Point, shared: ReplicaPoint, name: str, several: int = 1) -> Interval | None:
    """Return a figure of replicas divided by that of one engine, or None if a side has no positive value.

    The divisor of "largest_e2e_s" is the mean E2E.
    """

    def values(point: Point) -> list[float]:
        return [value for s in point.each if (value := getattr(s, name, s.e2e_s))]

    return ratio(shared, alone, what=values, several=several) if values(alone) and values(shared) else None


def at_common_loads(first: Sequence[Point], second: Sequence[Point]) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """Return pairs of points with the same load, and all points as `among` for their ratios."""
    by_load = {p.concurrency: p for p in second}
    pairs = [(p, by_load[p.concurrency]) for p in first if p.concurrency in by_load]
    paired = {p.concurrency for p, _ in pairs}
    return pairs, [*(p for pair in pairs for p in pair), *(p for p in (*first, *second) if p.concurrency not in paired)]
