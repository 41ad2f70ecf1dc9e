"""The table of claims, read from `claims.toml`, and the verdicts by it, while a run goes on and from its archive.

The file says of each claim its statement, source, parameters and evidence, and which verdict is expected of it where.
Here `judge_row` chooses the function that judges a claim, `applies` says for which curves there is something to judge,
and `models_read` names the models whose measurements it takes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.advice import subjects as advice
from pytest_slmserve.analysis.advice import verification
from pytest_slmserve.analysis.claims import evidence
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
from pytest_slmserve.analysis.compare.deployments import with_wider
from pytest_slmserve.analysis.estimates import grouped, percent
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.metrics.roofline import peaks_of
from pytest_slmserve.analysis.points import by_series, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, is_main_sweep, is_sweep, labels, with_shared
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema.errors import UNUSABLE, BadArchive, BadUsage, Interface, RampUp, SlmError
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, known_fields, release

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
        found = _evidence(known.kind, curve, others, parameters)
        if isinstance(found, str):
            return Verdict.inconclusive(known.name, curve.subject, found, threshold)
        return found.verdict(known, curve.subject, threshold)
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
            return evidence.util_saturates_first(curve, threshold, parameters["full"])
        case advice.CLAIM:
            return advice.advised_batch_costs_little(curve, threshold)
        case "tensor-parallel-loses-per-gpu" | "tensor-parallel-serves-less-in-all":
            return evidence.serves_less(known.kind, curve, threshold)
        case "throughput-grows-with-kv-blocks":
            return evidence.throughput_grows_with_kv_blocks(curve, threshold, parameters["flat"])
    raise LookupError(f"no function judges {known.kind}")


def _evidence(kind: str, curve: Curve, others: Others, parameters: Parameters) -> Evidence | str:
    """Return the evidence for a claim of one threshold, or the reason why there is none."""
    match kind:
        case "occupancy-below-a-saturated-kernel" | "decode-saturates-dram":
            return evidence.at_the_largest_load(kind, curve)
        case "sm-activity-stays-low" | "host-takes-at-most-half":
            return evidence.at_every_load(kind, curve)
        case "decode-stays-memory-bound":
            return evidence.memory_over_tensor_cores(curve)
        case "gpu-util-falls-at-the-largest-load" | "energy-per-token-falls-with-load":
            return evidence.largest_over_smallest_load(kind, curve)
        case "energy-per-token-grows-with-model" | "larger-models-draw-more-power":
            return evidence.larger_over_smaller_model(kind, curve, others)
        case "tensor-parallel-still-gains":
            return evidence.over_fewer_gpus_at_best(curve, parameters["fewer"], parameters["more"])
        case "replicas-per-gpu-beat-tensor-parallel":
            return evidence.replicas_over_tensor_parallel(curve)
        case "throughput-follows-arrivals":
            return evidence.served_over_came(curve)
        case "all-at-once-waits-longer":
            return evidence.at_once_over_lowest_rate(curve)
        case "alike-at-one-size":
            return evidence.over_the_opt_of_its_size(curve, others)
        case "batch-limit-reaches-a-plateau" | "batch-limit-gains-little-after-128":
            return evidence.over_the_limit_before(kind, curve, parameters.get("after", 0))
        case "batch-limit-costs-latency":
            return evidence.latency_past_the_plateau(curve, parameters["little"])
        case "continuous-batching-serves-most":
            return evidence.continuous_over_other_batching(curve)
        case "dynamic-batching-answers-sooner":
            return evidence.dynamic_over_static_batching(curve)
        case (
            "longer-outputs-fewer-requests" | "longer-outputs-shrink-the-batch" | "longer-outputs-wait-slightly-longer"
        ):
            return evidence.longest_over_shortest(kind, curve)
    return evidence.replicas_over_one_engine(kind, curve, parameters["sharing"])


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
            return bool(curve.jobs) and evidence.has_jobs_for(kind, curve, AFTER)
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
            return evidence.at_table_1(curve) is not None
    # Without sensors there is nothing to say of the GPU.
    return is_sweep(curve) and any(p.gpu_util is not None or p.power_w is not None for p in curve.valid)


def models_read(claim: Claim, model: str) -> tuple[str, ...]:
    """Return the models whose measurements the claim on `model` takes; none for arithmetic."""
    match claim.kind:
        case "energy-per-token-grows-with-model" if smaller := NEXT_SMALLER.get(short_name(model)):
            return model, smaller
        case "larger-models-draw-more-power":
            return model, *evidence.SMALL
        case "alike-at-one-size":
            return model, evidence.SIZED_AS.get(short_name(model), model)
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


# {"sweeps": {series key: {"model": name, "concurrencies": [1, 2], "skipped": [[4, "why"]]}}}, of an adaptive sweep also
# "adaptive": {"tolerance": 0.1}; "compared": series keys of curves that are no sweeps; "interim_analyses": numbers of
# repeats after which a sweep that measures until its claims are decided may be judged
Plan = Mapping[str, Any]
Judged = tuple[Verdict, ClaimRow]


def unique(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Each record once: a copy is no repeat."""
    return list({m.id: m for m in measurements}.values())


def rows_from(stored: Mapping[str, Any]) -> tuple[ClaimRow, ...]:
    """The claims' rows that a session stored, and today's for claims it does not have. Raises BadArchive."""
    try:
        rows = tuple(row_from_record(facts) for facts in stored.get("rows", ()))
        known = {row.claim for row in rows}
    except UNUSABLE as error:
        raise unusable("the claims", error) from None
    return (*rows, *(row for row in ROWS if row.claim not in known))


