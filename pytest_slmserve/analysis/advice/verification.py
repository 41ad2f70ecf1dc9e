"""Does an advice hold? What was predicted of engines, against what they served when they were started as advised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pytest_slmserve.analysis.advice.advisor import Advice, Gains, OperatingPoint, Unit, around
from pytest_slmserve.analysis.advice.batch_choice import with_tpot
from pytest_slmserve.analysis.compare.deployments import HOW
from pytest_slmserve.analysis.device.gpu_figures import most_memory_used
from pytest_slmserve.analysis.metrics.latency import latencies_of
from pytest_slmserve.analysis.points import (
    Point,
    ReplicaPoint,
    e2e_s,
    engines,
    output_rate,
    points_of,
    ratio,
    shared_points,
    system_throughput,
)
from pytest_slmserve.analysis.stats.estimates import Interval, factor, mean, percent, percent_interval, times
from pytest_slmserve.analysis.stats.noise import Differences, Repeat
from pytest_slmserve.analysis.sweep.gains import valid_points
from pytest_slmserve.analysis.verdict import State, Verdict, all_of, below, within
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.kv_cache import block_size_of, predicted_blocks
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, Resolved
from pytest_slmserve.schema.specs import EngineSpec

BLOCK_TOLERANCE = 2  # the engine may round its bytes to pages and share them between layers
KV_BLOCKS = "kv-blocks-as-predicted"


def kv_blocks_as_predicted(
    spec: EngineSpec, resolved: Resolved, tolerance: int = BLOCK_TOLERANCE, records: tuple[str, ...] = ()
) -> Verdict:
    """Does the engine have the KV blocks that shapes predict, within `tolerance` blocks?"""
    subject, predicted, seen = short_name(spec.model), predicted_blocks(spec, resolved), resolved.kv_blocks
    if predicted is None or seen is None:
        unknown = "the engine did not report its KV blocks" if seen is None else "its shape or data type is unknown"
        return Verdict(KV_BLOCKS, subject, State.INCONCLUSIVE, unknown, records=records)
    size = block_size_of(spec, resolved)
    why = f"{seen:,} blocks of {size} tokens, {predicted:,} predicted from shapes (bound {tolerance} apart)"
    state = State.PASSES if abs(seen - predicted) <= tolerance else State.FAILS
    return Verdict(
        KV_BLOCKS,
        subject,
        state,
        why,
        value=seen - predicted,
        threshold=tolerance,
        n=max(1, len(records)),
        records=records,
    )


MARGIN = 0.15
STARTS, THROUGHPUT, LATENCY = "starts-as-advised", "throughput-as-predicted", "latency-within-limit"
UNPREEMPTED, BOUNDED = "no-request-preempted", "gain-within-bound"
ORDER = (STARTS, THROUGHPUT, LATENCY, KV_BLOCKS, UNPREEMPTED, BOUNDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One model alone on the device, its engine started as advised.

    point: None where the engine failed. ratio: measured over predicted tokens/s. latency_s: per output token after the
    first. kv_blocks: predicted of the engine's specification, and reported by it. memory_bytes: in use at most, where
    sensors tell. preemptions: in all of the runs, None where none was made.
    verdicts: of each promise that could be looked at.
    """

    advice: Advice
    point: Point | None = None
    ratio: Interval | None = None
    tokens_per_s: Interval | None = None
    latency_s: Interval | None = None
    kv_blocks: tuple[int | None, int | None] = (None, None)
    memory_bytes: float | None = None
    preemptions: int | None = None
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTogether:
    """Several engines on the device at once: of one model, or one of each.

    gain: each engine's throughput over what its model had alone, added up: for several engines of one model the gain
    over one. bound: what it could be at most, by what one engine leaves unused; None where nothing bounds it.
    latency_s: the largest of the engines' means, per output token after the first.
    """

    models: tuple[str, ...]
    loads: tuple[int, ...]
    sharing: Sharing
    point: ReplicaPoint | None = None
    gain: Interval | None = None
    bound: float | None = None
    latency_s: float | None = None
    preemptions: int | None = None
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """All that was verified. together: None where one engine is all that is advised."""

    margin: float
    repeats: int
    alone: tuple[Verified, ...]
    together: VerifiedTogether | None = None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All verdicts, those of one promise next to each other."""
        many = self.together.verdicts if self.together else ()
        found = (*(verdict for each in self.alone for verdict in each.verdicts), *many)
        return tuple(sorted(found, key=lambda verdict: ORDER.index(verdict.claim)))

    @property
    def state(self) -> State:
        """Fails where one promise is broken; inconclusive where one is not decided, or none was looked at."""
        return all_of(verdict.state for verdict in self.verdicts)


def not_started(advice: Advice, problem: str) -> Verified:
    """Failed verification of an engine that did not start as advised, or died: the first line of `problem` says why."""
    why = problem.partition("\n")[0]
    return Verified(advice=advice, verdicts=(Verdict(STARTS, advice.subject.name, State.FAILS, why),))


def verified(advice: Advice, spec: EngineSpec, found: Sequence[Measurement], margin: float) -> Verified:
    """Verification of one model from the measurements of its engine alone, with a verdict on each promise. found: all
    measurements of the engine `spec` at the batch advised, invalid ones too; at least one."""
    point, resolved = points_of(found)[0], found[0].resolved
    usable, seen = advice.subject.usable, with_tpot(point)
    known = Verified(
        advice=advice,
        point=point,
        kv_blocks=(predicted_blocks(spec, resolved), resolved.kv_blocks),
        memory_bytes=most_memory_used(found),
        preemptions=preempted(found),
    )
    if seen.valid and advice.advised:
        known = replace(
            known,
            ratio=over_predicted(advice.advised, seen, usable),
            tokens_per_s=around(seen, [*usable, seen], output_rate),
            latency_s=around(seen, [*usable, seen], e2e_s),
        )
    blocks = kv_blocks_as_predicted(spec, resolved, records=(found[0].id,))
    counted = () if None in known.kv_blocks else (blocks,)
    return replace(known, verdicts=(*_verdicts(known, point, margin), *counted))


def over_predicted(predicted: OperatingPoint, seen: Point, usable: Sequence[Point]) -> Interval:
    """Measured over predicted tokens/s, by the noise of all repeats; a prediction by the law has none of its own."""
    before = next((p for p in usable if p.concurrency == predicted.batch), None)
    if before is not None:
        return ratio(seen, before, valid_points([*usable, seen]))
    now = around(seen, [*usable, seen], output_rate)
    return now.mapped(lambda end: end / predicted.tokens_per_s.value)


def _verdicts(seen: Verified, point: Point, margin: float) -> Iterator[Verdict]:
    name, limit = seen.advice.subject.name, seen.advice.decision.limit
    obstacle = "; ".join(point.degraded if point.valid else point.problems or ("it has no valid repeat",))
    yield Verdict(UNPREEMPTED, name, *_preempted(seen.preemptions, "its KV cache was to hold all at full length"))
    if obstacle or seen.ratio is None:
        yield Verdict.inconclusive(THROUGHPUT, name, obstacle or "no latency per output token is known")
        return
    ratio = seen.ratio
    why = f"{percent_interval(ratio)} of what was predicted (bound {percent(margin)} apart){_unsure(ratio)}"
    yield Verdict.from_interval(THROUGHPUT, name, within(ratio, 1 - margin, 1 + margin), why, ratio, 1.0, point)
    if limit is not None and seen.latency_s is not None:
        bound = limit.seconds * (1 + margin)
        ms = f"{1e3 * seen.latency_s.value:.3g} ms per output token, {1e3 * limit.seconds:.3g} ms are allowed"
        why = f"{ms} (bound {percent(margin)} above it){_unsure(seen.latency_s)}"
        state = below(seen.latency_s, bound)
        yield Verdict.from_interval(LATENCY, name, state, why, seen.latency_s, bound, point)


def _unsure(seen: Interval) -> str:
    return "; the noise is not known: --repeats 2" if seen.low is None else ""


def _preempted(count: int | None, promise: str) -> tuple[State, str]:
    if not count:
        return State.PASSES, "no request was preempted"
    return State.FAILS, f"{count} preemptions, though {promise}"


def preempted(found: Sequence[Measurement]) -> int:
    return sum(sum(m.run.steps.preempted) for m in found)


def verified_together(
    runs: Sequence[ReplicaGroup], alone: Sequence[Verified], sharing: Sharing, margin: float
) -> VerifiedTogether:
    """Verification of several engines at once, with the gain over each model alone. runs: of the engines together, with
    a record of each; at least one. alone: for each engine, its model by itself."""
    found, point = [m for members in runs for m in members], shared_points(m for members in runs for m in members)[0]
    known = VerifiedTogether(
        models=point.models,
        loads=point.loads,
        sharing=sharing,
        point=point,
        latency_s=slowest_s(runs),
        preemptions=preempted(found),
    )
    own = [each.point for each in alone if each.point and each.point.valid]
    if point.valid and len(own) == len(point.models) == len(point.each_tokens_per_s):
        parts = [rate / fmean(by_itself.repeats) for rate, by_itself in zip(point.each_tokens_per_s, own)]
        gains = [each.advice.gains for each in alone]
        known = replace(known, gain=gain_over(point, own), bound=bound_of(parts, gains, sharing))
    return replace(known, verdicts=tuple(_verdicts_together(known, point, margin)))


def together_failed(models: Sequence[str], loads: Sequence[int], sharing: Sharing, problem: str) -> VerifiedTogether:
    """Failed verification of several engines, as the first line of `problem` says: one did not start, or died."""
    names = tuple(map(short_name, models))
    verdict = Verdict(STARTS, " + ".join(names), State.FAILS, problem.partition("\n")[0])
    return VerifiedTogether(models=names, loads=tuple(loads), sharing=sharing, verdicts=(verdict,))


def gain_over(shared: ReplicaPoint, alone: Sequence[Point]) -> Interval | None:
    """Throughputs over those alone, added up, by the noise of all repeats; None where one is not known."""
    own = [fmean(point.repeats) for point in alone]
    sums = [total for run in shared.each if (total := system_throughput(run, own)) is not None]
    if not sums:
        return None
    of_one = [fmean(shares) for shares in zip(*([r / base for r in p.repeats] for p, base in zip(alone, own)))]
    samples = tuple(tuple(map(Repeat, values)) for values in ([one / fmean(of_one) for one in of_one], sums))
    return factor(Differences(samples).between(0, 1))


def bound_of(parts: Sequence[float], gains: Sequence[Gains | None], sharing: Sharing) -> float | None:
    """The largest sum that `parts` can reach, all grown in the same proportion, until a unit is busy all of the time.

    parts: of each engine, its throughput over that of its model alone, which keeps a unit busy for 1/factor of the
    time. For several engines of one model this is the bound that the advice reports. None where no unit is known of
    all.
    """
    busy: list[dict[Unit, float]] = [{c.unit: 1 / c.factor for c in seen.ceilings} if seen else {} for seen in gains]
    known = set.intersection(*(set(units) for units in busy)) - ({"host"} if sharing == "mps" else set())
    used = [sum(part * units[unit] for part, units in zip(parts, busy)) for unit in known]
    return sum(parts) / max(used) if used and max(used) > 0 else None


def slowest_s(runs: Sequence[ReplicaGroup]) -> float | None:
    """The largest of the engines' mean times per output token after the first."""
    tpots = [[latencies_of(members[i]).tpot_s.mean for members in runs] for i in range(len(runs[0]))]
    means = [mean([s for s in each if s is not None]) for each in tpots]
    return max((s for s in means if s is not None), default=None)


def _verdicts_together(seen: VerifiedTogether, point: ReplicaPoint, margin: float) -> Iterator[Verdict]:
    name = engines(seen.models)
    yield Verdict(UNPREEMPTED, name, *_preempted(seen.preemptions, "their KV caches were to hold all at full length"))
    obstacle = "; ".join(point.degraded if point.valid else point.problems or ("they have no valid repeat",))
    if obstacle or seen.gain is None:
        yield Verdict.inconclusive(BOUNDED, name, obstacle or "not all of them were measured alone")
    elif seen.bound is not None:
        share = "what one has alone" if len(set(seen.models)) == 1 else "what serving one after the other would give"
        why = f"{times(seen.gain)} {share}, {HOW[seen.sharing]}; at most {seen.bound:.3g} times is possible"
        state = below(seen.gain, seen.bound * (1 + margin))
        why = f"{why} (bound {percent(margin)} above it){_unsure(seen.gain)}"
        yield Verdict.from_interval(BOUNDED, name, state, why, seen.gain, seen.bound, point)
