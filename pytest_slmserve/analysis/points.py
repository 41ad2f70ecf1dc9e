"""A point of a sweep: one concurrency, the mean of its valid repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from statistics import mode
from typing import Any, Generic, TypeVar

from pytest_slmserve.analysis.device.gpu_figures import sensed
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.latency import (
    Goodput,
    LatencyFigures,
    Slo,
    checked_slo,
    goodput_of,
    pooled_goodput,
    pooled_latencies,
)
from pytest_slmserve.analysis.metrics.summary import Summary, rates_of_all, summarize
from pytest_slmserve.analysis.metrics.validity import CheckResult, check
from pytest_slmserve.analysis.metrics.window import relative_variance
from pytest_slmserve.analysis.stats.estimates import Interval, factor, grouped, mean_of_known
from pytest_slmserve.analysis.stats.noise import TAIL, Differences, Repeat, Sample
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.loads import ClosedLoop, OpenLoop, WorkloadReference, is_job, is_steady
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, Resolved, hosts_of, measurement_key, series_key
from pytest_slmserve.schema.specs import EngineSpec, short_hash

T = TypeVar("T")
Found = tuple[T, CheckResult]


@dataclass(frozen=True, kw_only=True)  # no slots: it is a base beside that of the figures, which has them
class Repeats(Generic[T]):
    """Repeats of one case: the figures of those that its means are over, and what is wrong with the others.

    Used are the clean ones; where there are none of them, the degraded ones; never an invalid one.
    each: figures of each repeat used, in the order measured. repeats, e2e_repeats: their output tokens/s and mean E2E;
    records: ids of their measurements, which are in `used`. left_out: number of repeats not used; problems: what was
    wrong with them. degraded: what the sensors say against those used. noise: what disturbed the host while those used
    were made.
    """

    repeats: tuple[float, ...] = ()
    e2e_repeats: tuple[float, ...] = ()
    records: tuple[str, ...] = ()
    each: tuple[T, ...] = field(default=(), repr=False)
    used: tuple[ReplicaGroup, ...] = field(default=(), repr=False, compare=False)
    left_out: int = 0
    problems: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """True where a claim may rest on it: one valid repeat is enough; rates and latencies are positive numbers."""
        numbers = (*self.repeats, *self.e2e_repeats)
        return 0 < len(self.repeats) == len(self.e2e_repeats) and all(0 < v < float("inf") for v in numbers)

    def goodput(self, slo: str | Slo) -> Goodput | None:
        """Requests that kept every bound of `slo`, such as "ttft:200ms,tpot:50ms", over all repeats used:
        `.attainment` is their share, `.per_s` their rate. None where there is no valid repeat. Raises BadUsage for what
        is no SLO, and for a bound on ITL."""
        bounds = checked_slo(slo) if isinstance(slo, str) else slo
        each = (pooled_goodput([goodput_of(m, bounds) for m in group], at_once=True) for group in self.used)
        return pooled_goodput(list(each))


@dataclass(frozen=True, kw_only=True)
class Point(Summary, Repeats[Summary]):
    """The figures are means over the repeats used (of percentiles too; `little` is the one farthest from 0), None
    where there is none. batch_repeats: the mean batch of each."""

    concurrency: int
    batch_repeats: tuple[float, ...] = ()


Figure = Callable[[Any], Sequence[float]]  # the values that the repeats of a point have of it


def output_rate(point: Repeats[Any]) -> Sequence[float]:
    return point.repeats


def e2e_s(point: Repeats[Any]) -> Sequence[float]:
    return point.e2e_repeats


def figure_named(name: str) -> Figure:
    """The figure of this name, of the repeats that know it."""
    return lambda point: [value for s in point.each if (value := getattr(s, name)) is not None]


def point_differences(points: Iterable[Repeats[Any]], what: Figure = output_rate) -> Differences:
    """Differences between points in a positive figure; those next to each other are alike."""
    return _differences(tuple(_sample(point, what) for point in points))


@lru_cache(maxsize=64)  # claims read the same points many times, and their common noise takes time to estimate
def _differences(samples: tuple[Sample, ...]) -> Differences:
    return Differences(samples)


def _sample(point: Repeats[Any], what: Figure) -> Sample:
    """Repeats of a point. The course of a window tells the noise of one engine under a staggered load: that of a convoy
    is no noise."""
    values, groups = what(point), point.used
    if len(groups) != len(values):
        return tuple(map(Repeat, values))
    even = all(len(g) == 1 and is_steady(g[0].load) and g[0].load.ramp_up == "staggered" for g in groups)
    rows = zip(values, (group[0] for group in groups), strict=True)
    return tuple(Repeat(v, m.measured_at, m.launch, relative_variance(m.run) if even else None) for v, m in rows)


def ratio(
    of: Repeats[Any],
    to: Repeats[Any],
    among: Sequence[Repeats[Any]] = (),
    what: Figure = output_rate,
    several: int = 1,
) -> Interval:
    """A figure of one point over that of another. among: points whose repeats tell the noise, by default these two.
    several: of how many ratios this one is chosen, so that the interval has to hold for all (Bonferroni)."""
    points = among or (to, of)
    return factor(point_differences(points, what).between(points.index(to), points.index(of), TAIL / several))


def at_common_loads(first: Sequence[Point], second: Sequence[Point]) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """Pairs of points under one load, ascending, and all points to tell the noise of their ratios: like pairs first."""
    by_load = {p.concurrency: p for p in second}
    pairs = [(p, by_load[p.concurrency]) for p in first if p.concurrency in by_load]
    paired = {p.concurrency for p, _ in pairs}
    return pairs, [*(p for pair in pairs for p in pair), *(p for p in (*first, *second) if p.concurrency not in paired)]


def concurrency_of(measurement: Measurement) -> int | None:
    """The knob of a sweep, None for a load that has no steady window (a fixed number of requests), and for an
    engine that shared its device with others, or was measured to be compared with such."""
    return measurement.load.max_concurrency if is_steady(measurement.load) and not measurement.replica else None


def by_series(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Measurements by the curve they lie on, or beside, in the order first met, without jobs, gates and replicas."""
    found: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.alone and m.paired is None and is_steady(m.load):
            found.setdefault(series_key(m.spec, m.workload.hash, m.load, m.environment), []).append(m)
    return found


