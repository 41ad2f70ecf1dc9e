"""A plan prices what is missing, once; the time left is what is planned or asked for and not made; the line has the
place, the time and the stage of what is done, on a terminal one that is written over, in a log one
for what took long."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_items import items_for
from simulated_sessions import FEW_STEPS, MODEL
from terminals import WRITTEN_OVER, Screen

from pytest_slmserve.analysis.gate.side_by_side import THROWN_AWAY
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import plan_lines
from pytest_slmserve.plan.planner import gpus_cases, job_cases, point_cases, replica_cases
from pytest_slmserve.plugin import PLAN, progress
from pytest_slmserve.plugin.items import ItemPlan, in_running_order, plans_of
from pytest_slmserve.plugin.progress import ProgressLine, length_of, plan_rows, time_left
from pytest_slmserve.report.live_line import TimeLeft
from pytest_slmserve.run.gate import Gates
from pytest_slmserve.run.one_gate import GAP_S, LIKELY_PAIRS
from pytest_slmserve.schema.records import Progress
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec

START_S, REPEAT_S = 20.0, 3.0


@pytest.fixture
def opened(opened):
    return lambda **given: opened(**{"concurrency": "4,8", **FEW_STEPS, **given})


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Starts and repeats that take long."""
    monkeypatch.setattr(progress, "start_estimate_s", lambda engine: START_S)
    monkeypatch.setattr(cases, "start_estimate_s", lambda engine: START_S)
    monkeypatch.setattr(cases, "repeat_estimate_s", lambda *of: REPEAT_S)


def points(session):
    """The plans of the points of a sweep."""
    return [ItemPlan("test", case=case, swept=True) for case in point_cases(session.planner, {})]


def asked(session, concurrency):
    planner = session.planner
    return planner.case(planner.spec(MODEL), [planner.workload(MODEL)], [ClosedLoop(concurrency, window_s=1)])


# Prices

JOBS = {"jobs": {"gpu": [{"model": MODEL, "requests": 8, "lengths": (32, 8)}]}}


def case_of(planner, name):
    found = [*point_cases(planner, {}), *replica_cases(planner), *job_cases(planner, JOBS)]
    return next(case for case in [*found, *gpus_cases(planner, [MODEL])] if case.id == f"{MODEL}-{name}")


@pytest.mark.parametrize("name", ["8", "8-x1", "8-x2-mps", "8-tp2", "64-replicas2", "8-8-at-once"])
def test_case_price_counts_missing_repeats(opened, name):
    words = {"window": "20", "sharing": "mps", "concurrency": "8,64"}
    session = opened(**words)
    plan = ItemPlan("test", case=case_of(session.planner, name))
    before, again = plan_rows(session, [plan, ItemPlan("left out", skipped=True), plan])
    session.executor.measure(plan.case)
    [after] = plan_rows(opened(**words, resume=True), [plan])
    [more] = plan_rows(opened(**words, resume=True, repeats="5"), [plan])
    engine = plan.case.engine
    assert (before.seconds, before.engine) == (pytest.approx(0.2), engine)
    assert (again.seconds, again.engine) == (0, engine)
    assert (after.seconds, after.engine) == (0.0, None), "nothing is to be measured, so nothing starts"
    assert (more.seconds, more.engine) == (pytest.approx(0.3), engine)


@pytest.mark.parametrize(("given", "repeats"), [({"budget": "0"}, 2), ({"repeats": "3", "budget": "1"}, 3)])
def test_read_only_item_starts_nothing(opened, as_on_a_device, given, repeats):
    session = opened()
    spec = session.planner.spec(MODEL)
    rows = plan_rows(session, [ItemPlan("own", engine=spec, starts=True), ItemPlan("reads", engine=spec)])
    assert [(row.engine, row.seconds) for row in rows] == [(spec, 0.0), (None, 0.0)]
    session = opened(**given)
    assert [row.seconds for row in plan_rows(session, with_claim(session))] == [repeats * REPEAT_S] * 2 + [0.0]


