"""Judging measurements by the claims, plans and gate terms that a run stores with them: while it goes on, and from its
archive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims.claim import ClaimRow
from pytest_slmserve.analysis.claims.table import applies, models_read
from pytest_slmserve.analysis.compare.deployments import with_wider
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.points import by_series, shared_points
from pytest_slmserve.analysis.stats.estimates import grouped, percent
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, labels, with_shared
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadArchive, SlmError
from pytest_slmserve.schema.records import Measurement

# {"sweeps": {series key: {"model": name, "concurrencies": [1, 2], "skipped": [[4, "why"]]}}}, of an adaptive sweep also
# "adaptive": {"tolerance": 0.1}; "compared": series keys of curves that are no sweeps; "interim_analyses": numbers of
# repeats after which a sweep that measures until its claims are decided may be judged
Plan = Mapping[str, Any]
Judged = tuple[Verdict, ClaimRow]
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # plain values of any kind were stored


def unique(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Each record once: a copy is no repeat."""
    return list({m.id: m for m in measurements}.values())


def rows_from(stored: Mapping[str, Any]) -> tuple[ClaimRow, ...]:
    """The claims' rows that a session stored, and today's for claims it does not have. Raises BadArchive."""
    try:
        rows = tuple(table.row_from_record(facts) for facts in stored.get("rows", ()))
        known = {row.claim for row in rows}
    except UNUSABLE as error:
        raise unusable("the claims", error) from None
    return (*rows, *(row for row in table.ROWS if row.claim not in known))


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
    for claim in table.CLAIMS:
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
                row = table.row_for(claim.name, curve.subject, here.environment, interface, ramp_up, rows)
                then = row
                if stored:
                    then = table.row_for(claim.name, curve.subject, here.environment, interface, ramp_up, stored)
                verdict = table.judge_row(claim.name, curve, row, curves)
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
