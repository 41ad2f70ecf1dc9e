"""The table of claims, read from `claims.toml`, and the verdicts by it, while a run goes on and from its archive.

A claim that is known not to hold somewhere has a row that expects it to fail, with the evidence; the most specific row
that fits a model and an environment rules. `judge_row` chooses the function that judges a claim, `applies` says for
which curves there is something to judge, and `models_read` names the models whose measurements it takes.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from pytest_slmserve.analysis.advice import subjects as advice
from pytest_slmserve.analysis.claims import evidence
from pytest_slmserve.analysis.claims.evidence import NEXT_SMALLER, Evidence, Others
from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.estimates import grouped, percent, percent_interval, times
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import by_series, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, is_main_sweep, is_sweep, labels, with_shared
from pytest_slmserve.analysis.verdict import Inconclusive, State, Verdict, above, below, every, every_within, unsure
from pytest_slmserve.schema.errors import UNUSABLE, BadArchive, BadUsage, Interface, RampUp, SlmError
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, known_fields, release

Expected = Literal["passes", "fails", "either"]
Parameters = Mapping[str, Any]
ANY: Literal["*"] = "*"
ANY_RELEASE = ("", "")
AFTER = 128  # "after a batch size of 128"
# The parameter that is the threshold, where it has another name.
THRESHOLDS = {"decode-stays-memory-bound": "margin", "decode-saturates-dram": "near"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that measurements can refute, as `claims.toml` has it.

    name: as items and records have it. kind: the same for all ways of sharing. of: the measurements that it reads:
    sweeps; replicas, with one engine alone under the same load; engines on several numbers of GPUs; jobs; or none, for
    arithmetic. models: those that the statement speaks of; empty for any. passes: the side of the threshold on which
    all estimates of its `Evidence` lie if it passes ("within": between the threshold, a factor, and its inverse); None
    if a function of its own judges it. figure, words: the figure that it compares, if it is one of several, and how to
    tell it. parameters, expected, evidence: of its row for any model anywhere; "either" is for a statement that hosts
    and models decide, so that it is a finding and no failure.
    """

    name: str
    kind: str
    statement: str
    source: str
    of: Literal["sweeps", "replicas", "gpus", "jobs", "arithmetic"] = "sweeps"
    models: tuple[str, ...] = ()
    passes: Literal["below", "above", "within"] | None = None
    figure: str = ""
    words: str = ""
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "passes"
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """Expectation of a claim for a model on a device, by an interface, in a closed loop of one ramp-up, under a vLLM.

    model: a short name or "*". device: a platform ("cuda", "cpu", "simulated"), a GPU family of `gpu_figures.GPUS`
    ("H200") or "*". interface: how the requests come in, or "*". ramp_up: of the closed loop, or "*". vllm: first
    release, and the one it ends before; "" for no end. parameters: numbers of the judgement, plain, so that a record
    can hold them and a report can repeat the judgement.
    """

    claim: str
    model: str = ANY
    device: str = ANY
    interface: Literal["*", "engine", "server", "endpoint"] = ANY
    ramp_up: Literal["*", "staggered", "burst"] = ANY
    vllm: tuple[str, str] = ANY_RELEASE
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "passes"
    evidence: str = ""


def _read() -> tuple[dict[str, Claim], tuple[ClaimRow, ...]]:
    """Return the claims of `claims.toml` by name, and its rows: first that of each claim for any model, then the
    others."""
    facts = tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))
    claims = {}
    for ways, entries in groupby(facts["claim"], key=lambda entry: entry.pop("sharing", ("",))):
        group = [{"kind": entry["name"], **entry, "models": tuple(entry.get("models", ()))} for entry in entries]
        for way, entry in ((way, entry) for way in ways for entry in group):
            if way:
                words = {"how": deployments.HOW[way], "where": "" if way == "gpus" else " on one GPU"}
                entry = entry | {
                    "name": f"{entry['kind']}-{way}",
                    "statement": entry["statement"].format(**words),
                    "parameters": {"sharing": way, **entry["parameters"]},
                }
            claims[entry["name"]] = Claim(**entry)
    rows = [ClaimRow(n, parameters=c.parameters, expected=c.expected, evidence=c.evidence) for n, c in claims.items()]
    for entry in facts["row"]:
        vllm = tuple(entry.pop("vllm", ANY_RELEASE))
        rows.append(ClaimRow(**{"parameters": claims[entry["claim"]].parameters, "vllm": vllm, **entry}))
    return claims, tuple(rows)


CLAIMS, ROWS = _read()


