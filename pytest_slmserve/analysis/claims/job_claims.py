"""Claims on jobs: on output lengths and arrivals, on models of one size, on KV blocks, on ways to batch.

Each judgement takes its noise from the repeats of all jobs that it compares. It is inconclusive where one of them is
missing or not valid.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from pytest_slmserve.analysis.points import (
    CONTINUOUS,
    Figure,
    JobPoint,
    e2e_s,
    figure_named,
    limit_groups,
    output_rate,
    point_differences,
    ratio,
)
from pytest_slmserve.analysis.stats.estimates import Interval, factor, grouped, percent, times
from pytest_slmserve.analysis.stats.noise import TAIL
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict, above, all_of, below, every, every_within
from pytest_slmserve.schema.catalog import short_name

FOLLOWS, LONGER, WAITS = "throughput-follows-arrivals", "longer-outputs-fewer-requests", "all-at-once-waits-longer"
SHRINKS, SLIGHTLY = "longer-outputs-shrink-the-batch", "longer-outputs-wait-slightly-longer"
ALIKE = "alike-at-one-size"
KV = "throughput-grows-with-kv-blocks"
LIMIT_PLATEAU, LIMIT_MARGINAL = "batch-limit-reaches-a-plateau", "batch-limit-gains-little-after-128"
LIMIT_LATENCY = "batch-limit-costs-latency"
CONTINUOUS_MOST, DYNAMIC_SOONER = "continuous-batching-serves-most", "dynamic-batching-answers-sooner"
LARGER = 1.25  # times the batch: less is the KV cache's doing, not the limit's
# Of each claim on the longest outputs over the shortest: the figure, whether it counts tokens where the claim counts
# requests, and words. arXiv:2404.03353, figure 2, right: "a slight increase in latency"; longer outputs reduce the
# batch, which is why throughput falls.
LONGEST: dict[str, tuple[Figure, bool, str]] = {
    LONGER: (output_rate, True, "requests of {long} output tokens are served {times} as fast as those of {short}"),
    SHRINKS: (figure_named("batch"), False, "the mean batch of {long} output tokens is {times} that of {short}"),
    SLIGHTLY: (e2e_s, False, "a request of {long} output tokens lasts {times} as long as one of {short}"),
}
# Figures by which models of one size are compared, and words.
COMPARED = {output_rate: "it serves {times} what {name} does", e2e_s: "it takes {times} as long as {name}"}
# The OPT that others of its size are compared with.
SIZED_AS = {"llama-7b": "opt-6.7b", "mpt-7b": "opt-6.7b", "gpt-j-6b": "opt-6.7b"}


def kv_blocks_of_job(point: JobPoint) -> int:
    """0 where the engine did not report them."""
    return point.kv_blocks or 0


def throughput_follows_arrivals(curve: Curve, bound: float) -> Verdict:
    """Verdict on whether requests at the lowest rate are served as fast as they come, whatever the length of their
    outputs.

    value: requests/s served over those that came, of the length where it is least; below 1 by the time that the last
    requests take. arXiv:2404.03353, figure 2, right.
    """
    slowest = _slowest(grid_of(curve.jobs))
    if reason := _missing(slowest, 1, "no job at a rate was measured"):
        return Verdict.inconclusive(FOLLOWS, curve.subject, reason, bound)
    served = point_differences(slowest, figure_named("requests_per_s"))

    def kept_up(several: int) -> list[tuple[Interval, JobPoint]]:
        return [(_kept_up(served.mean(i, TAIL / several), p), p) for i, p in enumerate(slowest)]

    state, seen, least = every(above, bound, kept_up)
    why = f"at {least.load.rate:g}/s, {least.output_tokens:.0f} output tokens each, served are {times(seen)} as many as"
    why = f"{why} come (bound {bound:g}; least of {len(slowest)} lengths)"
    return Verdict.from_interval(FOLLOWS, curve.subject, state, why, seen, bound, *slowest)


def longest_over_shortest(claim: str, curve: Curve, bound: float) -> Verdict:
    """Verdict on a figure of `LONGEST` at the longest outputs, all requests at once: at most `bound` times that at the
    shortest. value: that ratio."""
    what, per_token, words = LONGEST[claim]
    at_once = sorted((p for p in grid_of(curve.jobs) if p.load.at_once), key=lambda p: p.output_tokens)
    if reason := _missing(at_once, 2, "jobs of two output lengths, all at once, are needed"):
        return Verdict.inconclusive(claim, curve.subject, reason, bound)
    if not all(map(what, at_once)):
        return Verdict.inconclusive(claim, curve.subject, "no engine reported its batch", bound)
    short, long = at_once[0], at_once[-1]
    each = short.output_tokens / long.output_tokens if per_token else 1.0
    seen = ratio(long, short, at_once, what).mapped(lambda end: end * each)
    told = words.format(long=f"{long.output_tokens:.0f}", times=times(seen), short=f"{short.output_tokens:.0f}")
    why = f"all at once, {told} (bound {bound:g})"
    return Verdict.from_interval(claim, curve.subject, below(seen, bound), why, seen, bound, *at_once)


def all_at_once_waits_longer(curve: Curve, bound: float) -> Verdict:
    """Verdict on the mean E2E of requests that come all at once: more than `bound` times that at the lowest rate. Every
    output length must keep it. value: the ratio where it is least. arXiv:2404.03353, figure 2, right."""
    grid = grid_of(curve.jobs)
    pairs = [(p, q) for p in grid for q in _slowest(grid) if p.load.at_once and p.workload.hash == q.workload.hash]
    if reason := _missing([p for pair in pairs for p in pair], 2, "no length was measured at a rate and all at once"):
        return Verdict.inconclusive(WAITS, curve.subject, reason, bound)
    state, seen, least = every(above, bound, lambda several: [(ratio(p, q, grid, e2e_s, several), p) for p, q in pairs])
    why = (
        f"at {least.output_tokens:.0f} output tokens, a request that comes with all others lasts {times(seen)} as long"
    )
    why = f"{why} (bound {bound:g}; least of {len(pairs)} lengths)"
    return Verdict.from_interval(WAITS, curve.subject, state, why, seen, bound, *(p for pair in pairs for p in pair))


def alike_at_one_size(curve: Curve, others: Sequence[Curve], bound: float) -> Verdict:
    """All requests at once: at each output length and for each number of requests, are throughput and mean E2E of a
    model within a factor of `bound` of those of the OPT of its size? value: the ratio that decides. arXiv:2404.03353,
    figure 2, left."""
    name = compared_with(curve.subject)[1]
    reference = [job for other in others if other.subject == name for job in jobs_of_size(other.jobs)]
    pairs = [(p, q) for p in jobs_of_size(curve.jobs) for q in reference if _same_size(p, q)]
    used = [p for pair in pairs for p in pair]
    if reason := _missing(used, 2, f"no job was measured of both {curve.subject} and {name}"):
        return Verdict.inconclusive(ALIKE, curve.subject, reason, bound)
    sides = [(p, q, what, words) for p, q in pairs for what, words in COMPARED.items()]
    state, far, (of, words) = every_within(
        1 / bound,
        bound,
        lambda several: [(ratio(p, q, used, what, several), (p, words)) for p, q, what, words in sides],
    )
    why = f"with {of.requests} requests of {of.output_tokens:.0f} output tokens "
    why += f"{words.format(times=times(far), name=name)}, which decides of {len(pairs)} jobs, by throughput and latency"
    why += f" (bound {bound:g} either way)"
    return Verdict.from_interval(ALIKE, curve.subject, state, why, far, bound, *used)


def throughput_grows_with_kv_blocks(curve: Curve, bound: float, flat: float) -> Verdict:
    """Does throughput grow with the number of KV blocks until all requests fit at once, and no more from there?

    Holds if the first cache that holds them serves more than `bound` times what the smallest does, each larger one less
    than `flat` times what the one before it does, and none that holds them preempts. value: throughput of the first
    that holds them over that of the smallest.
    """
    points = sorted(caches_of(curve.jobs), key=kv_blocks_of_job)
    fitting = [p for p in points if p.fits]
    if reason := _missing(points, 2, "jobs on engines with two sizes of a KV cache are needed"):
        return Verdict.inconclusive(KV, curve.subject, reason, bound)
    if not fitting or len(fitting) == len(points):
        which = "no KV cache that was measured holds" if not fitting else "every KV cache that was measured holds"
        return Verdict.inconclusive(KV, curve.subject, f"{which} all requests at once", bound)
    first, last = points[0], fitting[0]
    seen = ratio(last, first, points)
    preempted = [p for p in fitting if p.preemptions]
    states = [above(seen, bound), *([State.FAILS] if preempted else [])]
    why = (
        f"{last.kv_blocks:,} blocks, which hold all {last.requests} requests, serve {times(seen)} what "
        f"{first.kv_blocks:,} do, with {first.preemptions or 0:.0f} preemptions and {first.batch or 0:.0f} requests in "
        f"the engine at once (bound {bound:g})"
    )
    if len(fitting) > 1:
        state, grown, larger = every(
            below, flat, lambda n: [(ratio(q, p, points, several=n), q) for p, q in pairwise(fitting)]
        )
        states.append(state)
        why += f"; {larger.kv_blocks:,} blocks serve {times(grown)} as much (bound {flat:g})"
    if preempted:
        why += f"; {preempted[0].kv_blocks:,} blocks, though they hold all, preempt"
    return Verdict.from_interval(KV, curve.subject, all_of(states), why, seen, bound, *points)


def batch_limit_reaches_a_plateau(curve: Curve, bound: float) -> Verdict:
    """All requests at once: does the largest `max_num_seqs` serve less than `bound` times what the one before it does?
    value: that ratio. Limits that the KV cache does not let the batch reach do not count. arXiv:2404.03353, figure 1.
    """
    return _gains_little(LIMIT_PLATEAU, curve, bound, _larger_batches(curve)[-1:])


def batch_limit_gains_little_after(curve: Curve, bound: float, after: int) -> Verdict:
    """All requests at once: does each larger `max_num_seqs` after `after` serve less than `bound` times what the one
    before it does? value: the ratio that decides. arXiv:2404.03353: "after a batch size of 128"."""
    steps = [(p, q) for p, q in _larger_batches(curve) if _limit(p) >= after]
    return _gains_little(LIMIT_MARGINAL, curve, bound, steps)


def _larger_batches(curve: Curve) -> list[tuple[JobPoint, JobPoint]]:
    """Neighbouring limits of which the larger one made the mean batch larger: it was the limit that bound it."""
    return [(p, q) for p, q in pairwise(limits_of(curve.jobs)) if (q.batch or 0.0) >= LARGER * (p.batch or 0.0)]


def _gains_little(claim: str, curve: Curve, bound: float, steps: Sequence[tuple[JobPoint, JobPoint]]) -> Verdict:
    """Verdict on the throughput of each of these steps from one `max_num_seqs` to the next."""
    used = list(dict.fromkeys(p for step in steps for p in step))
    if reason := _missing(used, 2, "jobs under two limits that bound the batch are needed"):
        return Verdict.inconclusive(claim, curve.subject, reason, bound)
    state, seen, (less, more) = every(
        below, bound, lambda several: [(ratio(q, p, used, several=several), (p, q)) for p, q in steps]
    )
    why = (
        f"all {more.requests} at once, max_num_seqs {_limit(more)} serves {times(seen)} what {_limit(less)} does, with "
        f"a mean batch of {more.batch or 0:.0f} after {less.batch or 0:.0f} and {more.preemptions or 0:.0f} "
        f"preemptions (bound {bound:g})"
    )
    return Verdict.from_interval(claim, curve.subject, state, why, seen, bound, *used)


def batch_limit_costs_latency(curve: Curve, bound: float, little: float) -> Verdict:
    """All requests at once: from the first `max_num_seqs` after which none gains `little` of throughput, does mean E2E
    rise to more than `bound` times under the largest? value: that ratio. arXiv:2404.03353, figure 1: "at the cost of a
    considerable degradation in latency". Waiting counts, so that latency need not follow from throughput."""
    steps = _larger_batches(curve)
    limits = list(dict.fromkeys(p for step in steps for p in step))
    if reason := _missing(limits, 2, "jobs under two limits that bound the batch are needed"):
        return Verdict.inconclusive(LIMIT_LATENCY, curve.subject, reason, bound)
    rates, largest = [p.output_tokens_per_s or 0.0 for p in limits], limits[-1]
    first = next(p for p, rate in zip(limits, rates) if max(rates) < little * rate)
    if first is largest:
        why = f"throughput still grows at max_num_seqs {_limit(first)}"
        return Verdict.inconclusive(LIMIT_LATENCY, curve.subject, why, bound)
    seen = ratio(largest, first, limits, e2e_s)
    why = (
        f"all {first.requests} at once, a request lasts {times(seen)} as long under max_num_seqs {_limit(largest)} as "
        f"under {_limit(first)}, from where throughput gains little (bound {bound:g})"
    )
    return Verdict.from_interval(LIMIT_LATENCY, curve.subject, above(seen, bound), why, seen, bound, *limits)


