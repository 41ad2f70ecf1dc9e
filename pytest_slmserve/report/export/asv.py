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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.compare.changes import METRICS, repeats_by_launch
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.metrics.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import concurrency_of, point_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import load_facts, short_hash

DIGITS = 6  # of a value: far finer than any noise, and short in a file
UNKNOWN = "unknown"
# The model is a parameter. How much memory the KV cache gets follows from the card, and does not move the speed of a
# measurement that stands: one in which requests were thrown out, or had to wait, does not.
NO_SETTINGS = ("model", "kv_cache_bytes", "gpu_memory_utilization")
COSTS = {  # benchmarks by their last name: the unit, and the compared metric of which it is a thousandfold, or inverse
    "seconds_per_1000_requests": ("s/1000 requests", "requests_per_s"),
    "ms_per_output_token": ("ms/token", "tpot_s"),
    "joules_per_1000_output_tokens": ("J/1000 tokens", "energy_per_token_j"),
}
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

File = dict[str, Any]
Facts = dict[str, Any]  # of one value: its entry of each column of PER_VALUE, its launches, and whether it is degraded
Axes = list[list[str]]  # values of each parameter, as asv writes them


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of a release, as the ledger stores it."""

    hash: str
    authored_s: int


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
        """The name of the environment in asv's words, of which there is one for each curve and torch."""
        return f"vllm-{short_hash([self.curve, self.torch])[:8]}"

    def path(self, commit: Commit) -> str:
        """Return the path of the result file below the folder of results."""
        return f"{self.machine}/{commit.hash[:8]}-{self.env_name}.json"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a benchmark. parameters: as asv writes them. samples: one per launch. degraded: all of them."""

    benchmark: str
    parameters: tuple[str, ...]
    samples: tuple[float, ...]
    measured_at: str
    launches: tuple[str, ...]
    degraded: bool = False


def steady_measurements(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return the valid measurements from sweeps of one engine, in the order measured."""
    found = [m for m in measurements if concurrency_of(m) is not None and not problems(m)]
    return sorted(found, key=lambda m: (m.measured_at, m.launch))


def kind(environment: Environment) -> str:
    """Return a machine's name if none is given: hosts with the same GPU have the same."""
    cores = [f"{environment.cores} cores"] if environment.cores else []
    words = [environment.gpu_name] if environment.gpu_name else [environment.cpu or "cpu", *cores]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


def indexed_release(environment: Environment) -> str:
    """Return the vLLM release by the package index, without the build after a "+". Raises BadUsage if no vLLM
    served."""
    if environment.vllm is None:
        raise BadUsage("a record names no release of vLLM, as of a simulated engine", "records of real engines")
    return environment.vllm.partition("+")[0]


def values(found: Sequence[Measurement], machine: str | None = None) -> dict[BenchmarkHost, list[Value]]:
    """Return the values of steady measurements, grouped by the result file that they go to. Repeats are chosen, and
    taken together by launch, as in every comparison.

    Args:
        machine: Name of the machine. By default that of the GPU, or of the CPU.

    Raises:
        BadUsage: One name is for several kinds of machines, or a record is of no release.
    """
    kinds = {kind(m.environment) for m in found}
    if machine is not None and len(kinds) > 1:
        raise BadUsage(f"{machine} cannot be the name of {' and of '.join(sorted(kinds))}", "one machine at a time")
    made: dict[BenchmarkHost, list[Value]] = {}
    for place, group in grouped(found, lambda m: _place(m, machine)).items():
        made[place] = []
        for (requests, model, concurrency), repeats in grouped(group, _benchmark).items():
            point = point_of(concurrency, repeats)
            latest = max(m.measured_at for each in point.used for m in each)
            for name, (_, field) in COSTS.items():
                inverse = METRICS[field].higher_is_better
                costs = {
                    each[0].launch: [1000 / repeat.value if inverse else 1000 * repeat.value for repeat in each]
                    for each in repeats_by_launch(point, field)
                }
                of = f"{requests}.{name}", (repr(model), repr(concurrency))
                made[place] += _values(*of, costs, latest, bool(point.degraded))
        for model, launched in grouped(group, lambda m: short_name(m.spec.model)).items():
            ready = grouped((m for m in launched if m.resolved.ready_s is not None), lambda m: m.launch)
            starts = {launch: [m.resolved.ready_s or 0.0 for m in each] for launch, each in ready.items()}
            made[place] += _values(START, (repr(model),), starts, max(m.measured_at for m in launched), False)
    return made


def _values(
    benchmark: str, parameters: tuple[str, ...], launches: Mapping[str, Sequence[float]], latest: str, degraded: bool
) -> list[Value]:
    """Return the value whose samples are the means of the launches; none without launches."""
    samples = tuple(rounded_value(fmean(each)) for each in launches.values())
    return [Value(benchmark, parameters, samples, latest, tuple(launches), degraded)] if samples else []


