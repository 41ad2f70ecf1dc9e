"""Which loads are measured, how often, and until when: full and adaptive sweeps, repeats and a budget; and what sensors
and validity add: what cannot be trusted is measured once more and fails, is shown, or is kept.

What an adaptive sweep asks for is told in tests/unit/analysis/sweep, when one ends in tests/unit/run."""

from collections import Counter

import pytest
from inner_runs import FEW, SWEEP

FULL = f"{FEW} --slm-concurrency=1,2,4,8,16,32,64 --slm-window=1 --slm-engine-arg=b_half=1 -rs"
ADAPTIVE = f"{FULL} --slm-sweep=adaptive"
NAMED = """
    @pytest.mark.slm(points=[("opt-125m", 2)])
    def test_named(slm_point):
        assert slm_point.measure()
"""


def test_full_sweep_measures_every_load(runs):
    ran = runs(SWEEP, FULL)
    assert ran.counts == {"passed": 8} and ran.loads() == [1, 2, 4, 8, 16, 32, 64] * 2 and "adaptive" not in ran.out
    ran.says("plateau *from concurrency 8*")
    assert len(runs(SWEEP, FEW, "--slm-repeats=3").measured()) == 15
    begun = runs.anew(SWEEP, FULL, "--slm-concurrency=1,2,64 --slm-repeats=1")
    ran = runs.anew(SWEEP, ADAPTIVE, "--slm-resume", folder=begun.folder)
    assert ran.counts == {"passed": 6, "skipped": 2} and {*ran.loads()} == {1, 2, 4, 8, 64}
    ran.says("*3 measurements were reused*")
    full = runs.anew(SWEEP, FULL, "--slm-resume", folder=begun.folder)
    assert full.counts == {"passed": 8} and Counter(full.loads()) == dict.fromkeys([1, 2, 4, 8, 16, 32, 64], 2)
    first, again = (m.run.window_s for m in full.measured() if m.load.concurrency == 1)
    assert first != again, "the noise of a resumed launch is its own"


