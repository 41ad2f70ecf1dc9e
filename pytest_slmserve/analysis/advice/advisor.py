"""Advice on what to deploy: for each model a batch, its throughput and cost, the memory it needs, the number of
engines.

Every answer is total: an unknown value is None, and some sentence says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from pytest_slmserve.analysis.advice.batch_choice import (
    BatchOption,
    BatchOptions,
    Decision,
    ModelSweep,
    Objectives,
    decide,
    divide,
    freed_share,
    replicas_that_fit,
    replicas_that_split,
    utilization,
)
from pytest_slmserve.analysis.metrics.roofline import REACHABLE_DRAM, REACHABLE_TENSOR, ceiling_tokens_per_s
from pytest_slmserve.analysis.points import Figure, Point, e2e_s, output_rate, point_differences
from pytest_slmserve.analysis.stats.estimates import Interval, factor, percent
from pytest_slmserve.analysis.sweep.gains import valid_points

Unit = Literal["host", "dram", "tensor", "roofline"]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """factor: at most so many times one engine's throughput. busy: its use of `unit`, of what can be used."""

    unit: Unit
    busy: float
    factor: float


@dataclass(frozen=True, slots=True)
class Gains:
    """Upper bounds for several engines, seen at the load `at`. time_slicing, mps: the tightest of each way to share,
    None where nothing bounds it. power_share: of the power limit."""

    at: int
    ceilings: tuple[Ceiling, ...]
    power_share: float | None

    @property
    def time_slicing(self) -> Ceiling | None:
        return min(self.ceilings, key=lambda c: c.factor, default=None)

    @property
    def mps(self) -> Ceiling | None:
        return min((c for c in self.ceilings if c.unit != "host"), key=lambda c: c.factor, default=None)


def gains_at(subject: ModelSweep, batch: int) -> Gains | None:
    """Upper bounds on the gain of several engines at this load, or else at the largest measured below it. The smallest
    measured load serves where none is below; None where no load is usable."""
    loads = [p for p in subject.usable if p.concurrency <= batch] or subject.usable[:1]
    if not loads:
        return None
    point = loads[-1]
    power = point.power_w / point.power_limit_w if point.power_w and point.power_limit_w else None
    return Gains(point.concurrency, tuple(ceilings(point, subject)), power)


def ceilings(point: Point, subject: ModelSweep) -> Iterator[Ceiling]:
    """Every unit that one engine is known to use in part. The kernels of engines that take turns run at most all of the
    time; those that overlap share the memory and the tensor cores, and nothing passes the data sheet's roofline: each
    engine reads its own weights, so more engines move no fewer bytes per token."""
    found: list[tuple[Unit, float | None]] = [
        ("host", point.engine_active),
        ("dram", None if point.dram_active is None else point.dram_active / REACHABLE_DRAM),
        ("tensor", None if point.tensor_active is None else point.tensor_active / REACHABLE_TENSOR),
        ("roofline", _roofline(point, subject)),
    ]
    for unit, busy in found:
        if busy is not None and busy > 0:
            yield Ceiling(unit, busy, max(1.0, 1 / busy))


def _roofline(point: Point, subject: ModelSweep) -> float | None:
    """Share of what no engine can pass at this batch, prompts hidden behind the decoding."""
    if subject.work is None or subject.peaks is None or subject.output_share is None:
        return None
    ceiling = ceiling_tokens_per_s(subject.work, subject.peaks, fmean(point.batch_repeats), overlap=True)
    return subject.output_share * fmean(point.repeats) / ceiling


