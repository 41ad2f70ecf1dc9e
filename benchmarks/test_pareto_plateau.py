"""Throughput reaches a Pareto plateau within one GPU (arXiv:2404.03353; arXiv:2503.08311, figure 2).

The workload is that of the first paper: 512 prompt and 256 output tokens, greedy, without end-of-text and prefix cache.
Each model has one engine, and each concurrency is one item. The claims read the points and measure nothing.
"""

import pytest


def test_point(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(claim="throughput-plateau")
def test_throughput_reaches_a_plateau(slm_claim):
    """Throughput gains little from a further doubling of the load within the engine's KV capacity."""
    assert slm_claim()


@pytest.mark.slm(claim="gpu-plateau", needs="gpu")
def test_the_gpu_reaches_a_plateau(slm_claim):
    """Throughput per second in which a kernel runs gains little from a further doubling, on any host."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="marginal-after-128", models=["opt-125m", "opt-1.3b"], needs="gpu")
def test_throughput_gains_little_after_128(slm_claim):
    """Throughput gains less than 10% from 128 to 256 concurrent requests."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="advised-batch-costs-little")
def test_the_advised_batch_costs_little(slm_claim):
    """The batch for at most twice the latency at 32 has 90% of the highest throughput."""
    assert slm_claim()


@pytest.mark.slm(claim="latency-rises-past-plateau")
def test_latency_keeps_rising_past_the_plateau(slm_claim):
    """Each doubling of the load past the plateau still raises mean latency."""
    assert slm_claim()


@pytest.mark.slm(claim="pareto-up-to-plateau")
def test_points_up_to_the_plateau_are_pareto_optimal(slm_claim):
    """No load up to the plateau is worse than another one in both throughput and latency."""
    assert slm_claim()
