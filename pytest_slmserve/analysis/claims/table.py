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
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.advice import subjects as advice
from pytest_slmserve.analysis.advice import verification
from pytest_slmserve.analysis.claims import deployment_claims, gpu_claims, job_claims
from pytest_slmserve.analysis.claims.claim import (
    ANY,
    ANY_RELEASE,
    NEXT_SMALLER,
    Claim,
    ClaimRow,
    Evidence,
    Others,
    Parameters,
    judge_arithmetic,
)
from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.metrics.roofline import peaks_of
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, is_sweep
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, release
from pytest_slmserve.schema.errors import BadUsage, Interface, RampUp
from pytest_slmserve.schema.records import known_fields

AFTER = 128  # "after a batch size of 128"
# The parameter that is the threshold, where it has another name.
THRESHOLDS = {"decode-stays-memory-bound": "margin", "decode-saturates-dram": "near"}


def _read() -> tuple[tuple[Claim, ...], tuple[ClaimRow, ...]]:
    """Return the claims and the rows of `claims.toml`: first the row of each claim for any model, then the others."""
    facts = tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))
    claims: list[Claim] = []
    for ways, entries in groupby(facts["claim"], key=lambda entry: entry.pop("sharing", ())):
        group = [{"kind": entry["name"], **entry, "models": tuple(entry.get("models", ()))} for entry in entries]
        claims += [Claim(**entry) for entry in group if not ways]
        for way in ways:
            words = {"how": deployments.HOW[way], "where": "" if way == "gpus" else " on one GPU"}
            for entry in group:
                of_way = {
                    "name": f"{entry['kind']}-{way}",
                    "statement": entry["statement"].format(**words),
                    "parameters": {"sharing": way, **entry["parameters"]},
                }
                claims.append(Claim(**entry | of_way))
    rows = [ClaimRow(c.name, parameters=c.parameters, expected=c.expected, evidence=c.evidence) for c in claims]
    general = {row.claim: row.parameters for row in rows}
    for entry in facts["row"]:
        vllm = tuple(entry.pop("vllm", ANY_RELEASE))
        rows.append(ClaimRow(**{"parameters": general[entry["claim"]], "vllm": vllm, **entry}))
    return tuple(claims), tuple(rows)


CLAIMS, ROWS = _read()


def judge_row(claim: str, curve: Curve, row: ClaimRow, others: Others = ()) -> Verdict:
    """Return the verdict on a claim by the row's parameters; inconclusive if data is missing.

    Args:
        others: Curves measured in the same run, for claims that compare models.

    Raises:
        LookupError: The row lacks a parameter of the claim.
    """
    known, parameters = claim_of(claim), row.parameters
    if known.of == "arithmetic":
        return judge_arithmetic(known.kind, curve.subject)
    if known.passes is not None:
        threshold = parameters[THRESHOLDS.get(known.kind, "threshold")]
        evidence = _evidence(known.kind, curve, others, parameters)
        if isinstance(evidence, str):
            return Verdict.inconclusive(known.name, curve.subject, evidence, threshold)
        return evidence.verdict(known, curve.subject, threshold)
    match known.kind:
        case "throughput-plateau":
            return curve.pareto_plateau(parameters["tolerance"])
        case "latency-rises-past-plateau":
            return curve.latency_keeps_rising(parameters["tolerance"])
        case "pareto-up-to-plateau":
            return curve.pareto_up_to_plateau(parameters["tolerance"], parameters["margin"])
        case "marginal-after-128":
            return curve.marginal_after(AFTER, parameters["tolerance"])
        case deployments.CLAIM:
            return deployments.neighbours_do_not_disturb(curve, parameters["margin"])
        case verification.KV_BLOCKS:
            if curve.spec is None or not curve.resolved:
                return Verdict.inconclusive(verification.KV_BLOCKS, curve.subject, "no engine was measured")
            records, tolerance = tuple(i for p in curve.points for i in p.records), parameters["blocks"]
            each = [verification.kv_blocks_as_predicted(curve.spec, r, tolerance, records) for r in curve.resolved]
            # Of the launch that is farthest off, so that one bad launch among many shows.
            return max(each, key=lambda v: float("inf") if v.value is None else abs(v.value))
    threshold = parameters["threshold"]
    match known.kind:
        case "gpu-util-saturates-first":
            return gpu_claims.util_saturates_first(curve, threshold, parameters["full"])
        case advice.CLAIM:
            return advice.advised_batch_costs_little(curve, threshold)
        case "tensor-parallel-loses-per-gpu" | "tensor-parallel-serves-less-in-all":
            return deployment_claims.serves_less(known.kind, curve, threshold)
        case "throughput-grows-with-kv-blocks":
            return job_claims.throughput_grows_with_kv_blocks(curve, threshold, parameters["flat"])
    raise LookupError(f"no function judges {known.kind}")


