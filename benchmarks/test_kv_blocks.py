"""Throughput over the number of KV blocks at one large load: the value of GPU memory.

The same requests arrive at once at engines whose KV cache has room for only some of them at full length, and at one
with room for all. A smaller cache makes the batch smaller, and requests are preempted. arXiv:2404.03353 and
arXiv:2503.08311 give all memory to every model.
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
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="throughput-grows-with-kv-blocks", jobs=JOBS)
def test_throughput_grows_until_the_batch_fits(slm_claim):
    """Throughput grows with the KV blocks until all requests fit; then it is flat, and nothing is preempted."""
    assert slm_claim()
