"""Every signal that ends a run, at moments of its life: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

import pytest
from interfaces import STAND_IN
from judged import Case, Seen, waited_for

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
REAL_S = 300.0  # where an engine or a cluster starts
ONE_AT_A_TIME = pytest.mark.xdist_group("engines and clusters")
POINTS = """
    import time, pytest
    print("MOMENT imported", flush=True)

    @pytest.fixture(scope="session", autouse=True)
    def opened():
        print("MOMENT opened", flush=True)

    @pytest.mark.slm(points=[(MODEL, 1), (MODEL, 2), (MODEL, 4)])
    def test_point(slm_point, record):
        print("MOMENT item", flush=True)
        assert slm_point.measure()
        record()

    @pytest.fixture
    def record():
        yield lambda: print("MOMENT measured", flush=True)
        print("MOMENT torn down", flush=True)

    def test_last(slm_model):
        print("MOMENT last", flush=True)
        time.sleep(30)
"""
# A text of the run's output, and seconds after it.
MOMENTS = {
    "collecting": ("MOMENT imported", 0.0),
    "opening": ("MOMENT opened", 0.0),
    "starting": ("MOMENT item", 0.0),
    "on its way up": ("MOMENT item", 0.3),
    "ready": ("MOMENT item", 1.0),
    "measuring": ("MOMENT item", 2.0),
    "between two points": ("MOMENT measured", 0.0),
    "after some": ("MOMENT torn down", 0.5),
}
WORDS = ("-s", "-p", "no:cacheprovider", "--slm-repeats=1", "--slm-window=1.5", "--slm-records=r.jsonl")
ENGINES = {
    "simulated": (*WORDS, "--slm-simulate", "--slm-models=opt-125m"),
    "stand-in": (*WORDS, "--slm-cpu", f"--slm-env=PYTHONPATH={STAND_IN}", "--slm-models=opt-tiny"),
    "vllm": (*WORDS, "--slm-cpu", "--slm-models=opt-tiny"),
    "ray": (*WORDS, "--slm-simulate", "--slm-models=opt-125m", "--slm-ray=local:2"),
}


def killed(case: Case, words: Sequence[str], end: Callable[[int], object], text: str, after_s: float) -> Seen:
    """What came of a command whose process, by its id, was ended so long after that text, unless it had ended."""
    log, began = case.folder / "seen.log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=case.folder, env=case.environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    until = began + case.within_s
    while text not in log.read_text("utf-8", errors="replace") and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after_s)
    if process.poll() is None:
        end(process.pid)
        status = waited_for(process.pid, case.within_s)
        process.returncode = 0  # it is waited for
    else:
        status = process.returncode
    return Seen(status, log.read_text("utf-8", errors="surrogateescape"), time.monotonic() - began)


# How much slower than the stand-in an engine is: its moments are later.
PACE = {"simulated": 0.2, "stand-in": 1.0, "ray": 3.0, "vllm": 8.0}


def judge(case: Case, engine: str, number: int, moment: str) -> None:
    model = "opt-125m" if engine in ("simulated", "ray") else "opt-tiny"
    (case.folder / "test_it.py").write_text(textwrap.dedent(POINTS).replace("MODEL", f'"{model}"'))
    words = ["-m", "pytest", "test_it.py", *ENGINES[engine]]
    text, after_s = MOMENTS[moment]
    seen = killed(case, words, lambda pid: os.kill(pid, number), text, after_s * PACE[engine])
    kept = seen.text.count("MOMENT measured")
    ended = (0, 1, 10)  # before the signal came; or all but the interpreter
    ended += (-number,) if " in " in seen.text.rstrip().rpartition("\n")[2] else ()
    case.records = "r.jsonl"
    case.judge("kills", seen, (2, *ended) if number != signal.SIGKILL else (-signal.SIGKILL, *ended), kept=kept)
    assert number != signal.SIGKILL or "MOMENT" in seen.text, seen.text


FAST = [
    (engine, SIGNALS[at % 4], moment)
    for engine, shift in (("simulated", 0), ("stand-in", 1))
    for at, moment in enumerate(MOMENTS, shift)
    if at % 2
]


@pytest.mark.parametrize(("engine", "number", "moment"), FAST)
def test_a_signal_at_a_moment(case: Case, engine: str, number: int, moment: str) -> None:
    judge(case, engine, number, moment)


@pytest.mark.faults
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("engine", ["simulated", "stand-in", pytest.param("ray", marks=ONE_AT_A_TIME)])
def test_each_signal_at_each_moment(case: Case, engine: str, number: int, moment: str) -> None:
    case.within_s = REAL_S if engine == "ray" else case.within_s
    judge(case, engine, number, moment)


@pytest.mark.faults
@pytest.mark.slow
@ONE_AT_A_TIME
@pytest.mark.usefixtures("vllm_here")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_at_each_moment_of_vllm(case: Case, number: int, moment: str) -> None:
    case.within_s = REAL_S
    judge(case, "vllm", number, moment)


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


@pytest.mark.faults
@pytest.mark.slow
@ONE_AT_A_TIME
@pytest.mark.parametrize(("dead", "status", "said"), [(1, 0, ""), (2, 1, "EngineFailed: .* died")])
@pytest.mark.parametrize("moment", ["starting", "ready", "measuring", "between two points"])
def test_nodes_that_die(case: Case, moment: str, dead: int, status: int, said: str, monkeypatch) -> None:
    """Where one is left it measures the others."""
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
MEASURE = ("measure", "--endpoint=http://127.0.0.1:9/v1/completions", "--model=m", "--max-concurrency=1")


@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGINT, 0.0), (signal.SIGINT, 0.03), (signal.SIGTERM, 0.1)])
def test_a_signal_before_anything_is_imported(case: Case, number: int, after_s: float) -> None:
    early(case, number, after_s)


@pytest.mark.faults
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2])
@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_in_the_first_tenth_of_a_second(case: Case, number: int, after_s: float) -> None:
    early(case, number, after_s)


def early(case: Case, number: int, after_s: float) -> None:
    """Nobody listens at the URL, so that it ends by itself, too; before it listens for them, most signals end it."""
    seen = killed(case, ["-c", EARLY, *MEASURE], lambda pid: os.kill(pid, number), "MOMENT", after_s)
    if BETWEEN in seen.text:
        return
    case.judge("kills", seen, (4, 130, -number))
    assert seen.status != -signal.SIGINT
