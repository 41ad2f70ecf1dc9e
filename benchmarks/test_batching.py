"""Ways to batch, side by side on one model: each request alone, static and dynamic batches, continuous batching.

All ways get the same requests, whose outputs differ in length as those of conversations do. Transformers' generate()
serves batches one after the other: a batch lasts as long as its longest output, and its prompts are padded. vLLM makes
a new batch at every step, with as many sequences at once. So both the way to batch and the engine differ.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

WAYS = ("none", "static", "dynamic", None)  # None: continuous, by vLLM
TOGETHER = {"model": "opt-1.3b", "requests": 64, "shorter": 4, "max_num_seqs": 16}
SMALL = {"model": "opt-tiny", "requests": 24, "shorter": 16, "max_num_seqs": 8}
JOBS = {
    "gpu": [{**TOGETHER, "batching": way} for way in WAYS]
    + [{**TOGETHER, "batching": way, "rate": 2} for way in WAYS if way != "none"],
    "cpu": [{**SMALL, "batching": way} for way in ("none", "static", None)]
    + [{**SMALL, "batching": way, "rate": 8} for way in ("static", "dynamic")],
}


@pytest.mark.slm(jobs=JOBS)
def test_job(slm_job_point):
    """The job is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="continuous-batching-serves-most", jobs=JOBS)
def test_continuous_batching_serves_most(slm_claim):
    """It serves more than any other way if all requests are there from the beginning."""
    assert slm_claim()


@pytest.mark.slm(claim="dynamic-batching-answers-sooner", jobs=JOBS)
def test_dynamic_batches_answer_sooner_than_static_ones(slm_claim):
    """If requests come one by one, a static batch waits until it is full."""
    assert slm_claim()