def _limit(point: JobPoint) -> int:
    return point.spec.max_num_seqs


def limits_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """One job, all of its requests at once, on engines with the most values of `max_num_seqs`, ascending."""
    return _most_varied(limit_groups(jobs), _limit)


def has_limits(curve: Curve) -> bool:
    """Was one job measured under several values of `max_num_seqs`?"""
    return len({_limit(p) for p in limits_of(curve.jobs)}) > 1


def has_limits_after(curve: Curve, after: int) -> bool:
    """Was one job measured under several values of `max_num_seqs`, of which one is `after` and one larger?"""
    limits = {_limit(p) for p in limits_of(curve.jobs)}
    return after in limits and max(limits) > after


def continuous_batching_serves_most(curve: Curve, bound: float) -> Verdict:
    """Verdict on whether continuous batching, all requests at once, serves more than `bound` times what any other way
    does.

    value: its throughput over that of the other way that decides.
    """
    at_once = [p for p in ways_of(curve.jobs) if p.load.at_once]
    mine, theirs = [p for p in at_once if p.batching == CONTINUOUS], [p for p in at_once if p.batching != CONTINUOUS]
    if reason := _missing(at_once if mine and theirs else [], 2, "two ways to batch the same requests are needed"):
        return Verdict.inconclusive(CONTINUOUS_MOST, curve.subject, reason, bound)

    def gains(several: int = 1) -> list[tuple[Interval, JobPoint]]:
        return [(ratio(mine[-1], p, at_once, several=several), p) for p in theirs]

    state, seen, best = every(above, bound, gains)
    rest = ", ".join(f"{p.batching}: {gain.value:.3g}" for gain, p in gains() if p is not best)
    wasted = "" if best.waste is None else f", {percent(best.waste)} of whose work is wasted"
    others = f" ({rest})" if rest else ""
    why = f"it serves {times(seen)} what {best.batching} batching does{wasted}{others} (bound {bound:g})"
    return Verdict.from_interval(CONTINUOUS_MOST, curve.subject, state, why, seen, bound, *at_once)