def test_gate_price_counts_its_launches(opened, as_on_a_device):
    """A clear case has four pairs of launches, and one launch that does not count, as the sides are equal; or two of
    both at once."""
    plan = ItemPlan("gate", gate=MODEL, compares=True, starts=True)
    at_once = opened(gate=True)
    windows_s = 2 * 4 * (THROWN_AWAY + LIKELY_PAIRS) * (REPEAT_S + GAP_S)  # of two loads, by four engines
    assert plan_rows(at_once, [plan])[0].seconds == pytest.approx(4 * START_S + windows_s)
    session = opened(gate=True, gate_launches="apart")
    plan = ItemPlan("gate", gate=MODEL, engine=session.planner.spec(MODEL), compares=True, starts=True)
    first, again = plan_rows(session, [plan, plan])
    assert (first.engine, first.seconds) == (None, 9 * START_S + 8 * 2 * REPEAT_S) and again.seconds == 0
    _, row = plan_rows(session, [points(session)[0], plan])
    assert first.seconds - row.seconds == START_S
    session.pair_s[MODEL] = 1, 50.0
    assert plan_rows(session, [plan])[0].seconds == 150.0, "what pairs took is known better than what they may take"
    Gates(session).of(MODEL)
    assert plan_rows(session, [plan])[0].seconds == 0
    session = opened(gate=True, gate_launches="start")
    assert plan_rows(session, [plan])[0].seconds == 13 * START_S, "two launches of each side in each of three pairs"
    session.pair_s[MODEL] = 1, 50.0
    assert plan_rows(session, [plan])[0].seconds == 100.0
    session = opened(models="opt-125m,opt-1.3b")
    seconds, text = told(session, items_for(session, "slm_point"))
    assert seconds == 2 * START_S + 8 * REPEAT_S and text.startswith("about 1 min, 2 ") and "2 models" in text
    assert "1 test" in told(session, items_for(session, "slm_sweep"))[1]
    adaptive = opened(sweep="adaptive")
    assert told(adaptive, items_for(adaptive, "slm_point"))[1].startswith("up to 32 s, 1 ")
    session.platform = "remote"
    assert "start" not in told(session, items_for(session, "slm_point"))[1]
    gate = opened(gate=True, gate_launches="apart")
    seconds, text = told(gate, items_for(gate, "slm_gate slm_gates"))
    assert seconds == 9 * START_S + 16 * REPEAT_S and "9 " in text and "1 model" in text
    spread, one = opened(models="opt-125m,opt-350m", ray="local:2"), opened(models="opt-125m,opt-350m")
    both, alone = (told(session, items_for(session, "slm_point"))[0] for session in (spread, one))
    assert (both, alone) == (START_S + 4 * REPEAT_S, 2 * (START_S + 4 * REPEAT_S))


# The time that is left


def test_time_left_counts_remaining_repeats(opened, as_on_a_device):
    session = opened(repeats="2", budget="0")
    items = points(session)
    repeats = 2 * len(items)
    assert time_left(session, items, START_S) == TimeLeft(START_S, repeats * REPEAT_S)
    session.executor.measure(items[0].case)
    assert session.devices.pool.current is not None
    assert time_left(session, items[1:], REPEAT_S) == TimeLeft(REPEAT_S, (repeats - 3) * REPEAT_S)
    assert not time_left(session, []), "nothing is left"
    session = opened(repeats="3", budget="0")
    items = points(session)[:1]
    session.executor.measure(items[0].case, 1)
    assert time_left(session, items, REPEAT_S) == TimeLeft(REPEAT_S, REPEAT_S)
    session.executor.ask([asked(session, 16)], repeats=3)
    session.executor.measure(asked(session, 16), 1)
    assert time_left(session, items).rest_s == (2 + 2) * REPEAT_S
    session = opened()
    items = [ItemPlan("test", engine=session.planner.spec(MODEL), starts=True, open=True)]
    before = time_left(session, items, START_S)
    assert before.more and before.step_s + before.rest_s == START_S
    session.executor.ask([asked(session, 8), asked(session, 64)], repeats=3)
    assert time_left(session, items, START_S) == TimeLeft(START_S, 6 * REPEAT_S, more=True)
    session.executor.measure(asked(session, 8), repeats=3)
    assert time_left(session, items, REPEAT_S) == TimeLeft(REPEAT_S, 2 * REPEAT_S, more=True)