def points_of(measurements: Iterable[Measurement]) -> tuple[Point, ...]:
    """One point per concurrency, ascending, whatever the order of the measurements. Other loads are left out."""
    by_load = grouped(sorted(measurements, key=lambda m: (m.measured_at, m.launch)), concurrency_of)
    return tuple(point_of(load, by_load[load]) for load in sorted(load for load in by_load if load is not None))


def choose(repeats: Iterable[T], findings: Callable[[T], CheckResult]) -> tuple[list[Found[T]], list[Found[T]]]:
    """Repeats that count, and the others, each with what was found. The clean ones count; where there are none of them,
    the degraded ones; never an invalid one."""
    judged = [(repeat, findings(repeat)) for repeat in repeats]
    valid = [entry for entry in judged if not entry[1].problems]
    used = [entry for entry in valid if not entry[1].degradations] or valid
    return used, [entry for entry in judged if not any(entry is other for other in used)]


def repeat_fields(groups: Iterable[ReplicaGroup], summary: Callable[[ReplicaGroup], Any]) -> dict[str, Any]:
    """Fields of `Repeats` by name. groups: measurements of each repeat. summary: its figures."""
    used, others = choose(groups, lambda group: check(*group))
    each = tuple(summary(group) for group, _ in used)
    return {
        "repeats": tuple(s.output_tokens_per_s for s in each if s.output_tokens_per_s is not None),
        "e2e_repeats": tuple(s.e2e_s for s in each if s.e2e_s is not None),
        "records": tuple(m.id for group, _ in used for m in group),
        "each": each,
        "used": tuple(group for group, _ in used),
        "left_out": len(others),
        "problems": tuple(dict.fromkeys(text for _, found in others for text in found.problems or found.degradations)),
        "degraded": tuple(dict.fromkeys(text for _, found in used for text in found.degradations)),
        "noise": tuple(dict.fromkeys(text for _, found in used for text in found.noise)),
    }


