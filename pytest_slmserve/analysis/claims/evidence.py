"""What claims are judged by: figures of sweeps, jobs and deployments, compared with each other; and arithmetic.

The interval of each estimate has the noise of all points that are compared. A function raises Inconclusive with the
reason if a figure that it needs was not measured, or a point is missing or not valid.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter, mul
from statistics import fmean

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.compare.deployments import HOW, Deployment, compared, deployments, one_engine_each
from pytest_slmserve.analysis.estimates import (
    TAIL,
    Interval,
    factor,
    grouped,
    percent,
    percent_interval,
    possible,
    times,
)
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM
from pytest_slmserve.analysis.points import (
    CONTINUOUS,
    Figure,
    JobPoint,
    Point,
    ReplicaPoint,
    e2e_s,
    figure_named,
    figure_ratio,
    limit_groups,
    output_rate,
    point_differences,
    ratio,
)
from pytest_slmserve.analysis.sweep.curve import Curve, obstacle, sparsely
from pytest_slmserve.analysis.sweep.plateau import valid_points
from pytest_slmserve.analysis.verdict import Inconclusive, Seen, State, Verdict, above, all_of, below, every, unsure
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import GIB

Others = Sequence[Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a claim is judged by: estimates that must all lie on one side of its threshold.

    estimates: returns the estimates, each with an interval that holds together with so many, and a sentence on it, in
    which "{}" stands for the estimate. points: those that the verdict rests on. in_percent: estimates are shares, not
    factors. qualifier: clause on the threshold. remark: clause on all. sparse: loads that an adaptive sweep left out
    may decide otherwise, so that the claim cannot pass.
    """

    estimates: Callable[[int], Sequence[Seen[str]]]
    points: Sequence[Point]
    in_percent: bool = False
    qualifier: str = ""
    remark: str = ""
    sparse: bool = False


def of_ratios(
    ratios: Sequence[tuple[Point, Point, str]],
    points: Sequence[Point],
    what: Figure = output_rate,
    among: Sequence[Point] = (),
    several: int = 1,
    qualifier: str = "",
) -> Evidence:
    """Return the evidence of ratios of one figure.

    Args:
        ratios: A point, the point that it is compared with, and the sentence, of each ratio.
        among, several: See `points.ratio`.
    """

    def seen(number: int) -> list[Seen[str]]:
        return [(ratio(of, to, among, what, max(number, several)), sentence) for of, to, sentence in ratios]

    return Evidence(estimates=seen, points=points, qualifier=qualifier)


def _refuse_unjudgeable(curve: Curve) -> None:
    """Raise Inconclusive with the reason if no claim on the sweep can be judged; see `curve.obstacle`."""
    if reason := obstacle(curve):
        raise Inconclusive(reason)


# Table 1 of arXiv:2404.03353, by arithmetic: an A100 with 40 GiB, and requests of 512 and 256 tokens.
BUDGET_BYTES = 9 * 40 * GIB // 10
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
KNOWN = PROMPT_TOKENS + OUTPUT_TOKENS
MEAN = PROMPT_TOKENS + OUTPUT_TOKENS // 2  # of requests whose phases are spread evenly
BLOCK_SIZE = 16
PUBLISHED = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}  # largest batches
NEXT_SMALLER = {larger: model for model, larger in pairwise(PUBLISHED)}
REQUEST_MODEL = "opt-1.3b"


def request_bytes(model: str, tokens: int = KNOWN) -> int:
    """Return the bytes of the keys and values of one request of a catalogue model."""
    return tokens * (CATALOGUE[model].kv_bytes_per_token() or 0)