def _evidence(kind: str, curve: Curve, others: Others, parameters: Parameters) -> Evidence | str:
    """Return the evidence for a claim of one threshold, or the reason why there is none."""
    match kind:
        case "occupancy-below-a-saturated-kernel" | "decode-saturates-dram":
            return gpu_claims.at_the_largest_load(kind, curve)
        case "sm-activity-stays-low" | "host-takes-at-most-half":
            return gpu_claims.at_every_load(kind, curve)
        case "decode-stays-memory-bound":
            return gpu_claims.memory_over_tensor_cores(curve)
        case "gpu-util-falls-at-the-largest-load" | "energy-per-token-falls-with-load":
            return gpu_claims.largest_over_smallest_load(kind, curve)
        case "energy-per-token-grows-with-model" | "larger-models-draw-more-power":
            return gpu_claims.larger_over_smaller_model(kind, curve, others)
        case "tensor-parallel-still-gains":
            return deployment_claims.over_fewer_gpus_at_best(curve, parameters["fewer"], parameters["more"])
        case "replicas-per-gpu-beat-tensor-parallel":
            return deployment_claims.replicas_over_tensor_parallel(curve)
        case "throughput-follows-arrivals":
            return job_claims.served_over_came(curve)
        case "all-at-once-waits-longer":
            return job_claims.at_once_over_lowest_rate(curve)
        case "alike-at-one-size":
            return job_claims.over_the_opt_of_its_size(curve, others)
        case "batch-limit-reaches-a-plateau" | "batch-limit-gains-little-after-128":
            return job_claims.over_the_limit_before(kind, curve, parameters.get("after", 0))
        case "batch-limit-costs-latency":
            return job_claims.latency_past_the_plateau(curve, parameters["little"])
        case "continuous-batching-serves-most":
            return job_claims.continuous_over_other_batching(curve)
        case "dynamic-batching-answers-sooner":
            return job_claims.dynamic_over_static_batching(curve)
        case (
            "longer-outputs-fewer-requests" | "longer-outputs-shrink-the-batch" | "longer-outputs-wait-slightly-longer"
        ):
            return job_claims.longest_over_shortest(kind, curve)
    return deployment_claims.replicas_over_one_engine(kind, curve, parameters["sharing"])


