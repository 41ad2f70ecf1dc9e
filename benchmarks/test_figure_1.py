"""Throughput and latency over the engine's batch limit in 40 GiB of an A100 (arXiv:2404.03353, figure 1, table 1).

500 requests of 512 prompt and 256 output tokens arrive at once, and `max_num_seqs` limits the batch. The limits of the
larger models end at their batch of table 1, because above it the KV cache decides. `--slm-interface server` sends the
requests by HTTP, as the paper does.
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
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="batch-limit-reaches-a-plateau", jobs=JOBS, models=SMALL, needs="gpu")
def test_throughput_reaches_a_plateau(slm_claim):
    """The last doubling of the batch limit gains little throughput."""
    assert slm_claim()


@pytest.mark.slm(claim="batch-limit-gains-little-after-128", jobs=JOBS, models=SMALL[:2], needs="gpu")
def test_throughput_gains_little_after_128(slm_claim):
    """Each doubling of the batch limit above 128 gains less than 10% of throughput."""
    assert slm_claim()


@pytest.mark.slm(claim="batch-limit-costs-latency", jobs=JOBS, needs="gpu")
def test_a_larger_batch_costs_latency(slm_claim):
    """Mean E2E latency rises with the batch limit once throughput gains little."""
    assert slm_claim()
