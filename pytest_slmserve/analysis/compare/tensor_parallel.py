"""Gains of more GPUs for one engine, and of one engine on each of them (arXiv:2404.03353, figure 1).

Each claim is judged under the largest load that fits into the KV memory of the fewer GPUs. Above it some requests wait
there, and what more GPUs gain is memory, not speed.
"""

from __future__ import annotations

from pytest_slmserve.analysis.compare.deployments import Deployment, deployments, one_engine_each, per_gpu, speedup
from pytest_slmserve.analysis.stats.estimates import Interval, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict, above, below, every, unsure

PER_GPU = "tensor-parallel-loses-per-gpu"
SLOWER = "tensor-parallel-slows-the-smallest"
STILL_GAINS = "tensor-parallel-still-gains"
REPLICAS = "replicas-per-gpu-beat-tensor-parallel"
ONE_NUMBER = "no engine was measured on two numbers of GPUs under a load that fits"
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


def slows_the_smallest(curve: Curve, bound: float) -> Verdict:
    """Does an engine on the most GPUs serve less in all than on the fewest? value: that throughput over this."""
    pairs = _against_fewest(curve)
    if not pairs:
        return Verdict.undecided(SLOWER, curve.subject, ONE_NUMBER, bound)
    pair = max(pairs, key=lambda pair: pair[1].gpus)
    seen = speedup(*pair)
    why = f"on {_gpus(pair[1])} it serves {times(seen)} what it does on {_gpus(pair[0])}"
    return _judged(curve, SLOWER, below(seen, bound), why + _at(pair), bound, seen, pair)


def still_gains(curve: Curve, fewer: int, more: int, bound: float) -> Verdict:
    """Does an engine on `more` GPUs serve more than `bound` times what it does on `fewer`?"""
    pair = _largest_that_fits(one_engine_each(deployments(curve)), fewer, more)
    if pair is None:
        missing = f"no engine was measured on {fewer} and on {more} GPUs under a load that fits"
        return Verdict.undecided(STILL_GAINS, curve.subject, missing, bound)
    seen = speedup(*pair)
    why = f"on {_gpus(pair[1])} it serves {times(seen)} what it does on {_gpus(pair[0])}"
    return _judged(curve, STILL_GAINS, above(seen, bound), why + _at(pair), bound, seen, pair)


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
    engines = one_engine_each(deployments(curve))
    if not engines:
        return []
    fewest, *more = sorted(engines)
    return [pair for gpus in more if (pair := _largest_that_fits(engines, fewest, gpus))]


def _largest_that_fits(engines: dict[int, dict[int, Deployment]], fewer: int, more: int) -> Pair | None:
    """Engines on `fewer` and on `more` GPUs under the largest load that fits at once on both; None without one."""
    first, second = engines.get(fewer, {}), engines.get(more, {})
    loads = [load for load in first.keys() & second.keys() if first[load].fits and second[load].fits]
    return (first[max(loads)], second[max(loads)]) if loads else None


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
