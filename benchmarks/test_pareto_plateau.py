"""Throughput reaches a Pareto plateau within one GPU (arXiv:2404.03353; arXiv:2503.08311, fig. 2).

Requests of 512 prompt and 256 output tokens, greedy, the end-of-text token ignored, no prefix cache: the first paper's
workload. One engine per model, one item per number of concurrent requests; the claims read the points and measure
nothing.
"""

import pytest


def test_point(slm_point):
    """The point is measured, and every measurement of it can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(claim="throughput-plateau")
def test_throughput_reaches_a_plateau(slm_claim):
    """Within the engine's KV capacity, a further doubling of the load gains little."""
    assert slm_claim()


@pytest.mark.slm(claim="gpu-plateau", needs="gpu")
def test_the_gpu_reaches_a_plateau(slm_claim):
    """Per second in which a kernel runs, a further doubling gains little, on whatever host."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="marginal-after-128", models=["opt-125m", "opt-1.3b"], needs="gpu")
def test_throughput_gains_little_after_128(slm_claim):
    """From 128 concurrent requests to 256 throughput gains less than 10 %."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="advised-batch-costs-little")
def test_the_advised_batch_costs_little(slm_claim):
    """The batch that is chosen for twice the latency at 32 serves 90 % of the most."""
    assert slm_claim()


@pytest.mark.slm(claim="latency-rises-past-plateau")
def test_latency_keeps_rising_past_the_plateau(slm_claim):
    """Each doubling of the load past the plateau still raises the mean latency."""
    assert slm_claim()


@pytest.mark.slm(claim="pareto-up-to-plateau")
def test_points_up_to_the_plateau_are_pareto_optimal(slm_claim):
    """Up to the plateau each load is a choice worth having: none beats it in both throughput and latency."""
    assert slm_claim()
