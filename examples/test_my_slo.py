"""A service-level objective: 95 % of the requests have their first token within 200 ms and then 50 ms per token."""

import pytest

SLO = "ttft:200ms,tpot:50ms"
IN_FLIGHT = 64  # as many as the service has to serve at once


@pytest.mark.slm(model="opt-1.3b", lengths=(512, 256))
def test_slo(slm_measure):
    point = slm_measure(concurrency=IN_FLIGHT)
    assert point.valid, point.problems
    goodput = point.goodput(SLO)
    assert goodput.attainment >= 0.95, goodput.by_slo


@pytest.mark.slm(model="opt-1.3b", lengths=(512, 256))
def test_the_memory_is_enough(slm_sweep):
    """The KV cache holds twice the load."""
    assert slm_sweep(concurrency=[IN_FLIGHT]).kv_capacity >= 2 * IN_FLIGHT
