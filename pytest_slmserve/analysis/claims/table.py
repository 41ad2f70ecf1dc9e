"""The table of claims, and of the verdicts that are expected on devices, models and releases."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from typing import Any, get_args

from pytest_slmserve.analysis.advice import subjects as minimal_impact
from pytest_slmserve.analysis.advice import verification as kv_blocks
from pytest_slmserve.analysis.claims import claim as table1
from pytest_slmserve.analysis.claims import gpu_claims, job_claims
from pytest_slmserve.analysis.claims.claim import ANY, ANY_RELEASE, Claim, ClaimRow, Judge, Others, Parameters
from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.compare import deployments as interference
from pytest_slmserve.analysis.compare import deployments as replicas
from pytest_slmserve.analysis.metrics.roofline import peaks_of
from pytest_slmserve.analysis.points import CONTINUOUS
from pytest_slmserve.analysis.sweep import curve as curves
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, is_sweep
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage, Interface, OwnSharing, Platform, RampUp
from pytest_slmserve.schema.records import known_fields


def _by(judge: Callable[..., Verdict], *names: str) -> Judge:
    """A judge that calls `judge` with the curve alone and these parameters of the row."""
    return lambda curve, parameters, others: judge(curve, *(parameters[name] for name in names))


def _kv_blocks(curve: Curve, parameters: Parameters, others: Others) -> Verdict:
    """Verdict on the KV blocks of the launch that is farthest off, so that one bad launch among many shows."""
    records = tuple(i for p in curve.points for i in p.records)
    if curve.spec is None or not curve.resolved:
        return Verdict.inconclusive(kv_blocks.KV_BLOCKS, curve.subject, "no engine was measured")
    spec = curve.spec
    each = [kv_blocks.kv_blocks_as_predicted(spec, r, parameters["blocks"], records) for r in curve.resolved]
    return max(each, key=lambda v: float("inf") if v.value is None else abs(v.value))


def _beside(judge: Callable[[Curve, Others, float], Verdict]) -> Judge:
    """A judge that compares the curve with others, by the row's bound."""
    return lambda curve, parameters, others: judge(curve, others, parameters["threshold"])


def _by_arithmetic(judge: Callable[[str], Verdict]) -> Judge:
    """A judge that needs the name of the model alone."""
    return lambda curve, parameters, others: judge(curve.subject)


def _wider(curve: Curve) -> bool:
    """An engine that was measured on several numbers of GPUs."""
    return bool(curve.wider)


def _wider_largest(curve: Curve) -> bool:
    """Returns whether the curve is of the claim's largest model, measured on 2 and on 4 GPUs, as the claim requires."""
    degrees = {c.spec.tensor_parallel_size for c in (curve, *curve.wider) if c.spec}
    return curve.subject == LARGEST and degrees >= {2, 4}


def _measured(curve: Curve) -> bool:
    """Returns whether the curve is of an engine whose KV cache the plugin sizes, as it does not an endpoint's."""
    return bool(curve.measurements) and curve.measurements[0].spec.interface != "endpoint"


def _sensed_sweep(curve: Curve) -> bool:
    """A sweep of a GPU that was looked at: without sensors there is nothing to say."""
    return is_sweep(curve) and any(p.gpu_util is not None or p.power_w is not None for p in curve.valid)


def _sensed_decoding(curve: Curve) -> bool:
    """A sweep of which the decoding alone was looked at, at its largest load too."""
    return is_sweep(curve) and bool(curve.valid) and curve.valid[-1].saturation_gap is not None


def _and_smaller(model: str) -> tuple[str, ...]:
    """The models that a comparison with the next smaller one reads."""
    smaller = table1.NEXT_SMALLER.get(short_name(model))
    return (model, smaller) if smaller else (model,)


def _marginal(curve: Curve) -> bool:
    """A sweep of a model of which the paper says it, that has the two loads."""
    loads = {p.concurrency for p in curve.points}
    return is_main_sweep(curve) and curve.subject in FIGURE_7 and {AFTER, 2 * AFTER} <= loads


