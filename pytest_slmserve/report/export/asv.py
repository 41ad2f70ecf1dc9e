"""Measurements as result files of asv (airspeed velocity), whose page then shows one release of vLLM after the other.

asv knows one direction, lower is better, so every quantity is a cost. A value is of one release on one machine. Its
samples are the launches, each the mean of its repeats: repeats within a launch agree with each other more than with the
next one. `asv_files` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.metrics.summary import Summary, summarize
from pytest_slmserve.analysis.metrics.validity import CheckResult, check
from pytest_slmserve.analysis.points.sweep_points import choose, concurrency_of
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
NO_SETTINGS = ("model", "kv_cache_bytes", "memory_share")


@dataclass(frozen=True, slots=True)
class AsvMetric:
    """A cost, None where it was not measured."""

    name: str
    unit: str
    of: Callable[[Summary], float | None]


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _thousand_over(rate: float | None) -> float | None:
    return 1000 / rate if rate else None


METRICS = (
    AsvMetric("seconds_per_1000_requests", "s/1000 requests", lambda s: _thousand_over(s.requests_per_s)),
    AsvMetric("ms_per_output_token", "ms/token", lambda s: _times(1000, s.tpot_s)),
    AsvMetric("joules_per_1000_output_tokens", "J/1000 tokens", lambda s: _times(1000, s.energy_per_token_j)),
)
START = "start.seconds_to_start"
SERVING, STARTING = ("model", "concurrency"), ("model",)  # names of the parameters


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


def seen(measurements: Iterable[Measurement]) -> list[Seen]:
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


def release_of(environment: Environment) -> str:
    """The vLLM release by the package index, without the build after a "+". Raises BadUsage where no vLLM served."""
    if environment.vllm is None:
        raise BadUsage("a record names no release of vLLM, as of a simulated engine", "records of real engines")
    return environment.vllm.partition("+")[0]


def settings(spec: EngineSpec) -> str:
    """The engine's settings in words, with a hash that also covers the settings that the words leave out."""
    facts = {name: value for name, value in spec.facts.items() if name not in NO_SETTINGS}
    limits = f"{spec.max_num_seqs} seqs, {spec.max_num_batched_tokens} tokens"
    return f"{spec.facts['weights']} {spec.dtype}, {limits}, {short_hash(facts)[:6]}"


def workload(m: Measurement) -> str:
    """A group of benchmarks: values of different requests are no history of each other."""
    asked, starts = m.workload.spec, load_facts(m.load).get("starts", "")  # its name in stored results
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
    return BenchmarkHost(machine or kind(where), release_of(where), tuple(curve.items()), where.torch or UNKNOWN)


def _serving(group: Sequence[Seen]) -> Iterator[Value]:
    def cell(each: Seen) -> tuple[str, str, int]:
        m = each.measurement
        return workload(m), short_name(m.spec.model), concurrency_of(m) or 0

    for (requests, model, concurrency), repeats in grouped(group, cell).items():
        used = [each for each, _ in choose(repeats, lambda each: CheckResult(degradations=each.degraded))[0]]
        for metric in METRICS:
            if samples := _by_launch((e.measurement, metric.of(e.summary)) for e in used):
                latest, degraded = max(e.measurement.measured_at for e in used), bool(used[0].degraded)
                name, parameters = f"{requests}.{metric.name}", (repr(model), repr(concurrency))
                yield Value(name, parameters, tuple(samples.values()), latest, tuple(samples), degraded)


def _starting(group: Sequence[Seen]) -> Iterator[Value]:
    launches = (each.measurement for each in group)
    for model, launched in grouped(launches, lambda m: short_name(m.spec.model)).items():
        if samples := _by_launch((m, m.resolved.ready_s) for m in launched):
            latest = max(m.measured_at for m in launched)
            yield Value(START, (repr(model),), tuple(samples.values()), latest, tuple(samples))


def rounded(value: float) -> float:
    """Far finer than any noise, and short in a file."""
    return float(f"{value:.{DIGITS}g}")


def _by_launch(figures: Iterable[tuple[Measurement, float | None]]) -> dict[str, float]:
    """The mean of each launch, in the order of the launches."""
    launches: dict[str, list[float]] = {}
    for m, figure in figures:
        if figure is not None:
            launches.setdefault(m.launch, []).append(figure)
    return {launch: rounded(fmean(each)) for launch, each in launches.items()}