WORTH = 1.1  # a bound below leaves too little to start a second engine for
REPLICAS = 2  # of what four engines gained in the raw results of arXiv:2503.08311, two gained four fifths or all
AT_LIMIT = 0.95  # share of the power limit


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """Figures of a batch: tokens/s and seconds per output token, with 95 % intervals where noise is known.

    share: of the largest throughput measured. efficiency: T(B)/(B T(1)). cost: of a million output tokens. latency,
    cost: None where not known.
    """

    batch: int
    tokens_per_s: Interval
    share: float
    latency_s: Interval | None
    efficiency: float | None
    cost: Interval | None = None
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of one engine at a batch. freed_*: of the KV cache that it had, negative for less, None if not known."""

    batch: int
    kv_blocks: int
    kv_bytes: int
    total_bytes: int
    utilization: float | None
    freed_bytes: int | None
    freed_share: float | None


@dataclass(frozen=True, slots=True)
class ReplicaAdvice:
    """The number of engines that fit: with the batch each, and with the batch divided among them. advised: worth a
    trial, 1 where nothing is to be gained; each: requests of each of these; why: the reason for the number."""

    at_batch: int
    split: int
    advised: int
    each: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """All there is to say on one model. batch: to be served with: B_opt, or less where the memory does not hold that;
    None where nothing can be advised. needs, replicas: None without a footprint or a GPU."""

    subject: ModelSweep
    decision: Decision
    batch: int | None
    advised: OperatingPoint | None = None
    largest: OperatingPoint | None = None
    single: OperatingPoint | None = None
    needs: Needs | None = None
    replicas: ReplicaAdvice | None = None
    gains: Gains | None = None


@dataclass(frozen=True, slots=True)
class CombinedPlacement:
    """All models with a batch on one GPU. total_bytes: what they take, at the least where they do not fit. lowered: who
    has less than its B_opt."""

    fits: bool
    total_bytes: int
    budget_bytes: int
    lowered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """together: None where no memory is known of the GPU or of none of the models."""

    wish: Objectives
    advices: tuple[Advice, ...]
    together: CombinedPlacement | None

    @property
    def possible(self) -> bool:
        """Is there anything to advise?"""
        return any(advice.batch is not None for advice in self.advices)


def plan(subjects: Sequence[ModelSweep], wish: Objectives) -> Plan:
    """A batch for each model, so that all fit, and what follows from it."""
    decisions = [decide(subject, wish) for subject in subjects]
    batches, together = place(subjects, decisions, wish)
    rows = zip(subjects, decisions, batches, strict=True)
    return Plan(wish, tuple(_advice(s, d, batch, wish, len(subjects) == 1) for s, d, batch in rows), together)


def _advice(subject: ModelSweep, decision: Decision, batch: int | None, wish: Objectives, alone: bool) -> Advice:
    loads = subject.usable
    known = Advice(
        subject=subject,
        decision=decision,
        batch=batch,
        largest=offer(subject, decision, loads[-1].concurrency, wish) if loads else None,
        single=offer(subject, decision, 1, wish),
    )
    if batch is None:
        return known
    gains = gains_at(subject, batch)
    return replace(
        known,
        advised=offer(subject, decision, batch, wish),
        needs=needs(subject, batch, wish),
        replicas=replicas(subject, batch, gains, wish, alone=alone, predicted=decision.predicted),
        gains=gains,
    )


def offer(subject: ModelSweep, decision: Decision, batch: int, wish: Objectives) -> OperatingPoint | None:
    """Operating point of a batch, as measured at this load, or else predicted by the laws; None without either."""
    point = next((p for p in subject.usable if p.concurrency == batch), None)
    wait: Interval | None
    if point is not None:
        rate = around(point, subject.usable, output_rate)
        wait = around(point, subject.usable, e2e_s)
    elif (by_law := decision.laws.tokens_per_s(batch)) is not None:
        rate, line = Interval(by_law), decision.laws.wait
        wait = None if line is None else Interval(line.seconds(batch))
    else:
        return None
    return OperatingPoint(
        batch=batch,
        tokens_per_s=rate,
        share=rate.value / max(fmean(p.repeats) for p in subject.usable),
        latency_s=wait,
        efficiency=None if decision.base is None else rate.value / (batch * decision.base.per_s),
        cost=cost_per_million(wish.price_per_hour, rate, subject.output_share),
        predicted=point is None,
    )


def around(point: Point, points: Sequence[Point], what: Figure) -> Interval:
    """The mean of a point's repeats, with its interval."""
    valid = valid_points(points)
    return replace(factor(point_differences(valid, what).mean(valid.index(point))), value=fmean(what(point)))


def cost_per_million(price_per_hour: float | None, rate: Interval, output_share: float | None) -> Interval | None:
    """Cost of a million output tokens, in the price's unit; None where price or share of output is not known."""
    if price_per_hour is None or output_share is None:
        return None
    high, value, low = (
        None if per_s is None else price_per_hour / (3600 * per_s * output_share) * 1e6
        for per_s in (rate.low, rate.value, rate.high)
    )
    return Interval(value or 0.0, low, high)


def needs(subject: ModelSweep, batch: int, wish: Objectives) -> Needs | None:
    engine, footprint = subject.engine, subject.footprint
    if engine is None or footprint is None:
        return None
    had, of = engine.kv_had_bytes, engine.gpu_had_bytes
    kv, total, gpu = footprint.kv_bytes(batch), footprint.total_bytes(batch), wish.gpu_bytes
    return Needs(
        batch=batch,
        kv_blocks=footprint.kv_blocks(batch),
        kv_bytes=kv,
        total_bytes=total,
        utilization=None if gpu is None else utilization(total, gpu),
        freed_bytes=None if had is None else had - kv,
        freed_share=None if had is None or of is None else freed_share(had, kv, of),
    )


