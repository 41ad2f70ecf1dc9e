"""Evidence for claims: ratios between figures of sweeps, jobs and deployments, and arithmetic.

The interval of each estimate includes the noise of all points that are compared. The functions raise Inconclusive with
the reason if a figure was not measured, or if a point is missing or invalid.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from operator import add, attrgetter, mul
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.advice import subjects
from pytest_slmserve.analysis.advice.advisor import Objectives, decide, needs
from pytest_slmserve.analysis.compare.deployments import HOW, Deployment, compared, deployments, one_engine_each
from pytest_slmserve.analysis.estimates import Interval, factor, grouped, percent, percent_interval, possible, times
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM
from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.analysis.points import (
    CONTINUOUS,
    Figure,
    JobPoint,
    Point,
    at_common_loads,
    busy_rate,
    e2e_s,
    figure_named,
    figure_ratio,
    limit_groups,
    output_rate,
    point_differences,
    points_of,
    ratio,
)
from pytest_slmserve.analysis.sweep.curve import Curve, obstacle, sparsely
from pytest_slmserve.analysis.sweep.plateau import crossing, valid_points
from pytest_slmserve.analysis.verdict import Inconclusive, Seen, State, Verdict, above, all_of, below, every
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS, made_up_acceptance
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import GIB, OF_ADAPTERS

Expected = Literal["passes", "fails", "either"]
Others = Sequence[Curve]
Parameters = Mapping[str, Any]
FIGURES: dict[str, Figure] = {"": output_rate, "e2e_s": e2e_s}  # every valid point has these figures
AFTER = 128  # "after a batch size of 128"


@dataclass(frozen=True, slots=True)
class Claim:
    """Statement that measurements can refute, as in `claims.toml`.

    Attributes:
        of: the measurements that it reads.
        models: to which it applies; empty for any.
        against: for each model, the models with which it is compared.
        compares: kind of evidence, see `evidence_for`; empty if the claim has its own function.
        passes: side of the threshold on which all estimates must lie. "within" is between the threshold and its inverse
            (or, for a share, its negative), and "between" is from 1 to the threshold.
        threshold: name of the parameter.
        figure: empty for throughput.
        words: sentence of a verdict, in which "{}" stands for the estimate.
        expected: "either" is for a finding that is never a failure.
    """

    name: str
    statement: str
    source: str
    of: Literal["sweeps", "replicas", "gpus", "jobs", "shares", "formats", "speculation", "arithmetic"] = "sweeps"
    models: tuple[str, ...] = ()
    against: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compares: str = ""
    passes: Literal["below", "above", "within", "between"] = "below"
    threshold: str = "threshold"
    figure: str = ""
    words: str = ""
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "passes"
    evidence: str = ""

    @property
    def of_tokens(self) -> bool:
        """Whether it is about generating tokens, by GPU counters or by the energy of a token."""
        return self.compares == "counters" or self.figure == "energy_per_token_j"


Told = tuple[str, Sequence[Point]]  # a sentence on an estimate, and the points of its verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Estimates that must all lie on one side of a claim's threshold.

    Attributes:
        estimates: returns them, with intervals that hold together for the given number.
        in_percent: whether they are shares and not factors.
        qualifier: clause on the threshold.
        remark: clause at the end of the reason.
        doubtful: state that noise or a skipped load could reverse, so it becomes inconclusive.
        again: loads whose further measurements would resolve the claim.
    """

    estimates: Callable[[int], Sequence[Seen[Told]]]
    in_percent: bool = False
    qualifier: str = ""
    remark: str = ""
    doubtful: State | None = None
    again: tuple[int, ...] = ()


class NotMeasured(Inconclusive):
    """Lack of any measurement for a claim, so a report omits the claim."""


class Compared(NamedTuple):
    """A point, and the point with which it is compared.

    Attributes:
        facts: for the claim's words.
        figure: replaces that of the claim.
    """

    of: Point
    to: Point
    facts: Mapping[str, object] = {}
    scale: float = 1.0
    figure: Figure | None = None


def of_ratios(
    claim: Claim,
    rows: Sequence[Compared],
    used: Sequence[Point] = (),
    among: Sequence[Point] = (),
    several: int = 1,
    **clauses: Any,
) -> Evidence:
    """Return the evidence of the claim's figure at one point of each row over the other.

    The words may name both points ("{of.concurrency}", "{to.concurrency}") and the means of the figure ("{mine}",
    "{theirs}").

    Args:
        used: points on which a verdict rests; the two that decide by default.
        among: see `points.ratio`, also for `several`.
        clauses: fields of the evidence.
    """

    def seen(number: int) -> list[Seen[Told]]:
        found = []
        for of, to, facts, scale, figure in rows:
            what = figure or FIGURES.get(claim.figure) or figure_named(claim.figure, 0.0)
            names = {"of": of, "to": to, "mine": fmean(what(of)), "theirs": fmean(what(to)), **facts}
            estimate = ratio(of, to, among, what, max(number, several)).mapped(partial(mul, scale))
            found.append((estimate, (claim.words.format("{}", **names), used or (to, of))))
        return found

    return Evidence(estimates=seen, **clauses)


