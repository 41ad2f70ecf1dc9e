"""The whole shipped suite on the simulated engine is green, and can be planned for a server that runs already, each in
a process of its own, as a user runs it: its modules may be imported here by other names. Its benchmark of several GPUs
finds what is planted, and a gate through engines, workers and processes a stand-in for vLLM that is slower."""

import pytest
from inner_runs import QUIET
from interfaces import STAND_IN
from shipped import BENCHMARKS, put

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.telemetry import host

ALONE = ("-p", "no:cacheprovider", "-p", "no:benchmark")


def test_whole_shipped_suite_passes(pytester):
    result = pytester.runpytest_subprocess(BENCHMARKS, "--slm-simulate", "--slm-suite=all", "--rootdir=.", *ALONE)
    assert result.ret == pytest.ExitCode.OK
    counts = result.parseoutcomes()
    assert counts["passed"] > 150 and counts["deselected"] > 50
    told = [line for line in result.outlines if line.startswith("slmserve: deselected")]
    assert len(told) == 1 and f" {counts['deselected']} tests" in told[0] and "slm_strict" in told[0]


def test_shipped_suite_plans_for_endpoint(pytester):
    """Of models of the catalogue, which most of them name; nobody is asked for a plan."""
    put(pytester.path, *(path.stem for path in BENCHMARKS.glob("test_*.py")))
    models = "--slm-models=facebook/opt-125m,opt-1.3b,opt-6.7b,Qwen/Qwen2.5-3B"
    result = pytester.runpytest_subprocess("--slm-endpoint=http://h/v1/completions", models, "--slm-plan", *ALONE)
    assert result.ret == 0 and "test_job[opt-125m-256-100-per-s]" in result.stdout.str()
    assert "kv-for" not in result.stdout.str(), "no limit is set for a server that has its own"


ON_GPUS = f"""--slm-simulate --slm-models=opt-125m,opt-13b --slm-concurrency=1,16,64,256 --slm-window=12
    --slm-input-len=64 --slm-output-len=32 --slm-engine-arg=t_inf=4000 --slm-engine-arg=b_half=64
    --slm-engine-arg=all_reduce_s=0.005 --slm-engine-arg=imbalance=0.2 -o slm_report=tables
    --slm-records=.slm/records.jsonl {QUIET}"""
CLAIMS = ("loses-per-gpu", "serves-less-in-all", "still-gains", "replicas-per-gpu-beat")


def words(line):
    """The first of them: names are as wide as the longest there is, so lines break where they like."""
    return " ".join(line.split()[:16])


def test_slow_all_reduce_favours_replicas(pytester, monkeypatch, capsys):
    """24 all-reduces of 5 ms in a step of OPT-125M, which takes 80 ms on one GPU: 20 + 120 ms on four."""
    monkeypatch.setenv("COLUMNS", "400")
    put(pytester.path, "test_tensor_parallel")
    result = pytester.runpytest_inprocess(*ON_GPUS.split())
    result.assert_outcomes(passed=2 * (12 + 3) + 2 + 1 + 2, xpassed=1)
    result.stdout.fnmatch_lines(
        [
            "*opt-125m on several GPUs: simulated*",
            "*256 * 2  one engine, TP 2 * 630 * 22.2 * yes",
            "*256 * 2  2 replicas, a GPU each * 630 * 22.2 * yes",
            "*TP 2, concurrency 256: GPU 0 350 W*; GPU 1 280 W*",
            "*2 GPUs, concurrency 256: most requests/s: 2 replicas, a GPU each*lowest E2E: 2 replicas*",
            "*passed*opt-125m*on 4 GPUs it serves 0.57* times*what it does on 1 GPU*",
            "*passed*opt-13b*on 4 GPUs it serves 1.05 times*what it does on 2 GPUs*",
        ]
    )
    made = read(pytester.path / ".slm/records.jsonl").measurements
    assert {m.spec.tensor_parallel_size for m in made} == {1, 2, 4}
    assert {(m.replica.count, m.replica.sharing) for m in made if m.replica} == {(2, "gpus"), (4, "gpus")}
    capsys.readouterr()
    main(["report", ".slm/records.jsonl"])
    again, told = ([*map(words, lines)] for lines in (capsys.readouterr().out.splitlines(), result.outlines))
    for claim in CLAIMS:
        at = next(i for i, line in enumerate(told) if line.startswith(f"tensor-parallel-{claim}: ") or claim in line)
        assert "passed opt-" in told[at + 1]
        assert told[at : at + 2] == again[(i := again.index(told[at])) : i + 2]
    assert not any(line.startswith("throughput-plateau") for line in again), "they are no sweeps"


GATED = f"""--slm-cpu --slm-gate --slm-models=opt-tiny --slm-concurrency=4 --slm-window=1.2 --slm-input-len=16
    --slm-output-len=8 --slm-telemetry=off --slm-engine-arg=step_s=0.006 --slm-side=candidate:arg=step_s=0.03
    --slm-records=r.jsonl {QUIET}"""


def test_gate_finds_slower_engine_process(pytester, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "interpreter", lambda *_: {"python": "3.11.7", "vllm": "0.32.0", "torch": "2.13.0"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other runs on this machine have their own lock
    monkeypatch.setenv("COLUMNS", "400")
    put(pytester.path, "test_gate")
    result = pytester.runpytest_inprocess(*GATED.split(), f"--slm-env=PYTHONPATH={STAND_IN}")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*<fails: no-worse-throughput ?opt-tiny?*", "opt-tiny: FAIL after * pairs of launches"]
    )
    found = read(pytester.path / "r.jsonl").measurements
    assert len({m.launch for m in found}) >= 8 and all(m.environment.vllm == "0.32.0" for m in found)
