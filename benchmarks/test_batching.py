"""Ways to batch, compared on one model: single requests, static batches, dynamic batches, continuous batching.

All get the same requests, whose output lengths differ as in conversations. Transformers' generate() serves padded
batches one after the other, each as long as its longest output. vLLM forms a new batch at every step, so both batching
and engine differ.
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
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="continuous-batching-serves-most", jobs=JOBS)
def test_continuous_batching_serves_most(slm_claim):
    """Continuous batching has the highest throughput if all requests arrive at once."""
    assert slm_claim()


@pytest.mark.slm(claim="dynamic-batching-answers-sooner", jobs=JOBS)
def test_dynamic_batches_answer_sooner_than_static_ones(slm_claim):
    """Dynamic batches answer sooner if requests arrive one by one, because a static batch waits until it is full."""
    assert slm_claim()
