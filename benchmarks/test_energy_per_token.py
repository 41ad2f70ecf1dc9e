"""Power and energy per output token (arXiv:2404.03353, figure 4): the savings of batching, and the cost of model size.

Each model runs at its largest batch of the paper's table 1. Points that a sweep has measured are not measured again.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

TABLE_1 = [("opt-125m", 512), ("opt-1.3b", 256), ("opt-2.7b", 128), ("opt-6.7b", 64), ("opt-13b", 16)]


@pytest.mark.slm(claim="energy-per-token-falls-with-load", needs="gpu")
def test_a_token_is_cheaper_in_a_large_batch(slm_claim):
    """Energy per token at the largest load is at most half of that at the smallest."""
    assert slm_claim()


@pytest.mark.slm(points=TABLE_1, needs="gpu")
def test_point_of_table_1(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(claim="energy-per-token-grows-with-model", models=[model for model, _ in TABLE_1[1:]], needs="gpu")
def test_a_token_of_a_larger_model_takes_more_energy(slm_claim):
    """Energy per token is higher than for the next smaller model, each at its own largest batch."""
    assert slm_claim()


@pytest.mark.slm(claim="larger-models-draw-more-power", models=["opt-6.7b", "opt-13b"], needs="gpu")
def test_a_larger_model_draws_more_power(slm_claim):
    """Power is a tenth higher than for OPT-1.3B and OPT-2.7B, each at its own largest batch."""
    assert slm_claim()


@pytest.mark.slm(claim="power-rises-slightly-to-13b", models=["opt-13b"], needs="gpu")
def test_power_rises_slightly_to_13b(slm_claim):
    """OPT-13B draws more power than OPT-6.7B, but at most a tenth more, each at its own largest batch."""
    assert slm_claim()
