"""--slm-ramp-up: staggered over one request's lifetime, or a burst as of a batch job."""

from inside import usage_error

from pytest_slmserve.analysis.metrics.window import window_steps


def sent_within_a_step(measurement):
    """Requests sent before the first step ended."""
    first = measurement.run.steps.time_s[0]
    return sum(sent < first for sent in measurement.run.samples.sent_s)


def test_spread_starts_one_at_a_time(sweep, archive):
    sweep("--slm-concurrency=64").assert_outcomes(passed=1)
    assert [sent_within_a_step(m) for m in archive().measurements] == [1, 1]


def test_together_starts_all_and_measures_whole_periods(sweep, archive):
    sweep("--slm-concurrency=64", "--slm-ramp-up=burst")
    for measurement in archive().measurements:
        assert sent_within_a_step(measurement) == 64
        assert (len(window_steps(measurement.run)) - 1) % 257 == 0


def test_other_words_are_refused(sweep):
    assert "staggered or burst" in usage_error(sweep("--slm-ramp-up=random"))