MIND_THE_GAP = "arXiv:2503.08311"
TOWARDS_PARETO = "arXiv:2404.03353"
_LAW = {"tolerance": curves.TOLERANCE}
FIGURE_7 = ("opt-125m", "opt-1.3b")  # the models whose power rises there; also those of "after a batch size of 128"
AFTER = 128
FIGURE_5 = (*FIGURE_7, "opt-2.7b")  # the models of its replicas; also those whose frontier one GPU reaches
LARGEST = "opt-13b"  # of the models that its figure 1 has
_OF_GPUS, _OF_JOBS = partial(Claim, of="gpus"), partial(Claim, of="jobs")


def _of_replicas(how: OwnSharing) -> tuple[Claim, ...]:
    claim = partial(Claim, of="replicas")
    where = "" if how == "gpus" else " on one GPU"
    return (
        claim(
            replicas.name_of(replicas.PAY, how),
            f"Replicas of a small model{where}, {replicas.HOW[how]}, serve more than one engine at its best load.",
            f"{TOWARDS_PARETO}, figure 5; {MIND_THE_GAP}",
            _by(replicas.replicas_pay, "sharing", "threshold"),
            partial(replicas.has_replicas, sharing=how),
            parameters={"sharing": how, "threshold": 1.0},
            evidence=f"raw results of {MIND_THE_GAP}: 2 replicas of OPT-1.3B serve 1.236 times as much under MPS",
        ),
        claim(
            replicas.name_of(replicas.SOONER, how),
            f"Replicas {replicas.HOW[how]} answer sooner in the mean than one engine does.",
            f"{TOWARDS_PARETO}, figure 5",
            _by(partial(replicas.compared_with_one, replicas.SOONER), "sharing", "threshold"),
            partial(replicas.has_replicas, sharing=how),
            parameters={"sharing": how, "threshold": 1.0},
            evidence="Little's law: as many requests in flight and more served means less time for each, in the mean",
        ),
        claim(
            replicas.name_of(replicas.TAIL, how),
            f"Replicas {replicas.HOW[how]} do not lengthen the 99th percentile of E2E.",
            "the run itself: no figure of the papers has tails",
            _by(partial(replicas.compared_with_one, replicas.TAIL), "sharing", "threshold"),
            partial(replicas.has_replicas, sharing=how),
            parameters={"sharing": how, "threshold": 1.0},
            evidence="where more is served in all, the slowest requests gain too if the replicas are served alike",
        ),
        claim(
            replicas.name_of(replicas.USE_MORE, how),
            f"Replicas {replicas.HOW[how]} use the GPU considerably more: a tenth or more of GPU utilisation.",
            f"{TOWARDS_PARETO}, figure 6",
            _by(partial(replicas.compared_with_one, replicas.USE_MORE), "sharing", "threshold"),
            partial(replicas.has_replicas, sharing=how),
            parameters={"sharing": how, "threshold": 1.1},
            expected="either",
            evidence="the paper's three models; no number is given",
        ),
        claim(
            replicas.name_of(replicas.DRAW_MORE, how),
            f"Replicas {replicas.HOW[how]} draw more power than one engine.",
            f"{TOWARDS_PARETO}, figure 7, of OPT-125M and OPT-1.3B",
            _by(partial(replicas.compared_with_one, replicas.DRAW_MORE), "sharing", "threshold"),
            lambda curve: curve.subject in FIGURE_7 and replicas.has_replicas(curve, how),
            parameters={"sharing": how, "threshold": 1.0},
            expected="either",
            evidence="a GPU that is used more draws more",
        ),
        claim(
            replicas.name_of(replicas.KEEP_POWER, how),
            f"Replicas {replicas.HOW[how]} of OPT-2.7B draw as much power as one engine, within 5 %.",
            f"{TOWARDS_PARETO}, figure 7",
            _by(partial(replicas.compared_with_one, replicas.KEEP_POWER), "sharing", "threshold"),
            lambda curve: curve.subject == "opt-2.7b" and replicas.has_replicas(curve, how),
            parameters={"sharing": how, "threshold": 1.05},
            expected="either",
            evidence="the paper: constant for OPT-2.7B",
        ),
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        curves.PLATEAU,
        "Throughput reaches a plateau within the engine's KV capacity: a further doubling of the load gains little.",
        f"{MIND_THE_GAP}; {TOWARDS_PARETO}",
        _by(curves.Curve.pareto_plateau, "tolerance"),
        parameters=_LAW,
        evidence=f"raw results of {MIND_THE_GAP}: OPT-1.3B gains 13.7 % from 128 to 256, 3.6 % from 256 to 512",
    ),
    Claim(
        curves.LATENCY,
        "Past the plateau each doubling of the load still raises the mean latency.",
        f"{MIND_THE_GAP}; {TOWARDS_PARETO}",
        _by(curves.Curve.latency_keeps_rising, "tolerance"),
        parameters=_LAW,
        evidence="Little's law: at constant throughput the time in the engine doubles with the load",
    ),
    Claim(
        curves.PARETO,
        "Every load up to the plateau is Pareto-optimal: none beats it in both throughput and mean latency.",
        TOWARDS_PARETO,
        _by(curves.Curve.pareto_up_to_plateau, "tolerance", "margin"),
        parameters={**_LAW, "margin": curves.MARGIN},
        evidence="a step of more sequences is never shorter, so latency rises with throughput",
    ),
    Claim(
        interference.CLAIM,
        "A measurement is the same alone and beside engines on other GPUs of the host.",
        "the run itself",
        _by(interference.neighbours_do_not_disturb, "margin"),
        lambda curve: any(m.neighbours for m in curve.measurements),
        parameters={"margin": 0.03},
        evidence="the margin of the gate: what would be taken for a regression must not come from a neighbour",
    ),
    Claim(
        kv_blocks.KV_BLOCKS,
        "The engine has the KV blocks that the model's shape and the KV bytes predict.",
        "vLLM's paged KV cache (arXiv:2309.06180)",
        _kv_blocks,
        _measured,
        parameters={"blocks": kv_blocks.BLOCK_TOLERANCE},
        evidence=f"logs that belong to {MIND_THE_GAP}: 18,573 blocks, 18,572 predicted (OPT-1.3B)",
    ),
    Claim(
        curves.MARGINAL,
        "After 128 requests in flight the improvement of throughput is marginal: below 10 % to 256.",
        TOWARDS_PARETO,
        lambda curve, parameters, others: curve.marginal_after(AFTER, parameters["tolerance"]),
        _marginal,
        parameters=_LAW,
        expected="either",
        evidence=f"raw results of {MIND_THE_GAP}: OPT-1.3B gains 13.7 % from 128 to 256",
    ),
    Claim(
        gpu_claims.FEW_WARPS,
        "Even at the largest load, fewer warps are resident than while a kernel saturates the GPU (14.3 %).",
        f"{TOWARDS_PARETO}, figure 3; {MIND_THE_GAP}, figures 5 and 6",
        _by(gpu_claims.few_warps, "threshold"),
        _sensed_sweep,
        parameters={"threshold": 0.143},  # a fp16 matrix product of 8192 on an H200, docs/sensors.md
        expected="either",
        evidence=f"raw results of {MIND_THE_GAP}: OPT-1.3B at 512 keeps 13.5 % of the warps resident on an H100",
    ),
    Claim(
        gpu_claims.SM_ACTIVITY,
        "Average SM activity remains low: below half of the SMs have work, at every load.",
        f"{TOWARDS_PARETO}, figure 3",
        _by(partial(gpu_claims.never_above, gpu_claims.SM_ACTIVITY), "threshold"),
        _sensed_sweep,
        parameters={"threshold": 0.5},
        expected="either",
        evidence="the paper gives no number for the average; its maximum reaches the limit",
    ),
    Claim(
        gpu_claims.HOST_SHARE,
        "Overheads of the CPU take at most half of the time, at every load.",
        TOWARDS_PARETO,
        _by(partial(gpu_claims.never_above, gpu_claims.HOST_SHARE), "threshold"),
        _sensed_sweep,
        parameters={"threshold": 0.5},
        expected="either",
        evidence='the paper: "up to 50 %" of the latency',
    ),
    Claim(
        gpu_claims.UTIL_FALLS,
        "GPU utilisation decreases with large batches.",
        f"{TOWARDS_PARETO}, figure 8",
        _by(gpu_claims.util_falls, "threshold"),
        _sensed_sweep,
        parameters={"threshold": 1.0},
        expected="either",
        evidence="the paper: it remains constant, and decreases with large batches",
    ),
    Claim(
        gpu_claims.BLIND_UTIL,
        "GPU utilisation saturates well before throughput does.",
        f"{TOWARDS_PARETO}, figure 8",
        _by(gpu_claims.util_saturates_first, "threshold", "full"),
        _sensed_sweep,
        parameters={"threshold": 1.5, "full": 0.9},
        expected="either",
        evidence="GPU utilisation is the share of time in which any kernel ran (NVIDIA, nvml.h)",
    ),
    Claim(
        gpu_claims.MEMORY_BOUND,
        "While it decodes, at every load, the memory is nearer to what it can reach than the tensor cores are.",
        MIND_THE_GAP,
        _by(gpu_claims.memory_bound, "margin"),
        _sensed_decoding,
        parameters={"margin": 1.0},
        evidence="by shapes, decoding an OPT tends to 12 to 50 FLOP/byte, and the ridge of these GPUs is 139 to 606",
    ),
    Claim(
        gpu_claims.SATURATED,
        "While it decodes at the largest load, DRAM is active for at least 80 % of what it can reach.",
        MIND_THE_GAP,
        _by(gpu_claims.saturates_dram, "near"),
        _sensed_decoding,
        parameters={"near": 0.8},
        expected="either",
        evidence="the paper: DRAM bandwidth saturation is the primary bottleneck",
    ),
    Claim(
        minimal_impact.CLAIM,
        "The batch of the advisor, for twice the latency at 32, has minimal impact on throughput: 90 % of the most.",
        MIND_THE_GAP,
        _by(minimal_impact.advised_batch_costs_little, "threshold"),
        minimal_impact.has_objective,
        parameters={"threshold": 0.9},
        expected="either",
        evidence='the paper: "minimal impact on throughput"',
    ),
    Claim(
        gpu_claims.CHEAPER_TOKENS,
        "An output token at the largest load takes at most half of the energy of one at the smallest.",
        MIND_THE_GAP,
        _by(gpu_claims.cheaper_tokens, "threshold"),
        _sensed_sweep,
        parameters={"threshold": 0.5},
        evidence=f"raw results of {MIND_THE_GAP}: OPT-1.3B takes 0.67 J a token at batch 1, 0.031 J at 256",
    ),
    Claim(
        gpu_claims.DEARER_MODELS,
        "A larger model takes more energy per output token, each at its largest batch of table 1.",
        f"by shapes; batches of {TOWARDS_PARETO}, table 1",
        _beside(gpu_claims.dearer_models),
        lambda curve: curve.subject in table1.NEXT_SMALLER and gpu_claims.at_table_1(curve) is not None,
        _and_smaller,
        parameters={"threshold": 1.0},
        evidence="at its own largest batch a larger model reads more bytes per token, and serves fewer at once",
    ),
    Claim(
        gpu_claims.LESS_POWER,
        "OPT-6.7B and 13B draw considerably more power than OPT-1.3B and 2.7B, each at its batch of table 1.",
        f"{TOWARDS_PARETO}, figure 4",
        _beside(gpu_claims.draws_more),
        lambda curve: curve.subject in ("opt-6.7b", "opt-13b") and gpu_claims.at_table_1(curve) is not None,
        lambda model: (model, *gpu_claims.SMALL),
        parameters={"threshold": 1.1},
        expected="either",
        evidence='the paper: "considerably lower"; no number is given',
    ),
    *(claim for how in get_args(OwnSharing) for claim in _of_replicas(how)),
    _OF_GPUS(
        deployments.PER_GPU,
        "Spread over more GPUs, an engine whose load fits into one serves less per GPU.",
        f"{TOWARDS_PARETO}, figure 1",
        _by(deployments.loses_per_gpu, "threshold"),
        _wider,
        parameters={"threshold": 1.0},
        evidence="each layer waits for two all-reduces, and what the host does for a step is not divided",
    ),
    _OF_GPUS(
        deployments.SLOWER,
        "Tensor parallelism lowers the total throughput of OPT-125M, 1.3B and 2.7B.",
        f"{TOWARDS_PARETO}, figure 1",
        _by(deployments.less_in_all, "threshold"),
        lambda curve: _wider(curve) and curve.subject in FIGURE_5,
        parameters={"threshold": 1.0},
        expected="either",
        evidence="a step of OPT-125M takes some milliseconds, most of them not of the GPU; 24 all-reduces come on top",
    ),
    _OF_GPUS(
        deployments.STILL_GAINS,
        "The largest model still gains from two GPUs to four, each under its best load.",
        f"{TOWARDS_PARETO}, figure 1",
        _by(deployments.still_gains, "fewer", "more", "threshold"),
        _wider_largest,
        parameters={"fewer": 2, "more": 4, "threshold": 1.0},
        evidence="reading 13 GB of weights and as much of KV cache takes longer than the 80 all-reduces of a step",
    ),
    _OF_GPUS(
        deployments.REPLICAS,
        "A model that fits one GPU gains less from an engine over several than from a replica on each of them.",
        f"{TOWARDS_PARETO}, figure 1",
        _by(deployments.replicas_beat, "threshold"),
        lambda curve: _wider(curve) and replicas.has_replicas(curve, "gpus"),
        parameters={"threshold": 1.0},
        evidence="replicas wait for nobody; each reads all of the weights, which matters less the larger the batch is",
    ),
    _OF_JOBS(
        job_claims.FOLLOWS,
        "At a low rate of arrivals requests are served as fast as they come, whatever the length of their outputs.",
        f"{TOWARDS_PARETO}, figure 2, right",
        _by(job_claims.throughput_follows_arrivals, "threshold"),
        job_claims.has_grid,
        parameters={"threshold": 0.8},
        evidence="below its capacity an engine serves what comes; the last requests of a job take their time as well",
    ),
    _OF_JOBS(
        job_claims.LONGER,
        "With all requests at once, fewer are served per second the longer their outputs are.",
        f"{TOWARDS_PARETO}, figure 2, right",
        _by(partial(job_claims.longest_over_shortest, job_claims.LONGER), "threshold"),
        job_claims.has_grid,
        parameters={"threshold": 0.75},
        evidence="each output token is a step more: at 8 times the length only the prompt is as cheap as before",
    ),
    _OF_JOBS(
        job_claims.SHRINKS,
        "With all requests at once, the engine's mean batch is smaller the longer the outputs are.",
        f"{TOWARDS_PARETO}, figure 2, right",
        _by(partial(job_claims.longest_over_shortest, job_claims.SHRINKS), "threshold"),
        job_claims.has_grid,
        parameters={"threshold": 1.0},
        expected="either",
        evidence="longer requests hold more of the KV cache, where that bounds the batch",
    ),
    _OF_JOBS(
        job_claims.SLIGHTLY,
        "With all requests at once, latency rises slightly with the length of the outputs: to 1.5 times at most.",
        f"{TOWARDS_PARETO}, figure 2, right",
        _by(partial(job_claims.longest_over_shortest, job_claims.SLIGHTLY), "threshold"),
        job_claims.has_grid,
        parameters={"threshold": 1.5},
        expected="either",
        evidence='the paper: "a slight increase"; no number is given',
    ),
    _OF_JOBS(
        job_claims.WAITS,
        "A request that comes with all others at once lasts longer than one that comes at a low rate.",
        f"{TOWARDS_PARETO}, figure 2, right",
        _by(job_claims.all_at_once_waits_longer, "threshold"),
        lambda curve: len({p.load.at_once for p in job_claims.grid_of(curve.jobs)}) > 1,
        parameters={"threshold": 1.2},
        evidence="a step of all requests is longer than one of those that a low rate brings together",
    ),
    _OF_JOBS(
        job_claims.ALIKE,
        "Models of about one size have about the same throughput and latency, whatever their family and batch.",
        f"{TOWARDS_PARETO}, figure 2, left",
        _beside(job_claims.alike_at_one_size),
        lambda curve: len(job_claims.sizes_of(curve.jobs)) > 1 and curve.subject in job_claims.SIZED_AS,
        job_claims.compared_with,
        parameters={"threshold": 1.25},
        evidence="by shapes: weights and KV bytes per token differ by at most 14 %",
    ),
    _OF_JOBS(
        job_claims.KV,
        "Throughput grows with the number of KV blocks until all requests fit at once, and no more from there.",
        f"a talk of the authors of {TOWARDS_PARETO}",
        _by(job_claims.throughput_grows_with_kv_blocks, "threshold", "flat"),
        lambda curve: len({p.kv_blocks for p in job_claims.caches_of(curve.jobs)}) > 1,
        parameters={"threshold": 1.1, "flat": 1.1},
        evidence="the blocks bound the batch, and the law of saturation does the rest",
    ),
    _OF_JOBS(
        job_claims.LIMIT_PLATEAU,
        "With all requests at once, throughput reaches a plateau: the last doubling of max_num_seqs gains little.",
        f"{TOWARDS_PARETO}, figure 1",
        _by(job_claims.batch_limit_reaches_a_plateau, "threshold"),
        job_claims.has_limits,
        parameters={"threshold": 1.1},
        evidence="the paper: the frontier appears within the capacity of a single accelerator",
    ),
    _OF_JOBS(
        job_claims.LIMIT_MARGINAL,
        "With all requests at once, the improvement after a batch size of 128 is marginal: below 10 % each time.",
        TOWARDS_PARETO,
        _by(job_claims.batch_limit_gains_little_after, "threshold", "after"),
        lambda curve: curve.subject in FIGURE_7 and job_claims.has_limits_after(curve, AFTER),
        parameters={"threshold": 1.1, "after": AFTER},
        expected="either",
        evidence="the paper, of OPT-125M and OPT-1.3B",
    ),
    _OF_JOBS(
        job_claims.LIMIT_LATENCY,
        "With all requests at once, a batch larger than the plateau needs costs considerable latency.",
        f"{TOWARDS_PARETO}, figure 1",
        _by(job_claims.batch_limit_costs_latency, "threshold", "little"),
        job_claims.has_limits,
        parameters={"threshold": 1.1, "little": 1.1},
        expected="either",
        evidence="the paper gives no number; a request that waits less in the queue is served among more",
    ),
    _OF_JOBS(
        job_claims.CONTINUOUS_MOST,
        "Continuous batching serves more than any way to make batches one after the other.",
        "Orca (OSDI 2022); vLLM (arXiv:2309.06180)",
        _by(job_claims.continuous_batching_serves_most, "threshold"),
        lambda curve: {CONTINUOUS} < job_claims.batchings(curve, at_once=True),
        parameters={"threshold": 1.0},
        evidence="a batch lasts as long as its longest output, and a slot that is free earlier stays empty",
    ),
    _OF_JOBS(
        job_claims.DYNAMIC_SOONER,
        "At a rate, batches that wait for a while are answered sooner than batches that wait until they are full.",
        "Clipper (arXiv:1612.03079), adaptive batching with a delay",
        _by(job_claims.dynamic_batching_answers_sooner, "threshold"),
        lambda curve: {"dynamic", "static"} <= job_claims.batchings(curve, at_once=False),
        parameters={"threshold": 1.0},
        evidence="at a rate r the first request of a full batch of B waits (B - 1)/r, of a dynamic one 0.1 s at most",
    ),
    Claim(
        table1.CLAIM,
        "The paper's largest batch fits into 0.9 x 40 GiB with every request at its full length.",
        f"{TOWARDS_PARETO}, table 1",
        _by_arithmetic(table1.published_batch_fits),
        reads=lambda model: (),
        evidence="parameters and KV bytes per token from the published shapes",
    ),
    Claim(
        table1.REQUEST_CLAIM,
        "A request of OPT-1.3B with 512 prompt and 256 output tokens takes 50 MB of KV cache.",
        f"{TOWARDS_PARETO}, text",
        _by_arithmetic(table1.published_request_size),
        reads=lambda model: (),
        evidence="the paper gives the size for one model only",
    ),
    Claim(
        table1.BATCH_CLAIM,
        "A batch of 512 such requests demands at most 25.6 GB.",
        f"{TOWARDS_PARETO}, text",
        _by_arithmetic(table1.published_batch_size),
        reads=lambda model: (),
        evidence="512 times the size of a request",
    ),
    Claim(
        table1.HUNDREDS_CLAIM,
        "Models larger than OPT-125M cannot process the 500 requests concurrently.",
        f"{TOWARDS_PARETO}, text",
        _by_arithmetic(table1.cannot_hold_hundreds),
        reads=lambda model: (),
        evidence="requests at full length in 36 GiB less the weights",
    ),
)

