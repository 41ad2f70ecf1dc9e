"""What a plan says of a run that is resumed: what is known costs nothing, and starts no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from simulated_sessions import MODEL

from pytest_slmserve.plan.cases import GpusPlan, JobPlan, ReplicaPlan
from pytest_slmserve.plugin.estimates import plan_rows
from pytest_slmserve.plugin.items import question_of
from pytest_slmserve.run.executor import left, wanted
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.specs import ReplicaSpec


def item(fixture: str, value: Any) -> Any:
    """What a plan asks of a test item that is parametrised."""
    parameters = SimpleNamespace(params={fixture: value})
    return SimpleNamespace(
        name="test", callspec=parameters, fixturenames=(fixture,), get_closest_marker=lambda name: None
    )


CELLS = {
    "point": item("slm_point", (MODEL, ClosedLoop(8, window_s=20.0))),
    "one of replicas": item("slm_replica_point", ReplicaPlan(MODEL, 1, "time-slicing", 8)),
    "replicas": item("slm_replica_point", ReplicaPlan(MODEL, 2, "mps", 8)),
    "two GPUs": item("slm_gpus_point", GpusPlan(MODEL, 2, False, 8, 8)),
    "a GPU each": item("slm_gpus_point", GpusPlan(MODEL, 2, True, 64, 64)),
    "job": item("slm_job_point", JobPlan(MODEL, 8, lengths=(32, 8))),
}


def answered(session, question):
    together = isinstance(question.engine, ReplicaSpec)
    return session.answered_together(question, 2) if together else session.answered(question, 2)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_priced_by_what_is_missing_of_it(opened, kind):
    cell, first = CELLS[kind], opened()
    [before] = plan_rows(first, [cell])
    answered(first, question_of(first, cell))
    [after] = plan_rows(opened(resume=True), [cell])
    assert before.seconds == pytest.approx(0.2) and before.engine is not None
    assert (after.seconds, after.engine) == (0.0, None), "nothing is to be measured, so nothing starts"
    [more] = plan_rows(opened(resume=True, repeats="5"), [cell])
    assert (more.seconds, more.engine) == (pytest.approx(0.3), before.engine)


def test_items_that_ask_the_same_pay_once(opened):
    first, again = plan_rows(opened(), [CELLS["replicas"]] * 2)
    assert (first.seconds, again.seconds) == (pytest.approx(0.2), 0.0) and first.engine == again.engine


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("good", range(4))
def test_the_repeats_that_are_left_are_those_that_are_made_if_each_is_sound(good, bad):
    known = [True] * good + [False] * bad
    expected, made = left(known, 2, bool), 0
    for _ in wanted(known, 2, bool):
        known.append(True)
        made += 1
    assert made == expected
