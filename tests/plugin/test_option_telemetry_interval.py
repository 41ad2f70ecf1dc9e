"""--slm-telemetry-interval: how often the sensors are read."""

import pytest
from inside import usage_error

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.telemetry.source import open_sampler


@pytest.mark.parametrize("interval", [0.1, 0.25, 2.0])
def test_the_sampler_keeps_it(interval):
    sampler, _ = open_sampler("host", "cpu", interval)
    assert sampler.interval_s == interval
    sampler.close()


def test_one_too_short_for_the_counters_is_refused_before_anything_is_opened():
    with pytest.raises(BadUsage, match="0.05 s: below 0.1 s"):
        open_sampler("gpm", "GPU-not-there", 0.05)


def test_the_command_line_refuses_it_too(sweep, pytester):
    assert "not a positive number" in usage_error(sweep("--slm-telemetry-interval=0"))
