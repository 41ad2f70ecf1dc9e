"""--slm-allow-inconclusive: exit status 0 where something is inconclusive and nothing fails."""

INCONCLUSIVE = "--slm-repeats=1"


def test_what_is_inconclusive_is_shown_and_makes_the_run_no_failure(sweep):
    result = sweep("--slm-allow-inconclusive", INCONCLUSIVE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["  inconclusive: --slm-simulate --slm-resume --slm-repeats 2 tells the noise: *", "*5 passed, 1 inconclusive*"]
    )


def test_a_failure_stays_one(sweep):
    assert sweep("--slm-allow-inconclusive", "--slm-engine-arg=b_half=300").ret == 1


def test_without_it_what_is_inconclusive_has_a_status_of_its_own(sweep):
    assert sweep(INCONCLUSIVE).ret == 10
