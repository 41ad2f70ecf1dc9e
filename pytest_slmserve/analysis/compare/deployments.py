"""Ways to serve one model on the GPUs there are, each under the same requests in flight in all.

One engine may be spread over several GPUs (tensor parallelism), or each GPU may have an engine of its own (replicas).
What is compared is what they serve together, per GPU too. Where a load does not fit into the KV memory of one GPU, some
of its requests wait there: what more GPUs gain then is memory, not speed, and is said so. Claims that a model serves
less (arXiv:2404.03353, figure 1) are judged under the largest load that fits into the fewer GPUs; the claim that a
large one still gains under the best load of each, for its source names memory as the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points import (
    Point,
    ReplicaPoint,
    at_common_loads,
    figure_named,
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
    served: Point | ReplicaPoint
    room: int | None = None
    kv_blocks: int | None = None

    @property
    def fits(self) -> bool:
        """Do all of its requests run at once?"""
        return self.room is None or self.concurrency <= self.room

    @property
    def tokens_per_s(self) -> float:
        return self.served.output_tokens_per_s or 0.0

    @property
    def e2e_s(self) -> float | None:
        return self.served.e2e_s


def with_wider(curves: Iterable[Curve]) -> list[Curve]:
    """Each curve; the one on the fewest GPUs of a kind of engine with those of the same on more, of the same host."""
    found = list(curves)
    wider: dict[int, tuple[Curve, ...]] = {}
    for family in grouped((curve for curve in found if curve.spec), lambda curve: curve.family).values():
        rest = sorted(family, key=_gpus_each)
        while rest:
            first, *others = rest
            by_host = grouped(others, partial(_of_one_host, first))
            alike, rest = by_host.get(True, []), by_host.get(False, [])
            if alike and _gpus_each(first) < _gpus_each(alike[-1]):
                wider[id(first)] = tuple(alike)
    return [replace(curve, wider=wider.get(id(curve), ())) for curve in found]


def _of_one_host(one: Curve, other: Curve) -> bool:
    """Did a boot of some host measure both, or is it not known?"""
    here, there = hosts_of(one.measurements), hosts_of(other.measurements)
    return None in here | there or not here.isdisjoint(there)


def _gpus_each(curve: Curve) -> int:
    return curve.spec.tensor_parallel_size if curve.spec else 0


def deployments(curve: Curve) -> tuple[Deployment, ...]:
    """All that were measured of this curve's engine and are valid, by load, then by GPUs."""
    found: dict[tuple[object, ...], Deployment] = {}
    for each in (curve, *curve.wider):
        for one in (*_engines(each), *_replicas(each)):
            found.setdefault((one.concurrency, one.gpus, one.engines, one.sharing), one)
    return tuple(found[key] for key in sorted(found, key=lambda key: (*key[:3], str(key[3]))))


def on_several_gpus(curve: Curve) -> bool:
    """Was its engine measured on several numbers of GPUs, or as replicas with a GPU each?"""
    return bool(curve.wider) or any(shared.sharing == "gpus" for shared in curve.shared)


def _engines(curve: Curve) -> Iterator[Deployment]:
    spec, resolved = curve.spec, next(iter(curve.resolved), None)
    if spec is None or resolved is None:
        return
    limits = [n for n in (curve.kv_capacity, resolved.max_num_seqs or spec.max_num_seqs) if n is not None]
    for point in (*curve.valid, *(point for point in curve.alone if point.valid)):
        gpus, blocks = spec.tensor_parallel_size, resolved.kv_blocks
        yield Deployment(gpus, 1, gpus, None, point.concurrency, point, min(limits, default=None), blocks)


def _replicas(curve: Curve) -> Iterator[Deployment]:
    for shared in curve.shared:
        if shared.valid:
            each = shared.tensor_parallel_size
            gpus = shared.count * each if shared.sharing == "gpus" else each
            yield Deployment(gpus, shared.count, each, shared.sharing, shared.concurrency, shared)


def one_engine_each(found: Iterable[Deployment]) -> dict[int, dict[int, Deployment]]:
    """Engines alone, by GPUs and by load."""
    alone = grouped((one for one in found if one.sharing is None), lambda one: one.gpus)
    return {gpus: {one.concurrency: one for one in each} for gpus, each in alone.items()}


def speedup(base: Deployment, other: Deployment, several: int = 1) -> Interval:
    """Factor of the throughput of `other` over that of `base`. several: see `sweep_points.ratio`."""
    return ratio(other.served, base.served, several=several)


def per_gpu(seen: Interval, base: Deployment, other: Deployment) -> Interval:
    """Factor of the throughput per GPU of `other` over that of `base`, from the factor `seen` of their throughputs."""
    return seen.mapped(lambda end: end * base.gpus / other.gpus)


Pair = tuple[Deployment, Deployment]


