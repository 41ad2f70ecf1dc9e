"""LoRA adapters, of which each request asks for one: what they cost, and what too few slots for them cost.

The same requests come all at once to the model alone, to one adapter and to many, of a low and of a higher rank, with a
slot for each on the device; and to many adapters on fewer slots, which vLLM then serves in turn. The papers' engine is
vLLM too, with made adapters as here; their models are larger.
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
    """The job is served, and every measurement of it can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="adapters-cost-throughput", jobs=JOBS)
def test_adapters_cost_throughput(slm_claim):
    """The model alone serves more than with any of the adapters."""
    assert slm_claim()


@pytest.mark.slm(claim="more-adapters-serve-less", jobs=JOBS)
def test_more_adapters_serve_less(slm_claim):
    """Many serve less than one, on as many slots."""
    assert slm_claim()


@pytest.mark.slm(claim="a-higher-rank-serves-less", jobs=JOBS)
def test_a_higher_rank_serves_less(slm_claim):
    """As many of a higher rank serve less."""
    assert slm_claim()


@pytest.mark.slm(claim="too-few-slots-starve-requests", jobs=JOBS)
def test_too_few_slots_starve_requests(slm_claim):
    """Slots for a part of the adapters serve less than a slot for each."""
    assert slm_claim()
