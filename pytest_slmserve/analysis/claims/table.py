"""Table of claims from `claims.toml`, and the verdicts on them, both during a run and from its results file.

If a claim is known to fail somewhere, a row expects this and contains the evidence. The most specific row that fits a
model and an environment is used.
"""

import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pytest_slmserve.analysis.advice import subjects
from pytest_slmserve.analysis.claims import evidence
from pytest_slmserve.analysis.claims.evidence import AFTER, Claim, Expected, Others, Parameters
from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.estimates import grouped, percent, percent_interval, times
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.gate.starts import is_of_start, judge_starts
from pytest_slmserve.analysis.gate.windows import judge_windows
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import busy_rate, by_series, shared_points
from pytest_slmserve.analysis.sweep.curve import (
    GPU_PLATEAU,
    Curve,
    curve_of,
    is_main_sweep,
    is_sweep,
    labels,
    to_know_noise,
    with_compared,
    with_plain,
    with_remedy,
    with_shared,
)
from pytest_slmserve.analysis.verdict import Inconclusive, State, Verdict, every, unsure
from pytest_slmserve.schema.errors import UNUSABLE, BadArchive, BadUsage, Interface, RampUp, SlmError
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, known_fields, release

ANY: Literal["*"] = "*"
ANY_RELEASE = ("", "")


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """Expected verdict on a claim for a model, device, interface, ramp-up and vLLM release.

    Attributes:
        model: short name or "*".
        device: platform ("cuda", "cpu", "simulated"), GPU family of `gpu_figures.GPUS` ("H200"), or "*".
        vllm: first release, and the first one that is excluded; "" is open.
        parameters: plain numbers, so that a record can store them and a report can repeat the verdict.
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
    """Return the claims of `claims.toml` by name, and the rows: first one per claim for any model, then the others."""
    facts = tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))
    claims = {}
    for ways, entries in groupby(facts["claim"], key=lambda entry: entry.pop("sharing", ("",))):
        group = [{**entry, "models": tuple(entry.get("models", entry.get("against", ())))} for entry in entries]
        for way, entry in ((way, entry) for way in ways for entry in group):
            if way:
                words = {"how": deployments.HOW[way], "where": "" if way == "gpus" else " on one GPU"}
                entry = entry | {
                    "name": f"{entry['name']}-{way}",
                    "statement": entry["statement"].format(**words),
                    "words": entry["words"].replace("{how}", words["how"]),
                    "parameters": {"sharing": way, **entry["parameters"]},
                }
            claims[entry["name"]] = Claim(**entry)
    rows = [ClaimRow(n, parameters=c.parameters, expected=c.expected, evidence=c.evidence) for n, c in claims.items()]
    for entry in facts["row"]:
        vllm = tuple(entry.pop("vllm", ANY_RELEASE))
        rows.append(ClaimRow(**{"parameters": claims[entry["claim"]].parameters, "vllm": vllm, **entry}))
    return claims, tuple(rows)


CLAIMS, ROWS = _read()


def judge_row(row: ClaimRow, curve: Curve, others: Others = ()) -> Verdict:
    """Return the verdict on the claim of a row by its parameters; inconclusive if data are missing.

    Args:
        others: curves of the same run, for claims that compare models.

    Raises:
        LookupError: if the row lacks a parameter.
    """
    claim = replace(CLAIMS[row.claim], parameters=row.parameters)
    try:
        found = evidence.evidence_for(claim, curve, others)
    except Inconclusive as reason:
        verdict = Verdict.inconclusive(claim.name, curve.subject, str(reason), row.parameters.get(claim.threshold))
        return to_know_noise(verdict, curve)
    if isinstance(found, Verdict):
        return found
    threshold = row.parameters[claim.threshold]
    inverse = -threshold if found.in_percent else 1 / threshold
    limits = {"below": {"most": threshold}, "above": {"least": threshold}, "between": {"least": 1.0, "most": threshold}}
    sides = limits.get(claim.passes, {"least": inverse, "most": threshold})
    state, seen, (sentence, points) = every(found.estimates, **sides)
    state = State.INCONCLUSIVE if state is found.doubtful else state
    told, limit = times(seen), f"{threshold:g}"
    if found.in_percent:
        told, limit = percent_interval(seen), percent(threshold)
    why = f"{sentence.replace('{}', told)} (threshold {limit}{found.qualifier}){found.remark}{unsure(seen)}"
    verdict = Verdict.from_interval(claim.name, curve.subject, state, why, seen, threshold, *points)
    return with_remedy(verdict, curve, found.again) if found.again else verdict


def applies(claim: Claim, curve: Curve) -> bool:
    """Return whether a report on this curve should contain the claim."""
    if claim.models and curve.subject not in claim.models:
        return False
    if claim.of_tokens and not curve.decodes:
        return False
    if claim.compares == "arrivals" and len(evidence.grid_of(curve.jobs)) < 2:
        return False
    if claim.of in ("replicas", "gpus", "jobs", "shares", "formats", "speculation"):
        try:
            evidence.evidence_for(claim, curve, ())
        except Inconclusive as reason:
            return not isinstance(reason, evidence.NotMeasured)
        return True
    match claim.name:
        case "throughput-plateau" | "latency-rises-past-plateau" | "pareto-up-to-plateau":
            return is_main_sweep(curve)
        case "gpu-plateau":
            return is_main_sweep(curve) and any(map(busy_rate, curve.valid))
        case deployments.CLAIM:
            return any(m.neighbours for m in curve.measurements)
        case subjects.KV_BLOCKS:  # the plugin does not size the KV cache of an endpoint
            return bool(curve.measurements) and curve.measurements[0].spec.interface != "endpoint"
        case "marginal-after-128":
            return is_main_sweep(curve) and {AFTER, 2 * AFTER} <= {p.concurrency for p in curve.points}
        case "decode-stays-memory-bound" | "decode-saturates-dram":  # needs decoding at the largest load
            return is_sweep(curve) and bool(curve.valid) and curve.valid[-1].saturation_gap is not None
        case "advised-batch-costs-little":  # needs one GPU, the loads of the objective and of T(1), and another load
            usable = {p.concurrency for p in curve.valid}
            alone = curve.spec is not None and curve.spec.tensor_parallel_size == 1
            return is_main_sweep(curve) and alone and {1, subjects.OBJECTIVE.at} <= usable and len(usable) > 2
        case "energy-per-token-grows-with-model" | "larger-models-draw-more-power" | "power-rises-slightly-to-13b":
            return evidence.at_table_1(curve) is not None
    # The remaining claims need sensors of the GPU.
    return is_sweep(curve) and any(p.gpu_util is not None or p.power_w is not None for p in curve.valid)


def models_read(claim: Claim, model: str) -> tuple[str, ...]:
    """Return the models whose measurements a claim on `model` reads; empty for arithmetic."""
    return () if claim.of == "arithmetic" else (model, *claim.against.get(short_name(model), ()))


def is_of_gpu(name: str) -> bool:
    """Return whether a claim is about the busy GPU, so that the noise of the host does not affect it."""
    return name == GPU_PLATEAU or CLAIMS[name].compares == "counters"


def claim_of(name: str) -> Claim:
    """Return the claim with this name.

    Raises:
        BadUsage: if there is none.
    """
    if found := CLAIMS.get(str(name)):
        return found
    raise BadUsage(
        f"unknown claim {name!r}",
        f"Use {' or '.join(get_close_matches(str(name), CLAIMS)) or 'one of ' + ', '.join(CLAIMS)}.",
    )


def row_for(
    claim: str,
    model: str,
    environment: Environment | None = None,
    interface: Interface | None = None,
    ramp_up: RampUp | None = None,
    rows: tuple[ClaimRow, ...] = ROWS,
) -> ClaimRow:
    """Return the most specific row of a claim that fits this model, environment, interface and ramp-up.

    The fields count in this order: model, GPU family, platform, interface, ramp-up, range of vLLM releases. An unknown
    value fits only rows that leave the field open.

    Raises:
        BadUsage: if the claim is unknown, or if no row fits.
    """
    where = environment or Environment()
    peaks = peaks_of(where.gpu_name)
    devices = [ANY, where.platform, peaks.family if peaks else None]
    version, fitting = release(where.vllm or ""), dict[tuple[Any, ...], ClaimRow]()
    known = claim_of(claim)
    for row in (row for row in rows if row.claim == known.name):
        first, last = map(release, row.vllm)
        released = row.vllm == ANY_RELEASE or (
            where.vllm is not None and first <= version and (not last or version < last)
        )
        there = row.model in (ANY, short_name(model)) and row.device in devices and released
        if there and row.interface in (ANY, interface) and row.ramp_up in (ANY, ramp_up):
            narrowed = row.interface != ANY, row.ramp_up != ANY, row.vllm != ANY_RELEASE
            fitting.setdefault((row.model != ANY, devices.index(row.device), *narrowed), row)
    if not fitting:
        raise BadUsage(
            f"no row of the claims table says what to expect of {claim} for {model}",
            "Add a row that applies to any model.",
        )
    return fitting[max(fitting)]


# {"sweeps": {series key: {"model": name, "concurrencies": [1, 2], "skipped": [[4, "why"]]}}}. Adaptive sweeps also have
# "adaptive": {"tolerance": 0.1}, and "beyond" is the series key of a larger load on a separate engine. "compared" has
# the series keys of curves that are not sweeps, and "interim_analyses" the numbers of repeats at which a sweep that
# continues until its claims are conclusive is evaluated.
Plan = Mapping[str, Any]
Judged = tuple[Verdict, ClaimRow | None]


@contextmanager
def _usable(what: str) -> Iterator[None]:
    """Raise BadArchive if the block fails because of stored values."""
    try:
        yield
    except (SlmError, *UNUSABLE) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        why = f"{what} in the results file cannot be used ({reason})"
        raise BadArchive(why, "Pass a results file as --slm-records wrote it.") from None


def rows_from(stored: Mapping[str, Any]) -> tuple[ClaimRow, ...]:
    """Return the rows that a session stored, without unknown fields, and built-in rows for claims that it lacks.

    Raises:
        BadArchive: if they cannot be read.
    """
    with _usable("the claims"):
        entries = [known_fields(ClaimRow, dict(facts)) for facts in stored.get("rows", ())]
        rows = [ClaimRow(**{**entry, "vllm": tuple(entry.get("vllm", ANY_RELEASE))}) for entry in entries]
        known = {row.claim for row in rows}
    return (*rows, *(row for row in ROWS if row.claim not in known))


def stored_curves(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> tuple[Curve, ...]:
    """Return the curves of stored measurements; see `planned_curves`.

    Raises:
        BadArchive: if the plan cannot be read.
    """
    with _usable("the plan"):
        return tuple(planned_curves(measurements, plans).values())


def planned_curves(
    measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]], still: Container[str] = ()
) -> dict[str, Curve]:
    """Return a curve for each engine, workload, environment and way of loading, by its series key.

    A curve uses the last plan that names it, of sessions that began before its last measurement. If these plans name
    only other curves, it is `beside` them.

    Args:
        plans: start time (ISO 8601, UTC) and plan of each session, ascending.
        still: keys of curves that are still being measured.
    """
    beyond = {
        sweep["beyond"]: series
        for _, plan in plans
        for series, sweep in plan.get("sweeps", {}).items()
        if "beyond" in sweep
    }
    groups: dict[str, list[Measurement]] = {}
    for series, own in by_series(measurements).items():
        groups.setdefault(beyond.get(series, series), []).extend(own)
    found = {}
    for series, group in groups.items():
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
            over=series not in still,
            beyond=beyond,
        )
        compared = any(series in plan.get("compared", ()) for plan in earlier)
        found[series] = replace(curve, beside=(any(sweeps) or compared) and not sweep)
    curves = with_shared(found.values(), shared_points(measurements))
    return dict(zip(found, with_plain(with_compared(deployments.with_wider(curves)))))


def judge_all(curves: Sequence[Curve], rows: tuple[ClaimRow, ...], stored: tuple[ClaimRow, ...] = ()) -> list[Judged]:
    """Return a verdict, with its row, on every claim that applies to a curve, and on every arithmetic claim.

    Subjects distinguish the curves of one model, but not the curves that a claim compares. A claim on jobs is evaluated
    once per model.

    Args:
        stored: rows of the run that measured. The reason mentions a different expectation.

    Raises:
        BadArchive: if rows do not fit their claims.
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
        elif claim.of in ("gpus", "speculation"):
            several = [curve for curve, _ in found]
            found = list(zip(several, labels(several), strict=True))
        elif claim.of == "jobs":
            found = [(curve, subject) for subject, curve in {curve.subject: curve for curve, _ in found}.items()]
        for curve, label in found:
            here = curve if curve.environment else next(iter(curves), curve)  # has an environment and interface
            interface, ramp_up = here.spec.interface if here.spec else None, here.load.ramp_up if here.load else None
            where = claim.name, curve.subject, here.environment, interface, ramp_up
            with _usable(f"the parameters of {claim.name}"):
                row = row_for(*where, rows)
                then = row_for(*where, stored) if stored else row
                verdict = judge_row(row, curve, curves)
            changed = f"; expected result when recorded: {then.expected}" if then.expected != row.expected else ""
            judged.append((replace(verdict, subject=label, why=verdict.why + changed), row))
    return judged