def judge_row(claim: str, curve: Curve, row: ClaimRow, others: Others = ()) -> Verdict:
    """Return the verdict on a claim by the row's parameters; inconclusive if data is missing.

    Args:
        others: Curves measured in the same run, for claims that compare models.

    Raises:
        LookupError: The row lacks a parameter of the claim.
    """
    known, named = claim_of(claim), THRESHOLDS.get(claim, "threshold")
    threshold = row.parameters[named] if named in known.parameters else None
    try:
        found = _found(known, curve, row.parameters, others)
    except Inconclusive as reason:
        return Verdict.inconclusive(claim, curve.subject, str(reason), threshold)
    if isinstance(found, Verdict):
        return found
    assert threshold is not None, f"{claim} has evidence, but no threshold"
    match known.passes:
        case "below":
            state, seen, sentence = every(below, threshold, found.estimates)
        case "above":
            state, seen, sentence = every(above, threshold, found.estimates)
        case _:
            state, seen, sentence = every_within(1 / threshold, threshold, found.estimates)
    if found.sparse and state is State.PASSES:
        state = State.INCONCLUSIVE
    told, limit = times(seen), f"{threshold:g}"
    if found.in_percent:
        told, limit = percent_interval(seen), percent(threshold)
    why = f"{sentence.replace('{}', told)} (threshold {limit}{found.qualifier}){found.remark}{unsure(seen)}"
    return Verdict.from_interval(claim, curve.subject, state, why, seen, threshold, *found.points)


def _found(claim: Claim, curve: Curve, parameters: Parameters, others: Others) -> Evidence | Verdict:
    """Return the evidence for a claim of one threshold, or the verdict on one with a rule of its own. Raises
    Inconclusive with the reason if there is neither."""
    match kind := claim.kind:
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
        case advice.KV_BLOCKS:
            if curve.spec is None or not curve.resolved:
                raise Inconclusive("no engine was measured")
            records = tuple(record for p in curve.points for record in p.records)
            return advice.kv_blocks_as_predicted(curve.spec, curve.resolved, parameters["blocks"], records)
        case advice.CLAIM:
            return advice.advised_batch_costs_little(curve, parameters["threshold"])
        case "gpu-util-saturates-first":
            return evidence.util_saturates_first(curve, parameters["threshold"], parameters["full"])
        case "tensor-parallel-loses-per-gpu" | "tensor-parallel-serves-less-in-all":
            return evidence.serves_less(kind, curve, parameters["threshold"])
        case "throughput-grows-with-kv-blocks":
            return evidence.throughput_grows_with_kv_blocks(curve, parameters["threshold"], parameters["flat"])
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
        case "batch-limit-reaches-a-plateau":
            return evidence.over_the_limit_before(curve, None)
        case "batch-limit-gains-little-after-128":
            return evidence.over_the_limit_before(curve, parameters["after"])
        case "batch-limit-costs-latency":
            return evidence.latency_past_the_plateau(curve, parameters["little"])
        case "continuous-batching-serves-most":
            return evidence.continuous_over_other_batching(curve)
        case "dynamic-batching-answers-sooner":
            return evidence.dynamic_over_static_batching(curve)
        case "replicas-pay":
            return evidence.replicas_over_one_engine(curve, parameters["sharing"])
    match claim.of:
        case "replicas":
            return evidence.figure_of_replicas(claim.figure, claim.words, curve, parameters["sharing"])
        case "jobs":
            return evidence.longest_over_shortest(claim.figure, claim.words, curve)
    return evidence.judge_arithmetic(kind, curve.subject)


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
            return bool(curve.jobs) and evidence.has_jobs_for(kind, curve.jobs, AFTER)
        case "arithmetic":
            return is_main_sweep(curve)
    match kind:
        case "throughput-plateau" | "latency-rises-past-plateau" | "pareto-up-to-plateau":
            return is_main_sweep(curve)
        case deployments.CLAIM:
            return any(m.neighbours for m in curve.measurements)
        case advice.KV_BLOCKS:  # of an engine whose KV cache the plugin sizes, as it does not an endpoint's
            return bool(curve.measurements) and curve.measurements[0].spec.interface != "endpoint"
        case "marginal-after-128":
            return is_main_sweep(curve) and {AFTER, 2 * AFTER} <= loads
        case "decode-stays-memory-bound" | "decode-saturates-dram":  # the decoding was seen, at the largest load too
            return is_sweep(curve) and bool(curve.valid) and curve.valid[-1].saturation_gap is not None
        case advice.CLAIM:  # a sweep on one GPU with the loads of the objective and of the efficiency, and further ones
            usable = {p.concurrency for p in curve.valid}
            alone = curve.spec is not None and curve.spec.tensor_parallel_size == 1
            return is_main_sweep(curve) and alone and {1, advice.OBJECTIVE.at} <= usable and len(usable) > 2
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
    if found := CLAIMS.get(str(name)):
        return found
    raise BadUsage(
        f"unknown claim {name!r}", " or ".join(get_close_matches(str(name), CLAIMS)) or f"one of {', '.join(CLAIMS)}"
    )


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
    where = environment or Environment()
    peaks = peaks_of(where.gpu_name)
    devices = [ANY, where.platform, peaks.family if peaks else None]
    version, fitting = release(where.vllm or ""), []
    for row in (row for row in rows if row.claim == claim_of(claim).name):
        first, last = map(release, row.vllm)
        released = row.vllm == ANY_RELEASE or (
            where.vllm is not None and first <= version and (not last or version < last)
        )
        there = row.model in (ANY, short_name(model)) and row.device in devices and released
        if there and row.interface in (ANY, interface) and row.ramp_up in (ANY, ramp_up):
            open_entries = (row.interface == ANY, row.ramp_up == ANY, row.vllm == ANY_RELEASE)
            fitting.append(((row.model != ANY, devices.index(row.device), *(not each for each in open_entries)), row))
    if not fitting:
        raise BadUsage(f"no row of the claims table says what to expect of {claim} for {model}", "a row for any model")
    return max(fitting, key=itemgetter(0))[1]


