"""What more GPUs for one engine gain, and what one engine on each of them gains (arXiv:2404.03353, figure 1).

Each claim is judged under the largest load that fits into the KV memory of the fewer GPUs: above it some requests wait
there, and what more GPUs gain is memory, not speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_slmserve.analysis.compare.deployments import Deployment, deployments, one_engine_each, per_gpu, speedup
from pytest_slmserve.analysis.stats.estimates import Interval, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict, above, below

PER_GPU = "tensor-parallel-loses-per-gpu"
SLOWER = "tensor-parallel-slows-the-smallest"
STILL_GAINS = "tensor-parallel-still-gains"
REPLICAS = "replicas-per-gpu-beat-tensor-parallel"
Pair = tuple[Deployment, Deployment]


def loses_per_gpu(curve: Curve, bound: float) -> Verdict:
    """Does an engine serve less per GPU, however many it has? value: the largest throughput per GPU on more of them,
    over that on the fewest."""
    pairs = _against_fewest(curve)
    if not pairs:
        return _undecided(curve, PER_GPU, bound, "no engine was measured on two numbers of GPUs under a load that fits")
    seen = {pair: per_gpu(speedup(*pair), *pair) for pair in pairs}
    pair = max(seen, key=lambda pair: seen[pair].value)
    why = f"on {_gpus(pair[1])} it serves {times(seen[pair])} as much per GPU as on {_gpus(pair[0])}"
    return _verdict(curve, PER_GPU, below(seen[pair], bound), why, bound, seen[pair], pair)


def slows_the_smallest(curve: Curve, bound: float) -> Verdict:
    """Does an engine on the most GPUs serve less in all than on the fewest? value: that throughput over this."""
    pairs = _against_fewest(curve)
    if not pairs:
        return _undecided(curve, SLOWER, bound, "no engine was measured on two numbers of GPUs under a load that fits")
    pair = max(pairs, key=lambda pair: pair[1].gpus)
    seen = speedup(*pair)
    why = f"on {_gpus(pair[1])} it serves {times(seen)} what it does on {_gpus(pair[0])}"
    return _verdict(curve, SLOWER, below(seen, bound), why, bound, seen, pair)


def still_gains(curve: Curve, fewer: int, more: int, bound: float) -> Verdict:
    """Does an engine on `more` GPUs serve more than `bound` times what it does on `fewer`?"""
    pair = _largest_that_fits(one_engine_each(deployments(curve)), fewer, more)
    if pair is None:
        missing = f"no engine was measured on {fewer} and on {more} GPUs under a load that fits"
        return _undecided(curve, STILL_GAINS, bound, missing)
    seen = speedup(*pair)
    why = f"on {_gpus(pair[1])} it serves {times(seen)} what it does on {_gpus(pair[0])}"
    return _verdict(curve, STILL_GAINS, above(seen, bound), why, bound, seen, pair)


def replicas_beat(curve: Curve, bound: float) -> Verdict:
    """Do replicas with a GPU each serve more than one engine over as many GPUs, under the largest load that both were
    measured under? value: their throughput over its."""
    found = deployments(curve)
    engines = one_engine_each(found)
    pairs = [
        (engines[one.gpus][one.concurrency], one)
        for one in found
        if one.sharing == "gpus" and one.tensor_parallel < one.gpus and one.concurrency in engines.get(one.gpus, {})
    ]
    if not pairs:
        missing = "replicas with a GPU each and an engine over as many GPUs were not both measured under one load"
        return _undecided(curve, REPLICAS, bound, missing)
    pair = max(pairs, key=lambda pair: (pair[0].gpus, pair[0].concurrency))
    seen = speedup(*pair)
    why = f"{pair[1].engines} replicas serve {times(seen)} what one engine over {_gpus(pair[0])} does"
    why += f" at {pair[0].concurrency} in flight{_memory(engines, pair)}"
    return _verdict(curve, REPLICAS, above(seen, bound), why, bound, seen, pair, load="")


def _against_fewest(curve: Curve) -> list[Pair]:
    engines = one_engine_each(deployments(curve))
    if not engines:
        return []
    fewest, *more = sorted(engines)
    return [pair for gpus in more if (pair := _largest_that_fits(engines, fewest, gpus))]


def _largest_that_fits(engines: dict[int, dict[int, Deployment]], fewer: int, more: int) -> Pair | None:
    """Under the largest load that runs at once on the fewer GPUs, so on the others too."""
    first, second = engines.get(fewer, {}), engines.get(more, {})
    loads = [load for load in first.keys() & second.keys() if first[load].fits and second[load].fits]
    return (first[max(loads)], second[max(loads)]) if loads else None


def _memory(engines: dict[int, dict[int, Deployment]], pair: Pair) -> str:
    """Where the load does not fit into one GPU, that the engine over several gains by memory too."""
    alone = engines.get(pair[1].tensor_parallel, {}).get(pair[0].concurrency)
    if alone is None or alone.fits:
        return ""
    return f", of which one GPU runs {alone.room} at once: there an engine over several gains memory, not speed alone"


def _gpus(one: Deployment) -> str:
    return "1 GPU" if one.gpus == 1 else f"{one.gpus} GPUs"


def _undecided(curve: Curve, claim: str, bound: float, why: str) -> Verdict:
    return Verdict(claim, curve.subject, State.UNDECIDED, why, bound=bound)


def _verdict(
    curve: Curve, claim: str, state: State, why: str, bound: float, seen: Interval, pair: Pair, load: str | None = None
) -> Verdict:
    records: Sequence[str] = (*pair[0].served.records, *pair[1].served.records)
    where = f" at {pair[0].concurrency} in flight, the largest load that fits" if load is None else load
    unsure = "; known for one repeat only: --slm-repeats 2" if seen.low is None else ""
    return Verdict(
        claim, curve.subject, state, f"{why}{where} (bound {bound:g}){unsure}",
        value=seen.value, low=seen.low, high=seen.high, bound=bound, n=len(records), records=tuple(records),
    )  # fmt: skip