def with_claim(session):
    """The points of a sweep, and a claim on it."""
    return [*points(session), ItemPlan("claim", claim=session.verdicts.question("throughput-plateau", MODEL))]


def test_time_left_includes_claim_budget(opened, as_on_a_device):
    session = opened(budget="60")
    session.platform = "cpu"  # the seconds of a formula are none of a clock, and are not planned
    items = with_claim(session)
    rows = plan_rows(session, items)
    assert [(row.name, row.seconds) for row in rows] == [
        ("test", REPEAT_S), ("test", REPEAT_S), (cases.AGAIN, 60 - 2 * REPEAT_S), ("claim", 0.0),
    ]  # fmt: skip
    assert plan_lines(rows)[-1].endswith("end: 3 items")
    assert length_of(session, items, rows)[1].startswith("up to 1 min")
    assert time_left(session, items) == TimeLeft(0.0, START_S + 60)
    first, second = (plan.case for plan in items[:2])
    session.executor.measure(first, 1)
    spent_s = session.executor.spent_s[first.engine]
    assert time_left(session, items).rest_s == pytest.approx(60 - spent_s)
    session.executor.measure(second, 1)
    assert time_left(session, items).rest_s == 0, "they are decided"
    session.verdicts.measuring.add(first.series)
    assert time_left(session, items).rest_s == pytest.approx(60 - session.executor.spent_s[first.engine])
    session.executor.ask([first], repeats=3)
    assert time_left(session, items).rest_s == pytest.approx(60 - session.executor.spent_s[first.engine]), "of these"


def test_time_left_follows_host_speed(opened, as_on_a_device, monkeypatch):
    monkeypatch.setitem(cases.DEFAULTS, "simulated", replace(cases.DEFAULTS["simulated"], first_s=10.0))
    session = opened(models="opt-125m,opt-350m", budget="0")
    items = points(session)
    before = time_left(session, items)
    assert before.rest_s == 2 * START_S + 8 * REPEAT_S
    session.devices.pool.first_start = items[0].case.engine, 2 * (START_S + 10.0)
    session.executor.took_s, session.executor.estimated_s = 60.0, 20.0
    assert time_left(session, items).rest_s == 2 * 2 * START_S + 3 * 8 * REPEAT_S
    session = opened(budget="0")
    items = points(session)[:1]
    session.executor.measure(items[0].case, 1)
    assert time_left(session, items, 99.0) == TimeLeft(REPEAT_S, 0.0)
    gate = ItemPlan("gate", gate=MODEL, compares=True)
    left = time_left(session, [gate], 1.0)
    assert left.step_s == plan_rows(session, [gate])[0].seconds and left.rest_s == 0


# The sentence on the length of a run


def told(session, *items):
    plans = plans_of(in_running_order(session, [each for some in items for each in some]))
    return length_of(session, plans, plan_rows(session, plans))


# The line


class Writer:
    """Pytest's, with the cursor on the eighth column, and what a log would get."""

    width_of_current_line = 7

    def __init__(self):
        self.text = ""

    def write(self, text, flush):
        self.text += text


