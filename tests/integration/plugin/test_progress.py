"""How far a run is: one line on a terminal, as wide as that is; in a log a line for each case and each start."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
from inside import ALL_OF_IT, SWEEP
from terminals import WRITTEN_OVER, Screen, shown_on

from pytest_slmserve.plugin import PLAN, progress
from pytest_slmserve.plugin.items import ItemPlan
from pytest_slmserve.plugin.progress import ProgressLine
from pytest_slmserve.schema.records import Progress
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec

OWN = """
    import pytest

    @pytest.mark.slm(model="opt-125m")
    def test_curve(slm_sweep):
        assert len(slm_sweep(concurrency=[1, 2, 4]).points) == 3

    @pytest.mark.slm(model="opt-125m")
    def test_point(slm_measure):
        assert slm_measure(concurrency=8)
"""
QUICK = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=1,16", "--slm-window=1", ALL_OF_IT)


@pytest.fixture
def every_line(monkeypatch):
    """Lines in a log also on what took no time."""
    monkeypatch.setattr(progress, "LEAST_S", 0.0)


@pytest.fixture
def on_a_terminal(pytester):
    """Runs a file of tests on a terminal of so many columns."""

    def run(text, columns, *args):
        file = pytester.makepyfile(text)
        command = [sys.executable, "-m", "pytest", *QUICK, *args, "-p", "no:cacheprovider", file.name]
        return shown_on(columns, command, {**os.environ, "TERM": "xterm", "COLUMNS": "400"})

    return run


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_the_line_is_as_wide_as_the_terminal_while_output_is_captured(on_a_terminal, columns):
    text = on_a_terminal(SWEEP, columns)
    lines = list(filter(None, WRITTEN_OVER.findall(text)))
    assert len(lines) == 4 and all(len(line) < columns for line in lines), text
    numbers = [re.match(r"case (\d) of 2 \| \d:\d\d\+? left \| ", line)[1] for line in lines]
    assert numbers == ["1", "2", "1", "2"], "a sweep goes in rounds"
    assert not any("0:00" in line for line in lines)
    assert all("| over " in line for line in lines)
    if columns == 160:
        assert all(line.endswith(" tokens/s") for line in lines) and "| opt-125m at 16, repeat 2 |" in lines[-1]
    assert WRITTEN_OVER.findall(text)[-1] == "", "the line is gone when a test has ended"
    assert "slmserve: case" not in text


def test_what_tests_ask_for_as_they_go_counts_from_when_it_is_asked(on_a_terminal):
    lines = list(filter(None, WRITTEN_OVER.findall(on_a_terminal(OWN, 160))))
    begins = [line.split(" | ")[:3] for line in lines if "repeat 1" in line]
    curve = [[f"case {n} of 3+", "0:01+ left", f"opt-125m at {c}, repeat 1"] for n, c in enumerate((1, 2, 4), start=1)]
    assert begins == [*curve, ["case 4 of 4+", "0:01+ left", "opt-125m at 8, repeat 1"]]


def test_pairs_of_a_gate_have_no_place_among_the_cases(on_a_terminal):
    """Not even where a test has measured the very load of the gate."""
    gate = """
        import pytest

        def test_point(slm_point):
            assert slm_point.measure()

        @pytest.mark.slm(model="opt-125m", gate="simulated")
        def test_gate(slm_gates):
            assert slm_gates.of("opt-125m").verdict("throughput")
    """
    lines = list(filter(None, WRITTEN_OVER.findall(on_a_terminal(gate, 100, "--slm-concurrency=512"))))
    assert [line for line in lines if line.startswith("case 1 of 1 | ")] and "pair 1" in "".join(lines)
    assert not [line for line in lines if ", pair " in line and "case" in line]


def test_a_log_gets_a_line_for_each_case_and_each_start(sweep, every_line):
    result = sweep("--slm-concurrency=1,16", "--color=yes")
    text = re.sub(r"\x1b\[[\d;]*m", "", result.stdout.str())
    assert "\x1b[K" not in result.stdout.str(), "colours make no terminal"
    told = [line for line in text.splitlines() if line.startswith("slmserve: case ")]
    assert [re.sub(r"\b\d+ s\b", "N s", line) for line in told] == [
        "slmserve: case 1 of 2, opt-125m at 1, repeat 1: N s, 0:01+ left",
        "slmserve: case 2 of 2, opt-125m at 16, repeat 1: N s, 0:01+ left",
        "slmserve: case 1 of 2, opt-125m at 1, repeat 2: N s, 0:01+ left",
        "slmserve: case 2 of 2, opt-125m at 16, repeat 2: N s",
    ]
    assert re.search(r"^slmserve: opt-125m started in 0 s$", text, re.MULTILINE)
    assert re.search(r"^\S+\.py \.\.", text, re.MULTILINE), "pytest's dots have a line of their own"
    assert "\n\nslmserve: " not in text.partition("collected")[2].partition("=====")[0]


def test_a_log_with_the_names_of_tests_has_them_before_each_result(sweep, every_line):
    text = sweep("--slm-concurrency=1,16", "-v").stdout.str()
    assert text.count("slmserve: case ") == 4
    assert len(re.findall(r"^\S+::test_point\[opt-125m-\d+\] PASSED", text, re.MULTILINE)) == 2


@pytest.mark.parametrize("quiet", [("-q",), ()])
def test_a_quiet_run_and_what_took_no_time_get_no_line(sweep, monkeypatch, quiet):
    monkeypatch.setattr(progress, "LEAST_S", 0.0 if quiet else 1e9)
    text = sweep("--slm-concurrency=1,16", *quiet).stdout.str()
    assert "slmserve: case" not in text and " started in " not in text


class Writer:
    """Pytest's, with the cursor on the eighth column, and what a log would get."""

    width_of_current_line = 7

    def __init__(self):
        self.text = ""

    def write(self, text, flush):
        self.text += text