def largest_batch(model: str, tokens: int = KNOWN, budget_bytes: int = BUDGET_BYTES, block: int = 1) -> int:
    """Return the requests of a catalogue model that fit into the budget less the weights, each allocated for so many
    tokens in whole blocks. At the `MEAN` length in blocks of 16 it is what an engine holds at one moment."""
    blocks = (budget_bytes - (CATALOGUE[model].weight_bytes() or 0)) // request_bytes(model, block)
    return max(0, (blocks - (NULL_BLOCKS if block > 1 else 0)) // -(-tokens // block))


def judge_arithmetic(claim: str, subject: str) -> Verdict:
    """Return the verdict on a claim by arithmetic for a model, by its short name.

    A batch of the paper that does not fit at full length ran only because not all requests are long at once. The
    paper's size of a request is that of its 256 output tokens.
    """
    of_table = claim in ("table-1-batch-fits", "larger-models-cannot-hold-500")
    if of_table and subject not in PUBLISHED:
        raise Inconclusive("the paper's Table 1 does not have this model")
    if not of_table and subject != REQUEST_MODEL:
        raise Inconclusive(f"the paper gives the size for {REQUEST_MODEL} only")
    each, fit = request_bytes(subject), largest_batch(subject)
    value = fit
    match claim:
        case "table-1-batch-fits":
            threshold = PUBLISHED[subject]
            passes = threshold <= fit
            why = f"{fit} requests of {KNOWN} tokens ({each / 1e6:.1f} MB each) fit into 0.9 x 40 GiB less the weights"
            why += f", the paper has {threshold}"
            paged = largest_batch(subject, MEAN, block=BLOCK_SIZE)
            why += "" if passes else f"; {paged} fit at their mean length of {MEAN}"
        case "table-1-request-size":
            value, threshold = each, 50_000_000  # "OPT-1.3B ... requires 50 MB"
            passes = abs(each / threshold - 1) < 0.05
            why = f"a request of {KNOWN} tokens takes {each / 1e6:.0f} MB, {each / threshold:.1f} times the paper's "
            why += f"50 MB; {OUTPUT_TOKENS} tokens take {request_bytes(subject, OUTPUT_TOKENS) / 1e6:.1f} MB"
        case "table-1-batch-size":
            value, threshold = 512 * each, 25_600_000_000  # "demands at most 25.6 GB"
            passes = value <= threshold
            why = f"512 requests of {KNOWN} tokens take {value / 1e9:.1f} GB, the paper has 25.6"
        case _:
            threshold = 500
            passes = fit < threshold
            why = f"{fit} requests of {KNOWN} tokens fit into 0.9 x 40 GiB less the weights, the paper sends 500"
    return Verdict(claim, subject, State.PASSES if passes else State.FAILS, why, value=value, threshold=threshold)


SMALL = ("opt-1.3b", "opt-2.7b")  # of figure 4
NO_PROFILE = "no sensor gave the profiling counters (SM, tensor and DRAM activity)"
NO_ENERGY = "no sensor gave power or energy"
NO_UTIL = "no sensor gave GPU utilisation"
NO_DECODING = "no reading of the sensors fell between prompts (many do after a burst ramp-up)"
IDLE_TENSOR = "the tensor cores did not run at any load"

# What reads 0 of a GPU that serves was not measured.
UTILIZATION, ENERGY, POWER = (figure_named(name, 0.0) for name in ("gpu_util", "energy_per_token_j", "power_w"))


def at_the_largest_load(kind: str, curve: Curve) -> Evidence:
    """Return a mean at the largest load: of the share of warps that are resident, or of what DRAM can reach while the
    engine decodes.

    The threshold of the warps is what a kernel that saturates the GPU has: a smaller share tells of free capacity, a
    larger one of nothing (arXiv:2404.03353, figure 3; arXiv:2503.08311, figures 5 and 6). That DRAM saturates tells
    three cases apart: it passes with `decode-stays-memory-bound` if decoding is bound by memory, that claim fails if it
    is bound by arithmetic, and only this one fails if neither is near its end (arXiv:2503.08311).
    """
    _refuse_unjudgeable(curve)
    largest, occupancy, dram = curve.valid[-1], figure_named("sm_occupancy"), figure_named("decode_dram")
    if kind == "occupancy-below-a-saturated-kernel":
        if not occupancy(largest):
            raise Inconclusive(NO_PROFILE)
        seen = possible(_around(largest, curve.valid, occupancy), most=1.0)
        active = "" if largest.sm_active is None else f", {percent(largest.sm_active)} of the SMs had work"
        sentence = f"at {largest.concurrency} in flight {{}} of the warps that fit were resident{active}"
    else:
        _refuse_unseen(NO_DECODING, curve.valid, dram)
        seen = possible(_around(largest, curve.valid, dram).mapped(lambda share: share / REACHABLE_DRAM))
        sentence = f"at {largest.concurrency} in flight DRAM is active for {{}} of what it can reach"
        sentence += f", tensor cores {_known_percent(largest.decode_tensor)}"
    return Evidence(estimates=lambda several: [(seen, sentence)], points=[largest], in_percent=True)


def at_every_load(kind: str, curve: Curve) -> Evidence:
    """Return a share at every load: of the SMs that have work, or of the time without a kernel.

    arXiv:2404.03353: "average SM activity remains low" (figure 3), and CPU overheads take up to 50 % of the latency.
    """
    points, of_sms = curve.valid, kind == "sm-activity-stays-low"
    counter = figure_named("sm_active" if of_sms else "engine_active")
    words = "of the SMs have work" if of_sms else "of the time no kernel runs"

    def share(point: Point) -> list[float]:
        return [active if of_sms else 1 - active for active in counter(point)]

    _refuse_unjudgeable(curve)
    _refuse_unseen(NO_PROFILE, points, share)

    def shares(several: int) -> list[Seen[str]]:
        each = ((possible(_around(p, points, share, several), most=1.0), p.concurrency) for p in points)
        return [(seen, f"{{}} {words} at {load} in flight, the most of any load") for seen, load in each]

    sparse = bool(curve.unneeded)
    return Evidence(estimates=shares, points=points, in_percent=True, remark=sparsely(curve), sparse=sparse)


def memory_over_tensor_cores(curve: Curve) -> Evidence:
    """Return how many times nearer memory is to what it can reach than the tensor cores are, at every load at which
    these ran. Counters are read while the engine decodes and processes no prompt.

    arXiv:2503.08311: decode stays memory-bound at large batches; by shapes, grouped keys at a short context need not
    (`gpu_figures.Work.intensity`).
    """
    gap, tensor, decoding = map(figure_named, ("saturation_gap", "tensor_active", "decode_tensor"))
    points = [p for p in curve.valid if gap(p)]
    _refuse_unjudgeable(curve)
    _refuse_unseen(NO_PROFILE, curve.valid, lambda p: tensor(p) if p.dram_active else [])
    _refuse_unseen(NO_DECODING, curve.valid, lambda p: decoding(p) if p.decode_dram else [])
    if not points:
        raise Inconclusive(IDLE_TENSOR)

    def nearer(several: int) -> list[Seen[str]]:
        found = []
        for p in points:
            shares = f"DRAM active {_known_percent(p.decode_dram)}, tensor cores {_known_percent(p.decode_tensor)}"
            sentence = f"least at {p.concurrency} in flight: {shares}, so memory is {{}} as near to its reach"
            found.append((factor(_around(p, points, gap, several)), sentence))
        return found

    return Evidence(estimates=nearer, points=points, remark=sparsely(curve))


def largest_over_smallest_load(kind: str, curve: Curve) -> Evidence:
    """Return a figure at the largest load over that at the smallest: GPU utilization, or the energy of a token.

    arXiv:2404.03353, figure 8: utilization "remains constant", and decreases with large batches, while throughput
    grows. arXiv:2503.08311, raw results, OPT-1.3B: 0.67 J at batch 1, 0.031 J at 256.
    """
    _refuse_unjudgeable(curve)
    first, last = ends = curve.valid[0], curve.valid[-1]
    if kind == "energy-per-token-falls-with-load":
        what = ENERGY
        _refuse_unseen(NO_ENERGY, ends, what)
        _refuse_other_limits(ends)
        sentence = f"{_joules(first)}, {_joules(last)}: {{}} as much"
    else:
        what = UTILIZATION
        _refuse_unseen(NO_UTIL, curve.valid, what)
        sentence = f"utilisation at {last.concurrency} in flight is {{}} that at {first.concurrency}"
    return of_ratios([(last, first, sentence)], ends, what, [p for p in curve.valid if what(p)])


def larger_over_smaller_model(kind: str, curve: Curve, others: Others) -> Evidence:
    """Return a figure of a model over that of a smaller one, each at its largest batch of the paper's table 1.

    It is the energy of a token over that of the next smaller model, or the power over the larger one of OPT-1.3B and
    OPT-2.7B (arXiv:2404.03353, figure 4, which has watts only: "considerably lower").
    """
    own, smaller = at_table_1(curve), NEXT_SMALLER.get(curve.subject)
    alike = [(c.subject, p) for c in others if _facts(c) == _facts(curve) and (p := at_table_1(c))]
    if kind == "energy-per-token-grows-with-model":
        if smaller is None:
            raise Inconclusive("no smaller model in table 1")
        its = next((p for subject, p in alike if subject == smaller), None)
        if own is None or its is None:
            missing = curve.subject if own is None else smaller
            raise Inconclusive(f"no energy of {missing} at {PUBLISHED[missing]} in flight")
        _refuse_other_limits([own, its])
        sentence = f"{_joules(own)}, {smaller} {_joules(its)}: {{}} as much"
        return of_ratios([(own, its, sentence)], [own, its], ENERGY)
    small = [p for subject, p in alike if subject in SMALL and POWER(p)]
    if own is None or not POWER(own) or not small:
        of = "OPT-1.3B or OPT-2.7B at its batch of table 1" if own else curve.subject
        raise Inconclusive(f"no power of {of}")
    _refuse_other_limits([own, *small])
    its = max(small, key=lambda point: fmean(POWER(point)))
    sentence = f"{fmean(POWER(own)):.0f} W, the smaller {fmean(POWER(its)):.0f} W: {{}} as much"
    return of_ratios([(own, its, sentence)], [own, its], POWER, several=len(small))


def util_saturates_first(curve: Curve, threshold: float, full: float) -> Verdict:
    """Return the verdict on whether throughput still grows by `threshold` (a factor) after GPU utilization has reached
    `full`.

    value: largest throughput over that at the first load of full utilization, 1 if that is the largest. What fails at
    the loads of an adaptive sweep need not fail: a load that it left out may have reached full utilization first.
    arXiv:2404.03353, figure 8: GPU utilization tells that some kernel ran, not how much of the GPU it used.
    """
    claim, points = "gpu-util-saturates-first", curve.valid
    _refuse_unjudgeable(curve)
    _refuse_unseen(NO_UTIL, points, UTILIZATION)

    def grown(first: Point) -> tuple[Interval, Point]:
        later = points[points.index(first) + 1 :] or [first]
        best = max(later, key=lambda p: fmean(p.repeats))
        return ratio(best, first, points, several=len(later)), best

    first = next((p for p in points if fmean(UTILIZATION(p)) >= full), None)
    if first is None:
        fullest = max(points, key=lambda p: fmean(UTILIZATION(p)))
        most = possible(_around(fullest, points, UTILIZATION), most=1.0)
        why = f"GPU utilisation stays below {percent(full)}: {percent_interval(most)} at most{sparsely(curve)}"
        surely = below(most, full) is State.PASSES and not curve.unneeded
        state = State.FAILS if surely else State.INCONCLUSIVE
        return Verdict.from_interval(claim, curve.subject, state, why, None, threshold, *points)
    seen, best = grown(first)
    state, doubt = above(seen, threshold), ""
    earliest = next(p for p in points if estimates.ends(_around(p, points, UTILIZATION))[1] >= full)
    if state is State.FAILS and above(grown(earliest)[0], threshold) is not state:
        doubt = f"; noise leaves open whether {percent(full)} are reached at {earliest.concurrency}"
        state = State.INCONCLUSIVE
    why = (
        f"utilisation is {percent(fmean(UTILIZATION(first)))} at {first.concurrency} in flight already, where "
        f"{best.concurrency} in flight serve {times(seen)} as much (threshold {threshold:g}){doubt}"
        f"{sparsely(curve)}{unsure(seen)}"
    )
    state = State.INCONCLUSIVE if curve.unneeded and state is State.FAILS else state
    return Verdict.from_interval(claim, curve.subject, state, why, seen, threshold, first, best)


def at_table_1(curve: Curve) -> Point | None:
    """Return the point at the model's largest batch of the paper's table 1, of one GPU, if its energy was measured."""
    if curve.spec and curve.spec.tensor_parallel_size > 1:
        return None
    wanted = PUBLISHED.get(curve.subject)
    return next((p for p in curve.valid if p.concurrency == wanted and ENERGY(p)), None)


def _facts(curve: Curve) -> tuple[object, ...]:
    """Return what is equal for sweeps of one environment, workload and way of loading, by engines that differ in their
    model only."""
    where, load, workload, spec = curve.environment, curve.load, curve.workload, curve.spec
    engine = spec and replace(spec, model="", kv_cache_bytes=0)  # what the weights leave
    return (where and where.key, load and load.ramp_up, workload and workload.hash, engine)


def _refuse_unseen(what: str, points: Sequence[Point], figure: Figure) -> None:
    """Raise Inconclusive with the reason `what` if a figure of some points was not measured, with their loads if it was
    measured at others."""
    without = [p.concurrency for p in points if not figure(p)]
    some = "" if len(without) == len(points) else f" at {', '.join(map(str, without))} in flight"
    if without:
        raise Inconclusive(f"{what}{some}")


def _refuse_other_limits(points: Sequence[Point]) -> None:
    """Raise Inconclusive for energies under different power limits, which cannot be compared."""
    limits = sorted({limit for p in points for limit in figure_named("power_limit_w")(p)})
    if len(limits) > 1:
        raise Inconclusive(f"measured under power limits of {limits[0]:g} W and {limits[-1]:g} W")


def _around(point: Point, points: Sequence[Point], what: Figure, several: int = 1) -> Interval:
    """Return the mean of a point's figure with an interval from the spread within all points; absolute, not relative.

    If several launches measured a point equally often, launches are what is repeated: their means count, as far from
    the point's mean as single repeats would be. several: see `points.ratio`.
    """
    squares, df = 0.0, 0
    for p in points:
        values, launches = what(p), [group[0].launch for group in p.used]
        if not values:
            continue
        centre = fmean(values)
        if len(launches) == len(values):
            means = estimates.launch_means(zip(launches, values))
            values = [centre + math.sqrt(len(values) / len(means)) * (mean - centre) for mean in means]
        squares += math.fsum((v - fmean(values)) ** 2 for v in values)
        df += len(values) - 1
    values = what(point)
    centre = fmean(values)
    if not df:
        return Interval(centre)
    half = estimates.t_above(TAIL / several, df) * math.sqrt(squares / df) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half)


