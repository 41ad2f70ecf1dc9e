"""Models to advise on, from sweeps of ours or from external results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pytest_slmserve.analysis.advice.advisor import needs
from pytest_slmserve.analysis.advice.batch_choice import (
    Footprint,
    ModelSweep,
    Objectives,
    ServedEngine,
    decide,
    with_tpot,
)
from pytest_slmserve.analysis.device.gpu_figures import most_memory_used
from pytest_slmserve.analysis.metrics.roofline import IDLE, idle_share
from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points import Point, ratio
from pytest_slmserve.analysis.stats.estimates import mean_of_known, percent, percent_interval
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, labels, peaks_of_curve, work_of_curve
from pytest_slmserve.analysis.verdict import Verdict, above, every
from pytest_slmserve.schema.catalog import hub_name, short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import (
    RESERVE_BYTES,
    block_size_of,
    kv_bytes,
    kv_bytes_per_token,
    kv_windows,
    value_bytes,
    weight_bytes,
)
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec

GRAPHS = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config"}  # arguments of the engine
# Arguments that an advice sets: what the sweep was given for them beside its specification no longer counts.
KV_SIZE = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
ADVISED = ("max_num_seqs", "max_model_len", *KV_SIZE)
TOLD_APART = {*ADVISED, "dtype", "max_num_batched_tokens"}  # of a served engine
LARGEST_GRAPH = 512  # tokens, of vLLM's default: twice max_num_seqs, and no more than this
MANY = 0.3  # share of the steps that hold a prompt: what fewer of them cost is not most of the time
NOT_THE_BATCH = 0.10  # share by which requests in flight may miss the knob before a reader is told
LATENCY = "the mean time per output token after the first, TPOT"


@dataclass(frozen=True, slots=True)
class ResultSource:
    """Source of the numbers: the device and its memory, the kind of latency, and notes on all of them."""

    device: str
    latency: str
    gpu_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourcedSweeps:
    """Models, and where they were measured."""

    subjects: tuple[ModelSweep, ...]
    source: ResultSource


def of_curves(
    curves: Sequence[Curve], model: str | None, longest: int | None, notes: Sequence[str] = ()
) -> SourcedSweeps:
    """Models to advise on, one for each model of the curves, in the order first met. model: this one alone. longest:
    tokens of a request at full length, None for the measured length. Raises BadUsage."""
    named = list(zip(curves, labels(curves), strict=True))
    if model is not None:
        there = dict.fromkeys(curve.subject for curve in curves)
        named = [(curve, label) for curve, label in named if curve.subject == short_name(model)]
        if curves and not named:
            raise BadUsage(f"there are no records of {model}", f"--model with one of {', '.join(there)}")
    # Only these show what a GPU holds, and when another engine pays.
    on_one = [row for row in named if row[0].spec is None or row[0].spec.tensor_parallel_size == 1]
    if named and not on_one:
        problem = f"{named[0][0].subject} was measured on several GPUs at once, and advice is for one"
        raise BadUsage(problem, "records of --slm-tensor-parallel-size 1")
    named = on_one
    where = one_device([curve for curve, _ in named])
    names = dict.fromkeys(curve.subject for curve, _ in named)
    subjects = tuple(_of_sweeps([row for row in named if row[0].subject == name], longest) for name in names)
    if where is None:
        return SourcedSweeps(subjects, ResultSource("nothing was measured", LATENCY, None, tuple(notes)))
    return SourcedSweeps(subjects, ResultSource(where.title, LATENCY, where.gpu_memory_bytes, tuple(notes)))


def one_device(curves: Sequence[Curve]) -> Environment | None:
    """Environment of the one device of all curves, None where none is known. Raises BadUsage for several kinds."""
    devices = {(e.platform, e.gpu_name, e.gpu_memory_bytes, e.url): e for c in curves if (e := c.environment)}
    if len(devices) > 1:
        names = ", ".join(e.url or e.gpu_name or e.platform or "unknown" for e in devices.values())
        raise BadUsage(f"the records are of several devices ({names})", "records of one, or --model")
    return next(iter(devices.values()), None)


def _of_sweeps(named: Sequence[tuple[Curve, str]], longest: int | None) -> ModelSweep:
    """The sweep of one model with the most loads to choose from, and of several such the last measured."""
    subjects = [of_curve(curve, longest) for curve, _ in named]
    ranks = [(len(s.usable), max(m.measured_at for m in c.measurements)) for s, (c, _) in zip(subjects, named)]
    best = max(range(len(ranks)), key=lambda i: ranks[i])
    if len(named) == 1:
        return subjects[0]
    others = "; ".join(label for i, (_, label) in enumerate(named) if i != best)
    note = f"taken is the sweep with the most loads ({named[best][1]}), not {others}"
    return replace(subjects[best], notes=(*subjects[best].notes, note))


def of_curve(curve: Curve, longest: int | None) -> ModelSweep:
    """The model of one sweep. longest: see `of_curves`."""
    return ModelSweep(
        name=curve.subject,
        points=tuple(with_tpot(p) for p in curve.points),
        engine=_engine(curve, longest),
        work=work_of_curve(curve),
        peaks=peaks_of_curve(curve),
        notes=(*_left_out(curve), *_beyond_graphs(curve)),
    )


def _beyond_graphs(curve: Curve) -> Iterator[str]:
    """A note where steps with a prompt have more tokens than the largest CUDA graph has, and the host is late for
    them."""
    best, spec = max(curve.valid, key=lambda p: fmean(p.repeats), default=None), curve.spec
    if (
        best is None
        or spec is None
        or spec.platform != "cuda"
        or spec.enforce_eager
        or GRAPHS & dict(spec.extra).keys()
    ):
        return
    runs = [m for m in curve.measurements if m.id in best.records]
    prompts = mean_of_known(steps_with_prompts(m.run) for m in runs) or 0.0
    tokens = best.concurrency + fmean(m.workload.mean_prompt_tokens for m in runs)
    idle = idle_share(best.engine_active)
    if idle is not None and idle >= IDLE and prompts >= MANY and tokens > LARGEST_GRAPH:
        yield (
            f"no kernel runs for {percent(idle)} of the time at {best.concurrency} in flight; {percent(prompts)} "
            f"of the steps hold a prompt and more tokens than vLLM's largest CUDA graph: measure again with "
            "--slm-engine-arg max_cudagraph_capture_size=2048"
        )


def _left_out(curve: Curve) -> Iterator[str]:
    if degraded := [p.concurrency for p in curve.points if p.valid and p.degraded]:
        loads = curve.axes.at(", ".join(map(str, degraded)))
        yield f"left out, for their sensors tell of a disturbance: {loads}"
    if invalid := [p.concurrency for p in curve.points if not p.valid]:
        yield f"left out, for they are not valid: {curve.axes.at(', '.join(map(str, invalid)))}"


def _engine(curve: Curve, longest: int | None) -> ServedEngine | None:
    first = curve.first
    if first is None or first.spec.platform == "remote":  # what its server's limits were is not told
        return None
    spec, resolved = first.spec, first.resolved
    footprint = _footprint(curve, spec, resolved, longest or first.workload.longest)
    why_not = "the shape or the data type of the model is not known"
    return ServedEngine(
        model=hub_name(spec.model),
        dtype=resolved.dtype or spec.dtype,
        max_num_batched_tokens=resolved.max_num_batched_tokens or spec.max_num_batched_tokens,
        arguments=tuple(_arguments(spec)),
        env=tuple(f"{name}={value}" for name, value in spec.env if name != "PYTHONPATH"),
        footprint=None if spec.platform == "cpu" else footprint,
        no_footprint="it was measured on a CPU, so there is no memory of a GPU to plan"
        if spec.platform == "cpu"
        else why_not,
        kv_had_bytes=kv_bytes(spec, resolved),
        gpu_had_bytes=first.environment.gpu_memory_bytes,
    )


def _footprint(curve: Curve, spec: EngineSpec, resolved: Resolved, longest: int) -> Footprint | None:
    each, per_token = value_bytes(spec, resolved), kv_bytes_per_token(spec, resolved)
    weights = resolved.weight_bytes or (weight_bytes(spec, each) if each else None)
    windows = kv_windows(spec, resolved)
    if weights is None or per_token is None or windows is None:
        return None
    beyond = int(most_memory_used(curve.trusted) or 0.0) - weights - kv_bytes(spec, resolved)
    return Footprint(
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        longest=longest,
        groups=len(windows),
        block_size=block_size_of(spec, resolved),
        allowance_bytes=beyond if beyond > 0 else RESERVE_BYTES,
        allowance_seen=beyond > 0,
    )


def _arguments(spec: EngineSpec) -> Iterator[str]:
    """Other arguments that affected the engine's speed, as `vllm serve` takes them."""
    if spec.enforce_eager:
        yield "--enforce-eager"
    for field, value in spec.extra:
        name = field.replace("_", "-")
        match value:
            case _ if field in TOLD_APART or value is None:
                continue
            case True | False:
                yield f"--{name}" if value else f"--no-{name}"
            case str():
                yield from (f"--{name}", value)
            case list() | tuple():
                yield from (f"--{name}", *map(str, value))
            case _:
                yield from (f"--{name}", json.dumps(value))


