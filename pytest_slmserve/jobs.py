"""Planned jobs: what the `jobs` of a marker ask for, and the engine, requests and load that this host gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from pytest_slmserve.agenda import Agenda
from pytest_slmserve.plan import workload_spec
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS, block_size_of, kv_bytes_per_token, kv_capacity
from pytest_slmserve.schema.literals import Batching
from pytest_slmserve.schema.loads import Job
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.workloads import Request, Workload
from pytest_slmserve.workload.arrivals import job

WAIT_S = 0.1  # that a dynamic batch waits for more requests


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job of a model.

    requests, rate: as of a `Job`. lengths: prompt and output tokens; None: natural lengths, the outputs divided by
    `shorter`. kv_requests: the KV cache holds so many of its requests at full length, and no more; None: as the options
    say. max_num_seqs: the most sequences in the engine at once; None: as the options say. batching: by Transformers, in
    batches made one after the other, "none", "static" or "dynamic"; None: continuously, by vLLM.
    """

    model: str
    requests: int
    rate: float | None = None
    lengths: tuple[int, int] | None = None
    shorter: int = 1
    kv_requests: int | None = None
    max_num_seqs: int | None = None
    batching: Batching | None = None

    def __str__(self) -> str:
        length = "natural" if self.lengths is None else f"{self.lengths[1]}"
        arrivals = "at-once" if self.rate is None else f"{self.rate:g}-per-s"
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


def why_not(agenda: Agenda, plan: JobPlan) -> str | None:
    """Why it cannot be measured here; None if it can."""
    if why := agenda.misfit(plan.model):
        return why
    spec, workload = agenda.spec(plan.model), workload_of(agenda, plan)
    if spec.backend == "remote":
        own = plan.kv_requests is not None or plan.max_num_seqs is not None
        return "sets limits of its engine, and an endpoint has its own" if own else None
    if workload.longest > spec.max_model_len:
        return f"requests of {workload.longest} tokens do not fit its {spec.max_model_len} positions"
    capacity = kv_capacity(spec, workload.longest)
    if plan.kv_requests is not None and capacity is not None and capacity < plan.kv_requests:
        return f"the KV cache holds {capacity} requests of {workload.longest} tokens"
    return None


def spec_of(agenda: Agenda, plan: JobPlan) -> EngineSpec:
    """The engine. A KV cache of so many requests: by its bytes, on the CPU, where they are whole GiB, by its blocks."""
    spec = agenda.spec(plan.model)
    if spec.backend == "remote":
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
    blocks = plan.kv_requests * -(-workload_of(agenda, plan).longest // size) + NULL_BLOCKS
    if spec.backend == "cpu":
        return replace(spec, extra=(*spec.extra, ("num_gpu_blocks_override", blocks)))
    return replace(spec, kv_cache_bytes=blocks * size * per_token)


def batched(spec: EngineSpec, batching: Batching) -> EngineSpec:
    """The same model in Transformers, which knows nothing of vLLM's arguments."""
    extra = spec.extra if spec.backend == "fake" else ()
    how: tuple[tuple[str, Any], ...] = (("batching", batching), ("wait_s", WAIT_S if batching == "dynamic" else 0.0))
    return replace(spec, door="transformers", tensor_parallel=1, extra=(*extra, *how))


def workload_of(agenda: Agenda, plan: JobPlan) -> Workload:
    """As many requests as the job has."""
    workload = sized_workload(agenda, plan.model, plan.requests, plan.lengths or (None, None))
    return workload if plan.shorter == 1 else shortened(workload, plan.shorter)


def sized_workload(
    agenda: Agenda, model: str, requests: int, lengths: tuple[int | None, int | None] | None = None
) -> Workload:
    """So many requests; lengths: None for those of the options, a pair of None for natural ones."""
    spec = replace(workload_spec(agenda.options, agenda.backend), requests=requests)
    if lengths is not None:
        spec = spec.with_lengths(*lengths)
    return agenda.requests(model, spec)


def shortened(workload: Workload, by: int) -> Workload:
    """The same prompts, with outputs of a fraction of their length."""
    requests = tuple(Request(r.prompt, max(1, r.output_tokens // by)) for r in workload.requests)
    return Workload(workload.spec, requests, f"{workload.source}, outputs over {by}")


def job_case(agenda: Agenda, plan: JobPlan) -> tuple[EngineSpec, Workload, Job]:
    """What is measured: engine, requests, load."""
    return spec_of(agenda, plan), workload_of(agenda, plan), job(plan.requests, plan.rate, agenda.options.seed)
