"""Several engines on one device: what they serve together, and how that compares with one engine alone.

Equal means equal: the same requests in flight in all, the same share of the memory in all, the same workload. Two ways
of counting are told. Ours: tokens of all over the span that all windows have in common, latencies of all requests
pooled. arXiv:2404.03353's: the sum of each replica's own throughput, and the largest of their mean latencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pytest_slmserve.analysis.device.gpu_figures import sensed
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.latency import LatencyFigures, pooled_latencies
from pytest_slmserve.analysis.points.sweep_points import Point, Repeats, ratio, repeat_fields
from pytest_slmserve.analysis.stats.estimates import Interval, mean_of_known
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.literals import Sharing
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement, ReplicaGroup
from pytest_slmserve.schema.specs import short_hash


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
