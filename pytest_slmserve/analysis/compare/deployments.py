"""Ways to serve one model on the GPUs there are, each under the same requests in flight in all.

One engine may be spread over several GPUs (tensor parallelism), or each GPU may have an engine of its own (replicas).
What is compared is what they serve together, per GPU too. Where a load does not fit into the KV memory of one GPU, some
of its requests wait there: what more GPUs gain then is memory, not speed, and is said so. Claims that a model serves
less (arXiv:2404.03353, figure 1) are judged under the largest load that fits into the fewer GPUs; the claim that a
large one still gains under the best load of each, for its source names memory as the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from statistics import fmean

from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points import (
    Point,
    ReplicaPoint,
    at_common_loads,
    figure_ratio,
    on_hosts_of,
    points_of,
    ratio,
)
from pytest_slmserve.analysis.stats.estimates import Interval, grouped, mean_of_known, percent, percent_interval, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict, above, below, every, every_within, unsure, within
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.records import hosts_of, series_key

PER_GPU = "tensor-parallel-loses-per-gpu"
SLOWER = "tensor-parallel-serves-less-in-all"
STILL_GAINS = "tensor-parallel-still-gains"
REPLICAS = "replicas-per-gpu-beat-tensor-parallel"
ONE_NUMBER = "no engine was measured on two numbers of GPUs under a load that fits"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way, under one load. tensor_parallel_size: GPUs of each engine. sharing: how several engines are placed; None
    for one alone. room: requests that may run at once in all engines; None: not known. kv_blocks: of all engines."""

    gpus: int
    engines: int
    tensor_parallel_size: int
    sharing: Sharing | None
    concurrency: int
    served: Point
    room: int | None = None
    kv_blocks: int | None = None

    @property
    def fits(self) -> bool:
        """Whether all of its requests run at once."""
        return self.room is None or self.concurrency <= self.room

    @property
    def place(self) -> str:
        """ "1 GPU", or "2 GPUs" """
        return "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"

    @property
    def tokens_per_s(self) -> float:
        return self.served.output_tokens_per_s or 0.0

    @property
    def e2e_s(self) -> float | None:
        return self.served.e2e_s


def with_wider(curves: Iterable[Curve]) -> list[Curve]:
    """Return each curve; the one on the fewest GPUs of a kind of engine with those of the same on more, of the same
    host, or of a host that is not known."""

    def degree(curve: Curve) -> int:
        return curve.spec.tensor_parallel_size if curve.spec else 0

    found = list(curves)
    wider: dict[int, tuple[Curve, ...]] = {}
    for family in grouped((curve for curve in found if curve.spec), lambda curve: curve.family).values():
        rest = sorted(family, key=degree)
        while rest:
            first, *others = rest
            alike, rest = [first], []
            here = hosts_of(first.measurements)
            for other in others:
                there = hosts_of(other.measurements)
                (alike if None in here | there or here & there else rest).append(other)
            if degree(first) < degree(alike[-1]):
                wider[id(first)] = tuple(alike[1:])
    return [replace(curve, wider=wider.get(id(curve), ())) for curve in found]


def deployments(curve: Curve) -> tuple[Deployment, ...]:
    """Return all that were measured of this curve's engine and are valid, by load, then by GPUs."""
    made = []
    for each in (curve, *curve.wider):
        spec, resolved = each.spec, next(iter(each.resolved), None)
        if spec and resolved:
            limits = [n for n in (each.kv_capacity, resolved.max_num_seqs or spec.max_num_seqs) if n is not None]
            gpus, room = spec.tensor_parallel_size, min(limits, default=None)
            for point in (*each.valid, *(point for point in each.alone if point.valid)):
                made.append(Deployment(gpus, 1, gpus, None, point.concurrency, point, room, resolved.kv_blocks))
        for shared in each.shared:
            if shared.valid:
                degree = shared.tensor_parallel_size
                gpus = shared.count * degree if shared.sharing == "gpus" else degree
                made.append(Deployment(gpus, shared.count, degree, shared.sharing, shared.concurrency, shared))
    found = grouped(made, lambda one: (one.concurrency, one.gpus, one.engines, str(one.sharing)))
    return tuple(found[key][0] for key in sorted(found))