def stored_gates(measurements: Sequence[Measurement], plans: Sequence[tuple[str, Plan]]) -> Iterator[tuple[Gated, str]]:
    """Yield each gate of a results file in the order measured, with a note if its criteria were not stored.

    Args:
        plans: start time (ISO 8601, UTC) and plan of each session, ascending; a gate has `{"gate": {"margin": 0.03,
            ...}}`.

    Raises:
        BadArchive: if the criteria are invalid.
    """
    of_gates = (m for m in measurements if m.paired)
    for members in grouped(of_gates, lambda m: m.paired and m.paired.gate).values():
        began = min(m.measured_at for m in members)
        plan: Plan = next((plan for started, plan in reversed(plans) if started <= began), {})
        together = members[0].paired is not None and members[0].paired.window is not None
        terms = GateCriteria()
        if "gate" in plan:
            with _usable("the terms of the gate"):
                facts = plan["gate"]
                margin, alpha, beta = (float(facts[name]) for name in ("margin", "alpha", "beta"))
                terms = GateCriteria(margin, alpha, beta, int(facts["pairs"]))
        if together:
            gated = judge_windows(members, terms.with_both_at_once)
        elif is_of_start(members[0]):
            gated = judge_starts(members, terms.of_starts)
        else:
            gated = judge_gate(members, terms)
        assumed = f"a margin of {percent(gated.terms.margin)}, and {gated.terms.pairs} pairs at most"
        not_stored = f"the terms of the gate of {gated.model} were not stored: judged by {assumed}"
        yield gated, "" if "gate" in plan else not_stored
