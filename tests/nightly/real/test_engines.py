"""Engines of vLLM's CPU backend: prompts of many steps, over two processes as over two GPUs, and two on one host, of
which none is left when one dies."""

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
from measured import measure
from processes import gone, group
from real_engine import SPEC
from traces import share_a_window

from pytest_slmserve.analysis.advice.subjects import kv_blocks_as_predicted
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import summary_of
from pytest_slmserve.engines.pool import Pool, launch_engine
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.errors import EngineFailed, OwnInterface
from pytest_slmserve.schema.specs import Adapters, ClosedLoop, ReplicaSpec, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
LOAD = ClosedLoop(4, window_s=2.0)


def workload_of(prompt, output, requests):
    return build_workload(
        WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=requests), model_of(SPEC.model)
    )


@pytest.fixture
def two_cores():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM's CPU engines need a core each")


def wrong(measurement):
    return [text for text in problems(measurement) if "failed" in text or "Little" in text]


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_prompts_far_above_the_token_budget_are_a_valid_load(interface):
    """A prompt takes 14 steps of its engine, and its request, which is not in the batch meanwhile, a token in 32."""
    spec = replace(SPEC, max_model_len=1024, max_num_batched_tokens=64, interface=interface)
    with closing(launch_engine(spec).start()) as engine:
        made = measure(engine, workload_of(896, 32, 96), ClosedLoop(8, window_s=4.0), probe("cpu").environment)
    sent, batch = window.requests_in_flight(made.run, "sent_s"), window.mean_batch(made.run)
    assert sent > 1.1 * batch, "too few wait for their prompt for this test to tell"
    assert abs(window.littles_law(made.run)) < 0.05 and wrong(made) == []


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_an_engine_over_two_processes_has_twice_the_kv_blocks_and_leaves_nothing_behind(interface):
    spec = replace(SPEC, tensor_parallel_size=2, interface=interface)
    with closing(launch_engine(spec).start()) as engine:
        made = measure(engine, workload_of(16, 16, 64), LOAD, probe("cpu").environment)
        members = group(engine.child.process.pid)
        assert len(members) >= 3, "the worker, and a process for each part"
    assert kv_blocks_as_predicted(spec, [made.resolved])
    per_block = 128 * model_of(spec.model).kv_bytes_per_token()
    assert made.resolved.kv_blocks == pytest.approx(2 * spec.kv_cache_bytes / per_block, abs=2)
    assert wrong(made) == [] and all(map(gone, members))


@pytest.mark.usefixtures("two_cores")
def test_two_engines_serve_at_once_and_one_that_dies_ends_both():
    workload, spec = workload_of(16, 16, 64), ReplicaSpec((SPEC, SPEC), pinned=True)
    with closing(Pool().engine(spec)) as replicas:
        found = measure_case(replicas, Case(spec, (workload,) * 2, (LOAD,) * 2, probe("cpu").environment))
        assert [m.replica.index for m in found] == [0, 1] and len({m.launch for m in found}) == 2
        assert share_a_window([m.run for m in found])
        shared = summary_of(*found)
        assert shared.output_tokens_per_s == pytest.approx(sum(shared.each_tokens_per_s))
        assert all(rate > 0 for rate in shared.each_tokens_per_s) and not any(map(wrong, found))

        pids = [engine.child.process.pid for engine in replicas.engines]
        members = [pid for leader in pids for pid in group(leader)]
        killer = threading.Timer(3.0, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\): the engine was killed by SIGKILL"):
            replicas.run([workload] * 2, [ClosedLoop(4, window_s=60.0)] * 2)
        killer.join()
    assert all(map(gone, (*pids, *members)))


def test_adapters_are_loaded_by_a_server_and_more_than_its_slots_are_served_in_turn():
    """Four adapters, two slots: vLLM reads the folder that we make, for every layer that it names, and answers all."""
    adapters = Adapters(4, 8)
    spec = replace(SPEC, interface="server", extra=tuple(adapters.arguments({"max_loras": 2}).items()))
    plain, adapted = (
        build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=16, requests=64, adapters=a), model_of(SPEC.model))
        for a in (None, adapters)
    )
    with closing(launch_engine(spec).start()) as engine:
        found = [measure(engine, w, LOAD, probe("cpu").environment) for w in (plain, adapted)]
        status, listed = engine._ask("GET", "/v1/models")
        log = engine.child.log.read_text("utf-8", "replace")
    assert status == 200 and [f"slm-rank8-{n}" in listed for n in range(6)] == [False, *[True] * 4, False]
    assert [wrong(each) for each in found] == [[], []]
    assert not [line for line in log.splitlines() if "lora" in line.lower() and "ignored" in line]
    assert all(m.run.failures == 0 and len(m.run.samples) > 8 for m in found)
