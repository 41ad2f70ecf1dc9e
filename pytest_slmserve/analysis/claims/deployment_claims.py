"""Evidence from ways to deploy a model: replicas over one engine, and an engine on more GPUs over one on fewer.

If nothing can be compared, a function returns the reason.
"""

from __future__ import annotations

from functools import partial
from operator import mul
from statistics import fmean

from pytest_slmserve.analysis.claims.claim import Evidence
from pytest_slmserve.analysis.compare.deployments import (
    HOW,
    Deployment,
    compared,
    deployments,
    one_engine_each,
)
from pytest_slmserve.analysis.points import figure_ratio, on_hosts_of, ratio
from pytest_slmserve.analysis.stats.estimates import percent, times
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.gains import valid_points
from pytest_slmserve.analysis.verdict import Seen, Verdict, below, every, unsure
from pytest_slmserve.schema.errors import Sharing

E2E = "largest_e2e_s"
# Of each claim on a figure of replicas: the figure in words, and its name. The mean E2E is that of the slowest replica,
# its percentile over the requests of all. arXiv:2404.03353: latency improves (fig. 5; no figure has tails),
# "considerable increase" of utilization (6), more power with OPT-125M and OPT-1.3B, constant with OPT-2.7B (7).
FIGURES = {
    "replicas-keep-the-tail": ("the 99th percentile of E2E", "e2e_p99_s"),
    "replicas-answer-sooner": ("the largest mean E2E", E2E),
    "replicas-use-the-gpu-more": ("GPU utilisation", "gpu_util"),
    "replicas-draw-more-power": ("power", "power_w"),
    "replicas-keep-the-power": ("power", "power_w"),
}


def replicas_over_one_engine(kind: str, curve: Curve, sharing: Sharing) -> Evidence | str:
    """Return a figure of the replicas that serve most over that of one engine under the same load; its interval is
    corrected for the set having been chosen, because by Little's law most served is least waited for.

    For `replicas-pay` it is the throughput of the best number of replicas over that of one engine at its best load,
    corrected for both having been chosen. arXiv:2404.03353, figure 5; arXiv:2503.08311, raw results, OPT-1.3B: 1.337
    against an engine without chunked prefill, 1.236 against one with it.
    """
    pairs = compared(curve, sharing)
    if not pairs:
        return _nothing_to_compare(curve, sharing)
    if kind != "replicas-pay":
        what, figure = FIGURES[kind]
        shared, alone = max(pairs, key=lambda pair: ratio(*pair).value)
        seen = figure_ratio(alone, shared, figure, len(pairs))
        if seen is None:
            return f"{what} is not known of both"
        sentence = f"{what} of {shared.count} replicas {HOW[sharing]} is {{}} that of one engine at "
        sentence += f"{shared.concurrency} in flight"
        return Evidence(estimates=lambda several: [(seen, sentence)], points=[alone, shared])
    shared = max((pair[0] for pair in pairs), key=lambda point: fmean(point.repeats))
    single = [*valid_points(curve.alone), *curve.valid]
    engines = [here for point in single if (here := on_hosts_of(point, shared))]
    alone = max(engines, key=lambda point: fmean(point.repeats))
    others = ", ".join(
        f"{p.count}{'' if p.concurrency == shared.concurrency else f' at {p.concurrency}'}: {ratio(p, alone).value:.3g}"
        for p, _ in pairs
        if p is not shared and on_hosts_of(alone, p)
    )
    load = "" if alone.concurrency == shared.concurrency else f", and one engine serves most at {alone.concurrency}"
    latency = figure_ratio(alone, shared, E2E)
    sentence = (
        f"{shared.count} replicas {HOW[sharing]} serve {{}} what one engine does at {shared.concurrency} in flight"
        f"{load}{f' ({others})' if others else ''}"
        f"{f'; their largest mean E2E is {percent(latency.value)} of its mean' if latency else ''}"
    )
    # The choice of each side errs in one direction only, so each end is corrected for one of them.
    chosen = max(len(pairs), len(engines))
    return Evidence.of_ratios([(shared, alone, sentence)], [alone, shared], several=chosen)


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


Pair = tuple[Deployment, Deployment]


