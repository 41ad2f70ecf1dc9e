"""Facts of a measurement, with its environment: raw, self-contained, never averages only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any

from pytest_slmserve.schema import specs
from pytest_slmserve.schema.errors import Caches, Sharing, Side
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, ReplicaSpec, WorkloadReference, short_hash

SIMULATED = "SIMULATED ENGINE: these numbers come from a formula, not from a device"
# Two records may be compared, or one reused for the other, only where these agree. `host` is not among them: launches
# on two hosts of one kind differ by a few per cent, so a report names the hosts instead.
MUST_MATCH = ("platform", "gpu_name", "gpu_memory_bytes", "driver", "vllm", "torch", "cpu", "cores")
OF_AN_ENDPOINT = ("host", "url")  # of which they must agree too: 127.0.0.1 is another server on each host


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Peak rates of one GPU as the user gave them: dense TFLOP/s, and GB/s of its memory."""

    tflops: float
    gbps: float


@dataclass(frozen=True)  # no slots, as of a workload
class Environment:
    """The device, versions and host of a measurement. Every field may be None: not measured."""

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
    host: str | None = None  # a hash: equal on one boot of one host
    git_commit: str | None = None
    pytest_slmserve: str | None = None
    url: str | None = None  # of an endpoint; all else is then of the host that its client runs on
    gpu_peaks: GpuPeaks | None = None
    of_gpus: int | None = None  # whose parts `cores` are; None: the cores were not divided among GPUs

    @property
    def kind(self) -> dict[str, Any]:
        """Values by field of all that has to match if measurements are compared."""
        names = (*MUST_MATCH, *OF_AN_ENDPOINT) if self.platform == "remote" else MUST_MATCH
        return {name: getattr(self, name) for name in names}

    @cached_property
    def key(self) -> str:
        return short_hash([*self.kind.values()])

    @property
    def title(self) -> str:
        """The device as people read it: name of the GPU, CPU and cores, or URL."""
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
        """The option of pytest that measures in such a place."""
        modes: dict[str | None, str] = {"cuda": "--slm-gpu", "cpu": "--slm-cpu", "simulated": "--slm-simulate"}
        return modes.get(self.platform, f"--slm-endpoint={self.url}")

    @cached_property
    def per_gpu_key(self) -> str:
        """Equal if engines have as many cores for each of their GPUs, and the cores are divided among these."""
        return self.on(1).key

    def on(self, gpus: int) -> Environment:
        """Return the environment of an engine on so many GPUs: with the cores of all of them, where each has a part."""
        if not (self.of_gpus and self.cores):
            return self
        return replace(self, cores=self.cores // self.of_gpus * gpus, of_gpus=gpus)

    def of(self, spec: EngineSpec) -> Environment:
        """Return the environment of `spec` on this host: with its URL, if it is an endpoint."""
        return replace(self, url=spec.url) if spec.url else self


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], sides: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Clauses on what two sets of facts differ in, such as "driver 570.1 there, 580.2 here"."""
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


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run. phase: "ramp", "settle", "window" or "over"."""

    phase: str
    elapsed_s: float
    done: int
    in_flight: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings that the engine made of its specification. weight_bytes: on all of its GPUs together."""

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
    model_runner: str | None = None  # the module of vLLM's that runs the model
    cudagraph_mode: str | None = None
    transformers: str | None = None  # its version, where it is the engine
    compile_s: float | None = None  # of its start, as vLLM counts it: with warm caches what it takes to read them
    ready_s: float | None = None  # from its process's start until it takes requests, less what it waited for its turn
    # Seconds of `ready_s` by `analysis.gate.diagnosis.STAGES`, in the first of its processes; empty if nobody told.
    stages: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """One row per request, in the order sent. Seconds since the run began; None where it never came so far.

    request: index into the workload. admitted_s: when the scheduler first ran it. finished: False if the run ended
    before the request did (it is then cut off, with the tokens it had); failures are counted in Run.failures.
    cached_tokens: of the prompt, those that a cache of prefixes served; empty where nobody counts them.
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
    """One row per request that failed, in the order sent. Seconds since the run began.

    request: index into the workload. sent_s: of one that got no connection, when it would have been sent. ended_s: when
    it had failed. kind: how, in a word or two. scheduled_s: when each was to be sent; None without a schedule.
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
    """One row per engine step, as vLLM's stat logger saw it; None where a release does not report a field. `running` is
    counted after finished requests have left. The batch is `new_tokens` less `accepted`.

    drafts, accepted: with speculative decoding the sequences whose draft was checked, and the tokens that drafts added
    to the one that each sequence gets anyway; both empty where nothing was drafted, or nobody counts."""

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
    """Readings of the sensors during a run, one row per reading, in the order taken. None is "not known".

    sources: who answered. time_s: seconds since the run began. span_s: time before a reading that its ratios are means
    over. columns: by number (`pytest_slmserve.schema.sensors`), SI units and ratios of 1. missing: why values are None,
    and how many. notes: what failed. gpus: of several GPUs the columns of each; `columns` then has those of the host.
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
    """Measurements of the tokens by the client of a server, beside each request's first and last.

    tokens: received in successive spans of `bin_s` from `begins_s` on, since the run began. gaps: a histogram of the
    times between successive pieces of a request that lie in the window; `counts` has at i those from
    least_s * growth**i on, at -1 those below; `sum_s` is their sum. step_gaps: the same of the window of each step of a
    ramp. tokens_per_chunk: by the server's count. scheduled_s: when each request was to be sent, in the order of the
    samples; None without a schedule. unsent_s: when those were to be sent that were not, since the load was given up.
    waited_s: of a job that is held back, how long each request had been there when it was to be sent; ascending. cpu_s:
    of the client. stamp_uncertainty_s: by how much stamps can be too late, in the mean over all pieces and at most:
    chunks that came since the client looked last have one stamp, that of the last of them. refused: what a server that
    is not ours refused of what we ask for. salt: ids that no other load's prompts have (`engines/endpoint.py`), if any.
    cache_lookups: prompt tokens that the server looked up in its cache of prefixes, and found there, whoever asked.
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


FIGURE = "figure"  # begins the names of derived results that stay in memory when the columns do not
COLUMNS = ("samples", "steps", "telemetry", "stream", "failed")


@dataclass(frozen=True)  # no slots: columns of a stored one can leave the memory
class Run:
    """Results of one load on one engine. window_s: from and to, in seconds since the run began. began_s: that beginning
    by the host's monotonic clock; None for an engine with a clock of its own. steps: none if a server does not report
    them. failures: number of failed requests, of which the samples have no row. failed: their own rows, if it was noted
    when each was sent. derived: results computed from the run, by name and arguments (`analysis/estimates.py`)."""

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
            """A column that is not in memory, from where it is kept (`archive/shelf.py`)."""
            if name not in COLUMNS or "kept" not in vars(self):
                raise AttributeError(f"a run has no {name!r}")
            return getattr(vars(self)["kept"].columns_of(self), name)


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's part in a run of several on one device, or of one (count 1) that they are compared with, which is no
    point of a sweep. group: the same in all records of one run. set: hash of all engines, how they share the device,
    and of all loads and workloads."""

    group: str
    index: int
    count: int
    set: str
    sharing: Sharing
    pinned: bool = False
    thread_percentage: int | None = None

    def key(self, alone: str) -> str:
        """Return the key of this engine's measurement. alone: that without regard to the engines beside it."""
        return short_hash([alone, self.set, self.index])


