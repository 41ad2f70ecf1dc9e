"""What a plan says of a run that is resumed: what is known costs nothing, and starts no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from simulated_sessions import MODEL

from pytest_slmserve.plan.case_lists import gpus_cases, job_cases, point_cases, replica_cases
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.planner import Planner
from pytest_slmserve.plugin.estimates import plan_rows
from pytest_slmserve.run.executor import count_missing


def item(fixture: str, value: Any) -> Any:
    """What a plan asks of a test item that is parametrised."""
    parameters = SimpleNamespace(params={fixture: value})
    return SimpleNamespace(
        name="test", callspec=parameters, fixturenames=(fixture,), get_closest_marker=lambda name: None
    )


KINDS = {
    "opt-125m-8": "slm_point",
    "opt-125m-64-x1": "slm_replica_point",
    "opt-125m-64-x2-mps": "slm_replica_point",
    "opt-125m-64-tp2": "slm_gpus_point",
    "opt-125m-64-replicas2": "slm_gpus_point",
    "opt-125m-8-8-at-once": "slm_job_point",
}
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
    again = item(KINDS[name], case)
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
    first, again = plan_rows(session, [item("slm_gpus_point", case_of(session.planner, "opt-125m-64-replicas2"))] * 2)
    assert (first.seconds, again.seconds) == (pytest.approx(0.2), 0.0) and first.engine == again.engine


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("good", range(4))
def test_the_repeats_that_are_left_are_those_that_are_made_if_each_is_clean(good, bad):
    known = [True] * good + [False] * bad
    expected, made = count_missing(known, 2, bool), 0
    while count_missing(known, 2, bool):
        known.append(True)
        made += 1
    assert made == expected
