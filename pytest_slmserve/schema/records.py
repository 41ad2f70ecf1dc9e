"""Records of measurements: raw and self-contained, never only averages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from pytest_slmserve.schema import specs
from pytest_slmserve.schema.errors import Caches, Sharing, Side, json_value
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, ReplicaSpec, WorkloadReference, short_hash

SIMULATED = "SIMULATED ENGINE: these numbers come from a formula, not from a device"
# Measurements can be compared or reused only if these fields match. `host` is not included: launches on two hosts of
# one kind differ by a few percent, so a report names the hosts instead.
MUST_MATCH = ("platform", "gpu_name", "gpu_memory_bytes", "driver", "vllm", "torch", "cpu", "cores")
OF_AN_ENDPOINT = ("host", "url")  # must match, too: 127.0.0.1 is another server on each host


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Peak rates of one GPU as given by the user: dense TFLOP/s, and GB/s of its memory."""

    tflops: float
    gbps: float


@dataclass(frozen=True)  # no slots, because cached_property needs __dict__
class Environment:
    """Device, versions and host of a measurement; None means unknown."""

    platform: str | None = None
    gpu_name: str | None = None
    gpu_memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    vllm: str | None = None
    torch: str | None = None
    python: str | None = None
    operating_system: str | None = None
    cpu: str | None = None
    cores: int | None = None
    host: str | None = None  # hash of the host and its boot
    git_commit: str | None = None
    pytest_slmserve: str | None = None
    url: str | None = None  # of an endpoint; the other fields then describe the client's host
    gpu_peaks: GpuPeaks | None = None
    of_gpus: int | None = None  # number of GPUs that have these `cores`; None: cores are not divided among GPUs

    @property
    def kind(self) -> dict[str, Any]:
        """Fields that must match in a comparison."""
        names = (*MUST_MATCH, *OF_AN_ENDPOINT) if self.platform == "remote" else MUST_MATCH
        return {name: getattr(self, name) for name in names}

    @cached_property
    def key(self) -> str:
        return short_hash([*self.kind.values()])

    @property
    def title(self) -> str:
        """Name of the GPU, the CPU with its cores, or the URL."""
        match self.platform:
            case "simulated":
                return f"a {SIMULATED}"
            case "remote":
                return f"whatever serves at {self.url or 'an endpoint'}"
            case "cpu":
                return f"{self.cpu or 'an unknown CPU'}, {self.cores or '-'} cores"
            case _:
                return self.gpu_name or "an unknown GPU"

    @property
    def mode(self) -> str:
        """Option of pytest that measures on this platform."""
        modes: dict[str | None, str] = {"cuda": "--slm-gpu", "cpu": "--slm-cpu", "simulated": "--slm-simulate"}
        return modes.get(self.platform, f"--slm-endpoint={self.url}")

    @cached_property
    def per_gpu_key(self) -> str:
        """Key that ignores the number of GPUs, if the cores are divided among them."""
        return self.on(1).key

    def on(self, gpus: int) -> Environment:
        """Return the environment of an engine on `gpus` GPUs, with the cores of all of them."""
        if not (self.of_gpus and self.cores):
            return self
        return replace(self, cores=self.cores // self.of_gpus * gpus, of_gpus=gpus)

    def of(self, spec: EngineSpec) -> Environment:
        return replace(self, url=spec.url) if spec.url else self


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], sides: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Return a clause for each difference, such as "driver 570.1 there, 580.2 here"."""
    clauses = []
    for name in dict.fromkeys([*one, *other]):
        values = [facts.get(name, "not set") for facts in (one, other)]
        if values[0] != values[1]:
            first, second = ("not known" if value is None else value for value in values)
            clauses.append(f"{name} {first} {sides[0]}, {second} {sides[1]}")
    return clauses


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "0.26.0rc1+cu130" is (0, 26, 0)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def known_releases() -> str:
    """Return the JSON list of vLLM's releases, each with its day, in order."""
    return (Path(__file__).parent / "releases.json").read_text("utf-8")


