"""What is looked at on one engine of vLLM's CPU backend: its variables, vLLM's own profiler, the death of its core."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from interfaces import small_workload
from processes import gone, group
from real_engine import SPEC

from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.fixture(scope="module")
def traces():
    """The folder that its profiler writes to."""
    with TemporaryDirectory(prefix="slm-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def engine(vllm_here, traces):
    engine = OfflineEngine(SPEC, extra_env={PROFILE_FOLDER: str(traces)}).start()
    yield engine
    engine.close()


def test_vllm_knows_every_variable_that_is_set(engine):
    log = engine.child.log.read_text("utf-8", errors="replace")
    assert "(EngineCore" in log
    assert "Unknown vLLM environment variable" not in log


def test_the_engine_core_does_not_import_vllm_once_more(engine):
    """It is forked: most of its memory is that of the worker."""
    processes = [Path("/proc", str(pid)) for pid in group(engine.child.process.pid)]
    [core] = [one for one in processes if b"VLLM::EngineCore" in (one / "cmdline").read_bytes()]
    shared = re.search(r"Shared_Dirty: +(\d+) kB", (core / "smaps_rollup").read_text())
    assert shared and int(shared[1]) > 100_000


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
