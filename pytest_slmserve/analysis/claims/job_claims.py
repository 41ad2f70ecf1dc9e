"""Evidence from jobs: on output lengths and arrivals, on models of one size, on KV blocks, on ways to batch.

Each estimate takes its noise from the repeats of all jobs that are compared. If one of them is missing or not valid, a
function returns the reason why nothing can be said.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter, mul

from pytest_slmserve.analysis.claims.claim import Evidence, Others
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
from pytest_slmserve.analysis.stats.estimates import factor, grouped, percent, times
from pytest_slmserve.analysis.stats.noise import TAIL
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Seen, State, Verdict, above, all_of, below, every

FULL_BATCH = 1.25  # a larger limit that makes the batch larger by less was not what bound it: the KV cache was
# The OPT that others of its size are compared with.
SIZED_AS = {"llama-7b": "opt-6.7b", "mpt-7b": "opt-6.7b", "gpt-j-6b": "opt-6.7b"}


def most_varied(groups: Iterable[list[JobPoint]], varied: Callable[[JobPoint], Hashable]) -> list[JobPoint]:
    """Return the group with the most different values of what was varied; of equal groups the last. Empty without
    groups."""
    return max(reversed(list(groups)), key=lambda group: len({varied(p) for p in group}), default=[])


def same_engine(point: JobPoint) -> tuple[Hashable, ...]:
    """Return what is equal for jobs of one engine, under one limit, whose arrivals are as even."""
    return point.spec.key, point.environment.key, point.load.max_concurrency, point.load.burstiness


def same_but_kv(point: JobPoint) -> tuple[Hashable, ...]:
    """Return what is equal for jobs that differ in nothing but the KV cache of their engine."""
    extra = tuple(pair for pair in point.spec.extra if pair[0] != "num_gpu_blocks_override")
    return *point.asked, point.environment.key, replace(point.spec, kv_cache_bytes=1 << 30, extra=extra).key


def grid_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return the jobs of one engine, of as many requests, with the most lengths and rates."""
    groups = grouped(_of_fixed_lengths(jobs), lambda p: (same_engine(p), p.requests))
    return most_varied(groups.values(), lambda p: (p.output_tokens, p.load.rate))