def _known_percent(value: float | None) -> str:
    return "not known" if value is None else percent(value)


def _joules(point: Point) -> str:
    return f"{fmean(ENERGY(point)):.3g} J a token at {point.concurrency} in flight"


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


def has_jobs_for(kind: str, jobs: Sequence[JobPoint], after: int) -> bool:
    """Return whether jobs were measured that this claim compares. after: the limit of the claim on larger ones."""
    grid, limits = grid_of(jobs), {p.spec.max_num_seqs for p in limits_of(jobs)}
    match kind:
        case "all-at-once-waits-longer":
            return len({p.load.at_once for p in grid}) > 1
        case "alike-at-one-size":
            return len(jobs_of_size(jobs)) > 1
        case "throughput-grows-with-kv-blocks":
            return len({p.kv_blocks for p in caches_of(jobs)}) > 1
        case "batch-limit-reaches-a-plateau" | "batch-limit-costs-latency":
            return len(limits) > 1
        case "batch-limit-gains-little-after-128":
            return after in limits and max(limits) > after
        case "continuous-batching-serves-most":
            return {CONTINUOUS} < {p.batching for p in ways_of(jobs) if p.load.at_once}
        case "dynamic-batching-answers-sooner":
            return {"dynamic", "static"} <= {p.batching for p in ways_of(jobs) if not p.load.at_once}
    return len(grid) > 1


