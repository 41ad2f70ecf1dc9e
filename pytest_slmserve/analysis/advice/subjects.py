"""Models for recommendations, from sweeps or external results, and verdicts on the predictions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean

from pytest_slmserve.analysis.advice import advisor
from pytest_slmserve.analysis.advice.advisor import Advice, Footprint, ModelSweep, ServedEngine
from pytest_slmserve.analysis.estimates import Interval, grouped, mean_of_known, percent, percent_interval, times
from pytest_slmserve.analysis.metrics.gpu_figures import IDLE, idle_share, most_memory_used
from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points import Point, ReplicaPoint, e2e_s, engines, output_rate, points_of, ratio
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.analysis.sweep.plateau import valid_points
from pytest_slmserve.analysis.verdict import State, Verdict, below, unsure, within
from pytest_slmserve.schema import kv_cache
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement, Resolved
from pytest_slmserve.schema.specs import GIB, Adapters, EngineSpec

GRAPHS = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config"}  # arguments of the engine
# Arguments that a recommendation replaces.
KV_SIZE = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
ADVISED = ("max_num_seqs", "max_model_len", *KV_SIZE)
LARGEST_GRAPH = 512  # tokens: vLLM's default is twice max_num_seqs, and at most this
MANY = 0.3  # share of the steps with a prompt; fewer of them do not take most of the time
NOT_THE_BATCH = 0.10  # tolerated relative difference of the concurrency from the setting
TPOT = "the mean time per output token after the first, TPOT"


@dataclass(frozen=True, slots=True)
class ResultSource:
    """Models of one device, with the name of their latency and notes for the reader."""

    device: str
    latency: str
    gpu_bytes: int | None = None
    notes: tuple[str, ...] = ()
    subjects: tuple[ModelSweep, ...] = ()


def of_curves(
    curves: Sequence[Curve], model: str | None, longest: int | None, notes: Sequence[str] = ()
) -> ResultSource:
    """Return the models to advise on, in the order of the curves.

    Of each model, the sweep with the most usable loads counts. Among equals, it is the last one measured, and sweeps
    with a made-up draft acceptance come last.

    Args:
        model: the only model to advise on.
        longest: tokens of a request at full length; None for the measured length.

    Raises:
        BadUsage: if the model was not measured, or only on several GPUs, or if the curves are from several devices.
    """
    named = list(zip(curves, labels(curves), strict=True))
    if model is not None:
        there = dict.fromkeys(curve.subject for curve in curves)
        named = [(curve, label) for curve, label in named if curve.subject == short_name(model)]
        if curves and not named:
            raise BadUsage(f"there are no records of {model}", f"Pass --model with one of {', '.join(there)}.")
    # Only sweeps on one GPU show its memory, and if another engine is worth it.
    on_one = [row for row in named if row[0].spec is None or row[0].spec.tensor_parallel_size == 1]
    if named and not on_one:
        problem = f"{named[0][0].subject} was measured on several GPUs at once, and advice is for one"
        raise BadUsage(problem, "Pass records that were measured with --slm-tensor-parallel-size 1.")
    environments = [curve.environment for curve, _ in on_one if curve.environment]
    devices = {(e.platform, e.gpu_name, e.gpu_memory_bytes, e.url): e for e in environments}
    if len(devices) > 1:
        names = ", ".join(e.url or e.gpu_name or e.platform or "unknown" for e in devices.values())
        raise BadUsage(
            f"the records are of several devices ({names})",
            "Pass records of one device, or choose a model with --model.",
        )
    subjects = []
    for rows in grouped(on_one, lambda row: row[0].subject).values():
        drafts = (bool(curve.spec and kv_cache.made_up_acceptance(curve.spec)) for curve, _ in rows)
        last = ((not each, max(m.measured_at for m in curve.measurements)) for each, (curve, _) in zip(drafts, rows))
        sweeps = [(of_curve(curve, longest), at, label) for (curve, label), at in zip(rows, last)]
        best, _, label = max(sweeps, key=lambda each: (len(each[0].usable), each[1]))
        if others := [other for sweep, _, other in sweeps if sweep is not best]:
            note = f"taken is the sweep with the most loads ({label}), not {'; '.join(others)}"
            best = replace(best, notes=(*best.notes, note))
        subjects.append(replace(best, together=gain_of_sets(curve for curve, _ in rows)))
    known = [(e.title, e.gpu_memory_bytes) for e in devices.values()]
    [(device, gpu_bytes)] = known or [("nothing was measured", None)]
    return ResultSource(device, TPOT, gpu_bytes, tuple(notes), tuple(subjects))


def of_curve(curve: Curve, longest: int | None) -> ModelSweep:
    """Return the model of one sweep; `longest` as in `of_curves`."""
    first, engine = curve.first, None
    if first is not None and first.spec.platform != "remote":  # a server does not report its limits
        used, has = most_memory_used(curve.trusted), kv_cache.kv_bytes(first.spec, first.resolved)
        engine = _served(first.spec, longest or first.workload.longest, first.resolved, int(used or 0.0) - has)
        engine = replace(engine, kv_had_bytes=has, gpu_had_bytes=first.environment.gpu_memory_bytes)
    return ModelSweep(
        name=curve.subject,
        points=tuple(map(with_tpot, curve.points)) if curve.decodes else curve.points,  # pooling has only an E2E
        engine=engine,
        work=curve.work,
        peaks=curve.peaks,
        notes=(*_left_out(curve), *(_beyond_graphs(curve) if curve.decodes else ())),
    )


def holding(subject: ModelSweep, adapters: Adapters) -> ModelSweep:
    """Return the model with an engine that holds these adapters, whose slots take memory.

    Raises:
        BadUsage: if their memory is unknown, or the engine cannot serve them.
    """
    engine = subject.engine
    if engine is None or engine.footprint is None:
        raise BadUsage(
            f"{subject.name}: the memory of adapters cannot be planned", "Pass records of an engine on a GPU."
        )
    spec = engine.spec.with_adapters(adapters)
    kv_cache.check_adapters(spec, adapters)
    more = kv_cache.adapter_bytes(spec) - kv_cache.adapter_bytes(engine.spec)
    footprint = replace(engine.footprint, allowance_bytes=engine.footprint.allowance_bytes + more)
    return replace(subject, engine=replace(engine, spec=spec, footprint=footprint))


def gain_of_sets(curves: Iterable[Curve]) -> Interval | None:
    """Return the throughput of the best set of engines on one GPU, relative to one at the same concurrency."""
    gains = []
    for curve in curves:
        for together in curve.shared:
            one = curve.one_engine(together.concurrency, together)
            if together.valid and together.model and together.sharing != "gpus" and one and one.valid:
                gains.append(ratio(together, one, [together, one]))
    return max(gains, key=attrgetter("value"), default=None)


def with_tpot(point: Point) -> Point:
    """Return the point with TPOT as its latency."""
    return replace(point, e2e_repeats=tuple(s.tpot_s for s in point.each if s.tpot_s is not None))


def _beyond_graphs(curve: Curve) -> Iterator[str]:
    """Yield a note if steps with prompts exceed the largest CUDA graph and the GPU is often idle."""
    best, spec = max(curve.valid, key=lambda p: fmean(p.repeats), default=None), curve.spec
    graphs = spec and spec.platform == "cuda" and not spec.enforce_eager and not GRAPHS & spec.arguments.keys()
    if best is None or not graphs or (idle := idle_share(best.engine_active)) is None:
        return
    runs = [m for m in curve.measurements if m.id in best.records]
    prompts = mean_of_known(steps_with_prompts(m.run) for m in runs) or 0.0
    tokens = best.concurrency + fmean(m.workload.mean_prompt_tokens for m in runs)
    if idle >= IDLE and prompts >= MANY and tokens > LARGEST_GRAPH:
        yield (
            f"no kernel runs for {percent(idle)} of the time at concurrency {best.concurrency}; {percent(prompts)} "
            f"of the steps hold a prompt and more tokens than vLLM's largest CUDA graph: measure again with "
            "--slm-engine-arg max_cudagraph_capture_size=2048"
        )


def _left_out(curve: Curve) -> Iterator[str]:
    degraded = [p.concurrency for p in curve.points if p.valid and p.degraded]
    invalid = [p.concurrency for p in curve.points if not p.valid]
    for why, loads in (("their sensors tell of a disturbance", degraded), ("they are not valid", invalid)):
        if loads:
            yield f"left out, for {why}: {curve.axes.at(', '.join(map(str, loads)))}"


def _served(
    spec: EngineSpec, longest: int | None, resolved: Resolved | None = None, beyond_kv_bytes: int = 0
) -> ServedEngine:
    """Return a model as it was served; `beyond_kv_bytes` of memory were in use beyond the KV cache."""
    each, layout = kv_cache.value_bytes(spec, resolved), kv_cache.kv_layout(spec, resolved)
    weights = (resolved and resolved.weight_bytes) or (kv_cache.weight_bytes(spec, each) if each else None)
    footprint, why_not = None, ""
    if weights is None or layout.bytes_per_token is None or layout.windows is None:
        unknown = "weights are" if weights is None else "KV cache is"
        why_not = "the shape or the data type of the model is" if resolved else f"its {unknown}"
        why_not += " not known"
    elif longest is None:
        why_not = "the longest request is not known: --max-model-len"
    else:
        beyond = beyond_kv_bytes - weights
        footprint = Footprint(
            weight_bytes=weights,
            kv_bytes_per_token=layout.bytes_per_token,
            longest=longest,
            groups=len(layout.windows),
            block_size=layout.block_size,
            allowance_bytes=beyond if beyond > 0 else kv_cache.RESERVE_BYTES,
            allowance_seen=beyond > 0,
        )
    if spec.platform == "cpu":
        why_not = "it was measured on a CPU, so there is no memory of a GPU to plan"
    return ServedEngine(
        spec=spec,
        dtype=(resolved and resolved.dtype) or spec.dtype,
        max_num_batched_tokens=(resolved.max_num_batched_tokens or spec.max_num_batched_tokens) if resolved else None,
        footprint=footprint,
        no_footprint=why_not,
    )


def of_external(
    curve: Curve,
    spec: EngineSpec | None,
    longest: int | None,
    b_half: float | None,
    notes: Sequence[str] = (),
    kv_blocks: int | None = None,
) -> ResultSource:
    """Return the model of external results.

    Args:
        spec: None if only the batch is wanted.
        longest: tokens of a request at full length.
        kv_blocks: blocks of 16 tokens.
    """
    notes, points, engine, shares = [*notes, *_left_out(curve)], [], None, []
    if over := [p.concurrency for p in curve.points if more_in_flight(p)]:
        odd = f"output rate x latency is more than the knob at {', '.join(map(str, over))}"
        notes.append(f"{odd}: the knob is taken as the batch")
    for point in curve.points:
        batches = tuple(one.batch for one in point.each if one.batch is not None)
        # Use the batch of Little's law if the output rate is known.
        points.append(replace(point, batch_repeats=batches) if point.valid and batches and not over else point)
        for one in point.each:
            if one.batch and one.e2e_s and one.output_tokens_per_s:
                shares.append(one.batch / one.e2e_s / one.output_tokens_per_s)
    if spec is not None:
        engine = _served(spec, longest)
        if engine.footprint and kv_blocks:
            engine = replace(engine, kv_had_bytes=engine.footprint.block_bytes * kv_blocks)
    subject = ModelSweep(
        name="results" if spec is None else short_name(spec.model),
        points=tuple(points),
        engine=engine,
        output_share=fmean(shares) if shares else None,
        b_half=b_half,
        notes=tuple(notes),
    )
    return ResultSource("external results", curve.axes.latency, subjects=(subject,))


def more_in_flight(point: Point) -> bool:
    """Return whether Little's law gives too many requests, so that the latency is not per output token."""
    return point.batch is not None and point.batch > (1 + NOT_THE_BATCH) * point.concurrency