def on_several_gpus(curve: Curve) -> bool:
    """Return whether its engine was measured on several numbers of GPUs, or as replicas with a GPU each."""
    return bool(curve.wider) or any(shared.sharing == "gpus" for shared in curve.shared)


def one_engine_each(found: Iterable[Deployment]) -> dict[int, dict[int, Deployment]]:
    """Return single engines, by GPUs and by load."""
    alone = grouped((one for one in found if one.sharing is None), lambda one: one.gpus)
    return {gpus: {one.concurrency: one for one in each} for gpus, each in alone.items()}


def speedup(base: Deployment, other: Deployment, several: int = 1) -> Interval:
    """Return the factor of the throughput of `other` over that of `base`. several: see `points.ratio`."""
    return ratio(other.served, base.served, several=several)


Pair = tuple[Deployment, Deployment]


def serves_less(claim: str, curve: Curve, bound: float) -> Verdict:
    """Judge whether an engine serves less per GPU, however many it has (PER_GPU), or less in all on the most GPUs
    (SLOWER), than on the fewest. value: the throughput, or that per GPU, on more of them that decides, over that on the
    fewest."""
    pairs = _against_fewest(curve)
    if not pairs:
        return Verdict.inconclusive(claim, curve.subject, ONE_NUMBER, bound)
    if claim == SLOWER:
        pairs = [max(pairs, key=lambda pair: pair[1].gpus)]

    def ratios(several: int) -> list[tuple[Interval, Pair]]:
        shares = [1.0 if claim == SLOWER else base.gpus / other.gpus for base, other in pairs]
        return [(speedup(*pair, several).mapped(partial(mul, share)), pair) for share, pair in zip(shares, pairs)]

    state, seen, (base, other) = every(below, bound, ratios)
    much = "what it does" if claim == SLOWER else "as much per GPU as"
    why = f"on {other.place} it serves {times(seen)} {much} on {base.place}"
    why += f" at {base.concurrency} in flight, the largest load that fits"
    return _judged(curve, claim, state, why, bound, seen, (base, other))


def still_gains(curve: Curve, fewer: int, more: int, bound: float) -> Verdict:
    """Judge whether an engine on `more` GPUs serves more than `bound` times what it does on `fewer`, each under its
    best load. Their memory counts: a load may only fit into more GPUs. arXiv:2404.03353: "due to memory
    requirements"."""
    engines = one_engine_each(deployments(curve))
    if not (engines.get(fewer) and engines.get(more)):
        missing = f"no engine was measured on {fewer} and on {more} GPUs"
        return Verdict.inconclusive(STILL_GAINS, curve.subject, missing, bound)
    first, second = (max(engines[gpus].values(), key=lambda one: one.tokens_per_s) for gpus in (fewer, more))
    seen = speedup(first, second, len(engines[fewer]) * len(engines[more]))
    why = (
        f"on {second.place} it serves {times(seen)} what it does on {first.place}, at {second.concurrency} and "
        f"{first.concurrency} in flight, the best load of each"
    )
    if first.room is not None and second.room is not None:
        why += f"; {second.room} requests fit at once on the more GPUs, {first.room} on the fewer"
    return _judged(curve, STILL_GAINS, above(seen, bound), why, bound, seen, (first, second))


def replicas_beat(curve: Curve, bound: float) -> Verdict:
    """Judge whether replicas with a GPU each serve more than one engine over as many GPUs, under the largest load that
    both were measured under. value: their throughput over its. If the load does not fit into one GPU, several GPUs gain
    by memory too, and the reason says so."""
    found = deployments(curve)
    engines = one_engine_each(found)
    sets = (one for one in found if one.sharing == "gpus" and one.tensor_parallel_size < one.gpus)
    pairs = [(single, one) for one in sets if (single := engines.get(one.gpus, {}).get(one.concurrency))]
    if not pairs:
        missing = "replicas with a GPU each and an engine over as many GPUs were not both measured under one load"
        return Verdict.inconclusive(REPLICAS, curve.subject, missing, bound)
    single, replicas = max(pairs, key=lambda pair: (pair[0].gpus, pair[0].concurrency))
    seen = speedup(single, replicas)
    why = f"{replicas.engines} replicas serve {times(seen)} what one engine over {single.place} does"
    why += f" at {single.concurrency} in flight"
    alone = engines.get(replicas.tensor_parallel_size, {}).get(single.concurrency)
    if alone and not alone.fits:
        why += (
            f", of which one GPU runs {alone.room} at once: there an engine over several gains memory, not speed alone"
        )
    return _judged(curve, REPLICAS, above(seen, bound), why, bound, seen, (single, replicas))


