"""Which loads are measured, how often, and until when: full and adaptive sweeps, repeats and a budget."""

from __future__ import annotations

from collections import Counter

import pytest
from inner_runs import FEW
from inside import SMALL, SWEEP

FULL = (*FEW, "--slm-concurrency=1,2,4,8,16,32,64", "--slm-window=1", "--slm-engine-arg=b_half=1")
ADAPTIVE = (*FULL, "--slm-sweep=adaptive")
DECIDING = [1, 4, 8, 16, 64]  # of a plateau from concurrency 8


def loads(ran):
    return sorted({*ran.loads()})


@pytest.fixture
def full(runs):
    return runs(SWEEP, *FULL)


@pytest.fixture
def adaptive(runs):
    return runs(SWEEP, *ADAPTIVE, "-rs")


def test_every_planned_load_is_measured_unless_told_otherwise(full):
    assert full.counts == {"passed": 8} and full.loads() == [1, 2, 4, 8, 16, 32, 64] * 2
    assert "adaptive" not in full.out
    full.lines.fnmatch_lines(["plateau *from concurrency 8*"])


def test_only_what_decides_is_measured_and_the_rest_is_skipped_with_what_the_law_says(adaptive):
    assert adaptive.counts == {"passed": 6, "skipped": 2}
    assert loads(adaptive) == DECIDING and len(adaptive.measured()) == 8
    adaptive.lines.fnmatch_lines(
        ["slmserve: *; adaptive sweep; *", "*measured: 5 points (*, 2 planned*, 1 to 2 repeats*"]
    )
    adaptive.lines.fnmatch_lines(["*not measured, predicted: tokens/s 1,3?? at 2, 1,9?? at 32 *"])
    adaptive.lines.fnmatch_lines(
        ["plateau *from concurrency 8*", "*passes*opt-125m*plateau from concurrency 8*(adaptive*"]
    )
    adaptive.lines.fnmatch_lines(["SKIPPED*adaptive*1,3?? tokens/s (*"])
    assert "though planned" not in adaptive.out


def test_without_a_plateau_the_largest_loads_are_measured(runs):
    ran = runs(SWEEP, *ADAPTIVE, "--slm-engine-arg=b_half=900", "--slm-engine-arg=t_inf=200000")
    assert ran.ret == 1 and loads(ran) == [1, 32, 64]
    ran.lines.fnmatch_lines(["*fails: throughput-plateau*concurrency 64*"])


def test_a_resumed_sweep_goes_on_where_it_ended_and_what_is_known_needs_no_skip(runs):
    begun = runs.anew(SWEEP, *FULL, "--slm-concurrency=1,2,64", "--slm-repeats=1")
    ran = runs.anew(SWEEP, *ADAPTIVE, "--slm-resume", folder=begun.folder)
    assert ran.counts == {"passed": 7, "skipped": 1} and loads(ran) == [1, 2, 4, 8, 16, 64]
    ran.lines.fnmatch_lines(["*3 measurements were reused*"])


def test_a_full_sweep_measures_what_an_adaptive_one_left_out(runs):
    begun = runs.anew(SWEEP, *ADAPTIVE)
    ran = runs.anew(SWEEP, *FULL, "--slm-resume", folder=begun.folder)
    assert ran.counts == {"passed": 8} and Counter(ran.loads()) == dict.fromkeys([1, 2, 4, 8, 16, 32, 64], 2)
    ran.lines.fnmatch_lines(["*8 measurements were reused*"])


def test_any_item_of_a_model_carries_out_its_sweep(runs):
    ran = runs(SWEEP, *ADAPTIVE, "-k", "64 or plateau")
    assert ran.counts == {"passed": 2, "deselected": 6} and loads(ran) == DECIDING


def test_a_load_that_cannot_be_measured_fails_and_ends_the_sweep(runs):
    ran = runs(SWEEP, *ADAPTIVE, "--slm-engine-arg=die_at=64", "-rs")
    assert (ran.ret, ran.counts) == (1, {"passed": 1, "skipped": 5, "failed": 1, "inconclusive": 1})
    assert loads(ran) == [1]
    ran.lines.fnmatch_lines_random(
        [
            "*EngineFailed: the simulated engine died at concurrency 64*",
            "*not measured, though planned: concurrency 64*",
            "*inconclusive*not measured at concurrency 64*",
            "note: opt-125m: *at concurrency 64: *died*",
            "SKIPPED*adaptive*concurrency 64 *",
        ]
    )