def loses_per_gpu(curve: Curve, bound: float) -> Verdict:
    """Does an engine serve less per GPU, however many it has? value: the throughput per GPU on more of them that
    decides, over that on the fewest."""
    pairs = _against_fewest(curve)
    if not pairs:
        return Verdict.inconclusive(PER_GPU, curve.subject, ONE_NUMBER, bound)
    state, seen, pair = every(below, bound, lambda n: [(per_gpu(speedup(*pair, n), *pair), pair) for pair in pairs])
    why = f"on {_gpus(pair[1])} it serves {times(seen)} as much per GPU as on {_gpus(pair[0])}"
    return _judged(curve, PER_GPU, state, why + _at(pair), bound, seen, pair)


def less_in_all(curve: Curve, bound: float) -> Verdict:
    """Does an engine on the most GPUs serve less in all than on the fewest? value: that throughput over this."""
    pairs = _against_fewest(curve)
    if not pairs:
        return Verdict.inconclusive(SLOWER, curve.subject, ONE_NUMBER, bound)
    pair = max(pairs, key=lambda pair: pair[1].gpus)
    seen = speedup(*pair)
    why = f"on {_gpus(pair[1])} it serves {times(seen)} what it does on {_gpus(pair[0])}"
    return _judged(curve, SLOWER, below(seen, bound), why + _at(pair), bound, seen, pair)


def still_gains(curve: Curve, fewer: int, more: int, bound: float) -> Verdict:
    """Does an engine on `more` GPUs serve more than `bound` times what it does on `fewer`, each under its best load?
    Their memory counts: a load may fit into more GPUs alone. arXiv:2404.03353: "due to memory requirements"."""
    engines = one_engine_each(deployments(curve))
    if not (engines.get(fewer) and engines.get(more)):
        missing = f"no engine was measured on {fewer} and on {more} GPUs"
        return Verdict.inconclusive(STILL_GAINS, curve.subject, missing, bound)
    first, second = (max(engines[gpus].values(), key=lambda one: one.tokens_per_s) for gpus in (fewer, more))
    seen = speedup(first, second, len(engines[fewer]) * len(engines[more]))
    why = (
        f"on {_gpus(second)} it serves {times(seen)} what it does on {_gpus(first)}, at {second.concurrency} and "
        f"{first.concurrency} in flight, the best load of each"
    )
    if first.room is not None and second.room is not None:
        why += f"; {second.room} requests fit at once on the more GPUs, {first.room} on the fewer"
    return _judged(curve, STILL_GAINS, above(seen, bound), why, bound, seen, (first, second))


def replicas_beat(curve: Curve, bound: float) -> Verdict:
    """Do replicas with a GPU each serve more than one engine over as many GPUs, under the largest load that both were
    measured under? value: their throughput over its."""
    found = deployments(curve)
    engines = one_engine_each(found)
    pairs = [
        (engines[one.gpus][one.concurrency], one)
        for one in found
        if one.sharing == "gpus"
        and one.tensor_parallel_size < one.gpus
        and one.concurrency in engines.get(one.gpus, {})
    ]
    if not pairs:
        missing = "replicas with a GPU each and an engine over as many GPUs were not both measured under one load"
        return Verdict.inconclusive(REPLICAS, curve.subject, missing, bound)
    pair = max(pairs, key=lambda pair: (pair[0].gpus, pair[0].concurrency))
    seen = speedup(*pair)
    why = f"{pair[1].engines} replicas serve {times(seen)} what one engine over {_gpus(pair[0])} does"
    why += f" at {pair[0].concurrency} in flight{_memory(engines, pair)}"
    return _judged(curve, REPLICAS, above(seen, bound), why, bound, seen, pair)


def _against_fewest(curve: Curve) -> list[Pair]:
    """An engine on the fewest GPUs and one on more, for each number of these: under the largest load that fits at once
    on both."""
    engines = one_engine_each(deployments(curve))
    if not engines:
        return []
    (_, fewest), *others = sorted(engines.items())
    found = []
    for _, more in others:
        if loads := [load for load in fewest.keys() & more.keys() if fewest[load].fits and more[load].fits]:
            found.append((fewest[max(loads)], more[max(loads)]))
    return found


def _memory(engines: dict[int, dict[int, Deployment]], pair: Pair) -> str:
    """A clause that several GPUs gain by memory too, where the load does not fit into one; else empty."""
    alone = engines.get(pair[1].tensor_parallel_size, {}).get(pair[0].concurrency)
    if alone is None or alone.fits:
        return ""
    return f", of which one GPU runs {alone.room} at once: there an engine over several gains memory, not speed alone"


def _gpus(one: Deployment) -> str:
    return "1 GPU" if one.gpus == 1 else f"{one.gpus} GPUs"


def _at(pair: Pair) -> str:
    return f" at {pair[0].concurrency} in flight, the largest load that fits"


