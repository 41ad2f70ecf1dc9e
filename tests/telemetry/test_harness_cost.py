"""The script that holds our job against other loops, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from scripts import benchmark_script, loaded

from pytest_slmserve.schema.specs import GIB, EngineSpec


@pytest.fixture(scope="module")
def script():
    with loaded(benchmark_script("harness_cost")) as module:
        yield module


def test_the_order_turns_round_and_the_names_stay(script):
    called = []
    arms = {name: lambda name=name: called.append(name) or float(len(called)) for name in "abc"}
    rounds = list(script.rounds_of(arms, 2))
    assert called == [*"abc", *"cba"]
    assert rounds == [{"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 6.0, "b": 5.0, "c": 4.0}]
    assert [list(one) for one in rounds] == [[*"abc"]] * 2


def test_engines_that_run_other_workers(script):
    workers = [script.OfflineEngine.worker, script.BareEngine.worker, script.LatencyEngine.worker]
    assert len(set(workers)) == 3
    assert all(worker.exists() for worker in workers)


def test_memory_for_the_requests_and_no_more(script):
    spec = EngineSpec("opt-1.3b", kv_cache_bytes=100 * GIB)
    workload = SimpleNamespace(requests=[SimpleNamespace(prompt=[0] * 512, output_tokens=256)])
    small = script.half_of_device(spec, 128, workload)
    needed = 128 * 768 * 196_608
    assert needed < small.kv_cache_bytes < 1.1 * needed
    on_cpu = replace(spec, platform="cpu")
    assert script.half_of_device(on_cpu, 128, workload) == on_cpu