def _against_fewest(curve: Curve) -> list[Pair]:
    """Return an engine on the fewest GPUs and one on more, for each number of these: under the largest load that fits
    at once on both."""
    engines = sorted(one_engine_each(deployments(curve)).items())
    found = []
    for _, more in engines[1:]:
        fewest = engines[0][1]
        if loads := [load for load in fewest.keys() & more.keys() if fewest[load].fits and more[load].fits]:
            found.append((fewest[max(loads)], more[max(loads)]))
    return found


def _judged(curve: Curve, claim: str, state: State, why: str, bound: float, seen: Interval, pair: Pair) -> Verdict:
    why += f" (threshold {bound:g}){unsure(seen)}"
    return Verdict.from_interval(claim, curve.subject, state, why, seen, bound, *(one.served for one in pair))


@dataclass(frozen=True, slots=True)
class AtBothInterfaces:
    """One load without and with the server. ratio: output tokens/s through the server over those without it; its noise
    is that of the repeats of all loads. prompt_steps: share of the steps that processed a prompt, without
    and with the server: which arrive together there is a matter of the stack, and of throughput."""

    engine: Point
    server: Point
    ratio: Interval
    prompt_steps: tuple[float | None, float | None]

    @property
    def concurrency(self) -> int:
        return self.engine.concurrency


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Two sweeps that differ in the interface alone, and the loads that both have valid points of, ascending."""

    engine: Curve
    server: Curve
    loads: tuple[AtBothInterfaces, ...]


def at_both_interfaces(curves: Sequence[Curve]) -> list[Interfaces]:
    """Return each sweep through the server with the one without it; those without a load in common are left out."""

    def prompt_steps(curve: Curve, point: Point) -> float | None:
        """Mean over the repeats on which a point rests."""
        return mean_of_known(steps_with_prompts(m.run) for m in curve.measurements if m.id in point.records)

    by_key = [
        (series_key(c.first.spec.without_http, c.first.workload.hash, c.load, c.first.environment), c)
        for c in curves
        if c.first and c.load and c.first.spec.interface in ("engine", "server")
    ]
    engines = {key: curve for key, curve in by_key if curve.spec and curve.spec.interface == "engine"}
    found = []
    for key, server in by_key:
        if server.spec and server.spec.interface == "server" and (engine := engines.get(key)):
            pairs, among = at_common_loads(engine.valid, server.valid)
            loads = tuple(
                AtBothInterfaces(p, q, ratio(q, p, among), (prompt_steps(engine, p), prompt_steps(server, q)))
                for p, q in pairs
            )
            found += [Interfaces(engine, server, loads)] if loads else []
    return found


CLAIM = "neighbours-do-not-disturb"


def neighbour_pairs(curve: Curve) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """Return the points beside others and alone, of each load that was measured in both ways, and all points."""
    beside, alone = (
        [p for p in points_of(m for m in curve.measurements if bool(m.neighbours) is busy) if p.valid]
        for busy in (True, False)
    )
    return at_common_loads(beside, alone)


def neighbours_do_not_disturb(curve: Curve, margin: float) -> Verdict:
    """Judge whether each case that was measured in both ways is the same within the margin. value, low, high: of output
    tokens/s alone over those beside others, at the load that decides."""
    pairs, among = neighbour_pairs(curve)
    if not pairs:
        why = "none of its loads was measured both alone and beside others"
        return Verdict.inconclusive(CLAIM, curve.subject, why, margin)

    def changes(several: int = 1) -> list[tuple[Interval, int]]:
        return [(ratio(q, p, among, several=several).mapped(lambda end: end - 1), p.concurrency) for p, q in pairs]

    state, decisive, _ = every_within(-margin, margin, changes)
    told = "; ".join(f"{'+' if seen.value >= 0 else ''}{percent_interval(seen)} at {n}" for seen, n in changes())
    why = f"output tokens/s alone against beside others: {told} in flight (threshold {percent(margin)})"
    points = (point for pair in pairs for point in pair)
    return Verdict.from_interval(CLAIM, curve.subject, state, why, decisive, margin, *points)


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
PairReplicas = tuple[ReplicaPoint, Point]


def name_of(claim: str, sharing: Sharing) -> str:
    """Return the name of a claim on one way of sharing."""
    return f"{claim}-{sharing}"


def replicas_pay(curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Judge whether some number of replicas serves more than `bound` times what one engine does, each under its best
    load.

    value: that gain in throughput, its interval corrected for both having been chosen. arXiv:2404.03353, figure 5;
    arXiv:2503.08311, raw results, OPT-1.3B: 1.337 against an engine without chunked prefill, 1.236 against one with it.
    """
    claim, pairs = name_of(PAY, sharing), compared(curve, sharing)
    if not pairs:
        return Verdict.inconclusive(claim, curve.subject, _nothing_to_compare(curve, sharing), bound)
    shared = max((pair[0] for pair in pairs), key=lambda point: fmean(point.repeats))
    engines = list(filter(None, (on_hosts_of(point, shared) for point in curve.of_one_engine)))
    alone = max(engines, key=lambda point: fmean(point.repeats))
    # The choice of each side errs in one direction only, so each end is corrected for one of them.
    seen = ratio(shared, alone, several=max(len(pairs), len(engines)))
    others = ", ".join(
        f"{p.count}{'' if p.concurrency == shared.concurrency else f' at {p.concurrency}'}: {ratio(p, alone).value:.3g}"
        for p, _ in pairs
        if p is not shared and on_hosts_of(alone, p)
    )
    load = "" if alone.concurrency == shared.concurrency else f", and one engine serves most at {alone.concurrency}"
    latency = figure_ratio(alone, shared, E2E)
    why = (
        f"{shared.count} replicas {HOW[sharing]} serve {times(seen)} what one engine does at {shared.concurrency} in "
        f"flight{load}{f' ({others})' if others else ''}"
        f"{f'; their largest mean E2E is {percent(latency.value)} of its mean' if latency else ''} "
        f"(threshold {bound:g}){unsure(seen)}"
    )
    return Verdict.from_interval(claim, curve.subject, above(seen, bound), why, seen, bound, alone, shared)


