"""Conversations of eight turns: the effect of the prefix cache if each prompt contains the earlier turns.

Each turn adds 256 tokens to the prompt and requests 64. With the cache an engine computes only the new tokens and the
previous reply. Users send the next turn at once, or after a pause with ``-o slm_think=5``.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

MODEL = "qwen3-0.6b"


@pytest.mark.slm(points=[(MODEL, 64)], lengths=(256, 64), turns=8, cached=(False, True), needs="gpu")
def test_point_of_conversations(slm_point):
    """The measurements of the point can be trusted, and their hit rate is that of the turns."""
    assert slm_point.measure()


@pytest.mark.slm(claim="prefix-hits-raise-throughput", models=[MODEL], needs="gpu")
def test_the_cache_raises_throughput(slm_claim):
    """Throughput is higher with the cache."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-free-the-gpu", models=[MODEL], needs="gpu")
def test_the_cache_frees_the_gpu(slm_claim):
    """Throughput per second in which a kernel runs is higher with the cache, independent of the host."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-answer-sooner", models=[MODEL], needs="gpu")
def test_the_cache_answers_sooner(slm_claim):
    """Mean TTFT is shorter with the cache."""
    assert slm_claim()