def dynamic_batching_answers_sooner(curve: Curve, bound: float) -> Verdict:
    """Verdict on mean E2E at a rate under dynamic batching: less than `bound` times that under static batching. Dynamic
    batching waits for a while, static batching until a batch is full. value: the ratio."""
    ways = {p.batching: p for p in ways_of(curve.jobs) if not p.load.at_once}
    used = [ways[name] for name in ("dynamic", "static") if name in ways]
    if reason := _missing(used, 2, "jobs at a rate by dynamic and by static batching are needed"):
        return Verdict.inconclusive(DYNAMIC_SOONER, curve.subject, reason, bound)
    dynamic, static = used
    seen = ratio(dynamic, static, what=e2e_s)
    why = f"at {static.load.rate:g}/s a request lasts {times(seen)} as long as under static batching (bound {bound:g})"
    return Verdict.from_interval(DYNAMIC_SOONER, curve.subject, below(seen, bound), why, seen, bound, *used)


def most_varied(
    points: Iterable[JobPoint], alike: Callable[[JobPoint], Hashable], varied: Callable[[JobPoint], Hashable]
) -> list[JobPoint]:
    """The group of alike points with the most different values of what was varied; of equal groups the last. Empty
    without points."""
    return _most_varied([*grouped(points, alike).values()], varied)


