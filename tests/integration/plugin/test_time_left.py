"""The time that is left of a run, and the sentence on its length before it begins."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from inside import GATE
from shipped import put
from simulated_sessions import MODEL

from pytest_slmserve.plan import cases
from pytest_slmserve.plan import cases as costs
from pytest_slmserve.plan.planner import point_cases
from pytest_slmserve.plugin import progress, session_hooks
from pytest_slmserve.plugin.items import ItemPlan
from pytest_slmserve.plugin.progress import time_left
from pytest_slmserve.report.live_line import TimeLeft
from pytest_slmserve.schema.specs import ClosedLoop

START_S, REPEAT_S = 20.0, 3.0


@pytest.fixture(autouse=True)
def as_long_as_on_a_device(monkeypatch):
    monkeypatch.setattr(progress, "start_estimate_s", lambda engine: START_S)
    monkeypatch.setattr(cases, "repeat_estimate_s", lambda *of: REPEAT_S)


def points(session):
    """The plans of the points of a sweep."""
    return [ItemPlan("test", case=case, swept=True) for case in point_cases(session.planner, {})]


def asked(session, concurrency):
    planner = session.planner
    return planner.case(planner.spec(MODEL), [planner.workload(MODEL)], [ClosedLoop(concurrency)])


def test_all_that_is_left_counts_and_the_start_until_the_engine_runs(opened):
    session = opened(repeats="2", budget="0")
    items = points(session)
    repeats = 2 * len(items)
    assert time_left(session, items, START_S) == TimeLeft(START_S, repeats * REPEAT_S)
    session.executor.measure(items[0].case)
    assert session.devices.pool.current is not None
    assert time_left(session, items[1:], REPEAT_S) == TimeLeft(REPEAT_S, (repeats - 3) * REPEAT_S)
    assert not time_left(session, []), "nothing is left"


def test_what_a_test_asks_for_counts_when_it_is_asked_and_more_may_come(opened):
    session = opened()
    items = [ItemPlan("test", engine=session.planner.spec(MODEL), starts=True, open=True)]
    before = time_left(session, items, START_S)
    assert before.more and before.step_s + before.rest_s == START_S
    session.executor.ask([asked(session, 8), asked(session, 64)], repeats=3)
    assert time_left(session, items, START_S) == TimeLeft(START_S, 6 * REPEAT_S, more=True)
    session.executor.measure(asked(session, 8), repeats=3)
    assert time_left(session, items, REPEAT_S) == TimeLeft(REPEAT_S, 2 * REPEAT_S, more=True)


def test_a_round_of_a_sweep_leaves_those_after_it(opened):
    session = opened(repeats="3", budget="0")
    case = point_cases(session.planner, {})[0]
    items = [ItemPlan("test", case=case, swept=True)]
    session.executor.measure(case, 1)
    assert time_left(session, items, REPEAT_S) == TimeLeft(REPEAT_S, REPEAT_S)
    session.executor.ask([asked(session, 16)], repeats=3)
    session.executor.measure(asked(session, 16), 1)
    assert time_left(session, items).rest_s == (2 + 2) * REPEAT_S


def test_a_sweep_that_goes_on_until_it_is_decided_takes_so_long_at_least(opened):
    for budget, more in (("0", False), ("60", True)):
        session = opened(repeats="2", budget=budget)
        items = points(session)
        assert time_left(session, items).more is more
    for each in items:
        session.executor.measure(each.case)
    assert not time_left(session, items)
    session.executor.ask([items[0].case], repeats=4)
    assert time_left(session, items).rest_s == 2 * REPEAT_S


def test_what_was_planned_and_is_asked_for_counts_once(opened):
    session = opened(repeats="2", budget="0")
    case = point_cases(session.planner, {})[0]
    session.executor.ask([case])
    left = time_left(session, [ItemPlan("test", case=case, swept=True)], REPEAT_S)
    assert left == TimeLeft(REPEAT_S, START_S + REPEAT_S)


def lengths(result):
    return [
        line for line in result.stdout.str().splitlines() if line.startswith("slmserve: ") and "engine start" in line
    ]


def test_a_long_run_says_how_long_before_it_begins(sweep, pytester, monkeypatch):
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    monkeypatch.setattr(costs, "DEFAULTS", dict.fromkeys(costs.DEFAULTS, SimpleNamespace(start_s=600.0, turn_s=0.0)))
    pytester.makepyfile(
        test_own="""
        def test_own(slm_sweep):
            pass
        """
    )
    [line] = lengths(sweep("--slm-concurrency=1,16", "--slm-models=opt-125m,opt-1.3b"))
    assert re.fullmatch(
        r"slmserve: about 20 min, 2 engine starts, 2 models, and what 1 test will ask for; --slm-plan lists them", line
    )
    [line] = lengths(sweep("--slm-concurrency=1,16", "--slm-sweep=adaptive"))
    assert line.startswith("slmserve: up to 10 min, 1 engine start, 1 model")
    result = sweep("--slm-concurrency=1,16", "--slm-plan")
    total = "about 10 min, 1 engine start, 1 model, and what 1 test will ask for:"
    result.stdout.fnmatch_lines([total, "  min:s *"], consecutive=True)
    assert lengths(result) == [], "the plan itself begins with it"


def test_a_short_run_says_nothing(sweep):
    assert lengths(sweep("--slm-concurrency=1,16")) == []


def test_a_gate_counts_its_launches(pytester, monkeypatch):
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    put(pytester.path, "test_gate")
    [line] = lengths(pytester.runpytest_inprocess(*GATE, "--override-ini=slm_gate_pairs=6"))
    assert re.fullmatch(r"slmserve: about \d+ min, \d\d? engine starts, 1 model; --slm-plan lists them", line)
