"""Speculative decoding: the batch b* below which it gains, and above which it costs.

Two engines measure each load of the sweep. They differ only in that one drafts tokens and checks them.
`--slm-engine-arg speculative_config=JSON` chooses how it drafts (default: n-grams of the text so far). Dummy weights
show nothing about the acceptance of real text, so use `--slm-load-format auto` to measure real weights.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")


@pytest.mark.slm(speculation=(False, True), needs="own-engine")
def test_point(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(claim="speculation-gains-at-the-smallest-load", needs="own-engine")
def test_speculation_gains_at_the_smallest_load(slm_claim):
    """Throughput at the smallest load is higher with speculation."""
    assert slm_claim()


@pytest.mark.slm(claim="speculation-costs-beyond-a-load", needs="own-engine")
def test_speculation_costs_beyond_a_load(slm_claim):
    """Speculation gains below some batch b* within the loads, and costs above it."""
    assert slm_claim()