def applies(claim: Claim, curve: Curve) -> bool:
    """Return whether the curve has something that the claim judges, for a report on whatever was measured."""
    kind, loads = claim.kind, {p.concurrency for p in curve.points}
    if claim.models and curve.subject not in claim.models:
        return False
    match claim.of:
        case "replicas":
            return deployments.has_replicas(curve, claim.parameters["sharing"])
        case "gpus":
            degrees = {c.spec.tensor_parallel_size for c in (curve, *curve.wider) if c.spec}
            still_gains = kind != "tensor-parallel-still-gains" or degrees >= {2, 4}
            beats = kind != "replicas-per-gpu-beat-tensor-parallel" or deployments.has_replicas(curve, "gpus")
            return bool(curve.wider) and still_gains and beats
        case "jobs":
            return bool(curve.jobs) and job_claims.has_jobs_for(kind, curve, AFTER)
        case "arithmetic":
            return is_main_sweep(curve)
    match kind:
        case "throughput-plateau" | "latency-rises-past-plateau" | "pareto-up-to-plateau":
            return is_main_sweep(curve)
        case deployments.CLAIM:
            return any(m.neighbours for m in curve.measurements)
        case verification.KV_BLOCKS:  # of an engine whose KV cache the plugin sizes, as it does not an endpoint's
            return bool(curve.measurements) and curve.measurements[0].spec.interface != "endpoint"
        case "marginal-after-128":
            return is_main_sweep(curve) and {AFTER, 2 * AFTER} <= loads
        case "decode-stays-memory-bound" | "decode-saturates-dram":  # the decoding was seen, at the largest load too
            return is_sweep(curve) and bool(curve.valid) and curve.valid[-1].saturation_gap is not None
        case advice.CLAIM:
            return advice.has_objective(curve)
        case "energy-per-token-grows-with-model" | "larger-models-draw-more-power":
            return gpu_claims.at_table_1(curve) is not None
    # Without sensors there is nothing to say of the GPU.
    return is_sweep(curve) and any(p.gpu_util is not None or p.power_w is not None for p in curve.valid)


def models_read(claim: Claim, model: str) -> tuple[str, ...]:
    """Return the models whose measurements the claim on `model` takes; none for arithmetic."""
    match claim.kind:
        case "energy-per-token-grows-with-model" if smaller := NEXT_SMALLER.get(short_name(model)):
            return model, smaller
        case "larger-models-draw-more-power":
            return model, *gpu_claims.SMALL
        case "alike-at-one-size":
            return model, job_claims.SIZED_AS.get(short_name(model), model)
    return () if claim.of == "arithmetic" else (model,)


def claim_of(name: str) -> Claim:
    """Return the claim of that name. Raises BadUsage for an unknown one."""
    known = {claim.name: claim for claim in CLAIMS}
    if name in known:
        return known[name]
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
    """Return the row with the expectation of a claim for this model, environment, interface and ramp-up: the most
    specific that fits.

    The entries of a row count in this order: the model, a GPU family, a platform, the interface, the ramp-up, a range
    of vLLM, whose end is excluded. An unknown environment, release, interface or ramp-up fits only rows that leave it
    open. Raises BadUsage for an unknown claim.
    """
    claim_of(claim)
    where = environment or Environment()
    peaks = peaks_of(where.gpu_name)
    devices = [ANY, where.platform, peaks.family if peaks else None]
    version = None if where.vllm is None else release(where.vllm)
    fitting = []
    for row in (each for each in rows if each.claim == claim):
        first, last = map(release, row.vllm)
        released = row.vllm == ANY_RELEASE or (
            version is not None and first <= version and (not last or version < last)
        )
        here = row.model in (ANY, short_name(model)) and row.device in devices and released
        if here and row.interface in (ANY, interface) and row.ramp_up in (ANY, ramp_up):
            device, open_release = devices.index(row.device), row.vllm == ANY_RELEASE
            open_entries = row.interface == ANY, row.ramp_up == ANY, open_release
            fitting.append(((row.model != ANY, device, *(not each for each in open_entries)), row))
    if not fitting:
        raise BadUsage(f"no row of the claims table says what to expect of {claim} for {model}", "a row for any model")
    return max(fitting, key=itemgetter(0))[1]


def row_to_record(row: ClaimRow) -> dict[str, Any]:
    """Return a row as plain JSON values."""
    return {**asdict(row), "vllm": list(row.vllm)}


def row_from_record(facts: Mapping[str, Any]) -> ClaimRow:
    """Return the row of a record, the inverse of `row_to_record`; entries of a later release are left out."""
    known = known_fields(ClaimRow, dict(facts))
    return ClaimRow(**{**known, "vllm": tuple(known.get("vllm", ANY_RELEASE))})
