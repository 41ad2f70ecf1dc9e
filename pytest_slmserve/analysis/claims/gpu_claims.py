"""Evidence from the sensors of a sweep: the share of the GPU that a load uses, its bottleneck, the energy of a token.

Each estimate takes its noise from the repeats of all points, as those of throughput do (`gains`). Without a figure that
it needs, a function returns the reason why nothing can be said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from pytest_slmserve.analysis.claims.claim import NEXT_SMALLER, PUBLISHED, Evidence, Others
from pytest_slmserve.analysis.metrics.roofline import REACHABLE_DRAM
from pytest_slmserve.analysis.points import Figure, Point, figure_named, ratio
from pytest_slmserve.analysis.stats.estimates import (
    Interval,
    ends,
    factor,
    percent,
    percent_interval,
    possible,
    quantile,
    times,
)
from pytest_slmserve.analysis.stats.noise import TAIL, launch_means
from pytest_slmserve.analysis.sweep.curve import Curve, obstacle, sparsely
from pytest_slmserve.analysis.verdict import Seen, State, Verdict, above, below, unsure

SMALL = ("opt-1.3b", "opt-2.7b")  # of figure 4
NO_PROFILE = "no sensor gave the profiling counters (SM, tensor and DRAM activity)"
NO_ENERGY = "no sensor gave power or energy"
NO_UTIL = "no sensor gave GPU utilisation"
NO_DECODING = "no reading of the sensors fell between prompts (many do after a burst ramp-up)"
IDLE_TENSOR = "the tensor cores did not run at any load"


# What reads 0 of a GPU that serves was not measured.
UTILIZATION, ENERGY, POWER = (figure_named(name, 0.0) for name in ("gpu_util", "energy_per_token_j", "power_w"))


def at_the_largest_load(kind: str, curve: Curve) -> Evidence | str:
    """Return a mean at the largest load: of the share of warps that are resident, or of what DRAM can reach while the
    engine decodes.

    The threshold of the warps is what a kernel that saturates the GPU has: a smaller share tells of free capacity, a
    larger one of nothing (arXiv:2404.03353, figure 3; arXiv:2503.08311, figures 5 and 6). That DRAM saturates tells
    three cases apart: it passes with `decode-stays-memory-bound` if decoding is bound by memory, that claim fails if it
    is bound by arithmetic, and this one alone fails if neither is near its end (arXiv:2503.08311).
    """
    if reason := obstacle(curve):
        return reason
    largest, occupancy, dram = curve.valid[-1], figure_named("sm_occupancy"), figure_named("decode_dram")
    if kind == "occupancy-below-a-saturated-kernel":
        if not occupancy(largest):
            return NO_PROFILE
        seen = possible(_around(largest, curve.valid, occupancy), most=1.0)
        active = "" if largest.sm_active is None else f", {percent(largest.sm_active)} of the SMs had work"
        sentence = f"at {largest.concurrency} in flight {{}} of the warps that fit were resident{active}"
    else:
        if reason := _unseen(NO_DECODING, {p.concurrency: dram(p) for p in curve.valid}):
            return reason
        seen = possible(_around(largest, curve.valid, dram).mapped(lambda share: share / REACHABLE_DRAM))
        sentence = f"at {largest.concurrency} in flight DRAM is active for {{}} of what it can reach"
        sentence += f", tensor cores {_known_percent(largest.decode_tensor)}"
    return Evidence(estimates=lambda several: [(seen, sentence)], points=[largest], in_percent=True)


def at_every_load(kind: str, curve: Curve) -> Evidence | str:
    """Return a share at every load: of the SMs that have work, or of the time without a kernel.

    arXiv:2404.03353: "average SM activity remains low" (figure 3), and CPU overheads take up to 50 % of the latency.
    """
    points, of_sms = curve.valid, kind == "sm-activity-stays-low"
    counter = figure_named("sm_active" if of_sms else "engine_active")
    words = "of the SMs have work" if of_sms else "of the time no kernel runs"

    def share(point: Point) -> list[float]:
        return [active if of_sms else 1 - active for active in counter(point)]

    if reason := obstacle(curve) or _unseen(NO_PROFILE, {p.concurrency: share(p) for p in points}):
        return reason

    def shares(several: int) -> list[Seen[str]]:
        each = ((possible(_around(p, points, share, several), most=1.0), p.concurrency) for p in points)
        return [(seen, f"{{}} {words} at {load} in flight, the most of any load") for seen, load in each]

    sparse = bool(curve.unneeded)
    return Evidence(estimates=shares, points=points, in_percent=True, remark=sparsely(curve), sparse=sparse)


def memory_over_tensor_cores(curve: Curve) -> Evidence | str:
    """Return how many times nearer memory is to what it can reach than the tensor cores are, at every load at which
    these ran. Counters are read while the engine decodes and processes no prompt.

    arXiv:2503.08311: decode stays memory-bound at large batches; by shapes, grouped keys at a short context need not
    (`roofline.Work.intensity`).
    """
    gap, tensor, decoding = map(figure_named, ("saturation_gap", "tensor_active", "decode_tensor"))
    unseen = _unseen(NO_PROFILE, {p.concurrency: tensor(p) if p.dram_active else [] for p in curve.valid})
    unseen = unseen or _unseen(NO_DECODING, {p.concurrency: decoding(p) if p.decode_dram else [] for p in curve.valid})
    points = [p for p in curve.valid if gap(p)]
    if reason := obstacle(curve) or unseen or ("" if points else IDLE_TENSOR):
        return reason

    def nearer(several: int) -> list[Seen[str]]:
        found = []
        for p in points:
            shares = f"DRAM active {_known_percent(p.decode_dram)}, tensor cores {_known_percent(p.decode_tensor)}"
            sentence = f"least at {p.concurrency} in flight: {shares}, so memory is {{}} as near to its reach"
            found.append((factor(_around(p, points, gap, several)), sentence))
        return found

    return Evidence(estimates=nearer, points=points, remark=sparsely(curve))


def largest_over_smallest_load(kind: str, curve: Curve) -> Evidence | str:
    """Return a figure at the largest load over that at the smallest: GPU utilization, or the energy of a token.

    arXiv:2404.03353, figure 8: utilization "remains constant", and decreases with large batches, while throughput
    grows. arXiv:2503.08311, raw results, OPT-1.3B: 0.67 J at batch 1, 0.031 J at 256.
    """
    of_energy = kind == "energy-per-token-falls-with-load"
    what, missing = (ENERGY, NO_ENERGY) if of_energy else (UTILIZATION, NO_UTIL)
    if reason := obstacle(curve):
        return reason
    first, last = curve.valid[0], curve.valid[-1]
    needed = (first, last) if of_energy else curve.valid
    if reason := _unseen(missing, {p.concurrency: what(p) for p in needed}):
        return reason
    if of_energy and (reason := _other_limits([first, last])):
        return reason
    sentence = f"utilisation at {last.concurrency} in flight is {{}} that at {first.concurrency}"
    if of_energy:
        sentence = f"{_joules(first)}, {_joules(last)}: {{}} as much"
    return Evidence.of_ratios([(last, first, sentence)], [first, last], what, [p for p in curve.valid if what(p)])


def larger_over_smaller_model(kind: str, curve: Curve, others: Others) -> Evidence | str:
    """Return a figure of a model over that of a smaller one, each at its largest batch of the paper's table 1.

    It is the energy of a token over that of the next smaller model, or the power over the larger one of OPT-1.3B and
    OPT-2.7B (arXiv:2404.03353, figure 4, which has watts only: "considerably lower").
    """
    own, smaller = at_table_1(curve), NEXT_SMALLER.get(curve.subject)
    alike = [c for c in others if _facts(c) == _facts(curve)]
    if kind == "energy-per-token-grows-with-model":
        if smaller is None:
            return "no smaller model in table 1"
        its = next((p for c in alike if c.subject == smaller and (p := at_table_1(c))), None)
        if own is None or its is None:
            missing = curve.subject if own is None else smaller
            return f"no energy of {missing} at {PUBLISHED[missing]} in flight"
        sentence = f"{_joules(own)}, {smaller} {_joules(its)}: {{}} as much"
        return _other_limits([own, its]) or Evidence.of_ratios([(own, its, sentence)], [own, its], ENERGY)
    small = [p for c in alike if c.subject in SMALL and (p := at_table_1(c)) and POWER(p)]
    if own is None or not POWER(own) or not small:
        return "no power of OPT-1.3B or OPT-2.7B at its batch of table 1" if own else f"no power of {curve.subject}"
    its = max(small, key=lambda point: fmean(POWER(point)))
    sentence = f"{fmean(POWER(own)):.0f} W, the smaller {fmean(POWER(its)):.0f} W: {{}} as much"
    several = len(small)
    return _other_limits([own, *small]) or Evidence.of_ratios([(own, its, sentence)], [own, its], POWER, (), several)


def util_saturates_first(curve: Curve, threshold: float, full: float) -> Verdict:
    """Return the verdict on whether throughput still grows by `threshold` (a factor) after GPU utilization has reached
    `full`.

    value: largest throughput over that at the first load of full utilization, 1 if that is the largest. What fails at
    the loads of an adaptive sweep need not fail: a load that it left out may have reached full utilization first.
    arXiv:2404.03353, figure 8: GPU utilization tells that some kernel ran, not how much of the GPU it used.
    """
    claim, points = "gpu-util-saturates-first", curve.valid
    if reason := obstacle(curve) or _unseen(NO_UTIL, {p.concurrency: UTILIZATION(p) for p in points}):
        return Verdict.inconclusive(claim, curve.subject, reason, threshold)

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
    earliest = next(p for p in points if ends(_around(p, points, UTILIZATION))[1] >= full)
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


def _unseen(what: str, seen: Mapping[int, Sequence[float]]) -> str:
    """Return the reason `what` if sensors lack a figure, with the loads that lack it if others have it; "" if all have
    it. seen: values by load."""
    without = [concurrency for concurrency, values in seen.items() if not values]
    if not without:
        return ""
    return what if len(without) == len(seen) else f"{what} at {', '.join(map(str, without))} in flight"


def _other_limits(points: Sequence[Point]) -> str:
    """Return the reason why energies under different power limits cannot be compared; "" for one limit at most."""
    limits = sorted({limit for p in points for limit in figure_named("power_limit_w")(p)})
    return f"measured under power limits of {limits[0]:g} W and {limits[-1]:g} W" if len(limits) > 1 else ""


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
            means = launch_means(zip(launches, values))
            values = [centre + math.sqrt(len(values) / len(means)) * (mean - centre) for mean in means]
        squares += math.fsum((v - fmean(values)) ** 2 for v in values)
        df += len(values) - 1
    values = what(point)
    centre = fmean(values)
    if not df:
        return Interval(centre)
    half = quantile(1 - TAIL / several, df) * math.sqrt(squares / df) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half)


def _known_percent(value: float | None) -> str:
    return "not known" if value is None else percent(value)


def _joules(point: Point) -> str:
    return f"{fmean(ENERGY(point)):.3g} J a token at {point.concurrency} in flight"