def _refuse_jobs(points: Sequence[JobPoint], least: int, why: str) -> None:
    """Raise Inconclusive if these jobs cannot be compared. why: the reason if there are fewer than `least` of them."""
    if len(points) < least:
        raise Inconclusive(why)
    if invalid := next((point for point in points if not point.valid), None):
        raise Inconclusive("; ".join(invalid.problems) or "a job has no valid repeat")
    if not point_differences(points).known:
        raise Inconclusive("noise unknown: one repeat of each job; --slm-repeats 2")


def _at_the_lowest_rate(grid: Sequence[JobPoint]) -> list[JobPoint]:
    lowest = min((p.load.rate for p in grid), default=0.0)
    return [p for p in grid if p.load.rate == lowest and not p.load.at_once]


def served_over_came(curve: Curve) -> Evidence:
    """Return the requests/s served over those that came at the lowest rate, for each length of the outputs; below 1 by
    the time that the last requests take (arXiv:2404.03353, figure 2, right)."""
    slowest = _at_the_lowest_rate(grid_of(curve.jobs))
    _refuse_jobs(slowest, 1, "no job at a rate was measured")
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


def longest_over_shortest(figure: str, words: str, curve: Curve) -> Evidence:
    """Return a figure at the longest outputs over that at the shortest, all requests at once: requests/s, the mean
    batch or the mean E2E. words: a sentence on "{short}" and "{long}" output tokens.

    arXiv:2404.03353, figure 2, right: "a slight increase in latency"; longer outputs reduce the batch, which is why
    throughput falls.
    """
    at_once = sorted((p for p in grid_of(curve.jobs) if p.load.at_once), key=lambda p: p.output_tokens)
    _refuse_jobs(at_once, 2, "jobs of two output lengths, all at once, are needed")
    short, long, what, each = at_once[0], at_once[-1], figure_named(figure), 1.0
    if figure == "requests_per_s":  # what counts output tokens counts requests here
        what, each = output_rate, short.output_tokens / long.output_tokens
    if not all(map(what, at_once)):
        raise Inconclusive(f"no engine reported its {figure}")
    seen = ratio(long, short, at_once, what).mapped(partial(mul, each))
    lengths = {"short": f"{short.output_tokens:.0f}", "long": f"{long.output_tokens:.0f}"}
    sentence = "all at once, " + words.format("{}", **lengths)
    return Evidence(estimates=lambda several: [(seen, sentence)], points=at_once)