@pytest.fixture
def started(opened, monkeypatch):
    """A progress line at its first item, on a terminal or in a log: `started("terminal")`."""

    def make(where):
        screen = Screen()
        if where == "terminal":
            monkeypatch.setattr(sys, "stdout", screen)
        plan = ItemPlan("test_own", engine=EngineSpec("opt-125m", platform="simulated"), starts=True, open=True)
        item = SimpleNamespace(nodeid="t.py::test_own", stash={PLAN: plan})
        config = SimpleNamespace(
            pluginmanager=SimpleNamespace(getplugin=lambda name: None),
            option=SimpleNamespace(verbose=0),
            get_terminal_writer=lambda: writer,
        )
        writer, slm = Writer(), opened()
        line = ProgressLine(SimpleNamespace(items=[item], config=config), slm, SimpleNamespace())
        line.pytest_runtest_logstart(item.nodeid)
        return SimpleNamespace(line=line, slm=slm, screen=screen, log=writer)

    return make


def test_an_engine_that_starts_is_shown_with_its_stage_and_then_cleared(started, tmp_path):
    run = started("terminal")
    spec, log = run.slm.planner.spec("opt-125m"), tmp_path / "engine.log"
    run.slm.devices.pool.on_wait(spec, log)
    assert WRITTEN_OVER.findall(run.screen.getvalue()) == ["0:01+ left | opt-125m | importing vLLM 0 s"]
    run.slm.devices.pool.on_wait(spec, log)
    assert len(WRITTEN_OVER.findall(run.screen.getvalue())) == 1, "a server is looked at ten times a second"
    run.slm.devices.pool.on_started(spec, 21.3)
    assert run.screen.getvalue().endswith("\n\x1b[K\x1b[1A\x1b[8G") and run.log.text == ""


def test_a_log_has_the_seconds_of_each_start(started):
    run = started("log")
    run.slm.devices.pool.on_started(run.slm.planner.spec("opt-125m"), 21.3)
    assert run.log.text == "\nslmserve: opt-125m started in 21 s"


def test_what_is_measured_elsewhere_has_a_place_and_no_time_left(started):
    run = started("terminal")
    planner = run.slm.planner
    case = planner.case(planner.spec("opt-125m"), [planner.workload("opt-125m")], [ClosedLoop(8)])
    run.slm.executor.ask([case])
    run.line.wait(case, "3 came | 2 engines run, 1 wait for a node")
    shown = WRITTEN_OVER.findall(run.screen.getvalue())
    assert shown == ["case 1 of 1+ | opt-125m at 8 | 3 came | 2 engines run, 1 wait for a node"]


def test_a_new_test_no_longer_waits_for_what_another_asked_for(started):
    run = started("terminal")
    planner = run.slm.planner
    case = planner.case(planner.spec("opt-125m"), [planner.workload("opt-125m")], [ClosedLoop(8)])
    run.slm.executor.ask([case])
    run.slm.executor.on_progress(case, "opt-125m at 8, repeat 1", Progress("ramp", 0.5, 0, 8, None))
    run.line.pytest_runtest_logstart("t.py::test_own")
    assert run.slm.executor.awaited() == {} and [*run.slm.results.requested] == [case.key]


def test_what_is_measured_is_looked_up_once_for_a_repeat(started, monkeypatch):
    run, looked = started("terminal"), []
    planner = run.slm.planner
    case = planner.case(planner.spec("opt-125m"), [planner.workload("opt-125m")], [ClosedLoop(8)])
    run.slm.executor.ask([case])
    missing = run.slm.executor.count_missing
    monkeypatch.setattr(run.slm.executor, "count_missing", lambda *of: looked.append(of) or missing(*of))
    numbers = []
    for elapsed_s in (0.5, 1.0, 1.5):
        run.slm.executor.on_progress(case, "opt-125m at 8, repeat 1", Progress("ramp", elapsed_s, 0, 8, None))
        numbers.append(len(looked))
    assert numbers[0] > 0 and len(set(numbers)) == 1
