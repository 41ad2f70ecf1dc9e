"""Values as JSON and CSV.

JSON keys are names of fields, numbers are not rounded, and null means unknown or not finite. CSV has a line for each
object, and names nested values `object.key`.
"""

import csv
import enum
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.points import JobPoint, Point, Summary, engines, job_points, points_of
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import load_facts


def as_json(value: object) -> str:
    """Return the value as indented JSON."""
    return json.dumps(plain(value), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value in the types of JSON: dataclasses as objects, enums by value."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case enum.Enum():
            return value.value
        case Path():
            return str(value)
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}
        case frozenset() | set():  # because the order of a set varies between processes
            return sorted(plain(each) for each in value)
        case Iterable():
            return [plain(each) for each in value]
    return plain(facts(value))


def facts(value: object, *names: str) -> dict[str, Any]:
    """Return the attributes `names`, or all fields of a dataclass. If the value is None, each is None."""
    if not names:
        assert is_dataclass(value), f"{type(value).__name__} is neither a dataclass nor a type of JSON"
        names = tuple(field.name for field in fields(value))
    return {name: None if value is None else getattr(value, name) for name in names}


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with lists joined by "; " and an apostrophe before texts that look like formulas."""
    flat = [dict(_cells(plain(row))) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # first characters of a cell that a spreadsheet would compute


def _cells(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _cells(value, f"{above}{name}.")
        else:
            text, is_text = _cell(value), isinstance(value, str | list)
            yield f"{above}{name}", f"'{text}" if is_text and text.startswith(FORMULA) else text


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case list() if not any(isinstance(item, list | dict) for item in value):
            return "; ".join(map(_cell, value))
        case str():
            return value
    return json.dumps(value)


WORKLOAD = ("hash", "requests", "mean_prompt_tokens", "mean_output_tokens", "longest", "source")
ENGINE = ("tensor_parallel_size", "load_format", "dtype", "max_num_seqs", "max_num_batched_tokens")
BULK = ("each", "used", "told", "spec", "resolved", "environment", "workload", "load", "concurrency")


def case_facts(case: Measurement | JobPoint) -> dict[str, Any]:
    """Return engine, load, workload and environment. Limits of an endpoint's engine are None."""
    ours = None if case.spec.interface == "endpoint" else case.spec
    return {
        **facts(case.spec, "model", "interface", "url"),
        **facts(ours, *ENGINE),
        "extra": ours.arguments if ours else {},
        "load": load_facts(case.load),
        "workload": facts(case.workload, *WORKLOAD),
        "environment": facts(case.environment),
    }


def point_facts(found: Findings) -> Iterator[dict[str, Any]]:
    """Yield the facts of each point of sweeps, replicas and fixed-size workloads.

    Points of the kind "alone" are single engines that replicas are compared with.
    """
    for curve, label in found.labelled:
        for kind, point in (*(("point", p) for p in curve.points), *(("alone", p) for p in curve.alone)):
            load = point.concurrency
            first = next((m for m in curve.measurements if m.load.max_concurrency == load), curve.first)
            what = case_facts(first) if first else {}
            yield {"kind": kind, "subject": label, **what, "concurrency": load, **_figures(point, found.slo)}
    for several in found.shared:
        one, *others = [case_facts(m) for m in several.used[0]] if several.used else [{}]
        what = {name: value for name, value in one.items() if all(other[name] == value for other in others)}
        what |= {"environment": facts(several.environment), "concurrency": several.concurrency}
        title = f"{engines(several.models)} by {several.sharing}"
        yield {"kind": "replicas", "subject": title, **what, **_figures(several, found.slo)}
    for job in found.jobs:
        yield {"kind": "job", "subject": job.model, **case_facts(job), **_figures(job, found.slo)}


def sweep_facts(found: Findings) -> Iterator[dict[str, Any]]:
    for curve, label in found.labelled:
        yield {
            "subject": label,
            "plateau": curve.plateau(found.flat),
            "pareto": [point.concurrency for point in curve.pareto_front()],
            **facts(curve, "kv_capacity", "cut", "missing", "unneeded"),
        }


def _figures(point: Point | JobPoint, slo: Slo | None) -> dict[str, Any]:
    bulk = BULK if type(point) is Point else {*BULK, "batch_repeats"}
    names = [field.name for field in fields(point) if field.name not in bulk]
    figures = {"valid": point.valid, **dict.fromkeys(field.name for field in fields(Summary)), **facts(point, *names)}
    return figures | {"goodput": point.goodput(slo) if slo else None}


def benchmark_facts(measurements: Sequence[Measurement]) -> tuple[list[float], dict[str, Any]]:
    """Return the rounds and the extra info of a point for pytest-benchmark.

    A round is the seconds per request of one valid repeat.
    """
    points: Sequence[Point | JobPoint] = points_of(measurements) or job_points(measurements)
    if not points:
        return [], {}
    point, first = points[0], measurements[0]
    info: dict[str, Any] = {name: value for name, value in facts(point).items() if isinstance(value, int | float)}
    if isinstance(point, JobPoint):
        del info["concurrency"]
    info |= {"records": list(point.records), "workload": first.workload.hash, "interface": first.spec.interface}
    return [first.workload.mean_output_tokens / rate for each in points for rate in each.repeats], info
