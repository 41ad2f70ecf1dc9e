"""Engines in processes of their own, without HTTP and behind vLLM's server, with a stand-in for vLLM: how they start,
what they tell, and how they end. Their loads are in the contract."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from http.client import BadStatusLine
from importlib.metadata import PathDistribution
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import psutil
import pytest
from interfaces import STAND_IN, small_workload, stand_in
from processes import gone, group

from pytest_slmserve.engines import child, server
from pytest_slmserve.engines.pool import Pool, launch_engine
from pytest_slmserve.engines.server import trace_lines
from pytest_slmserve.schema.errors import EngineFailed, OwnInterface
from pytest_slmserve.schema.specs import Adapters, ClosedLoop, OpenLoop, ReplicaSpec
from pytest_slmserve.workload.requests import with_adapters

WORKLOAD = small_workload()
LONG, TEN = ClosedLoop(4, window_s=30.0), ClosedLoop(2, requests=10)


@pytest.fixture
def engines():
    return []


@pytest.fixture
def start(engines):
    """Starts the stand-in with faults; its groups are gone at the end."""

    def begin(interface="engine", path=str(STAND_IN), **extra):
        spec = replace(stand_in(**extra), interface=interface, env=(("PYTHONPATH", path),))
        engines.append(launch_engine(spec))
        return engines[-1].start()

    yield begin
    for engine in engines:
        client = getattr(engine, "client", None)
        for each in (engine.child, *(client.children if client else [])):
            each.kill()
            assert gone(each.process.pid)


@pytest.mark.parametrize(("interface", "planted", "facts"), [
    ("engine", {"fault": "raise"}, ["max_model_len is larger than\nthe model allows", "  | INFO the stand-in starts"]),
    ("engine", {"fault": "exit"}, [" 3)", "  | FATAL out of memory"]),
    ("engine", {"block_sise": 3}, ["'block_sise'"]),
    ("engine", {"fault": "sleep"}, [" 2 s", "starting;"]),
    ("engine", {"path": "/nowhere"}, ["ModuleNotFoundError: No module named 'vllm'"]),
    ("server", {"fault": "raise"}, ["max_model_len is larger than"]),
    ("server", {"fault": "sleep"}, [" 2 s"]),
])  # fmt: skip
def test_failed_start_tells_cause(start, engines, monkeypatch, interface, planted, facts):
    if planted.get("fault") == "sleep":
        monkeypatch.setattr(server, "START_S", 1.5)
    if "path" in planted:  # the interpreter below this environment has no vLLM
        if sys.prefix == sys.base_prefix:
            pytest.skip("needs a virtual environment around this interpreter")
        monkeypatch.setattr(sys, "executable", str(Path(sys.executable).resolve()))
    with pytest.raises(EngineFailed) as caught:
        start(interface, **planted)
    assert all(fact in caught.value.problem for fact in facts), caught.value.problem
    assert gone(engines[-1].child.process.pid)


def test_engine_sees_no_secret(start, monkeypatch, tmp_path):
    secrets = {"SLM_ENDPOINT_KEY", "GITHUB_OUTPUT", "GITHUB_ENV", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"}
    for name in (*secrets, "HF_HOME", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "fault-9f8e7d6c")
    for name in ("json", "uuid", "socket", "dataclasses", "vllm"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    engine = start()
    members = group(engine.child.process.pid)
    assert engine.ready and engine.child.process.pid in engine.processes() <= {*members} and len(engine.processes()) > 1
    for pid in members:
        seen = dict(e.split("=", 1) for e in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in e)
        assert not secrets & seen.keys()
        assert {name for name, value in seen.items() if "9f8e7d6c" in value} == {"HF_HOME", "OMP_WAIT_POLICY"}
        assert seen["PATH"] == os.environ["PATH"] and seen["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(("interface", "kind"), [("engine", "ValueError"), ("server", "HTTP 400")])
def test_failed_requests_are_counted(start, interface, kind):
    engine = start(interface, fault="refuse", fault_at=3)
    run = engine.run(WORKLOAD, TEN)
    assert "refused, as planted" in run.first_failure
    assert run.failed.kind == (kind,) * 3 and run.failed.scheduled_s is None
    assert all(0 <= sent <= ended for sent, ended in zip(run.failed.sent_s, run.failed.ended_s))
    assert list(run.samples.finished) == [True] * 7
    assert sorted([*run.failed.request, *run.samples.request]) == list(range(10))
    assert engine.run(WORKLOAD, TEN).failures == 0


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_requests_name_their_adapters(start, interface):
    engine = start(interface, **Adapters(3, 8).arguments({}))
    run = engine.run(adapted(Adapters(3, 8)), TEN)
    assert (run.failures, run.first_failure, len(run.samples)) == (0, None, 10)
    assert engine.outputs(adapted(Adapters(2, 8)), 2, 3) == ((7, 7, 7),) * 2
    assert len(engine.scores(adapted(Adapters(3, 8)), ((7,), (7,)))) == 2
    assert engine.run(WORKLOAD, TEN).failures == 0, "and the model alone"
    narrow = start(interface, **Adapters(3, 8).arguments({}) | {"max_lora_rank": 16})
    narrow.limits = narrow.spec = replace(narrow.spec, extra=(*narrow.spec.extra, ("max_lora_rank", 64)))
    with pytest.raises(EngineFailed, match="rank 64"):
        narrow.run(adapted(Adapters(3, 64)), TEN)


def adapted(adapters):
    requests = with_adapters(WORKLOAD.requests, adapters, 0)
    return replace(WORKLOAD, spec=replace(WORKLOAD.spec, adapters=adapters), requests=tuple(requests))


def test_engine_run_uses_host_clock(start):
    engine, before = start(), time.monotonic()
    run = engine.run(WORKLOAD, OpenLoop(requests=4))
    assert before < run.began_s < run.began_s + run.window_s[1] <= time.monotonic()
    assert run.telemetry is None, "the engine's process reads no sensors"
    assert engine.profile(WORKLOAD, ClosedLoop(4, window_s=0.2)) == "this vLLM has no profiler by that name"
    slept, woke = engine.nap()
    assert 0.01 < slept < 5.0 and 0.03 < woke < 5.0
    assert engine.run(WORKLOAD, ClosedLoop(4, window_s=0.2)).failures == 0, "it goes on serving"
    assert 0 < dict(engine.resolved.stages)["import"] < engine.resolved.ready_s, (
        "its process told when it had imported all"
    )
    engine.close()
    engine.close()
    assert engine.child.process.returncode == 0 and gone(engine.child.process.pid) and not engine.ready
    assert not engine.child.folder.exists() and engine.processes() == set()
    # The window of several engines is told two seconds after a load has settled.
    engine = start(fault="unanswered", fault_at=60)
    late = SimpleNamespace(begins_s=0.0, settled=lambda: time.sleep(2.0) or (time.monotonic(), time.monotonic() + 0.2))
    for _ in range(2):
        run = engine.run(WORKLOAD, ClosedLoop(4, window_s=0.1), barrier=late)
        assert run.failures >= 5
        assert run.first_failure == "RuntimeError: the engine ended a request without an answer"


@pytest.mark.parametrize(("interface", "fault", "victim", "told"), [
    ("engine", "exit", None, r"\b5\b(.|\n)*the stand-in starts"), ("engine", "dead", None, "EngineDeadError"),
    ("engine", "", "child", "SIGKILL"), ("server", "", "child", "the server"), ("server", "", "client", "SIGKILL"),
])  # fmt: skip
def test_dead_engine_leaves_nothing(start, interface, fault, victim, told):
    engine = start(interface, fault=fault, fault_at=6)
    process = engine.child.process
    assert len(group(process.pid)) == 3  # the worker or the server, its guardian, and the core
    killed = engine.client.children[0].process if victim == "client" else process
    with pytest.raises(EngineFailed, match=told):
        engine.run(WORKLOAD, LONG, lambda progress: victim and killed.kill())
    assert not engine.ready and (victim != "child" or gone(process.pid))
    engine.close()
    assert process.returncode == (5 if fault == "exit" else -signal.SIGKILL), "it is not asked politely"


@pytest.mark.parametrize(("progress", "error", "told"), [
    (None, EngineFailed, "1 s .*measuring"), (Mock(side_effect=KeyboardInterrupt), KeyboardInterrupt, None)
])  # fmt: skip
def test_silent_engine_is_not_awaited(start, monkeypatch, progress, error, told):
    engine = start()
    monkeypatch.setattr(child, "SILENCE_S", 1.0)
    if progress is None:
        os.kill(engine.child.process.pid, signal.SIGSTOP)
    with pytest.raises(error, match=told):
        engine.run(WORKLOAD, LONG, progress)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3 and gone(engine.child.process.pid), "it is not asked politely"


@pytest.fixture(scope="module")
def engine():
    with closing(Pool()) as pool:
        yield pool.engine(replace(stand_in(), interface="server"))


def test_server_demands_key_on_loopback(engine):
    (entry,) = PathDistribution(engine.child.folder / "slm_trace-0.dist-info").entry_points
    assert (entry.group, entry.value) == ("vllm.stat_logger_plugins", "slm_trace:TraceWriter")
    run = engine.run(WORKLOAD, OpenLoop(requests=3))
    assert trace_lines(engine.trace)[0]["max_num_seqs"] == 8 == engine.resolved.max_num_seqs
    assert run.steps.time_s[0] <= min(run.samples.first_token_s), "a token is made before it is received"
    key, pid = engine._key, engine.child.process.pid
    listening = [c.laddr for c in psutil.net_connections("inet") if (c.pid, c.status) == (pid, psutil.CONN_LISTEN)]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", engine.port)]
    with socket.create_connection(("127.0.0.1", engine.port), 5) as stranger:
        stranger.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
        assert b" 401 " in stranger.recv(200)
    children = (engine.child, *engine.client.children)
    seen = [" ".join(psutil.Process(each.process.pid).cmdline()) for each in children]
    logs = [each.log.read_text("utf-8") for each in children]
    for text in (*seen, *logs, repr(engine.spec), repr(engine.resolved), str(engine.child.failed("says so"))):
        assert key not in text
    engine.child.keep_log = False


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), BadStatusLine("what?")])
def test_lost_answer_is_failure(engine, monkeypatch, error):
    def lost(*_):
        raise error

    monkeypatch.setattr(server, "ask_once", lost)
    with pytest.raises(EngineFailed, match=re.escape(str(error))):
        engine.outputs(WORKLOAD, 1, 3)
    engine.child.keep_log = False


def test_two_servers_share_one_window():
    pair = (replace(stand_in(), interface="server"),) * 2
    with closing(Pool()) as pool:
        replicas = pool.engine(ReplicaSpec(pair))
        runs = replicas.run([WORKLOAD] * 2, [ClosedLoop(3, window_s=0.5)] * 2)
        assert len({engine.port for engine in replicas.engines}) == 2
    assert [run.failures for run in runs] == [0, 0]
    assert all(len(run.steps) > 2 * 8 for run in runs), "a lifetime of the ramp, and one of settling"
    spans = [(run.began_s + run.window_s[0], run.began_s + run.window_s[1]) for run in runs]
    held_up_s = max(b - a for run in runs for a, b in pairwise(run.steps.time_s))  # a window ends with a step
    unread_s = max(run.stream.stamp_uncertainty_s[1] for run in runs)  # of a client that was held up
    assert spans[0] == pytest.approx(spans[1], abs=0.05 + held_up_s + unread_s), "one window for both"


def test_several_front_ends_serve_requests(start):
    engine = start("server", api_server_count=2)
    assert sum(isinstance(line, dict) for line in trace_lines(engine.trace)) == 2, "it is not ready before all are"
    run = engine.run(WORKLOAD, ClosedLoop(8, requests=32))
    assert (run.failures, sum(run.samples.output_tokens), len(run.steps)) == (0, 32 * 8, 0)
    assert sum(run.stream.tokens) == pytest.approx(32 * 8)
    assert len(group(engine.child.process.pid)) == 6  # their parent, its guardian, and both with a core
    engine.close()
    assert gone(engine.child.process.pid)
    command = [sys.executable, "-S", server.SERVE, server.VLLM_SERVE, "serve", "m", "0", "1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "looks for a distribution named vllm" in done.stderr and "leave api_server_count out" in done.stderr
