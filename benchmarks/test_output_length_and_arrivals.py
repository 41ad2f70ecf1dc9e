"""Output lengths from 32 to 256 tokens against arrivals all at once, at 100 and at 10 requests per second.

arXiv:2404.03353, figure 2, right, for OPT-6.7B; and the same for OPT-125M, a model that is small. A job is so many
requests of 512 prompt tokens that arrive independently of each other, served to the end; its throughput is over the
whole of it.
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
    """The job is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(jobs=JOBS)
def test_job(slm_job_point):
    """The job is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="throughput-follows-arrivals", jobs=JOBS)
def test_throughput_follows_arrivals_at_the_lowest_rate(slm_claim):
    """Requests are served as fast as they come, whatever the length of their outputs."""
    assert slm_claim()


@pytest.mark.slm(claim="longer-outputs-fewer-requests", jobs=JOBS)
def test_longer_outputs_are_served_more_slowly(slm_claim):
    """If all requests come at once, eight times the output costs a good part of the requests per second."""
    assert slm_claim()


@pytest.mark.slm(claim="longer-outputs-shrink-the-batch", jobs=JOBS)
def test_longer_outputs_shrink_the_batch(slm_claim):
    """If all requests come at once, fewer of them are in the engine's batch in the mean."""
    assert slm_claim()


@pytest.mark.slm(claim="longer-outputs-wait-slightly-longer", jobs=JOBS)
def test_longer_outputs_wait_slightly_longer(slm_claim):
    """If all requests come at once, one with eight times the output lasts at most half as long again."""
    assert slm_claim()


@pytest.mark.slm(claim="all-at-once-waits-longer", jobs=JOBS)
def test_all_at_once_wait_longer(slm_claim):
    """At every length, requests that come all at once last longer than those of the lowest rate."""
    assert slm_claim()