def _judged(curve: Curve, claim: str, state: State, why: str, bound: float, seen: Interval, pair: Pair) -> Verdict:
    why += f" (bound {bound:g}){unsure(seen)}"
    return Verdict.from_interval(claim, curve.subject, state, why, seen, bound, *(one.served for one in pair))


RATE, LATENCY = figure_named("output_tokens_per_s"), figure_named("e2e_s")


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
    """Each sweep through the server with the one without it; those without a load in common are left out."""
    engine = {_but_for_the_interface(curve): curve for curve in curves if _interface(curve) == "engine"}
    pairs = [(engine.get(_but_for_the_interface(curve)), curve) for curve in curves if _interface(curve) == "server"]
    found = [Interfaces(without, served, _loads(without, served)) for without, served in pairs if without]
    return [interfaces for interfaces in found if interfaces.loads]


def _loads(engine: Curve, server: Curve) -> tuple[AtBothInterfaces, ...]:
    pairs, among = at_common_loads(engine.valid, server.valid)
    return tuple(
        AtBothInterfaces(
            engine=p,
            server=q,
            ratio=ratio(q, p, among),
            prompt_steps=(_prompt_steps(engine, p), _prompt_steps(server, q)),
        )
        for p, q in pairs
    )


def _prompt_steps(curve: Curve, point: Point) -> float | None:
    """Mean over the repeats on which a point rests."""
    return mean_of_known(steps_with_prompts(m.run) for m in curve.measurements if m.id in point.records)


def _interface(curve: Curve) -> str | None:
    return curve.spec.interface if curve.spec else None


def _but_for_the_interface(curve: Curve) -> str | None:
    first, load = curve.first, curve.load
    if first is None or load is None:
        return None
    return series_key(first.spec.without_http, first.workload.hash, load, first.environment)


CLAIM = "neighbours-do-not-disturb"


def neighbour_pairs(curve: Curve) -> tuple[list[tuple[Point, Point]], list[Point]]:
    """The points beside others and alone, of each load that was measured in both ways, and all points."""
    beside, alone = (
        [p for p in points_of(m for m in curve.measurements if bool(m.neighbours) is busy) if p.valid]
        for busy in (True, False)
    )
    return at_common_loads(beside, alone)


def neighbours_do_not_disturb(curve: Curve, margin: float) -> Verdict:
    """Is each cell that was measured in both ways the same within the margin? value, low, high: of output tokens/s
    alone over those beside others, at the load that decides."""
    pairs, among = neighbour_pairs(curve)
    if not pairs:
        why = "none of its loads was measured both alone and beside others"
        return Verdict.inconclusive(CLAIM, curve.subject, why, margin)

    def changes(several: int = 1) -> list[tuple[Interval, int]]:
        return [(ratio(q, p, among, several=several).mapped(lambda end: end - 1), p.concurrency) for p, q in pairs]

    state, decisive, _ = every_within(-margin, margin, changes)
    told = "; ".join(f"{'+' if seen.value >= 0 else ''}{percent_interval(seen)} at {n}" for seen, n in changes())
    why = f"output tokens/s alone against beside others: {told} in flight (bound {percent(margin)})"
    return Verdict.from_interval(
        CLAIM, curve.subject, state, why, decisive, margin, *(point for pair in pairs for point in pair)
    )


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
    return f"{claim}-{sharing}"


def replicas_pay(curve: Curve, sharing: Sharing, bound: float) -> Verdict:
    """Do some number of replicas serve more than `bound` times what one engine does, each under its best load?

    value: that gain in throughput, its interval corrected for both having been chosen. arXiv:2404.03353, figure 5;
    arXiv:2503.08311, raw results, OPT-1.3B: 1.337 against an engine without chunked prefill, 1.236 against one with it.
    """
    claim, pairs = name_of(PAY, sharing), compared(curve, sharing)
    if not pairs:
        return Verdict.inconclusive(claim, curve.subject, _nothing_to_compare(curve, sharing), bound)
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
        return Verdict.inconclusive(name, curve.subject, _nothing_to_compare(curve, sharing), bound)
    shared, alone = max(pairs, key=lambda pair: ratio(*pair).value)
    if (seen := figure_ratio(alone, shared, figure, len(pairs))) is None:
        return Verdict.inconclusive(name, curve.subject, f"{what} is not known of both", bound)
    why = (
        f"{what} of {shared.count} replicas {HOW[sharing]} is {times(seen)} that of one engine at "
        f"{shared.concurrency} in flight (bound {bound:g}){unsure(seen)}"
    )
    return Verdict.from_interval(name, curve.subject, judge(seen, bound), why, seen, bound, alone, shared)


def _served(point: Point | ReplicaPoint) -> float:
    return fmean(point.repeats)


def compared(curve: Curve, sharing: Sharing) -> list[PairReplicas]:
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