def at_once_over_lowest_rate(curve: Curve) -> Evidence:
    """Return the mean E2E of requests that come all at once over that at the lowest rate, for each length of the
    outputs (arXiv:2404.03353, figure 2, right)."""
    grid, words = grid_of(curve.jobs), "a request that comes with all others lasts {} as long"
    slowest = _at_the_lowest_rate(grid)
    pairs = [(p, q) for p in grid for q in slowest if p.load.at_once and p.workload.hash == q.workload.hash]
    used = [p for pair in pairs for p in pair]
    _refuse_jobs(used, 2, "no length was measured at a rate and all at once")
    rows = [(p, q, f"at {p.output_tokens:.0f} output tokens, {words}") for p, q in pairs]
    return of_ratios(rows, used, e2e_s, grid, qualifier=f"; least of {len(pairs)} lengths")


def over_the_opt_of_its_size(curve: Curve, others: Others) -> Evidence:
    """Return throughput and mean E2E of a model over those of the OPT of its size, all requests at once, at each output
    length and for each number of requests (arXiv:2404.03353, figure 2, left)."""

    def size(p: JobPoint) -> Hashable:
        return p.workload.spec.prompt_tokens, p.workload.spec.output_tokens, p.requests, p.environment.key

    name = SIZED_AS.get(curve.subject, curve.subject)
    reference = grouped((job for c in others if c.subject == name for job in jobs_of_size(c.jobs)), size)
    pairs = [(p, q) for p in jobs_of_size(curve.jobs) for q in reference.get(size(p), ())]
    used = [p for pair in pairs for p in pair]
    _refuse_jobs(used, 2, f"no job was measured of both {curve.subject} and {name}")

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


