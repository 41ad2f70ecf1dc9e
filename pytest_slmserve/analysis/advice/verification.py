"""Verification of an advice: the engine to start, and verdicts on what was predicted of it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_slmserve.analysis.advice.advisor import Advice, around, utilization
from pytest_slmserve.analysis.advice.subjects import ADVISED, with_tpot
from pytest_slmserve.analysis.estimates import percent, percent_interval, times
from pytest_slmserve.analysis.points import Point, ReplicaPoint, e2e_s, engines, output_rate, points_of, ratio
from pytest_slmserve.analysis.sweep.plateau import valid_points
from pytest_slmserve.analysis.verdict import State, Verdict, below, unsure, within
from pytest_slmserve.schema.kv_cache import kv_layout, predicted_blocks
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement, Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec

BLOCK_TOLERANCE = 2  # the engine may round its bytes to pages and share them between layers
MARGIN = 0.15  # share by which a measured value may differ from its prediction
KV_BLOCKS = "kv-blocks-as-predicted"
THROUGHPUT, LATENCY, UNPREEMPTED = "throughput-as-predicted", "latency-within-limit", "no-request-preempted"
BOUNDED = "gain-within-bound"


def kv_blocks_as_predicted(
    spec: EngineSpec, launches: Sequence[Resolved], tolerance: int = BLOCK_TOLERANCE, records: tuple[str, ...] = ()
) -> Verdict:
    """Return the verdict on whether an engine has the KV blocks that the model's shape predicts, within `tolerance`
    blocks: of the launch that is farthest off, so that one bad launch among many shows."""
    subject, found = short_name(spec.model), []
    for resolved in launches:
        predicted, seen = predicted_blocks(spec, resolved), resolved.kv_blocks
        if predicted is None or seen is None:
            unknown = "the engine did not report its KV blocks" if seen is None else "its shape or data type is unknown"
            return Verdict(KV_BLOCKS, subject, State.INCONCLUSIVE, unknown, records=records)
        found.append((seen - predicted, seen, predicted, kv_layout(spec, resolved).block_size))
    off, seen, predicted, size = max(found, key=lambda each: abs(each[0]))
    state = State.PASSES if abs(off) <= tolerance else State.FAILS
    why = f"{seen:,} blocks of {size} tokens, {predicted:,} predicted from shapes (bound {tolerance} apart)"
    n = max(1, len(records))
    return Verdict(KV_BLOCKS, subject, state, why, value=off, threshold=tolerance, n=n, records=records)


def recommended_engine(advice: Advice, spec: EngineSpec, batch: int) -> EngineSpec:
    """The engine of a sweep with the limits that are advised for `batch` requests. spec: the engine of the sweep."""
    engine, extra = advice.subject.engine, tuple(pair for pair in spec.extra if pair[0] not in ADVISED)
    limited = replace(spec, max_num_seqs=batch, extra=extra)
    if engine is None or engine.footprint is None:
        return limited
    kv_bytes = engine.footprint.kv_bytes(batch)
    if spec.platform == "cpu":  # vLLM's CPU backend takes whole GiB
        return replace(limited, kv_cache_bytes=max(1, -(-kv_bytes // GIB)) * GIB)
    share = spec.gpu_memory_utilization
    if engine.gpu_had_bytes is not None:
        # vLLM checks at its start that this share is free: less than its own total would check nothing.
        share = utilization(engine.footprint.total_bytes(batch), engine.gpu_had_bytes)
    return replace(
        limited, max_model_len=engine.footprint.longest, kv_cache_bytes=kv_bytes, gpu_memory_utilization=share
    )


def verified(
    advice: Advice, spec: EngineSpec, found: Sequence[Measurement], margin: float = MARGIN
) -> Iterator[Verdict]:
    """Verdicts on what was predicted of an engine: that it preempts no request, its KV blocks if they are known, its
    throughput, its latency. found: all measurements of the engine `spec` at the advised batch, invalid ones too; at
    least one."""
    name, limit, point = advice.subject.name, advice.decision.limit, with_tpot(points_of(found)[0])
    state, why = State.PASSES, "no request was preempted"
    if count := sum(sum(m.run.steps.preempted) for m in found):
        state, why = State.FAILS, f"{count} preemptions, though its KV cache was to hold all at full length"
    yield Verdict(UNPREEMPTED, name, state, why)
    if all(blocks is not None for blocks in (predicted_blocks(spec, found[0].resolved), found[0].resolved.kv_blocks)):
        yield kv_blocks_as_predicted(spec, [found[0].resolved], records=(found[0].id,))
    advised, usable = advice.advised, advice.subject.usable
    if point.degraded or not point.valid or advised is None:
        why = "; ".join(point.degraded if point.valid else point.problems) or "no latency per output token is known"
        yield from (Verdict.inconclusive(claim, name, why) for claim in (THROUGHPUT, LATENCY))
        return
    before, among = next((p for p in usable if p.concurrency == advised.batch), None), [*usable, point]
    if before is not None:
        over = ratio(point, before, valid_points(among))
    else:  # a prediction by the law has no noise of its own
        over = around(point, among, output_rate).mapped(lambda end: end / advised.tokens_per_s.value)
    why = f"{percent_interval(over)} of what was predicted (bound {percent(margin)} apart){unsure(over)}"
    yield Verdict.from_interval(THROUGHPUT, name, within(over, 1 - margin, 1 + margin), why, over, 1.0, point)
    if limit is not None:
        wait, bound = around(point, among, e2e_s), limit.seconds * (1 + margin)
        ms = f"{1e3 * wait.value:.3g} ms per output token, {1e3 * limit.seconds:.3g} ms are allowed"
        why = f"{ms} (bound {percent(margin)} above it){unsure(wait)}"
        yield Verdict.from_interval(LATENCY, name, below(wait, bound), why, wait, bound, point)


def gain_within_bound(advice: Advice, single: Point, together: ReplicaPoint) -> Verdict:
    """Verdict on whether the gain of several engines over one is within the bound of the advice. single: one engine at
    the advised batch. together: the engines that share the device."""
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
    why = f"{why} (bound {percent(MARGIN)} above it){unsure(gain)}"
    state = below(gain, ceiling.factor * (1 + MARGIN))
    return Verdict.from_interval(BOUNDED, name, state, why, gain, ceiling.factor, together, single)
