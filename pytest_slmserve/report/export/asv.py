"""Measurements as result files of asv (airspeed velocity), whose page then shows one release of vLLM after the other,
as its release 0.6 reads them: results and benchmarks 2, machine 1.

asv knows one direction, lower is better, so every quantity is a cost. A value is of one release on one machine. Its
samples are the launches, each the mean of its repeats: repeats within a launch agree with each other more than with the
next one.

A result file is of one release on one machine. In it a benchmark has a row, whose entries are lists over the product of
the benchmark's parameters; here they are taken apart, so that new values can join old ones. Beside asv's own entries,
which have no place for it, the file tells of which launch each sample is.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.metrics.summary import Summary, summarize
from pytest_slmserve.analysis.metrics.validity import CheckResult, check
from pytest_slmserve.analysis.points import choose, concurrency_of
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec, short_hash

DIGITS = 6
UNKNOWN = "unknown"
# The model is a parameter. How much memory the KV cache gets follows from the card, and does not move the speed of a
# measurement that stands: one in which requests were thrown out, or had to wait, does not.
NO_SETTINGS = ("model", "kv_cache_bytes", "gpu_memory_utilization")


@dataclass(frozen=True, slots=True)
class AsvMetric:
    """A cost. of: a thousandth of it, None where it was not measured."""

    name: str
    unit: str
    of: Callable[[Summary], float | None]


METRICS = (
    AsvMetric(
        "seconds_per_1000_requests", "s/1000 requests", lambda s: 1 / rate if (rate := s.requests_per_s) else None
    ),
    AsvMetric("ms_per_output_token", "ms/token", lambda s: s.tpot_s),
    AsvMetric("joules_per_1000_output_tokens", "J/1000 tokens", lambda s: s.energy_per_token_j),
)
START = "start.seconds_to_start"
SERVING, STARTING = ("model", "concurrency"), ("model",)  # names of the parameters
VERSION = "1"  # of every benchmark: asv passes over results of another
PER_VALUE = (
    *("result", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25", "stats_q_75"),
    *("stats_number", "stats_repeat", "samples"),
)
LAUNCHES = "launches"  # our own entry of a file: by benchmark, of each value its parameters, launches and soundness
SAME = 1e-4  # relative: a sample of a launch without a name is of the one that has nearly the same
COLUMNS = ("result", "params", "version", "started_at", "duration", *PER_VALUE[1:])
UNITS = {START: "seconds", **{metric.name: metric.unit for metric in METRICS}}
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError)  # plain values of any kind may stand in a file

File = dict[str, Any]
Facts = dict[str, Any]  # of one value: its entry of each column of PER_VALUE, its launches, and whether it is degraded
Axes = list[list[str]]  # values of each parameter, as asv writes them


@dataclass(frozen=True, slots=True)
class BenchmarkHost:
    """Identity of one result file: machine, release and the parameters of its curve. curve: values that place results
    of one machine on one curve of the page; a new driver begins another. It excludes torch, because a release of vLLM
    brings its own."""

    machine: str
    release: str
    curve: tuple[tuple[str, str], ...]
    torch: str

    @property
    def env_name(self) -> str:
        return f"vllm-{short_hash([self.curve, self.torch])[:8]}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A valid measurement, and what its sensors say against it."""

    measurement: Measurement
    summary: Summary
    degraded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a benchmark. parameters: as asv writes them. samples: one per launch. degraded: all of them."""

    benchmark: str
    parameters: tuple[str, ...]
    samples: tuple[float, ...]
    measured_at: str
    launches: tuple[str, ...]
    degraded: bool = False


def steady_measurements(measurements: Iterable[Measurement]) -> list[Seen]:
    """The valid measurements from sweeps of one engine, in the order measured."""
    found = []
    for m in sorted(measurements, key=lambda m: (m.measured_at, m.launch)):
        if concurrency_of(m) is not None:
            judged = check(m)
            found += [] if judged.problems else [Seen(m, summarize(m), judged.degradations)]
    return found


def values(found: Iterable[Seen], machine: str | None = None) -> dict[BenchmarkHost, list[Value]]:
    """Benchmark values of the measurements, grouped by the result file that they go to.

    machine: its name; by default that of the GPU, or of the CPU. Raises BadUsage where one name is for several kinds,
    or a record is of no release.
    """
    found = list(found)
    kinds = {kind(each.measurement.environment) for each in found}
    if machine is not None and len(kinds) > 1:
        raise BadUsage(f"{machine} cannot be the name of {' and of '.join(sorted(kinds))}", "one machine at a time")
    places = grouped(found, lambda each: _place(each, machine))
    return {place: [*_serving(group), *_starting(group)] for place, group in places.items()}


def kind(environment: Environment) -> str:
    """A machine's name where none is given: hosts with the same GPU have the same."""
    cores = [f"{environment.cores} cores"] if environment.cores else []
    words = [environment.gpu_name] if environment.gpu_name else [environment.cpu or "cpu", *cores]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


