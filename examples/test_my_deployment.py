"""A deployment: the largest batch within a latency limit, and the memory that it needs."""

import pytest


@pytest.mark.slm(model="opt-1.3b")
def test_deployment(slm_sweep, slm_advice):
    slm_sweep(concurrency=[1, 16, 32, 64, 128, 256])
    advice = slm_advice(slo_itl="2x@32")  # at most twice the time per token at concurrency 32
    assert advice.batch is not None, advice.decision.reason
    assert advice.batch >= 32
    assert advice.needs.kv_bytes < 40 * 2**30
