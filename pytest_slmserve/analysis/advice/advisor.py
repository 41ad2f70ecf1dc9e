"""Recommendations for deployments: batch, throughput, cost, memory and number of engines for each model.

The batch follows the rule of the batching advisor of arXiv:2503.08311 (`batching`). From two loads, the saturation
model through them predicts it. Through batch 1 and 32 of the paper's published points, the predicted latencies of all
larger batches are 8 to 13% too long, so the error is on the safe side. An unknown value is None, and a sentence has the
reason.
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
REACH = 16  # times the largest measured load: limit of predictions (checked to 24 times on published points)
WORTH = 1.1  # a smaller gain is not worth a second engine
REPLICAS = 2  # they had at least 80% of the gain of four engines in the raw results of arXiv:2503.08311
AT_LIMIT = 0.95  # share of the power limit
# Gain of two engines on one GPU over one engine at the same concurrency, divided by its upper bound (at most 2): median
# and middle 90% of 38 sets of ten models on H100s and H200s, by time slicing and under MPS.
OF_BOUND = Interval(0.86, 0.71, 1.07)

Unit = Literal["host", "dram", "tensor", "roofline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of an engine of a model.

    Attributes:
        kv_bytes_per_token: in the layers that share a block.
        longest: tokens of a request at full length.
        groups: of layers; each may need blocks for all tokens.
        allowance_bytes: activations, captured graphs and context; measured if `allowance_seen`.
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
        """KV cache of one request at full length, in whole blocks."""
        return self.groups * -(-self.longest // self.block_size) * self.block_bytes

    def kv_bytes(self, batch: int) -> int:
        """Return the KV cache for a batch at full length, and the block that no request gets."""
        return batch * self.request_bytes + NULL_BLOCKS * self.block_bytes

    def total_bytes(self, batch: int) -> int:
        return self.weight_bytes + self.allowance_bytes + self.kv_bytes(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine as it was measured.

    Attributes:
        no_footprint: reason why GPU memory cannot be planned.
        kv_had_bytes: its KV cache; `gpu_had_bytes` is all memory of its GPU.
    """

    spec: EngineSpec
    dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    footprint: Footprint | None = None
    no_footprint: str = ""
    kv_had_bytes: int | None = None
    gpu_had_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSweep:
    """The measured points of one model, and its engine.

    Attributes:
        points: their `e2e_repeats` are seconds per output token.
        output_share: output tokens divided by the tokens that the points' rates count.
        b_half: None unless known in advance.
        together: throughput of the best set of engines, relative to a single engine at the same concurrency.
    """

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
        """Points that are valid and not questionable."""
        return [p for p in valid_points(self.points) if not p.degraded]

    @property
    def footprint(self) -> Footprint | None:
        return None if self.engine is None or self.engine.no_footprint else self.engine.footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Conditions of a recommendation.

    Attributes:
        slo: None for efficiency only.
        together: whether all models share the GPU.
    """

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
    """The batch of one model, and its reasons.

    Attributes:
        choice: B_opt, with its range by the noise of repeats.
        predicted: from the saturation model through two loads.
        base: throughput T(1).
        step: model of the seconds of a step; `wait` of an output token.
        reason: why there is no B_opt.
    """

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
    batch: int
    tokens_per_s: float
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Upper bound of the gain of several engines.

    Attributes:
        busy: share of the achievable peak of `unit` that one engine uses.
        factor: throughput relative to one engine.
    """

    unit: Unit
    busy: float
    factor: float
    why: str