def evidence_for(claim: Claim, curve: Curve, others: Others) -> Evidence | Verdict:
    """Return the evidence for a claim with a threshold, or the verdict on a claim with its own rule.

    Raises:
        Inconclusive: if there is neither, with the reason.
    """
    if claim.compares in ("counters", "loads", "first full load") and (reason := obstacle(curve)):
        raise Inconclusive(reason)
    match claim.compares:
        case "counters":
            return of_counters(claim, curve)
        case "loads":
            return of_loads(claim, curve)
        case "first full load":
            return of_the_first_full_load(claim, curve)
        case "next load":
            return of_the_next_load(claim, curve)
        case "neighbours":
            return of_neighbours(claim, curve)
        case "advice":
            return of_the_advised_batch(claim, curve)
        case "models":
            return of_models(claim, curve, others)
        case "sizes":
            return of_one_size(claim, curve, others)
        case "arrivals":
            return of_arrivals(claim, curve)
        case "limits":
            return of_limits(claim, curve)
        case "batching":
            return of_batching(claim, curve)
        case "adapters":
            return of_adapters(claim, curve)
        case "replicas":
            return of_replicas(claim, curve)
        case "gpus":
            return of_gpus(claim, curve)
        case "hit rates":
            return of_hit_rates(claim, curve)
        case "formats":
            return of_formats(claim, curve)
        case "speculation":
            return of_speculation(claim, curve)
    match claim.name:
        case "speculation-costs-beyond-a-load":
            return of_speculation(claim, curve)
        case "throughput-plateau":
            return curve.pareto_plateau(claim.parameters["tolerance"])
        case "gpu-plateau":
            return curve.pareto_plateau(claim.parameters["tolerance"], busy_rate)
        case "latency-rises-past-plateau":
            return curve.latency_keeps_rising(claim.parameters["tolerance"])
        case "pareto-up-to-plateau":
            return curve.pareto_up_to_plateau(claim.parameters["tolerance"], claim.parameters["margin"])
        case subjects.KV_BLOCKS:
            if curve.spec is None or not curve.resolved:
                raise Inconclusive("no engine was measured")
            records = tuple(record for p in curve.points for record in p.records)
            return subjects.kv_blocks_as_predicted(curve.spec, curve.resolved, claim.parameters["blocks"], records)
        case "throughput-grows-with-kv-blocks":
            return throughput_grows_with_kv_blocks(curve, claim.parameters["threshold"], claim.parameters["flat"])
    return judge_arithmetic(claim.name, curve.subject)


# Table 1 of arXiv:2404.03353: an A100 with 40 GiB, and requests of 512 prompt and 256 output tokens.
BUDGET_BYTES = 9 * 40 * GIB // 10
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
KNOWN = PROMPT_TOKENS + OUTPUT_TOKENS
MEAN = PROMPT_TOKENS + OUTPUT_TOKENS // 2  # mean length, if requests are evenly distributed over their progress
BLOCK_SIZE = 16
PUBLISHED = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}  # largest batches
REQUEST_MODEL = "opt-1.3b"


def request_bytes(model: str, tokens: int = KNOWN) -> int:
    """Return the KV bytes of one request of a catalogue model."""
    return tokens * (CATALOGUE[model].kv_bytes_per_token() or 0)


