"""Throughput against the number of KV blocks, at one large load: what the memory of a GPU is worth.

The same requests come all at once to engines whose KV cache holds only some of them at full length, and to one whose
cache holds all of them and more. With a smaller cache the engine runs a smaller batch, and preempts requests whose
tokens outgrow it. arXiv:2404.03353 and arXiv:2503.08311 give every model all the memory there is.
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
    """The job is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="throughput-grows-with-kv-blocks", jobs=JOBS)
def test_throughput_grows_until_the_batch_fits(slm_claim):
    """With more blocks than that it grows no further, and nothing is preempted."""
    assert slm_claim()
