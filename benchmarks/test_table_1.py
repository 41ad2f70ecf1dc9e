"""Table 1 of arXiv:2404.03353: the largest batch that fits into 0.9 x 40 GiB, by arithmetic.

test_kv_capacity.py compares the bytes per block that it uses with real engines.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

MODELS = ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b")


@pytest.mark.slm(claim="table-1-batch-fits", models=MODELS)
def test_published_batch_fits_at_full_length(slm_claim):
    """All requests of the published batch have room for their 768 tokens at the same time."""
    assert slm_claim()


@pytest.mark.slm(claim="larger-models-cannot-hold-500", models=MODELS[1:])
def test_larger_models_cannot_hold_500_requests(slm_claim):
    """Fewer than the paper's 500 requests fit at full length."""
    assert slm_claim()


@pytest.mark.slm(claim="table-1-batch-size", models=("opt-1.3b",))
def test_published_size_of_a_batch(slm_claim):
    """512 requests of OPT-1.3B take at most the 25.6 GB of the paper's text."""
    assert slm_claim()


@pytest.mark.slm(claim="table-1-request-size", models=("opt-1.3b",))
def test_published_size_of_a_request(slm_claim):
    """The 50 MB of the paper's text are the size of 256 tokens, not of a request's 768: a factor of 3."""
    assert slm_claim()