def largest_batch(model: str, tokens: int = KNOWN, budget_bytes: int = BUDGET_BYTES, block: int = 1) -> int:
    """Return how many requests of a catalogue model fit into the budget less the weights, in whole blocks.

    `MEAN` tokens and blocks of 16 give the number that an engine holds at one moment.
    """
    blocks = (budget_bytes - (CATALOGUE[model].weight_bytes() or 0)) // request_bytes(model, block)
    return max(0, (blocks - (NULL_BLOCKS if block > 1 else 0)) // -(-tokens // block))


def judge_arithmetic(claim: str, subject: str) -> Verdict:
    """Return the verdict on an arithmetic claim for a model (short name).

    If a batch of the paper does not fit at full length, it ran because not all requests are long at once. The paper's
    size of a request is that of its 256 output tokens.
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


NO_PROFILE = "no sensor gave the profiling counters (SM, tensor and DRAM activity)"
NO_ENERGY = "no sensor gave power or energy"
NO_UTIL = "no sensor gave GPU utilisation"
NO_DECODING = "no reading of the sensors fell between prompts (many do after a burst ramp-up)"
IDLE_TENSOR = "the tensor cores did not run at any load"

# A reading of 0 from a busy GPU means that the figure was not measured.
UTILIZATION, ENERGY = figure_named("gpu_util", 0.0), figure_named("energy_per_token_j", 0.0)


def of_counters(claim: Claim, curve: Curve) -> Evidence:
    """Return a counter of the GPU at every load or at the largest one, or the ratio of memory to tensor activity.

    Counters of decoding are read while the engine processes no prompt. Below the threshold of resident warps, that of a
    kernel that saturates the GPU, capacity is free (arXiv:2404.03353, figure 3; arXiv:2503.08311, figures 5 and 6).
    Decode stays memory-bound at large batches (arXiv:2503.08311), except, by the model configuration, for grouped keys
    at a short context (`gpu_figures.Work.intensity`). If neither memory nor arithmetic limits it, only
    `decode-saturates-dram` fails.
    """
    points, counter, gap = curve.valid, figure_named(claim.figure), claim.figure == "saturation_gap"
    judged, at_largest, most = points, False, 1.0
    offset, sign, reach = 0.0, 1.0, 1.0
    match claim.figure:
        case "saturation_gap":
            tensor, decoding = figure_named("tensor_active"), figure_named("decode_tensor")
            _refuse_unseen(NO_PROFILE, points, lambda p: tensor(p) if p.dram_active else [])
            _refuse_unseen(NO_DECODING, points, lambda p: decoding(p) if p.decode_dram else [])
            judged = points = [p for p in points if counter(p)]
            if not points:
                raise Inconclusive(IDLE_TENSOR)
        case "decode_dram":
            _refuse_unseen(NO_DECODING, points, counter)
            judged, at_largest, most, reach = points[-1:], True, math.inf, REACHABLE_DRAM
        case "sm_occupancy" | "sm_active_max":
            judged, at_largest = points[-1:], True
            _refuse_unseen(NO_PROFILE, judged, counter)
        case _:
            _refuse_unseen(NO_PROFILE, points, counter)
    if claim.figure == "engine_active":  # the share of the time without a kernel
        offset, sign = 1.0, -1.0

    def share(point: Point) -> list[float]:
        return [(offset + sign * active) / reach for active in counter(point)]

    def seen(several: int) -> list[Seen[Told]]:
        found: list[Seen[Told]] = []
        for p in judged:
            around = _around(p, points, share, several)
            dram, tensor = ("not known" if v is None else percent(v) for v in (p.decode_dram, p.decode_tensor))
            active = "" if p.sm_active is None else f", {percent(p.sm_active)} of the SMs had work"
            sentence = claim.words.format("{}", of=p, dram=dram, tensor=tensor, active=active)
            found.append((factor(around) if gap else possible(around, most), (sentence, judged)))
        return found

    remark = "" if at_largest else sparsely(curve)
    doubtful = State.PASSES if curve.unneeded and not (gap or at_largest) else None
    again = (min(judged, key=lambda p: fmean(counter(p))).concurrency,) if gap else ()  # the load that decides
    return Evidence(estimates=seen, in_percent=not gap, remark=remark, doubtful=doubtful, again=again)


def of_loads(claim: Claim, curve: Curve) -> Evidence:
    """Return GPU utilization, or the energy of a token, at the largest load over that at the smallest.

    arXiv:2404.03353, figure 8: utilization "remains constant", and decreases with large batches, while throughput
    grows. arXiv:2503.08311, raw results, OPT-1.3B: 0.67 J at batch 1, 0.031 J at 256.
    """
    what, (first, *_, last) = figure_named(claim.figure, 0.0), curve.valid
    if claim.figure == "energy_per_token_j":
        _refuse_unseen(NO_ENERGY, [first, last], what)
        _refuse_other_limits([first, last])
    else:
        _refuse_unseen(NO_UTIL, curve.valid, what)
    return of_ratios(claim, [Compared(last, first)], among=[p for p in curve.valid if what(p)])


def of_the_next_load(claim: Claim, curve: Curve) -> Evidence:
    """Return the throughput gain per doubling from 128 concurrent requests to the next measured load."""
    gain = next((each for each in curve.gains() if each.start == AFTER), None)
    if gain is None:
        raise Inconclusive(f"not measured at concurrency {AFTER} and twice as many")
    told = claim.words.format("{}", to=gain.start, of=gain.end), curve.valid
    remark, again = sparsely(curve), (gain.start, gain.end)
    return Evidence(estimates=lambda several: [(gain, told)], in_percent=True, remark=remark, again=again)


def of_neighbours(claim: Claim, curve: Curve) -> Evidence:
    """Return throughput without engines on other GPUs over that with them, less 1, at each load measured both ways."""
    beside, alone = (
        valid_points(points_of(m for m in curve.measurements if bool(m.neighbours) is busy)) for busy in (True, False)
    )
    pairs, among = at_common_loads(beside, alone)
    if not pairs:
        raise Inconclusive("none of its loads was measured both alone and beside others")

    def changes(several: int) -> list[Interval]:
        return [ratio(q, p, among, several=several).mapped(partial(add, -1)) for p, q in pairs]

    each = ((seen, p.concurrency) for seen, (p, _) in zip(changes(1), pairs))
    told = "; ".join(f"{'+' if seen.value >= 0 else ''}{percent_interval(seen)} at {load}" for seen, load in each)
    points = [*chain.from_iterable(pairs)]
    sentence = claim.words.format(told=told)
    return Evidence(estimates=lambda n: [(seen, (sentence, points)) for seen in changes(n)], in_percent=True)


def of_the_advised_batch(claim: Claim, curve: Curve) -> Evidence:
    """Return throughput at the batch that the advisor of arXiv:2503.08311 recommends over that at each other load.

    The limit is twice the time per output token at concurrency 32.
    """
    subject, wish = subjects.of_curve(curve, None), Objectives(slo=subjects.OBJECTIVE)
    found, points = decide(subject, wish), {p.concurrency: p for p in subject.usable}
    if found.batch not in points:
        raise Inconclusive(found.reason or f"concurrency {found.batch} was predicted, not measured")
    chosen = points.pop(found.batch)
    memory = needs(subject, chosen.concurrency, wish)
    freed = f", and frees {memory.freed_bytes / GIB:.0f} GiB" if memory and memory.freed_bytes is not None else ""
    rows = [Compared(chosen, p, {"freed": freed}) for p in points.values()]
    return of_ratios(claim, rows, among=subject.usable, in_percent=True)


def of_models(claim: Claim, curve: Curve, others: Others) -> Evidence:
    """Return a figure of a model over that of a smaller one, each at its largest batch in the paper's table 1.

    The smaller one is the next smaller model for the energy of a token, and the one that draws the most for power
    (arXiv:2404.03353, figure 4, which has only watts).
    """
    own, smaller, what = at_table_1(curve), claim.against.get(curve.subject), figure_named(claim.figure, 0.0)
    if smaller is None:
        raise Inconclusive("no smaller model in table 1")
    alike = [p for c in others if c.subject in smaller and _facts(c) == _facts(curve) and (p := at_table_1(c))]
    small = list(filter(what, alike))
    if own is None or not what(own) or not small:
        missing, kind = smaller if own else [curve.subject], "power" if claim.figure == "power_w" else "energy"
        raise Inconclusive(f"no {kind} of {' or '.join(f'{m} at concurrency {PUBLISHED[m]}' for m in missing)}")
    _refuse_other_limits([own, *small])
    its = max(small, key=lambda point: fmean(what(point)))
    return of_ratios(claim, [Compared(own, its, {"smaller": smaller[0]})], [own, its], several=len(small))


def of_the_first_full_load(claim: Claim, curve: Curve) -> Evidence | Verdict:
    """Return the largest throughput over that at the first load at which GPU utilization reaches `full`.

    If no load reaches it, the result is a verdict. In an adaptive sweep a failure is inconclusive, because a skipped
    load may have reached it first. GPU utilization says only that some kernel ran (arXiv:2404.03353, figure 8).
    """
    points, full, threshold = curve.valid, claim.parameters["full"], claim.parameters["threshold"]
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
        return Verdict.from_interval(claim.name, curve.subject, state, why, None, threshold, *points)
    (seen, best), doubt = grown(first), ""
    fails = above(seen, threshold) is State.FAILS
    earliest = next(p for p in points if estimates.ends(_around(p, points, UTILIZATION))[1] >= full)
    if fails and above(grown(earliest)[0], threshold) is not State.FAILS:
        doubt = f"; noise leaves open whether {percent(full)} are reached at {earliest.concurrency}"
    told = claim.words.format("{}", of=best, to=first, share=percent(fmean(UTILIZATION(first)))), [first, best]
    open_to = State.FAILS if doubt or curve.unneeded else None
    return Evidence(estimates=lambda several: [(seen, told)], remark=doubt + sparsely(curve), doubtful=open_to)


def at_table_1(curve: Curve) -> Point | None:
    """Return the point at the model's batch of table 1, if its energy was measured.

    It needs one GPU, and no shared prefixes or structured output.
    """
    asked = curve.workload and curve.workload.spec
    other = asked and (asked.finds_prefixes or asked.response_format)
    if other or (curve.spec and curve.spec.tensor_parallel_size > 1):
        return None
    wanted = PUBLISHED.get(curve.subject)
    return next((p for p in curve.valid if p.concurrency == wanted and ENERGY(p)), None)


def _facts(curve: Curve) -> tuple[object, ...]:
    where, load, workload, spec = curve.environment, curve.load, curve.workload, curve.spec
    engine = spec and replace(spec, model="", kv_cache_bytes=0)  # its size depends on the weights
    return (where and where.key, load and load.ramp_up, workload and workload.hash, engine)


def _refuse_unseen(what: str, points: Sequence[Point], figure: Figure) -> None:
    without = [p.concurrency for p in points if not figure(p)]
    some = "" if len(without) == len(points) else f" at concurrency {', '.join(map(str, without))}"
    if without:
        raise Inconclusive(f"{what}{some}")


def _refuse_other_limits(points: Sequence[Point]) -> None:
    limits = sorted({limit for p in points for limit in figure_named("power_limit_w")(p)})
    if len(limits) > 1:
        raise Inconclusive(f"measured under power limits of {limits[0]:g} W and {limits[-1]:g} W")


def _around(point: Point, points: Sequence[Point], what: Figure, several: int = 1) -> Interval:
    """Return the mean of a point's figure, with an absolute interval from the scatter within all points."""
    # If several launches measured a point equally often, the launches are the repeats. Their means are scaled, so that
    # they scatter around the point's mean as much as single repeats would.
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
    half = estimates.t_above(estimates.TAIL / several, df) * math.sqrt(squares / df) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half)


