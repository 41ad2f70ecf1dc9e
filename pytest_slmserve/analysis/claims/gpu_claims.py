"""Verdicts on a sweep from sensor figures: the share of the GPU that a load uses, its bottleneck, the energy of a
token.

Each judgement takes its noise from the repeats of all points, as those of throughput do (`gains`). It is inconclusive
where the sensors lack a figure that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.claims.claim import NEXT_SMALLER, PUBLISHED
from pytest_slmserve.analysis.metrics.roofline import REACHABLE_DRAM
from pytest_slmserve.analysis.points import Figure, Point, ratio
from pytest_slmserve.analysis.stats.estimates import (
    Interval,
    ends,
    factor,
    percent,
    percent_interval,
    pooled_sd,
    possible,
    quantile,
    times,
)
from pytest_slmserve.analysis.stats.noise import TAIL, launch_means
from pytest_slmserve.analysis.sweep.curve import Curve, obstacle, sparsely
from pytest_slmserve.analysis.verdict import State, Verdict, above, below, every, unsure

FEW_WARPS, BLIND_UTIL = "occupancy-below-a-saturated-kernel", "gpu-util-saturates-first"
SM_ACTIVITY, HOST_SHARE = "sm-activity-stays-low", "host-takes-at-most-half"
UTIL_FALLS = "gpu-util-falls-at-the-largest-load"
MEMORY_BOUND, SATURATED = "decode-stays-memory-bound", "decode-saturates-dram"
LESS_POWER = "larger-models-draw-more-power"
CHEAPER_TOKENS, DEARER_MODELS = "energy-per-token-falls-with-load", "energy-per-token-grows-with-model"
SMALL = ("opt-1.3b", "opt-2.7b")  # of figure 4
NO_PROFILE = "no sensor gave the profiling counters (SM, tensor and DRAM activity)"
NO_ENERGY = "no sensor gave power or energy"
NO_UTIL = "no sensor gave GPU utilisation"
NO_DECODING = "no reading of the sensors fell between prompts (many do after a burst ramp-up)"
IDLE_TENSOR = "the tensor cores did not run at any load"


def values_of(point: Point, name: str) -> list[float]:
    """Measured values of one figure in the repeats of a point; what is no finite number counts as not measured."""
    return [value for s in point.each if (value := getattr(s, name)) is not None and math.isfinite(value)]


def _above_0(name: str) -> Callable[[Any], list[float]]:
    """Values of a figure as `each_of` has them. What reads 0 of a GPU that serves was not measured."""
    return lambda point: [value for value in values_of(point, name) if value > 0]


energies_j, powers_w, utilisations = map(_above_0, ("energy_per_token_j", "power_w", "gpu_util"))


# Of each claim on a share that no load exceeds: words, and the share in each repeat. arXiv:2404.03353: "average SM
# activity remains low" (figure 3), and CPU overheads take up to 50 % of the latency.
NEVER_ABOVE: dict[str, tuple[str, Callable[[Point], list[float]]]] = {
    SM_ACTIVITY: ("of the SMs have work", lambda point: values_of(point, "sm_active")),
    HOST_SHARE: ("of the time no kernel runs", lambda point: [1 - busy for busy in values_of(point, "engine_active")]),
}


def few_warps(curve: Curve, bound: float) -> Verdict:
    """Are at the largest load less than `bound` of the warps that fit resident, in the mean? The bound is what a kernel
    that saturates the GPU has: a smaller share tells of free capacity, a larger one of nothing.

    value: mean SM occupancy there. arXiv:2404.03353, figure 3; arXiv:2503.08311, figures 5 and 6.
    """
    if reason := obstacle(curve):
        return Verdict.inconclusive(FEW_WARPS, curve.subject, reason, bound)
    largest = curve.valid[-1]
    if not values_of(largest, "sm_occupancy"):
        return Verdict.inconclusive(FEW_WARPS, curve.subject, NO_PROFILE, bound)
    seen = possible(_around(largest, curve.valid, lambda p: values_of(p, "sm_occupancy")), most=1.0)
    active = "" if largest.sm_active is None else f", {percent(largest.sm_active)} of the SMs had work"
    why = f"at {largest.concurrency} in flight {percent_interval(seen)} of the warps that fit were resident{active}"
    why += f" (bound {percent(bound)}){unsure(seen)}"
    return Verdict.from_interval(FEW_WARPS, curve.subject, below(seen, bound), why, seen, bound, largest)


def util_saturates_first(curve: Curve, bound: float, full: float) -> Verdict:
    """Does throughput still grow by `bound` (a factor) after GPU utilisation has reached `full`?

    value: largest throughput over that at the first load of full utilisation. arXiv:2404.03353, figure 8: 203 tells
    that some kernel ran, not how much of the GPU it used.
    """
    points = curve.valid
    utils = {p.concurrency: utilisations(p) for p in points}
    if reason := obstacle(curve) or _unseen(NO_UTIL, utils):
        return Verdict.inconclusive(BLIND_UTIL, curve.subject, reason, bound)
    first = next((p for p in points if fmean(utils[p.concurrency]) >= full), None)
    if first is None:
        fullest = max(points, key=lambda p: fmean(utils[p.concurrency]))
        most = possible(_around(fullest, points, utilisations), most=1.0)
        why = f"GPU utilisation stays below {percent(full)}: {percent_interval(most)} at most"
        surely = State.FAILS if below(most, full) is State.PASSES else State.INCONCLUSIVE
        state, why = _unless_between(curve, surely), why + sparsely(curve)
        return Verdict.from_interval(BLIND_UTIL, curve.subject, state, why, None, bound, *points)
    seen, best = _grown(first, points)
    state, doubt = above(seen, bound), ""
    earliest = next(p for p in points if ends(_around(p, points, utilisations))[1] >= full)
    if state is State.FAILS and above(_grown(earliest, points)[0], bound) is not state:
        doubt = f"; noise leaves open whether {percent(full)} are reached at {earliest.concurrency}"
        state = State.INCONCLUSIVE
    why = (
        f"utilisation is {percent(fmean(utils[first.concurrency]))} at {first.concurrency} in flight already, where "
        f"{best.concurrency} in flight serve {times(seen)} as much (bound {bound:g}){doubt}"
        f"{sparsely(curve)}{unsure(seen)}"
    )
    state = _unless_between(curve, state)
    return Verdict.from_interval(BLIND_UTIL, curve.subject, state, why, seen, bound, first, best)


def _grown(first: Point, points: Sequence[Point]) -> tuple[Interval, Point]:
    """Most throughput at a larger load over that at `first`, 1 at the largest, and its load."""
    later = points[points.index(first) + 1 :] or [first]
    best = max(later, key=lambda p: fmean(p.repeats))
    return ratio(best, first, points, several=len(later)), best


def never_above(claim: str, curve: Curve, bound: float) -> Verdict:
    """Is a share of `NEVER_ABOVE` below `bound`, at every load? value: the largest of any load."""
    words, share = NEVER_ABOVE[claim]
    points = curve.valid
    if reason := obstacle(curve) or _unseen(NO_PROFILE, {p.concurrency: share(p) for p in points}):
        return Verdict.inconclusive(claim, curve.subject, reason, bound)

    def means(several: int) -> list[tuple[Interval, int]]:
        return [(possible(_around(p, points, share, several), most=1.0), p.concurrency) for p in points]

    state, seen, load = every(below, bound, means)
    why = f"{percent_interval(seen)} {words} at {load} in flight, the most of any load (bound {percent(bound)})"
    state = State.INCONCLUSIVE if curve.unneeded and state is State.PASSES else state
    why += f"{sparsely(curve)}{unsure(seen)}"
    return Verdict.from_interval(claim, curve.subject, state, why, seen, bound, *curve.valid)


def util_falls(curve: Curve, bound: float) -> Verdict:
    """Is GPU utilisation at the largest load below `bound` times what it is at the smallest? arXiv:2404.03353, figure
    8: utilisation "remains constant", and decreases with large batches, while throughput grows."""
    utils = {p.concurrency: utilisations(p) for p in curve.valid}
    if reason := obstacle(curve) or _unseen(NO_UTIL, utils):
        return Verdict.inconclusive(UTIL_FALLS, curve.subject, reason, bound)
    first, last = curve.valid[0], curve.valid[-1]
    seen = ratio(last, first, curve.valid, utilisations)
    why = (
        f"utilisation at {last.concurrency} in flight is {times(seen)} that at {first.concurrency} "
        f"(bound {bound:g}){unsure(seen)}"
    )
    return Verdict.from_interval(UTIL_FALLS, curve.subject, below(seen, bound), why, seen, bound, first, last)


def _unless_between(curve: Curve, state: State) -> State:
    """A load that an adaptive sweep left out may have reached full utilisation first, and from there throughput grows
    by more: what holds at the loads measured holds, what fails there need not."""
    return State.INCONCLUSIVE if curve.unneeded and state is State.FAILS else state


def memory_bound(curve: Curve, margin: float) -> Verdict:
    """Verdict on whether memory is nearer to what it can reach than the tensor cores are, at every load. Counters are
    read while the engine decodes and processes no prompt.

    value: how many times nearer, at the load that decides; the margin is a factor too. Where the tensor cores did
    not run at all there is no such number, and no doubt either. arXiv:2503.08311: decode stays memory-bound at large
    batches; by shapes, grouped keys at a short context need not (`roofline.regime`).
    """
    seen_at = {p.concurrency: values_of(p, "tensor_active") if p.dram_active else [] for p in curve.valid}
    decoding = {p.concurrency: values_of(p, "decode_tensor") if p.decode_dram else [] for p in curve.valid}
    points = [p for p in curve.valid if values_of(p, "saturation_gap")]
    unseen = _unseen(NO_PROFILE, seen_at) or _unseen(NO_DECODING, decoding)
    if reason := obstacle(curve) or unseen or ("" if points else IDLE_TENSOR):
        return Verdict.inconclusive(MEMORY_BOUND, curve.subject, reason, margin)

    def nearer(several: int) -> list[tuple[Interval, Point]]:
        return [(factor(_around(p, points, lambda q: values_of(q, "saturation_gap"), several)), p) for p in points]

    state, seen, least = every(above, margin, nearer)
    why = (
        f"least at {least.concurrency} in flight: DRAM active {_ratio(least.decode_dram)}, tensor cores "
        f"{_ratio(least.decode_tensor)}, so memory is {times(seen)} as near to its reach (bound {margin:g})"
        f"{sparsely(curve)}{unsure(seen)}"
    )
    return Verdict.from_interval(MEMORY_BOUND, curve.subject, state, why, seen, margin, *points)


def saturates_dram(curve: Curve, near: float) -> Verdict:
    """Is DRAM active for `near` of what it can reach while the engine decodes, at the largest load?

    value: the share of its reach. With `memory_bound` it tells three cases apart: both hold where decoding is bound by
    memory, `memory_bound` fails where it is bound by arithmetic, and this alone fails where neither is near its end.
    arXiv:2503.08311: DRAM bandwidth saturates.
    """
    decoding = {p.concurrency: values_of(p, "decode_dram") for p in curve.valid}
    if reason := obstacle(curve) or _unseen(NO_DECODING, decoding):
        return Verdict.inconclusive(SATURATED, curve.subject, reason, near)
    largest = curve.valid[-1]
    dram = _around(largest, curve.valid, lambda p: values_of(p, "decode_dram"))
    seen = possible(dram.mapped(lambda share: share / REACHABLE_DRAM))
    why = (
        f"at {largest.concurrency} in flight DRAM is active for {percent_interval(seen)} of what it can reach, tensor "
        f"cores {_ratio(largest.decode_tensor)} (bound {percent(near)}){unsure(seen)}"
    )
    return Verdict.from_interval(SATURATED, curve.subject, above(seen, near), why, seen, near, largest)


def cheaper_tokens(curve: Curve, bound: float) -> Verdict:
    """Does an output token at the largest load take at most `bound` of the energy of one at the smallest?

    value: the ratio. Published: 0.67 J at batch 1, 0.031 J at 256 (arXiv:2503.08311, raw results, OPT-1.3B).
    """
    if reason := obstacle(curve):
        return Verdict.inconclusive(CHEAPER_TOKENS, curve.subject, reason, bound)
    first, last = curve.valid[0], curve.valid[-1]
    ends = {p.concurrency: energies_j(p) for p in (first, last)}
    if reason := _unseen(NO_ENERGY, ends) or _other_limits([first, last]):
        return Verdict.inconclusive(CHEAPER_TOKENS, curve.subject, reason, bound)
    seen = ratio(last, first, [p for p in curve.valid if energies_j(p)], energies_j)
    why = f"{_joules(first)}, {_joules(last)}: {times(seen)} as much (bound {bound:g}){unsure(seen)}"
    return Verdict.from_interval(CHEAPER_TOKENS, curve.subject, below(seen, bound), why, seen, bound, first, last)


def dearer_models(curve: Curve, others: Iterable[Curve], bound: float) -> Verdict:
    """Verdict on whether a token takes `bound` times the energy (or more) of a token of the next smaller model. Each
    model runs at its largest batch of the paper's table 1. value: the ratio. Figure 4 of arXiv:2404.03353
    has watts instead."""
    smaller = NEXT_SMALLER.get(curve.subject)
    if smaller is None:
        return Verdict.inconclusive(DEARER_MODELS, curve.subject, "no smaller model in table 1", bound)
    alike = (at_table_1(c) for c in others if c.subject == smaller and _same_place(c, curve))
    own, its = at_table_1(curve), next((p for p in alike if p), None)
    if own is None or its is None:
        missing = curve.subject if own is None else smaller
        why = f"no energy of {missing} at {PUBLISHED[missing]} in flight"
        return Verdict.inconclusive(DEARER_MODELS, curve.subject, why, bound)
    if reason := _other_limits([own, its]):
        return Verdict.inconclusive(DEARER_MODELS, curve.subject, reason, bound)
    seen = ratio(own, its, what=energies_j)
    why = f"{_joules(own)}, {smaller} {_joules(its)}: {times(seen)} as much (bound {bound:g}){unsure(seen)}"
    return Verdict.from_interval(DEARER_MODELS, curve.subject, above(seen, bound), why, seen, bound, own, its)


def draws_more(curve: Curve, others: Iterable[Curve], bound: float) -> Verdict:
    """Does a larger model draw `bound` times the power of OPT-1.3B and OPT-2.7B (or more), each at its largest batch of
    the paper's table 1? value: the smaller of the two ratios. arXiv:2404.03353, figure 4: "considerably lower"."""
    own = at_table_1(curve)
    alike = [at_table_1(c) for c in others if c.subject in SMALL and _same_place(c, curve)]
    small = [point for point in alike if point and powers_w(point)]
    if own is None or not powers_w(own) or not small:
        why = "no power of OPT-1.3B or OPT-2.7B at its batch of table 1" if own else f"no power of {curve.subject}"
        return Verdict.inconclusive(LESS_POWER, curve.subject, why, bound)
    if reason := _other_limits([own, *small]):
        return Verdict.inconclusive(LESS_POWER, curve.subject, reason, bound)
    against = max(small, key=lambda point: fmean(powers_w(point)))
    seen = ratio(own, against, what=powers_w, several=len(small))
    watts = f"{fmean(powers_w(own)):.0f} W, the smaller {fmean(powers_w(against)):.0f} W"
    why = f"{watts}: {times(seen)} as much (bound {bound:g}){unsure(seen)}"
    return Verdict.from_interval(LESS_POWER, curve.subject, above(seen, bound), why, seen, bound, own, against)