@dataclass(frozen=True, slots=True)
class Gains:
    """Smallest upper bound for each way to share the GPU, measured at the load `at`."""

    at: int
    power_share: float | None
    time_slicing: Ceiling | None
    mps: Ceiling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """Figures of a batch, with 95% intervals if the noise is known.

    Attributes:
        share: of the largest measured throughput.
        efficiency: T(B)/(B T(1)).
        cost: of a million output tokens.
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
    """Memory of one engine at a batch.

    Attributes:
        freed_bytes: of its measured KV cache; negative if it needs more.
        freed_share: of the GPU's memory (arXiv:2503.08311); None if the measured KV cache is larger.
    """

    kv_blocks: int
    kv_bytes: int
    total_bytes: int
    utilization: float | None
    freed_bytes: int | None
    freed_share: float | None


@dataclass(frozen=True, slots=True)
class ReplicaAdvice:
    """Numbers of engines on one GPU.

    Attributes:
        at_batch: that fit with the whole batch each.
        split: that fit with a part of the batch each.
        advised: that are worth a trial, with `each` requests each.
    """

    at_batch: int
    split: int
    advised: int
    each: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The recommendation for one model.

    Attributes:
        batch: B_opt, or less if the memory is too small.
        advised: figures at this batch; `largest` and `single` are at the largest measured load and at 1.
    """

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
    """All models on one GPU. `lowered` models have less than their B_opt."""

    fits: bool
    total_bytes: int
    budget_bytes: int
    lowered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Recommendations for all models. `together` is None if memory is unknown or not shared."""

    wish: Objectives
    advices: tuple[Advice, ...]
    together: CombinedPlacement | None

    @property
    def possible(self) -> bool:
        return any(advice.batch is not None for advice in self.advices)


def plan(subjects: Sequence[ModelSweep], wish: Objectives) -> Plan:
    """Return the recommendations for all models, each alone on the GPU or all together."""
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
    """Return B_opt of one model: the largest measured load within the conditions, or a prediction from two loads."""
    loads = subject.usable
    if len(loads) < 2:
        at = f" (concurrency {loads[0].concurrency})" if loads else ""
        return Decision(reason=f"{len(loads)} load{'' if len(loads) == 1 else 's'} to judge by{at}: two are needed")
    law = step = None
    if len(loads) > 2 or subject.b_half is not None:  # with two loads, both models go through them
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
            raise TooFewPoints(f"{both} give no model: a step has to take longer at the larger load")
        if base is None and step is not None and len(loads) == 2:
            base = Base(1 / step.seconds(1), f"{alone} model as well")
        elif base is None and law is not None and law.identified:
            trust = f"which is off by up to {percent(law.error_max)} elsewhere"
            base = Base(law.tokens_per_s(1), f"{alone} saturation model, {trust}")
        elif base is None:
            raise TooFewPoints("batching efficiency needs T(1): no valid point at 1, and no model to predict it")
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
        off = f"the saturation model is off by up to {percent(law.error_max)} here"
        notes.append(f"{off}: what it allows is no more than a hint")
    # By the model, eff(B) = (1 + b_half)/(B + b_half). If no batch has the latency, its cap is 0.
    efficient = (1 + law.b_half.value) / wish.threshold - law.b_half.value if law and law.identified else None
    soon = None
    if slo is not None and wait is not None:
        seconds = slo.factor * wait.seconds(slo.at) if isinstance(slo, RelativeSlo) else slo.seconds
        soon = max(wait.batch(seconds), 0.0)
    return replace(known, caps=Caps(efficient, soon), reason=reason, notes=tuple(notes))


def _predicted(subject: ModelSweep, known: Decision, wish: Objectives) -> Decision:
    """Return the largest batch by the models through two loads, or a measured load that is not smaller."""
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
        reason = f"by the model through {both}, no batch has {conditions(wish, limit)}"
        return replace(known, choice=ChosenLoad(), reason=reason)
    notes = [f"predicted by the saturation model through {both}, and not measured: measure there before use"]
    if batch == reach:
        notes.append(f"the model allows more, but no prediction goes beyond {REACH} times the largest load measured")
    elif batch == tokens:
        notes.append(f"a step takes no more: max_num_batched_tokens is {tokens}, and vLLM starts with no larger batch")
    if subject.footprint is None or wish.budget_bytes is None:
        notes.append("no limit of the memory is known: a KV cache that is full ends the growth earlier")
    return replace(known, choice=ChosenLoad(batch), predicted=True, notes=(*notes, *known.notes))


def through(first: tuple[float, float], second: tuple[float, float]) -> LatencyLaw | None:
    """Return the saturation model through two pairs of batch and seconds, or None if they contradict it."""
    (small, soon), (large, late) = sorted((first, second))
    if large <= small or late <= soon:
        return None
    pace = (large - small) / (late - soon)
    half = soon * pace - small
    return None if half < 0 else LatencyLaw(pace, half)


def conditions(wish: Objectives, limit: Limit | None) -> str:
    enough = f"an efficiency above {percent(wish.threshold)}"
    return enough if limit is None else f"{enough} and at most {1e3 * limit.seconds:.3g} ms per output token"


# Throughput and cost


def operating_point(
    subject: ModelSweep, decision: Decision, wish: Objectives, batch: int | None
) -> OperatingPoint | None:
    """Return the figures of a batch, measured or else predicted."""
    point = next((p for p in subject.usable if p.concurrency == batch), None)
    step, line, wait, cost = decision.step, decision.wait, None, None
    if batch is not None and point is not None:
        rate, wait = around(point, subject.usable, output_rate), around(point, subject.usable, e2e_s)
    elif batch is not None and step is not None:
        rate, wait = Interval(batch / step.seconds(batch)), None if line is None else Interval(line.seconds(batch))
    else:
        return None
    price, output = wish.price_per_hour, subject.output_share
    if price is not None and output is not None:  # it falls as the rate grows
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
    """Return the mean of a point's repeats, with an interval from the noise of all points."""
    valid = valid_points(points)
    return replace(factor(point_differences(valid, what).mean(valid.index(point))), value=fmean(what(point)))


