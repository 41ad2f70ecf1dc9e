"""--slm-baseline is an archive, or a kept baseline, that the points of a run are held against."""

from __future__ import annotations

import pytest
from inner_runs import FEW, QUIET
from inside import usage_error
from shipped import put

from pytest_slmserve.__main__ import main

SLOWER = ("--slm-engine-arg=t_inf=1700",)
WIDE = "--slm-gate-margin=0.1"


@pytest.fixture
def held(pytester):
    """Runs a small sweep, and what holds it against a baseline."""
    put(pytester.path, "test_pareto_plateau", "test_stored_baseline")
    return lambda *args: pytester.runpytest_inprocess(*FEW, "-k", "test_point or stored_baseline", *args, *QUIET)


@pytest.fixture
def before(held, pytester):
    """An archive of what was measured before."""
    held("--slm-records=before.jsonl")
    return pytester.path / "before.jsonl"


def test_an_equal_run_is_no_worse_by_the_path_and_by_the_name_of_what_is_kept(held, before):
    result = held(f"--slm-baseline={before}", WIDE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["latency-not-above-baseline*", "*passes*opt-125m at concurrency 16*"])
    result.stdout.fnmatch_lines(["note: *stored baseline*"])
    result.stdout.no_fnmatch_line("*unexpected*")
    assert main(["compare", "--save", str(before)]) == 0
    assert held("--slm-baseline=simulated", WIDE).ret == 0


def test_a_slower_run_fails_and_says_where_by_the_margin_of_a_gate(held, before):
    result = held(f"--slm-baseline={before}", *SLOWER)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*FAILS*opt-125m at concurrency 1 *output tokens/s *% lower *"])
    assert held(f"--slm-baseline={before}", "--slm-gate-margin=0.9", *SLOWER).ret == 0


def test_loads_that_only_one_side_has_are_named(held, before):
    result = held(f"--slm-baseline={before}", "--slm-concurrency=1,4,32")
    result.stdout.fnmatch_lines(["note: *baseline alone: opt-125m at concurrency 2, 8, 16*"])
    result.stdout.fnmatch_lines(["note: *this run alone: opt-125m at concurrency 32*"])


def test_replicas_are_held_against_replicas(pytester):
    put(pytester.path, "test_replication_gain", "test_stored_baseline")

    def run(*args):
        some = ("-k", "point_of_replicas or stored_baseline")
        return pytester.runpytest_inprocess(
            *FEW, "--slm-concurrency=12", "--slm-sharing=time-slicing", *some, *args, *QUIET
        )

    run("--slm-records=before.jsonl")
    equal, slower = (run("--slm-baseline=before.jsonl", *words) for words in ([WIDE], SLOWER))
    assert (equal.ret, slower.ret) == (0, 1)
    equal.stdout.fnmatch_lines(["*passes*2 x opt-125m by time-slicing at concurrency *"])
    slower.stdout.fnmatch_lines(["*FAILS*2 x opt-125m by time-slicing at concurrency *output tokens/s *% lower *"])


def test_what_is_not_there_is_refused_and_without_one_the_test_is_skipped(held, pytester):
    assert "--slm-baseline nothing" in usage_error(held("--slm-baseline=nothing"))
    assert not (pytester.path / ".slm" / "records.jsonl").exists()
    result = held("-rs")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["SKIPPED*needs --slm-baseline"])
