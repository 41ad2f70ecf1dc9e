"""Facts of points, jobs and loads for JSON and CSV: one thing has one key, the name of its field, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from pytest_slmserve.analysis.metrics.goodput import Goodput, Slo
from pytest_slmserve.analysis.metrics.summary import Summary
from pytest_slmserve.analysis.points.job_points import JobPoint, job_points
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, engines
from pytest_slmserve.analysis.points.sweep_points import Point, points_of
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.labels import labels
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import Load, load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.stored_names import from_stored
from pytest_slmserve.schema.workloads import WorkloadReference

WORKLOAD = ("hash", "requests", "mean_prompt_tokens", "mean_output_tokens", "longest", "source")
ENGINE = ("tensor_parallel_size", "load_format", "dtype", "max_num_seqs", "max_num_batched_tokens")
BULK = ("each", "used", "spec", "resolved", "environment", "workload", "load", "concurrency")


def case_facts(
    spec: EngineSpec, load: Load, workload: WorkloadReference | None, environment: Environment | None
) -> dict[str, Any]:
    """Engine, load, requests and environment of a measurement. Limits of an endpoint's engine are not known."""
    ours = None if spec.interface == "endpoint" else spec
    return {
        **facts(spec, "model", "interface", "url"),
        **facts(ours, *ENGINE),
        "extra": dict(ours.extra) if ours else {},
        "load": from_stored(load_facts(load)),
        "workload": facts(workload, *WORKLOAD),
        "environment": facts(environment, *(field.name for field in fields(Environment))),
    }


def point_facts(
    curves: Sequence[Curve], shared: Sequence[ReplicaPoint], jobs: Sequence[JobPoint], slo: Slo | None = None
) -> Iterator[dict[str, Any]]:
    """Facts of each point of the sweeps, of one engine that others are compared with, of replicas, and of each job.
    kind: "point", "alone", "replicas" or "job". goodput: null without an SLO."""
    for curve, label in zip(curves, labels(curves), strict=True):
        for kind, point in (*(("point", p) for p in curve.points), *(("alone", p) for p in curve.alone)):
            load = point.concurrency
            first = next((m for m in curve.measurements if m.load.max_concurrency == load), curve.first)
            assert first
            what = case_facts(first.spec, first.load, first.workload, first.environment)
            yield {"kind": kind, "subject": label, **what, "concurrency": load, **_figures(point, slo)}
    for several in shared:
        yield _of_replicas(several, slo)
    for job in jobs:
        what = case_facts(job.spec, job.load, job.workload, job.environment)
        yield {"kind": "job", "subject": job.model, **what, **_figures(job, slo)}


def sweep_facts(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """Facts of each sweep as a whole."""
    for curve, label in zip(curves, labels(curves), strict=True):
        yield {
            "subject": label,
            "plateau": curve.plateau(),
            "pareto": [point.concurrency for point in curve.pareto_front()],
            **facts(curve, "kv_capacity", "cut", "missing", "unneeded"),
        }


def _of_replicas(point: ReplicaPoint, slo: Slo | None) -> dict[str, Any]:
    """Facts of several engines together; of the engine and its load they have those that all of them share."""
    group = point.used[0] if point.used else ()
    each = [case_facts(m.spec, m.load, m.workload, m.environment) for m in group]
    what = {name: value for name, value in each[0].items() if all(one[name] == value for one in each)} if each else {}
    where = facts(point.environment)
    title = f"{engines(point.models)} by {point.sharing}"
    named = {"kind": "replicas", "subject": title, **what, "environment": where, "concurrency": point.concurrency}
    return named | _figures(point, slo)


def _figures(point: Point | JobPoint | ReplicaPoint, slo: Slo | None) -> dict[str, Any]:
    """All figures of a point, by name; those that no such point has are null."""
    names = [field.name for field in fields(point) if field.name not in BULK]
    told = {"valid": point.valid, **dict.fromkeys(field.name for field in fields(Summary)), **facts(point, *names)}
    return told | {"goodput": goodput_facts(point.goodput(slo) if slo else None)}


def goodput_facts(found: Goodput | None) -> dict[str, Any] | None:
    return None if found is None else {**facts(found), "by_slo": dict(found.by_slo)}


def seconds_per_request(measurements: Sequence[Measurement]) -> list[float]:
    """Rounds of pytest-benchmark, one per valid repeat: the window's seconds over the requests it completed."""
    output = measurements[0].workload.mean_output_tokens
    return [output / rate for point in _points(measurements) for rate in point.repeats]


def extra_info(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Facts for pytest-benchmark: every plain number of the point, the ids of its records, and what identifies it."""
    point, first = _points(measurements)[0], measurements[0]
    numbers = {f.name: getattr(point, f.name) for f in fields(point)}
    plain = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    return {**plain, "records": list(point.records), "workload": first.workload.hash, "interface": first.spec.interface}


def _points(measurements: Sequence[Measurement]) -> Sequence[Point | JobPoint]:
    return points_of(measurements) or job_points(measurements)
