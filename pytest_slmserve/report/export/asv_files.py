"""The files of asv (airspeed velocity), as release 0.6 reads them: results and benchmarks 2, machine 1.

A result file is of one release on one machine. In it a benchmark has a row, whose entries are lists over the product of
the benchmark's parameters; here they are taken apart, so that new values can join old ones. Beside asv's own entries,
which have no place for it, the file tells of which launch each sample is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pytest_slmserve.report.export.asv import METRICS, SERVING, START, STARTING, BenchmarkHost, Value, rounded
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage

VERSION = "1"  # of every benchmark: asv passes over results of another
PER_VALUE = (
    *("result", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25", "stats_q_75"),
    *("stats_number", "stats_repeat", "samples"),
)
LAUNCHES = "launches"  # our own entry of a file: by benchmark, of each value its parameters, launches and soundness
SAME = 1e-4  # relative: a sample of a launch without a name is of the one that has nearly the same
COLUMNS = ("result", "params", "version", "started_at", "duration", *PER_VALUE[1:])
UNITS = {metric.name: metric.unit for metric in METRICS}
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError)  # plain values of any kind may stand in a file

File = dict[str, Any]
Facts = dict[str, Any]  # of one value: its entry of each column of PER_VALUE, its launches, and whether it is degraded
Axes = list[list[str]]  # values of each parameter, as asv writes them


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of a release, as the ledger stores it."""

    hash: str
    authored_s: int


@dataclass(slots=True)
class ResultRow:
    """A benchmark in a result file."""

    facts: dict[tuple[str, ...], Facts]
    started_at: int = 0  # ms


def path_of(place: BenchmarkHost, commit: Commit) -> str:
    return f"{place.machine}/{commit.hash[:8]}-{place.env_name}.json"


def result_file(place: BenchmarkHost, commit: Commit, found: Iterable[Value], old: File | None = None) -> File:
    """The result file that asv would have written for these values. old: the existing file; its launches that were not
    measured now are kept.

    Raises BadUsage where asv_runner is not installed, and one of UNUSABLE where `old` is no such file.
    """
    rows = {} if old is None else rows_of(old)
    for value in found:
        row = rows.setdefault(value.benchmark, ResultRow({}))
        row.facts[value.parameters] = _joined(row.facts.get(value.parameters), value)
        row.started_at = max(row.started_at, round(1000 * datetime.fromisoformat(value.measured_at).timestamp()))
    return {
        "version": 2,
        "commit_hash": commit.hash,
        "env_name": place.env_name,
        "date": 1000 * commit.authored_s,
        "params": {"machine": place.machine, **dict(place.curve)},
        "python": "",
        "requirements": {"vllm": place.release, "torch": place.torch},
        "env_vars": {},
        "result_columns": list(COLUMNS),
        "results": {name: _packed(row) for name, row in sorted(rows.items())},
        "durations": {},
        LAUNCHES: {name: _named(row) for name, row in sorted(rows.items())},
    }


def _joined(old: Facts | None, value: Value) -> Facts:
    """Facts of a value and the launches that the file has of it; what is degraded gives way to what is sound."""
    launched = dict(zip(value.launches, value.samples, strict=True))
    if old and value.degraded and not old.get("degraded"):
        return old
    if old and value.degraded == bool(old.get("degraded")):
        launched = _of_launches(old, launched) | launched
    return {**facts_of(tuple(launched.values())), "launches": list(launched), "degraded": value.degraded}


def _of_launches(old: Facts, new: Mapping[str, float]) -> dict[str, float]:
    """Samples of a file by their launch. Files of earlier days name none: such a sample is of the launch in `new` that
    has it, or of one that is not known."""
    found = {}
    samples = old.get("samples") or ()
    for number, (name, sample) in enumerate(zip(old.get("launches") or [None] * len(samples), samples, strict=True)):
        same = (launch for launch, value in new.items() if math.isclose(value, sample, rel_tol=SAME))
        found[name or next(same, f"unknown {number}")] = sample
    return found