@pytest.fixture
def started(opened, monkeypatch):
    """A progress line at its first item, on a terminal or in a log: `started("terminal")`. `clock` is its time."""

    def make(where, plans=None, verbose=0, promised_s=0.0):
        screen, writer, slm = Screen(), Writer(), opened()
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        monkeypatch.setattr(progress, "time", clock)
        if where == "terminal":
            monkeypatch.setattr(sys, "stdout", screen)
        usual = [ItemPlan("test_own", engine=EngineSpec(MODEL, platform="simulated"), starts=True, open=True)]
        plans = plans(slm) if plans else usual
        items = [SimpleNamespace(nodeid=f"t.py::{i}", stash={PLAN: plan}) for i, plan in enumerate(plans)]
        config = SimpleNamespace(
            pluginmanager=SimpleNamespace(getplugin=lambda name: None),
            option=SimpleNamespace(verbose=verbose),
            get_terminal_writer=lambda: writer,
        )
        reporter = SimpleNamespace(showfspath=True, showlongtestinfo=False, ended=[])
        reporter.write_fspath_result = lambda nodeid, text: reporter.ended.append(nodeid)
        line = ProgressLine(SimpleNamespace(items=items, config=config), slm, reporter, promised_s)
        line.pytest_runtest_logstart("t.py::0")
        return SimpleNamespace(line=line, slm=slm, screen=screen, log=writer, clock=clock, reporter=reporter)

    return make


def shown(run):
    return WRITTEN_OVER.findall(run.screen.getvalue())


@pytest.mark.parametrize(("plans", "first"), [(None, "0:01+ left"), (points, "2 cases")])
def test_starting_engine_shows_stage(started, tmp_path, plans, first):
    run = started("terminal", plans)
    spec, log = run.slm.planner.spec(MODEL), tmp_path / "engine.log"
    for _ in range(2):  # a server is looked at ten times a second
        run.slm.devices.pool.on_wait(spec, log)
    assert [line.split(" | ")[-2:] for line in shown(run)] == [[MODEL, "importing vLLM 0 s"]]
    assert shown(run)[0].partition(" |")[0] == first
    run.slm.devices.pool.on_started(spec, 21.3)
    assert run.screen.getvalue().endswith("\n\x1b[K\x1b[1A\x1b[8G") and run.log.text == ""


@pytest.mark.parametrize(("seconds", "verbose", "line"), [(21.3, 0, True), (0.9, 0, False), (21.3, -1, False)])
def test_log_names_long_starts(started, seconds, verbose, line):
    run = started("log", verbose=verbose)
    run.slm.devices.pool.on_started(run.slm.planner.spec(MODEL), seconds)
    assert run.log.text == ("\nslmserve: opt-125m started in 21 s" if line else "")
    for where, verbose, line in (("log", 0, True), ("terminal", 0, True), ("log", -1, False)):
        run = started(where, verbose=verbose)
        run.slm.say("it stays open")
        assert run.log.text == ("\nslmserve: it stays open" if line else "")


@pytest.mark.parametrize("where", ["log", "terminal"])
def test_slow_start_corrects_promise(started, where):
    run = started(where, points, promised_s=30.0)
    run.clock.now += 100
    for _ in range(2):
        run.slm.devices.pool.on_started(run.slm.planner.spec(MODEL), 99.0)
    assert run.log.text.count("in all") == 1 and "started in 99 s: " in run.log.text and "30 s" in run.log.text
    for plans in (points, lambda slm: [ItemPlan("gate", gate=MODEL, compares=True)]):
        same = started(where, plans, promised_s=95.0 if plans is points else 1.0)
        same.clock.now += 115
        same.slm.devices.pool.on_started(same.slm.planner.spec(MODEL), 99.0)
        assert "in all" not in same.log.text, "2 min are 2 min, and a gate has no promise"