def point_of(concurrency: int, measurements: Sequence[Measurement]) -> Point:
    """Point of repeats of one load, whether they are of a sweep or not."""
    repeats = repeat_fields(((m,) for m in measurements), lambda group: summarize(group[0]))
    batches = tuple(s.batch for s in repeats["each"] if s.batch is not None)
    return Point(concurrency=concurrency, batch_repeats=batches, **repeats, **mean_figures(repeats["each"]))


def on_hosts_of(point: Point, other: Repeats[Any]) -> Point | None:
    """The point of those of its repeats that a host of `other` made, in the same boot; None where there are none. What
    one host serves says nothing of another: of the same kind and with the same GPU some serve twice as much. The point
    itself where a host is not known."""
    mine = list(chain.from_iterable(point.used))
    here, there = hosts_of(mine), hosts_of(chain.from_iterable(other.used))
    if not there or None in here | there or here <= there:
        return point
    kept = [m for m in mine if m.environment.host in there]
    return point_of(point.concurrency, kept) if kept else None


def mean_figures(summaries: Sequence[Summary], kind: type[Summary] = Summary) -> dict[str, Any]:
    """Means of what is a number; of the law's deviations the worst, of the bounds the one found most often, and the
    power limit where there was but one."""
    figures: dict[str, Any] = {
        f.name: mean_of_known(getattr(s, f.name) for s in summaries) for f in fields(kind) if f.name != "bound"
    }
    figures["little"] = max((s.little for s in summaries if s.little is not None), key=abs, default=None)
    bounds = [s.bound for s in summaries if s.bound is not None]
    limits = {s.power_limit_w for s in summaries if s.power_limit_w is not None}
    return figures | {
        "bound": mode(bounds) if bounds else None,
        "power_limit_w": limits.pop() if len(limits) == 1 else None,
    }


CONTINUOUS = "continuous"  # how vLLM batches: a request joins at the next step, and leaves when it has ended

AT_ONCE_S = 0.05  # a client needs a moment to send hundreds of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary(Summary):
    """Figures of one job, its rates over the whole of it. batch: at a rate, where the engine idles at times, the mean
    number of admitted requests.

    rate: at which its requests arrived, in fact; None where they came all at once. preemptions: over the whole job.
    waste: share of what its batches computed for sequences that had ended, or for padding; None where batches are made
    anew at every step.
    """

    rate: float | None = None
    seconds: float | None = None
    preemptions: float | None = None
    waste: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobPoint(JobSummary, Repeats[JobSummary]):
    """One job, and the means over its repeats used."""

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
        """Is there room for all of its requests at once?"""
        return self.capacity is not None and self.capacity >= min(self.requests, self.spec.max_num_seqs)

    @property
    def batching(self) -> str:
        """Batching mode of its engine: "none", "static", "dynamic", or "continuous"."""
        return str(dict(self.spec.extra).get("batching", CONTINUOUS))


def job_points(measurements: Iterable[Measurement]) -> tuple[JobPoint, ...]:
    """One for each case, in the order first requested; other loads are left out."""
    jobs = (m for m in measurements if is_job(m.load) and m.alone and m.paired is None)
    cases = grouped(jobs, lambda m: measurement_key(m.spec, m.workload.hash, m.load, m.environment))
    return tuple(map(job_point, cases.values()))


def job_point(measurements: Sequence[Measurement]) -> JobPoint:
    """Point of repeats of one job."""
    repeats, first = repeat_fields(((m,) for m in measurements), lambda group: job_summary(group[0])), measurements[0]
    assert is_job(first.load)
    return JobPoint(
        spec=first.spec,
        resolved=repeats["used"][0][0].resolved if repeats["used"] else first.resolved,
        environment=first.environment,
        workload=first.workload,
        load=first.load,
        **repeats,
        **mean_figures(repeats["each"], JobSummary),
    )


def summary_of(measurement: Measurement) -> Summary:
    """Summary of a measurement: of a job over all of it, of any other load over its window."""
    return job_summary(measurement) if is_job(measurement.load) else summarize(measurement)


