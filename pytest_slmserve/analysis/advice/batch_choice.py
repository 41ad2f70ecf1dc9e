"""Choice of the batch that a model should be served with.

The rule is that of the batching advisor of arXiv:2503.08311 (`batching`). From two loads alone the saturation law
through them predicts the batch. Through batch 1 and 32 of the paper's published points the law predicts latencies of
all larger batches 8 to 13 % too long. So it errs on the careful side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from pytest_slmserve.analysis.metrics.roofline import Peaks, Work
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.analysis.sweep.batching import (
    EFFICIENCY,
    Base,
    Batching,
    Caps,
    LatencyLaw,
    Limit,
    Slo,
    b_opt,
    batching,
    latency_law,
    limit_of,
    measured_base,
)
from pytest_slmserve.analysis.sweep.curve import MARGIN
from pytest_slmserve.analysis.sweep.gains import Fit, fit, valid_points
from pytest_slmserve.schema.errors import TooFewPoints
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS, RESERVE_BYTES

GPU_MEMORY_UTILIZATION = 0.9  # of the GPU for all engines together
UTILIZATION_STEPS = 1000  # vLLM is told its share of the memory with three decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory that an engine of a model takes, whatever its batch. longest: tokens of a request at full length.

    kv_bytes_per_token: in the layers that share a block. groups: of such layers; each may take blocks for all tokens.
    allowance_bytes: for activations, captured graphs and the context. allowance_seen: whether sensors measured it, as
    memory used less weights less KV cache; else it is the reserve of our plans.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    longest: int
    groups: int = 1
    block_size: int = 16
    allowance_bytes: int = RESERVE_BYTES
    allowance_seen: bool = False

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def request_bytes(self) -> int:
        """KV of one request at full length, in whole blocks."""
        return self.groups * -(-self.longest // self.block_size) * self.block_bytes

    def kv_blocks(self, batch: int) -> int:
        return self.kv_bytes(batch) // self.block_bytes

    def kv_bytes(self, batch: int) -> int:
        """KV of so many requests at full length, and of the block that no request ever gets."""
        return batch * self.request_bytes + NULL_BLOCKS * self.block_bytes

    def total_bytes(self, batch: int) -> int:
        return self.weight_bytes + self.allowance_bytes + self.kv_bytes(batch)


@dataclass(frozen=True, slots=True)
class BatchOption:
    """A batch that a model may be given, and the tokens/s it serves then."""

    batch: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A model that shares a GPU: its rungs ascend by their batch, and the last one is what it should have."""

    footprint: Footprint
    rungs: tuple[BatchOption, ...]

    def bytes_at(self, height: int) -> int:
        return self.footprint.total_bytes(self.rungs[height].batch)

    def worth(self, height: int) -> float:
        """Share of the last rung's throughput that the step up to this one adds, per byte that it takes."""
        more = self.rungs[height].tokens_per_s - self.rungs[height - 1].tokens_per_s
        return more / self.rungs[-1].tokens_per_s / (self.bytes_at(height) - self.bytes_at(height - 1))


def replicas_that_fit(footprint: Footprint, batch: int, budget: int) -> int:
    """Engines of `batch` each."""
    return max(0, budget) // footprint.total_bytes(batch)


