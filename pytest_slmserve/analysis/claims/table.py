"""The table of claims, read from `claims.toml`, and the functions that judge them.

The file says of each claim its statement, source, parameters and evidence, and which verdict is expected of it where.
Here `judge_row` chooses the function that judges a claim, `applies` says for which curves there is something to judge,
and `models_read` names the models whose measurements it takes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pytest_slmserve.analysis.advice import subjects as advice
from pytest_slmserve.analysis.advice import verification
from pytest_slmserve.analysis.claims import claim as table1
from pytest_slmserve.analysis.claims import gpu_claims, job_claims
from pytest_slmserve.analysis.claims.claim import ANY, ANY_RELEASE, Claim, ClaimRow, Others, Parameters
from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.metrics.roofline import peaks_of
from pytest_slmserve.analysis.points import CONTINUOUS
from pytest_slmserve.analysis.sweep import curve as curves
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, is_sweep
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, release
from pytest_slmserve.schema.errors import BadUsage, Interface, Platform, RampUp, Sharing
from pytest_slmserve.schema.records import known_fields

FIGURE_7 = ("opt-125m", "opt-1.3b")  # the models whose power rises there; also those of "after a batch size of 128"
AFTER = 128
FIGURE_5 = (*FIGURE_7, "opt-2.7b")  # the models of its replicas; also those whose frontier one GPU reaches
LARGEST = "opt-13b"  # of the models that its figure 1 has


def _read() -> tuple[tuple[Claim, ...], tuple[ClaimRow, ...]]:
    """Return the claims and the rows of `claims.toml`: first the row of each claim for any model, then the others."""
    facts = tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))
    claims: list[Claim] = []
    for ways, entries in groupby(facts["claim"], key=lambda entry: entry.pop("sharing", ())):
        group = list(entries)
        claims += [_claim(entry, way) for way in ways or [None] for entry in group]
    rows = [ClaimRow(c.name, parameters=c.parameters, expected=c.expected, evidence=c.evidence) for c in claims]
    general = {row.claim: row.parameters for row in rows}
    for entry in facts["row"]:
        vllm = tuple(entry.pop("vllm", ANY_RELEASE))
        rows.append(ClaimRow(**{"parameters": general[entry["claim"]], "vllm": vllm, **entry}))
    return tuple(claims), tuple(rows)


def _claim(entry: Mapping[str, Any], way: Sharing | None) -> Claim:
    """Return the claim of an entry, for one of its ways of sharing if it has any."""
    given = dict(entry)
    kind = given.pop("name")
    if way is None:
        return Claim(kind, kind, **given)
    words = {"how": deployments.HOW[way], "where": "" if way == "gpus" else " on one GPU"}
    given |= {"statement": given["statement"].format(**words), "parameters": {"sharing": way, **given["parameters"]}}
    return Claim(deployments.name_of(kind, way), kind, **given)


CLAIMS, ROWS = _read()


def judge_row(claim: str, curve: Curve, row: ClaimRow, others: Others = ()) -> Verdict:
    """Return the verdict on a claim by the row's parameters; inconclusive if data is missing.

    Args:
        others: Curves measured in the same run, for claims that compare models.
    """
    known, parameters = claim_of(claim), row.parameters
    match known.of:
        case "sweeps":
            return _judge_sweep(known.kind, curve, parameters, others)
        case "replicas":
            sharing, threshold = parameters["sharing"], parameters["threshold"]
            if known.kind == deployments.PAY:
                return deployments.replicas_pay(curve, sharing, threshold)
            return deployments.compared_with_one(known.kind, curve, sharing, threshold)
        case "gpus":
            return _judge_gpus(known.kind, curve, parameters)
        case "jobs":
            return _judge_jobs(known.kind, curve, parameters, others)
        case "arithmetic":
            return _judge_arithmetic(known.kind, curve.subject)


def _judge_sweep(kind: str, curve: Curve, parameters: Parameters, others: Others) -> Verdict:
    threshold = parameters.get("threshold", 0.0)
    match kind:
        case curves.PLATEAU:
            return curve.pareto_plateau(parameters["tolerance"])
        case curves.LATENCY:
            return curve.latency_keeps_rising(parameters["tolerance"])
        case curves.PARETO:
            return curve.pareto_up_to_plateau(parameters["tolerance"], parameters["margin"])
        case curves.MARGINAL:
            return curve.marginal_after(AFTER, parameters["tolerance"])
        case deployments.CLAIM:
            return deployments.neighbours_do_not_disturb(curve, parameters["margin"])
        case verification.KV_BLOCKS:
            return _kv_blocks(curve, parameters["blocks"])
        case gpu_claims.FEW_WARPS:
            return gpu_claims.few_warps(curve, threshold)
        case gpu_claims.SM_ACTIVITY | gpu_claims.HOST_SHARE:
            return gpu_claims.never_above(kind, curve, threshold)
        case gpu_claims.UTIL_FALLS:
            return gpu_claims.util_falls(curve, threshold)
        case gpu_claims.BLIND_UTIL:
            return gpu_claims.util_saturates_first(curve, threshold, parameters["full"])
        case gpu_claims.MEMORY_BOUND:
            return gpu_claims.memory_bound(curve, parameters["margin"])
        case gpu_claims.SATURATED:
            return gpu_claims.saturates_dram(curve, parameters["near"])
        case advice.CLAIM:
            return advice.advised_batch_costs_little(curve, threshold)
        case gpu_claims.CHEAPER_TOKENS:
            return gpu_claims.cheaper_tokens(curve, threshold)
        case gpu_claims.DEARER_MODELS:
            return gpu_claims.dearer_models(curve, others, threshold)
        case gpu_claims.LESS_POWER:
            return gpu_claims.draws_more(curve, others, threshold)
    raise LookupError(f"no function judges {kind}")


def _kv_blocks(curve: Curve, tolerance: int) -> Verdict:
    """Verdict on the KV blocks of the launch that is farthest off, so that one bad launch among many shows."""
    if curve.spec is None or not curve.resolved:
        return Verdict.inconclusive(verification.KV_BLOCKS, curve.subject, "no engine was measured")
    records = tuple(i for p in curve.points for i in p.records)
    each = [verification.kv_blocks_as_predicted(curve.spec, r, tolerance, records) for r in curve.resolved]
    return max(each, key=lambda v: float("inf") if v.value is None else abs(v.value))


def _judge_gpus(kind: str, curve: Curve, parameters: Parameters) -> Verdict:
    threshold = parameters["threshold"]
    match kind:
        case deployments.PER_GPU:
            return deployments.loses_per_gpu(curve, threshold)
        case deployments.SLOWER:
            return deployments.less_in_all(curve, threshold)
        case deployments.STILL_GAINS:
            return deployments.still_gains(curve, parameters["fewer"], parameters["more"], threshold)
        case deployments.REPLICAS:
            return deployments.replicas_beat(curve, threshold)
    raise LookupError(f"no function judges {kind}")


def _judge_jobs(kind: str, curve: Curve, parameters: Parameters, others: Others) -> Verdict:
    threshold = parameters["threshold"]
    match kind:
        case job_claims.FOLLOWS:
            return job_claims.throughput_follows_arrivals(curve, threshold)
        case job_claims.LONGER | job_claims.SHRINKS | job_claims.SLIGHTLY:
            return job_claims.longest_over_shortest(kind, curve, threshold)
        case job_claims.WAITS:
            return job_claims.all_at_once_waits_longer(curve, threshold)
        case job_claims.ALIKE:
            return job_claims.alike_at_one_size(curve, others, threshold)
        case job_claims.KV:
            return job_claims.throughput_grows_with_kv_blocks(curve, threshold, parameters["flat"])
        case job_claims.LIMIT_PLATEAU:
            return job_claims.batch_limit_reaches_a_plateau(curve, threshold)
        case job_claims.LIMIT_MARGINAL:
            return job_claims.batch_limit_gains_little_after(curve, threshold, parameters["after"])
        case job_claims.LIMIT_LATENCY:
            return job_claims.batch_limit_costs_latency(curve, threshold, parameters["little"])
        case job_claims.CONTINUOUS_MOST:
            return job_claims.continuous_batching_serves_most(curve, threshold)
        case job_claims.DYNAMIC_SOONER:
            return job_claims.dynamic_batching_answers_sooner(curve, threshold)
    raise LookupError(f"no function judges {kind}")


def _judge_arithmetic(kind: str, model: str) -> Verdict:
    match kind:
        case table1.CLAIM:
            return table1.published_batch_fits(model)
        case table1.REQUEST_CLAIM:
            return table1.published_request_size(model)
        case table1.BATCH_CLAIM:
            return table1.published_batch_size(model)
        case table1.HUNDREDS_CLAIM:
            return table1.cannot_hold_hundreds(model)
    raise LookupError(f"no function judges {kind}")


def applies(claim: Claim, curve: Curve) -> bool:
    """Return whether the curve has something that the claim judges, for a report on whatever was measured."""
    match claim.of, claim.kind:
        case "replicas", kind:
            models = {deployments.DRAW_MORE: FIGURE_7, deployments.KEEP_POWER: ("opt-2.7b",)}.get(kind)
            return (models is None or curve.subject in models) and deployments.has_replicas(
                curve, claim.parameters["sharing"]
            )
        case "gpus", kind:
            degrees = {c.spec.tensor_parallel_size for c in (curve, *curve.wider) if c.spec}
            return (
                bool(curve.wider)
                and {
                    deployments.PER_GPU: True,
                    deployments.SLOWER: curve.subject in FIGURE_5,
                    deployments.STILL_GAINS: curve.subject == LARGEST and degrees >= {2, 4},
                    deployments.REPLICAS: deployments.has_replicas(curve, "gpus"),
                }[kind]
            )
        case "jobs", kind:
            return bool(curve.jobs) and _applies_to_jobs(kind, curve)
        case "sweeps", kind:
            return _applies_to_sweep(kind, curve)
    return is_main_sweep(curve)


def _applies_to_sweep(kind: str, curve: Curve) -> bool:
    match kind:
        case deployments.CLAIM:
            return any(m.neighbours for m in curve.measurements)
        case verification.KV_BLOCKS:  # of an engine whose KV cache the plugin sizes, as it does not an endpoint's
            return bool(curve.measurements) and curve.measurements[0].spec.interface != "endpoint"
        case curves.MARGINAL:
            loads = {p.concurrency for p in curve.points}
            return is_main_sweep(curve) and curve.subject in FIGURE_7 and {AFTER, 2 * AFTER} <= loads
        case gpu_claims.MEMORY_BOUND | gpu_claims.SATURATED:  # the decoding alone was seen, at the largest load too
            return is_sweep(curve) and bool(curve.valid) and curve.valid[-1].saturation_gap is not None
        case advice.CLAIM:
            return advice.has_objective(curve)
        case gpu_claims.DEARER_MODELS:
            return curve.subject in table1.NEXT_SMALLER and gpu_claims.at_table_1(curve) is not None
        case gpu_claims.LESS_POWER:
            return curve.subject in ("opt-6.7b", "opt-13b") and gpu_claims.at_table_1(curve) is not None
        case curves.PLATEAU | curves.LATENCY | curves.PARETO:
            return is_main_sweep(curve)
    # Without sensors there is nothing to say of the GPU.
    return is_sweep(curve) and any(p.gpu_util is not None or p.power_w is not None for p in curve.valid)


def _applies_to_jobs(kind: str, curve: Curve) -> bool:
    match kind:
        case job_claims.FOLLOWS | job_claims.LONGER | job_claims.SHRINKS | job_claims.SLIGHTLY:
            return job_claims.has_grid(curve)
        case job_claims.WAITS:
            return len({p.load.at_once for p in job_claims.grid_of(curve.jobs)}) > 1
        case job_claims.ALIKE:
            return len(job_claims.jobs_of_size(curve.jobs)) > 1 and curve.subject in job_claims.SIZED_AS
        case job_claims.KV:
            return len({p.kv_blocks for p in job_claims.caches_of(curve.jobs)}) > 1
        case job_claims.LIMIT_MARGINAL:
            return curve.subject in FIGURE_7 and job_claims.has_limits_after(curve, AFTER)
        case job_claims.CONTINUOUS_MOST:
            return {CONTINUOUS} < job_claims.batchings(curve, at_once=True)
        case job_claims.DYNAMIC_SOONER:
            return {"dynamic", "static"} <= job_claims.batchings(curve, at_once=False)
    return job_claims.has_limits(curve)


def models_read(claim: Claim, model: str) -> tuple[str, ...]:
    """Return the models whose measurements the claim on `model` takes; none for arithmetic."""
    match claim.kind:
        case gpu_claims.DEARER_MODELS:
            smaller = table1.NEXT_SMALLER.get(short_name(model))
            return (model, smaller) if smaller else (model,)
        case gpu_claims.LESS_POWER:
            return model, *gpu_claims.SMALL
        case job_claims.ALIKE:
            return job_claims.compared_with(model)
    return () if claim.of == "arithmetic" else (model,)


def claim_of(name: str) -> Claim:
    """The claim of that name. Raises BadUsage for an unknown one."""
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    known = [claim.name for claim in CLAIMS]
    near = get_close_matches(str(name), known)
    raise BadUsage(f"unknown claim {name!r}", " or ".join(near) or f"one of {', '.join(known)}")


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


def row_to_record(row: ClaimRow) -> dict[str, Any]:
    """A row as plain JSON values."""
    return {**asdict(row), "vllm": list(row.vllm)}


def row_from_record(facts: Mapping[str, Any]) -> ClaimRow:
    """The inverse of `row_to_record`; entries of a later release are left out."""
    known = known_fields(ClaimRow, dict(facts))
    return ClaimRow(**{**known, "vllm": tuple(known.get("vllm", ANY_RELEASE))})
