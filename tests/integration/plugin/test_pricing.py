"""What a plan says of a run that is resumed: what is known costs nothing, and starts no engine."""

from __future__ import annotations

import pytest
from simulated_sessions import MODEL

from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.planner import Planner, gpus_cases, job_cases, point_cases, replica_cases
from pytest_slmserve.plugin.items import ItemPlan
from pytest_slmserve.plugin.progress import plan_rows
from pytest_slmserve.run.executor import count_missing

KINDS = (
    "opt-125m-8",
    "opt-125m-64-x1",
    "opt-125m-64-x2-mps",
    "opt-125m-64-tp2",
    "opt-125m-64-replicas2",
    "opt-125m-8-8-at-once",
)
JOBS = {"jobs": {"gpu": [{"model": MODEL, "requests": 8, "lengths": (32, 8)}]}}


def case_of(planner: Planner, name: str) -> Case:
    cases = [
        *point_cases(planner, {}),
        *replica_cases(planner),
        *gpus_cases(planner, [MODEL]),
        *job_cases(planner, JOBS),
    ]
    return next(case for case in cases if case.id == name)


@pytest.mark.parametrize("name", KINDS)
def test_a_case_is_priced_by_what_is_missing_of_it(opened, name):
    words = {"window": "20", "sharing": "mps"}
    first, case = opened(**words), case_of(opened(**words).planner, name)
    again = ItemPlan("test", case=case)
    [before] = plan_rows(first, [again])
    first = opened(**words)
    first.executor.measure(case)
    [after] = plan_rows(opened(**words, resume=True), [again])
    assert before.seconds == pytest.approx(0.2) and before.engine == case.engine
    assert (after.seconds, after.engine) == (0.0, None), "nothing is to be measured, so nothing starts"
    [more] = plan_rows(opened(**words, resume=True, repeats="5"), [again])
    assert (more.seconds, more.engine) == (pytest.approx(0.3), before.engine)


def test_items_with_equal_cases_pay_once(opened):
    session = opened()
    plan = ItemPlan("test", case=case_of(session.planner, "opt-125m-64-replicas2"))
    first, again = plan_rows(session, [plan, plan])
    assert (first.seconds, again.seconds) == (pytest.approx(0.2), 0.0) and first.engine == again.engine


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("good", range(4))
def test_the_repeats_that_are_left_are_those_that_are_made_if_each_is_clean(good, bad):
    known = [True] * good + [False] * bad
    expected, made = count_missing(known, 2), 0
    while count_missing(known, 2):
        known.append(True)
        made += 1
    assert made == expected