def are_neighbors(older: str, newer: str) -> bool:
    """Return whether both releases of vLLM are known, and no other one lies between them."""
    known = [release(name) for name, _ in json_value(known_releases())]
    return (release(older), release(newer)) in pairwise(known)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run in the phase "ramp", "settle", "window" or "over"."""

    phase: str
    elapsed_s: float
    done: int
    in_flight: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings that the engine derived from its specification.

    Attributes:
        weight_bytes: bytes on all of its GPUs.
    """

    kv_blocks: int | None = None
    block_size: int | None = None
    kv_windows: tuple[int | None, ...] | None = None  # of each group of layers with a cache; see `kv_cache.KvLayout`
    weight_bytes: int | None = None
    attention_backend: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    capture_sizes: tuple[int, ...] | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    dtype: str | None = None
    event_loop: str | None = None  # of the front end
    model_runner: str | None = None  # vLLM's module that runs the model
    cudagraph_mode: str | None = None
    transformers: str | None = None  # version, if it is the engine
    compile_s: float | None = None  # compile time at start-up as vLLM reports it; with warm caches time to read them
    ready_s: float | None = None  # from the start of its process until it accepts requests, without waits for its turn
    # Seconds of `ready_s` by `analysis.gate.diagnosis.STAGES`, in the first of its processes; empty if not reported.
    stages: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """Table with one row per request, in the order sent; times in seconds since the run began, None if not reached.

    Attributes:
        request: index into the workload.
        admitted_s: when the scheduler first ran it.
        finished: False if the run ended before the request; failed requests have no row.
        cached_tokens: prompt tokens from a prefix cache; empty if not counted.
    """

    request: Sequence[int]
    sent_s: Sequence[float]
    admitted_s: Sequence[float | None]
    first_token_s: Sequence[float | None]
    last_token_s: Sequence[float | None]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    finished: Sequence[bool]
    cached_tokens: Sequence[int | None] = ()

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class Failures:
    """Table with one row per failed request, as `Samples`.

    Attributes:
        sent_s: without a connection, when it would have been sent.
        kind: reason in a word or two.
        scheduled_s: due times; None without a schedule.
    """

    request: tuple[int, ...]
    sent_s: tuple[float, ...]
    ended_s: tuple[float, ...]
    kind: tuple[str, ...]
    scheduled_s: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class Steps:
    """Table with one row per engine step, from vLLM's stat logger; None if a release does not report a field.

    The batch of a step is `new_tokens` minus `accepted`.

    Attributes:
        running: requests after finished ones have left.
        drafts: sequences whose draft was checked; empty without drafts, or if not counted.
        accepted: tokens from drafts, beyond the one that each sequence gets anyway.
    """

    time_s: Sequence[float]
    running: Sequence[int | None]
    waiting: Sequence[int | None]
    new_tokens: Sequence[int]
    prompt_tokens: Sequence[int]
    kv_usage: Sequence[float | None]
    preempted: Sequence[int]
    drafts: Sequence[int] = ()
    accepted: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.time_s)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Table with one row per reading of the sensors; None means unknown.

    Attributes:
        sources: sources that answered.
        time_s: seconds since the run began.
        span_s: seconds over which ratios are means.
        columns: values by number of the sensor (`pytest_slmserve.schema.sensors`).
        missing: number of missing values by reason.
        gpus: columns of each of several GPUs; `columns` then has those of the host.
    """

    sources: tuple[str, ...]
    interval_s: float
    time_s: Sequence[float]
    span_s: Sequence[float | None]
    columns: Mapping[int, Sequence[float | None]]
    missing: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    gpus: tuple[Mapping[int, Sequence[float | None]], ...] = ()

    def __len__(self) -> int:
        return len(self.time_s)


@dataclass(frozen=True, slots=True)
class Stream:
    """Measurements of tokens by the client of a server, in addition to the first and last of each request.

    Attributes:
        tokens: received in successive spans of `bin_s` from `begins_s` on, in seconds since the run began.
        gaps: histogram of the times between pieces of a request in the window. `counts` has at i the gaps from least_s
            * growth**i on, and at -1 smaller ones; `sum_s` is their sum.
        tokens_per_chunk: by the server's count.
        scheduled_s: due time of each request, in the order of the samples; None without a schedule.
        cpu_s: CPU time of the client.
        stamp_uncertainty_s: mean and largest delay of timestamps: chunks that arrive between two reads share the time
            of the last one.
        refused: fields of requests that the server refused.
        salt: token IDs that no other load's prompts have (`engines/endpoint.py`).
        cache_lookups: prompt tokens that the server looked up in its prefix cache, and found, for all clients.
        step_gaps: `gaps` of each step of a ramp.
        unsent_s: due times of requests that were not sent, because the load was given up.
        waited_s: how long a limit of concurrency held requests back; ascending.
    """

    bin_s: float
    begins_s: float
    tokens: tuple[float, ...]
    gaps: Mapping[str, Any]
    tokens_per_chunk: float | None = None
    scheduled_s: tuple[float, ...] | None = None
    cpu_s: float | None = None
    stamp_uncertainty_s: tuple[float, float] | None = None
    refused: tuple[str, ...] = ()
    salt: tuple[int, int] | None = None
    cache_lookups: tuple[int, int] | None = None
    step_gaps: tuple[Mapping[str, Any], ...] = ()
    unsent_s: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()


FIGURE = "figure"  # prefix of the names of derived results that stay in memory without the columns
COLUMNS = ("samples", "steps", "telemetry", "stream", "failed")


@dataclass(frozen=True)  # no slots, because columns of a stored run can leave the memory
class Run:
    """Results of one load on one engine.

    Attributes:
        steps: empty if not reported.
        window_s: beginning and end, in seconds since the run began.
        failures: number of failed requests, which have no row in the samples.
        began_s: by the host's monotonic clock; None for an engine with a clock of its own.
        failed: rows of failed requests, if known.
        derived: computed results (`analysis/estimates.py`).
    """

    samples: Samples
    steps: Steps
    window_s: tuple[float, float]
    failures: int = 0
    first_failure: str | None = None
    began_s: float | None = None
    telemetry: Telemetry | None = field(default_factory=NoneType)  # a plain default would be found in the class
    stream: Stream | None = field(default_factory=NoneType)
    failed: Failures | None = field(default_factory=NoneType)
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a column that is not in memory from `archive/shelf.py`."""
            if name not in COLUMNS or "kept" not in vars(self):
                raise AttributeError(f"a run has no {name!r}")
            return getattr(vars(self)["kept"].columns_of(self), name)


