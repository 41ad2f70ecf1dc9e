"""Our interface to vLLM: what it hands over, what it makes of the answer, and how its engine ends."""

import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from interfaces import LateWindow, small_workload, stand_in
from processes import gone, group

from pytest_slmserve.engines import child, server
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

LONG = ClosedLoop(4, window_s=30.0)


def started(**extra):
    return OfflineEngine(stand_in(**extra)).start()


@pytest.fixture
def start():
    """Starts the stand-in with faults; its group is gone at the end, and its log too."""
    engines = []

    def begin(**extra):
        engines.append(started(**extra))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.child.keep_log = False
        engine.child.kill()
        assert gone(engine.child.process.pid)


@pytest.fixture
def failure(monkeypatch, tmp_path):
    """The error of an engine that does not start, and no group left of it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def provoke(**extra):
        made = []
        popen = server.Child.__init__

        def watched(self, *args, **kwargs):
            popen(self, *args, **kwargs)
            made.append(self.process.pid)

        monkeypatch.setattr(server.Child, "__init__", watched)
        with pytest.raises(EngineFailed) as caught:
            started(**extra)
        assert gone(*made)
        return caught.value

    return provoke


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        ({"fault": "raise"}, "ValueError: max_model_len is larger than\nthe model allows"),
        ({"fault": "raise"}, "  | INFO the stand-in starts"),
        ({"fault": "exit"}, " 3)"),
        ({"fault": "exit"}, "  | FATAL out of memory"),
        ({"block_sise": 3}, "'block_sise'"),
    ],
)
def test_a_start_that_fails_tells_the_cause_and_the_end_of_the_log(failure, planted, told):
    assert told in failure(**planted).problem


def test_an_engine_sees_no_secret_and_no_file_of_a_workflow(start, monkeypatch):
    """By the kernel's own account of its whole process group."""
    secrets = {"SLM_ENDPOINT_KEY", "GITHUB_OUTPUT", "GITHUB_ENV", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"}
    for name in (*secrets, "HF_HOME", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "fault-9f8e7d6c")
    engine = start()
    for pid in group(engine.child.process.pid):
        seen = dict(e.split("=", 1) for e in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in e)
        assert not secrets & seen.keys()
        assert {name for name, value in seen.items() if "9f8e7d6c" in value} == {"HF_HOME", "OMP_WAIT_POLICY"}
        assert seen["PATH"] == os.environ["PATH"] and seen["HF_HUB_OFFLINE"] == "1"


def test_modules_of_the_working_folder_are_not_imported(start, monkeypatch, tmp_path):
    for name in ("json", "uuid", "socket", "dataclasses", "vllm"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    engine = start()
    assert engine.ready


def test_a_start_that_takes_too_long_is_a_failure(failure, monkeypatch):
    monkeypatch.setattr(server, "START_S", 1.5)
    assert {"2", "starting;"} <= {*failure(fault="sleep").problem.split()}


def test_an_interpreter_without_vllm_is_a_failure_with_its_cause(failure, monkeypatch):
    monkeypatch.setattr("interfaces.STAND_IN", Path("/nowhere"))
    monkeypatch.setattr(sys, "executable", bare_python())
    assert "ModuleNotFoundError: No module named 'vllm'" in failure().problem


def bare_python():
    """The interpreter below this environment; it has no vLLM unless this one is no environment."""
    found = Path(sys.executable).resolve()
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment around this interpreter")
    return str(found)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exit", r"\b5\b(.|\n)*the stand-in starts"),
        ("dead", "EngineDeadError"),
    ],
)
def test_an_engine_that_dies_in_the_middle_is_a_failure_not_a_measurement(start, fault, told):
    engine = start(fault=fault, fault_at=6)
    with pytest.raises(EngineFailed, match=told):
        engine.run(small_workload(), LONG)
    assert not engine.ready


def test_requests_that_fail_are_counted_and_the_engine_goes_on(start):
    engine = start(fault="refuse", fault_at=3)
    run = engine.run(small_workload(), ClosedLoop(2, requests=10))
    assert (run.failures, run.first_failure) == (3, "ValueError: refused, as planted")
    assert len(run.failed) == 3 and set(run.failed.kind) == {"ValueError"} and run.failed.scheduled_s is None
    assert all(0 <= sent <= ended for sent, ended in zip(run.failed.sent_s, run.failed.ended_s))
    assert list(run.samples.finished) == [True] * 7
    assert engine.run(small_workload(), ClosedLoop(2, requests=10)).failures == 0


def test_a_run_begins_at_a_time_of_the_hosts_clock_which_the_sensors_read_too(start):
    before = time.monotonic()
    run = start().run(small_workload(), OpenLoop(requests=4))
    assert before < run.began_s < run.began_s + run.window_s[1] <= time.monotonic()
    assert run.telemetry is None, "the engine's process reads no sensors"


def test_one_that_gives_its_load_up_before_it_hears_of_its_window_goes_on(start):
    engine, late = start(fault="unanswered", fault_at=60), LateWindow()
    for _ in range(2):
        assert engine.run(small_workload(), ClosedLoop(4, window_s=0.1), barrier=late).failures >= 5


def test_a_hidden_end_of_a_request_is_a_failure_too(start):
    run = start(fault="unanswered", fault_at=1).run(small_workload(), ClosedLoop(1, requests=3))
    assert (run.failures, run.first_failure) == (3, "RuntimeError: the engine ended a request without an answer")


def test_silence_in_the_middle_is_a_failure(start, monkeypatch):
    engine = start()
    monkeypatch.setattr(child, "SILENCE_S", 1.0)
    os.kill(engine.child.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match="1 s .*measuring"):
        engine.run(small_workload(), LONG)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3  # it is not asked politely


def test_a_killed_worker_is_a_failure_and_leaves_nothing(start):
    engine = start()
    worker = engine.child.process.pid
    assert len(group(worker)) == 3  # the worker, its guardian, and the core

    def kill(progress):
        os.kill(worker, signal.SIGKILL)

    with pytest.raises(EngineFailed, match="SIGKILL"):
        engine.run(small_workload(), LONG, kill)
    assert gone(worker)


def test_an_interrupt_in_the_middle_does_not_wait_for_the_window(start):
    engine = start()

    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(small_workload(), LONG, interrupt)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3
    assert gone(engine.child.process.pid)


def test_closing_is_polite_leaves_nothing_and_may_be_repeated(start):
    engine = start()
    engine.run(small_workload(), OpenLoop(requests=3))
    folder = engine.child.folder
    engine.close()
    engine.close()
    assert engine.child.process.returncode == 0
    assert gone(engine.child.process.pid)
    assert not folder.exists()


def test_a_release_without_a_profiler_is_said_and_goes_on_serving(start):
    engine = start()
    workload = small_workload()
    assert engine.profile(workload, ClosedLoop(4, window_s=0.2)) == "this vLLM has no profiler by that name"
    assert engine.run(workload, ClosedLoop(4, window_s=0.2)).failures == 0


def test_an_engines_processes_are_its_own():
    engine = OfflineEngine(stand_in()).start()
    with closing(engine):
        assert engine.child.process.pid in engine.processes() and len(engine.processes()) > 1
    assert engine.processes() == set()
