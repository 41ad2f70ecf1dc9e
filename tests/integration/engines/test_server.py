"""Engines behind vLLM's server: how it is started, what it tells, and how it ends. Its loads are in the contract."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from http.client import BadStatusLine
from importlib.metadata import PathDistribution
from itertools import pairwise

import psutil
import pytest
from interfaces import STAND_IN, small_workload, stand_in
from processes import gone, group

from pytest_slmserve.engines import server
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.server import ServerEngine, trace_lines
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, ReplicaSpec

LONG = ClosedLoop(4, window_s=30.0)


def stand_in_server(**extra):
    return replace(stand_in(**extra), interface="server")


# What it is started with


def test_vllm_finds_the_plugin_on_its_path(engine):
    (entry,) = PathDistribution(engine.child.folder / "slm_trace-0.dist-info").entry_points
    assert (entry.group, entry.value) == ("vllm.stat_logger_plugins", "slm_trace:TraceWriter")


# What it tells, and how it ends


@pytest.fixture(scope="module")
def engine():
    with closing(Pool()) as pool:
        yield pool.engine(stand_in_server())


def test_limits_and_steps_come_by_the_plugin(engine):
    limits, *_ = trace_lines(engine.trace)
    assert limits["max_num_seqs"] == 8 == engine.resolved.max_num_seqs
    run = engine.run(small_workload(), OpenLoop(requests=4))
    assert sum(run.steps.new_tokens) == 32 == sum(run.samples.output_tokens)
    assert run.steps.time_s[0] <= min(run.samples.first_token_s), "a token is made before it is received"


def test_a_later_run_does_not_have_the_steps_of_an_earlier_one(engine):
    runs = [engine.run(small_workload(), OpenLoop(requests=n)) for n in (3, 5)]
    assert [sum(run.steps.new_tokens) for run in runs] == [24, 40]


def test_greedy_tokens(engine):
    assert engine.outputs(small_workload(), 2, 3) == ((7, 7, 7),) * 2


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), BadStatusLine("what?")])
def test_an_answer_that_does_not_come_is_a_failure(engine, monkeypatch, error):
    def lost(*_):
        raise error

    monkeypatch.setattr(server, "ask_once", lost)
    with pytest.raises(EngineFailed, match=re.escape(str(error))):
        engine.outputs(small_workload(), 1, 3)
    engine.child.keep_log = False


def test_it_listens_on_loopback_and_wants_its_key(engine):
    pid = engine.child.process.pid
    listening = [c.laddr for c in psutil.net_connections("inet") if (c.pid, c.status) == (pid, psutil.CONN_LISTEN)]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", engine.port)]
    with socket.create_connection(("127.0.0.1", engine.port), 5) as stranger:
        stranger.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
        assert b" 401 " in stranger.recv(200)


def test_its_key_is_told_to_nobody(engine):
    key = engine._key
    processes = [psutil.Process(engine.child.process.pid), psutil.Process(engine.client.children[0].process.pid)]
    seen = [*(" ".join(p.cmdline()) for p in processes), repr(engine.spec), repr(engine.resolved)]
    logs = [child.log.read_text("utf-8") for child in (engine.child, *engine.client.children)]
    assert not [text for text in (*seen, *logs) if key in text]
    with pytest.raises(EngineFailed) as caught:
        raise engine.child.failed("says so")
    engine.child.keep_log = False
    assert key not in str(caught.value)


def test_two_servers_share_a_device_as_two_engines_do():
    pair = (stand_in_server(),) * 2
    with closing(Pool()) as pool:
        replicas = pool.engine(ReplicaSpec(pair))
        runs = replicas.run([small_workload()] * 2, [ClosedLoop(3, window_s=0.5)] * 2)
        assert len({engine.port for engine in replicas.engines}) == 2
        assert [run.failures for run in runs] == [0, 0]
        assert all(len(run.steps) > 2 * 8 for run in runs), "a lifetime of the ramp, and one of settling"
        spans = [(run.began_s + run.window_s[0], run.began_s + run.window_s[1]) for run in runs]
        held_up_s = max(b - a for run in runs for a, b in pairwise(run.steps.time_s))  # a window ends with a step
        unread_s = max(run.stream.stamp_uncertainty_s[1] for run in runs)  # of a client that was held up
        assert spans[0] == pytest.approx(spans[1], abs=0.05 + held_up_s + unread_s), "one window for both"


@pytest.fixture
def start():
    """Starts the stand-in with faults; the groups of server and client are gone at the end, and their logs too."""
    engines = []

    def begin(path=str(STAND_IN), **extra):
        engines.append(ServerEngine(replace(stand_in_server(**extra), env=(("PYTHONPATH", path),))))
        return engines[-1].start()

    yield begin
    for engine in engines:
        engine.close()
        for child in (engine.child, *(engine.client.children if engine.client else [])):
            child.keep_log = False
            child.kill()
            assert gone(child.process.pid)


def test_a_start_that_fails_tells_the_end_of_the_log(start):
    with pytest.raises(EngineFailed, match="FATAL out of memory"):
        start(fault="exit")
    with pytest.raises(EngineFailed, match="max_model_len is larger than"):
        start(fault="raise")


def test_a_start_that_takes_too_long_is_a_failure(start, monkeypatch):
    monkeypatch.setattr(server, "START_S", 0.7)
    with pytest.raises(EngineFailed, match=" 1 s"):
        start(fault="sleep")


def test_a_server_that_dies_is_a_failure_and_leaves_nothing(start):
    engine = start()
    served = group(engine.child.process.pid)
    assert len(served) == 3  # the server, its guardian, and the core

    def kill(progress):
        os.kill(engine.child.process.pid, signal.SIGKILL)

    with pytest.raises(EngineFailed, match="the server"):
        engine.run(small_workload(), LONG, kill)
    assert not engine.ready
    assert gone(engine.child.process.pid)


def test_requests_that_are_refused_are_counted_with_the_servers_words(start):
    run = start(fault="refuse", fault_at=3).run(small_workload(), ClosedLoop(2, requests=10))
    assert run.failures == 3 and "refused, as planted" in run.first_failure
    assert list(run.samples.finished) == [True] * 7
    assert run.failed.kind == ("HTTP 400",) * 3
    assert all(0 <= sent <= ended for sent, ended in zip(run.failed.sent_s, run.failed.ended_s))
    assert sorted([*run.failed.request, *run.samples.request]) == list(range(10))


def test_a_client_that_is_killed_is_a_failure(start):
    engine = start()

    def kill(progress):
        os.kill(engine.client.children[0].process.pid, signal.SIGKILL)

    with pytest.raises(EngineFailed, match="SIGKILL"):
        engine.run(small_workload(), LONG, kill)
    engine.close()
    assert engine.child.process.returncode == -signal.SIGKILL, "it is not asked politely"


# Several front ends


@pytest.fixture
def named_vllm(tmp_path):
    """A path that has the stand-in, as a distribution of vLLM's name."""
    found = tmp_path / "vllm-0.0.1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n", "utf-8")
    return f"{STAND_IN}{os.pathsep}{tmp_path}"


def test_of_several_front_ends_each_serves_and_none_tells_whole_steps(named_vllm, start):
    engine = start(path=named_vllm, api_server_count=2)
    assert sum(isinstance(line, dict) for line in trace_lines(engine.trace)) == 2, "it is not ready before all are"
    run = engine.run(small_workload(), ClosedLoop(8, requests=32))
    assert (run.failures, sum(run.samples.output_tokens), len(run.steps)) == (0, 32 * 8, 0)
    assert sum(run.stream.tokens) == pytest.approx(32 * 8)
    served = group(engine.child.process.pid)
    assert len(served) == 6  # their parent, its guardian, and both with a core
    engine.close()
    assert gone(engine.child.process.pid)


def test_several_front_ends_want_a_distribution_named_vllm():
    ours, childs = socket.socketpair()
    with ours, childs:
        command = [sys.executable, "-S", server.SERVE, server.VLLM_SERVE, "serve", "m", str(childs.fileno()), "1"]
        done = subprocess.run(command, pass_fds=[childs.fileno()], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "looks for a distribution named vllm" in done.stderr and "leave api_server_count out" in done.stderr


# Its port
