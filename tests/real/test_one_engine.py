"""What is looked at on one engine of vLLM's CPU backend: its variables, vLLM's own profiler, the death of its core."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from interfaces import small_workload
from processes import gone, group
from real_engine import SPEC

from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.loads import ClosedLoop, OpenLoop

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.fixture(scope="module")
def traces():
    """The folder that its profiler writes to."""
    with TemporaryDirectory(prefix="slm-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def engine(vllm_here, traces):
    engine = OfflineEngine(SPEC, extra_env={PROFILE_FOLDER: str(traces)})
    yield engine
    engine.close()


def test_vllm_knows_every_variable_that_is_set(engine):
    log = engine.child.log.read_text("utf-8", errors="replace")
    assert "(EngineCore" in log
    assert "Unknown vLLM environment variable" not in log


def test_vllm_is_imported_twice_and_not_a_third_time_by_the_engine_core(engine):
    """The core is forked, and only its model process is spawned: by vLLM itself, from the core."""
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in group(engine.child.process.pid)]
    assert sum(b"VLLM::EngineCore" in command for command in commands) == 1
    assert sum(b"resource_tracker" in command for command in commands) == 1, "spawned from one process alone"


def test_a_trace_has_the_steps_of_the_load(engine, traces):
    workload = small_workload(requests=64, output_tokens=16)
    assert engine.profile(workload, ClosedLoop(4, window_s=1.0)) is None
    (trace,) = traces.rglob("*.pt.trace.json*")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    # two steps of about 18: how many more fit into the profiled time depends on what else the machine does
    assert sum(name == "aten::linear" or "mm" in name for name in names) > 36
    assert engine.run(workload, ClosedLoop(4, window_s=0.5)).failures == 0, "it goes on serving"


def test_a_killed_engine_core_is_a_failure_and_leaves_nothing(engine):
    """The last one on this engine: it does not survive."""
    worker = engine.child.process.pid
    workload = small_workload(requests=16, output_tokens=32)
    assert engine.run(workload, OpenLoop(requests=2)).failures == 0
    cores = set(group(worker)) - {worker}
    cores -= {pid for pid in cores if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    assert cores

    def kill(progress):
        while cores:
            os.kill(cores.pop(), signal.SIGKILL)

    with pytest.raises(EngineFailed, match="EngineDead|ended") as caught:
        engine.run(workload, ClosedLoop(4, window_s=60.0), kill)
    assert "  | " in caught.value.problem
    assert not engine.ready
    engine.child.keep_log = False
    engine.close()
    assert gone(worker)
