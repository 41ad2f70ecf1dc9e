"""Every signal that ends a run, at moments of its life: nothing is lost, and nothing is left."""

import os
import random
import signal
import textwrap

import pytest
from campaign import MEASURE, MOMENTS, SIGNALS, WORDS, kill, kill_in_a_burst, killed
from judged import Case

REAL_S = 300.0  # where an engine or a cluster starts
ONE_AT_A_TIME = pytest.mark.xdist_group("engines and clusters")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("engine", [
    "simulated", "stand-in", pytest.param("ray", marks=ONE_AT_A_TIME),
    pytest.param("vllm", marks=[pytest.mark.slow, ONE_AT_A_TIME]),
])  # fmt: skip
def test_signal_loses_no_measurement(case: Case, engine: str, number: int, moment: str, request) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_here")
    case.within_s = REAL_S if engine in ("ray", "vllm") else case.within_s
    kill(case, engine, number, moment)


@pytest.mark.parametrize("turn", range(12))
@pytest.mark.parametrize("engine", ["simulated", "stand-in", pytest.param("ray", marks=ONE_AT_A_TIME)])
def test_signal_burst_loses_no_measurement(case: Case, engine: str, turn: int) -> None:
    """The moments are random, and others each night: what fails prints its seed."""
    case.within_s = REAL_S if engine == "ray" else case.within_s
    kill_in_a_burst(case, engine, random.randrange(1 << 32))


# Nodes of a Ray cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
# Each of two nodes has one imagined GPU and measures one of two models.
ON_NODES = """
    def test_point(slm_point):
        print("MOMENT item", flush=True)
        assert slm_point.measure()
        print("MOMENT measured", flush=True)
"""
LOADS = ("--slm-models=opt-125m,opt-1.3b", "--slm-concurrency=1,2,4", "--slm-engine-arg=lasts_s=1")


@pytest.mark.slow
@ONE_AT_A_TIME
@pytest.mark.parametrize(("dead", "status", "said"), [(1, 0, ""), (2, 1, "EngineFailed: .* died")])
@pytest.mark.parametrize("moment", ["starting", "ready", "measuring", "between two points"])
def test_dying_node_loses_no_measurement(
    case: Case, moment: str, dead: int, status: int, said: str, monkeypatch
) -> None:
    """Where one node is left, it measures the cells of the others."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    (case.folder / "test_it.py").write_text(textwrap.dedent(ON_NODES))
    case.records, case.within_s = "r.jsonl", REAL_S
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0})
    try:
        nodes = [cluster.add_node(**NODE, num_gpus=1) for _ in range(2)]
        words = ["-m", "pytest", "test_it.py", *WORDS, "--slm-simulate", *LOADS, f"--slm-ray={cluster.address}"]
        text, after_s = MOMENTS[moment]
        seen = killed(case, words, lambda _: [cluster.remove_node(node, False) for node in nodes[:dead]], text, after_s)
    finally:
        cluster.shutdown()
    case.judge("nodes killed", seen, (status,), said, kept=seen.text.count("MOMENT measured"))


# The first tenth of a second

EARLY = "import sys, pytest_slmserve.__main__ as ours; print('MOMENT', flush=True); sys.exit(ours.run())"
BETWEEN = 'last):\n  File "<string>", line 1, in <module>\nKeyboardInterrupt'  # our import and our call: no case


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2])
@pytest.mark.parametrize("number", SIGNALS)
def test_early_signal_ends_command(case: Case, number: int, after_s: float) -> None:
    """Nobody listens at the URL, so that it ends by itself, too; before it listens for them, most signals end it."""
    words = ["-c", EARLY, *MEASURE, "--max-concurrency=1"]
    seen = killed(case, words, lambda pid: os.kill(pid, number), "MOMENT", after_s)
    assert seen.status is not None
    if BETWEEN not in seen.text:
        case.judge("kills", seen, (4, 130, -number))
        assert seen.status != -signal.SIGINT