_PARAMETERS = {claim.name: claim.parameters for claim in CLAIMS}


def _fails(claim: str, model: str, evidence: str, **where: Any) -> ClaimRow:
    """A claim that is known to fail for a model. where: device, interface and ramp-up of the row."""
    return ClaimRow(claim, model, parameters=_PARAMETERS[claim], expected="fails", evidence=evidence, **where)


FAILS_WITH_REPLICAS: tuple[tuple[str, OwnSharing, str, str], ...] = (
    (replicas.SOONER, "time-slicing", "opt-1.3b", "vLLM 0.26.0, on two hosts: 4.24 s with two, 4.00 s with one"),
    (replicas.SOONER, "time-slicing", "opt-2.7b", "vLLM 0.26.0: 4.94 s with two, 3.98 s with one"),
    (replicas.SOONER, "mps", "opt-2.7b", "vLLM 0.26.0: 4.28 s with two, 3.98 s with one"),
    (replicas.TAIL, "time-slicing", "opt-1.3b", "vLLM 0.26.0, on two hosts: 4.24 s with two, 4.02 s with one"),
    (replicas.TAIL, "mps", "opt-2.7b", "vLLM 0.26.0: 4.29 s with two, 4.00 s with one"),
)

ROWS: tuple[ClaimRow, ...] = (
    *(
        ClaimRow(claim.name, parameters=claim.parameters, expected=claim.expected, evidence=claim.evidence)
        for claim in CLAIMS
    ),
    _fails(
        curves.PLATEAU,
        "opt-125m",
        "vLLM 0.26.0: it gains 52 % from 256 to 512 in flight and 26 % more to 1024, the largest load",
        device="H200",
        interface="engine",  # the server's one front end ends the gain before the GPU does
        ramp_up="staggered",
    ),
    _fails(
        curves.PLATEAU,
        "opt-125m",
        "vLLM 0.26.0: it gains 34 % from 512 to 1024 in flight, the largest load; the host limits it",
        device="H100",
        interface="engine",
        ramp_up="staggered",
    ),
    *(
        ClaimRow(
            curves.LATENCY,
            "opt-125m",
            parameters=_LAW,
            expected="either",
            evidence="up to 1024 in flight there is no plateau past which to judge",
            device=device,
            interface="engine",
            ramp_up="staggered",
        )
        for device in ("H200", "H100")
    ),
    ClaimRow(
        interference.CLAIM,
        device="cpu",
        parameters={"margin": 0.15},
        evidence="engines on two halves of one CPU share its caches and its memory, and repeats differ by 4 to 6 %",
    ),
    ClaimRow(
        curves.PARETO,
        device="cpu",
        parameters={**_LAW, "margin": 0.10},
        evidence="repeats on two shared cores differ by 4 to 6 %: two of them cannot tell less than about 10 % apart",
    ),
    _fails(
        gpu_claims.MEMORY_BOUND,
        "opt-2.7b",
        "vLLM 0.26.0: at 256 in flight DRAM 36 %, tensor cores 50 %, nearly all of it padding (head size 80)",
        device="H200",
        ramp_up="burst",
    ),
    _fails(
        gpu_claims.MEMORY_BOUND,
        "qwen2.5-3b",
        "by shapes it tends to 1,316 FLOP/byte; vLLM 0.26.0: at 1024 in flight DRAM 13 %, tensor cores 23 %",
        device="H200",
        ramp_up="burst",
    ),
    _fails(
        replicas.name_of(replicas.PAY, "mps"),
        "opt-2.7b",
        "vLLM 0.26.0: 2 serve 0.932 times as much, 3 0.859: the GPU is busy and at its power limit with one",
        device="H200",
    ),
    *(
        _fails(
            replicas.name_of(claim, "time-slicing"),
            "opt-2.7b",
            "vLLM 0.26.0: 2 serve 0.807 times as much, 3 0.709: every replica pays a step's fixed part anew",
            device="H200",
        )
        for claim in (replicas.PAY, replicas.TAIL)
    ),
    _fails(
        replicas.name_of(replicas.PAY, "time-slicing"),
        "opt-1.3b",
        "vLLM 0.26.0: one engine runs a kernel 99.5 % of the time, so those that take turns serve 1.005 times at most",
        device="H200",
    ),
    *(
        _fails(replicas.name_of(claim, how), model, evidence, device="H200")
        for claim, how, model, evidence in FAILS_WITH_REPLICAS
    ),
    _fails(table1.BATCH_CLAIM, table1.REQUEST_MODEL, "512 times 151 MB are 77.3 GB"),
    _fails(
        table1.REQUEST_CLAIM,
        table1.REQUEST_MODEL,
        "2 x 2 bytes x 2048 wide x 24 layers are 196,608 a token: 151 MB for 768 tokens, 50.3 MB for 256",
    ),
    _fails(
        table1.CLAIM,
        "opt-1.3b",
        "238 requests of 151.0 MB fit into 36 GiB less 2.63 GB of weights, the paper has 256",
    ),
    _fails(
        table1.CLAIM,
        "opt-6.7b",
        "62 requests of 402.7 MB fit into 36 GiB less 13.32 GB of weights, the paper has 64",
    ),
)