def test_an_invalid_load_fails_its_item_and_leaves_the_claim_inconclusive(runs):
    ran = runs(SWEEP, *ADAPTIVE, "--slm-engine-arg=fail_at=64")
    assert ran.ret == 1 and max(load for load in loads(ran) if load < 64) == 32, "the largest that is valid"
    ran.lines.fnmatch_lines(["*inconclusive*invalid at concurrency 64*"])


NAMED = """
    @pytest.mark.slm(points=[("opt-125m", 2)])
    def test_named(slm_point):
        assert slm_point.measure()
"""


def test_points_that_a_marker_names_are_measured_in_any_case(runs):
    ran = runs(SWEEP + NAMED, *ADAPTIVE)
    assert ran.counts == {"passed": 7, "skipped": 2} and loads(ran) == [1, 2, 4, 8, 16, 64]
    assert ran.loads().count(2) == 2


def test_noise_that_takes_too_long_leaves_it_inconclusive_and_says_how_to_go_on(runs):
    noisy = ("--slm-engine-arg=noise=0.05", "--slm-engine-arg=b_half=6", "--slm-report=summary", "--slm-budget=0")
    ran = runs(SWEEP, *ADAPTIVE, *noisy)
    assert ran.ret == 10 and "inconclusive: --slm-sweep full with --slm-resume " in ran.words


def test_a_plan_says_that_it_is_the_most_that_may_be_measured(runs):
    ran = runs(SWEEP, *ADAPTIVE, "--slm-plan")
    ran.lines.fnmatch_lines(["*test_point?opt-125m-2? (* s)", "note: *adaptive*at most*"])
    assert "at most" not in runs(SWEEP, *FULL, "--slm-plan").out


# Repeats


def test_each_point_is_measured_so_often_and_once_has_no_interval(runs):
    assert len(runs(SWEEP, *FEW, "--slm-repeats=3").measured()) == 15
    once = runs(SWEEP, *FEW, "--slm-repeats=1")
    assert once.ret == 10 and len(once.measured()) == 5
    once.lines.fnmatch_lines(["*noise unknown: one repeat*--slm-repeats 2*", "*1 inconclusive*"])


# A budget


# The last doubling gains 5 %, on a host whose speed drifts.
QUIET_HOST = (*SMALL, "--slm-input-len=8", "--slm-output-len=64", "--slm-engine-arg=t_inf=14000")
QUIET_HOST += ("--slm-engine-arg=b_half=14",)
NOISY = (*QUIET_HOST, "--slm-engine-arg=host_noise=0.02")


@pytest.fixture
def unpaid(runs):
    return runs(SWEEP, *NOISY, "--slm-budget=0", "--slm-report=summary")


def test_without_a_budget_it_is_inconclusive_and_what_would_decide_is_told(unpaid):
    assert unpaid.ret == 10 and unpaid.loads() == [1, 16, 64, 128, 256] * 2, "rounds go over all loads"
    would = "s more at concurrency 128 and 256, with an engine start, would decide: --slm-simulate --slm-resume"
    assert would in unpaid.words or "too near to its bound" in unpaid.words


def test_the_loads_of_an_inconclusive_claim_are_measured_again_until_it_is_decided(runs):
    ran = runs(SWEEP, *NOISY, "--slm-budget=600")
    counted = Counter(ran.loads())
    assert ran.ret == 0 and counted[1] == counted[16] == counted[64] == 2, "on which it does not depend"
    assert counted[128] == counted[256] > 2
    ran.lines.fnmatch_lines(["*passes*plateau from *"])


def test_a_resumed_sweep_goes_on_at_the_inconclusive_loads(runs, unpaid):
    ran = runs.anew(SWEEP, *NOISY, "--slm-budget=600", "--slm-resume", folder=unpaid.folder)
    counted = Counter(ran.loads())
    assert ran.ret == 0 and counted[1] == counted[64] == 2 < counted[256]


def test_on_a_quiet_host_or_without_a_claim_nothing_is_measured_again(runs):
    for words in (QUIET_HOST, (*NOISY, "--slm-budget=600", "-k", "test_point")):
        assert {*Counter(runs(SWEEP, *words).loads()).values()} == {2}
