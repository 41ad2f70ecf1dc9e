"""Planned jobs: what the `jobs` of a marker ask for, and the engine, requests and load that this host gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast, get_args

from pytest_slmserve.analysis.claims.table1 import PUBLISHED
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.planner import MarkerOverrides, Planner
from pytest_slmserve.plan.sweeps import workload_spec
from pytest_slmserve.plan.titles import engine_title, point_title
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS, block_size_of, kv_bytes_per_token, kv_capacity
from pytest_slmserve.schema.literals import Batching, Sharing
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop
from pytest_slmserve.schema.records import (
    Replica,
    replica_set,
)
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec, short_hash
from pytest_slmserve.schema.workloads import Request, Workload
from pytest_slmserve.workload.arrivals import job

WAIT_S = 0.1  # that a dynamic batch waits for more requests


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job of a model.

    requests, rate: as of an open loop. lengths: prompt and output tokens; None: natural lengths, the outputs divided by
    `shorter`. kv_requests: the KV cache holds so many of its requests at full length, and no more; None: as the options
    say. max_num_seqs: the most sequences in the engine at once; None: as the options say. batching: by Transformers, in
    batches made one after the other, "none", "static" or "dynamic"; None: continuously, by vLLM.
    """

    model: str
    requests: int
    rate: float = math.inf
    lengths: tuple[int, int] | None = None
    shorter: int = 1
    kv_requests: int | None = None
    max_num_seqs: int | None = None
    batching: Batching | None = None

    def __str__(self) -> str:
        length = "natural" if self.lengths is None else f"{self.lengths[1]}"
        arrivals = "at-once" if self.rate == math.inf else f"{self.rate:g}-per-s"
        kv = "" if self.kv_requests is None else f"-kv-for-{self.kv_requests}"
        batching = "" if self.batching is None else f"-{self.batching}"
        return f"{short_name(self.model)}-{length}-{arrivals}{kv}{batching}"


def plans_of(words: Mapping[str, Any], mode: str) -> list[JobPlan]:
    """The jobs that a marker names for a mode ("gpu" or "cpu"). Raises BadUsage for words that say nothing."""
    found: Sequence[Mapping[str, Any]] = words["jobs"].get(mode, ())
    known = [field.name for field in fields(JobPlan)]
    for facts in found:
        if unknown := set(facts) - set(known):
            raise BadUsage(f"a job has no {', '.join(sorted(unknown))}", ", ".join(known))
        if facts.get("batching") not in (None, *get_args(Batching)):
            raise BadUsage(f"a job has no batching {facts['batching']!r}", " or ".join(get_args(Batching)))
    return [JobPlan(**facts) for facts in found]


def misfit_reason(planner: Planner, plan: JobPlan) -> str | None:
    """Why it cannot be measured here; None if it can."""
    if why := planner.misfit(plan.model):
        return why
    spec, workload = planner.spec(plan.model), workload_of(planner, plan)
    if spec.platform == "remote":
        own = plan.kv_requests is not None or plan.max_num_seqs is not None
        return "sets limits of its engine, and an endpoint has its own" if own else None
    if workload.longest > spec.max_model_len:
        return f"requests of {workload.longest} tokens do not fit its {spec.max_model_len} positions"
    capacity = kv_capacity(spec, workload.longest)
    if plan.kv_requests is not None and capacity is not None and capacity < plan.kv_requests:
        return f"the KV cache holds {capacity} requests of {workload.longest} tokens"
    return None