def indexed_release(environment: Environment) -> str:
    """The vLLM release by the package index, without the build after a "+". Raises BadUsage where no vLLM served."""
    if environment.vllm is None:
        raise BadUsage("a record names no release of vLLM, as of a simulated engine", "records of real engines")
    return environment.vllm.partition("+")[0]


def settings(spec: EngineSpec) -> str:
    """The engine's settings in words, with a hash that also covers the settings that the words leave out."""
    facts = {name: value for name, value in spec.facts.items() if name not in NO_SETTINGS}
    limits = f"{spec.max_num_seqs} seqs, {spec.max_num_batched_tokens} tokens"
    return f"{spec.load_format} {spec.dtype}, {limits}, {short_hash(facts)[:6]}"


def workload(m: Measurement) -> str:
    """A group of benchmarks: values of different requests are no history of each other."""
    asked, starts = m.workload.spec, load_facts(m.load).get("ramp_up", "")
    lengths = "natural" if asked.prompt_tokens is None else f"{asked.prompt_tokens}-{asked.output_tokens}"
    return f"{lengths}-{starts}-{m.workload.hash[:6]}"


def _place(each: Seen, machine: str | None) -> BenchmarkHost:
    where, limit = each.measurement.environment, each.summary.power_limit_w
    absent = UNKNOWN if where.gpu_name else "none"
    curve = {
        "gpu": where.gpu_name or "none",
        "driver": where.driver or absent,
        "cuda": where.cuda or absent,
        "power limit": absent if limit is None else f"{limit:.0f} W",
        "host": f"{where.cores or UNKNOWN} cores, {where.cpu or UNKNOWN}",
        "engine": settings(each.measurement.spec),
    }
    return BenchmarkHost(machine or kind(where), indexed_release(where), tuple(curve.items()), where.torch or UNKNOWN)


def _serving(group: Sequence[Seen]) -> Iterator[Value]:
    def cell(each: Seen) -> tuple[str, str, int]:
        m = each.measurement
        return workload(m), short_name(m.spec.model), concurrency_of(m) or 0

    for (requests, model, concurrency), repeats in grouped(group, cell).items():
        used = [each for each, _ in choose(repeats, lambda each: CheckResult(degradations=each.degraded))[0]]
        for metric in METRICS:
            each = ((e.measurement, metric.of(e.summary)) for e in used)
            if samples := _by_launch((m, cost and 1000 * cost) for m, cost in each):
                latest, degraded = max(e.measurement.measured_at for e in used), bool(used[0].degraded)
                name, parameters = f"{requests}.{metric.name}", (repr(model), repr(concurrency))
                yield Value(name, parameters, tuple(samples.values()), latest, tuple(samples), degraded)


def _starting(group: Sequence[Seen]) -> Iterator[Value]:
    launches = (each.measurement for each in group)
    for model, launched in grouped(launches, lambda m: short_name(m.spec.model)).items():
        if samples := _by_launch((m, m.resolved.ready_s) for m in launched):
            latest = max(m.measured_at for m in launched)
            yield Value(START, (repr(model),), tuple(samples.values()), latest, tuple(samples))


def rounded_value(value: float) -> float:
    """Far finer than any noise, and short in a file."""
    return float(f"{value:.{DIGITS}g}")


def _by_launch(figures: Iterable[tuple[Measurement, float | None]]) -> dict[str, float]:
    """The mean of each launch, in the order of the launches."""
    launches: dict[str, list[float]] = {}
    for m, figure in figures:
        if figure is not None:
            launches.setdefault(m.launch, []).append(figure)
    return {launch: rounded_value(fmean(each)) for launch, each in launches.items()}


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


