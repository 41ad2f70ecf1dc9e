"""The cases of a run: what the options and a marker's words have each kind of test measure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pytest_slmserve.analysis.claims.evidence import PUBLISHED
from pytest_slmserve.engines.base import check_fits
from pytest_slmserve.engines.replicas import cannot_share
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.planner import MarkerOverrides, Planner, too_long, uneven, workload_spec
from pytest_slmserve.schema import kv_cache
from pytest_slmserve.schema.errors import BadUsage, Batching, Sharing
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec, Request, Workload
from pytest_slmserve.workload.arrivals import job

USUAL_GPUS, USUAL_LOADS = (1, 2, 4), (1, 16, 64, 256)  # of tests of tensor parallelism
ENOUGH_FOR_A_REPLICA = 32  # requests in flight
A_POINT = 'points=[("opt-125m", 64)]'
A_JOB = '{"model": "opt-125m", "requests": 500, "rate": 10, "lengths": (512, 256)}'
WAIT_S = 0.1  # that a dynamic batch waits for more requests


def point_cases(planner: Planner, words: Mapping[str, Any]) -> list[Case]:
    """Return the points of the planned sweeps, or those that a marker names, of the models that were chosen; all of
    them if none was chosen. Raises BadUsage for an unknown model, and for requests that are too long for it."""
    overrides = overrides_of(words)
    if "points" not in words:
        planned = [case for model in planner.models for case in planner.sweep(model).cases]
        if overrides.lengths is None:
            return planned
        return [replace(case, workloads=(planner.workload(case.model, overrides),)) for case in planned]
    if not isinstance(words["points"], Iterable):
        raise BadUsage(f"points={words['points']!r} is no list of points", A_POINT)
    found = []
    for point in words["points"]:
        match point:
            case (str(model), int(concurrency)):
                pass
            case _:
                raise BadUsage(f"{point!r} is no point: a model and a concurrency", A_POINT)
        if planner.options.models and not planner.swept(model):
            continue
        name, why = f"{short_name(model)}-{concurrency}", planner.misfit(model)
        if why is None:
            case = planner.point(model, planner.load(concurrency, overrides), overrides, name)
            spec, workload = case.each[0], case.workloads[0]
            why = kv_cache.no_room(spec, workload.longest, concurrency)
            if why is None and planner.platform != "remote":
                check_fits(spec, workload)
        found.append(Case(id=name, model=model, skip_reason=why) if why else case)
    return found


def overrides_of(words: Mapping[str, Any]) -> MarkerOverrides:
    """Raises BadUsage for lengths that are no pair."""
    lengths = words.get("lengths")
    return MarkerOverrides(None if lengths is None else checked_lengths(lengths), words.get("ramp_up"))


def checked_lengths(given: Any) -> tuple[Any, Any]:
    """The prompt and output tokens that somebody gave as a pair; None in it is a natural length. Raises BadUsage."""
    match given:
        case (int() | None as prompt, int() | None as output):
            return prompt, output
    raise BadUsage(f"lengths={given!r} is no pair of prompt and output tokens", "lengths=(512, 64)")


def replica_cases(planner: Planner) -> list[Case]:
    """Return cases of replicas: for each model one engine alone under each load, then each number of replicas by each
    way of sharing."""
    found, options, urls = [], planner.options, len(planner.options.endpoint)
    ways: list[tuple[Sharing, int]] = [(how, n) for how in options.sharing for n in options.replicas if n > 1]
    if urls:
        ways = [("urls", max(2, urls))]  # one counts as two
    for model in planner.models:
        # Those of the options, else one that many numbers of replicas divide, or all URLs.
        usual, name = replica_load(model), short_name(model)
        loads = options.concurrency or (usual - usual % (urls or 1),)
        spec, workload = planner.spec(model), planner.workload(model)
        for concurrency in loads:
            id, why = f"{name}-{concurrency}-x1", kv_cache.no_room(spec, workload.longest, concurrency)
            try:
                alone = ReplicaSpec((spec,), "urls" if planner.platform == "remote" else "time-slicing")
                case = planner.case(alone, [workload], [planner.load(concurrency)], model=model, id=id)
            except BadUsage as error:  # on several GPUs, say, which no set of replicas shares
                why = why or error.problem
            found.append(Case(model=model, id=id, skip_reason=why) if why else case)
        for how, n in ways:
            found += [_replicas(planner, model, n, how, load, f"{name}-{load}-x{n}-{how}") for load in loads]
    return found


def _replicas(planner: Planner, model: str, count: int, sharing: Sharing, concurrency: int, name: str) -> Case:
    """Return the case of so many replicas of a model, or the reason why they cannot serve so many requests in all on
    this device."""
    options = planner.options
    try:
        spec = planner.replicas([model] * count, sharing)
    except BadUsage as error:
        return Case(model=model, id=name, skip_reason=error.problem)
    full = kv_cache.no_room(spec.engines[0], planner.workload(model).longest, concurrency // count)
    why = uneven(concurrency, count) or (f"{full} in a replica" if full else None)
    on_a_cluster = options.ray and not options.on_all_gpus and planner.platform == "cuda"
    if why is None and on_a_cluster and sharing in ("mps", "mig"):
        why = f"whether a node of a cluster can share a GPU by {sharing} is not known here"
    if why := why or cannot_share(spec, planner.host.device):
        return Case(model=model, id=name, skip_reason=why)
    return planner.replicas_case(spec, concurrency, model=model, id=name)


def replica_load(model: str) -> int:
    """Return the requests in flight in all replicas of a model: 3, 6, 12 ..., which two, three and four of them divide,
    up to the paper's largest batch of the model (arXiv:2404.03353, table 1), or to 96."""
    largest = PUBLISHED.get(short_name(model), 96)
    return max(3 << i for i in range(1, 10) if 3 << i <= max(largest, 6))