def stored_curves(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> tuple[Curve, ...]:
    """Curves of stored measurements; see `planned_curves`. Raises BadArchive."""
    try:
        return tuple(planned_curves(measurements, plans).values())
    except UNUSABLE as error:
        raise unusable("the plan", error) from None


def planned_curves(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> dict[str, Curve]:
    """A curve for each engine, workload, environment and way of loading, by its series key, in the order first met.

    plans: of each session, with the time it started (ISO 8601, UTC), ascending. A curve's plan is the last one that
    names it, of the sessions up to the one that measured it last. One that none of these names, though they name
    others, was measured beside them. A run that goes on judges by the same curves, from the plan that it stores.
    """
    found = {
        series: planned_curve(short_name(group[0].spec.model), series, group, plans)
        for series, group in by_series(measurements).items()
    }
    return dict(zip(found, with_wider(with_shared(found.values(), shared_points(measurements)))))


def planned_curve(
    subject: str, series: str, measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]
) -> Curve:
    """The curve of one series, with what its plan says of loads that were not measured."""
    last = max((m.measured_at for m in measurements), default="")
    earlier = [plan for started, plan in reversed(plans) if started <= last]
    sweeps = [plan.get("sweeps", {}) for plan in earlier]
    sweep: Mapping[str, Any] = next((named[series] for named in sweeps if series in named), {})
    curve = curve_of(
        subject,
        measurements,
        planned=[int(c) for c in sweep.get("concurrencies", ())],
        cut=[(int(c), str(why)) for c, why in sweep.get("skipped", ())],
        adaptive=float(sweep["adaptive"]["tolerance"]) if sweep.get("adaptive") else None,
        looks=[int(n) for n in earlier[0].get("interim_analyses", ())] if earlier else (),
    )
    compared = any(series in plan.get("compared", ()) for plan in earlier)
    return replace(curve, beside=(any(sweeps) or compared) and not sweep)


def judge_all(curves: Sequence[Curve], rows: tuple[ClaimRow, ...], stored: tuple[ClaimRow, ...] = ()) -> list[Judged]:
    """Return verdicts on every claim that a curve can be judged by, and on those that are arithmetic, each with its
    row.

    Verdicts on several curves of one model are told apart by their subjects. A claim that is arithmetic is judged by
    the models alone, each as a curve without points. One on several GPUs is told of a model once, so it is not told
    apart from its own curves on more; one on jobs, which all curves of a model have, likewise.

    Args:
        stored: Rows of the run that measured; a verdict says if they expected something else.

    Raises:
        BadArchive: Rows do not fit their claims.
    """
    labelled, there = list(zip(curves, labels(curves), strict=True)), {curve.subject for curve in curves}
    judged: list[Judged] = []
    for claim in CLAIMS:
        found = [
            (curve, label)
            for curve, label in labelled
            if applies(claim, curve) and there.issuperset(models_read(claim, curve.subject))
        ]
        if claim.of == "arithmetic":
            found = [(Curve(subject=model), model) for model in claim.models]
        elif claim.of == "gpus":
            several = [curve for curve, _ in found]
            found = list(zip(several, labels(several), strict=True))
        elif claim.of == "jobs":
            found = [(curve, subject) for subject, curve in {curve.subject: curve for curve, _ in found}.items()]
        for curve, label in found:
            here = curve if curve.environment else next(iter(curves), curve)  # tells where this was measured, and how
            interface, ramp_up = here.spec.interface if here.spec else None, here.load.ramp_up if here.load else None
            try:
                row = row_for(claim.name, curve.subject, here.environment, interface, ramp_up, rows)
                then = row
                if stored:
                    then = row_for(claim.name, curve.subject, here.environment, interface, ramp_up, stored)
                verdict = judge_row(claim.name, curve, row, curves)
            except (SlmError, *UNUSABLE) as error:
                raise unusable(f"the parameters of {claim.name}", error) from None
            changed = f"; its run expected that it {then.expected}" if then.expected != row.expected else ""
            judged.append((replace(verdict, subject=label, why=verdict.why + changed), row))
    return judged


def unusable(what: str, error: Exception) -> BadArchive:
    """The error for stored values that no judgement can be made of."""
    reason = f"no entry {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
    return BadArchive(f"{what} in the archive cannot be used ({reason})", "an archive as --slm-records wrote it")


def stored_gates(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> Iterator[tuple[Gated, str]]:
    """Yield each gate of one archive, in the order measured, and what is to be said of its terms, if anything.

    Args:
        plans: Of each session, with the time it started (ISO 8601, UTC), ascending; `{"gate": {"margin": 0.03, ...}}`
            in that of a run that gated.

    Raises:
        BadArchive: The terms are none.
    """
    of_gates = (m for m in measurements if m.paired)
    for members in grouped(of_gates, lambda m: m.paired and m.paired.gate).values():
        began = min(m.measured_at for m in members)
        plan: Plan = next((plan for started, plan in reversed(plans) if started <= began), {})
        if "gate" not in plan:
            gated = judge_gate(members, GateCriteria())
            assumed = f"a margin of {percent(gated.terms.margin)}, and {gated.terms.pairs} pairs at most"
            yield gated, f"the terms of the gate of {gated.model} were not stored: judged by {assumed}"
            continue
        try:
            facts = plan["gate"]
            margin, alpha, beta = (float(facts[name]) for name in ("margin", "alpha", "beta"))
            terms = GateCriteria(margin, alpha, beta, int(facts["pairs"]))
        except (SlmError, *UNUSABLE) as error:
            raise unusable("the terms of the gate", error) from None
        yield judge_gate(members, terms), ""
