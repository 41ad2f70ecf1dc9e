"""Throughput and latency over the engine's batch limit, within an A100's 40 GiB (arXiv:2404.03353, figure 1, table 1).

500 requests of 512 prompt and 256 output tokens come at once, and `max_num_seqs` bounds the batch. The limits of the
larger models end at their batch of table 1: above it, the KV cache decides. `--slm-interface server` sends them by
HTTP, as the paper does.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

SMALL = ("opt-125m", "opt-1.3b", "opt-2.7b")
LIMITS = {**dict.fromkeys(SMALL, (64, 128, 256, 512)), "opt-6.7b": (16, 32, 64), "opt-13b": (4, 8, 16)}
JOBS = {
    "gpu": [
        {"model": model, "requests": 500, "lengths": (512, 256), "max_num_seqs": limit, "gpu_memory": "40GiB"}
        for model, limits in LIMITS.items()
        for limit in limits
    ]
}


@pytest.mark.slm(jobs=JOBS, needs="gpu")
def test_job_within_40_gib(slm_job_point):
    """The job is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="batch-limit-reaches-a-plateau", jobs=JOBS, models=SMALL, needs="gpu")
def test_throughput_reaches_a_plateau(slm_claim):
    """The last doubling of the batch limit gains little."""
    assert slm_claim()


@pytest.mark.slm(claim="batch-limit-gains-little-after-128", jobs=JOBS, models=SMALL[:2], needs="gpu")
def test_throughput_gains_little_after_128(slm_claim):
    """Each further doubling gains less than 10 %."""
    assert slm_claim()


@pytest.mark.slm(claim="batch-limit-costs-latency", jobs=JOBS, needs="gpu")
def test_a_larger_batch_costs_latency(slm_claim):
    """From where throughput gains little, mean E2E rises."""
    assert slm_claim()
