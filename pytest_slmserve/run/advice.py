"""Advice on what to deploy, from the measurements of a run."""

from __future__ import annotations

from pytest_slmserve.analysis.advice.advisor import Advice, Objectives, plan
from pytest_slmserve.analysis.advice.subjects import of_curves
from pytest_slmserve.analysis.sweep.batching import parse_relative_slo
from pytest_slmserve.analysis.verdict import Inconclusive
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import short_name

FEWEST_LOADS = 2  # the law of a step has two parameters


def advice_of(session: Session, model: str, slo_itl: str | None, efficiency: float) -> Advice:
    """The advice on one model, as `slmserve advise --model` gives it from the run's archive.

    Raises Inconclusive if fewer than two loads are usable, BadUsage if `slo_itl` or `efficiency` is invalid.
    """
    if not 0 < efficiency < 1:
        raise BadUsage(f"an efficiency of {efficiency:g} is no share between 0 and 1", "efficiency=0.1")
    slo, name = None if slo_itl is None else parse_relative_slo(slo_itl), short_name(model)
    reasons = ["nothing of it was measured in this run (slm_sweep, or a planned sweep)"]
    if curves := [curve for curve in session.verdicts.curves() if curve.subject == name]:
        found = of_curves(curves, None, None)
        wish = Objectives(slo=slo, threshold=efficiency, gpu_bytes=found.source.gpu_bytes)
        [advice] = plan(found.subjects, wish).advices
        if len(advice.subject.usable) >= FEWEST_LOADS:
            return advice
        problems = [text for point in curves[0].points for text in point.problems]
        reasons = [advice.decision.reason, *advice.subject.notes, *problems]
    why = f"no advice on {name}: {'; '.join(dict.fromkeys(reasons))}"
    session.note(why)  # pytest shows no reason for an inconclusive test
    raise Inconclusive(why)