def job_summary(measurement: Measurement) -> JobSummary:
    """All figures of one job."""
    run, plain = measurement.run, summarize(measurement)
    began, ended = run.window_s
    seconds, last = ended - began, max(run.samples.sent_s, default=0.0)
    rate = len(run.samples) / last if last > AT_ONCE_S else None
    requests_per_s, tokens_per_s = rates_of_all(run)
    figures = {name: getattr(plain, name) for name in Summary.__dataclass_fields__}
    figures |= {
        "batch": plain.batch if rate is None else window.requests_in_flight(run) or plain.batch,
        "requests_per_s": requests_per_s,
        "output_tokens_per_s": tokens_per_s,
        **sensed(JobSummary, run, tokens_per_s),
    }
    batched = "batching" in dict(measurement.spec.extra)
    return JobSummary(
        **figures,
        rate=rate,
        seconds=seconds,
        preemptions=sum(run.steps.preempted) if len(run.steps) else None,
        waste=_waste(measurement) if batched else None,
    )


def _waste(measurement: Measurement) -> float | None:
    """Share of the tokens that batches computed, prompts and outputs, that nobody requested; 0 where all were and
    more. None where none was computed."""
    steps, samples = measurement.run.steps, measurement.run.samples
    computed = sum(steps.prompt_tokens) + sum(n for n in steps.running if n is not None)
    wanted = sum(samples.prompt_tokens) + sum(steps.new_tokens)
    return max(0.0, 1 - wanted / computed) if computed else None


def limit_groups(jobs: Iterable[JobPoint]) -> list[list[JobPoint]]:
    """Jobs whose requests come all at once and that differ in `max_num_seqs` alone, in groups, each ascending."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.load.at_once]
    alike = grouped(served, lambda p: (*p.asked, p.environment.key, replace(p.spec, max_num_seqs=1).key))
    return [sorted(group, key=lambda p: p.spec.max_num_seqs) for group in alike.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSummary(LatencyFigures):
    """One run of several engines, over the span that their windows have in common, or over whole convoys of each where
    requests start together; None is "not measured".

    output_tokens_per_s: of all. each_tokens_per_s: of each replica there. sum_tokens_per_s: of each over its own
    window, added up (the paper's way). Latencies: of all requests that ended in the span, pooled; ITL of each engine's
    own window. largest_e2e_s: the largest of the replicas' means (the paper's way). The rest is the device's, for all
    engines.
    """

    output_tokens_per_s: float | None = None
    each_tokens_per_s: tuple[float, ...] = ()
    sum_tokens_per_s: float | None = None
    largest_e2e_s: float | None = None
    step_s: float | None = None
    gpu_util: float | None = None
    engine_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    power_w: float | None = None
    power_capped: float | None = None
    power_imbalance: float | None = None
    own_cores: float | None = None
    energy_per_token_j: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaPoint(ReplicaSummary, Repeats[ReplicaSummary]):
    """One set of engines under one load, and the means over its repeats used.

    models: of each replica. families: of their engines (`EngineSpec.family`). concurrency: requests in flight in all.
    environment: where. workload: the hash of the replicas' requests, None where they differ. ramp_up: of their loads.
    tensor_parallel_size: GPUs of each engine.
    """

    models: tuple[str, ...]
    families: frozenset[str]
    sharing: Sharing
    concurrency: int
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
        """The one model of all replicas; None where there are several."""
        return self.models[0] if len(set(self.models)) == 1 else None

    @property
    def valid(self) -> bool:
        """True where a claim on their throughput may rest on it."""
        return bool(self.repeats) and all(0 < rate < float("inf") for rate in self.repeats)


def engines(models: Sequence[str]) -> str:
    """ "2 x opt-125m", or "opt-125m + 2 x opt-1.3b" """
    return " + ".join(f"{n} x {model}" if n > 1 else model for model, n in Counter(models).items())


def replica_groups(measurements: Iterable[Measurement]) -> list[ReplicaGroup]:
    """Repeats of several engines among these, each with its replicas in order; none where a record is lost."""
    found = []
    parts = ((m.replica, m) for m in measurements if m.replica and not m.alone)
    for group in grouped(parts, lambda part: part[0].group).values():
        members = {replica.index: m for replica, m in group}
        if len(members) == group[0][0].count:
            found.append(tuple(members[index] for index in sorted(members)))
    return found


def all_groups(measurements: Sequence[Measurement]) -> list[ReplicaGroup]:
    """Repeats of one engine alone, each a group of one, and then those of several engines."""
    return [*((m,) for m in measurements if m.alone), *replica_groups(measurements)]


def shared_points(measurements: Iterable[Measurement]) -> tuple[ReplicaPoint, ...]:
    """One point for each set of engines, way of sharing and load, in the order first measured."""
    runs = sorted(replica_groups(measurements), key=lambda members: members[0].measured_at)
    return tuple(map(shared_point, grouped(runs, group_key).values()))


def group_key(group: ReplicaGroup) -> str:
    """Key of the case that a repeat belongs to; see `plan.cases.Case.key`."""
    first = group[0]
    if first.alone:
        return first.key
    assert first.replica
    return short_hash([first.replica.set, first.environment.key])


def summarize_shared(members: ReplicaGroup) -> ReplicaSummary:
    """All figures of one run of several engines."""
    runs = window.common_span(members)
    rates = [window.output_tokens_per_s(run) for run in runs]
    own = [window.output_tokens_per_s(m.run) for m in members]
    means = [alone for run in runs if (alone := pooled_latencies([run]).e2e_s.mean) is not None]
    watched, total = next((run for run in runs if run.telemetry), runs[0]), _sum(rates)
    return ReplicaSummary(
        output_tokens_per_s=total,
        each_tokens_per_s=tuple(rate for rate in rates if rate is not None),
        sum_tokens_per_s=_sum(own),
        largest_e2e_s=max(means, default=None),
        step_s=mean_of_known(window.step_s(run) for run in runs),
        **pooled_latencies(runs).figures,
        **sensed(ReplicaSummary, watched, total),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """Sum of the values; None where one is not known: the rest is not all."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def shared_point(runs: Sequence[ReplicaGroup]) -> ReplicaPoint:
    """Point of one or more runs of one set of engines, wherever they were made."""
    repeats, first = repeat_fields(runs, summarize_shared), runs[0]
    part = first[0].replica
    assert part is not None
    hashes = {m.workload.hash for m in first}
    loads = tuple(m.load.max_concurrency or 0 for m in first)
    return ReplicaPoint(
        models=tuple(short_name(m.spec.model) for m in first),
        families=frozenset(m.spec.family for m in first),
        sharing=part.sharing,
        concurrency=sum(loads),
        loads=loads,
        pinned=part.pinned,
        thread_percentage=part.thread_percentage,
        environment=first[0].environment,
        workload=hashes.pop() if len(hashes) == 1 else None,
        ramp_up=first[0].load.ramp_up if isinstance(first[0].load, ClosedLoop) else "burst",
        tensor_parallel_size=first[0].spec.tensor_parallel_size,
        **repeats,
        **_means(repeats["each"]),
    )