@dataclass(frozen=True, slots=True)
class GateLaunch:
    """A launch's part in a gate: its side, in which pair (from 1), and whether it came second in it. outputs: greedy
    tokens of its first requests, if they were asked for. scores: with real weights the mean log probability, in nats,
    of the first baseline's tokens of each. caches: "warm" if compiled code was there when it started. window: of a gate
    whose sides live on one GPU at once, the number of this window at its load in this launch, from 1; both sides have
    one of each number. busy_s: seconds of it in which a kernel ran, counted between idle moments. sleep_s, wake_s: of a
    gate of the start, seconds of each time that the engine was put to sleep and woken."""

    gate: str  # the same in all records of one
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


@dataclass(frozen=True)  # no slots, as of a workload
class Measurement:
    """A run with all that is needed to judge it later, on another machine, by another rule. neighbours: engines of the
    same run that worked on other GPUs of the host when this began or ended, whichever were more."""

    spec: EngineSpec
    resolved: Resolved
    environment: Environment
    workload: WorkloadReference
    load: Load
    run: Run
    launch: str  # one start of one engine
    measured_at: str  # ISO 8601, UTC
    replica: Replica | None = None  # None: an engine that had its device to itself
    paired: GateLaunch | None = None  # of a gate
    neighbours: int = 0

    @property
    def alone(self) -> bool:
        """Whether the engine had the device to itself."""
        return self.replica is None or self.replica.count == 1

    @cached_property
    def key(self) -> str:
        alone = measurement_key(self.spec, self.workload.hash, self.load, self.environment)
        return self.replica.key(alone) if self.replica else alone

    @cached_property
    def id(self) -> str:
        return short_hash([self.key, self.launch, self.measured_at])


# One repeat of a case: what its engines did at the same time, in their order. One engine alone is a group of one.
ReplicaGroup = tuple[Measurement, ...]


def hosts_of(measurements: Iterable[Measurement]) -> set[str | None]:
    """Boots of hosts that made the measurements; None among them where one does not tell."""
    return {m.environment.host for m in measurements}


def moment(text: str) -> datetime:
    """Return a time in ISO 8601, of UTC where it does not say. Raises ValueError."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def replica_set(spec: ReplicaSpec, workload_hashes: Sequence[str], loads: Sequence[Load]) -> str:
    """Hash of several engines on one device with their workloads and loads: all that can change their measurement."""
    return short_hash([spec.key, list(workload_hashes), [specs.load_facts(load) for load in loads]])


def measurement_key(spec: EngineSpec, workload_hash: str, load: Load, environment: Environment) -> str:
    """Hash of all that can change a measurement: a stored measurement of the same key stands for a new one."""
    return short_hash([spec.key, workload_hash, specs.load_facts(load), environment.key])


def known_fields(cls: type, facts: dict[str, Any]) -> dict[str, Any]:
    """Entries of `facts` that `cls` has a field for: a later minor release may have added some."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in facts.items() if name in names}


def series_key(spec: EngineSpec, workload_hash: str, load: ClosedLoop, environment: Environment) -> str:
    """Hash of all that makes the key of a measurement except the concurrency: points of one curve have the same."""
    return measurement_key(spec, workload_hash, replace(load, concurrency=1), environment)