def of_external(
    curve: Curve,
    spec: EngineSpec | None,
    longest: int | None,
    b_half: float | None,
    notes: Sequence[str] = (),
    kv_blocks: int | None = None,
) -> SourcedSweeps:
    """One subject, the curve of external results. spec: an engine of the model; None: only the
    batch can be advised. longest: tokens of a request at full length. kv_blocks: of the engine, of 16 tokens each."""
    over = [p.concurrency for p in curve.points if more_in_flight(p)]
    odd = "output rate x latency is more than the knob at {}: the knob is taken as the batch"
    shares = [
        one.batch / one.e2e_s / one.output_tokens_per_s
        for point in curve.points
        for one in point.each
        if one.batch and one.e2e_s and one.output_tokens_per_s
    ]
    subject = ModelSweep(
        name="results" if spec is None else short_name(spec.model),
        points=curve.points if over else tuple(map(_with_true_batch, curve.points)),
        engine=None if spec is None else _engine_without_records(spec, longest, kv_blocks),
        output_share=fmean(shares) if shares else None,
        b_half=b_half,
        notes=(*notes, *_left_out(curve), *([odd.format(", ".join(map(str, over)))] if over else [])),
    )
    return SourcedSweeps((subject,), ResultSource("external results", curve.axes.latency))


