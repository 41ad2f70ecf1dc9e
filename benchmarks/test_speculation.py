"""Speculative decoding: below which batch b* it gains, and above which it costs.

Each load of the sweep on two engines that differ in nothing else: one drafts tokens and checks them in its steps, the
other does not. How tokens are drafted is said by `--slm-engine-arg speculative_config=JSON`; without it, n-grams of the
text so far are. What dummy weights accept says nothing of real text: `--slm-load-format auto` measures real weights.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")


@pytest.mark.slm(speculation=(False, True), needs="own-engine")
def test_point(slm_point):
    """The point is measured, and every measurement of it can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(claim="speculation-gains-at-the-smallest-load", needs="own-engine")
def test_speculation_gains_at_the_smallest_load(slm_claim):
    """It serves more than the same engine without it."""
    assert slm_claim()


@pytest.mark.slm(claim="speculation-costs-beyond-a-load", needs="own-engine")
def test_speculation_costs_beyond_a_load(slm_claim):
    """There is a b* within the loads, below which it gains, and above which it costs."""
    assert slm_claim()
