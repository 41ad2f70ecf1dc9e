"""Output lengths from 32 to 256 tokens, for arrivals all at once, at 100 and at 10 requests per second.

arXiv:2404.03353, figure 2, right, for OPT-6.7B, and the same for the small OPT-125M. A job is a number of requests of
512 prompt tokens that arrive independently and are served to the end. Its throughput is over the whole job.
"""

import math

import pytest

pytestmark = pytest.mark.slm_suite("papers")

RATES = (math.inf, 100, 10)  # requests per second; infinity: all at once
JOBS = {
    "gpu": [
        {"model": model, "requests": 500, "lengths": (512, tokens), "rate": rate}
        for model in ("opt-6.7b", "opt-125m")
        for tokens in (32, 64, 128, 256)
        for rate in RATES
    ],
    "cpu": [
        {"model": "opt-tiny", "requests": 48, "lengths": (64, tokens), "rate": rate}
        for tokens in (8, 32)
        for rate in (math.inf, 100, 20)
    ],
}


# On the engines of the sweeps.
AT_ONCE = {
    "gpu": [{"model": "opt-125m", "requests": 500, "lengths": (512, 64)}],
    "cpu": [{"model": "opt-tiny", "requests": 48, "lengths": (64, 32)}],
}


@pytest.mark.slm_suite("core")
@pytest.mark.slm(jobs=AT_ONCE)
def test_job_at_once(slm_job_point):
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(jobs=JOBS)
def test_job(slm_job_point):
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="throughput-follows-arrivals", jobs=JOBS)
def test_throughput_follows_arrivals_at_the_lowest_rate(slm_claim):
    """Throughput equals the arrival rate, at every output length."""
    assert slm_claim()


@pytest.mark.slm(claim="longer-outputs-fewer-requests", jobs=JOBS)
def test_longer_outputs_are_served_more_slowly(slm_claim):
    """Requests per second fall considerably with eight times the output, if all requests arrive at once."""
    assert slm_claim()


@pytest.mark.slm(claim="longer-outputs-shrink-the-batch", jobs=JOBS)
def test_longer_outputs_shrink_the_batch(slm_claim):
    """The mean batch is smaller with longer outputs, if all requests arrive at once."""
    assert slm_claim()


@pytest.mark.slm(claim="longer-outputs-wait-slightly-longer", jobs=JOBS)
def test_longer_outputs_wait_slightly_longer(slm_claim):
    """Latency rises by at most half with eight times the output, if all requests arrive at once."""
    assert slm_claim()


@pytest.mark.slm(claim="all-at-once-waits-longer", jobs=JOBS)
def test_all_at_once_wait_longer(slm_claim):
    """Latency is higher if all requests arrive at once than at the lowest rate, at every output length."""
    assert slm_claim()
