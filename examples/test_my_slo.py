"""A service-level objective: 95% of the requests get their first token within 200 ms, and then 50 ms per token."""

import pytest

SLO = "ttft:200ms,tpot:50ms"
CONCURRENCY = 64  # requests that your service has to serve at the same time


@pytest.mark.slm(model="opt-1.3b", lengths=(512, 256))
def test_slo(slm_measure):
    point = slm_measure(concurrency=CONCURRENCY)
    assert point.meets(SLO, share=0.95)


@pytest.mark.slm(model="opt-1.3b", lengths=(512, 256))
def test_memory_is_enough(slm_sweep):
    """The KV cache has room for twice the load."""
    assert slm_sweep(concurrency=[CONCURRENCY]).kv_capacity >= 2 * CONCURRENCY
