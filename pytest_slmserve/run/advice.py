"""Deployment advice from what a run has measured so far."""

from __future__ import annotations

from pytest_slmserve.analysis.advice.advisor import Advice, plan
from pytest_slmserve.analysis.advice.batch_choice import Objectives
from pytest_slmserve.analysis.advice.subjects import of_curves
from pytest_slmserve.analysis.sweep.batching import parse_slo
from pytest_slmserve.analysis.verdict import Undecided
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage

FEWEST_LOADS = 2  # the law of a step has two parameters


def advice_of(session: Session, model: str, slo_itl: str | None, efficiency: float) -> Advice:
    """The advice on one model, as `slmserve advise --model` would give it from the run's archive.

    Raises Undecided where fewer than two loads are usable, BadUsage where `slo_itl` or `efficiency` is invalid.
    """
    if not 0 < efficiency < 1:
        raise BadUsage(f"an efficiency of {efficiency:g} is no share between 0 and 1", "efficiency=0.1")
    slo, name = None if slo_itl is None else parse_slo(slo_itl), short_name(model)
    curves = [curve for curve in session.verdicts.curves() if curve.subject == name]
    if not curves:
        raise _undecided(session, name, "nothing of it was measured in this run (slm_sweep, or a planned sweep)")
    asked = of_curves(curves, None, None)
    [advice] = plan(asked.subjects, Objectives(slo=slo, threshold=efficiency, gpu_bytes=asked.source.gpu_bytes)).advices
    if len(advice.subject.usable) < FEWEST_LOADS:
        why = [advice.decision.reason, *advice.subject.notes, *(text for p in curves[0].points for text in p.problems)]
        raise _undecided(session, name, "; ".join(dict.fromkeys(why)))
    return advice


def _undecided(session: Session, name: str, why: str) -> Undecided:
    """An Undecided error, whose reason is also noted for the end of the run: pytest shows no reason for an undecided
    test."""
    said = f"no advice on {name}: {why}"
    if said not in session.notes:
        session.notes.append(said)
    return Undecided(said)