FULL_BATCH = 1.25  # if a larger limit enlarges the batch by a smaller factor, the KV cache is the limiting resource


def most_varied(groups: Iterable[list[JobPoint]], varied: Callable[[JobPoint], Hashable]) -> list[JobPoint]:
    """Return the group with the most different values, the last of equal groups; empty without groups."""
    return max(reversed(list(groups)), key=lambda group: len({varied(p) for p in group}), default=[])


def same_engine(point: JobPoint) -> tuple[Hashable, ...]:
    """Return a key of jobs with one engine, concurrency limit and burstiness."""
    return point.spec.key, point.environment.key, point.load.max_concurrency, point.load.burstiness


def same_but_kv(point: JobPoint) -> tuple[Hashable, ...]:
    """Return a key of jobs that differ only in the KV cache of their engine."""
    spec = replace(point.spec.without("num_gpu_blocks_override"), kv_cache_bytes=GIB)
    return *point.asked, point.environment.key, spec.key


def grid_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return the jobs of one engine and number of requests with the most output lengths and rates."""
    groups = grouped(_of_fixed_lengths(jobs), lambda p: (same_engine(p), p.requests))
    return most_varied(groups.values(), lambda p: (p.output_tokens, p.load.rate))


def jobs_of_size(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return the burst jobs of one engine with the most output lengths and numbers of requests."""
    at_once = [p for p in _of_fixed_lengths(jobs) if p.load.at_once]
    return most_varied(grouped(at_once, same_engine).values(), lambda p: (p.output_tokens, p.requests))


