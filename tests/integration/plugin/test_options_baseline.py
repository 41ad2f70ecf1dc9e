"""--slm-baseline is an archive, or a kept baseline, that the points of a run are compared with."""

from __future__ import annotations

import pytest
from inside import SMALL, usage_error
from shipped import put

from pytest_slmserve.__main__ import main


@pytest.fixture
def held(pytester):
    """Runs a small sweep, and what holds it against a baseline."""
    put(pytester.path, "test_pareto_plateau", "test_stored_baseline")
    return lambda *args: pytester.runpytest_inprocess(*SMALL, "-k", "test_point or stored_baseline", *args)


@pytest.fixture
def before(held, pytester):
    """An archive of what was measured before."""
    held("--slm-records=before.jsonl")
    return pytester.path / "before.jsonl"


def test_an_equal_run_is_no_worse(held, before):
    result = held(f"--slm-baseline={before}", "--slm-gate-margin=0.1")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["latency-not-above-baseline*", "*passes*opt-125m at concurrency 256*"])
    result.stdout.no_fnmatch_line("*unexpected*")
    result.stdout.fnmatch_lines(["note: a stored baseline was measured at another time*"])


def test_a_slower_run_fails_and_says_where(held, before):
    result = held(f"--slm-baseline={before}", "--slm-engine-arg", "t_inf=3000")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*<fails: no-worse-than-the-baseline ?opt-125m?: *output tokens/s *% lower than *",  # pytest cuts the rest
            "*FAILS*opt-125m at concurrency 1 *output tokens/s *% lower than the baseline*",
        ]
    )


def test_the_margin_is_that_of_a_gate(held, before):
    slower = ("--slm-engine-arg", "t_inf=30000")
    assert held(f"--slm-baseline={before}", "--slm-gate-margin=0.9", *slower).ret != 4
    assert "--slm-gate-margin says what a gate compares" in usage_error(held("--slm-gate-margin=0.9"))


def test_a_kept_baseline_is_known_by_its_name(held, before):
    assert main(["compare", "--save", str(before)]) == 0
    assert held("--slm-baseline=simulated", "--slm-gate-margin=0.1").ret == 0


def test_loads_that_only_one_side_has_are_named(held, before):
    result = held(f"--slm-baseline={before}", "--slm-concurrency=1,64,512")
    result.stdout.fnmatch_lines(["note: measured by the baseline alone: opt-125m at concurrency 16, 128, 256*"])
    result.stdout.fnmatch_lines(["note: measured by this run alone: opt-125m at concurrency 512*"])


def test_replicas_are_held_against_replicas(pytester):
    put(pytester.path, "test_replication_gain", "test_stored_baseline")

    def run(*args):
        return pytester.runpytest_inprocess(
            *SMALL, "--slm-sharing=time-slicing", "-k", "point_of_replicas or stored_baseline", *args
        )

    run("--slm-records=before.jsonl")
    equal = run("--slm-baseline=before.jsonl", "--slm-gate-margin=0.1")
    assert equal.ret == 0
    equal.stdout.fnmatch_lines(["*passes*2 x opt-125m by time-slicing at concurrency *"])
    slower = run("--slm-baseline=before.jsonl", "--slm-engine-arg", "t_inf=30000")
    assert slower.ret == 1
    slower.stdout.fnmatch_lines(
        ["*FAILS*2 x opt-125m by time-slicing at concurrency *output tokens/s *% lower than the baseline*"]
    )


def test_what_is_not_there_is_refused_before_anything_is_measured(held, pytester):
    assert "--slm-baseline nothing: there is no baseline nothing in .slm" in usage_error(held("--slm-baseline=nothing"))
    assert not (pytester.path / ".slm" / "records.jsonl").exists()


def test_without_it_the_test_is_skipped_with_the_reason(held):
    result = held("-rs")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["SKIPPED*nothing to be held against: needs --slm-baseline"])
