"""Advice on what to deploy: for each model a batch, its throughput and cost, the memory it needs, the number of
engines.

The batch follows the rule of the batching advisor of arXiv:2503.08311 (`batching`). From two loads only, the saturation
law through them predicts the batch. Through batch 1 and 32 of the paper's published points the law predicts latencies
of all larger batches 8 to 13 % too long, so it errs on the careful side.

An unknown value is None, and a sentence says why it is unknown.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, mul
from statistics import fmean
from typing import Literal

from pytest_slmserve.analysis.estimates import Interval, factor, percent
from pytest_slmserve.analysis.metrics import gpu_figures
from pytest_slmserve.analysis.metrics.gpu_figures import Peaks, Work
from pytest_slmserve.analysis.points import Figure, Point, e2e_s, output_rate, point_differences
from pytest_slmserve.analysis.sweep import batching
from pytest_slmserve.analysis.sweep.batching import Base, Caps, LatencyLaw, Limit, RelativeSlo, Slo
from pytest_slmserve.analysis.sweep.curve import MARGIN
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad, Fit, fit, valid_points
from pytest_slmserve.schema.errors import TooFewPoints
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS, RESERVE_BYTES
from pytest_slmserve.schema.specs import Adapters, EngineSpec

GPU_MEMORY_UTILIZATION = 0.9  # of the GPU for all engines together
UTILIZATION_STEPS = 1000  # vLLM takes its share of the memory with three decimals
REACH = 16  # times the largest load measured: how far a prediction goes (checked to 24 times on published points)
WORTH = 1.1  # a smaller bound leaves too little to start a second engine
REPLICAS = 2  # of what four engines gained in the raw results of arXiv:2503.08311, two gained four fifths or all
AT_LIMIT = 0.95  # share of the power limit
# What two engines on one GPU gained over one under as many requests, over the bound on it, but at most over 2: median
# and the middle 90 % of 38 sets measured on H100s and H200s, of nine models (archives with "replicas" and "today").
OF_BOUND = Interval(0.86, 0.71, 1.07)

Unit = Literal["host", "dram", "tensor", "roofline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory that an engine of a model takes. kv_bytes_per_token: in the layers that share a block. longest: tokens of
    a full request. groups: of such layers; each may take blocks for all tokens. allowance_bytes: activations,
    captured graphs and the context. allowance_seen: by sensors, as memory used less weights less KV cache."""

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

    def kv_bytes(self, batch: int) -> int:
        """KV cache for a batch at full length, and for the block that no request ever gets."""
        return batch * self.request_bytes + NULL_BLOCKS * self.block_bytes

    def total_bytes(self, batch: int) -> int:
        return self.weight_bytes + self.allowance_bytes + self.kv_bytes(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """A model as it was served. dtype, max_num_batched_tokens: as the engine reported them. no_footprint: why there is
    no memory of a GPU to plan; empty if there is. kv_had_bytes, gpu_had_bytes: its KV cache, and all of its GPU."""

    spec: EngineSpec
    dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    footprint: Footprint | None = None
    no_footprint: str = ""
    kv_had_bytes: int | None = None
    gpu_had_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSweep:
    """One model. points: of one engine; their `e2e_repeats` are seconds per output token. output_share: output tokens
    as a share of those that the points' rates count. b_half: if it is known beforehand. work, peaks: for the
    roofline. together: throughput of the best measured set of engines on one GPU over that of one engine under as many
    requests. notes: what a reader should know of the source."""

    name: str
    points: tuple[Point, ...]
    engine: ServedEngine | None = None
    output_share: float | None = 1.0
    b_half: float | None = None
    work: Work | None = None
    peaks: Peaks | None = None
    together: Interval | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> list[Point]:
        """Points that are valid and not degraded."""
        return [p for p in valid_points(self.points) if not p.degraded]

    @property
    def footprint(self) -> Footprint | None:
        return None if self.engine is None or self.engine.no_footprint else self.engine.footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """slo: None decides by efficiency only. gpu_bytes: None if no GPU is known. price_per_hour: of the GPU. together:
    whether all models share the GPU; else each has it for itself. adapters: that each model is to hold."""

    slo: Slo | None = None
    threshold: float = batching.EFFICIENCY
    gpu_bytes: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    price_per_hour: float | None = None
    together: bool = False
    adapters: Adapters | None = None

    @property
    def budget_bytes(self) -> int | None:
        return None if self.gpu_bytes is None else int(self.gpu_bytes * self.gpu_memory_utilization)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """choice: B_opt, with ends by the noise of repeats if it was measured. predicted: by the laws through two loads.
    limit: of the latency. base: T(1). step, wait: laws of the seconds of a step and of an output token. reason: why
    there is no B_opt. notes: what rests on more than measurement, and what to know."""

    choice: ChosenLoad = field(default_factory=ChosenLoad)
    predicted: bool = False
    limit: Limit | None = None
    base: Base | None = None
    caps: Caps = field(default_factory=Caps)
    step: LatencyLaw | None = None
    wait: LatencyLaw | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def batch(self) -> int | None:
        return self.choice.value


@dataclass(frozen=True, slots=True)
class BatchOption:
    """A batch that a model may be given."""

    batch: int
    tokens_per_s: float
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Upper bound of the gain of several engines. busy: one engine's share of what can be used of `unit`. factor: of
    one engine's throughput. why: the resource with its measured value."""

    unit: Unit
    busy: float
    factor: float
    why: str


@dataclass(frozen=True, slots=True)
class Gains:
    """Tightest upper bounds for each way to share the GPU, None if nothing bounds it, measured at the load `at`.
    power_share: of the power limit."""

    at: int
    power_share: float | None
    time_slicing: Ceiling | None
    mps: Ceiling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """Figures of a batch, with 95 % intervals if noise is known. share: of the largest throughput measured. latency_s:
    of an output token. efficiency: T(B)/(B T(1)). cost: of a million output tokens."""

    batch: int
    tokens_per_s: Interval
    share: float
    latency_s: Interval | None
    efficiency: float | None
    cost: Interval | None = None
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of one engine at a batch. freed_*: of the KV cache that it had, negative for less, None if unknown. The
    share is of the GPU's memory (arXiv:2503.08311)."""

    kv_blocks: int
    kv_bytes: int
    total_bytes: int
    utilization: float | None
    freed_bytes: int | None
    freed_share: float | None


@dataclass(frozen=True, slots=True)
class ReplicaAdvice:
    """Numbers of engines: that fit with the batch each, that fit with a part of it each (split), and that are worth a
    trial for the reason `why` (advised), with `each` requests each."""

    at_batch: int
    split: int
    advised: int
    each: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The advice on one model. batch: B_opt, or less if the memory does not hold that; None if nothing is advised.
    advised, largest, single: figures at this batch, at the largest load measured, and at 1."""

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
    """All models with a batch on one GPU. total_bytes: at the least if they do not fit. lowered: models with less than
    their B_opt."""

    fits: bool
    total_bytes: int
    budget_bytes: int
    lowered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """together: None if the memory of the GPU, or that of each model, is unknown, or each has a GPU for itself."""

    wish: Objectives
    advices: tuple[Advice, ...]
    together: CombinedPlacement | None

    @property
    def possible(self) -> bool:
        """Whether a batch is advised for a model."""
        return any(advice.batch is not None for advice in self.advices)


def plan(subjects: Sequence[ModelSweep], wish: Objectives) -> Plan:
    """Return a batch for each model and what follows from it: each alone on the GPU, or so that all fit."""
    decisions = [decide(subject, wish) for subject in subjects]
    shared, combined = wish.together and len(subjects) > 1, None
    if shared or len(subjects) == 1:
        batches, combined = place(subjects, decisions, wish)
    else:
        batches = [place([one], [seen], wish)[0][0] for one, seen in zip(subjects, decisions)]
    advices = []
    for subject, decision, batch in zip(subjects, decisions, batches, strict=True):
        at, loads = partial(operating_point, subject, decision, wish), subject.usable
        gains = gains_at(subject, batch)
        advices.append(
            Advice(
                subject=subject,
                decision=decision,
                batch=batch,
                advised=at(batch),
                largest=at(loads[-1].concurrency if loads else None),
                single=at(1),
                needs=needs(subject, batch, wish),
                replicas=replicas(subject, decision, batch, gains, wish, only=not shared),
                gains=gains,
            )
        )
    return Plan(wish, tuple(advices), combined)


# The batch


def decide(subject: ModelSweep, wish: Objectives) -> Decision:
    """B_opt of one model: the largest load measured within the conditions, or what two loads predict."""
    loads = subject.usable
    if len(loads) < 2:
        at = f" (concurrency {loads[0].concurrency})" if loads else ""
        return Decision(reason=f"{len(loads)} load{'' if len(loads) == 1 else 's'} to judge by{at}: two are needed")
    law = step = None
    if len(loads) > 2 or subject.b_half is not None:  # of two loads both laws meet them as well as they can
        with suppress(TooFewPoints):
            law = fit(loads, subject.b_half)
            step = LatencyLaw(law.t_inf.value, law.b_half.value) if law.identified else None
        wait = batching.latency_law(loads, subject.b_half)
    else:  # seconds of a step (batch over tokens/s), and of an output token, by the true batch
        batches = [fmean(p.batch_repeats) for p in loads]
        step = through(*((batch, batch / fmean(p.repeats)) for batch, p in zip(batches, loads)))
        wait = through(*((batch, fmean(p.e2e_repeats)) for batch, p in zip(batches, loads)))
    base, alone = batching.measured_base(loads), "no valid point at 1: T(1) is by the"
    try:
        if len(loads) == 2 and (step is None or wait is None):
            both = f"concurrency {loads[0].concurrency} and {loads[-1].concurrency}"
            raise TooFewPoints(f"{both} give no law: a step has to take longer at the larger load")
        if base is None and step is not None and len(loads) == 2:
            base = Base(1 / step.seconds(1), f"{alone} law as well")
        elif base is None and law is not None and law.identified:
            trust = f"which is off by up to {percent(law.error_max)} elsewhere"
            base = Base(law.tokens_per_s(1), f"{alone} saturation law, {trust}")
        elif base is None:
            raise TooFewPoints("batching efficiency needs T(1): no valid point at 1, and no law to tell it")
        limit = None if wish.slo is None else batching.limit_of(wish.slo, loads, wait)
    except TooFewPoints as error:
        return Decision(reason=error.problem)
    choice = batching.b_opt(loads, base, limit, wish.threshold)
    notes = tuple(note for note in (base.note, limit and limit.note) if note)
    known = Decision(choice=choice, limit=limit, base=base, step=step, wait=wait, notes=notes)
    return _predicted(subject, known, wish) if len(loads) == 2 else _measured(subject, known, law, wish)


def _measured(subject: ModelSweep, known: Decision, law: Fit | None, wish: Objectives) -> Decision:
    loads, chosen, wait, slo = subject.usable, known.batch, known.wait, wish.slo
    notes, reason = [*known.notes], ""
    if chosen is None:
        reason = f"no load that was measured has {conditions(wish, known.limit)}"
    else:
        if chosen == loads[-1].concurrency:
            notes.append(f"{chosen} is the largest load measured: a larger batch may serve more")
        rates = {p.concurrency: fmean(p.repeats) for p in loads if p.concurrency <= chosen}
        best = max(rates, key=lambda load: rates[load])
        if (more := rates[best] / rates[chosen] - 1) > MARGIN:
            notes.append(f"the rule takes the largest, but concurrency {best} has {percent(more)} more throughput")
    if law and not law.describes:
        off = f"the saturation law is off by up to {percent(law.error_max)} here"
        notes.append(f"{off}: what it allows is no more than a hint")
    # eff(B) = (1 + b_half)/(B + b_half) by the law; the latency is within the objective up to 0 if no batch is.
    efficient = (1 + law.b_half.value) / wish.threshold - law.b_half.value if law and law.identified else None
    soon = None
    if slo is not None and wait is not None:
        seconds = slo.factor * wait.seconds(slo.at) if isinstance(slo, RelativeSlo) else slo.seconds
        soon = max(wait.batch(seconds), 0.0)
    return replace(known, caps=Caps(efficient, soon), reason=reason, notes=tuple(notes))


def _predicted(subject: ModelSweep, known: Decision, wish: Objectives) -> Decision:
    """Return the largest batch within the conditions by the laws through two loads, unless the larger load measured is
    no less."""
    loads, limit, step, wait, base = subject.usable, known.limit, known.step, known.wait, known.base
    assert step and wait and base
    both = f"concurrency {loads[0].concurrency} and {loads[-1].concurrency}"
    efficiency, reach = step.pace / (wish.threshold * base.per_s) - step.b_half, REACH * loads[-1].concurrency
    caps = Caps(efficiency, None if limit is None else max(0.0, wait.batch(limit.seconds)))
    tokens = (subject.engine and subject.engine.max_num_batched_tokens) or reach
    efficient = math.ceil(min(efficiency, 1e12)) - 1  # below the cap
    batch = min(efficient, reach, tokens, reach if caps.slo is None else math.floor(caps.slo))
    known = replace(known, caps=caps)
    if known.batch is not None and known.batch >= batch:
        return known
    if batch < 1:
        reason = f"by the law through {both}, no batch has {conditions(wish, limit)}"
        return replace(known, choice=ChosenLoad(), reason=reason)
    notes = [f"predicted by the saturation law through {both}, and not measured: measure there before use"]
    if batch == reach:
        notes.append(f"the law allows more, but no prediction goes beyond {REACH} times the largest load measured")
    elif batch == tokens:
        notes.append(f"a step takes no more: max_num_batched_tokens is {tokens}, and vLLM starts with no larger batch")
    if subject.footprint is None or wish.budget_bytes is None:
        notes.append("no limit of the memory is known: a KV cache that is full ends the growth earlier")
    return replace(known, choice=ChosenLoad(batch), predicted=True, notes=(*notes, *known.notes))


def through(first: tuple[float, float], second: tuple[float, float]) -> LatencyLaw | None:
    """Return the law through two pairs of batch and seconds; None if seconds do not grow, or grow faster than the
    batch."""
    (small, soon), (large, late) = sorted((first, second))
    if large <= small or late <= soon:
        return None
    pace = (large - small) / (late - soon)
    half = soon * pace - small
    return None if half < 0 else LatencyLaw(pace, half)


def conditions(wish: Objectives, limit: Limit | None) -> str:
    """Return a clause with the conditions on a batch: efficiency, and the limit in ms per output token, if any."""
    enough = f"an efficiency above {percent(wish.threshold)}"
    return enough if limit is None else f"{enough} and at most {1e3 * limit.seconds:.3g} ms per output token"


# Throughput and cost


def operating_point(
    subject: ModelSweep, decision: Decision, wish: Objectives, batch: int | None
) -> OperatingPoint | None:
    """Return the figures of a batch, as measured at this load, or else predicted by the laws; None without either."""
    point = next((p for p in subject.usable if p.concurrency == batch), None)
    step, line, wait, cost = decision.step, decision.wait, None, None
    if batch is not None and point is not None:
        rate, wait = around(point, subject.usable, output_rate), around(point, subject.usable, e2e_s)
    elif batch is not None and step is not None:
        rate, wait = Interval(batch / step.seconds(batch)), None if line is None else Interval(line.seconds(batch))
    else:
        return None
    price, output = wish.price_per_hour, subject.output_share
    if price is not None and output is not None:  # which falls as the rate grows
        cost = Interval(rate.value, rate.high, rate.low).mapped(lambda per_s: price / (3600 * per_s * output) * 1e6)
    return OperatingPoint(
        batch=batch,
        tokens_per_s=rate,
        share=rate.value / max(fmean(p.repeats) for p in subject.usable),
        latency_s=wait,
        efficiency=None if decision.base is None else rate.value / (batch * decision.base.per_s),
        cost=cost,
        predicted=point is None,
    )


def around(point: Point, points: Sequence[Point], what: Figure) -> Interval:
    """Return the mean of a point's repeats, with its interval by the noise of all points."""
    valid = valid_points(points)
    return replace(factor(point_differences(valid, what).mean(valid.index(point))), value=fmean(what(point)))


# Memory


def utilization(total_bytes: int, gpu_bytes: int) -> float:
    """Return the share for vLLM, rounded up. If the KV bytes are given, vLLM only checks that this share is free."""
    return min(1.0, math.ceil(total_bytes * UTILIZATION_STEPS / gpu_bytes) / UTILIZATION_STEPS)


def needs(subject: ModelSweep, batch: int | None, wish: Objectives) -> Needs | None:
    """Return the memory of one engine at a batch; None without a batch, or if the footprint is unknown."""
    engine, footprint = subject.engine, subject.footprint
    if engine is None or footprint is None or batch is None:
        return None
    had, of = engine.kv_had_bytes, engine.gpu_had_bytes or wish.gpu_bytes
    kv, total, gpu = footprint.kv_bytes(batch), footprint.total_bytes(batch), wish.gpu_bytes
    return Needs(
        kv_blocks=kv // footprint.block_bytes,
        kv_bytes=kv,
        total_bytes=total,
        utilization=None if gpu is None else utilization(total, gpu),
        freed_bytes=None if had is None else had - kv,
        freed_share=None if had is None or of is None else (had - kv) / of,
    )


def place(
    subjects: Sequence[ModelSweep], decisions: Sequence[Decision], wish: Objectives
) -> tuple[list[int | None], CombinedPlacement | None]:
    """Return each model's batch so that all fit, and what they take together. A model whose memory is unknown keeps its
    B_opt and is not counted. Others get it or less: loads that were measured, or by the law the largest that fits into
    the budget, and powers of two; and 1."""
    batches, budget = [decision.batch for decision in decisions], wish.budget_bytes
    options: dict[int, list[BatchOption]] = {}
    for i, (subject, decision) in enumerate(zip(subjects, decisions)):
        best, footprint, base = decision.batch, subject.footprint, decision.base
        if budget is None or best is None or footprint is None or base is None:
            continue
        rates = {p.concurrency: fmean(p.repeats) for p in subject.usable if p.concurrency <= best}
        if decision.predicted and decision.step:
            fits = max(1, (budget - footprint.total_bytes(0)) // footprint.request_bytes)
            steps = {best, min(best, fits), *(1 << power for power in range(best.bit_length()))}
            rates = {batch: batch / decision.step.seconds(batch) for batch in steps}
        rates[1] = base.per_s
        options[i] = [BatchOption(b, rate, footprint.total_bytes(b)) for b, rate in sorted(rates.items())]
    if budget is None or not options:
        return batches, None
    chosen = divide(list(options.values()), budget)
    total = 0
    for i, at in zip(options, chosen or [0] * len(options), strict=True):
        option = options[i][at]
        total += option.total_bytes
        batches[i] = option.batch if chosen else None
    lowered = tuple(subjects[i].name for i in options if chosen and batches[i] != decisions[i].batch)
    return batches, CombinedPlacement(chosen is not None, total, budget, lowered)


def divide(models: Sequence[Sequence[BatchOption]], budget: int) -> tuple[int, ...] | None:
    """Return the place of the option that each model gets, so that all engines fit; None if not even the first options
    do. From the last options, the step down is taken that loses the least of its model's throughput per byte. What the
    last step freed too much may let other models up again.

    Args:
        models: Their options by ascending batch, of which the last is the best.
    """
    places = [len(options) - 1 for options in models]

    def worth(model: int, place: int) -> float:
        """Return the share of the model's best throughput that the step up to this place adds, per byte."""
        before, after = models[model][place - 1 : place + 1]
        more = (after.tokens_per_s - before.tokens_per_s) / models[model][-1].tokens_per_s
        return more / (after.total_bytes - before.total_bytes)

    while (left := budget - sum(o[at].total_bytes for o, at in zip(models, places))) < 0:
        down = [(worth(model, at), model) for model, at in enumerate(places) if at]
        if not down:
            return None
        places[min(down)[1]] -= 1
    while up := [
        (worth(model, at + 1), model, takes)
        for model, at in enumerate(places)
        if at + 1 < len(models[model])
        and (takes := models[model][at + 1].total_bytes - models[model][at].total_bytes) <= left
        and worth(model, at + 1) > 0
    ]:
        _, model, takes = max(up)
        places[model], left = places[model] + 1, left - takes
    return tuple(places)


# More engines


def gains_at(subject: ModelSweep, batch: int | None) -> Gains | None:
    """Return upper bounds on the gain of several engines at this load, or else at the largest measured below it. The
    smallest measured load serves if none is below; None without a batch, or if no load is usable.

    Each unit that one engine is known to use in part bounds the gain. The kernels of engines that take turns run at
    most all of the time. Those that overlap share the memory and the tensor cores. Nothing passes the data sheet's
    roofline at this batch with prompts hidden behind the decoding: each engine reads its own weights, so more engines
    move no fewer bytes per token.
    """
    loads = subject.usable
    if batch is None or not loads:
        return None
    loads = [p for p in loads if p.concurrency <= batch] or loads[:1]
    point = loads[-1]
    active = "active {share} of the time, of {most} that can be reached"
    units: list[tuple[Unit, float | None, float, str]] = [
        ("host", point.engine_active, 1.0, "the host: no kernel runs for {idle} of the time"),
        ("dram", point.dram_active, gpu_figures.REACHABLE_DRAM, f"the memory: {active}"),
        ("tensor", point.tensor_active, gpu_figures.REACHABLE_TENSOR, f"the tensor cores: {active}"),
    ]
    if subject.work is not None and subject.peaks is not None and subject.output_share is not None:
        batch_seen = fmean(point.batch_repeats)
        ceiling = gpu_figures.ceiling_tokens_per_s(subject.work, subject.peaks, batch_seen, overlap=True)
        reached = subject.output_share * fmean(point.repeats) / ceiling
        units.append(("roofline", reached, 1.0, "the roofline: {busy} of what the data sheet allows is reached"))
    bounds = []
    for unit, share, most, why in units:
        if share is not None and (busy := share / most) > 0:
            told = {"share": share, "most": most, "busy": busy, "idle": max(0.0, 1 - busy)}
            why = why.format(**{name: percent(value) for name, value in told.items()})
            bounds.append(Ceiling(unit, busy, max(1.0, 1 / busy), why))
    power = point.power_w / point.power_limit_w if point.power_w and point.power_limit_w else None
    alone = (bound for bound in bounds if bound.unit != "host")
    tightest = (min(each, key=attrgetter("factor"), default=None) for each in (bounds, alone))
    return Gains(point.concurrency, power, *tightest)


def second_engine(gains: Gains | None) -> Interval | None:
    """Return the throughput of two engines that share the GPU over that of one under as many requests in all, as the
    bound on the gain predicts it from published sets; None if nothing bounds it."""
    bound = gains.time_slicing if gains else None
    return None if bound is None else OF_BOUND.mapped(partial(mul, min(bound.factor, REPLICAS)))


def batch_ends(advice: Advice) -> tuple[int | None, int | None]:
    """Return the least batch that B_opt may be, by the noise of the repeats, and the smallest load measured that is
    above it for sure; None for unknown ends, and both for a batch that was not measured."""
    choice, measured = advice.decision.choice, [p.concurrency for p in advice.subject.usable]
    if choice.value is None or advice.decision.predicted:
        return None, None
    most = choice.high or choice.value
    return (choice.low if choice.known else choice.value), next((load for load in measured if load > most), None)


def replicas(
    subject: ModelSweep, decision: Decision, batch: int | None, gains: Gains | None, wish: Objectives, *, only: bool
) -> ReplicaAdvice | None:
    """Return advice on how many engines fit and how many are worth a trial; None without a batch, or if the footprint
    or the memory is unknown. only: no other model has a part of the GPU."""
    footprint, budget = subject.footprint, wish.budget_bytes
    if footprint is None or budget is None or batch is None:
        return None
    at_batch, split = max(0, budget) // footprint.total_bytes(batch), replicas_that_split(footprint, batch, budget)
    # Kernels of several engines overlap under MPS. Yet of 34 sets measured on an H100 and an H200 none gained over 7 %
    # more than engines that take turns could (docs/results.md).
    bound, advised, measured = gains.time_slicing if gains else None, 1, subject.together
    times = f"{measured.value:.2f} times" if measured else ""
    seen = f"sets of engines were measured, and the best served {times} what one did"
    if not only:
        why = "the other models are to have their part of the GPU"
    elif decision.predicted:
        why = "the batch is predicted, to be measured first"
    elif split < REPLICAS:
        why = "no second engine fits, or one request cannot be divided"
    elif measured and measured.value < WORTH:
        why = seen
    elif gains is None or bound is None:
        why = "nothing tells what a second engine could gain"
    elif bound.factor < WORTH and bound.unit == "host":
        why = f"a kernel runs for {percent(bound.busy)} of the time, and replicas fill time without one"
    elif bound.factor < WORTH:
        why = f"at most {bound.factor:.2f} times the throughput is to be gained"
    elif gains.power_share is not None and gains.power_share >= AT_LIMIT:
        why = "the GPU is at its power limit: what more it did, it would do at a lower clock"
    else:
        published = "in published results two engines give most of the gain of four"
        why, advised = seen if measured else published, REPLICAS
    return ReplicaAdvice(at_batch, split, advised, -(-batch // advised), why)


def replicas_that_split(footprint: Footprint, batch: int, budget: int) -> int:
    """Return the most engines that fit with `batch` divided among them, each with at least one request."""
    fixed = footprint.total_bytes(0)
    most = min(batch, max(0, budget - batch * footprint.request_bytes) // fixed)
    return next((n for n in range(most, 0, -1) if n * footprint.total_bytes(-(-batch // n)) <= budget), 0)