def gpus_cases(planner: Planner, models: Sequence[str]) -> list[Case]:
    """Return cases on several GPUs: for each model one engine on each number of GPUs under each load. Sets of replicas,
    each with GPUs of its own, follow under loads of at least ENOUGH_FOR_A_REPLICA requests for each GPU. An endpoint
    has none."""
    options = planner.options
    if options.endpoint:
        return []
    degrees = options.tensor_parallel_size if options.source["tensor_parallel_size"] != "default" else USUAL_GPUS
    wide, replicas, first = [], [], options.tensor_parallel_size[0]
    for model in models:
        loads = options.concurrency or usual_loads(model)
        for n in degrees:
            wide += [_on_gpus(planner, model, n, load, loads[-1]) for load in loads]
            enough = [load for load in loads if n > degrees[0] and load >= n * ENOUGH_FOR_A_REPLICA]
            names = {load: f"{short_name(model)}-{load}-replicas{n}" for load in enough}
            replicas += [_replicas(planner, model, n // first, "gpus", load, name) for load, name in names.items()]
    return wide + replicas


def _on_gpus(planner: Planner, model: str, gpus: int, concurrency: int, largest: int) -> Case:
    """Return the case of one engine over so many GPUs. largest: of the loads that it is measured under. If fewer have
    room in its KV cache it runs no more than those, so that the others wait, and none is thrown out to come again."""
    name = f"{short_name(model)}-{concurrency}-tp{gpus}"
    try:
        spec, workload = planner.spec(model, gpus), planner.workload(model)
        room = kv_cache.kv_capacity(spec, workload.longest)
        if room is not None and room < 1:
            raise BadUsage(f"{model}: the KV cache has no room for a request of {workload.longest} tokens", "more GPUs")
    except BadUsage as error:
        return Case(model=model, id=name, skip_reason=error.problem)
    if room is not None and room < largest:
        spec = replace(spec, max_num_seqs=min(room, spec.max_num_seqs))
    # What waits in an engine that may not run `largest` at once lives longer, so the load settles later. Smaller ones
    # too, or they would be points of another curve.
    load = planner.load(concurrency)
    load = replace(load, settle_lifetimes=load.settle_lifetimes * -(-largest // spec.max_num_seqs))
    case = planner.case(spec, [workload], [load], model=model, id=name)
    planner.beside.add(case.series)
    return case


def usual_loads(model: str) -> tuple[int, ...]:
    """Return numbers of requests in flight under which tests of tensor parallelism measure `model`. The load of
    replicas on one GPU (`replica_load`) replaces the nearest of USUAL_LOADS. So one load compares all uses of several
    GPUs, at the cost of no further cell."""
    common = replica_load(model)
    nearest = min(USUAL_LOADS, key=lambda load: max(load / common, common / load))
    return tuple(common if load == nearest else load for load in USUAL_LOADS)


def job_cases(planner: Planner, words: Mapping[str, Any]) -> list[Case]:
    """The jobs that a marker names for this mode ("gpu" or "cpu") or, as a list, for any, of the models that were
    chosen; the simulated engine has those of a GPU. Raises BadUsage for words that say nothing."""
    jobs = words["jobs"]
    if isinstance(jobs, Mapping) and (unknown := jobs.keys() - {"gpu", "cpu"}):
        raise BadUsage(f"jobs for {', '.join(map(repr, sorted(unknown)))}, which is no mode", '"gpu" or "cpu"')
    found = jobs.get("cpu" if planner.platform == "cpu" else "gpu", ()) if isinstance(jobs, Mapping) else jobs
    known = list(inspect.signature(job_case).parameters)[1:]
    if not isinstance(found, Iterable):
        raise BadUsage(f"jobs={jobs!r} is no list of jobs", f"jobs=[{A_JOB}]")
    for facts in found:
        if isinstance(facts, Mapping) and (unknown := set(facts) - set(known)):
            raise BadUsage(f"a job has no {', '.join(sorted(unknown))}", ", ".join(known))
        if not isinstance(facts, Mapping) or not {"model", "requests"} <= facts.keys():
            raise BadUsage(f"{facts!r} is no job: a model and a number of requests", A_JOB)
        if facts.get("batching") not in (None, *get_args(Batching)):
            raise BadUsage(f"a job has no batching {facts['batching']!r}", " or ".join(get_args(Batching)))
    chosen = planner.options.models
    return [job_case(planner, **facts) for facts in found if not chosen or planner.swept(facts["model"])]


def job_case(
    planner: Planner,
    model: str,
    requests: int,
    rate: float = math.inf,
    lengths: tuple[int, int] | None = None,
    shorter: int = 1,
    kv_requests: int | None = None,
    max_num_seqs: int | None = None,
    gpu_memory: str | None = None,
    batching: Batching | None = None,
) -> Case:
    """One job of a model, as many requests as its workload has. Raises BadUsage for an unknown model.

    requests, rate: as of an open loop. lengths: prompt and output tokens; None: natural lengths, the outputs divided by
    `shorter`. kv_requests: the KV cache holds so many of its requests at full length, and no more; None: as the options
    say. max_num_seqs: the most sequences in the engine at once; None: as the options say. gpu_memory: the GPU memory to
    plan for, "40GiB"; None: as the options say. batching: by Transformers, in batches made one after the other, "none",
    "static" or "dynamic"; None: continuously, by vLLM.
    """
    arrivals = f"{requests}-at-once" if rate == math.inf else f"{rate:g}-per-s"
    limits = {"kv-for": kv_requests, "most": max_num_seqs, "in": gpu_memory}
    limited = "".join(f"-{name}-{limit}" for name, limit in limits.items() if limit is not None)
    how = "" if batching is None else f"-{batching}"
    name = f"{short_name(model)}-{'natural' if lengths is None else lengths[1]}-{arrivals}{limited}{how}"
    memory = None if gpu_memory is None else kv_cache.parse_memory(gpu_memory)
    if why := planner.misfit(model, memory):
        return Case(model=model, id=name, skip_reason=why)
    spec = planner.spec(model, gpu_memory=memory)
    workload = sized_workload(planner, model, requests, lengths or (None, None))
    if shorter > 1:
        cut = tuple(Request(r.prompt, max(1, r.output_tokens // shorter)) for r in workload.requests)
        workload = Workload(workload.spec, cut, f"{workload.source}, outputs over {shorter}")
    layout, longest = kv_cache.kv_layout(spec), workload.longest
    if spec.platform == "remote":
        if any(limit is not None for limit in limits.values()):
            why = "sets limits of its engine, and an endpoint has its own"
    elif longest > spec.max_model_len:
        why = too_long(longest, spec.max_model_len)
    elif kv_requests is not None and (layout.bytes_per_token is None or layout.windows is None):
        why = "what its layers keep is not known beforehand, so no KV cache can be sized for it"
    elif kv_requests is not None:
        why = kv_cache.no_room(spec, longest, kv_requests)
    if why is not None:
        return Case(model=model, id=name, skip_reason=why)
    if spec.platform != "remote":
        spec = replace(spec, max_num_seqs=max_num_seqs or spec.max_num_seqs)
    if batching is not None and spec.platform != "remote":
        spec = batched(spec, batching)
    elif kv_requests and layout.windows and layout.bytes_per_token:
        each = kv_cache.request_blocks(spec, layout.windows, layout.block_size, longest)
        blocks = kv_requests * each + kv_cache.NULL_BLOCKS
        if spec.platform == "cpu":  # whose cache is sized in whole GiB
            spec = replace(spec, extra=(*spec.extra, ("num_gpu_blocks_override", blocks)))
        else:
            spec = replace(spec, kv_cache_bytes=blocks * layout.block_size * layout.bytes_per_token)
    return planner.case(spec, [workload], [job(requests, rate, planner.options.seed)], model=model, id=name)


def batched(spec: EngineSpec, batching: Batching) -> EngineSpec:
    """A copy of `spec` that serves the model by Transformers, on one GPU, with this batching. It drops vLLM's
    arguments, which Transformers does not have; the simulated engine keeps its own."""
    extra = spec.extra if spec.platform == "simulated" else ()
    how: tuple[tuple[str, Any], ...] = (("batching", batching), ("wait_s", WAIT_S if batching == "dynamic" else 0.0))
    return replace(spec, interface="transformers", tensor_parallel_size=1, extra=(*extra, *how))


def sized_workload(
    planner: Planner, model: str, requests: int, lengths: tuple[int | None, int | None] | None
) -> Workload:
    """A workload of so many requests. lengths: tokens both ways; None: those of the options; of None: natural ones."""
    spec = replace(workload_spec(planner.options, planner.platform), requests=requests)
    if lengths is not None:
        spec = spec.with_lengths(*checked_lengths(lengths))
    return planner.requests(model, spec)
