"""Throughput against the number of KV blocks, at one large load: what the memory of a GPU is worth.

The same requests, all at once, on engines whose KV cache holds only some of them at full length; and on one that holds
them all and more. Below, the engine runs a smaller batch than it is asked for, and preempts requests whose tokens
outgrow it: arXiv:2404.03353 and arXiv:2503.08311 give every model all the memory there is.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

JOBS = {
    "gpu": [
        {"model": "opt-1.3b", "requests": 256, "lengths": (512, 256), "kv_requests": held}
        for held in (8, 16, 32, 64, 128, 256, None)
    ],
    "cpu": [{"model": "opt-tiny", "requests": 64, "lengths": (120, 32), "kv_requests": held} for held in (8, None)],
}


@pytest.mark.slm(jobs=JOBS)
def test_job(slm_job_point):
    """It is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="throughput-grows-with-kv-blocks", jobs=JOBS)
def test_throughput_grows_until_the_batch_fits(slm_claim):
    """And no more from there, where nothing is preempted either."""
    assert slm_claim()