def over_the_limit_before(curve: Curve, after: int | None) -> Evidence:
    """Return the throughput under a `max_num_seqs` over that under the one before it, all requests at once: under each
    after `after`, or only under the largest. Limits that the KV cache does not let the batch reach do not count.

    arXiv:2404.03353, figure 1 and "after a batch size of 128".
    """
    steps = _larger_batches(curve)
    steps = steps[-1:] if after is None else [(p, q) for p, q in steps if p.spec.max_num_seqs >= after]
    used = list(dict.fromkeys(p for step in steps for p in step))
    _refuse_jobs(used, 2, TWO_LIMITS)
    rows = []
    for less, more in steps:
        sentence = f"all {more.requests} at once, max_num_seqs {more.spec.max_num_seqs} serves {{}} what "
        sentence += f"{less.spec.max_num_seqs} does, with a mean batch of {more.batch or 0:.0f} after "
        sentence += f"{less.batch or 0:.0f} and {more.preemptions or 0:.0f} preemptions"
        rows.append((more, less, sentence))
    return of_ratios(rows, used, among=used)


def latency_past_the_plateau(curve: Curve, little: float) -> Evidence:
    """Return the mean E2E under the largest `max_num_seqs` over that under the first after which none gains `little` of
    throughput, all requests at once.

    arXiv:2404.03353, figure 1: "at the cost of a considerable degradation in latency". Waiting counts, so latency need
    not follow from throughput.
    """
    limits = list(dict.fromkeys(p for step in _larger_batches(curve) for p in step))
    _refuse_jobs(limits, 2, TWO_LIMITS)
    rates, largest = [p.output_tokens_per_s or 0.0 for p in limits], limits[-1]
    first = next(p for p, rate in zip(limits, rates) if max(rates) < little * rate)
    if first is largest:
        raise Inconclusive(f"throughput still grows at max_num_seqs {first.spec.max_num_seqs}")
    sentence = f"all {first.requests} at once, a request lasts {{}} as long under max_num_seqs "
    sentence += f"{largest.spec.max_num_seqs} as under {first.spec.max_num_seqs}, from where throughput gains little"
    return of_ratios([(largest, first, sentence)], limits, e2e_s, limits)


TWO_LIMITS = "jobs under two limits that bound the batch are needed"


def _larger_batches(curve: Curve) -> list[tuple[JobPoint, JobPoint]]:
    """Return neighbouring limits of which the larger one made the mean batch larger: it was the limit that bound it."""
    return [(p, q) for p, q in pairwise(limits_of(curve.jobs)) if (q.batch or 0.0) >= FULL_BATCH * (p.batch or 0.0)]


def continuous_over_other_batching(curve: Curve) -> Evidence:
    """Return the throughput of continuous batching, all requests at once, over that of each other way to batch."""
    at_once = [p for p in ways_of(curve.jobs) if p.load.at_once]
    mine, theirs = [p for p in at_once if p.batching == CONTINUOUS], [p for p in at_once if p.batching != CONTINUOUS]
    _refuse_jobs(at_once if mine and theirs else [], 2, "two ways to batch the same requests are needed")
    factors = {p.batching: ratio(mine[-1], p, at_once).value for p in theirs}
    rows = []
    for p in theirs:
        wasted = "" if p.waste is None else f", {percent(p.waste)} of whose work is wasted"
        rest = ", ".join(f"{way}: {value:.3g}" for way, value in factors.items() if way != p.batching)
        sentence = f"it serves {{}} what {p.batching} batching does{wasted}{f' ({rest})' if rest else ''}"
        rows.append((mine[-1], p, sentence))
    return of_ratios(rows, at_once, among=at_once)