def _most_varied(groups: Sequence[list[JobPoint]], varied: Callable[[JobPoint], Hashable]) -> list[JobPoint]:
    return max(reversed(groups), key=lambda group: len({varied(p) for p in group}), default=[])


def same_engine(point: JobPoint) -> Hashable:
    """Jobs of one engine, under one limit, whose arrivals are as even."""
    return point.spec.key, point.environment.key, point.load.max_concurrency, point.load.burstiness


def same_but_kv(point: JobPoint) -> Hashable:
    """Jobs that differ in nothing but the KV cache of their engine."""
    extra = tuple(pair for pair in point.spec.extra if pair[0] != "num_gpu_blocks_override")
    return *point.asked, point.environment.key, replace(point.spec, kv_cache_bytes=1 << 30, extra=extra).key


def grid_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """The jobs of one engine, of as many requests, with the most lengths and rates."""
    served = _of_fixed_lengths(jobs)
    return most_varied(served, lambda p: (same_engine(p), p.requests), lambda p: (p.output_tokens, p.load.rate))


def has_grid(curve: Curve) -> bool:
    """Were jobs of several lengths or rates measured on one engine?"""
    return len(grid_of(curve.jobs)) > 1


def _slowest(grid: Sequence[JobPoint]) -> list[JobPoint]:
    """Jobs of the grid at the lowest rate, without those all at once."""
    lowest = min((p.load.rate for p in grid), default=0.0)
    return [p for p in grid if p.load.rate == lowest and not p.load.at_once]


