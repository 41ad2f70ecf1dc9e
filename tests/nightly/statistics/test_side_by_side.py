"""How often a gate is right whose sides live on one GPU at once, and how long it takes, by the study that prints it."""

from statistics import fmean

import pytest
from scipy.stats import binom
from scripts import checkout_script, loaded

from pytest_slmserve.analysis.verdict import State

with loaded(checkout_script("studies/side_by_side_study.py")) as study:
    GATES, BUSY, SEEN = 1000, "busy second, 2.2 %", "seen, 3 %"


def at_least(found, share):
    """Whether so many of GATES are no evidence against a share: one in a thousand would be fewer."""
    return sum(found) >= binom.ppf(0.001, GATES, share)


def ended(case, apart, calibrates=False):
    found = study.study(study.CASES[case], apart, range(GATES), calibrates)
    return (found[worse] for worse in study.WORSE)


@pytest.mark.parametrize(("case", "apart", "most_minutes"), [(BUSY, 0.005, 4), (BUSY, 0.01, 4), (SEEN, 0.01, 5)])
def test_what_is_unchanged_passes_and_what_is_worse_is_found_in_the_promised_minutes(case, apart, most_minutes):
    same, margin, more = ended(case, apart)
    assert at_least((each.state is not State.FAILS for each in same), 0.99)
    assert at_least((each.state is State.PASSES for each in same), 0.98)
    assert at_least((each.state is State.FAILS for each in margin), 0.93)
    assert at_least((each.state is State.FAILS for each in more), 0.99)
    assert fmean(each.minutes for each in same) < most_minutes


def test_where_the_host_decides_throughput_as_seen_is_refused_after_one_launch():
    for found in ended("seen, the host decides, 15 %", 0.005):
        assert at_least((each.state is None for each in found), 0.98) and fmean(each.minutes for each in found) < 3


def test_launches_that_differ_too_much_are_seen_by_a_calibration_and_not_taken_for_a_difference():
    same, margin, _ = ended(SEEN, study.TOO_FAR_APART, calibrates=True)
    assert at_least((each.state is None for each in same), 0.75)
    assert at_least((each.state is not State.FAILS for each in same), 0.99)
    assert at_least((each.state is not State.PASSES for each in margin), 0.98)
