"""--slm-repeats is how often each point is measured."""

from inside import usage_error


def test_each_point_is_measured_so_often(sweep, archive):
    sweep("--slm-repeats=3").assert_outcomes(passed=6)
    assert len(archive().measurements) == 15


def test_one_repeat_has_no_interval_so_its_claims_are_inconclusive(sweep):
    result = sweep("--slm-repeats=1")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["*noise unknown: one repeat*--slm-repeats 2*", "*1 inconclusive*"])


def test_none_is_refused(sweep):
    assert "is not a whole number, 1 or more" in usage_error(sweep("--slm-repeats=0"))
