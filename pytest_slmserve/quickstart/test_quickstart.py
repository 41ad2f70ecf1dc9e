"""Three tests to begin with: copy this file, and use your own model and numbers.

pytest --pyargs pytest_slmserve.quickstart --slm-simulate      on a simulated engine: no GPU, no download
"""

import pytest


@pytest.mark.slm(model="opt-125m")
def test_slo(slm_measure):
    """Check a service-level objective: with 64 concurrent requests, 95% of them keep both limits."""
    point = slm_measure(concurrency=64)
    assert point.meets("ttft:200ms,tpot:50ms", share=0.95)


@pytest.mark.slm(model="opt-125m")
def test_plateau(slm_sweep):
    """Check that throughput grows with concurrency until a doubling gains less than 10%."""
    curve = slm_sweep(concurrency=[1, 16, 64, 128, 256])
    assert curve.pareto_plateau(tolerance=0.10)


@pytest.mark.slm(model="opt-125m", gate="simulated")  # on a real engine a gate takes minutes, and --slm-gate
def test_gate(slm_gates):
    """Check that the candidate is not slower than the baseline. Here both are the same engine, launched in turn."""
    assert slm_gates.of("opt-125m").verdict("throughput")