def result_path(place: BenchmarkHost, commit: Commit) -> str:
    return f"{place.machine}/{commit.hash[:8]}-{place.env_name}.json"


def result_file(place: BenchmarkHost, commit: Commit, found: Iterable[Value], old: File | None = None) -> File:
    """The result file that asv would have written for these values. old: the existing file; its launches that were not
    measured now are kept.

    Raises BadUsage where asv_runner is not installed, and one of UNUSABLE where `old` is no such file.
    """
    rows = {} if old is None else result_rows(old)
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
        LAUNCHES: {
            name: [
                (key, facts["launches"], facts["degraded"])
                for key, facts in sorted(row.facts.items())
                if facts.get("launches")
            ]
            for name, row in sorted(rows.items())
        },
    }


def _joined(old: Facts | None, value: Value) -> Facts:
    """Facts of a value and the launches that the file has of it; what is degraded gives way to what is sound."""
    launched = dict(zip(value.launches, value.samples, strict=True))
    if old and value.degraded and not old.get("degraded"):
        return old
    if old and value.degraded == bool(old.get("degraded")):
        launched = _of_launches(old, launched) | launched
    return {**asv_facts(tuple(launched.values())), "launches": list(launched), "degraded": value.degraded}


def _of_launches(old: Facts, new: Mapping[str, float]) -> dict[str, float]:
    """Samples of a file by their launch. Files of earlier days name none: such a sample is of the launch in `new` that
    has it, or of one that is not known."""
    found = {}
    samples = old.get("samples") or ()
    for number, (name, sample) in enumerate(zip(old.get("launches") or [None] * len(samples), samples, strict=True)):
        same = (launch for launch, value in new.items() if math.isclose(value, sample, rel_tol=SAME))
        found[name or next(same, f"unknown {number}")] = sample
    return found


def asv_facts(samples: Sequence[float]) -> Facts:
    """A value, the median, with asv's statistics. Raises BadUsage where asv_runner is not installed."""
    result, stats = statistics()(list(samples), 1)
    return {
        "result": rounded_value(result),
        "samples": list(samples),
        # Five significant digits, as asv writes statistics.
        **{f"stats_{name}": float(f"{v:.4e}") if isinstance(v, float) else v for name, v in stats.items()},
    }


def statistics() -> Callable[[list[float], int], tuple[float, Facts]]:
    """asv's own statistics of the samples of one value. Raises BadUsage where asv_runner is not installed."""
    try:
        from asv_runner.statistics import compute_stats
    except ImportError:
        raise BadUsage("asv's statistics need asv_runner", "pip install 'pytest-slmserve[asv]'") from None
    found: Callable[[list[float], int], tuple[float, Facts]] = compute_stats
    return found


def result_rows(file: File) -> dict[str, ResultRow]:
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
    def by_number(text: str) -> tuple[float, str]:
        try:
            return float(text), text
        except ValueError:
            return math.inf, text

    return [sorted(set(values), key=by_number) for values in zip(*keys)]


def benchmarks_file(results: Iterable[File], old: File | None = None) -> File:
    """The index of benchmarks in all result files: asv shows no parameter that it does not list. old: the existing
    file; its benchmarks that are not ours are kept."""
    keys: dict[str, set[tuple[str, ...]]] = {}
    for file in results:
        for name, row in result_rows(file).items():
            keys.setdefault(name, set()).update(row.facts)

    def unit(name: str) -> str | None:  # None: no benchmark of ours
        return UNITS.get(name if name == START else name.rpartition(".")[2])

    ours = {
        name: {
            "code": "",
            "name": name,
            "param_names": list(STARTING if name == START else SERVING),
            "params": _axes(found),
            "timeout": 0,
            "type": "track",
            "unit": unit(name),
            "version": VERSION,
        }
        for name, found in sorted(keys.items())
        if unit(name) and found
    }
    others = {name: found for name, found in (old or {}).items() if name != "version" and not unit(name)}
    return {"version": 2, **others, **ours}


def machine_file(name: str, environment: Environment) -> File:
    """The properties of a machine as asv stores them; a value of None is left out."""
    known = {"cpu": environment.cpu, "gpu": environment.gpu_name, "num_cpu": environment.cores}
    return {"machine": name, "version": 1, **{key: str(value) for key, value in known.items() if value is not None}}


