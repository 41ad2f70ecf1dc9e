"""A small model leaves most of the GPU unused even at the largest load, and GPU utilization does not show it.

arXiv:2404.03353, figures 3 and 8; arXiv:2503.08311, figures 5 and 6. The claims read the sensor data of the sweeps of
test_pareto_plateau.py and of the points of test_energy_per_token.py.
"""

import pytest


@pytest.mark.slm(claim="occupancy-below-a-saturated-kernel", needs="gpu")
def test_most_warps_are_missing_at_the_largest_load(slm_claim):
    """Mean SM occupancy at the largest load is below that of a kernel that saturates the GPU."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="maximum-occupancy-is-low", needs="gpu")
def test_maximum_occupancy_barely_reaches_40_percent(slm_claim):
    """SM occupancy never exceeds 40%, at any load."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="maximum-sm-activity-reaches-the-limit", needs="gpu")
def test_maximum_sm_activity_reaches_the_limit(slm_claim):
    """At least nine of ten SMs are active at once at some time at the largest load."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="sm-activity-stays-low", needs="gpu")
def test_average_sm_activity_stays_low(slm_claim):
    """Fewer than half of the SMs are active on average, at every load."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="host-takes-at-most-half", needs="gpu")
def test_the_host_takes_at_most_half(slm_claim):
    """No kernel runs on the GPU for at most half of the time, at every load."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="gpu-util-falls-at-the-largest-load", needs="gpu")
def test_gpu_utilisation_falls_at_the_largest_load(slm_claim):
    """GPU utilization is lower at the largest load than with a single request."""
    assert slm_claim()


@pytest.mark.slm(claim="gpu-util-saturates-first", needs="gpu")
def test_gpu_utilisation_proves_nothing(slm_claim):
    """GPU utilization is nearly full at a load from which throughput still grows by half or more."""
    assert slm_claim()