def _of_fixed_lengths(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    return [p for p in jobs if p.batching == CONTINUOUS and p.workload.spec.output_tokens is not None]


def caches_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return the measurements of a job on engines with the most sizes of the KV cache."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.kv_blocks is not None]
    return most_varied(grouped(served, same_but_kv).values(), lambda p: p.kv_blocks)


def limits_of(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return the measurements of a burst job with the most values of `max_num_seqs`, ascending."""
    return most_varied(limit_groups(jobs), lambda p: p.spec.max_num_seqs)


def ways_of(jobs: Sequence[JobPoint]) -> list[dict[str, JobPoint]]:
    """Return the last job by batching mode, for each set of requests that were batched in several modes."""
    alike = grouped(jobs, lambda p: (*p.asked, p.model, p.environment.gpu_name)).values()
    return [ways for group in alike if len(ways := {p.batching: p for p in group}) > 1]


def _refuse_jobs(points: Sequence[JobPoint], least: int, why: str, there: bool = True) -> None:
    """Raise Inconclusive if these jobs cannot be compared, or NotMeasured without jobs of this kind."""
    if len(points) < least:
        raise (Inconclusive if there else NotMeasured)(why)
    if invalid := next((point for point in points if not point.valid), None):
        raise Inconclusive("; ".join(invalid.problems) or "a job has no valid repeat")
    if not point_differences(points).known:
        raise Inconclusive("noise unknown: one repeat of each job; --slm-repeats 2")


def of_arrivals(claim: Claim, curve: Curve) -> Evidence:
    """Return the effect of arrivals, or of the output length (arXiv:2404.03353, figure 2, right).

    - For each output length: requests/s over the lowest request rate (below 1 because of the last requests), or the
      mean E2E of a burst over that at the lowest rate.
    - In a burst, at the longest outputs over the shortest: requests/s, mean batch (which longer outputs reduce), or
      mean E2E ("a slight increase in latency").
    """
    grid = grid_of(curve.jobs)
    lowest = min((p.load.rate for p in grid), default=0.0)
    slowest = [p for p in grid if p.load.rate == lowest and not p.load.at_once]
    at_once = sorted((p for p in grid if p.load.at_once), key=attrgetter("output_tokens"))
    match claim.name:
        case "throughput-follows-arrivals":
            _refuse_jobs(slowest, 1, "no job at a rate was measured")
            served = point_differences(slowest, figure_named(claim.figure))

            def kept_up(several: int) -> list[Seen[Told]]:
                found: list[Seen[Told]] = []
                for place, p in enumerate(slowest):
                    came = p.rate or p.load.rate  # known without noise
                    seen = factor(served.mean(place, estimates.TAIL / several)).mapped(partial(mul, 1 / came))
                    found.append((seen, (claim.words.format("{}", of=p), slowest)))
                return found

            return Evidence(estimates=kept_up, qualifier=f"; least of {len(slowest)} lengths")
        case "all-at-once-waits-longer":
            pairs = [(p, q) for p in grid for q in slowest if p.load.at_once and p.workload.hash == q.workload.hash]
            used, both = [*chain.from_iterable(pairs)], bool(at_once) and bool(slowest)
            _refuse_jobs(used, 2, "no length was measured at a rate and all at once", both)
            rows = [Compared(p, q) for p, q in pairs]
            return of_ratios(claim, rows, used, grid, qualifier=f"; least of {len(pairs)} lengths")
    _refuse_jobs(at_once, 2, "jobs of two output lengths, all at once, are needed")
    if not all(map(figure_named(claim.figure, 0.0), at_once)):
        raise Inconclusive(f"no engine reported its {claim.figure}")
    return of_ratios(claim, [Compared(at_once[-1], at_once[0])], at_once, at_once)


def of_one_size(claim: Claim, curve: Curve, others: Others) -> Evidence:
    """Return throughput and mean E2E of a burst over those of the OPT of the model's size, for each common burst.

    The source is arXiv:2404.03353, figure 2, left.
    """

    def size(p: JobPoint) -> Hashable:
        return p.workload.spec.prompt_tokens, p.workload.spec.output_tokens, p.requests, p.environment.key

    [name], mine = claim.against.get(curve.subject, (curve.subject,)), jobs_of_size(curve.jobs)
    reference = grouped((job for c in others if c.subject == name for job in jobs_of_size(c.jobs)), size)
    pairs = [(p, q) for p in mine for q in reference.get(size(p), ())]
    used = [*chain.from_iterable(pairs)]
    _refuse_jobs(used, 2, f"no job was measured of both {curve.subject} and {name}", len(mine) > 1)
    figures = ((output_rate, f"serves {{}} what {name} does"), (e2e_s, f"takes {{}} as long as {name}"))
    rows = [
        Compared(p, q, {"does": does, "jobs": len(pairs)}, figure=figure) for p, q in pairs for figure, does in figures
    ]
    return of_ratios(claim, rows, used, used, qualifier=" either way")


def of_limits(claim: Claim, curve: Curve) -> Evidence:
    """Return a figure of a burst under a `max_num_seqs` over that under a smaller one.

    The figure is throughput over that at the previous limit (past `after`, or only at the largest limit), or the mean
    E2E at the largest limit over that at the first one past which throughput grows by less than the factor `little`.
    Limits that the KV cache keeps the batch from reaching do not count. arXiv:2404.03353, figure 1: "after a batch size
    of 128", and "at the cost of a considerable degradation in latency". Latency includes waiting.
    """
    limits = limits_of(curve.jobs)
    there = len({p.spec.max_num_seqs for p in limits}) > 1
    # The larger limit increased the mean batch, so the smaller one had limited it.
    steps = [(p, q) for p, q in pairwise(limits) if (q.batch or 0.0) >= FULL_BATCH * (p.batch or 0.0)]
    if "after" in claim.parameters:
        after = claim.parameters["after"]
        steps = [(p, q) for p, q in steps if p.spec.max_num_seqs >= after]
        there = there and after in {p.spec.max_num_seqs for p in limits[:-1]}
    elif "little" not in claim.parameters:
        steps = steps[-1:]
    used = list(dict.fromkeys(chain.from_iterable(steps)))
    _refuse_jobs(used, 2, "jobs under two limits that bound the batch are needed", there)
    if "little" in claim.parameters:
        rates, largest = [p.output_tokens_per_s or 0.0 for p in used], used[-1]
        first = next(p for p, rate in zip(used, rates) if max(rates) < claim.parameters["little"] * rate)
        if first is largest:
            raise Inconclusive(f"throughput still grows at max_num_seqs {first.spec.max_num_seqs}")
        steps = [(first, largest)]
    rows = [
        Compared(q, p, {"batch": q.batch or 0, "before": p.batch or 0, "preemptions": q.preemptions or 0})
        for p, q in steps
    ]
    return of_ratios(claim, rows, used, used)


def of_batching(claim: Claim, curve: Curve) -> Evidence:
    """Return throughput of a burst with continuous batching over that with each other mode.

    A second claim compares the mean E2E at a rate with dynamic batching (which waits for a time) and with static
    batching (which waits for a full batch).
    """
    ways = ways_of(curve.jobs)
    if claim.name == "dynamic-batching-answers-sooner":
        pairs = [(way["dynamic"], way["static"]) for way in ways if {"dynamic", "static"} <= way.keys()]
        pairs = [(p, q) for p, q in pairs if not p.load.at_once]
        used = [*chain.from_iterable(pairs)]
        _refuse_jobs(used, 2, "jobs at a rate by dynamic and by static batching are needed", False)
        return of_ratios(claim, [Compared(p, q) for p, q in pairs], used, used)
    bursts = [way for way in ways if CONTINUOUS in way and way[CONTINUOUS].load.at_once]
    at_once = [p for way in bursts for p in way.values()]
    _refuse_jobs(at_once, 2, "two ways to batch the same requests are needed", False)
    rows = []
    for way in bursts:
        mine = way.pop(CONTINUOUS)
        factors = {batching: ratio(mine, p, at_once).value for batching, p in way.items()}
        for batching, p in way.items():
            wasted = "" if p.waste is None else f", {percent(p.waste)} of whose work is wasted"
            rest = ", ".join(f"{other}: {value:.3g}" for other, value in factors.items() if other != batching)
            rows.append(Compared(mine, p, {"wasted": wasted, "rest": f" ({rest})" if rest else ""}))
    return of_ratios(claim, rows, at_once, at_once)


def adapted_jobs(jobs: Sequence[JobPoint]) -> list[JobPoint]:
    """Return the jobs that differ only in adapters and their slots, with the most variants."""

    def alike(p: JobPoint) -> Hashable:
        plain = replace(p.spec.without(*OF_ADAPTERS), kv_cache_bytes=GIB).key  # its size depends on the slots
        return repr(p.load), replace(p.workload.spec, adapters=None), p.environment.key, plain

    served = [p for p in jobs if p.batching == CONTINUOUS]
    return most_varied(grouped(served, alike).values(), lambda p: (p.workload.spec.adapters, p.slots))


def of_adapters(claim: Claim, curve: Curve) -> Evidence:
    """Return the throughput of a job with adapters over that of a simpler job.

    The simpler job has no adapters, the fewest adapters on the same number of slots, the lowest rank, or a slot for
    each.
    """
    jobs = adapted_jobs(curve.jobs)
    alone = [p for p in jobs if not p.workload.spec.adapters]
    adapted = [(p, a) for p in jobs if (a := p.workload.spec.adapters)]
    whole = [(p, a) for p, a in adapted if p.slots >= a.count]
    pairs: list[tuple[JobPoint, JobPoint]] = []
    match claim.name:
        case "adapters-cost-throughput":
            pairs = [(p, q) for p, _ in whole for q in alone]
        case "more-adapters-serve-less":
            by_slots = grouped(whole, lambda each: (each[0].slots, each[1].rank, each[1].traffic)).values()
            ordered = [[p for p, _ in sorted(group, key=lambda each: each[1].count)] for group in by_slots]
            pairs = [(group[-1], group[0]) for group in ordered if len(group) > 1]
        case "a-higher-rank-serves-less":
            by_count = grouped(whole, lambda each: (each[0].slots, each[1].count, each[1].traffic)).values()
            ordered = [[p for p, _ in sorted(group, key=lambda each: each[1].rank)] for group in by_count]
            pairs = [(group[-1], group[0]) for group in ordered if len(group) > 1]
        case _:
            pairs = [(p, q) for p, a in adapted for q, b in whole if p.slots < a.count and a == b]
    used = [*dict.fromkeys(chain.from_iterable(pairs))]
    _refuse_jobs(used, 2, "two jobs that differ in their adapters or slots are needed", bool(adapted))
    rows = [Compared(p, q, {"jobs": f"{len(pairs)} jobs" if len(pairs) > 1 else "one job"}) for p, q in pairs]
    return of_ratios(claim, rows, used, used)


def throughput_grows_with_kv_blocks(curve: Curve, threshold: float, flat: float) -> Verdict:
    """Return the verdict on whether throughput grows with the KV blocks until all requests fit, and no further.

    It passes if the first cache that holds all requests reaches more than `threshold` times the throughput of the
    smallest, if each larger one reaches less than `flat` times that of the previous one, and if none of these preempts.
    """
    claim, points = "throughput-grows-with-kv-blocks", sorted(caches_of(curve.jobs), key=attrgetter("kv_blocks"))
    fitting = [p for p in points if p.fits]
    several = len({p.kv_blocks for p in points}) > 1
    _refuse_jobs(points if several else [], 2, "jobs on engines with two sizes of a KV cache are needed", False)
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
            lambda n: [(ratio(q, p, points, several=n), q) for p, q in pairwise(fitting)], most=flat
        )
        states.append(state)
        why += f"; {larger.kv_blocks:,} blocks serve {times(grown)} as much (threshold {flat:g})"
    if preempted:
        why += f"; {preempted[0].kv_blocks:,} blocks, though they hold all, preempt"
    return Verdict.from_interval(claim, curve.subject, all_of(states), why, seen, threshold, *points)


def of_replicas(claim: Claim, curve: Curve) -> Evidence:
    """Return the best throughput of replicas over that of one engine, or another figure of them under the same load.

    The intervals are corrected for choosing the best. The mean E2E is that of the slowest replica, percentiles are over
    all requests. arXiv:2404.03353: throughput and latency improve (figure 5; no figure has tails), "considerable
    increase" of utilization (6), more power with OPT-125M and OPT-1.3B, constant with OPT-2.7B (7). arXiv:2503.08311,
    raw results, OPT-1.3B: 1.337 against an engine without chunked prefill, 1.236 against one with it.
    """
    sharing = claim.parameters["sharing"]
    pairs, shared = compared(curve, sharing), [s for s in curve.shared if s.sharing == sharing]
    if not pairs:
        if not shared:
            raise NotMeasured(f"no replicas were measured {HOW[sharing]}")
        if invalid := next((s for s in shared if not s.valid), None):
            why = "; ".join(invalid.problems) or "not measured"
            raise Inconclusive(f"{invalid.count} replicas have no valid repeat ({why})")
        loads = sorted({s.concurrency for s in shared})
        where = " on their host" if any(map(curve.one_engine, loads)) else ""
        raise Inconclusive(f"one engine alone was not measured at concurrency {', '.join(map(str, loads))}{where}")
    if claim.figure:
        best, alone = max(pairs, key=lambda pair: ratio(*pair).value)
        seen = figure_ratio(alone, best, claim.figure, len(pairs))
        if seen is None:
            raise Inconclusive(f"{claim.words.partition(' of {of.count}')[0]} is not known of both")
        told = claim.words.format("{}", of=best), [alone, best]
        return Evidence(estimates=lambda several: [(seen, told)])
    best = max((replicas for replicas, _ in pairs), key=lambda point: fmean(point.repeats))
    single = [*valid_points(curve.alone), *curve.valid]
    engines = [here for point in single if (here := point.on_hosts_of(best))]
    alone = max(engines, key=lambda point: fmean(point.repeats))
    others = ", ".join(
        f"{p.count}{'' if p.concurrency == best.concurrency else f' at {p.concurrency}'}: {ratio(p, alone).value:.3g}"
        for p, _ in pairs
        if p is not best and alone.on_hosts_of(p)
    )
    rest = "" if alone.concurrency == best.concurrency else f", and one engine serves most at {alone.concurrency}"
    rest += f" ({others})" if others else ""
    if latency := figure_ratio(alone, best, "largest_e2e_s"):
        rest += f"; their largest mean E2E is {percent(latency.value)} of its mean"
    # Choosing the best of a side errs in one direction only, so each end is corrected for one choice.
    return of_ratios(claim, [Compared(best, alone, {"rest": rest})], several=max(len(pairs), len(engines)))


def of_gpus(claim: Claim, curve: Curve) -> Evidence:
    """Return throughput on several GPUs over that on others (arXiv:2404.03353, figure 1).

    - An engine over the one on the fewest GPUs, under the largest load that fits both: per GPU, or in total on the most
      GPUs.
    - An engine on `more` GPUs over one on `fewer`, each under its best load, because memory counts: "due to memory
      requirements".
    - Replicas with a GPU each over one engine on the same number of GPUs, under their largest common load.
    """
    found, rest, several = deployments(curve), "", 1
    engines = one_engine_each(found)
    pairs: list[tuple[Deployment, Deployment]] = []  # each with the deployment with which it is compared
    degrees, there = {c.spec.tensor_parallel_size for c in (curve, *curve.wider) if c.spec}, bool(curve.wider)
    match claim.name:
        case "tensor-parallel-still-gains":
            fewer, more = claim.parameters["fewer"], claim.parameters["more"]
            why = f"no engine was measured on {fewer} and on {more} GPUs"
            there = there and degrees >= {fewer, more}
            if engines.get(fewer) and engines.get(more):
                to, of = (max(engines[gpus].values(), key=attrgetter("tokens_per_s")) for gpus in (fewer, more))
                pairs, several = [(of, to)], len(engines[fewer]) * len(engines[more])
                if to.room is not None and of.room is not None:
                    rest = f"; {of.room} requests fit at once on the more GPUs, {to.room} on the fewer"
        case "replicas-per-gpu-beat-tensor-parallel":
            why = "replicas with a GPU each and an engine over as many GPUs were not both measured under one load"
            there = there and any(one.sharing == "gpus" for one in curve.shared)
            sets = (one for one in found if one.sharing == "gpus" and one.tensor_parallel_size < one.gpus)
            both = [(one, single) for one in sets if (single := engines.get(one.gpus, {}).get(one.concurrency))]
            if both:
                of, to = max(both, key=lambda pair: (pair[1].gpus, pair[1].concurrency))
                pairs, alone = [(of, to)], engines.get(of.tensor_parallel_size, {}).get(to.concurrency)
                if alone and not alone.fits:
                    rest = f", of which one GPU runs {alone.room} at once: "
                    rest += "there an engine over several gains memory, not speed alone"
        case _:
            why = "no engine was measured on two numbers of GPUs under a load that fits"
            (_, fewest), *others = sorted(engines.items()) or [(0, {})]
            for _, its in others:
                if loads := [load for load in fewest.keys() & its.keys() if fewest[load].fits and its[load].fits]:
                    pairs.append((its[max(loads)], fewest[max(loads)]))
            if pairs and claim.name == "tensor-parallel-serves-less-in-all":
                pairs = [max(pairs, key=lambda pair: pair[0].gpus)]
    if not pairs:
        raise (Inconclusive if there else NotMeasured)(why)
    per_gpu, rows = claim.name == "tensor-parallel-loses-per-gpu", []
    for of, to in pairs:
        scale = to.gpus / of.gpus if per_gpu else 1.0
        rows.append(Compared(of.served, to.served, {"of": of, "to": to, "rest": rest}, scale))
    return of_ratios(claim, rows, several=several)


class HitRate(NamedTuple):
    """A point, and the mean share of its prompt tokens that came from the prefix cache."""

    rate: float
    point: Point


def hit_rates(curve: Curve) -> dict[int, list[HitRate]]:
    """Return the valid points of a curve and its `warmer` curves, by load and hit rate, for loads with several."""
    found: dict[int, list[HitRate]] = {}
    for point in chain.from_iterable(each.valid for each in (curve, *curve.warmer)):
        shares = [cached.share for (m, *_) in point.used if (cached := cache_hit_share(m.run))]
        if shares:
            found.setdefault(point.concurrency, []).append(HitRate(fmean(shares), point))
    several = {load: sorted(each, key=attrgetter("rate")) for load, each in found.items() if len(each) > 1}
    return dict(sorted(several.items()))


def of_hit_rates(claim: Claim, curve: Curve) -> Evidence:
    """Return a figure at each hit rate over that at the next lower one, under the largest load with several."""
    if not curve.warmer:
        raise NotMeasured("requests were not measured with several shares of their prompts in common, or cached or not")
    found = hit_rates(curve)
    rates = found[max(found)] if found else []
    points = [each.point for each in rates]
    _refuse_compared((curve, *curve.warmer), points, "no load was measured at two hit rates")
    steps = [(to, of, {"hit": percent(of.rate), "before": percent(to.rate)}) for to, of in pairwise(rates)]
    rows = [Compared(of.point, to.point, told) for to, of, told in steps]
    return of_ratios(claim, rows, points, points, qualifier=f"; of {len(rows)} steps the one that decides")


def structured_pairs(curve: Curve) -> list[tuple[Point, Point]]:
    """Return the valid points of structured output, each with free text under the same load."""
    return at_common_loads([p for each in curve.structured for p in each.valid], curve.valid)[0]


def of_formats(claim: Claim, curve: Curve) -> Evidence:
    """Return a figure of structured output over that of free text, under each common load."""
    if not curve.structured:
        raise NotMeasured("requests were not measured with structured output and with free text")
    pairs = structured_pairs(curve)
    points = [*dict.fromkeys(chain.from_iterable(pairs))]
    _refuse_compared((curve, *curve.structured), points, "no load was measured with both")
    rows = [Compared(p, q, {"output": p.used[0][0].workload.spec.output}) for p, q in pairs]
    return of_ratios(claim, rows, points, points, qualifier=f"; of {len(rows)} loads the one that decides")


def _refuse_compared(curves: Sequence[Curve], points: Sequence[Point], otherwise: str) -> None:
    """Raise Inconclusive if a point of the curves is invalid, if there are no points, or if none has repeats."""
    invalid = next((p for each in curves for p in each.points if not p.valid), None)
    if invalid or not points:
        why = "; ".join(invalid.problems) if invalid else otherwise
        raise Inconclusive(why or "a point has no valid repeat")
    if all(len(point.repeats) < 2 for point in points):
        raise Inconclusive("noise unknown: one repeat of each point; --slm-repeats 2")


def of_speculation(claim: Claim, curve: Curve) -> Evidence | Verdict:
    """Return throughput with speculation over that without at the smallest load, or the verdict on their crossing."""
    if curve.plain is None:
        raise NotMeasured("no engine was measured with and without speculation")
    found, made_up = curve.speedups, made_up_acceptance(curve.spec) if curve.spec else None
    up_to, remark = found[0][0].concurrency if found and claim.compares else math.inf, f"; {made_up}" if made_up else ""
    reasons = (obstacle(each, lambda load: load <= up_to) for each in (curve.plain, curve))
    if reason := next(filter(None, reasons), None if found else "no load was measured with and without speculation"):
        raise Inconclusive(reason)
    if not claim.compares:
        state, judged, why = break_even({of.concurrency: ratio for of, _, ratio in found})
        used = [point for of, to, _ in found for point in (to, of)]
        return Verdict.from_interval(claim.name, curve.subject, state, f"{why}{remark}", judged, None, *used)
    of, to, smallest = found[0]
    accepted = "" if of.acceptance_length is None else f" and an acceptance of {of.acceptance_length:.3g}"
    told = claim.words.format("{}", of=of, accepted=accepted), [to, of]
    return Evidence(estimates=lambda several: [(smallest, told)], remark=remark)


def break_even(ratios: Mapping[int, Interval]) -> tuple[State, Interval | None, str]:
    """Return the verdict on a load b* below which speculation gains and above which it costs, b* and the reason.

    It passes if the ratio is surely above 1 at the smallest load and below 1 at the largest. It fails if it is surely
    on one side at every load, or if speculation costs at a smaller load than one at which it gains.

    Args:
        ratios: throughput with speculation over that without, by load.
    """
    seen, ends = crossing(ratios), {load: estimates.ends(ratio) for load, ratio in ratios.items()}
    (low, high), first, last = estimates.ends(seen), min(ratios), max(ratios)
    costs = min((load for load, (_, most) in ends.items() if most < 1), default=last)
    gains = max((load for load, (least, _) in ends.items() if least > 1), default=first)
    told = [f"{times(ratios[load])} at {load}" for load in sorted({first, costs, gains, last})]
    why = f"throughput with speculation over without: {', '.join(told)}"
    if costs < gains:
        return State.FAILS, None, f"it costs at concurrency {costs}, and gains again at {gains}; {why}"
    if low == math.inf:
        return State.FAILS, None, f"it gains at every load up to {last}, so b* > {last}; {why}"
    if high == 0:
        return State.FAILS, None, f"it costs from the first load on, so b* < {first}; {why}"
    if low > 0 and high < math.inf:
        found = f"b* is {seen.value:.3g} concurrent requests (95%: {low:.3g} to {high:.3g})"
        return State.PASSES, seen, f"{found}; {why}"
    unknown = [f"gains at {first}"] * (low == 0) + [f"costs at {last}"] * (high == math.inf)
    return State.INCONCLUSIVE, None, f"noise leaves open whether it {' and '.join(unknown)}; {why}"