def at_table_1(curve: Curve) -> Point | None:
    """The point at the model's largest batch of the paper's table 1, of one GPU, if its energy was measured."""
    if curve.spec and curve.spec.tensor_parallel_size > 1:
        return None
    wanted = PUBLISHED.get(curve.subject)
    return next((p for p in curve.valid if p.concurrency == wanted and energies_j(p)), None)


def _same_place(one: Curve, other: Curve) -> bool:
    """Two sweeps of one environment, workload and way of loading, by engines that differ in their model only."""

    def facts(curve: Curve) -> tuple[object, ...]:
        where, load, workload, spec = curve.environment, curve.load, curve.workload, curve.spec
        engine = spec and replace(spec, model="", kv_cache_bytes=0)  # what the weights leave
        return (where and where.key, load and load.ramp_up, workload and workload.hash, engine)

    return facts(one) == facts(other)


def _unseen(what: str, seen: Mapping[int, Sequence[float]]) -> str:
    """The reason `what` for a figure that sensors lack, with the loads that lack it if others have it. Empty where all
    have it. seen: values by load."""
    without = [concurrency for concurrency, values in seen.items() if not values]
    if not without:
        return ""
    return what if len(without) == len(seen) else f"{what} at {', '.join(map(str, without))} in flight"


def _other_limits(points: Sequence[Point]) -> str:
    """Reason why energies under different power limits cannot be compared; empty where there is one limit at most."""
    limits = sorted({limit for p in points for limit in values_of(p, "power_limit_w")})
    return f"measured under power limits of {limits[0]:g} W and {limits[-1]:g} W" if len(limits) > 1 else ""


def _around(point: Point, points: Sequence[Point], what: Figure, several: int = 1) -> Interval:
    """The mean of a point's figure with an interval from the spread within all points; absolute, not relative. Launches
    are what is repeated where several measured a point equally often. several: see `sweep_points.ratio`."""
    values, noise = what(point), pooled_sd([_by_launch(p, what) for p in points])
    centre = fmean(values)
    if noise.sd is None:
        return Interval(centre)
    half = quantile(1 - TAIL / several, noise.df) * noise.sd / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half)


def _by_launch(point: Point, what: Figure) -> Sequence[float]:
    """Values of a figure; means of launches, as far from the mean as single repeats would be, where these are told."""
    values, launches = what(point), [group[0].launch for group in point.used]
    if len(launches) != len(values) or not values:
        return values
    means, centre = launch_means(zip(launches, values)), fmean(values)
    return [centre + math.sqrt(len(values) / len(means)) * (mean - centre) for mean in means]


def _ratio(value: float | None) -> str:
    return "not known" if value is None else percent(value)


def _joules(point: Point) -> str:
    return f"{fmean(energies_j(point)):.3g} J a token at {point.concurrency} in flight"
