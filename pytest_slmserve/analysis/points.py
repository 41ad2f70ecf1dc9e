"""Points: the figures of a load of one engine, of a job, or of several engines together, over the valid repeats."""

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

FoundRepeat = tuple[ReplicaGroup, CheckResult]  # a repeat, and what was found wrong with it
CONTINUOUS = "continuous"  # how vLLM batches: a request joins at the next step, and leaves when it has ended
AT_ONCE_S = 0.05  # a client needs a moment to send hundreds of requests
# Variance of the logarithm of the tokens of a busy second of a window of 1 s, over its seconds. In the committed
# archives windows of 2.0, 2.5, 3.4 and 4.9 s of one load and launch scatter by 2.4, 1.5, 1.2 and 0.8 %, parts of 1, 2
# and 4 s of longer windows by 2.0, 1.3 and 0.6 %.
COUNTED = 0.0004
# Figures that no result has: it comes at once, so its only latency is E2E, and nothing is decoded.
OF_TOKENS = re.compile(r"(ttft|tpot|itl)_.*|normalized_latency_s|little|decode_(dram|tensor)|saturation_gap")
# Figures of the device that replicas share.
OF_THE_DEVICE = (
    *("gpu_util", "engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active"),
    *("power_w", "power_capped", "power_imbalance", "own_cores", "energy_per_token_j"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(gpu_figures.SensorFigures):
    """Figures over the steady window; None is "not measured". Latencies are in seconds, of the requests by which this
    kind of load is judged (`window`); tpot: per output token after the first; itl: gaps between tokens.

    batch: sequences that a step really held. kv_usage: largest share of the KV blocks in use. roofline_fraction:
    output tokens/s over what the GPU's data sheet allows at this batch. little: deviation of Little's law, relative.
    tokens_per_busy_s: output tokens over the time in which a kernel ran; None without profiling counters, and of
    engines whose kernels overlap (MPS). energy_per_token_j: over the time between readings of the energy counter.
    unexplained, bound: see `step_time`. acceptance_length: tokens that a step gave a sequence with a draft.
    decode_dram, decode_tensor: shares of the time in which those were active while no prompt was processed, and
    saturation_gap is of them.
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
    """Figures of one repeat of a job, over the whole of it. batch: at a rate the mean number of admitted requests,
    because the engine idles at times. rate: at which requests arrived, in fact; None if all came at once. waste: share
    of what its batches computed for sequences that had ended, or for padding; None if batches are made anew at every
    step."""

    rate: float | None = None
    seconds: float | None = None
    preemptions: float | None = None
    waste: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSummary(Summary):
    """Figures of one repeat of several engines, over the span that their windows have in common, or over whole convoys
    of each if requests start together. Figures of sensors are the device's.

    output_tokens_per_s: of all engines. each_tokens_per_s: of each engine in the span. sum_tokens_per_s: of each engine
    over its own window, added up (the paper's way). Latencies: of all requests that ended in the span, pooled; ITL of
    each engine's own window. largest_e2e_s: the largest of the engines' means (the paper's way).
    """

    each_tokens_per_s: tuple[float, ...] = ()
    sum_tokens_per_s: float | None = None
    largest_e2e_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point(Summary):
    """One case: its figures are means over the repeats used (of percentiles too), None if there is none. Used are the
    clean repeats; if there is none, the degraded ones; never an invalid one.

    concurrency: concurrent requests, in all engines. each: figures of each repeat used, in the order measured. repeats,
    e2e_repeats, batch_repeats: output tokens/s, mean E2E and mean batch of each. used: measurements of each repeat, one
    for each engine; records: their ids. left_out: number of repeats not used; problems: what was wrong with them.
    degraded: what the sensors say against those used. noise: what disturbed the host while those used were made. told:
    takes the verdicts that a test asks of it.
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
        """True if a claim may rest on it. One valid repeat is enough, and rates and latencies are positive numbers."""
        numbers = (*self.repeats, *self.e2e_repeats)
        return 0 < len(self.repeats) == len(self.e2e_repeats) and all(0 < v < float("inf") for v in numbers)

    def goodput(self, slo: str | Slo) -> Goodput | None:
        """Requests that kept every limit of `slo`, such as "ttft:200ms,tpot:50ms", over all repeats used: their share
        (`.attainment`) and rate (`.per_s`). None without a valid repeat. Raises BadUsage for what is no SLO, and for a
        limit on ITL."""
        limits = window.parse_slo(slo) if isinstance(slo, str) else slo
        return window.goodput_of(limits, *self.used) if self.used else None

    def meets(self, slo: str | Slo, share: float = objectives.SHARE) -> Verdict:
        """Return the verdict on whether a share of the requests keeps every limit of `slo`, such as
        "ttft:200ms,tpot:50ms", over all repeats used, with the limit that is broken, and by how much. `assert` it: it
        is inconclusive if noise, or the number of requests, leaves it open. Raises BadUsage for what is no SLO, for a
        limit on ITL, and for a share that is not between 0 and 1."""
        limits = objectives.slo_of(slo, share)
        model = short_name(self.used[0][0].spec.model) if self.used else "nothing measured"
        verdict = objectives.keeps(limits, share, f"{model} at concurrency {self.concurrency}", self.used, self.records)
        if self.told:
            self.told(verdict)
        return verdict

    def on_hosts_of(self, other: Point) -> Point | None:
        """Return the point of those repeats that a host of `other` made, in the same boot; None if there is none. The
        point itself if a host is not known. Of hosts of one kind with the same GPU some serve twice as much."""
        mine = list(chain.from_iterable(self.used))
        here, there = records.hosts_of(mine), records.hosts_of(chain.from_iterable(other.used))
        if not there or None in here | there or here <= there:
            return self
        kept = [m for m in mine if m.environment.host in there]
        return point_of([(m,) for m in kept]) if kept else None


@dataclass(frozen=True, kw_only=True)
class JobPoint(Point, JobSummary):
    """One job: a number of requests that are served to the end."""

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
        """Equal for jobs of the same requests, which come alike."""
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
        """Longest requests that fit into the KV cache at once."""
        return kv_capacity(self.spec, self.workload.longest, self.resolved)

    @property
    def fits(self) -> bool:
        """Whether there is room for all of its requests at once."""
        return self.capacity is not None and self.capacity >= min(self.requests, self.spec.max_num_seqs)

    @property
    def slots(self) -> int:
        """Adapters that its engine has on the device at once."""
        found = self.spec.arguments.get("max_loras", 0)
        return found if isinstance(found, int) else 0

    @property
    def batching(self) -> str:
        """Batching mode of its engine, "none", "static", "dynamic", or "continuous"."""
        return str(self.spec.arguments.get("batching", CONTINUOUS))


@dataclass(frozen=True, kw_only=True)
class ReplicaPoint(Point, ReplicaSummary):
    """Several engines under one load. families: of the engines (`EngineSpec.family`). workload: the hash of the
    engines' requests, None if they differ. loads: concurrent requests in each engine. tensor_parallel_size: GPUs of
    each engine."""

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
        """The one model of all engines; None if there are several."""
        return self.models[0] if len(set(self.models)) == 1 else None

    @property
    def valid(self) -> bool:
        return bool(self.repeats) and all(0 < rate < float("inf") for rate in self.repeats)


def summary_of(*group: Measurement) -> Summary:
    """Return the figures of one repeat. A sum over several engines is None if one of them is not known."""
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
    """Return all figures of one measurement. requests/s is tokens/s over the mean output tokens of a request, None if
    that is 0: as requested, or, if all requests have one output length and some ended early, the lower mean of the
    finished ones. Of a load with a number of requests both are over all of its time."""
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
        # Of the tokens that batches computed, those that nobody requested; a batch may compute no more than these.
        computed = sum(steps.prompt_tokens) + sum(n for n in steps.running if n is not None)
        wanted = sum(run.samples.prompt_tokens) + sum(steps.new_tokens)
        waste = max(0.0, 1 - wanted / computed) if computed else None
    preemptions = sum(steps.preempted) if len(steps) else None
    return JobSummary(**figures, rate=rate, seconds=seconds, preemptions=preemptions, waste=waste)


def sensed(runs: Sequence[Run], tokens_per_s: float | None, is_whole: bool = False) -> dict[str, Any]:
    """Return the figures of the first run's sensors by name, and of the engines of all runs the tokens of a second in
    which a kernel ran, and the energy of a token. is_whole: of a whole job, or of whole convoys."""
    seen = gpu_figures.device_figures(runs[0])
    return {f.name: getattr(seen, f.name) for f in fields(gpu_figures.SensorFigures)} | {
        "tokens_per_busy_s": tokens_per_s / seen.engine_active if tokens_per_s and seen.engine_active else None,
        "energy_per_token_j": gpu_figures.energy_per_token_j(runs, tokens_per_s, is_whole),
    }


def choose(groups: Iterable[ReplicaGroup]) -> tuple[list[FoundRepeat], list[FoundRepeat]]:
    """Return the repeats that count, and the others: the clean ones count; if there is none, the degraded ones."""
    judged = [(group, check(*group)) for group in groups]
    any_clean = any(not found.problems and not found.degradations for _, found in judged)
    counts = [not found.problems and not (any_clean and found.degradations) for _, found in judged]
    return list(compress(judged, counts)), [one for one, counted in zip(judged, counts) if not counted]


def point_of(groups: Sequence[ReplicaGroup]) -> Point:
    """Return the point of the repeats of one case, valid or not, wherever they were measured: a `JobPoint` of a job, a
    `ReplicaPoint` of several engines.

    A figure is the mean of what is a number. Of the deviations from Little's law it is the one farthest from 0, of the
    limiting resources the most frequent one; the power limit is known if there was but one.
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
    """Return the points of this kind, one for each case, in the order first met."""
    found = map(point_of, grouped(groups, group_key).values())
    return tuple(point for point in found if isinstance(point, kind))


def points_of(measurements: Iterable[Measurement]) -> tuple[Point, ...]:
    """Return one point per concurrency, ascending, whatever the order of the measurements. Other loads are left out."""
    by_load = grouped(sorted(measurements, key=lambda m: (m.measured_at, m.launch)), concurrency_of)
    return tuple(point_of([(m,) for m in by_load[load]]) for load in sorted(filter(None, by_load)))


def job_points(measurements: Iterable[Measurement]) -> tuple[JobPoint, ...]:
    """Return one point for each job, in the order first requested; other loads are left out."""
    return case_points(JobPoint, ((m,) for m in measurements if is_job(m.load) and m.alone and m.paired is None))


def shared_points(measurements: Iterable[Measurement]) -> tuple[ReplicaPoint, ...]:
    """Return one point for each set of engines, way of sharing and load, in the order first measured."""
    groups = all_groups(m for m in measurements if not m.alone)
    return case_points(ReplicaPoint, sorted(groups, key=lambda members: members[0].measured_at))


def concurrency_of(measurement: Measurement) -> int | None:
    """Return the concurrency of a point of a sweep; None for a load without a steady window, and for an engine that
    shared its device, or was measured to be compared with such."""
    return measurement.load.max_concurrency if is_steady(measurement.load) and not measurement.replica else None


def by_series(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Return measurements by their curve, in the order first met, without jobs, gates and replicas."""
    found: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.alone and m.paired is None and is_steady(m.load):
            key = records.series_key(m.spec, m.workload.hash, m.load, m.environment)
            found.setdefault(key, []).append(m)
    return found


def all_groups(measurements: Iterable[Measurement]) -> list[ReplicaGroup]:
    """Return the repeats: of one engine alone, each a group of one, then of several engines, each with its engines in
    order. A repeat that lacks a record is left out."""
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
    """Return the key of the case that a repeat belongs to; see `plan.cases.Case.key`."""
    first = group[0]
    if first.alone:
        return first.key
    assert first.replica
    return short_hash([first.replica.set, first.environment.key])


def limit_groups(jobs: Iterable[JobPoint]) -> list[list[JobPoint]]:
    """Return jobs whose requests come all at once and that differ in `max_num_seqs` only, each group ascending."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.load.at_once]
    alike = grouped(served, lambda p: (*p.asked, p.environment.key, replace(p.spec, max_num_seqs=1).key))
    return [sorted(group, key=lambda p: p.spec.max_num_seqs) for group in alike.values()]


def engines(models: Sequence[str]) -> str:
    """Return a set of engines in words: "2 x opt-125m", or "opt-125m + 2 x opt-1.3b"."""
    return " + ".join(f"{n} x {model}" if n > 1 else model for model, n in Counter(models).items())


Figure = Callable[[Any], Sequence[float]]  # the values that the repeats of a point have of it
output_rate: Figure = attrgetter("repeats")
e2e_s: Figure = attrgetter("e2e_repeats")


def busy_rate(point: Point) -> list[float]:
    """Return the tokens per busy second of each repeat used; none if one repeat does not tell."""
    known = [value for s in point.each if (value := s.tokens_per_busy_s)]
    return known if len(known) == len(point.each) else []


def figure_named(name: str, least: float = -math.inf) -> Figure:
    """Return a figure by its name: its finite values above `least`; others count as not measured."""
    return lambda point: [v for s in point.each if (v := getattr(s, name)) is not None and least < v < math.inf]


# Claims read the same points many times, and their common noise takes time to estimate.
_differences = lru_cache(maxsize=64)(Differences)


def busy_repeat(value: float, m: Measurement) -> Repeat:
    """Return the tokens of a busy second of a measurement, with the noise that the length of its window tells."""
    begin, end = m.run.window_s
    return Repeat(value, launch=m.launch, within=COUNTED / (end - begin))


def point_differences(points: Iterable[Point], what: Figure = output_rate) -> Differences:
    """Return the differences between points in a positive figure; neighbouring points are most alike. The course of a
    window tells the noise of one engine under a staggered load: that of a convoy is no noise. The tokens of a busy
    second follow neither the course of a window nor that of the host, so they are not paired in time; of a longer
    window they are known better."""
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
    """Return a figure of one point over that of another.

    Args:
        among: Points whose repeats tell the noise. Defaults to these two.
        several: Number of ratios of which this one is chosen, so that the interval has to hold for all (Bonferroni).
    """
    points = among or (to, of)
    return factor(point_differences(points, what).between(points.index(to), points.index(of), TAIL / several))


def figure_ratio(alone: Point, shared: ReplicaPoint, name: str, several: int = 1) -> Interval | None:
    """Return the factor of a figure of replicas over that of one engine, of "largest_e2e_s" over its mean E2E. It is
    None if one of them is not known, or reads 0. several: see `ratio`."""

    def values(point: Point) -> list[float]:
        return [value for s in point.each if (value := getattr(s, name, s.e2e_s))]

    return ratio(shared, alone, what=values, several=several) if values(alone) and values(shared) else None


def at_common_loads(first: Sequence[Point], second: Sequence[Point]) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """Return pairs of points under one load, ascending, and all points to tell the noise of their ratios."""
    by_load = {p.concurrency: p for p in second}
    pairs = [(p, by_load[p.concurrency]) for p in first if p.concurrency in by_load]
    paired = {p.concurrency for p, _ in pairs}
    return pairs, [*(p for pair in pairs for p in pair), *(p for p in (*first, *second) if p.concurrency not in paired)]
