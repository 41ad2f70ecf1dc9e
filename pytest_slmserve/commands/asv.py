"""`asv init|convert|publish` command: publish results of vLLM releases with asv (airspeed velocity).

The files have the formats of asv 0.6 (results and benchmarks version 2, machine version 1). For asv lower is always
better, so every benchmark is a cost.

A sample is the mean of a launch, because repeats within a launch agree with each other more than launches do. asv has
no field for the launch of a sample, so the entry `LAUNCHES` has it, by the name of the benchmark with a hash of the
workload. asv shows this hash only if a model has several workloads of one name. The settings of an engine also end with
a hash, which asv shows only if several engines have the same words.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.compare.changes import METRICS, TOLERANCE, repeats_by_launch
from pytest_slmserve.analysis.compare.steps import level_steps
from pytest_slmserve.analysis.estimates import grouped, percent
from pytest_slmserve.analysis.metrics.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import concurrency_of, point_of
from pytest_slmserve.commands.cli import PASSES, SUMMARIES, USAGE, Commands, add_archives, add_command, print_notes, say
from pytest_slmserve.commands.report import read_all
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.schema.errors import (
    LARGEST_JSON,
    UNUSABLE,
    BadUsage,
    content,
    json_value,
    read_json,
    to_install,
    write_file,
)
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, hosts_of, known_releases, moment
from pytest_slmserve.schema.specs import load_facts, short_hash

STATUS = f"{PASSES} results were written; {USAGE} there was nothing to write, or wrong usage; nothing is changed then."
INIT_STATUS = f"{PASSES} the folder is ready; {USAGE} its list of releases is not usable, or git is missing."
PUBLISH_STATUS = f"{PASSES} the page is there; {USAGE} asv is missing or cannot make it, or wrong usage."
HINT = "Choose another folder with --into."


def add_asv(commands: Commands) -> None:
    words = "Follow releases of vLLM on a page of asv, from records that are there already (needs asv and git)."
    command = commands.add_parser("asv", help=SUMMARIES["asv"], description=words)
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    words = "make a folder for asv, or bring it up to date: its configuration and the releases of vLLM"
    init_ = add_command(actions, "init", INIT_STATUS, init_asv, words)
    words = "write results for asv, next to those of other results files"
    convert_ = add_command(actions, "convert", STATUS, convert_to_asv, words)
    add_archives(convert_, "RECORDS")
    words = "make asv's page of all results, with its scripts beside it, and name the releases where a cost changes"
    publish_ = add_command(actions, "publish", PUBLISH_STATUS, publish_asv, words)
    for each in (init_, convert_, publish_):
        folder = "folder of asv, with the releases and results/ (default: benchmarks/asv)"
        each.add_argument("--into", metavar="FOLDER", type=Path, default=Path("benchmarks/asv"), help=folder)
    name = "name of the measured machine (default: the name of its GPU or CPU)"
    convert_.add_argument("--machine", metavar="NAME", help=name)


def init_asv(given: argparse.Namespace) -> int:
    """Write the missing files of an asv folder, add new releases to its list, and create or extend their repository."""
    folder: Path = given.into
    listed, repository, files = folder / RELEASES, folder / REPOSITORY, initial_files()
    try:
        own = releases_in(content(listed, LARGEST_JSON)) if listed.exists() else []
        shipped = releases_in(files[RELEASES])
        rows = shipped if shipped[: len(own)] == own else own
        folder.mkdir(parents=True, exist_ok=True)
        added = make_repository(repository, rows)
        new = {name: text for name, text in files.items() if not (folder / name).exists()}
        if rows != own:  # a line for each row
            new[RELEASES] = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n]\n"
        for name, text in new.items():
            write_file(folder / name, text)
            say(f"written: {folder / name}")
    except (ValueError, TypeError) as error:
        raise BadUsage(
            f"{listed}: {error}", 'Write rows such as ["0.26.0", "2026-07-25"], and append new ones at the end.'
        ) from None
    except subprocess.CalledProcessError as error:
        raise BadUsage(f"git cannot make {repository}: {error.stderr.strip()}", HINT) from None
    except OSError as error:
        raise BadUsage(f"cannot make {folder}: {error.strerror or error} ({error.filename})", HINT) from None
    say(f"{repository}: {counted(len(rows), 'release')}, {added} added")
    return PASSES


def convert_to_asv(given: argparse.Namespace) -> int:
    """Write a result file for each release and machine, the files of new machines, and the index of benchmarks."""
    asv_facts([1.0])  # fail early if asv_runner is missing
    contents = read_all(given)
    found = steady_measurements(contents.measurements)
    if not found:
        raise BadUsage(
            "there is no valid measurement of a sweep of one engine", "Pass records of --slm-gpu or --slm-cpu."
        )
    name = given.machine  # it becomes the name of a folder
    if name is not None and (name != Path(name).name or name in ("", "..")):
        raise BadUsage(f"--machine {name!r} is not a name of a folder", "--machine gpu-runner-1")
    measured, form = values(found, name), "--format=%(refname:strip=2) %(objectname) %(authordate:unix)"
    try:
        tags = git(given.into / REPOSITORY, "for-each-ref", form, "refs/tags/v*")
    except (OSError, subprocess.CalledProcessError):
        hint = f"Run slmserve asv init --into {given.into}, or choose another folder with --into."
        raise BadUsage(f"{given.into} has no repository of releases", hint) from None
    tagged = (line.split() for line in tags.splitlines())
    commits: dict[str, Commit] = {tag.removeprefix("v"): (commit, int(at)) for tag, commit, at in tagged}
    for release in (place.release for place in measured if place.release not in commits):
        row = f'Append the row ["{release}", "YYYY-MM-DD"] to {given.into / RELEASES}'
        hint = f"{row}, then run slmserve asv init --into {given.into}."
        raise BadUsage(f"vLLM {release} is not in the repository of releases", hint)
    notes, folder = list(contents.notes), given.into / "results"
    if invalid := sum(concurrency_of(m) is not None for m in contents.measurements) - len(found):
        notes.append(f"skipped: {counted(invalid, 'measurement')}, invalid")
    files: dict[Path, File] = {}  # to be written
    for place, alike in grouped(found, lambda m: _place(m, name)).items():
        if (hosts := len(hosts_of(alike))) > 1:
            together = f"vLLM {place.release} on {place.machine}: launches of {hosts} hosts are taken together"
            notes.append(f"{together}; hosts of one kind can differ by some per cent")
        if not (path := folder / place.machine / "machine.json").exists():
            last = alike[-1].environment
            known = {"cpu": last.cpu, "gpu": last.gpu_name, "num_cpu": last.cores}
            told = {key: str(value) for key, value in known.items() if value is not None}
            files[path] = {"machine": place.machine, "version": 1, **told}
    written = {
        folder / place.machine / f"{commits[place.release][0][:8]}-{place.env_name}.json": (place, rows)
        for place, rows in measured.items()
    }
    listed, path = folder / "benchmarks.json", folder
    try:  # read all existing files before writing any
        there = result_files(folder)
        benchmarks = read_json(listed, HINT) if listed.exists() else None
        if not isinstance(benchmarks, dict | None):
            raise TypeError("no object")
        rows_of = {}
        for path, file in there.items():
            if LAUNCHES in file or path in written:
                rows_of[path] = result_rows(file)
        for path, (place, rows) in written.items():
            rows_of[path] = joined_rows(rows_of.get(path, {}), rows)
            there[path] = file_head(place, commits[place.release])
        names, params = shown_names(rows_of.values()), {path: there[path]["params"] for path in rows_of}
        engines = {path: there[path].get(ENGINE, params[path][ENGINE]) for path in rows_of}
        shown = without_hash(engines.values())
        for path, rows in rows_of.items():
            engine = {ENGINE: engines[path], "params": params[path] | {ENGINE: shown[engines[path]]}}
            file = there[path] | engine | rows_as_asv(rows, names)
            if path in written or file != there[path]:
                there[path] = files[path] = file
        path = folder
        files[listed] = benchmarks_file(there.values(), benchmarks)
    except UNUSABLE as error:
        raise BadUsage(f"{path} does not hold results of asv ({type(error).__name__}: {error})", HINT) from None
    try:
        for path, file in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(file, separators=(",", ":")) + "\n")
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", HINT) from None
    print_notes(notes)
    for path, (_, rows) in written.items():
        say(f"written: {path} ({counted(sum(map(len, rows.values())), 'value')})")
    return PASSES


PAGE_FILES = resources.files("pytest_slmserve.commands") / "asv_page"
LINK = re.compile(
    r"""(src|href)="(https://[^"]*/([^"/]+\.(?:js|css)))"(?: (?:integrity|crossorigin|referrerpolicy)="[^"]*")*"""
)


def publish_asv(given: argparse.Namespace) -> int:
    """Build asv's page with local copies of its scripts, and print the releases at which a cost changes its level."""
    folder: Path = given.into
    hint = f"slmserve asv init --into {folder}"
    try:
        page = folder / str(read_json(folder / CONFIGURATION, hint)["html_dir"])
        command = [sys.executable, "-m", "asv", "publish"]
        made = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if made.returncode:
            why = " ".join((made.stderr or made.stdout).strip().splitlines()[-1:])
            raise BadUsage(f"asv cannot publish {folder}: {why}", to_install("asv") if "No module" in why else hint)
        text, left = with_local_scripts((page / "index.html").read_text("utf-8"))
        for name in scripts():
            write_file(page / name, (PAGE_FILES / name).read_bytes())
        write_file(page / "index.html", text)
        found = [line for curve in curves(result_files(folder / "results")) for line in curve_steps(*curve)]
    except UNUSABLE as error:
        raise BadUsage(f"{folder} does not hold results of asv ({type(error).__name__}: {error})", hint) from None
    except OSError as error:
        raise BadUsage(f"cannot write {error.filename}: {error.strerror}", hint) from None
    print_notes([f"the page needs a network for {url}" for url in left])
    for line in found:
        say(line)
    say(f"written: {page / 'index.html'}; to see it: cd {folder} && asv preview")
    return PASSES


def scripts() -> list[str]:
    return sorted(file.name for file in PAGE_FILES.iterdir() if file.name.endswith((".js", ".css")))


def with_local_scripts(page: str) -> tuple[str, list[str]]:
    """Return asv's page with links to local scripts, and the URLs that are still remote."""
    ours = {name.replace(".min", ""): name for name in scripts()}

    def local(link: re.Match[str]) -> str:
        # asv's name of a script may contain its version and ".min".
        name = ours.get(re.sub(r"-[\d.]+\d|\.min", "", link[3]))
        return f'{link[1]}="{name}"' if name else link[0]

    text = LINK.sub(local, page)
    return text, [link[2] for link in LINK.finditer(text)]


Series = list[tuple[int, str, float]]  # date of a release in ms, its name, and a cost


def curves(files: Mapping[Path, File]) -> Iterator[tuple[str, Series]]:
    """Yield the name and the series of each curve of asv's page, with the oldest release first."""
    found: dict[str, dict[int, tuple[int, str, float]]] = {}
    for file in files.values():
        for benchmark, row in file["results"].items():
            columns = dict(zip(file["result_columns"], row))
            for parameters, value in zip(product(*columns["params"]), columns["result"]):
                name = f"{benchmark}({', '.join(parameters)}) on {', '.join(file['params'].values())}"
                if value is not None:
                    found.setdefault(name, {})[file["date"]] = file["date"], file["requirements"]["vllm"], value
    for name, by_date in sorted(found.items()):
        yield name, sorted(by_date.values())


def curve_steps(name: str, series: Series) -> Iterator[str]:
    """Yield a line for each release at which a curve changes its level by more than the tolerance."""
    for step in level_steps([value for *_, value in series]):
        if abs(by := step.ratio.value - 1) > TOLERANCE:
            way = "dearer" if by > 0 else "cheaper"
            yield f"{name}: step at {series[step.at][1]}: {percent(abs(by))} {way}; the gate decides whose it is"


DIGITS = 6  # of a sample: far finer than any noise, and short in a file
UNKNOWN = "unknown"
# The model is a parameter. The memory of the KV cache depends on the card, and does not change the speed of a valid
# measurement, in which no request was preempted or had to wait.
NO_SETTINGS = ("model", "kv_cache_bytes", "gpu_memory_utilization")
COSTS = {  # by the last part of a benchmark's name: its unit, and the metric that it is 1,000 times, or 1,000 over
    "seconds_per_1000_requests": ("s/1000 requests", "requests_per_s"),
    "ms_per_output_token": ("ms/token", "tpot_s"),
    "busy_seconds_per_1000_output_tokens": ("s/1000 tokens", "tokens_per_busy_s"),
    "joules_per_1000_output_tokens": ("J/1000 tokens", "energy_per_token_j"),
}
START = "start.seconds_to_start"
HASH = re.compile(r"-[0-9a-f]{6}(?=\.\w+$)")  # of the workload, in the name of a benchmark
VERSION = "1"  # of every benchmark; asv ignores results of another version
STATISTICS = ("ci_99_a", "ci_99_b", "q_25", "q_75", "number", "repeat")
PER_VALUE = ("result", *(f"stats_{name}" for name in STATISTICS), "samples")
COLUMNS = ("result", "params", "version", "started_at", "duration", *PER_VALUE[1:])
ENGINE = "engine"  # our own entry of a file, and a parameter: settings of the engine, in the entry always with a hash
LAUNCHES = "launches"  # our own entry of a file, by benchmark: parameters, launches and `degraded` of each value

File = dict[str, Any]


Commit = tuple[str, int]  # hash and time in seconds of the commit of a release


@dataclass(frozen=True, slots=True)
class BenchmarkHost:
    """Identity of one result file.

    Attributes:
        curve: values that place the file on one curve of the page. They exclude torch, because each release of vLLM
            brings its own.
    """

    machine: str
    release: str
    curve: tuple[tuple[str, str], ...]
    torch: str

    @property
    def env_name(self) -> str:
        """Name of asv's environment, one for each curve and version of torch."""
        return f"vllm-{short_hash([self.curve, self.torch])[:8]}"


@dataclass(frozen=True, slots=True)
class Value:
    """Value of a benchmark for one combination of its parameters.

    Attributes:
        launches: sample of each launch.
        degraded: whether the measurements are questionable.
    """

    launches: dict[str, float]
    measured_ms: int
    degraded: bool = False

    def joined(self, old: Value) -> Value:
        """Return the value with the launches of an existing file.

        If only one of the two is degraded, the other one counts.
        """
        if self.degraded != old.degraded:
            return old if self.degraded else self
        return Value(old.launches | self.launches, max(old.measured_ms, self.measured_ms), self.degraded)


Rows = dict[str, dict[tuple[str, ...], Value]]  # of a result file: by benchmark, and its parameters as asv writes them


def steady_measurements(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return the valid measurements of single-engine sweeps, oldest first."""
    found = [m for m in measurements if concurrency_of(m) is not None and not problems(m)]
    return sorted(found, key=lambda m: (m.measured_at, m.launch))


def kind(environment: Environment) -> str:
    """Return the default name of a machine, from its GPU, or from its CPU and cores."""
    cores = [f"{environment.cores} cores"] if environment.cores else []
    words = [environment.gpu_name] if environment.gpu_name else [environment.cpu or "cpu", *cores]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


def values(found: Sequence[Measurement], machine: str | None = None) -> dict[BenchmarkHost, Rows]:
    """Return the values of steady measurements for each result file.

    Repeats are selected and combined by launch as in every comparison.

    Args:
        machine: name of the machine; None means the name of its GPU or CPU.
    """
    kinds = {kind(m.environment) for m in found}
    if machine is not None and len(kinds) > 1:
        raise BadUsage(
            f"{machine} cannot be the name of {' and of '.join(sorted(kinds))}",
            "Pass the records of one machine at a time.",
        )
    made: dict[BenchmarkHost, Rows] = {}
    for place, group in grouped(found, lambda m: _place(m, machine)).items():
        rows = made[place] = {}
        for (requests, model, concurrency), repeats in grouped(group, _benchmark).items():
            point = point_of([(m,) for m in repeats])
            latest = max(m.measured_at for each in point.used for m in each)
            for name, (_, field) in COSTS.items():
                inverse = METRICS[field].higher_is_better
                costs = {
                    each[0].launch: [1000 / repeat.value if inverse else 1000 * repeat.value for repeat in each]
                    for each in repeats_by_launch(point, METRICS[field])
                }
                if costs:
                    row = rows.setdefault(f"{requests}.{name}", {})
                    row[repr(model), repr(concurrency)] = _value(costs, latest, bool(point.degraded))
        for model, launched in grouped(group, lambda m: short_name(m.spec.model)).items():
            if starts := {m.launch: [m.resolved.ready_s] for m in launched if m.resolved.ready_s is not None}:
                rows.setdefault(START, {})[repr(model),] = _value(starts, max(m.measured_at for m in launched))
    return made


def _value(launches: Mapping[str, Sequence[float]], latest: str, degraded: bool = False) -> Value:
    samples = {launch: rounded_value(fmean(each)) for launch, each in launches.items()}
    try:
        at = moment(latest)
    except ValueError:
        raise BadUsage(
            f"a record was measured at {latest!r}, which is not a date", "Pass the results file as it was written."
        ) from None
    return Value(samples, round(1000 * at.timestamp()), degraded)


def _benchmark(m: Measurement) -> tuple[str, str, int]:
    requested, starts = m.workload.spec, load_facts(m.load).get("ramp_up", "")
    natural = requested.prompt_tokens is None
    lengths = "natural" if natural else f"{requested.prompt_tokens}-{requested.output_tokens}"
    return f"{lengths}-{starts}-{m.workload.hash[:6]}", short_name(m.spec.model), concurrency_of(m) or 0


def _place(m: Measurement, machine: str | None) -> BenchmarkHost:
    where, spec, limit = m.environment, m.spec, device_figures(m.run).power_limit_w
    if where.vllm is None:
        raise BadUsage("a record names no release of vLLM, as of a simulated engine", "Pass records of real engines.")
    absent = UNKNOWN if where.gpu_name else "none"
    # The words below name only some settings of the engine, so a hash covers all of them.
    settings = short_hash({name: value for name, value in spec.facts.items() if name not in NO_SETTINGS})
    limits = f"{spec.max_num_seqs} seqs, {spec.max_num_batched_tokens} tokens"
    curve = {
        "gpu": where.gpu_name or "none",
        "driver": where.driver or absent,
        "cuda": where.cuda or absent,
        "power limit": absent if limit is None else f"{limit:.0f} W",
        "host": f"{where.cores or UNKNOWN} cores, {where.cpu or UNKNOWN}",
        ENGINE: f"{spec.load_format} {spec.dtype}, {limits}, {settings[:6]}",
    }
    release = where.vllm.partition("+")[0]  # without the build, as in the package index
    return BenchmarkHost(machine or kind(where), release, tuple(curve.items()), where.torch or UNKNOWN)


def rounded_value(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def result_files(folder: Path) -> dict[Path, File]:
    """Return the result files below a folder. Raise BadUsage or TypeError if one is something else."""
    paths = [path for path in sorted(folder.glob("*/*.json")) if path.name != "machine.json"]
    found = {path: read_json(path, HINT) for path in paths}
    if not all(isinstance(file, dict) and "results" in file for file in found.values()):
        raise TypeError("a file without results")
    return found


def file_head(place: BenchmarkHost, commit: Commit) -> File:
    return {
        "version": 2,
        "commit_hash": commit[0],
        "env_name": place.env_name,
        "date": 1000 * commit[1],
        "params": {"machine": place.machine, **dict(place.curve)},
        "python": "",
        "requirements": {"vllm": place.release, "torch": place.torch},
        "env_vars": {},
        "result_columns": list(COLUMNS),
        "durations": {},
    }


def joined_rows(old: Rows, new: Rows) -> Rows:
    """Return the values of a result file updated with new ones. Launches that were not measured again are kept."""
    rows = {name: dict(row) for name, row in old.items()}
    for name, row in new.items():
        known = rows.setdefault(name, {})
        known |= {key: value.joined(known.get(key, value)) for key, value in row.items()}
    return rows


def shown_names(files: Iterable[Rows]) -> dict[str, str]:
    """Return the name that asv shows for each benchmark, without hash unless a model has several workloads of one name.

    A hash mostly reflects the vocabulary of the model.
    """
    names: dict[tuple[str, str], set[str]] = {}  # by name without a hash and model
    for rows in files:
        for name, row in rows.items():
            for model, *_ in row:
                names.setdefault((HASH.sub("", name), model), set()).add(name)
    ambiguous = {name for same in names.values() if len(same) > 1 for name in same}
    return {name: name if name in ambiguous else HASH.sub("", name) for same in names.values() for name in same}


def without_hash(engines: Iterable[str]) -> dict[str, str]:
    """Return what asv shows of the settings of each engine: without hash, if no other hash has the same words."""
    alike = grouped({*engines}, lambda engine: engine.rpartition(", ")[0])
    return {engine: words if len(same) == 1 else engine for words, same in alike.items() for engine in same}


def rows_as_asv(rows: Rows, names: Mapping[str, str]) -> File:
    """Return the values of a result file in asv's format.

    Args:
        names: from `shown_names`.
    """
    results, launches = {}, {}
    for shown, alike in grouped(sorted(rows), names.__getitem__).items():
        row = {key: value for name in alike for key, value in rows[name].items()}
        axes, latest = _axes(row), max(value.measured_ms for value in row.values())
        facts = [asv_facts([*row[key].launches.values()]) if key in row else {} for key in product(*axes)]
        first, *others = ([each.get(column) for each in facts] for column in PER_VALUE)
        results[shown] = [first, axes, VERSION, latest, None, *others]
    for name, row in sorted(rows.items()):
        launches[name] = [[list(key), [*value.launches], value.degraded] for key, value in sorted(row.items())]
    return {"results": results, LAUNCHES: launches}


def asv_facts(samples: list[float]) -> dict[str, Any]:
    """Return the median of the samples with asv's statistics.

    One launch has none, because asv would show them as ±0.
    """
    try:
        from asv_runner.statistics import compute_stats
    except ImportError:
        raise BadUsage("asv's statistics need asv_runner", to_install("asv")) from None
    result, stats = compute_stats(samples, 1)
    # Five significant digits, as asv writes statistics.
    known = stats.items() if len(samples) > 1 else ()
    told = {f"stats_{name}": float(f"{v:.4e}") if isinstance(v, float) else v for name, v in known}
    return {"result": rounded_value(result), "samples": samples, **told}


def result_rows(file: File) -> Rows:
    """Return the values of a result file of this package, by benchmark name with hash."""
    rows: Rows = {}
    for name, listed in file[LAUNCHES].items():
        row = file["results"].get(name) or file["results"][HASH.sub("", name)]
        columns = dict(zip(file["result_columns"], row, strict=True))
        samples = dict(zip(product(*columns["params"]), columns["samples"], strict=True))
        rows[name] = {
            tuple(key): Value(dict(zip(launches, samples[tuple(key)], strict=True)), columns["started_at"], degraded)
            for key, launches, degraded in listed
        }
    return rows


def _axes(keys: Iterable[tuple[str, ...]]) -> list[list[str]]:
    return [sorted({*each}, key=lambda text: (int(text) if text.isdigit() else 0, text)) for each in zip(*keys)]


def benchmarks_file(results: Iterable[File], old: File | None = None) -> File:
    """Return the index of the benchmarks in all result files, and of others in the old index."""
    keys: dict[str, set[tuple[str, ...]]] = {}
    for file in results:
        for name, row in file["results"].items():
            keys.setdefault(name, set()).update(product(*dict(zip(file["result_columns"], row))["params"]))
    units = {"seconds_to_start": "seconds", **{name: unit for name, (unit, _) in COSTS.items()}}
    known = {name: units.get(name.rpartition(".")[2]) for name in (*keys, *(old or {}))}  # None: no benchmark of ours
    ours = {
        name: {
            "code": "",
            "name": name,
            "param_names": ["model"] if name == START else ["model", "concurrency"],
            "params": _axes(found),
            "timeout": 0,
            "type": "track",
            "unit": known[name],
            "version": VERSION,
        }
        for name, found in sorted(keys.items())
        if known[name] and found
    }
    others = {name: found for name, found in (old or {}).items() if name != "version" and not known[name]}
    return {"version": 2, **others, **ours}


BRANCH = "refs/heads/main"
CONFIGURATION, RELEASES, REPOSITORY = "asv.conf.json", "releases.json", "releases.git"
Release = tuple[str, str]  # of vLLM, and the day it came out


def initial_files() -> dict[str, str]:
    here = resources.files("pytest_slmserve.commands")
    return {
        ".gitignore": f"/{REPOSITORY}/\n/.asv/\n",
        CONFIGURATION: here.joinpath("asv.conf.json").read_text("utf-8"),
        RELEASES: known_releases(),
    }


def releases_in(text: str | bytes) -> list[Release]:
    return [(str(release), str(day)) for release, day in json_value(text)]


def git(repository: Path, *arguments: str, given: str = "") -> str:
    """Return the output of a git command."""
    # A hook's variables would name another repository, and the user's settings would change hashes.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "--git-dir", str(repository), *arguments]
    return subprocess.run(command, input=given, env=env, check=True, capture_output=True, text=True).stdout


def make_repository(path: Path, rows: Sequence[Release]) -> int:
    """Create or extend the repository of releases, a commit and a tag per row, and return the number of added commits.

    Raises:
        ValueError: if the rows do not continue those of the repository, or contain a release twice.
    """
    if len({release for release, _ in rows}) < len(rows):
        raise ValueError("a release is listed twice, so nothing was changed")
    log = git(path, "log", "--reverse", "--format=%s %as", BRANCH) if path.exists() else ""
    have = [tuple(line.split()[-2:]) for line in log.splitlines()]
    for number, old in enumerate(have):
        if list(rows[number : number + 1]) != [old]:
            raise ValueError(
                f"row {number + 1} should be {' of '.join(old)}, as in {path}: rows are only added at the end, or "
                "every result after it would lose its release; nothing was changed"
            )
    text = []  # as `git fast-import` reads it; the committer's name is part of the hashes that kept results have
    for number, (release, day) in enumerate(rows[len(have) :]):
        at = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())
        subject, pin = f"vllm {release}\n", f"vllm=={release}\n"
        text.append(f"commit {BRANCH}\ncommitter ledger <ledger@localhost> {at} +0000\ndata {len(subject)}\n{subject}")
        text.append(f"from {BRANCH}^0\n" if have and number == 0 else "")
        text.append(f"M 100644 inline requirements.txt\ndata {len(pin)}\n{pin}")
        text.append(f"reset refs/tags/v{release}\nfrom {BRANCH}\n\n")
    if not have:
        git(path, "init", "--quiet", "--bare", "--object-format=sha1", "--initial-branch=main")
    git(path, "fast-import", "--quiet", given="".join(text))
    return len(rows) - len(have)
