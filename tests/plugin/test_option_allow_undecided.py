"""--slm-allow-undecided: exit status 0 where something is undecided and nothing fails."""

UNDECIDED = "--slm-repeats=1"


def test_what_is_undecided_is_shown_and_makes_the_run_no_failure(sweep):
    result = sweep("--slm-allow-undecided", UNDECIDED)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["  undecided: --slm-simulate --slm-resume --slm-repeats 2 tells the noise: *", "*5 passed, 1 undecided*"]
    )


def test_a_failure_stays_one(sweep):
    assert sweep("--slm-allow-undecided", "--slm-engine-arg=b_half=300").ret == 1


def test_without_it_what_is_undecided_has_a_status_of_its_own(sweep):
    assert sweep(UNDECIDED).ret == 10
