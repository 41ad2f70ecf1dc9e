"""Facts of a measurement: raw, self-contained, never averages only. Seconds inside; `None` is "not measured"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import Caches, Sharing, Side
from pytest_slmserve.schema.loads import ClosedLoop, Load, WorkloadReference, load_facts
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec, short_hash


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run: phase is "ramp", "settle", "window" or "over"."""

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
    transformers: str | None = None  # its version, where it is the engine
    compile_s: float | None = None  # of its start, as vLLM counts it: with warm caches what it takes to read them
    ready_s: float | None = None  # from its process's start until it takes requests, less what it waited for its turn


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
    """One row per engine step, as vLLM's stat logger saw it. `running` is counted after finished requests have left;
    in a step that only decodes, `new_tokens` is the batch. None where a release does not report a field."""

    time_s: Sequence[float]
    running: Sequence[int | None]
    waiting: Sequence[int | None]
    new_tokens: Sequence[int]
    prompt_tokens: Sequence[int]
    kv_usage: Sequence[float | None]
    preempted: Sequence[int]

    def __len__(self) -> int:
        return len(self.time_s)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Readings of the sensors during a run, one row per reading, in the order taken. None is "not known".

    sources: who answered. time_s: when a reading was taken, in seconds since the run began. span_s: length of the time
    before it that its ratios are means over. columns: by number (`pytest_slmserve.schema.sensors`), SI units and ratios
    of 1. missing: why values are None, and how many. notes: what failed, one sentence each. gpus: the columns of each
    GPU, where there were several; `columns` then has what the host said.
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
    waited_s: of a job that is held back, how long each that was sent had been there when it was to be sent; ascending.
    cpu_s: of the client. stamp_uncertainty_s: by how much the stamps of what was fetched at one time can be too late,
    in the mean over all pieces and at most: chunks that came since the client looked last have one stamp, that of the
    last of them. refused: what a server that is not ours refused of what we ask for, so that it was not asked for.
    salt: ids that no other load's prompts have (`engines/endpoint.py`); None where they are as the workload has them.
    cache_lookups: prompt tokens that the server looked up in its cache of prefixes meanwhile, and found there, whoever
    asked.
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


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one load on one engine. `window_s`: from and to, in seconds since the run began. `began_s`: that
    beginning by the host's monotonic clock; None for an engine with a clock of its own. steps: none where a server
    does not report them. failures: number of failed requests, of which the samples have no row. failed: their own rows;
    None where there are none, or where it was not noted when each was sent. stream: where there was a client. derived:
    results computed from the run, by name (`analysis/stats/estimates.py`)."""

    samples: Samples
    steps: Steps
    window_s: tuple[float, float]
    failures: int = 0
    first_failure: str | None = None
    began_s: float | None = None
    telemetry: Telemetry | None = None
    stream: Stream | None = None
    failed: Failures | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's part in a run of several on one device; of one alone (count 1), where it is there to compare them
    with, which makes it no point of a sweep.

    group: the same in all records of one run. index, count: which of how many. set: hash of all engines, how they share
    the device, and of all loads and workloads: what was asked.
    """

    group: str
    index: int
    count: int
    set: str
    sharing: Sharing
    pinned: bool = False
    thread_percentage: int | None = None

    def key(self, alone: str) -> str:
        """The key of this engine's measurement. alone: its key without regard to the engines measured at the same
        time."""
        return short_hash([alone, self.set, self.index])


@dataclass(frozen=True, slots=True)
class GateLaunch:
    """A launch's part in a gate: which side, in which pair (from 1), and whether it came second in it. outputs: greedy
    tokens of its first requests, where they were asked for. scores: mean log probability, in nats, of the tokens that
    the first baseline gave to each of them; with real weights. caches: "warm" if compiled code was there when it
    started."""

    gate: str  # the same in all records of one
    pair: int
    side: Side
    second: bool
    outputs: tuple[tuple[int, ...], ...] = ()
    scores: tuple[float, ...] = ()
    caches: Caches = "warm"


@dataclass(frozen=True)  # no slots, as of a workload
class Measurement:
    """A run with all that is needed to judge it later, on another machine, by another rule. replica: None for an engine
    that had its device to itself. paired: None but in a gate. neighbours: engines of the same run that worked on other
    GPUs of the host when this began or ended, whichever were more."""

    spec: EngineSpec
    resolved: Resolved
    environment: Environment
    workload: WorkloadReference
    load: Load
    run: Run
    launch: str  # one start of one engine
    measured_at: str  # ISO 8601, UTC
    replica: Replica | None = None
    paired: GateLaunch | None = None
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
    """A time in ISO 8601, of UTC where it does not say. Raises ValueError."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def replica_set(spec: ReplicaSpec, workload_hashes: Sequence[str], loads: Sequence[Load]) -> str:
    """Hash of several engines on one device with their workloads and loads: all that can change their measurement."""
    return short_hash([spec.key, list(workload_hashes), [load_facts(load) for load in loads]])


def measurement_key(spec: EngineSpec, workload_hash: str, load: Load, environment: Environment) -> str:
    """Hash of all that can change a measurement: a stored measurement of the same key stands for a new one."""
    return short_hash([spec.key, workload_hash, load_facts(load), environment.key])


def known_fields(cls: type, facts: dict[str, Any]) -> dict[str, Any]:
    """Entries of `facts` that `cls` has a field for: a later minor release may have added some."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in facts.items() if name in names}


def series_key(spec: EngineSpec, workload_hash: str, load: ClosedLoop, environment: Environment) -> str:
    """Hash of all that makes the key of a measurement except the concurrency: points of one curve have the same."""
    return measurement_key(spec, workload_hash, replace(load, concurrency=1), environment)