def _named(row: ResultRow) -> list[tuple[tuple[str, ...], list[str], bool]]:
    known = [(key, facts) for key, facts in sorted(row.facts.items()) if facts.get("launches")]
    return [(key, facts["launches"], facts["degraded"]) for key, facts in known]


def facts_of(samples: Sequence[float]) -> Facts:
    """A value, the median, with asv's statistics. Raises BadUsage where asv_runner is not installed."""
    result, stats = statistics()(list(samples), 1)
    return {
        "result": rounded(result),
        "samples": list(samples),
        **{f"stats_{name}": _short(v) for name, v in stats.items()},
    }


def statistics() -> Callable[[list[float], int], tuple[float, Facts]]:
    """asv's own statistics of the samples of one value. Raises BadUsage where asv_runner is not installed."""
    try:
        from asv_runner.statistics import compute_stats
    except ImportError:
        raise BadUsage("asv's statistics need asv_runner", "pip install 'pytest-slmserve[asv]'") from None
    found: Callable[[list[float], int], tuple[float, Facts]] = compute_stats
    return found


def _short(value: float) -> float:
    """A float rounded to five significant digits, as asv writes statistics."""
    return float(f"{value:.4e}") if isinstance(value, float) else value


def rows_of(file: File) -> dict[str, ResultRow]:
    """Rows of a result file, by benchmark; asv leaves out the columns at the end that have nothing."""
    rows = {}
    for name, row in file["results"].items():
        columns = dict(zip(file["result_columns"], row))
        lists = {column: columns[column] for column in PER_VALUE if columns.get(column) is not None}
        keys = itertools.product(*columns["params"])
        facts = {key: {column: found[i] for column, found in lists.items()} for i, key in enumerate(keys)}
        known = {key: each for key, each in facts.items() if each.get("result") is not None}
        for key, launches, degraded in file.get(LAUNCHES, {}).get(name, ()):
            known[tuple(key)] |= {"launches": launches, "degraded": degraded}
        rows[name] = ResultRow(known, columns.get("started_at") or 0)
    return rows


def _packed(row: ResultRow) -> list[Any]:
    axes = _axes(row.facts)
    each = [row.facts.get(key, {}) for key in itertools.product(*axes)]
    lists = [[facts.get(column) for facts in each] for column in PER_VALUE]
    return [lists[0], axes, VERSION, row.started_at or None, None, *lists[1:]]


def _axes(keys: Iterable[tuple[str, ...]]) -> Axes:
    return [sorted(set(values), key=_by_number) for values in zip(*keys)]


def _by_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def benchmarks_file(results: Iterable[File], old: File | None = None) -> File:
    """The index of benchmarks in all result files: asv shows no parameter that it does not list. old: the existing
    file; its benchmarks that are not ours are kept."""
    keys: dict[str, set[tuple[str, ...]]] = {}
    for file in results:
        for name, row in rows_of(file).items():
            keys.setdefault(name, set()).update(row.facts)
    ours = {name: _benchmark(name, _axes(found)) for name, found in sorted(keys.items()) if _is_ours(name) and found}
    others = {name: found for name, found in (old or {}).items() if name != "version" and not _is_ours(name)}
    return {"version": 2, **others, **ours}


def _is_ours(name: str) -> bool:
    return name == START or name.rpartition(".")[2] in UNITS


def _benchmark(name: str, axes: Axes) -> File:
    return {
        "code": "",
        "name": name,
        "param_names": list(STARTING if name == START else SERVING),
        "params": axes,
        "timeout": 0,
        "type": "track",
        "unit": "seconds" if name == START else UNITS[name.rpartition(".")[2]],
        "version": VERSION,
    }


def machine_file(name: str, environment: Environment) -> File:
    """The properties of a machine as asv stores them; a value of None is left out."""
    known = {"cpu": environment.cpu, "gpu": environment.gpu_name, "num_cpu": environment.cores}
    return {"machine": name, "version": 1, **{key: str(value) for key, value in known.items() if value is not None}}
