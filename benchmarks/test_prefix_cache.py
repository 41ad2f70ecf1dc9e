"""Prefix cache hits: throughput and TTFT over the share of prompt tokens that are not computed.

Requests have 1,024 prompt and 64 output tokens, so that prompts are most of the work, at the model's batch in
arXiv:2404.03353, table 1. One share of each prompt is common to all, and the rest is unique. A measurement is valid if
the hit rate is the requested one.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

MODEL = "opt-1.3b"
SHARES = (0, 0.5, 0.9)


@pytest.mark.slm(points=[(MODEL, 256)], lengths=(1024, 64), prefix_share=SHARES, needs="gpu")
def test_point_of_a_share(slm_point):
    """The measurements of the point can be trusted, and their hit rate is the requested one."""
    assert slm_point.measure()


@pytest.mark.slm(claim="prefix-hits-raise-throughput", models=[MODEL], needs="gpu")
def test_hits_raise_throughput(slm_claim):
    """Throughput rises with each higher hit rate."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-free-the-gpu", models=[MODEL], needs="gpu")
def test_hits_free_the_gpu(slm_claim):
    """Throughput per second in which a kernel runs rises with each higher hit rate, independent of the host."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-answer-sooner", models=[MODEL], needs="gpu")
def test_hits_answer_sooner(slm_claim):
    """Mean TTFT falls with each higher hit rate."""
    assert slm_claim()
