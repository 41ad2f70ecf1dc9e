"""LoRA adapters, one for each request: their cost, and the cost of too few slots for them.

The same requests arrive at once for the model alone, one adapter, and many adapters of a low and a higher rank, each
with a slot. Then many adapters share fewer slots. As in the papers, the engine is vLLM and adapters are generated, but
the papers' models are larger.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

LARGE = {"model": "llama-3.2-1b", "requests": 256, "lengths": (128, 128)}
SMALL = {"model": "opt-tiny", "requests": 64, "lengths": (32, 16)}
JOBS = {
    "gpu": [
        LARGE,
        {**LARGE, "lora": (1, 8), "max_loras": 64},
        {**LARGE, "lora": (8, 8), "max_loras": 64},
        {**LARGE, "lora": (64, 8), "max_loras": 64},
        {**LARGE, "lora": (64, 64), "max_loras": 64},
        {**LARGE, "lora": (64, 8), "max_loras": 8},
    ],
    "cpu": [
        SMALL,
        {**SMALL, "lora": (1, 8), "max_loras": 16},
        {**SMALL, "lora": (4, 8), "max_loras": 16},
        {**SMALL, "lora": (16, 8), "max_loras": 16},
        {**SMALL, "lora": (16, 64), "max_loras": 16},
        {**SMALL, "lora": (16, 8), "max_loras": 2},
    ],
}


@pytest.mark.slm(jobs=JOBS)
def test_job(slm_job_point):
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="adapters-cost-throughput", jobs=JOBS)
def test_adapters_cost_throughput(slm_claim):
    """Throughput is higher for the model alone than with any adapters."""
    assert slm_claim()


@pytest.mark.slm(claim="more-adapters-serve-less", jobs=JOBS)
def test_more_adapters_serve_less(slm_claim):
    """Throughput is lower with many adapters than with one, on the same number of slots."""
    assert slm_claim()


@pytest.mark.slm(claim="a-higher-rank-serves-less", jobs=JOBS)
def test_a_higher_rank_serves_less(slm_claim):
    """Throughput is lower with adapters of a higher rank, for the same number of adapters."""
    assert slm_claim()


@pytest.mark.slm(claim="too-few-slots-starve-requests", jobs=JOBS)
def test_too_few_slots_starve_requests(slm_claim):
    """Throughput is lower with slots for only some of the adapters than with a slot for each."""
    assert slm_claim()