# Verdicts

OBJECTIVE = RelativeSlo(2.0, 32)  # of arXiv:2503.08311: twice the latency at 32
BLOCK_TOLERANCE = 2  # the engine may round its bytes to pages and share them between layers
MARGIN = 0.15  # share by which a measured value may differ from its prediction
KV_BLOCKS = "kv-blocks-as-predicted"
THROUGHPUT, LATENCY, UNPREEMPTED = "throughput-as-predicted", "latency-within-limit", "no-request-preempted"
BOUNDED = "gain-within-bound"


def kv_blocks_as_predicted(
    spec: EngineSpec, launches: Sequence[Resolved], tolerance: int = BLOCK_TOLERANCE, records: tuple[str, ...] = ()
) -> Verdict:
    """Return the verdict that the worst launch has the KV blocks predicted from the model configuration."""
    subject, found = short_name(spec.model), []
    for resolved in launches:
        predicted, seen = kv_cache.predicted_blocks(spec, resolved), resolved.kv_blocks
        if predicted is None or seen is None:
            unknown = "the engine did not report its KV blocks" if seen is None else "its shape or data type is unknown"
            return Verdict(KV_BLOCKS, subject, State.INCONCLUSIVE, unknown, records=records)
        found.append((seen - predicted, seen, predicted, kv_cache.kv_layout(spec, resolved).block_size))
    off, seen, predicted, size = max(found, key=lambda each: abs(each[0]))
    state = State.PASSES if abs(off) <= tolerance else State.FAILS
    why = f"{seen:,} blocks of {size} tokens, {predicted:,} predicted from shapes (limit {tolerance} apart)"
    n = max(1, len(records))
    return Verdict(KV_BLOCKS, subject, state, why, value=off, threshold=tolerance, n=n, records=records)


