"""One engine of vLLM's CPU backend over two processes: the path of an engine over two GPUs."""

import os
from dataclasses import replace
from typing import get_args

import pytest
from measured import measure
from processes import gone, group
from real_engine import SPEC

from pytest_slmserve.analysis.advice.subjects import kv_blocks_as_predicted
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import OwnInterface
from pytest_slmserve.schema.specs import ClosedLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_an_engine_over_two_processes_has_twice_the_kv_blocks_and_leaves_nothing_behind(interface):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM's CPU engines need a core for each process")
    spec = replace(SPEC, tensor_parallel_size=2, interface=interface)
    workload = build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=16, requests=64), model_of(spec.model))
    engine = launch_engine(spec).start()
    try:
        made = measure(engine, workload, ClosedLoop(4, window_s=2.0), probe("cpu").environment)
        members = group(engine.child.process.pid)
        assert len(members) >= 3, "the worker, and a process for each part"
    finally:
        engine.close()
    assert kv_blocks_as_predicted(spec, [made.resolved])
    per_block = 128 * model_of(spec.model).kv_bytes_per_token()
    assert made.resolved.kv_blocks == pytest.approx(2 * spec.kv_cache_bytes / per_block, abs=2)
    assert not any("failed" in text or "Little" in text for text in problems(made))
    assert all(map(gone, members))