@dataclass(frozen=True, slots=True)
class Replica:
    """Part of one engine in a run of several on one device; a `count` of 1 is the single engine for comparison.

    Attributes:
        group: the same in all records of one run.
        set: hash of all engines, loads and workloads, and of the way of sharing.
    """

    group: str
    index: int
    count: int
    set: str
    sharing: Sharing
    pinned: bool = False
    thread_percentage: int | None = None

    def key(self, alone: str) -> str:
        """Return the key of this engine's measurement, from `alone`, its key without other engines."""
        return short_hash([alone, self.set, self.index])


@dataclass(frozen=True, slots=True)
class GateLaunch:
    """Part of one engine launch in a gate.

    Attributes:
        gate: the same in all records of one gate.
        pair: number from 1.
        second: this launch was the second of the pair.
        outputs: greedy tokens of its first requests, if recorded.
        scores: with real weights, mean log probability in nats of the first baseline's tokens, by request.
        caches: "warm" if compiled code was there.
        window: with both sides on one GPU, number from 1 of this window at its load, which both sides have.
        busy_s: seconds of the window with a running kernel, between idle moments.
        sleep_s: of a gate of start-up, seconds of each time that the engine was put to sleep.
        wake_s: seconds of each time that it was woken.
    """

    gate: str
    pair: int
    side: Side
    second: bool
    outputs: tuple[tuple[int, ...], ...] = ()
    scores: tuple[float, ...] = ()
    caches: Caches = "warm"
    window: int | None = None
    busy_s: float | None = None
    sleep_s: tuple[float, ...] = ()
    wake_s: tuple[float, ...] = ()


@dataclass(frozen=True)  # no slots, because cached_property needs __dict__
class Measurement:
    """One measurement with all data needed to evaluate it later, on another host or by another rule.

    Attributes:
        launch: ID of the engine launch.
        measured_at: ISO 8601, UTC.
        replica: None if the engine had its device to itself.
        paired: only of a gate.
        neighbours: engines of the same run on other GPUs of the host, at begin or end, whichever were more.
    """

    spec: EngineSpec
    resolved: Resolved
    environment: Environment
    workload: WorkloadReference
    load: Load
    run: Run
    launch: str
    measured_at: str
    replica: Replica | None = None
    paired: GateLaunch | None = None
    neighbours: int = 0

    @property
    def alone(self) -> bool:
        """True if the engine had the device to itself."""
        return self.replica is None or self.replica.count == 1

    @cached_property
    def key(self) -> str:
        alone = measurement_key(self.spec, self.workload.hash, self.load, self.environment)
        return self.replica.key(alone) if self.replica else alone

    @cached_property
    def id(self) -> str:
        return short_hash([self.key, self.launch, self.measured_at])


# One repeat of a case: the measurements that its engines made at the same time. A single engine is a group of one.
ReplicaGroup = tuple[Measurement, ...]


def hosts_of(measurements: Iterable[Measurement]) -> set[str | None]:
    return {m.environment.host for m in measurements}


def moment(text: str) -> datetime:
    """Return a time in ISO 8601, in UTC by default."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def replica_set(spec: ReplicaSpec, workload_hashes: Sequence[str], loads: Sequence[Load]) -> str:
    return short_hash([spec.key, list(workload_hashes), [specs.load_facts(load) for load in loads]])


def measurement_key(spec: EngineSpec, workload_hash: str, load: Load, environment: Environment) -> str:
    """Return a hash of everything that can change a measurement: a stored one with this key replaces a new one."""
    return short_hash([spec.key, workload_hash, specs.load_facts(load), environment.key])


def known_fields(cls: type, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of `cls`; a later minor release may have others."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in facts.items() if name in names}


def series_key(spec: EngineSpec, workload_hash: str, load: ClosedLoop, environment: Environment) -> str:
    """Return the key of a measurement without its concurrency, the same for all points of a curve."""
    return measurement_key(spec, workload_hash, replace(load, concurrency=1), environment)