BRANCH = "refs/heads/main"
CONFIGURATION, RELEASES, LEDGER = "asv.conf.json", "releases.json", "ledger"
Row = tuple[str, str]  # a release of vLLM, and the day it came out


def initial_files() -> dict[str, str]:
    """The files that a folder for asv begins with: what git ignores, asv's configuration, the releases of vLLM."""
    here = resources.files("pytest_slmserve.report.export")
    return {
        ".gitignore": f"/{LEDGER}/\n/.asv/\n",
        CONFIGURATION: here.joinpath("asv.conf.json").read_text("utf-8"),
        RELEASES: here.joinpath("asv_releases.json").read_text("utf-8"),
    }


def rows_in(text: str) -> list[Row]:
    """Rows of a list of releases. Raises ValueError or TypeError where the text holds none."""
    return [(str(release), str(day)) for release, day in json.loads(text)]


def ledger_text(rows: Sequence[Row]) -> str:
    """A list of releases with a line for each, so that a new row is a new line."""
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n]\n"


def continued(own: Sequence[Row], shipped: Sequence[Row]) -> list[Row]:
    """The longer list where it begins with the shorter one; otherwise the folder's own."""
    longer, shorter = (shipped, own) if len(shipped) > len(own) else (own, shipped)
    return list(longer if list(longer[: len(shorter)]) == list(shorter) else own)


def git(ledger: Path, *arguments: str, given: str = "") -> str:
    """Output of git. The user's settings and a hook's variables are left out: both would change hashes, or the
    repository meant."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "--git-dir", str(ledger), *arguments]
    return subprocess.run(command, input=given, env=env, check=True, capture_output=True, text=True).stdout


def ledger_rows(ledger: Path) -> list[Row]:
    """Rows that the ledger holds, in its order."""
    lines = git(ledger, "log", "--reverse", "--format=%s %as", BRANCH).splitlines()
    return [(line.split()[-2], line.split()[-1]) for line in lines]


def commits(rows: Sequence[Row], continued: bool) -> str:
    """The commits of rows, as `git fast-import` reads them."""
    text = []
    for number, (release, day) in enumerate(rows):
        at = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())
        subject, pin = f"vllm {release}\n", f"vllm=={release}\n"
        text.append(f"commit {BRANCH}\ncommitter ledger <ledger@localhost> {at} +0000\ndata {len(subject)}\n{subject}")
        text.append(f"from {BRANCH}^0\n" if continued and number == 0 else "")
        text.append(f"M 100644 inline requirements.txt\ndata {len(pin)}\n{pin}")
        text.append(f"reset refs/tags/v{release}\nfrom {BRANCH}\n\n")
    return "".join(text)


def make(ledger: Path, rows: Sequence[Row]) -> int:
    """Make or continue it; the number of commits added. Raises ValueError where rows are no continuation."""
    if len({release for release, _ in rows}) < len(rows):
        raise ValueError("a release stands there twice: nothing was changed")
    have = ledger_rows(ledger) if ledger.exists() else []
    for number, old in enumerate(have):
        if list(rows[number : number + 1]) != [old]:
            raise ValueError(
                f"row {number + 1} should be {' of '.join(old)}, as it is in the ledger: rows are only added at the "
                "end, or every result after it would lose its release; nothing was changed"
            )
    text = commits(rows[len(have) :], bool(have))
    if not have:
        git(ledger, "init", "--quiet", "--bare", "--object-format=sha1", "--initial-branch=main")
    git(ledger, "fast-import", "--quiet", given=text)
    return len(rows) - len(have)


def ledger_commits(folder: Path) -> dict[str, Commit]:
    """The commit of each release. Raises BadUsage where the folder has no ledger."""
    form = "--format=%(refname:strip=2) %(objectname) %(authordate:unix)"
    try:
        told = git(folder / LEDGER, "for-each-ref", form, "refs/tags/v*")
    except (OSError, subprocess.CalledProcessError):
        hint = f"slmserve asv init --into {folder}, or --into with another folder"
        raise BadUsage(f"there is no ledger of releases in {folder}", hint) from None
    rows = [line.split() for line in told.splitlines()]
    return {tag.removeprefix("v"): Commit(commit, int(at)) for tag, commit, at in rows}