def test_log_names_long_cases(started, as_on_a_device):
    run = started("log", points)
    for case in run.slm.planner.sweep(MODEL).cases:
        for number in (1, 2):
            run.slm.executor.on_progress(case, f"{case.title}, repeat {number}", Progress("ramp", 0.5, 0, 8, None))
            run.clock.now += 2 + case.concurrency
    report = SimpleNamespace(when="call", passed=True, nodeid="t.py::0")
    run.line.pytest_runtest_logreport(report)
    told = run.log.text.strip().split("\n")
    assert [line.partition(" left")[0] for line in told] == [
        "slmserve: case 1 of 2, opt-125m at 4, repeat 2: 12 s, 0:32",
        "slmserve: case 2 of 2, opt-125m at 8, repeat 2: 20 s, 0:26",
    ]
    assert run.reporter.ended == ["t.py::0"], "pytest's dots have a line of their own"
    run.line.pytest_runtest_logreport(report)
    assert run.reporter.ended == ["t.py::0"] and run.log.text.strip().split("\n") == told
    run = started("terminal", points)
    first, second = run.slm.planner.sweep(MODEL).cases
    for case in (first, second):
        run.slm.executor.on_progress(case, f"{case.title}, repeat 1", Progress("window", 0.5, 0, 8, None))
        run.clock.now += 1
    assert [line.split(" | ")[:3] for line in shown(run)] == [
        ["case 1 of 2", "0:32 left", "opt-125m at 4, repeat 1"],
        ["case 2 of 2", "0:32 left", "opt-125m at 8, repeat 1"],
    ]
    assert run.log.text == ""
    run = started("terminal", lambda slm: [ItemPlan("gate", gate=MODEL, compares=True), *points(slm)])
    case = run.slm.planner.sweep(MODEL).cases[0]
    for number in (1, 2):
        run.slm.executor.on_progress(case, f"pair {number}", Progress("window", 0.5, 0, 8, None))
        run.clock.now += 10
    assert [line.split(" | ")[:2] for line in shown(run)] == [["8:02 left", "pair 1"], ["7:52 left", "pair 2"]]


def test_unplanned_cases_join_progress_count(started, monkeypatch):
    run = started("terminal")
    case = asked(run.slm, 8)
    run.slm.executor.ask([case])
    run.line.wait(case, "3 came | 2 engines run, 1 wait for a node")
    assert shown(run) == ["case 1 of 1+ | opt-125m at 8 | 3 came | 2 engines run, 1 wait for a node"]
    run.slm.executor.on_progress(case, "opt-125m at 8, repeat 1", Progress("ramp", 0.5, 0, 8, None))
    run.line.pytest_runtest_logstart("t.py::0")
    assert run.slm.executor.awaited() == {} and [*run.slm.results.requested] == [case.key]
    run = started("terminal")
    for loads in ((1, 2, 4), (8,)):
        run.slm.executor.ask([asked(run.slm, n) for n in loads])
        for n in loads:
            run.slm.executor.on_progress(asked(run.slm, n), f"at {n}", Progress("ramp", 0.5, 0, 8, None))
    assert [line.partition(" |")[0] for line in shown(run)] == [*(f"case {n} of 3+" for n in (1, 2, 3)), "case 4 of 4+"]
    run, looked, numbers = started("terminal"), [], []
    case = asked(run.slm, 8)
    run.slm.executor.ask([case])
    missing = run.slm.executor.count_missing
    monkeypatch.setattr(run.slm.executor, "count_missing", lambda *of: looked.append(of) or missing(*of))
    for elapsed_s in (0.5, 1.0, 1.5):
        run.slm.executor.on_progress(case, "opt-125m at 8, repeat 1", Progress("ramp", elapsed_s, 0, 8, None))
        numbers.append(len(looked))
    assert numbers[0] > 0 and len(set(numbers)) == 1
    run = started("terminal", points)
    for case in run.slm.planner.sweep(MODEL).cases:
        run.slm.executor.measure(case)
    assert run.slm.devices.pool.starts == [SimulatedEngine(case.engine).spec]
    assert [line.partition(" |")[0] for line in shown(run) if line] == ["case 1 of 2"] * 2 + ["case 2 of 2"] * 2