def more_in_flight(point: Point) -> bool:
    """Are there by Little's law more requests in flight than were sent? Then latency is not per output token."""
    return point.batch is not None and point.batch > (1 + NOT_THE_BATCH) * point.concurrency


def _with_true_batch(point: Point) -> Point:
    """The point with its batch by Little's law, where the output rate is known."""
    batches = tuple(one.batch for one in point.each if one.batch is not None)
    return replace(point, batch_repeats=batches) if point.valid and batches else point


def _engine_without_records(spec: EngineSpec, longest: int | None, kv_blocks: int | None) -> ServedEngine:
    each, per_token, windows = value_bytes(spec), kv_bytes_per_token(spec), kv_windows(spec)
    weights = weight_bytes(spec, each) if each else None
    footprint, why_not = None, "the longest request is not known: --max-model-len"
    if weights is None or per_token is None or windows is None:
        why_not = f"its {'weights are' if weights is None else 'KV cache is'} not known"
    elif longest is not None:
        groups = len(windows)
        footprint = Footprint(weight_bytes=weights, kv_bytes_per_token=per_token, longest=longest, groups=groups)
    return ServedEngine(
        model=hub_name(spec.model),
        dtype=spec.dtype,
        footprint=footprint,
        no_footprint=why_not,
        kv_had_bytes=footprint.block_bytes * kv_blocks if footprint and kv_blocks else None,
    )


CLAIM = "advised-batch-costs-little"
OBJECTIVE = RelativeSlo(2.0, 32)  # of the paper: twice the latency at 32


def advised_batch_costs_little(curve: Curve, bound: float) -> Verdict:
    """Does the batch that the advisor of arXiv:2503.08311 chooses serve at least `bound` of what any other load does?
    value: the share that decides. Its objective is twice the time per output token at 32 in flight."""
    subject, wish = of_curve(curve, None), Objectives(slo=OBJECTIVE)
    found = decide(subject, wish)
    points = {p.concurrency: p for p in subject.usable}
    if found.batch not in points:
        why = found.reason or f"{found.batch} in flight was predicted, not measured"
        return Verdict.inconclusive(CLAIM, curve.subject, why, bound)
    chosen = points.pop(found.batch)
    state, seen, most = every(
        above, bound, lambda several: [(ratio(chosen, p, subject.usable, several=several), p) for p in points.values()]
    )
    memory = needs(subject, chosen.concurrency, wish)
    freed = f", and frees {memory.freed_bytes / GIB:.0f} GiB" if memory and memory.freed_bytes is not None else ""
    why = (
        f"{chosen.concurrency} in flight, chosen for twice the latency at 32, serves {percent_interval(seen)} of what "
        f"{most.concurrency} does{freed} (bound {bound:.0%})"
    )
    return Verdict.from_interval(CLAIM, curve.subject, state, why, seen, bound, chosen, most)


def has_objective(curve: Curve) -> bool:
    """A sweep on one GPU that has the loads of the objective and of the efficiency, and more of them."""
    loads = {p.concurrency for p in curve.valid}
    alone = curve.spec is not None and curve.spec.tensor_parallel_size == 1
    return is_main_sweep(curve) and alone and {1, OBJECTIVE.at} <= loads and len(loads) > 2
