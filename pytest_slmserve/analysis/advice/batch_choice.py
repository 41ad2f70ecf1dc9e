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

from pytest_slmserve.analysis.advice.gpu_memory import GPU_MEMORY_UTILIZATION, Footprint
from pytest_slmserve.analysis.metrics.roofline import Peaks, Work
from pytest_slmserve.analysis.points.sweep_points import Point
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
from pytest_slmserve.analysis.sweep.gains import valid_points
from pytest_slmserve.analysis.sweep.saturation import Fit, fit
from pytest_slmserve.schema.errors import TooFewPoints

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