def _benchmark(m: Measurement) -> tuple[str, str, int]:
    """Return the group of benchmarks that a measurement belongs to, the model and the concurrency. Values of different
    requests are no history of each other."""
    requested, starts = m.workload.spec, load_facts(m.load).get("ramp_up", "")
    natural = requested.prompt_tokens is None
    lengths = "natural" if natural else f"{requested.prompt_tokens}-{requested.output_tokens}"
    return f"{lengths}-{starts}-{m.workload.hash[:6]}", short_name(m.spec.model), concurrency_of(m) or 0


def _place(m: Measurement, machine: str | None) -> BenchmarkHost:
    """Return the result file that a measurement goes to. The engine's settings are in words, with a hash that also
    covers the settings that the words leave out."""
    where, spec, limit = m.environment, m.spec, device_figures(m.run).power_limit_w
    absent = UNKNOWN if where.gpu_name else "none"
    settings = short_hash({name: value for name, value in spec.facts.items() if name not in NO_SETTINGS})
    limits = f"{spec.max_num_seqs} seqs, {spec.max_num_batched_tokens} tokens"
    curve = {
        "gpu": where.gpu_name or "none",
        "driver": where.driver or absent,
        "cuda": where.cuda or absent,
        "power limit": absent if limit is None else f"{limit:.0f} W",
        "host": f"{where.cores or UNKNOWN} cores, {where.cpu or UNKNOWN}",
        "engine": f"{spec.load_format} {spec.dtype}, {limits}, {settings[:6]}",
    }
    return BenchmarkHost(machine or kind(where), indexed_release(where), tuple(curve.items()), where.torch or UNKNOWN)


def rounded_value(value: float) -> float:
    """Return a value as a file holds it."""
    return float(f"{value:.{DIGITS}g}")


@dataclass(slots=True)
class ResultRow:
    """A benchmark in a result file."""

    facts: dict[tuple[str, ...], Facts]
    started_at: int = 0  # ms


def result_file(place: BenchmarkHost, commit: Commit, found: Iterable[Value], old: File | None = None) -> File:
    """Return the result file that asv would have written for these values. old: the existing file; its launches that
    were not measured now are kept.

    Raises BadUsage if asv_runner is not installed, and one of UNUSABLE if `old` is no such file.
    """
    rows = {} if old is None else result_rows(old)
    for value in found:
        row = rows.setdefault(value.benchmark, ResultRow({}))
        row.facts[value.parameters] = _joined(row.facts.get(value.parameters), value)
        row.started_at = max(row.started_at, round(1000 * datetime.fromisoformat(value.measured_at).timestamp()))
    results, launches = {}, {}
    for name, row in sorted(rows.items()):
        axes = _axes(row.facts)
        facts = [row.facts.get(key, {}) for key in itertools.product(*axes)]
        first, *others = ([each.get(column) for each in facts] for column in PER_VALUE)
        results[name] = [first, axes, VERSION, row.started_at or None, None, *others]
        told = sorted((key, each) for key, each in row.facts.items() if each.get("launches"))
        launches[name] = [(key, each["launches"], each["degraded"]) for key, each in told]
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
        "results": results,
        "durations": {},
        LAUNCHES: launches,
    }


def _joined(old: Facts | None, value: Value) -> Facts:
    """Return the facts of a value and the launches that the file has of it; what is degraded gives way to what is
    sound. A sample of a file that names no launch is of the new launch that has nearly the same, or of one that is not
    known."""
    launched = dict(zip(value.launches, value.samples, strict=True))
    if old and value.degraded and not old.get("degraded"):
        return old
    if old and value.degraded == bool(old.get("degraded")):
        samples, before = old.get("samples") or (), {}
        names = old.get("launches") or [None] * len(samples)
        for number, (name, sample) in enumerate(zip(names, samples, strict=True)):
            same = (launch for launch, new in launched.items() if math.isclose(new, sample, rel_tol=SAME))
            before[name or next(same, f"unknown {number}")] = sample
        launched = before | launched
    return {**asv_facts(tuple(launched.values())), "launches": list(launched), "degraded": value.degraded}


def asv_facts(samples: Sequence[float]) -> Facts:
    """Return a value, the median, with asv's statistics. Raises BadUsage if asv_runner is not installed."""
    result, stats = statistics()(list(samples), 1)
    return {
        "result": rounded_value(result),
        "samples": list(samples),
        # Five significant digits, as asv writes statistics.
        **{f"stats_{name}": float(f"{v:.4e}") if isinstance(v, float) else v for name, v in stats.items()},
    }


def statistics() -> Callable[[list[float], int], tuple[float, Facts]]:
    """Return asv's own statistics of the samples of one value. Raises BadUsage if asv_runner is not installed."""
    try:
        from asv_runner.statistics import compute_stats
    except ImportError:
        raise BadUsage("asv's statistics need asv_runner", "pip install 'pytest-slmserve[asv]'") from None
    found: Callable[[list[float], int], tuple[float, Facts]] = compute_stats
    return found


def result_rows(file: File) -> dict[str, ResultRow]:
    """Return the rows of a result file, by benchmark; asv leaves out the columns at the end that have nothing."""
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