# Words, and source; loads that are measured, in ascending order; exit status and outcomes; lines.
SWEPT = {
    "what decides": ("", SWEEP, [1, 4, 8, 16, 64], 0, {"passed": 6, "skipped": 2}, [
        "slmserve: *; adaptive sweep; *", "*measured: 5 points (*, 2 planned*, 1 to 2 repeats*",
        "*not measured, predicted: tokens/s 1,3?? at 2, 1,9?? at 32 *", "plateau *from concurrency 8*",
        "*passed*opt-125m*plateau from concurrency 8*(adaptive*", "SKIPPED*adaptive*1,3?? tokens/s (*"]),
    "any item": ("-k '64 or plateau'", SWEEP, [1, 4, 8, 16, 64], 0, {"passed": 2, "deselected": 6}, []),
    "a named point": ("", SWEEP + NAMED, [1, 2, 4, 8, 16, 64], 0, {"passed": 7, "skipped": 2}, []),
    "an invalid load": ("--slm-engine-arg=fail_at=64", SWEEP, [1, 4, 8, 32, 64], 1,
                        {"passed": 4, "skipped": 2, "failed": 1, "inconclusive": 1},
                        ["*inconclusive*invalid at concurrency 64*"]),
    "no measurement": ("--slm-engine-arg=die_at=64", SWEEP, [1], 1,
                       {"passed": 1, "skipped": 5, "failed": 1, "inconclusive": 1}, [
        "*EngineFailed: the simulated engine died at concurrency 64*", "SKIPPED*adaptive*concurrency 64 *",
        "*not measured, though planned: concurrency 64*", "note: opt-125m: *at concurrency 64: *died*",
        "*inconclusive*not measured at concurrency 64*"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SWEPT)
def test_adaptive_sweep_measures_deciding_loads(runs, case):
    words, source, loads, status, counts, lines = SWEPT[case]
    ran = runs(source, ADAPTIVE, words)
    assert (sorted({*ran.loads()}), ran.ret, ran.counts) == (loads, status, counts)
    assert ("though planned" in ran.out) is (case == "no measurement")
    assert case != "a named point" or ran.loads().count(2) == 2
    ran.says(*lines)


def test_noisy_adaptive_sweep_suggests_resume(runs):
    noisy = "--slm-engine-arg=noise=0.05 --slm-engine-arg=b_half=6 -o slm_report=summary --slm-budget=0"
    ran = runs(SWEEP, ADAPTIVE, noisy)
    assert ran.ret == 10 and "--slm-sweep full with --slm-resume " in " ".join(ran.out.split())
    assert "INCONCLUSIVE: throughput-plateau" in ran.out and "--slm-sweep=full --slm-resume" in " ".join(
        ran.out.split()
    )
    runs(SWEEP, ADAPTIVE, "--slm-plan").says("*test_point?opt-125m-2? (* s)", "note: *adaptive*at most*")
    assert "at most" not in runs(SWEEP, FULL, "--slm-plan").out


# A budget: the last doubling gains 5%, on a host whose speed drifts

NOISY = """--slm-simulate --slm-models=opt-125m --slm-concurrency=1,16,64,128,256 --slm-window=1 --slm-input-len=8
    --slm-output-len=64 --slm-engine-arg=t_inf=14000 --slm-engine-arg=b_half=12 --slm-engine-arg=host_noise=0.02"""


def test_budget_repeats_undecided_loads(runs):
    unpaid = runs.anew(SWEEP, NOISY, "--slm-budget=0")
    assert unpaid.ret == 10 and unpaid.loads() == [1, 16, 64, 128, 256] * 2, "rounds go over all loads"
    would = "s more at concurrency 128 and 256, with an engine start, would decide: --slm-simulate --slm-resume"
    assert any(each in " ".join(unpaid.out.split()) for each in (would, "too near to its bound"))
    ran = runs.anew(SWEEP, NOISY, "--slm-budget=600 --slm-resume", folder=unpaid.folder)
    counted = Counter(ran.loads())
    assert ran.ret == 0 and counted[1] == counted[16] == counted[64] == 2, "on which it does not depend"
    assert counted[128] == counted[256] > 2
    assert {*Counter(runs(SWEEP, NOISY, "--slm-budget=600 -k test_point").loads()).values()} == {2}, "without a claim"


OF_SENSORS = """
    @pytest.mark.slm(claim="occupancy-below-a-saturated-kernel", needs="gpu")
    def test_underused(slm_claim):
        assert slm_claim()

    @pytest.mark.slm(claim="energy-per-token-falls-with-load", needs="gpu")
    def test_cheaper(slm_claim):
        assert slm_claim()
"""
SENSED = """--slm-simulate --slm-models=opt-125m --slm-concurrency=1,4,8,16 --slm-window=2 --slm-input-len=64 -v
    --slm-output-len=32 -o slm_report=tables --slm-budget=0 --slm-engine-arg=t_inf=4000 --slm-engine-arg=b_half=1.5
    --slm-engine-arg=noise=0.001"""
POINTS = [f"test_point[opt-125m-{n}]" for n in (1, 4, 8, 16)]
PLATEAU, UNDERUSED, CHEAPER = (f"test_{name}[opt-125m]" for name in ("plateau", "underused", "cheaper"))
# What is planted, or left out; repeats at each load; exit status; items that do not pass; and lines. That the occupancy
# is low is expected to fail where it is high, so that is no failure.
PLANTED = {
    "--slm-engine-arg=power_w=350": ([2, 2, 2, 2], 0, {}, []),
    "--slm-engine-arg=lost_from=16": ([2, 2, 2, 3], None, {},
                                      ["*16 *questionable", "*questionable: concurrency 16: a sensor was lost*"]),
    "--slm-engine-arg=slow_clock_from=16": ([2, 2, 2, 2], 0, {},
                                            ["*16 *noisy", "noisy (included): concurrency 16: *1600 MHz*"]),
    "--slm-engine-arg=hot_from=16": ([2, 2, 2, 3], 1, {POINTS[3]: "FAILED", PLATEAU: "INCONCLUSIVE"},
                                     ["*0 of 3 measurements are valid, 2 are wanted: *", "*invalid: concurrency 16*"]),
    "--slm-engine-arg=sensors=false": ([2, 2, 2, 2], 10, {UNDERUSED: "INCONCLUSIVE", CHEAPER: "INCONCLUSIVE"}, []),
    "--slm-engine-arg=sm_occupancy=0.8": ([2, 2, 2, 2], 0, {UNDERUSED: "XFAIL"}, []),
    "-k 'not 8'": ([2, 2, 0, 2], 10, {PLATEAU: "INCONCLUSIVE"}, ["*inconclusive*not measured at concurrency 8*"]),
}  # fmt: skip


@pytest.mark.parametrize("words", PLANTED)
def test_untrusted_points_are_measured_again(runs, words):
    repeats, status, others, lines = PLANTED[words]
    ran = runs(SWEEP + OF_SENSORS, SENSED, words)
    assert [ran.loads().count(n) for n in (1, 4, 8, 16)] == repeats and status in (None, ran.ret)
    found = {name: outcome for name, outcome in ran.outcomes.items() if outcome != "PASSED"}
    assert others.items() <= found.items() and {*found} & {*POINTS, PLATEAU} == {*others} & {*POINTS, PLATEAU}
    assert "left out" not in ran.out or "noisy (included)" not in ran.out
    ran.says(*lines)