def compared_with_one(claim: str, curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Judge a figure of `COMPARED` of the replicas that serve most, over that of one engine. value: the ratio, its
    interval corrected for the set having been chosen, because by Little's law most served is least waited for."""
    name, pairs, (what, figure, judge) = name_of(claim, sharing), compared(curve, sharing), COMPARED[claim]
    if not pairs:
        return Verdict.inconclusive(name, curve.subject, _nothing_to_compare(curve, sharing), bound)
    shared, alone = max(pairs, key=lambda pair: ratio(*pair).value)
    if (seen := figure_ratio(alone, shared, figure, len(pairs))) is None:
        return Verdict.inconclusive(name, curve.subject, f"{what} is not known of both", bound)
    why = (
        f"{what} of {shared.count} replicas {HOW[sharing]} is {times(seen)} that of one engine at "
        f"{shared.concurrency} in flight (threshold {bound:g}){unsure(seen)}"
    )
    return Verdict.from_interval(name, curve.subject, judge(seen, bound), why, seen, bound, alone, shared)


def compared(curve: Curve, sharing: Sharing) -> list[PairReplicas]:
    """Return replicas, and one engine alone on their host under the same load in all, if both are valid."""
    valid = (shared for shared in curve.shared if shared.sharing == sharing and shared.valid)
    return [(shared, one) for shared in valid if (one := curve.one_engine(shared.concurrency, shared))]


def has_replicas(curve: Curve, sharing: Sharing) -> bool:
    """Return whether replicas that share so were measured."""
    return any(shared.sharing == sharing for shared in curve.shared)


def _nothing_to_compare(curve: Curve, sharing: Sharing) -> str:
    """Return the reason why there is no pair of replicas and one engine."""
    shared = [s for s in curve.shared if s.sharing == sharing]
    if not shared:
        return f"no replicas were measured {HOW[sharing]}"
    if invalid := next((s for s in shared if not s.valid), None):
        return f"{invalid.count} replicas have no valid repeat ({'; '.join(invalid.problems) or 'not measured'})"
    loads = sorted({s.concurrency for s in shared})
    where = " on their host" if any(map(curve.one_engine, loads)) else ""
    return f"one engine alone was not measured at {', '.join(map(str, loads))} in flight{where}"
