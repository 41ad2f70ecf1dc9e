"""Options of sweeps: which loads are measured, how often, and until when."""

from __future__ import annotations

from collections import Counter

from inside import SWEEP

# sweep


FULL = (
    "--slm-concurrency=1,2,4,8,16,32,64,128,256,512",
    "--slm-input-len=64",
    "--slm-output-len=32",
    "--slm-engine-arg=t_inf=20000",
    "--slm-engine-arg=b_half=10.6",
)


ADAPTIVE = ("--slm-sweep=adaptive", *FULL)


DECIDING = [1, 32, 64, 128, 512]  # of a plateau from concurrency 64


def loads(contents):
    return sorted({m.load.concurrency for m in contents.measurements})


def test_every_planned_load_is_measured_unless_told_otherwise(sweep, archive):
    result = sweep(*FULL)
    result.assert_outcomes(passed=11)
    assert len(loads(archive())) == 10 and "adaptive" not in result.stdout.str()
    result.stdout.fnmatch_lines(["plateau *from concurrency 64*"])


def test_only_what_decides_is_measured_and_the_rest_is_skipped_with_what_the_law_says(sweep, archive):
    result = sweep(*ADAPTIVE, "-rs")
    result.assert_outcomes(passed=6, skipped=5)
    assert loads(archive()) == DECIDING and len(archive().measurements) == 8
    result.stdout.fnmatch_lines(
        [
            "slmserve: simulated, no vLLM; adaptive sweep; *",
            "*measured: 5 points (adaptive sweep, 5 planned loads not needed), 1 to 2 repeats each*",
            "*not measured, predicted: tokens/s 3,1?? at 2, * at 256 concurrent requests; told the neighbours*",
            "plateau *from concurrency 64*",
            "*passes*opt-125m*plateau from concurrency 64*(adaptive sweep: judged at*",
            "SKIPPED*not needed: the adaptive sweep found the plateau without it; predicted: 3,1?? tokens/s (*",
        ]
    )
    assert "though planned" not in result.stdout.str()


def test_without_a_plateau_the_largest_loads_are_measured(sweep, archive):
    result = sweep(*ADAPTIVE, "--slm-engine-arg=b_half=900", "--slm-window=2")  # steps are long there
    assert result.ret == 1 and loads(archive()) == [1, 256, 512]
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*no plateau up to concurrency 512*"])


def test_a_resumed_sweep_goes_on_where_it_ended(sweep, archive):
    sweep(*FULL, "--slm-concurrency=1,512", "--slm-repeats=1")
    result = sweep(*ADAPTIVE, "--slm-resume")
    result.assert_outcomes(passed=6, skipped=5)
    result.stdout.fnmatch_lines(["*2 measurements were reused*"])
    assert loads(archive()) == DECIDING and len(archive().measurements) == 6


def test_what_is_known_needs_no_skip(sweep, archive):
    sweep(*FULL, "--slm-concurrency=1,2,512", "--slm-repeats=1")
    sweep(*ADAPTIVE, "--slm-resume").assert_outcomes(passed=7, skipped=4)
    assert loads(archive()) == [1, 2, 32, 64, 128, 512]


def test_a_full_sweep_measures_what_an_adaptive_one_left_out(sweep, archive):
    sweep(*ADAPTIVE)
    result = sweep(*FULL, "--slm-resume")
    result.assert_outcomes(passed=11)
    result.stdout.fnmatch_lines(["*8 measurements were reused*"])
    assert len(archive().measurements) == 20


def test_any_item_of_a_model_carries_out_its_sweep(sweep, archive):
    sweep(*ADAPTIVE, "-k", "512 or plateau").assert_outcomes(passed=2)
    assert loads(archive()) == DECIDING


def test_a_load_that_cannot_be_measured_fails_and_ends_the_sweep(sweep, archive):
    result = sweep(*ADAPTIVE, "--slm-engine-arg=die_at=512", "-rs")
    result.assert_outcomes(passed=1, skipped=8, failed=1)
    assert result.ret == 1 and loads(archive()) == [1]
    result.stdout.fnmatch_lines(
        [
            "*EngineFailed: the simulated engine died at concurrency 512*",
            "*not measured, though planned: concurrency 512*",
            "*inconclusive*not measured at concurrency 512*",
            "note: opt-125m: the adaptive sweep ended at concurrency 512: the simulated engine died*",
            "SKIPPED*the adaptive sweep ended early: concurrency 512 was next*",
        ]
    )