def dynamic_over_static_batching(curve: Curve) -> Evidence:
    """Return the mean E2E at a rate under dynamic batching over that under static batching. Dynamic batching waits for
    a while, static batching until a batch is full."""
    ways = {p.batching: p for p in ways_of(curve.jobs) if not p.load.at_once}
    used = [ways[name] for name in ("dynamic", "static") if name in ways]
    _refuse_jobs(used, 2, "jobs at a rate by dynamic and by static batching are needed")
    dynamic, static = used
    sentence = f"at {static.load.rate:g}/s a request lasts {{}} as long as under static batching"
    return of_ratios([(dynamic, static, sentence)], used, e2e_s)


def throughput_grows_with_kv_blocks(curve: Curve, threshold: float, flat: float) -> Verdict:
    """Return the verdict on whether throughput grows with the number of KV blocks until all requests fit at once, and
    no more from there.

    It passes if the first cache that holds them serves more than `threshold` times what the smallest does, each larger
    one less than `flat` times what the one before it does, and none that holds them preempts. value: throughput of the
    first that holds them over that of the smallest.
    """
    claim, points = "throughput-grows-with-kv-blocks", sorted(caches_of(curve.jobs), key=attrgetter("kv_blocks"))
    fitting = [p for p in points if p.fits]
    _refuse_jobs(points, 2, "jobs on engines with two sizes of a KV cache are needed")
    if not fitting or len(fitting) == len(points):
        which = "every KV cache that was measured holds" if fitting else "no KV cache that was measured holds"
        raise Inconclusive(f"{which} all requests at once")
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


def figure_of_replicas(figure: str, words: str, curve: Curve, sharing: Sharing) -> Evidence:
    """Return a figure of the replicas that serve most over that of one engine under the same load; its interval is
    corrected for the set having been chosen, because by Little's law most served is least waited for.

    The mean E2E is that of the slowest replica, its percentile over the requests of all. arXiv:2404.03353: latency
    improves (figure 5; no figure has tails), "considerable increase" of utilization (6), more power with OPT-125M and
    OPT-1.3B, constant with OPT-2.7B (7).
    """
    pairs = _compared(curve, sharing)
    shared, alone = max(pairs, key=lambda pair: ratio(*pair).value)
    seen = figure_ratio(alone, shared, figure, len(pairs))
    if seen is None:
        raise Inconclusive(f"{words} is not known of both")
    sentence = f"{words} of {shared.count} replicas {HOW[sharing]} is {{}} that of one engine at "
    sentence += f"{shared.concurrency} in flight"
    return Evidence(estimates=lambda several: [(seen, sentence)], points=[alone, shared])


def replicas_over_one_engine(curve: Curve, sharing: Sharing) -> Evidence:
    """Return the throughput of the best number of replicas over that of one engine at its best load, corrected for both
    having been chosen.

    arXiv:2404.03353, figure 5; arXiv:2503.08311, raw results, OPT-1.3B: 1.337 against an engine without chunked
    prefill, 1.236 against one with it.
    """
    pairs = _compared(curve, sharing)
    shared = max((pair[0] for pair in pairs), key=lambda point: fmean(point.repeats))
    single = [*valid_points(curve.alone), *curve.valid]
    engines = [here for point in single if (here := point.on_hosts_of(shared))]
    alone = max(engines, key=lambda point: fmean(point.repeats))
    others = ", ".join(
        f"{p.count}{'' if p.concurrency == shared.concurrency else f' at {p.concurrency}'}: {ratio(p, alone).value:.3g}"
        for p, _ in pairs
        if p is not shared and alone.on_hosts_of(p)
    )
    load = "" if alone.concurrency == shared.concurrency else f", and one engine serves most at {alone.concurrency}"
    latency = figure_ratio(alone, shared, "largest_e2e_s")
    sentence = (
        f"{shared.count} replicas {HOW[sharing]} serve {{}} what one engine does at {shared.concurrency} in flight"
        f"{load}{f' ({others})' if others else ''}"
        f"{f'; their largest mean E2E is {percent(latency.value)} of its mean' if latency else ''}"
    )
    # The choice of each side errs in one direction only, so each end is corrected for one of them.
    return of_ratios([(shared, alone, sentence)], [alone, shared], several=max(len(pairs), len(engines)))