def _means(each: Sequence[ReplicaSummary]) -> dict[str, Any]:
    names = [f.name for f in fields(ReplicaSummary) if f.name != "each_tokens_per_s"]
    by_replica = [mean_of_known(rates) for rates in zip(*(s.each_tokens_per_s for s in each))]
    return {name: mean_of_known(getattr(s, name) for s in each) for name in names} | {
        "each_tokens_per_s": tuple(rate for rate in by_replica if rate is not None)
    }


def figure_ratio(alone: Point, shared: ReplicaPoint, name: str, several: int = 1) -> Interval | None:
    """Factor of a figure ("power_w", or "largest_e2e_s" against the mean E2E of one engine alone); None where one of
    them is not known, as one that reads 0. several: see `ratio`."""

    def values(point: Repeats[Any]) -> list[float]:
        return [value for s in point.each if (value := getattr(s, name, s.e2e_s))]

    return ratio(shared, alone, what=values, several=several) if values(alone) and values(shared) else None


def system_throughput(shared: ReplicaSummary, alone: Sequence[float]) -> float | None:
    """Sum of each engine's throughput over what it has alone under its own load: 1 is what taking turns would give
    (Eyerman and Eeckhout, IEEE Micro 2008). None where a replica's is not known."""
    if len(shared.each_tokens_per_s) != len(alone) or not all(alone):
        return None
    return sum(rate / own for rate, own in zip(shared.each_tokens_per_s, alone))