# {"sweeps": {series key: {"model": name, "concurrencies": [1, 2], "skipped": [[4, "why"]]}}}, of an adaptive sweep also
# "adaptive": {"tolerance": 0.1}; "compared": series keys of curves that are no sweeps; "interim_analyses": numbers of
# repeats after which a sweep that measures until its claims are decided may be judged
Plan = Mapping[str, Any]
Judged = tuple[Verdict, ClaimRow]


@contextmanager
def _usable(what: str) -> Iterator[None]:
    """Raise BadArchive if no judgement can be made of stored values."""
    try:
        yield
    except (SlmError, *UNUSABLE) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        why = f"{what} in the archive cannot be used ({reason})"
        raise BadArchive(why, "an archive as --slm-records wrote it") from None


def rows_from(stored: Mapping[str, Any]) -> tuple[ClaimRow, ...]:
    """Return the claims' rows that a session stored, without entries of a later release, and today's for claims that it
    does not have. Raises BadArchive."""
    with _usable("the claims"):
        entries = [known_fields(ClaimRow, dict(facts)) for facts in stored.get("rows", ())]
        rows = [ClaimRow(**{**entry, "vllm": tuple(entry.get("vllm", ANY_RELEASE))}) for entry in entries]
        known = {row.claim for row in rows}
    return (*rows, *(row for row in ROWS if row.claim not in known))


def stored_curves(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> tuple[Curve, ...]:
    """Return the curves of stored measurements; see `planned_curves`. Raises BadArchive."""
    with _usable("the plan"):
        return tuple(planned_curves(measurements, plans).values())


def planned_curves(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> dict[str, Curve]:
    """Return a curve for each engine, workload, environment and way of loading, by its series key, in the order first
    met.

    plans: of each session, with the time it started (ISO 8601, UTC), ascending. A curve's plan is the last one that
    names it, of the sessions up to the one that measured it last. One that none of these names, though they name
    others, was measured beside them. A run that goes on judges by the same curves, from the plan that it stores.
    """
    found = {}
    for series, group in by_series(measurements).items():
        last = max(m.measured_at for m in group)
        earlier = [plan for started, plan in reversed(plans) if started <= last]
        sweeps = [plan.get("sweeps", {}) for plan in earlier]
        sweep: Mapping[str, Any] = next((named[series] for named in sweeps if series in named), {})
        curve = curve_of(
            short_name(group[0].spec.model),
            group,
            planned=[int(c) for c in sweep.get("concurrencies", ())],
            cut=[(int(c), str(why)) for c, why in sweep.get("skipped", ())],
            adaptive=float(sweep["adaptive"]["tolerance"]) if sweep.get("adaptive") else None,
            looks=[int(n) for n in earlier[0].get("interim_analyses", ())] if earlier else (),
        )
        compared = any(series in plan.get("compared", ()) for plan in earlier)
        found[series] = replace(curve, beside=(any(sweeps) or compared) and not sweep)
    curves = with_shared(found.values(), shared_points(measurements))
    return dict(zip(found, deployments.with_wider(curves)))


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
    for claim in CLAIMS.values():
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
            where = claim.name, curve.subject, here.environment, interface, ramp_up
            with _usable(f"the parameters of {claim.name}"):
                row = row_for(*where, rows)
                then = row_for(*where, stored) if stored else row
                verdict = judge_row(claim.name, curve, row, curves)
            changed = f"; its run expected that it {then.expected}" if then.expected != row.expected else ""
            judged.append((replace(verdict, subject=label, why=verdict.why + changed), row))
    return judged


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
        with _usable("the terms of the gate"):
            facts = plan["gate"]
            margin, alpha, beta = (float(facts[name]) for name in ("margin", "alpha", "beta"))
            terms = GateCriteria(margin, alpha, beta, int(facts["pairs"]))
        yield judge_gate(members, terms), ""