def jobs_of_size(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Jobs of one engine whose requests come all at once: those of the most lengths and numbers of requests."""
    at_once = [p for p in _of_fixed_lengths(jobs) if p.load.at_once]
    return most_varied(at_once, same_engine, lambda p: (p.output_tokens, p.requests))


def _of_fixed_lengths(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    return [p for p in jobs if p.batching == CONTINUOUS and p.workload.spec.output_tokens is not None]


def _same_size(p: JobPoint, q: JobPoint) -> bool:
    """Returns whether two jobs have as many requests, as long, in one environment."""
    lengths = [(x.workload.spec.prompt_tokens, x.workload.spec.output_tokens, x.requests) for x in (p, q)]
    return lengths[0] == lengths[1] and p.environment.key == q.environment.key


def compared_with(model: str) -> tuple[str, ...]:
    """The models that a comparison reads."""
    return model, SIZED_AS.get(short_name(model), model)


def caches_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """One job on engines with the most sizes of a KV cache."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.kv_blocks is not None]
    return most_varied(served, same_but_kv, lambda p: p.kv_blocks)


def ways_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Jobs with the same requests batched in different ways: of each such group and way, the job measured last."""
    alike = grouped(jobs, lambda p: (*p.asked, p.model, p.environment.gpu_name)).values()
    groups = [group for group in alike if len({p.batching for p in group}) > 1]
    return [point for group in groups for point in {p.batching: p for p in group}.values()]


def batchings(curve: Curve, at_once: bool) -> set[str]:
    """Ways in which the same requests were batched, all at once or at a rate."""
    return {p.batching for p in ways_of(curve.jobs) if p.load.at_once is at_once}


def _kept_up(log: Interval, point: JobPoint) -> Interval:
    """Requests/s served, of which `log` is the logarithm, over those that came. What came is known exactly."""
    came = point.rate or point.load.rate
    return factor(log).mapped(lambda served: served / came)


def _missing(points: Sequence[JobPoint], least: int, why: str) -> str | None:
    if len(points) < least:
        return why
    if invalid := next((point for point in points if not point.valid), None):
        return "; ".join(invalid.problems) or "a job has no valid repeat"
    if not point_differences(points).known:
        return "noise unknown: one repeat of each job; --slm-repeats 2"
    return None