def claim_of(name: str) -> Claim:
    """The claim of that name. Raises BadUsage for an unknown one."""
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    known = [claim.name for claim in CLAIMS]
    near = get_close_matches(str(name), known)
    raise BadUsage(f"unknown claim {name!r}", " or ".join(near) or f"one of {', '.join(known)}")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.26.0rc1+cu130" is (0, 26, 0)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def row_for(
    claim: str,
    model: str,
    environment: Environment | None = None,
    interface: Interface | None = None,
    ramp_up: RampUp | None = None,
    rows: tuple[ClaimRow, ...] = ROWS,
) -> ClaimRow:
    """The row with the expectation of a claim for this model, environment, interface and ramp-up: the most specific
    that fits.

    The entries of a row count in this order: the model, a GPU family, a platform, the interface, the ramp-up, a range
    of vLLM. An unknown environment, release, interface or ramp-up fits only rows that leave it open. Raises BadUsage
    for an unknown claim.
    """
    claim_of(claim)
    where = environment or Environment()
    fitting = [row for row in rows if row.claim == claim and _fits(row, model, where, interface, ramp_up)]
    if not fitting:
        raise BadUsage(f"no row of the claims table says what to expect of {claim} for {model}", "a row for any model")
    return max(fitting, key=_specific)


def _fits(row: ClaimRow, model: str, where: Environment, interface: Interface | None, ramp_up: RampUp | None) -> bool:
    peaks = peaks_of(where.gpu_name)
    devices = {ANY, where.platform, peaks.family if peaks else None}
    here = row.model in (ANY, short_name(model)) and row.device in devices and _in_range(row.vllm, where.vllm)
    return here and row.interface in (ANY, interface) and row.ramp_up in (ANY, ramp_up)