def place(
    subjects: Sequence[ModelSweep], decisions: Sequence[Decision], wish: Objectives
) -> tuple[list[int | None], CombinedPlacement | None]:
    """Each model's batch so that all fit, B_opt where they do; and what they take together. A model whose memory is not
    known keeps its B_opt and is not counted."""
    batches, budget = [d.batch for d in decisions], wish.budget_bytes
    if budget is None:
        return batches, None
    ladders = {i: ladder for i, s in enumerate(subjects) if (ladder := _ladder(s, decisions[i], budget))}
    if not ladders:
        return batches, None
    heights = divide(list(ladders.values()), budget)
    shown = dict(zip(ladders, heights or (0,) * len(ladders), strict=True))
    for i, height in shown.items():
        batches[i] = ladders[i].rungs[height].batch if heights else None
    total = sum(ladders[i].bytes_at(height) for i, height in shown.items())
    lowered = tuple(subjects[i].name for i in ladders if heights and batches[i] != decisions[i].batch)
    return batches, CombinedPlacement(heights is not None, total, budget, lowered)


def _ladder(subject: ModelSweep, decision: Decision, budget: int) -> BatchOptions | None:
    """B_opt and what is below it: loads that were measured, or by the law the largest that fits into the budget, and
    powers of two; 1 always. None where there is no B_opt, or its memory is not known."""
    best, footprint, base = decision.batch, subject.footprint, decision.base
    if best is None or footprint is None or base is None:
        return None
    rates = {p.concurrency: fmean(p.repeats) for p in subject.usable if p.concurrency <= best}
    if decision.predicted:
        fits = max(1, (budget - footprint.total_bytes(0)) // footprint.request_bytes)
        steps = {best, min(best, fits), *(1 << i for i in range(best.bit_length()))}
        rates = {batch: decision.laws.tokens_per_s(batch) or 0.0 for batch in steps}
    rates[1] = base.per_s
    return BatchOptions(footprint, tuple(BatchOption(batch, rate) for batch, rate in sorted(rates.items())))


def replicas(
    subject: ModelSweep,
    batch: int,
    gains: Gains | None,
    wish: Objectives,
    *,
    alone: bool = True,
    predicted: bool = False,
) -> ReplicaAdvice | None:
    """Advice on how many engines fit and how many are worth a trial; None where the footprint or the memory is not
    known. alone: no other model is to have a part of the GPU. predicted: the batch is predicted, not measured."""
    footprint, budget = subject.footprint, wish.budget_bytes
    if footprint is None or budget is None:
        return None
    split = replicas_that_split(footprint, batch, budget)
    why_not = _against(gains, split, alone, predicted)
    advised = 1 if why_not else REPLICAS
    why = why_not or "in published results two engines give most of the gain of four"
    return ReplicaAdvice(replicas_that_fit(footprint, batch, budget), split, advised, -(-batch // advised), why)


def _against(gains: Gains | None, split: int, alone: bool, predicted: bool) -> str:
    """Reason why one engine is enough; empty where more are worth a trial."""
    # Kernels of several engines overlap under MPS. Yet of 34 sets measured on an H100 and an H200 none gained over 7 %
    # more than engines that take turns could (docs/results.md).
    bound = gains.time_slicing if gains else None
    if not alone:
        return "the other models are to have their part of the GPU"
    if predicted:
        return "the batch is predicted, to be measured first"
    if split < REPLICAS:
        return "no second engine fits, or one request cannot be divided"
    if gains is None or bound is None:
        return "nothing tells what a second engine could gain"
    if bound.factor < WORTH and bound.unit == "host":
        return f"a kernel runs for {percent(bound.busy)} of the time, and replicas fill time without one"
    if bound.factor < WORTH:
        return f"at most {bound.factor:.2f} times the throughput is to be gained"
    if gains.power_share is not None and gains.power_share >= AT_LIMIT:
        return "the GPU is at its power limit: what more it did, it would do at a lower clock"
    return ""


def least_latency_s(advice: Advice, engines: int) -> float | None:
    """Seconds per output token that `engines` of the advised batch each take at the least: so many times the requests
    in flight, at no more than the bound times the throughput (Little's law)."""
    bound = advice.gains.mps if advice.gains else None
    if bound is None or advice.advised is None or advice.advised.latency_s is None:
        return None
    return engines / bound.factor * advice.advised.latency_s.value
