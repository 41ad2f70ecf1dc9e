"""What the items of a run will ask for, known before the first of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_slmserve.items import is_skipped, variant_asked_for
from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import Question
from pytest_slmserve.run.session import Session
from pytest_slmserve.shared_engines import GpusPoint, ReplicaPoint


def questions_of(session: Session, items: Sequence[Any]) -> list[Question]:
    """Each once, in the order of the items."""
    asked = (question_of(session, item) for item in items if not is_skipped(item))
    return list({question.key: question for question in asked if question}.values())


def question_of(session: Session, item: Any) -> Question | None:
    """What its parameter has it measure; None where it measures nothing, or only it knows what."""
    parameters, agenda = item.callspec.params if hasattr(item, "callspec") else {}, session.agenda
    if point := parameters.get("slm_point"):
        model, load = point
        return session.question(agenda.spec(model), agenda.workload(model, variant_asked_for(item)), load)
    if replicas := parameters.get("slm_replica_point"):
        return ReplicaPoint(session, replicas).question()
    if gpus := parameters.get("slm_gpus_point"):
        return GpusPoint(session, gpus).question()
    if job := parameters.get("slm_job_point"):
        return session.question(*cases.job_case(agenda, job))
    return None