def _in_range(wanted: tuple[str, str], version: str | None) -> bool:
    """Returns whether a version is in a range, its end excluded. An unknown version is in no range but the open one."""
    first, last = wanted
    if version is None:
        return wanted == ANY_RELEASE
    return release(first) <= release(version) and (not last or release(version) < release(last))


def _specific(row: ClaimRow) -> tuple[int, ...]:
    device = 0 if row.device == ANY else 1 if row.device in get_args(Platform) else 2
    return row.model != ANY, device, row.interface != ANY, row.ramp_up != ANY, row.vllm != ANY_RELEASE


def judge_row(claim: str, curve: Curve, row: ClaimRow, others: Others = ()) -> Verdict:
    """Judge a claim by the row's parameters; inconclusive for want of data. others: curves measured beside it."""
    return claim_of(claim).judge(curve, row.parameters, others)


def row_to_record(row: ClaimRow) -> dict[str, Any]:
    """A row as plain JSON values."""
    return {**asdict(row), "vllm": list(row.vllm)}


def row_from_record(facts: Mapping[str, Any]) -> ClaimRow:
    """The inverse of `row_to_record`; entries of a later release are left out."""
    known = known_fields(ClaimRow, dict(facts))
    return ClaimRow(**{**known, "vllm": tuple(known.get("vllm", ANY_RELEASE))})
