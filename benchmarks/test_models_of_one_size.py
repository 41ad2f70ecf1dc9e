"""Models of similar size from different families: LLaMA-7B, MPT-7B and GPT-J-6B compared with OPT-6.7B.

arXiv:2404.03353, figure 2, left: 500 requests of several output lengths, and batches of 16 to 128 requests. MPT has
biases in its attention (ALiBi), for which vLLM uses its Triton backend here. Releases after 0.28 do not have it. On the
CPU a tiny model shows that another architecture runs.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

MODELS = ("opt-6.7b", "llama-7b", "gpt-j-6b", "mpt-7b")
SIZES = [(16, 256), (32, 256), (64, 256), (128, 256), (500, 32), (500, 64), (500, 128), (500, 256)]
JOBS = {
    "gpu": [
        {"model": model, "requests": requests, "lengths": (512, tokens)}
        for model in MODELS
        for requests, tokens in SIZES
    ],
    "cpu": [{"model": "gpt-j-tiny", "requests": 16, "lengths": (64, 8)}],
}


@pytest.mark.slm(jobs=JOBS)
def test_job(slm_job_point):
    """The measurements of the job can be trusted."""
    assert slm_job_point.measure()


@pytest.mark.slm(claim="alike-at-one-size", jobs=JOBS, models=MODELS[1:])
def test_models_of_one_size_serve_alike(slm_claim):
    """Output tokens/s are within a quarter of those of OPT-6.7B, at every output length and batch."""
    assert slm_claim()