def _axes(keys: Iterable[tuple[str, ...]]) -> Axes:
    """Return the values of each parameter, in the order of numbers if they are some."""

    def by_number(text: str) -> tuple[float, str]:
        try:
            return float(text), text
        except ValueError:
            return math.inf, text

    return [sorted(set(values), key=by_number) for values in zip(*keys)]


def benchmarks_file(results: Iterable[File], old: File | None = None) -> File:
    """Return the index of benchmarks in all result files: asv shows no parameter that it does not list. old: the
    existing file; its benchmarks that are not ours are kept."""
    keys: dict[str, set[tuple[str, ...]]] = {}
    for file in results:
        for name, row in result_rows(file).items():
            keys.setdefault(name, set()).update(row.facts)
    units = {START: "seconds", **{name: unit for name, (unit, _) in COSTS.items()}}

    def unit(name: str) -> str | None:  # None: no benchmark of ours
        return units.get(name if name == START else name.rpartition(".")[2])

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


BRANCH = "refs/heads/main"
CONFIGURATION, RELEASES, LEDGER = "asv.conf.json", "releases.json", "ledger"
Row = tuple[str, str]  # a release of vLLM, and the day it came out


def initial_files() -> dict[str, str]:
    """Return the files that a folder for asv begins with: what git ignores, asv's configuration, the releases of
    vLLM."""
    here = resources.files("pytest_slmserve.report.export")
    return {
        ".gitignore": f"/{LEDGER}/\n/.asv/\n",
        CONFIGURATION: here.joinpath("asv.conf.json").read_text("utf-8"),
        RELEASES: here.joinpath("asv_releases.json").read_text("utf-8"),
    }


def rows_in(text: str) -> list[Row]:
    """Return the rows of a list of releases. Raises ValueError or TypeError if the text holds none."""
    return [(str(release), str(day)) for release, day in json.loads(text)]


def ledger_text(rows: Sequence[Row]) -> str:
    """Return a list of releases with a line for each, so that a new row is a new line."""
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n]\n"


def continued(own: Sequence[Row], shipped: Sequence[Row]) -> list[Row]:
    """Return the longer list if it begins with the shorter one; otherwise the folder's own."""
    longer, shorter = (shipped, own) if len(shipped) > len(own) else (own, shipped)
    return list(longer if list(longer[: len(shorter)]) == list(shorter) else own)


def git(ledger: Path, *arguments: str, given: str = "") -> str:
    """Return the output of git. The user's settings and a hook's variables are left out: both would change hashes, or
    the repository meant."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "--git-dir", str(ledger), *arguments]
    return subprocess.run(command, input=given, env=env, check=True, capture_output=True, text=True).stdout


def make(ledger: Path, rows: Sequence[Row]) -> int:
    """Make the ledger, a repository with a commit and a tag for each row, or continue it.

    Returns:
        The number of commits added.

    Raises:
        ValueError: The rows do not continue those that the ledger holds.
    """
    if len({release for release, _ in rows}) < len(rows):
        raise ValueError("a release stands there twice: nothing was changed")
    log = git(ledger, "log", "--reverse", "--format=%s %as", BRANCH) if ledger.exists() else ""
    have = [tuple(line.split()[-2:]) for line in log.splitlines()]
    for number, old in enumerate(have):
        if list(rows[number : number + 1]) != [old]:
            raise ValueError(
                f"row {number + 1} should be {' of '.join(old)}, as it is in the ledger: rows are only added at the "
                "end, or every result after it would lose its release; nothing was changed"
            )
    text = []  # as `git fast-import` reads it
    for number, (release, day) in enumerate(rows[len(have) :]):
        at = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())
        subject, pin = f"vllm {release}\n", f"vllm=={release}\n"
        text.append(f"commit {BRANCH}\ncommitter ledger <ledger@localhost> {at} +0000\ndata {len(subject)}\n{subject}")
        text.append(f"from {BRANCH}^0\n" if have and number == 0 else "")
        text.append(f"M 100644 inline requirements.txt\ndata {len(pin)}\n{pin}")
        text.append(f"reset refs/tags/v{release}\nfrom {BRANCH}\n\n")
    if not have:
        git(ledger, "init", "--quiet", "--bare", "--object-format=sha1", "--initial-branch=main")
    git(ledger, "fast-import", "--quiet", given="".join(text))
    return len(rows) - len(have)


def ledger_commits(folder: Path) -> dict[str, Commit]:
    """Return the commit of each release. Raises BadUsage if the folder has no ledger."""
    form = "--format=%(refname:strip=2) %(objectname) %(authordate:unix)"
    try:
        told = git(folder / LEDGER, "for-each-ref", form, "refs/tags/v*")
    except (OSError, subprocess.CalledProcessError):
        hint = f"slmserve asv init --into {folder}, or --into with another folder"
        raise BadUsage(f"there is no ledger of releases in {folder}", hint) from None
    rows = [line.split() for line in told.splitlines()]
    return {tag.removeprefix("v"): Commit(commit, int(at)) for tag, commit, at in rows}
