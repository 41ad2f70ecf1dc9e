"""Two engines of vLLM's CPU backend on one host: they serve at once, and none is left when one dies."""

import os
import signal
import threading

import pytest
from processes import gone, group
from real_engine import SPEC
from traces import share_a_window

from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import summary_of
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, ReplicaSpec, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
LOAD = ClosedLoop(4, window_s=2.0)


def test_two_engines_serve_at_once_and_one_that_dies_ends_both():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM's CPU engines need a core each")
    workload = build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=16, requests=64), model_of(SPEC.model))
    environment = probe("cpu").environment
    spec = ReplicaSpec((SPEC, SPEC), pinned=True)
    replicas, case = Pool().engine(spec), Case(spec, (workload, workload), (LOAD, LOAD), environment)
    try:
        found = measure_case(replicas, case)
        assert [m.replica.index for m in found] == [0, 1] and len({m.launch for m in found}) == 2
        assert share_a_window([m.run for m in found])
        shared = summary_of(*found)
        assert shared.output_tokens_per_s == pytest.approx(sum(shared.each_tokens_per_s))
        assert all(rate > 0 for rate in shared.each_tokens_per_s)
        assert not any("failed" in text or "Little" in text for m in found for text in problems(m))

        pids = [engine.child.process.pid for engine in replicas.engines]
        members = [pid for leader in pids for pid in group(leader)]
        killer = threading.Timer(3.0, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\): the engine was killed by SIGKILL"):
            replicas.run([workload] * 2, [ClosedLoop(4, window_s=60.0)] * 2)
        killer.join()
    finally:
        replicas.close()
    for pid in (*pids, *members):
        assert gone(pid)
