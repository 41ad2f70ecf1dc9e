"""--slm-window is how long a point is measured, after its warm-up."""

import pytest
from inside import usage_error


def test_the_window_is_as_long_as_asked(sweep, archive):
    sweep("--slm-window=3").assert_outcomes(passed=6)
    for measurement in archive().measurements:
        opens, closes = measurement.run.window_s
        assert 3.0 <= closes - opens < 3.2


@pytest.mark.parametrize("window", ["0", "-1", "soon", "inf", "nan"])
def test_what_is_no_duration_is_refused(sweep, window):
    assert "is not a positive number" in usage_error(sweep(f"--slm-window={window}"))
