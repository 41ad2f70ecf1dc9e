"""The whole shipped suite on the simulated engine is green, and can be planned for a server that runs already.

Each in a process of its own, as a user runs it: its modules may be imported here by other names."""

import pytest
from shipped import BENCHMARKS, put

ALONE = ("-p", "no:cacheprovider", "-p", "no:benchmark")


def test_the_whole_shipped_suite_is_green(pytester):
    result = pytester.runpytest_subprocess(BENCHMARKS, "--slm-simulate", "--slm-suite=all", "--rootdir=.", *ALONE)
    assert result.ret == pytest.ExitCode.OK
    counts = result.parseoutcomes()
    assert counts["passed"] > 150 and counts["deselected"] > 50
    told = [line for line in result.outlines if line.startswith("slmserve leaves out")]
    assert len(told) == 1 and f" {counts['deselected']} tests" in told[0] and "slm_strict" in told[0]


def test_every_shipped_benchmark_can_be_planned_for_an_endpoint(pytester):
    """Of models of the catalogue, which most of them name; nobody is asked for a plan."""
    put(pytester.path, *(path.stem for path in BENCHMARKS.glob("test_*.py")))
    models = "--slm-models=facebook/opt-125m,opt-1.3b,opt-6.7b,Qwen/Qwen2.5-3B"
    result = pytester.runpytest_subprocess("--slm-endpoint=http://h/v1/completions", models, "--slm-plan", *ALONE)
    assert result.ret == 0 and "test_job[opt-125m-256-100-per-s]" in result.stdout.str()
    assert "kv-for" not in result.stdout.str(), "no limit is set for a server that has its own"