def recommended_engine(advice: Advice, spec: EngineSpec, batch: int) -> EngineSpec:
    """Return the engine of a sweep, with the limits for `batch` requests."""
    engine, extra = advice.subject.engine, tuple(pair for pair in spec.extra if pair[0] not in ADVISED)
    limited = replace(spec, max_num_seqs=batch, extra=extra)
    if engine is None or engine.footprint is None:
        return limited
    kv_bytes = engine.footprint.kv_bytes(batch)
    if spec.platform == "cpu":  # vLLM's CPU backend takes whole GiB
        return replace(limited, kv_cache_bytes=max(1, -(-kv_bytes // GIB)) * GIB)
    share = spec.gpu_memory_utilization
    if engine.gpu_had_bytes is not None:
        # vLLM checks at its start that this share is free, so it must contain all memory of the engine.
        share = advisor.utilization(engine.footprint.total_bytes(batch), engine.gpu_had_bytes)
    return replace(
        limited, max_model_len=engine.footprint.longest, kv_cache_bytes=kv_bytes, gpu_memory_utilization=share
    )


def verified(
    advice: Advice, spec: EngineSpec, found: Sequence[Measurement], margin: float = MARGIN
) -> Iterator[Verdict]:
    """Yield the verdicts on the predictions: no preemptions, KV blocks if known, throughput and latency.

    Args:
        found: all measurements at the recommended batch, at least one.
    """
    name, limit, point = advice.subject.name, advice.decision.limit, with_tpot(points_of(found)[0])
    state, why = State.PASSES, "no request was preempted"
    if count := sum(sum(m.run.steps.preempted) for m in found):
        state, why = State.FAILS, f"{count} preemptions, though its KV cache was to hold all at full length"
    yield Verdict(UNPREEMPTED, name, state, why)
    blocks = kv_blocks_as_predicted(spec, [found[0].resolved], records=(found[0].id,))
    if blocks.state is not State.INCONCLUSIVE:
        yield blocks
    advised, usable = advice.advised, advice.subject.usable
    if point.degraded or not point.valid or advised is None:
        why = "; ".join(point.degraded if point.valid else point.problems) or "no latency per output token is known"
        yield from (Verdict.inconclusive(claim, name, why) for claim in (THROUGHPUT, LATENCY))
        return
    before, among = next((p for p in usable if p.concurrency == advised.batch), None), [*usable, point]
    if before is not None:
        over = ratio(point, before, valid_points(among))
    else:  # a prediction has no noise
        over = advisor.around(point, among, output_rate).mapped(lambda end: end / advised.tokens_per_s.value)
    why = f"{percent_interval(over)} of what was predicted (limit {percent(margin)} apart){unsure(over)}"
    yield Verdict.from_interval(THROUGHPUT, name, within(over, 1 - margin, 1 + margin), why, over, 1.0, point)
    if limit is not None:
        wait, bound = advisor.around(point, among, e2e_s), limit.seconds * (1 + margin)
        ms = f"{1e3 * wait.value:.3g} ms per output token, {1e3 * limit.seconds:.3g} ms are allowed"
        why = f"{ms} (limit {percent(margin)} above it){unsure(wait)}"
        yield Verdict.from_interval(LATENCY, name, below(wait, bound), why, wait, bound, point)


def gain_within_bound(advice: Advice, single: Point, together: ReplicaPoint) -> Verdict:
    """Return the verdict that the gain of several engines over one is within its upper bound.

    Args:
        single: one engine at the recommended batch.
        together: engines that share the device.
    """
    name, gains = engines(together.models), advice.gains
    ceiling = None if gains is None else gains.mps if together.sharing == "mps" else gains.time_slicing
    for point in (together, single):
        if point.degraded or not point.valid:
            why = "; ".join(point.degraded if point.valid else point.problems) or "it has no valid repeat"
            return Verdict.inconclusive(BOUNDED, name, why)
    if ceiling is None:
        return Verdict.inconclusive(BOUNDED, name, "no sensor or data sheet bounds the gain")
    gain = ratio(together, single)
    why = f"{times(gain)} what one has alone, by {together.sharing}; at most {ceiling.factor:.3g} times is possible"
    why = f"{why} (limit {percent(MARGIN)} above it){unsure(gain)}"
    state = below(gain, ceiling.factor * (1 + MARGIN))
    return Verdict.from_interval(BOUNDED, name, state, why, gain, ceiling.factor, together, single)