def replicas_that_split(footprint: Footprint, batch: int, budget: int) -> int:
    """The most engines that fit where `batch` is divided among them, each with at least one request."""
    fixed = footprint.total_bytes(0)
    most = min(batch, max(0, budget - batch * footprint.request_bytes) // fixed)
    return next((n for n in range(most, 0, -1) if n * footprint.total_bytes(-(-batch // n)) <= budget), 0)


def utilization(total_bytes: int, gpu_bytes: int) -> float:
    """The share to tell vLLM, three decimals, rounded up. With the KV bytes given, only its check at the start uses it:
    as much must be free."""
    return min(1.0, math.ceil(total_bytes * UTILIZATION_STEPS / gpu_bytes) / UTILIZATION_STEPS)


def freed_share(had_bytes: float, needed_bytes: float, gpu_bytes: float) -> float:
    """KV cache that is not needed, as a share of the GPU's memory (arXiv:2503.08311)."""
    return (had_bytes - needed_bytes) / gpu_bytes


def divide(ladders: Sequence[BatchOptions], budget: int) -> tuple[int, ...] | None:
    """The height on each ladder, so that all engines fit; None where not even the lowest rungs do.

    From the last rungs, the step down is taken that loses the least of its model's throughput per byte; what the last
    step freed too much may let others up again.
    """
    heights = [len(ladder.rungs) - 1 for ladder in ladders]
    while _total(ladders, heights) > budget:
        steps = [(ladder.worth(h), i) for i, (ladder, h) in enumerate(zip(ladders, heights, strict=True)) if h]
        if not steps:
            return None
        heights[min(steps)[1]] -= 1
    while up := max(_affordable(ladders, heights, budget), default=None):
        heights[up[1]] += 1
    return tuple(heights)


def _total(ladders: Sequence[BatchOptions], heights: Sequence[int]) -> int:
    return sum(ladder.bytes_at(h) for ladder, h in zip(ladders, heights, strict=True))


def _affordable(ladders: Sequence[BatchOptions], heights: Sequence[int], budget: int) -> Iterator[tuple[float, int]]:
    """Worth and place of each step up that adds throughput and fits."""
    left = budget - _total(ladders, heights)
    for i, (ladder, h) in enumerate(zip(ladders, heights, strict=True)):
        if h + 1 < len(ladder.rungs) and ladder.bytes_at(h + 1) - ladder.bytes_at(h) <= left:
            worth = ladder.worth(h + 1)
            if worth > 0:
                yield worth, i


REACH = 16  # times the largest load measured: how far a prediction goes (checked to 24 times on published points)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """A model as it was served, and the memory that its engine takes. footprint: None where not known; `no_footprint`
    says why. kv_had_bytes, gpu_had_bytes: of the KV cache that it had, and of its GPU. max_num_batched_tokens: None
    where the results do not contain it. env: variables that it was measured with, as NAME=VALUE."""

    model: str
    dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    arguments: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    footprint: Footprint | None = None
    no_footprint: str = ""
    kv_had_bytes: int | None = None
    gpu_had_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSweep:
    """One model. points: of one engine, where `e2e_repeats` are seconds per output token.

    output_share: of the tokens that the points' rates count, those of output; None where not known. b_half: where it
    is known beforehand. work, peaks: for the roofline. notes: what a reader should know of where this comes from.
    """

    name: str
    points: tuple[Point, ...]
    engine: ServedEngine | None = None
    output_share: float | None = 1.0
    b_half: float | None = None
    work: Work | None = None
    peaks: Peaks | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> list[Point]:
        """Valid, and sensors say nothing against them: what may be chosen, or chosen by."""
        return [p for p in valid_points(self.points) if not p.degraded]

    @property
    def footprint(self) -> Footprint | None:
        return self.engine.footprint if self.engine else None


def with_tpot(point: Point) -> Point:
    """A point of ours with the time per output token after the first as its latency."""
    return replace(point, e2e_repeats=tuple(s.tpot_s for s in point.each if s.tpot_s is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """slo: None decides by efficiency alone. gpu_bytes: None where no GPU is known. price_per_hour: of the GPU."""

    slo: Slo | None = None
    threshold: float = EFFICIENCY
    gpu_bytes: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    price_per_hour: float | None = None

    @property
    def budget_bytes(self) -> int | None:
        return None if self.gpu_bytes is None else int(self.gpu_bytes * self.gpu_memory_utilization)


@dataclass(frozen=True, slots=True)
class Laws:
    """A step's seconds and an output token's seconds by the batch, each a straight line; None where they are none."""

    step: LatencyLaw | None = None
    wait: LatencyLaw | None = None

    def tokens_per_s(self, batch: float) -> float | None:
        return None if self.step is None else batch / self.step.seconds(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """batch: B_opt, None where there is none; `reason` says why. low, high: by the noise of repeats, known for a
    measured choice alone. predicted: by the laws through two loads. limit: of the latency. base: T(1)."""

    batch: int | None = None
    low: int | None = None
    high: int | None = None
    known: bool = False
    predicted: bool = False
    limit: Limit | None = None
    base: Base | None = None
    caps: Caps = field(default_factory=Caps)
    laws: Laws = field(default_factory=Laws)
    reason: str = ""
    notes: tuple[str, ...] = ()


def decide(subject: ModelSweep, wish: Objectives) -> Decision:
    """B_opt of one model: the largest load measured within the conditions, or what two loads predict."""
    loads = subject.usable
    if len(loads) < 2:
        at = f" ({loads[0].concurrency} in flight)" if loads else ""
        return Decision(reason=f"{len(loads)} load{'' if len(loads) == 1 else 's'} to judge by{at}: two are needed")
    try:
        return _predicted(subject, loads, wish) if len(loads) == 2 else _measured(subject, loads, wish)
    except TooFewPoints as error:
        return Decision(reason=error.problem)


def _measured(subject: ModelSweep, loads: Sequence[Point], wish: Objectives) -> Decision:
    law = _fit(loads, subject.b_half)
    found = batching(loads, wish.slo, wish.threshold, law, subject.b_half)
    choice = found.choice
    return Decision(
        batch=choice.value,
        low=choice.low,
        high=choice.high,
        known=choice.known,
        limit=found.limit,
        base=found.base,
        caps=found.caps,
        laws=Laws(_step_law(law), latency_law(loads, subject.b_half)),
        reason="" if choice.value is not None else f"no load that was measured has {conditions(wish, found.limit)}",
        notes=tuple(_remarks(found, loads, law)),
    )


def _fit(loads: Sequence[Point], b_half: float | None) -> Fit | None:
    try:
        return fit(loads, b_half)
    except TooFewPoints:
        return None


def _step_law(law: Fit | None) -> LatencyLaw | None:
    return None if law is None or not law.identified else LatencyLaw(law.t_inf.value, law.b_half.value)


def _remarks(found: Batching, loads: Sequence[Point], law: Fit | None) -> Iterator[str]:
    yield from found.notes
    if (chosen := found.choice.value) is not None:
        if chosen == loads[-1].concurrency:
            yield f"{chosen} is the largest load measured: a larger batch may serve more"
        rates = {p.concurrency: fmean(p.repeats) for p in loads if p.concurrency <= chosen}
        best = max(rates, key=lambda load: rates[load])
        if (more := rates[best] / rates[chosen] - 1) > MARGIN:
            yield f"the rule takes the largest, but {best} in flight has {percent(more)} more throughput"
    if law and not law.describes:
        yield f"the saturation law is off by up to {percent(law.error_max)} here: what it allows is no more than a hint"


def _predicted(subject: ModelSweep, loads: Sequence[Point], wish: Objectives) -> Decision:
    """The largest batch within the conditions by the laws, unless the larger one measured is no less."""
    laws = two_load_laws(loads, subject.b_half)
    if laws.step is None or laws.wait is None:
        raise TooFewPoints(f"{_both(loads)} give no law: a step has to take longer at the larger load")
    limit = None if wish.slo is None else limit_of(wish.slo, loads, laws.wait)
    base = measured_base(loads) or Base(1 / laws.step.seconds(1), 0, "no valid point at 1: T(1) is by the law as well")
    caps = Caps(
        laws.step.pace / (wish.threshold * base.per_s) - laws.step.b_half,
        None if limit is None else max(0.0, laws.wait.batch(limit.seconds)),
    )
    reach, choice = REACH * loads[-1].concurrency, b_opt(loads, base, limit, wish.threshold)
    step = (subject.engine and subject.engine.max_num_batched_tokens) or reach
    efficient = 0 if caps.efficiency is None else math.ceil(min(caps.efficiency, 1e12)) - 1  # below the cap
    batch = min(efficient, reach, step, reach if caps.slo is None else math.floor(caps.slo))
    rests_on = tuple(note for note in (base.note, limit and limit.note) if note)
    known = Decision(limit=limit, base=base, caps=caps, laws=laws, notes=rests_on)
    if choice.value is not None and choice.value >= batch:
        return replace(known, batch=choice.value, low=choice.low, high=choice.high, known=choice.known)
    if batch < 1:
        return replace(known, reason=f"by the law through {_both(loads)}, no batch has {conditions(wish, limit)}")
    notes = [f"predicted by the saturation law through {_both(loads)}, and not measured: measure there before use"]
    if batch == reach:
        notes.append(f"the law allows more, but no prediction goes beyond {REACH} times the largest load measured")
    elif batch == step:
        notes.append(f"a step takes no more: max_num_batched_tokens is {step}, and vLLM starts with no larger batch")
    if subject.footprint is None or wish.budget_bytes is None:
        notes.append("no limit of the memory is known: a KV cache that is full ends the growth earlier")
    return replace(known, batch=batch, predicted=True, notes=(*notes, *known.notes))


def _both(loads: Sequence[Point]) -> str:
    return f"{loads[0].concurrency} and {loads[-1].concurrency} in flight"


def two_load_laws(loads: Sequence[Point], b_half: float | None = None) -> Laws:
    """The laws through two loads: seconds of a step (batch over tokens/s), and of an output token, by the true batch.

    b_half: where it is known, both laws have it, and meet the two loads as well as they can.
    """
    steps = [(fmean(p.batch_repeats), fmean(p.batch_repeats) / fmean(p.repeats)) for p in loads]
    waits = [(fmean(p.batch_repeats), fmean(p.e2e_repeats)) for p in loads]
    if b_half is None:
        return Laws(through(*steps), through(*waits))
    return Laws(_step_law(_fit(loads, b_half)), latency_law(loads, b_half))


def through(first: tuple[float, float], second: tuple[float, float]) -> LatencyLaw | None:
    """The law through two pairs of batch and seconds; None where seconds do not grow, or grow faster than the batch."""
    (small, soon), (large, late) = sorted((first, second))
    if large <= small or late <= soon:
        return None
    pace = (large - small) / (late - soon)
    half = soon * pace - small
    return None if half < 0 else LatencyLaw(pace, half)


def conditions(wish: Objectives, limit: Limit | None) -> str:
    """A clause with the conditions on a batch: efficiency, and the limit in ms per output token, if any."""
    enough = f"an efficiency above {percent(wish.threshold)}"
    return enough if limit is None else f"{enough} and at most {1e3 * limit.seconds:.3g} ms per output token"
