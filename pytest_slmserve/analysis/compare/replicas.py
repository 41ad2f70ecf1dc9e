"""Do replicas of a small model on one GPU pay? Judged against one engine alone, as many requests in flight in all.

The papers measured their gains against an engine without chunked prefill, which vLLM has by default today.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, latency_ratio
from pytest_slmserve.analysis.points.sweep_points import Point, ratio
from pytest_slmserve.analysis.stats.estimates import percent, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Verdict, above, below, unsure
from pytest_slmserve.schema.literals import Sharing

PAY, TAIL = "replicas-pay", "replicas-keep-the-tail"
HOW: dict[Sharing, str] = {
    "time-slicing": "by time slicing",
    "mps": "under MPS",
    "mig": "on MIG instances",
    "gpus": "with a GPU each",
    "urls": "at URLs of their own",
}
Pair = tuple[ReplicaPoint, Point]


def name_of(claim: str, sharing: Sharing) -> str:
    return f"{claim}-{sharing}"


def replicas_pay(curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Do some number of replicas serve more than `bound` times what one engine does?

    value: the largest gain in throughput, over the numbers of replicas measured, its interval corrected for having been
    chosen. arXiv:2404.03353, figure 5;
    arXiv:2503.08311, raw results, OPT-1.3B: 1.337 against an engine without chunked prefill, 1.236 against one with it.
    """
    claim, pairs = name_of(PAY, sharing), compared(curve, sharing)
    if not pairs:
        return Verdict.undecided(claim, curve.subject, _nothing_to_compare(curve, sharing), bound)
    most = _most(pairs)
    shared, alone = most
    seen = ratio(*most, several=len(pairs))
    others = ", ".join(f"{pair[0].count}: {ratio(*pair).value:.3g}" for pair in pairs if pair is not most)
    why = (
        f"{shared.count} replicas {HOW[sharing]} serve {times(seen)} what one engine does at {shared.concurrency} in "
        f"flight{f' ({others})' if others else ''}{_latency(alone, shared)} (bound {bound:g})"
        f"{unsure(seen)}"
    )
    return Verdict.from_interval(claim, curve.subject, above(seen, bound), why, seen, bound, alone, shared)


def replicas_keep_the_tail(curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Verdict on the 99th percentile of E2E of replicas, over the requests of all: at most `bound` times that of one
    engine. The number of replicas is the one that serves most. value: the ratio. arXiv:2404.03353, figure 5, has
    mean latency, and no figure has tails."""
    claim, pairs = name_of(TAIL, sharing), compared(curve, sharing)
    if not pairs:
        return Verdict.undecided(claim, curve.subject, _nothing_to_compare(curve, sharing), bound)
    shared, alone = _most(pairs)
    seen = latency_ratio(alone, shared, "e2e_p99_s")
    if seen is None:
        return Verdict.undecided(claim, curve.subject, "no request ended in a window", bound)
    why = (
        f"the 99th percentile of E2E of {shared.count} replicas {HOW[sharing]} is {times(seen)} that of one engine at "
        f"{shared.concurrency} in flight (bound {bound:g}){unsure(seen)}"
    )
    return Verdict.from_interval(claim, curve.subject, below(seen, bound), why, seen, bound, alone, shared)


def _most(pairs: Sequence[Pair]) -> Pair:
    """The pair with the largest gain in throughput."""
    return max(pairs, key=lambda pair: ratio(*pair).value)


def compared(curve: Curve, sharing: Sharing) -> list[Pair]:
    """Replicas, and one engine alone under the same load in all; where both are valid."""
    alone = {load: curve.one_engine(load) for load in {shared.concurrency for shared in curve.shared}}
    return [
        (shared, one)
        for shared in curve.shared
        if shared.sharing == sharing and shared.valid and (one := alone[shared.concurrency])
    ]


def has_replicas(curve: Curve, sharing: Sharing) -> bool:
    return any(shared.sharing == sharing for shared in curve.shared)


def _latency(alone: Point, shared: ReplicaPoint) -> str:
    seen = latency_ratio(alone, shared, "largest_e2e_s")
    return "" if seen is None else f"; their largest mean E2E is {percent(seen.value)} of its mean"


def _nothing_to_compare(curve: Curve, sharing: Sharing) -> str:
    """Reason why there is no pair of replicas and one engine."""
    shared = [s for s in curve.shared if s.sharing == sharing]
    if not shared:
        return f"no replicas were measured {HOW[sharing]}"
    if invalid := next((s for s in shared if not s.valid), None):
        return f"{invalid.count} replicas have no valid repeat ({'; '.join(invalid.problems) or 'not measured'})"
    loads = sorted({s.concurrency for s in shared})
    return f"one engine alone was not measured at {', '.join(map(str, loads))} in flight"