def test_an_invalid_load_fails_its_item_and_leaves_the_claim_inconclusive(sweep, archive):
    result = sweep(*ADAPTIVE, "--slm-engine-arg=fail_at=512")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*inconclusive*invalid at concurrency 512*"])
    assert max(load for load in loads(archive()) if load < 512) == 256, "the largest that is valid"


def test_points_that_a_marker_names_are_measured_in_any_case(pytester, archive):
    pytester.makepyfile(
        SWEEP
        + """
    @pytest.mark.slm(points=[("opt-125m", 4)])
    def test_named(slm_point):
        assert slm_point.measure()
    """
    )
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-125m", "--slm-window=2", *ADAPTIVE)
    result.assert_outcomes(passed=7, skipped=5)
    assert loads(archive()) == [1, 4, 32, 64, 128, 512]
    assert sum(m.load.concurrency == 4 for m in archive().measurements) == 2


def test_noise_that_takes_too_long_leaves_it_inconclusive_and_says_how_to_go_on(sweep):
    result = sweep(
        *ADAPTIVE, "--slm-engine-arg=noise=0.05", "--slm-engine-arg=b_half=60", "--slm-report=summary", "--slm-budget=0"
    )
    assert result.ret == 10
    text = " ".join(result.stdout.str().split())
    assert "inconclusive: --slm-sweep full with --slm-resume measures the rest: throughput-plateau" in text


def test_a_plan_says_that_it_is_the_most_that_may_be_measured(sweep):
    result = sweep(*ADAPTIVE, "--slm-plan")
    result.stdout.fnmatch_lines(["*test_point?opt-125m-2? (* s)", "note: an adaptive sweep takes at most*a third*"])
    assert "at most" not in sweep("--slm-plan").stdout.str()


# repeats


def test_each_point_is_measured_so_often(sweep, archive):
    sweep("--slm-repeats=3").assert_outcomes(passed=6)
    assert len(archive().measurements) == 15


def test_one_repeat_has_no_interval_so_its_claims_are_inconclusive(sweep):
    result = sweep("--slm-repeats=1")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["*noise unknown: one repeat*--slm-repeats 2*", "*1 inconclusive*"])


# budget


# The last doubling gains 5 %, on a host whose speed drifts.
NOISY = (
    "--slm-input-len=8",
    "--slm-output-len=64",
    "--slm-engine-arg=t_inf=14000",
    "--slm-engine-arg=b_half=14",
    "--slm-engine-arg=host_noise=0.02",
)


def repeats(archive):
    return Counter(m.load.concurrency for m in archive().measurements)


def test_the_loads_of_an_inconclusive_claim_are_measured_again_until_it_is_decided(sweep, archive):
    result = sweep(*NOISY, "--slm-budget=600")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*passes*plateau from *"])
    counted = repeats(archive)
    assert counted[1] == counted[16] == counted[64] == 2, "on which it does not depend"
    assert counted[128] == counted[256] > 2


def test_rounds_go_over_all_loads(sweep, archive):
    sweep(*NOISY, "--slm-budget=0")
    assert [m.load.concurrency for m in archive().measurements] == [1, 16, 64, 128, 256] * 2


def test_without_a_budget_it_is_inconclusive_and_what_would_decide_is_told(sweep, archive):
    result = sweep(*NOISY, "--slm-budget=0", "--slm-report=summary")
    assert result.ret == 10 and set(repeats(archive).values()) == {2}
    text = " ".join(result.stdout.str().split())
    would = "s more at concurrency 128 and 256, with an engine start, would decide: --slm-simulate --slm-resume"
    assert would in text or "too near to its bound" in text


def test_a_resumed_sweep_goes_on_at_the_inconclusive_loads(sweep, archive):
    sweep(*NOISY, "--slm-budget=0")
    result = sweep(*NOISY, "--slm-budget=600", "--slm-resume")
    assert result.ret == 0
    counted = repeats(archive)
    assert counted[1] == counted[64] == 2 < counted[256]


def test_a_quiet_host_is_through_after_two_rounds(sweep, archive):
    sweep(*NOISY[:-1])
    assert set(repeats(archive).values()) == {2}


def test_where_no_claim_is_judged_nothing_is_measured_again(sweep, archive):
    sweep(*NOISY, "--slm-budget=600", "-k", "test_point")
    assert set(repeats(archive).values()) == {2}
