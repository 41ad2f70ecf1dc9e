"""The shipped benchmark of several GPUs on the simulated engine: which cases it makes, what is printed of them, and
what is skipped where there are too few. In full, with what is planted, it is nightly."""

from __future__ import annotations

import pytest
from inner_runs import QUIET
from inside import ALL_OF_IT, outcomes, usage_error
from shipped import put

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.run import session
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.telemetry.host import IMAGINED_GPUS, Host

SMALL = (
    "--slm-simulate",
    "--slm-window=12",
    "--slm-input-len=64",
    "--slm-output-len=32",
    ALL_OF_IT,
    *QUIET,
    "-v",
    "-rs",
)
SMALL = (*SMALL, "--slm-engine-arg=t_inf=4000", "--slm-engine-arg=b_half=64", "--slm-models=opt-125m")
ONE_LOAD = ("--slm-tensor-parallel-size=1,2", "--slm-concurrency=64")
KINDS = [f"test_point_on_gpus[opt-125m-64-{how}]" for how in ("tp1", "tp2", "replicas2")]


@pytest.fixture(scope="module")
def parallel(inner):
    """Runs it: `parallel("--slm-tensor-parallel-size=1,2")`."""
    put(inner.path, "test_tensor_parallel", "test_replication_gain")
    return lambda *args: inner.runpytest_inprocess("test_tensor_parallel_shipped.py", *SMALL, *args)


@pytest.fixture(scope="module")
def measured(parallel):
    """All ways to deploy a model on two GPUs, where an all-reduce is slow."""
    more = (
        "test_replication_gain_shipped.py",
        "--slm-replicas=2",
        "-k",
        "point",
        "--slm-engine-arg=all_reduce_s=0.005",
    )
    return parallel(*ONE_LOAD, *more, "--slm-engine-arg=imbalance=0.2")


def test_all_ways_to_deploy_a_model_stand_side_by_side(measured):
    assert measured.ret == 0
    measured.stdout.fnmatch_lines(
        [
            "*opt-125m on several GPUs: simulated*",
            "*64 * 1  one engine * yes",
            "*64 * 1  2 replicas, time-slicing * yes",
            "*64 * 2  one engine, TP 2 * 630 * yes",
            "*64 * 2  2 replicas, a GPU each * 630 * yes",
            "*TP 2, concurrency 64: GPU 0 350 W*; GPU 1 280 W*",
            "*2 GPUs, concurrency 64: most requests/s: 2 replicas*",
        ]
    )


def test_each_case_is_measured_and_a_report_shows_them_again(measured, inner, monkeypatch, capsys):
    made = read(inner.path / ".slm/records.jsonl").measurements
    assert {m.spec.tensor_parallel_size for m in made} == {1, 2}
    assert {(m.replica.count, m.replica.sharing) for m in made if m.replica and m.replica.count > 1} == {
        (2, how) for how in ("gpus", "mps", "time-slicing")
    }
    monkeypatch.chdir(inner.path)
    main(["report", ".slm/records.jsonl"])
    again = capsys.readouterr().out.splitlines()
    assert all(any(kind in line for line in again) for kind in ("one engine, TP 2", "2 replicas, a GPU each"))
    assert not any(line.startswith("throughput-plateau") for line in again), "they are no sweeps"


def test_numbers_of_gpus_and_loads_are_those_asked_for(parallel):
    result = parallel(*ONE_LOAD, "--slm-plan")
    assert [line.split()[1] for line in result.stdout.lines if "test_point" in line] == KINDS
    result.stdout.fnmatch_lines(
        ["*start opt-125m on 2 GPUs (simulated*", "*start 2 x opt-125m, a GPU each (simulated*"]
    )


def test_fast_all_reduces_are_not_called_slow(parallel):
    fast = ("--slm-engine-arg=all_reduce_s=0.0001", "--slm-models=opt-13b", "-k", "not replicas and not replica")
    result = parallel(*fast, "--slm-concurrency=1,64")
    assert sorted(outcomes(result).values()) == ["PASSED"] * 8 + ["SKIPPED"]


def test_what_the_host_has_not_is_skipped_with_the_reason(parallel, monkeypatch):
    one = Host(Environment(platform="simulated", gpu_name="simulated"), "simulated", gpus=IMAGINED_GPUS[:1])
    monkeypatch.setattr(session, "probe", lambda *_: one)
    result = parallel("--slm-concurrency=64", "--slm-engine-arg=noise=0.001")
    result.assert_outcomes(passed=1, skipped=2 + 1 + 4)
    result.stdout.fnmatch_lines(["SKIPPED*2 GPUs are asked for, and 1 GPU*", "SKIPPED*needs 2 GPUs, and 1*"])
    assert "2 GPUs are asked for" in usage_error(parallel("--slm-tensor-parallel-size=1,2"))


def test_a_load_that_waits_for_memory_is_said_to(parallel):
    small = ("--slm-gpu-memory-utilization=0.25", "--slm-input-len=512", "--slm-output-len=64", "--slm-models=opt-13b")
    result = parallel(*small, "--slm-concurrency=4,64", "-k", "point")
    result.stdout.fnmatch_lines(["*64 concurrent requests do not fit into the KV memory of 1 GPU: *ran at once*"])
