"""However pytest or its engine ends: no process is left, the device is free, and what was measured is kept."""

import os
import re
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

import pytest
from processes import gone
from runs import POINTS, START_S, STEADY, PytestRun, nothing_left_of

from pytest_slmserve.engines.device_lock import lock_device
from pytest_slmserve.run.executor import EXTRA_ATTEMPTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.fixture
def tmp():
    """The folder for temporary files of a test's runs of pytest, and so for their lock."""
    with TemporaryDirectory(prefix="slm-") as folder:
        yield Path(folder)


@pytest.fixture
def pytest_run(tmp_path, tmp):
    """Runs pytest over the points of a sweep; nothing of it outlives the test."""
    (tmp_path / "test_points.py").write_text(dedent(POINTS), "utf-8")
    runs = []

    def run(*arguments):
        runs.append(PytestRun(tmp_path, tmp, [*STEADY, *arguments]))
        return runs[-1]

    yield run
    for each in runs:
        each.stop()


def by_themselves(folder, *loads):
    """Points that are measured one item after the other, each with all its repeats: they are no sweep."""
    marked = f'import pytest\n@pytest.mark.slm(points=[("opt-tiny", n) for n in {loads}])\ndef test_point'
    (folder / "test_points.py").write_text(dedent(POINTS).replace("def test_point", marked), "utf-8")


def nothing_left(folder, tmp):
    """And the device is free."""
    with lock_device("cpu", tmp):
        return nothing_left_of(folder)


def test_killed_worker_fails_one_point(pytest_run, tmp_path, tmp):
    """Two starts: one point loses its engine, the next gets a new one, which an interrupt stops in mid window."""
    by_themselves(tmp_path, *range(1, 61))  # more than are ever reached, were we held up for minutes
    run = pytest_run("--slm-window=3")
    first = run.engine()
    run.measured(1)
    time.sleep(1)
    os.kill(first, signal.SIGKILL)
    second = run.engine()
    assert gone(first)
    before = run.measured(1, launches=2)
    time.sleep(1)
    run.interrupt()
    assert run.end(within_s=20) == pytest.ExitCode.INTERRUPTED, run.text  # after which tox would kill it
    assert gone(second) and nothing_left(tmp_path, tmp)
    assert {m.id for m in before} <= {m.id for m in run.archived()}
    told = re.findall(r"^EngineFailed: the engine was killed by SIGKILL; ", run.text, re.MULTILINE)
    assert len(told) == 1, run.text  # pytest's own short summary has its beginning once more
    assert "  | (EngineCore" in run.text and "Traceback (most recent call last)" not in run.text  # the end of its log


def test_killed_pytest_can_be_resumed(pytest_run, tmp_path, tmp):
    """One start to the middle of a window, and one that is killed on its way up.

    Where other tests disturb a measurement, one more is made: with both, one repeat has nothing left to measure.
    """
    by_themselves(tmp_path, 2)
    run = pytest_run("--slm-window=3", "--slm-repeats=9")
    engine = run.engine()
    run.measured(1 + EXTRA_ATTEMPTS)
    time.sleep(1)
    before = {m.id for m in run.archived()}
    run.kill()
    assert gone(engine) and nothing_left(tmp_path, tmp)
    kept = {m.id for m in run.archived()}
    assert before <= kept
    by_themselves(tmp_path, 2, 4)
    again = pytest_run("--slm-window=3", "--slm-repeats=1", "--slm-resume")
    starting = again.engine()
    time.sleep(3)  # it imports, and has started no engine core yet
    again.kill()
    assert gone(starting) and nothing_left(tmp_path, tmp)
    assert "test_point[opt-tiny-2] PASSED" in again.text  # known from before: the engine was for the other
    assert {m.id for m in again.archived()} == kept


def test_failed_start_tells_cause(pytest_run, tmp_path, tmp):
    run = pytest_run("--slm-concurrency=1,2", "--slm-engine-arg=max_model_len=999999")
    run.engine()
    assert run.end(within_s=START_S) == 1
    for fact in (
        "EngineFailed: the engine did not start: ValidationError",
        "User-specified max_model_len (999999) is greater than the derived",
        "engine.log ends with\n  | ",
        "EngineFailed: not tried again: the engine did not start: ValidationError",
    ):
        assert fact in run.text
    assert "Traceback" not in run.text and run.archived() == []
    assert len(run.engines) == 1 and nothing_left(tmp_path, tmp)


def test_busy_device_refuses_second_run(pytest_run, tmp):
    with lock_device("cpu", tmp):
        run = pytest_run("--slm-concurrency=1,2")
        assert run.end(within_s=START_S) == pytest.ExitCode.USAGE_ERROR
    assert f"this device is being measured by another run (process {os.getpid()}, since " in run.text
    assert "Wait until it ends" in run.text and "Traceback" not in run.text
    assert run.archived() == []