def _compared(curve: Curve, sharing: Sharing) -> list[tuple[ReplicaPoint, Point]]:
    """Return pairs of replicas and one engine under the same load. Raises Inconclusive with the reason if there are
    none."""
    if pairs := compared(curve, sharing):
        return pairs
    shared = [s for s in curve.shared if s.sharing == sharing]
    if not shared:
        raise Inconclusive(f"no replicas were measured {HOW[sharing]}")
    if invalid := next((s for s in shared if not s.valid), None):
        why = "; ".join(invalid.problems) or "not measured"
        raise Inconclusive(f"{invalid.count} replicas have no valid repeat ({why})")
    loads = sorted({s.concurrency for s in shared})
    where = " on their host" if any(map(curve.one_engine, loads)) else ""
    raise Inconclusive(f"one engine alone was not measured at {', '.join(map(str, loads))} in flight{where}")


Pair = tuple[Deployment, Deployment]


def serves_less(claim: str, curve: Curve, threshold: float) -> Verdict:
    """Return the verdict on whether an engine serves less than on the fewest GPUs: per GPU, however many it has, or in
    all on the most GPUs. Each pair is under the largest load that fits at once on both; the verdict rests on the pair
    that decides. value: its throughput, or that per GPU, over that on the fewest."""
    in_all, pairs = claim == "tensor-parallel-serves-less-in-all", list[Pair]()
    engines = sorted(one_engine_each(deployments(curve)).items())
    for _, more in engines[1:]:
        fewest = engines[0][1]
        if loads := [load for load in fewest.keys() & more.keys() if fewest[load].fits and more[load].fits]:
            pairs.append((fewest[max(loads)], more[max(loads)]))
    if not pairs:
        raise Inconclusive("no engine was measured on two numbers of GPUs under a load that fits")
    if in_all:
        pairs = [max(pairs, key=lambda pair: pair[1].gpus)]

    def ratios(several: int) -> list[Seen[Pair]]:
        shares = [1.0 if in_all else base.gpus / other.gpus for base, other in pairs]
        gains = [ratio(other.served, base.served, several=several) for base, other in pairs]
        return [(gain.mapped(partial(mul, share)), pair) for gain, share, pair in zip(gains, shares, pairs)]

    state, seen, (base, other) = every(below, threshold, ratios)
    much = "what it does" if in_all else "as much per GPU as"
    why = (
        f"on {other.place} it serves {times(seen)} {much} on {base.place} at {base.concurrency} in flight, the largest "
        f"load that fits (threshold {threshold:g}){unsure(seen)}"
    )
    return Verdict.from_interval(claim, curve.subject, state, why, seen, threshold, base.served, other.served)


def over_fewer_gpus_at_best(curve: Curve, fewer: int, more: int) -> Evidence:
    """Return the throughput of an engine on `more` GPUs over that on `fewer`, each under its best load. Their memory
    counts: a load may only fit into more GPUs. arXiv:2404.03353: "due to memory requirements"."""
    engines = one_engine_each(deployments(curve))
    if not (engines.get(fewer) and engines.get(more)):
        raise Inconclusive(f"no engine was measured on {fewer} and on {more} GPUs")
    first, second = (max(engines[gpus].values(), key=lambda one: one.tokens_per_s) for gpus in (fewer, more))
    sentence = f"on {second.place} it serves {{}} what it does on {first.place}, at {second.concurrency} and "
    sentence += f"{first.concurrency} in flight, the best load of each"
    if first.room is not None and second.room is not None:
        sentence += f"; {second.room} requests fit at once on the more GPUs, {first.room} on the fewer"
    chosen, points = len(engines[fewer]) * len(engines[more]), [first.served, second.served]
    return of_ratios([(second.served, first.served, sentence)], points, several=chosen)


def replicas_over_tensor_parallel(curve: Curve) -> Evidence:
    """Return the throughput of replicas with a GPU each over that of one engine over as many GPUs, under the largest
    load that both were measured under. If the load does not fit into one GPU, several GPUs gain by memory too, and the
    sentence says so."""
    found = deployments(curve)
    engines = one_engine_each(found)
    sets = (one for one in found if one.sharing == "gpus" and one.tensor_parallel_size < one.gpus)
    pairs = [(single, one) for one in sets if (single := engines.get(one.gpus, {}).get(one.concurrency))]
    if not pairs:
        why = "replicas with a GPU each and an engine over as many GPUs were not both measured under one load"
        raise Inconclusive(why)
    single, replicas = max(pairs, key=lambda pair: (pair[0].gpus, pair[0].concurrency))
    sentence = f"{replicas.engines} replicas serve {{}} what one engine over {single.place} does"
    sentence += f" at {single.concurrency} in flight"
    alone = engines.get(replicas.tensor_parallel_size, {}).get(single.concurrency)
    if alone and not alone.fits:
        sentence += f", of which one GPU runs {alone.room} at once: "
        sentence += "there an engine over several gains memory, not speed alone"
    return of_ratios([(replicas.served, single.served, sentence)], [single.served, replicas.served])
