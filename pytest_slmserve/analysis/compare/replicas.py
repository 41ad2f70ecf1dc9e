"""Do replicas of a small model on one GPU pay? Judged against one engine alone, as many requests in flight in all.

The papers measured their gains against an engine without chunked prefill, which vLLM has by default today.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, figure_ratio
from pytest_slmserve.analysis.points.sweep_points import Point, on_hosts_of, ratio
from pytest_slmserve.analysis.stats.estimates import Interval, percent, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict, above, below, unsure, within
from pytest_slmserve.schema.literals import Sharing

PAY, TAIL, SOONER = "replicas-pay", "replicas-keep-the-tail", "replicas-answer-sooner"
USE_MORE, DRAW_MORE = "replicas-use-the-gpu-more", "replicas-draw-more-power"
KEEP_POWER = "replicas-keep-the-power"
HOW: dict[Sharing, str] = {
    "time-slicing": "by time slicing",
    "mps": "under MPS",
    "mig": "on MIG instances",
    "gpus": "with a GPU each",
    "urls": "at URLs of their own",
}
E2E = "largest_e2e_s"
# Of each claim on a figure of replicas over that of one engine: the figure in words, its name, and the judge. The mean
# E2E is that of the slowest replica, its percentile over the requests of all. arXiv:2404.03353: latency improves (fig.
# 5; no figure has tails), "considerable increase" of utilisation (6), more power with OPT-125M and OPT-1.3B, constant
# with OPT-2.7B (7).
COMPARED: dict[str, tuple[str, str, Callable[[Interval, float], State]]] = {
    TAIL: ("the 99th percentile of E2E", "e2e_p99_s", below),
    SOONER: ("the largest mean E2E", E2E, below),
    USE_MORE: ("GPU utilisation", "gpu_util", above),
    DRAW_MORE: ("power", "power_w", above),
    KEEP_POWER: ("power", "power_w", lambda seen, bound: within(seen, 1 / bound, bound)),
}
Pair = tuple[ReplicaPoint, Point]


def name_of(claim: str, sharing: Sharing) -> str:
    return f"{claim}-{sharing}"


def replicas_pay(curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Do some number of replicas serve more than `bound` times what one engine does, each under its best load?

    value: that gain in throughput, its interval corrected for both having been chosen. arXiv:2404.03353, figure 5;
    arXiv:2503.08311, raw results, OPT-1.3B: 1.337 against an engine without chunked prefill, 1.236 against one with it.
    """
    claim, pairs = name_of(PAY, sharing), compared(curve, sharing)
    if not pairs:
        return Verdict.undecided(claim, curve.subject, _nothing_to_compare(curve, sharing), bound)
    shared = max((pair[0] for pair in pairs), key=_served)
    engines = list(filter(None, (on_hosts_of(point, shared) for point in curve.of_one_engine)))
    alone = max(engines, key=_served)
    # The choice of each side errs in one direction only, so each end is corrected for one of them.
    seen = ratio(shared, alone, several=max(len(pairs), len(engines)))
    others = ", ".join(
        f"{p.count}{'' if p.concurrency == shared.concurrency else f' at {p.concurrency}'}: {ratio(p, alone).value:.3g}"
        for p, _ in pairs
        if p is not shared and on_hosts_of(alone, p)
    )
    load = "" if alone.concurrency == shared.concurrency else f", and one engine serves most at {alone.concurrency}"
    why = (
        f"{shared.count} replicas {HOW[sharing]} serve {times(seen)} what one engine does at {shared.concurrency} in "
        f"flight{load}{f' ({others})' if others else ''}{_latency(alone, shared)} (bound {bound:g})"
        f"{unsure(seen)}"
    )
    return Verdict.from_interval(claim, curve.subject, above(seen, bound), why, seen, bound, alone, shared)


def compared_with_one(claim: str, curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Verdict on a figure of `COMPARED` of the replicas that serve most, over that of one engine. value: the ratio, its
    interval corrected for the set having been chosen, for by Little's law most served is least waited for."""
    name, pairs, (what, figure, judge) = name_of(claim, sharing), compared(curve, sharing), COMPARED[claim]
    if not pairs:
        return Verdict.undecided(name, curve.subject, _nothing_to_compare(curve, sharing), bound)
    shared, alone = max(pairs, key=lambda pair: ratio(*pair).value)
    if (seen := figure_ratio(alone, shared, figure, len(pairs))) is None:
        return Verdict.undecided(name, curve.subject, f"{what} is not known of both", bound)
    why = (
        f"{what} of {shared.count} replicas {HOW[sharing]} is {times(seen)} that of one engine at "
        f"{shared.concurrency} in flight (bound {bound:g}){unsure(seen)}"
    )
    return Verdict.from_interval(name, curve.subject, judge(seen, bound), why, seen, bound, alone, shared)


def _served(point: Point | ReplicaPoint) -> float:
    return fmean(point.repeats)


def compared(curve: Curve, sharing: Sharing) -> list[Pair]:
    """Replicas, and one engine alone on their host under the same load in all; where both are valid."""
    valid = (shared for shared in curve.shared if shared.sharing == sharing and shared.valid)
    return [(shared, one) for shared in valid if (one := curve.one_engine(shared.concurrency, shared))]


def has_replicas(curve: Curve, sharing: Sharing) -> bool:
    return any(shared.sharing == sharing for shared in curve.shared)


def _latency(alone: Point, shared: ReplicaPoint) -> str:
    seen = figure_ratio(alone, shared, E2E)
    return "" if seen is None else f"; their largest mean E2E is {percent(seen.value)} of its mean"


def _nothing_to_compare(curve: Curve, sharing: Sharing) -> str:
    """Reason why there is no pair of replicas and one engine."""
    shared = [s for s in curve.shared if s.sharing == sharing]
    if not shared:
        return f"no replicas were measured {HOW[sharing]}"
    if invalid := next((s for s in shared if not s.valid), None):
        return f"{invalid.count} replicas have no valid repeat ({'; '.join(invalid.problems) or 'not measured'})"
    loads = sorted({s.concurrency for s in shared})
    where = " on their host" if any(map(curve.one_engine, loads)) else ""
    return f"one engine alone was not measured at {', '.join(map(str, loads))} in flight{where}"
