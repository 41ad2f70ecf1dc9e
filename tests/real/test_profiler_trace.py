"""vLLM's own profiler writes a trace of a load, on its CPU backend."""

from __future__ import annotations

import gzip
import json

import pytest
from processes import gone
from real_engine import SPEC

from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.models import shape_of
from pytest_slmserve.spec import ClosedLoop, WorkloadSpec
from pytest_slmserve.workload.build import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


def test_a_trace_has_the_steps_of_the_load(tmp_path):
    workload = build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=16, requests=64), shape_of(SPEC.model))
    engine = OfflineEngine(SPEC, place={PROFILE_FOLDER: str(tmp_path)})
    try:
        assert engine.profile(workload, ClosedLoop(4, window_s=1.0)) is None
        (trace,) = tmp_path.rglob("*.pt.trace.json*")
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert sum(name == "aten::linear" or "mm" in name for name in names) > 100
        assert engine.run(workload, ClosedLoop(4, window_s=0.5)).failures == 0, "it goes on serving"
    finally:
        engine.close()
    assert gone(engine.child.process.pid)