def jobs_of_size(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return jobs of one engine whose requests come all at once: those of the most lengths and numbers of requests."""
    at_once = [p for p in _of_fixed_lengths(jobs) if p.load.at_once]
    return most_varied(grouped(at_once, same_engine).values(), lambda p: (p.output_tokens, p.requests))


def _of_fixed_lengths(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    return [p for p in jobs if p.batching == CONTINUOUS and p.workload.spec.output_tokens is not None]


def caches_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return one job on engines with the most sizes of a KV cache."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.kv_blocks is not None]
    return most_varied(grouped(served, same_but_kv).values(), lambda p: p.kv_blocks)


def limits_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return one job, all of its requests at once, on engines with the most values of `max_num_seqs`, ascending."""
    return most_varied(limit_groups(jobs), lambda p: p.spec.max_num_seqs)


def ways_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return jobs with the same requests batched in different ways: of each such group and way, the job measured
    last."""
    alike = grouped(jobs, lambda p: (*p.asked, p.model, p.environment.gpu_name)).values()
    groups = [group for group in alike if len({p.batching for p in group}) > 1]
    return [point for group in groups for point in {p.batching: p for p in group}.values()]


def has_jobs_for(claim: str, curve: Curve, after: int) -> bool:
    """Return whether jobs of the model were measured that this claim compares. after: the limit of the claim on larger
    ones."""
    grid, ways = grid_of(curve.jobs), ways_of(curve.jobs)
    limits = {p.spec.max_num_seqs for p in limits_of(curve.jobs)}
    match claim:
        case "all-at-once-waits-longer":
            return len({p.load.at_once for p in grid}) > 1
        case "alike-at-one-size":
            return len(jobs_of_size(curve.jobs)) > 1
        case "throughput-grows-with-kv-blocks":
            return len({p.kv_blocks for p in caches_of(curve.jobs)}) > 1
        case "batch-limit-reaches-a-plateau" | "batch-limit-costs-latency":
            return len(limits) > 1
        case "batch-limit-gains-little-after-128":
            return after in limits and max(limits) > after
        case "continuous-batching-serves-most":
            return {CONTINUOUS} < {p.batching for p in ways if p.load.at_once}
        case "dynamic-batching-answers-sooner":
            return {"dynamic", "static"} <= {p.batching for p in ways if not p.load.at_once}
    return len(grid) > 1


def _obstacle(points: Sequence[JobPoint], least: int, why: str) -> str:
    """Return the reason why these jobs cannot be compared, "" if they can. why: for fewer than `least` of them."""
    if len(points) < least:
        return why
    if invalid := next((point for point in points if not point.valid), None):
        return "; ".join(invalid.problems) or "a job has no valid repeat"
    return "" if point_differences(points).known else "noise unknown: one repeat of each job; --slm-repeats 2"


def _at_the_lowest_rate(grid: Sequence[JobPoint]) -> list[JobPoint]:
    lowest = min((p.load.rate for p in grid), default=0.0)
    return [p for p in grid if p.load.rate == lowest and not p.load.at_once]


def served_over_came(curve: Curve) -> Evidence | str:
    """Return the requests/s served over those that came at the lowest rate, for each length of the outputs; below 1 by
    the time that the last requests take (arXiv:2404.03353, figure 2, right)."""
    slowest = _at_the_lowest_rate(grid_of(curve.jobs))
    if reason := _obstacle(slowest, 1, "no job at a rate was measured"):
        return reason
    served = point_differences(slowest, figure_named("requests_per_s"))

    def kept_up(several: int) -> list[Seen[str]]:
        found = []
        for place, p in enumerate(slowest):
            came = p.rate or p.load.rate  # known exactly
            seen = factor(served.mean(place, TAIL / several)).mapped(partial(mul, 1 / came))
            where = f"at {p.load.rate:g}/s, {p.output_tokens:.0f} output tokens each"
            found.append((seen, f"{where}, served are {{}} as many as come"))
        return found

    return Evidence(estimates=kept_up, points=slowest, qualifier=f"; least of {len(slowest)} lengths")


def longest_over_shortest(claim: str, curve: Curve) -> Evidence | str:
    """Return a figure at the longest outputs over that at the shortest, all requests at once: requests/s, the mean
    batch or the mean E2E.

    arXiv:2404.03353, figure 2, right: "a slight increase in latency"; longer outputs reduce the batch, which is why
    throughput falls.
    """
    at_once = sorted((p for p in grid_of(curve.jobs) if p.load.at_once), key=lambda p: p.output_tokens)
    if reason := _obstacle(at_once, 2, "jobs of two output lengths, all at once, are needed"):
        return reason
    short, long = at_once[0], at_once[-1]
    what: Figure = e2e_s
    each, words = 1.0, "a request of {} output tokens lasts {{}} as long as one of {}"
    if claim == "longer-outputs-shrink-the-batch":
        what, words = figure_named("batch"), "the mean batch of {} output tokens is {{}} that of {}"
        if not all(map(what, at_once)):
            return "no engine reported its batch"
    if claim == "longer-outputs-fewer-requests":  # what counts output tokens counts requests here
        what, each = output_rate, short.output_tokens / long.output_tokens
        words = "requests of {} output tokens are served {{}} as fast as those of {}"
    seen = ratio(long, short, at_once, what).mapped(partial(mul, each))
    sentence = "all at once, " + words.format(f"{long.output_tokens:.0f}", f"{short.output_tokens:.0f}")
    return Evidence(estimates=lambda several: [(seen, sentence)], points=at_once)


def at_once_over_lowest_rate(curve: Curve) -> Evidence | str:
    """Return the mean E2E of requests that come all at once over that at the lowest rate, for each length of the
    outputs (arXiv:2404.03353, figure 2, right)."""
    grid, words = grid_of(curve.jobs), "a request that comes with all others lasts {} as long"
    slowest = _at_the_lowest_rate(grid)
    pairs = [(p, q) for p in grid for q in slowest if p.load.at_once and p.workload.hash == q.workload.hash]
    used = [p for pair in pairs for p in pair]
    rows = [(p, q, f"at {p.output_tokens:.0f} output tokens, {words}") for p, q in pairs]
    reason = _obstacle(used, 2, "no length was measured at a rate and all at once")
    return reason or Evidence.of_ratios(rows, used, e2e_s, grid, qualifier=f"; least of {len(pairs)} lengths")


def over_the_opt_of_its_size(curve: Curve, others: Others) -> Evidence | str:
    """Return throughput and mean E2E of a model over those of the OPT of its size, all requests at once, at each output
    length and for each number of requests (arXiv:2404.03353, figure 2, left)."""
    name = SIZED_AS.get(curve.subject, curve.subject)
    reference = grouped((job for c in others if c.subject == name for job in jobs_of_size(c.jobs)), _size)
    pairs = [(p, q) for p in jobs_of_size(curve.jobs) for q in reference.get(_size(p), ())]
    used = [p for pair in pairs for p in pair]
    if reason := _obstacle(used, 2, f"no job was measured of both {curve.subject} and {name}"):
        return reason

    def factors(several: int) -> list[Seen[str]]:
        found = []
        for p, q in pairs:
            job = f"with {p.requests} requests of {p.output_tokens:.0f} output tokens it"
            of_all = f"which decides of {len(pairs)} jobs, by throughput and latency"
            rate, wait = ratio(p, q, used, output_rate, several), ratio(p, q, used, e2e_s, several)
            found.append((rate, f"{job} serves {{}} what {name} does, {of_all}"))
            found.append((wait, f"{job} takes {{}} as long as {name}, {of_all}"))
        return found

    return Evidence(estimates=factors, points=used, qualifier=" either way")


def _size(p: JobPoint) -> Hashable:
    """Return what is equal for jobs of as many requests, as long, in one environment."""
    return p.workload.spec.prompt_tokens, p.workload.spec.output_tokens, p.requests, p.environment.key


def over_the_limit_before(claim: str, curve: Curve, after: int) -> Evidence | str:
    """Return the throughput under a `max_num_seqs` over that under the one before it, all requests at once: under the
    largest, or under each after `after`. Limits that the KV cache does not let the batch reach do not count.

    arXiv:2404.03353, figure 1 and "after a batch size of 128".
    """
    steps = _larger_batches(curve)
    if claim == "batch-limit-reaches-a-plateau":
        steps = steps[-1:]
    else:
        steps = [(p, q) for p, q in steps if p.spec.max_num_seqs >= after]
    used = list(dict.fromkeys(p for step in steps for p in step))
    rows = [
        (
            more,
            less,
            f"all {more.requests} at once, max_num_seqs {more.spec.max_num_seqs} serves {{}} what "
            f"{less.spec.max_num_seqs} does, with a mean batch of {more.batch or 0:.0f} after {less.batch or 0:.0f} "
            f"and {more.preemptions or 0:.0f} preemptions",
        )
        for less, more in steps
    ]
    reason = _obstacle(used, 2, "jobs under two limits that bound the batch are needed")
    return reason or Evidence.of_ratios(rows, used, among=used)


def latency_past_the_plateau(curve: Curve, little: float) -> Evidence | str:
    """Return the mean E2E under the largest `max_num_seqs` over that under the first after which none gains `little` of
    throughput, all requests at once.

    arXiv:2404.03353, figure 1: "at the cost of a considerable degradation in latency". Waiting counts, so latency need
    not follow from throughput.
    """
    limits = list(dict.fromkeys(p for step in _larger_batches(curve) for p in step))
    if reason := _obstacle(limits, 2, "jobs under two limits that bound the batch are needed"):
        return reason
    rates, largest = [p.output_tokens_per_s or 0.0 for p in limits], limits[-1]
    first = next(p for p, rate in zip(limits, rates) if max(rates) < little * rate)
    if first is largest:
        return f"throughput still grows at max_num_seqs {first.spec.max_num_seqs}"
    sentence = f"all {first.requests} at once, a request lasts {{}} as long under max_num_seqs "
    sentence += f"{largest.spec.max_num_seqs} as under {first.spec.max_num_seqs}, from where throughput gains little"
    return Evidence.of_ratios([(largest, first, sentence)], limits, e2e_s, limits)


def _larger_batches(curve: Curve) -> list[tuple[JobPoint, JobPoint]]:
    """Return neighbouring limits of which the larger one made the mean batch larger: it was the limit that bound it."""
    return [(p, q) for p, q in pairwise(limits_of(curve.jobs)) if (q.batch or 0.0) >= FULL_BATCH * (p.batch or 0.0)]


def continuous_over_other_batching(curve: Curve) -> Evidence | str:
    """Return the throughput of continuous batching, all requests at once, over that of each other way to batch."""
    at_once = [p for p in ways_of(curve.jobs) if p.load.at_once]
    mine, theirs = [p for p in at_once if p.batching == CONTINUOUS], [p for p in at_once if p.batching != CONTINUOUS]
    both = at_once if mine and theirs else []
    if reason := _obstacle(both, 2, "two ways to batch the same requests are needed"):
        return reason
    factors = {p.batching: ratio(mine[-1], p, at_once).value for p in theirs}
    rows = []
    for p in theirs:
        wasted = "" if p.waste is None else f", {percent(p.waste)} of whose work is wasted"
        rest = ", ".join(f"{way}: {value:.3g}" for way, value in factors.items() if way != p.batching)
        sentence = f"it serves {{}} what {p.batching} batching does{wasted}{f' ({rest})' if rest else ''}"
        rows.append((mine[-1], p, sentence))
    return Evidence.of_ratios(rows, at_once, among=at_once)


def dynamic_over_static_batching(curve: Curve) -> Evidence | str:
    """Return the mean E2E at a rate under dynamic batching over that under static batching. Dynamic batching waits for
    a while, static batching until a batch is full."""
    ways = {p.batching: p for p in ways_of(curve.jobs) if not p.load.at_once}
    used = [ways[name] for name in ("dynamic", "static") if name in ways]
    if reason := _obstacle(used, 2, "jobs at a rate by dynamic and by static batching are needed"):
        return reason
    dynamic, static = used
    sentence = f"at {static.load.rate:g}/s a request lasts {{}} as long as under static batching"
    return Evidence.of_ratios([(dynamic, static, sentence)], used, e2e_s)


def throughput_grows_with_kv_blocks(curve: Curve, threshold: float, flat: float) -> Verdict:
    """Return the verdict on whether throughput grows with the number of KV blocks until all requests fit at once, and
    no more from there.

    It passes if the first cache that holds them serves more than `threshold` times what the smallest does, each larger
    one less than `flat` times what the one before it does, and none that holds them preempts. value: throughput of the
    first that holds them over that of the smallest.
    """
    claim, points = "throughput-grows-with-kv-blocks", sorted(caches_of(curve.jobs), key=attrgetter("kv_blocks"))
    fitting = [p for p in points if p.fits]
    reason = _obstacle(points, 2, "jobs on engines with two sizes of a KV cache are needed")
    if not reason and (not fitting or len(fitting) == len(points)):
        which = "every KV cache that was measured holds" if fitting else "no KV cache that was measured holds"
        reason = f"{which} all requests at once"
    if reason:
        return Verdict.inconclusive(claim, curve.subject, reason, threshold)
    first, last = points[0], fitting[0]
    seen = ratio(last, first, points)
    preempted = [p for p in fitting if p.preemptions]
    states = [above(seen, threshold), *([State.FAILS] if preempted else [])]
    why = (
        f"{last.kv_blocks:,} blocks, which hold all {last.requests} requests, serve {times(seen)} what "
        f"{first.kv_blocks:,} do, with {first.preemptions or 0:.0f} preemptions and {first.batch or 0:.0f} requests in "
        f"the engine at once (threshold {threshold:g})"
    )
    if len(fitting) > 1:
        state, grown, larger = every(
            below, flat, lambda n: [(ratio(q, p, points, several=n), q) for p, q in pairwise(fitting)]
        )
        states.append(state)
        why += f"; {larger.kv_blocks:,} blocks serve {times(grown)} as much (threshold {flat:g})"
    if preempted:
        why += f"; {preempted[0].kv_blocks:,} blocks, though they hold all, preempt"
    return Verdict.from_interval(claim, curve.subject, all_of(states), why, seen, threshold, *points)