def serves_less(claim: str, curve: Curve, threshold: float) -> Verdict:
    """Return the verdict on whether an engine serves less than on the fewest GPUs: per GPU, however many it has, or in
    all on the most GPUs. Each pair is under the largest load that fits at once on both; the verdict rests on the pair
    that decides. value: its throughput, or that per GPU, over that on the fewest."""
    in_all, pairs = claim == "tensor-parallel-serves-less-in-all", list[Pair]()
    engines = sorted(one_engine_each(deployments(curve)).items())
    for _, more in engines[1:]:
        fewest = engines[0][1]
        if loads := [load for load in fewest.keys() & more.keys() if fewest[load].fits and more[load].fits]:
            pairs.append((fewest[max(loads)], more[max(loads)]))
    if not pairs:
        reason = "no engine was measured on two numbers of GPUs under a load that fits"
        return Verdict.inconclusive(claim, curve.subject, reason, threshold)
    if in_all:
        pairs = [max(pairs, key=lambda pair: pair[1].gpus)]

    def ratios(several: int) -> list[Seen[Pair]]:
        shares = [1.0 if in_all else base.gpus / other.gpus for base, other in pairs]
        gains = [ratio(other.served, base.served, several=several) for base, other in pairs]
        return [(gain.mapped(partial(mul, share)), pair) for gain, share, pair in zip(gains, shares, pairs)]

    state, seen, (base, other) = every(below, threshold, ratios)
    much = "what it does" if in_all else "as much per GPU as"
    why = (
        f"on {other.place} it serves {times(seen)} {much} on {base.place} at {base.concurrency} in flight, the largest "
    )
    why += f"load that fits (threshold {threshold:g}){unsure(seen)}"
    return Verdict.from_interval(claim, curve.subject, state, why, seen, threshold, base.served, other.served)


def over_fewer_gpus_at_best(curve: Curve, fewer: int, more: int) -> Evidence | str:
    """Return the throughput of an engine on `more` GPUs over that on `fewer`, each under its best load. Their memory
    counts: a load may only fit into more GPUs. arXiv:2404.03353: "due to memory requirements"."""
    engines = one_engine_each(deployments(curve))
    if not (engines.get(fewer) and engines.get(more)):
        return f"no engine was measured on {fewer} and on {more} GPUs"
    first, second = (max(engines[gpus].values(), key=lambda one: one.tokens_per_s) for gpus in (fewer, more))
    sentence = f"on {second.place} it serves {{}} what it does on {first.place}, at {second.concurrency} and "
    sentence += f"{first.concurrency} in flight, the best load of each"
    if first.room is not None and second.room is not None:
        sentence += f"; {second.room} requests fit at once on the more GPUs, {first.room} on the fewer"
    chosen, points = len(engines[fewer]) * len(engines[more]), [first.served, second.served]
    return Evidence.of_ratios([(second.served, first.served, sentence)], points, several=chosen)


def replicas_over_tensor_parallel(curve: Curve) -> Evidence | str:
    """Return the throughput of replicas with a GPU each over that of one engine over as many GPUs, under the largest
    load that both were measured under. If the load does not fit into one GPU, several GPUs gain by memory too, and the
    sentence says so."""
    found = deployments(curve)
    engines = one_engine_each(found)
    sets = (one for one in found if one.sharing == "gpus" and one.tensor_parallel_size < one.gpus)
    pairs = [(single, one) for one in sets if (single := engines.get(one.gpus, {}).get(one.concurrency))]
    if not pairs:
        return "replicas with a GPU each and an engine over as many GPUs were not both measured under one load"
    single, replicas = max(pairs, key=lambda pair: (pair[0].gpus, pair[0].concurrency))
    sentence = f"{replicas.engines} replicas serve {{}} what one engine over {single.place} does"
    sentence += f" at {single.concurrency} in flight"
    alone = engines.get(replicas.tensor_parallel_size, {}).get(single.concurrency)
    if alone and not alone.fits:
        sentence += f", of which one GPU runs {alone.room} at once: "
        sentence += "there an engine over several gains memory, not speed alone"
    points = [single.served, replicas.served]
    return Evidence.of_ratios([(replicas.served, single.served, sentence)], points)