def spec_of(planner: Planner, plan: JobPlan) -> EngineSpec:
    """The engine. A KV cache of so many requests: by its bytes, on the CPU, where they are whole GiB, by its blocks."""
    spec = planner.spec(plan.model)
    if spec.platform == "remote":
        return spec
    if plan.max_num_seqs is not None:
        spec = replace(spec, max_num_seqs=plan.max_num_seqs)
    if plan.batching is not None:
        return batched(spec, plan.batching)
    if plan.kv_requests is None:
        return spec
    size, per_token = block_size_of(spec), kv_bytes_per_token(spec)
    if per_token is None:
        raise BadUsage(f"{plan.model}: the bytes of its KV cache are not known", "--slm-dtype float16")
    blocks = plan.kv_requests * -(-workload_of(planner, plan).longest // size) + NULL_BLOCKS
    if spec.platform == "cpu":
        return replace(spec, extra=(*spec.extra, ("num_gpu_blocks_override", blocks)))
    return replace(spec, kv_cache_bytes=blocks * size * per_token)


def batched(spec: EngineSpec, batching: Batching) -> EngineSpec:
    """The same model in Transformers, which knows nothing of vLLM's arguments."""
    extra = spec.extra if spec.platform == "simulated" else ()
    how: tuple[tuple[str, Any], ...] = (("batching", batching), ("wait_s", WAIT_S if batching == "dynamic" else 0.0))
    return replace(spec, interface="transformers", tensor_parallel_size=1, extra=(*extra, *how))


def workload_of(planner: Planner, plan: JobPlan) -> Workload:
    """As many requests as the job has."""
    workload = sized_workload(planner, plan.model, plan.requests, plan.lengths or (None, None))
    return workload if plan.shorter == 1 else shortened(workload, plan.shorter)


def sized_workload(
    planner: Planner, model: str, requests: int, lengths: tuple[int | None, int | None] | None = None
) -> Workload:
    """So many requests; lengths: None for those of the options, a pair of None for natural ones."""
    spec = replace(workload_spec(planner.options, planner.platform), requests=requests)
    if lengths is not None:
        spec = spec.with_lengths(*lengths)
    return planner.requests(model, spec)


def shortened(workload: Workload, by: int) -> Workload:
    """The same prompts, with outputs of a fraction of their length."""
    requests = tuple(Request(r.prompt, max(1, r.output_tokens // by)) for r in workload.requests)
    return Workload(workload.spec, requests, f"{workload.source}, outputs over {by}")


def job_case(planner: Planner, plan: JobPlan) -> tuple[EngineSpec, Workload, OpenLoop]:
    """What is measured: engine, requests, load."""
    return spec_of(planner, plan), workload_of(planner, plan), job(plan.requests, plan.rate, planner.options.seed)


def replica_load(model: str) -> int:
    """Requests in flight in all replicas of a model: 3, 6, 12 ..., which two, three and four of them divide, up to the
    paper's largest batch of the model (arXiv:2404.03353, table 1), or to 96."""
    largest = PUBLISHED.get(short_name(model), 96)
    return max(3 << i for i in range(1, 10) if 3 << i <= max(largest, 6))


def case_key(
    spec: ReplicaSpec, workloads: Sequence[Workload], loads: Sequence[ClosedLoop], environment: Environment
) -> str:
    """The same, before anything was measured."""
    return short_hash([replica_set(spec, [w.hash for w in workloads], loads), environment.key])


USUAL_GPUS, USUAL_LOADS = (1, 2, 4), (1, 16, 64, 256)  # of tests of tensor parallelism


ENOUGH_FOR_A_REPLICA = 32  # requests in flight


def point_id(model: str, load: ClosedLoop) -> str:
    return f"{short_name(model)}-{load.concurrency}"


def variant_of(words: Mapping[str, Any]) -> MarkerOverrides:
    return MarkerOverrides(words.get("lengths"), words.get("ramp_up"))


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """So many engines of a model on the device, and the requests in flight in all; one is an engine alone."""

    model: str
    count: int
    sharing: Sharing
    concurrency: int

    def __str__(self) -> str:
        how = f"-{self.sharing}" if self.count > 1 else ""
        return f"{short_name(self.model)}-{self.concurrency}-x{self.count}{how}"


def ways_to_replicate(options: Options) -> list[tuple[Sharing, int]]:
    """How, and how many engines: by the options, or all URLs of an endpoint (two of one are told to be missing)."""
    if options.endpoint:
        return [("urls", max(2, len(options.endpoint)))]
    return [(how, n) for how in options.sharing for n in options.replicas if n > 1]


@dataclass(frozen=True, slots=True)
class GpusPlan:
    """A model on so many GPUs, and the requests in flight in all: one engine over them, or a replica on each. largest:
    of the loads that its engine is measured under."""

    model: str
    gpus: int
    replicas: bool
    concurrency: int
    largest: int

    def __str__(self) -> str:
        how = "replicas" if self.replicas else "tp"
        return f"{short_name(self.model)}-{self.concurrency}-{how}{self.gpus}"


def usual_loads(model: str) -> tuple[int, ...]:
    """Of tests of tensor parallelism. In the place of the nearest is the one under which replicas on one GPU are
    measured: so all that can be done with several GPUs is known under one load, and costs no cell more."""
    common = replica_load(model)
    nearest = min(USUAL_LOADS, key=lambda load: max(load / common, common / load))
    return tuple(common if load == nearest else load for load in USUAL_LOADS)


def replicas_of(planner: Planner, plan: GpusPlan) -> int:
    """Replicas that the GPUs of a plan have room for, each on as many as the options give an engine."""
    return plan.gpus // planner.options.tensor_parallel_size[0]


def gpus_engine(planner: Planner, plan: GpusPlan) -> tuple[EngineSpec | ReplicaSpec, ClosedLoop]:
    """What runs on the GPUs of a plan, and the load of each engine. Raises BadUsage where it cannot be had."""
    if plan.replicas:
        replicas = replicas_of(planner, plan)
        return planner.replicas([plan.model] * replicas, "gpus"), planner.load(plan.concurrency // replicas)
    spec = planner.spec_on(plan.model, plan.gpus, plan.largest)
    return spec, planner.load_on(spec, plan.concurrency, plan.largest)


def replica_engine(planner: Planner, plan: ReplicaPlan) -> EngineSpec | ReplicaSpec:
    if plan.count == 1:
        return planner.spec(plan.model)
    return planner.replicas([plan.model] * plan.count, plan.sharing)


def job_engine(planner: Planner, plan: JobPlan) -> EngineSpec:
    return spec_of(planner, plan)


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is asked of an engine, or of several at once, and the key that its measurements are known by.

    workloads, loads: of each engine. one: of an engine alone that several are to be compared with; no point of a sweep.
    """

    key: str
    engine: EngineSpec | ReplicaSpec
    workloads: tuple[Workload, ...]
    loads: tuple[Load, ...]
    one: Replica | None = None


def title(question: Question) -> str:
    if isinstance(question.engine, ReplicaSpec):
        loads = cast(tuple[ClosedLoop, ...], question.loads)
        return f"{engine_title(question.engine)} at {sum(load.concurrency for load in loads)}"
    return point_title(question.engine, question.loads[0])