# Memory


def utilization(total_bytes: int, gpu_bytes: int) -> float:
    """Return `gpu_memory_utilization`, rounded up; with given KV bytes, vLLM only checks that it is free."""
    return min(1.0, math.ceil(total_bytes * UTILIZATION_STEPS / gpu_bytes) / UTILIZATION_STEPS)


def needs(subject: ModelSweep, batch: int | None, wish: Objectives) -> Needs | None:
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
        freed_share=None if had is None or of is None or had > of else (had - kv) / of,
    )


def place(
    subjects: Sequence[ModelSweep], decisions: Sequence[Decision], wish: Objectives
) -> tuple[list[int | None], CombinedPlacement | None]:
    """Return the batch of each model so that all models fit, and their memory.

    A model with unknown memory keeps its B_opt and does not count. The others get B_opt, a smaller measured load or 1;
    if B_opt is predicted, also a power of two or the largest batch that fits alone.
    """
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
    """Return the index of each model's option so that all engines fit, or None if they never do.

    From the last options, it takes the step down that loses least of its model's throughput per byte. If the last step
    frees too much, other models may go up again.

    Args:
        models: options of each model by ascending batch.
    """
    places = [len(options) - 1 for options in models]

    def worth(model: int, place: int) -> float:
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
    """Return upper bounds on the gain of several engines at the largest measured load up to this batch.

    If there is no such load, the smallest one counts. Each resource that one engine uses partly is a bound. Kernels of
    engines that take turns can run at most all of the time, and kernels that overlap share memory and tensor cores. The
    roofline is also a bound, because each engine reads its own weights.
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
    """Return the predicted throughput of two engines, relative to one engine at the same total concurrency."""
    bound = gains.time_slicing if gains else None
    return None if bound is None else OF_BOUND.mapped(partial(mul, min(bound.factor, REPLICAS)))


def batch_ends(advice: Advice) -> tuple[int | None, int | None]:
    """Return the smallest possible B_opt by the noise of repeats, and the smallest measured load surely above it.

    Both are None for a predicted batch.
    """
    choice, measured = advice.decision.choice, [p.concurrency for p in advice.subject.usable]
    if choice.value is None or advice.decision.predicted:
        return None, None
    most = choice.high or choice.value
    return (choice.low if choice.known else choice.value), next((load for load in measured if load > most), None)


def replicas(
    subject: ModelSweep, decision: Decision, batch: int | None, gains: Gains | None, wish: Objectives, *, only: bool
) -> ReplicaAdvice | None:
    """Return how many engines fit and how many are worth a trial.

    Args:
        only: no other model is on the GPU.
    """
    footprint, budget = subject.footprint, wish.budget_bytes
    if footprint is None or budget is None or batch is None:
        return None
    at_batch, split = max(0, budget) // footprint.total_bytes(batch), replicas_that_split(footprint, batch, budget)
    # Kernels overlap under MPS. But none of 32 sets under MPS on H100s and H200s, of two to four engines each, gained
    # over 7% more than engines that take turns could.
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
        why = f"a kernel runs for {percent(bound.busy)} of the time, and replicas can only fill the rest"
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
