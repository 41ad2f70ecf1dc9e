"""Ways to serve one model on the GPUs there are, each under the same requests in flight in all.

One engine may be spread over several GPUs (tensor parallelism), or each GPU may have an engine of its own (replicas).
What is compared is what they serve together, per GPU too. Where a load does not fit into the KV memory of one GPU, some
of its requests wait there: what more GPUs gain then is memory, not speed, and is said so. Claims that a model serves
less (arXiv:2404.03353, figure 1) are judged under the largest load that fits into the fewer GPUs; the claim that a
large one still gains under the best load of each, for its source names memory as the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint
from pytest_slmserve.analysis.points.sweep_points import Point, ratio
from pytest_slmserve.analysis.stats.estimates import Interval, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict, above, below, every, unsure
from pytest_slmserve.schema.literals import Sharing
from pytest_slmserve.schema.records import hosts_of

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
        return Verdict.undecided(PER_GPU, curve.subject, ONE_NUMBER, bound)
    state, seen, pair = every(below, bound, lambda n: [(per_gpu(speedup(*pair, n), *pair), pair) for pair in pairs])
    why = f"on {_gpus(pair[1])} it serves {times(seen)} as much per GPU as on {_gpus(pair[0])}"
    return _judged(curve, PER_GPU, state, why + _at(pair), bound, seen, pair)


def less_in_all(curve: Curve, bound: float) -> Verdict:
    """Does an engine on the most GPUs serve less in all than on the fewest? value: that throughput over this."""
    pairs = _against_fewest(curve)
    if not pairs:
        return Verdict.undecided(SLOWER, curve.subject, ONE_NUMBER, bound)
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
        return Verdict.undecided(STILL_GAINS, curve.subject, missing, bound)
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
        return Verdict.undecided(REPLICAS, curve.subject, missing, bound)
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
