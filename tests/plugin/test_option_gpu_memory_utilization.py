"""--slm-gpu-memory-utilization: a smaller share leaves less room for the KV cache, and so cuts the sweep."""

import pytest
from inside import SWEEP, usage_error


def largest(pytester, share):
    pytester.makepyfile(SWEEP)
    args = ("--slm-simulate", "--slm-models=opt-2.7b", "--slm-plan", f"--slm-gpu-memory-utilization={share}")
    result = pytester.runpytest_inprocess(*args)
    assert result.ret == 0
    lines = [line for line in result.outlines if "test_point[" in line]
    return int(lines[-1].split("opt-2.7b-")[1].split("]")[0])


def test_a_smaller_share_cuts_the_sweep(pytester):
    assert largest(pytester, 0.9) == 256
    assert largest(pytester, 0.2) == 64


def test_a_share_that_leaves_no_room_is_refused(sweep):
    assert "no room for a KV cache" in usage_error(sweep("--slm-gpu-memory-utilization=0.01"))


@pytest.mark.parametrize("share", ["0", "1.5", "half"])
def test_what_is_no_share_is_refused(sweep, share):
    assert "--slm-gpu-memory-utilization" in usage_error(sweep(f"--slm-gpu-memory-utilization={share}"))
