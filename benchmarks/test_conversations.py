"""Conversations of eight turns: what the prefix cache gives users whose every prompt holds the turns before it.

Each turn adds 256 tokens to the prompt and asks for 64. With the cache of prefixes off an engine computes the whole
prompt of each turn, with it on what the turn adds and the reply before it. Users send the next turn at once; ``-o
slm_think=5`` has them think. A measurement is valid if the hit rate is that of the turns.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

MODEL = "qwen3-0.6b"


@pytest.mark.slm(points=[(MODEL, 64)], lengths=(256, 64), turns=8, cached=(False, True), needs="gpu")
def test_point_of_conversations(slm_point):
    """The point is measured, and every measurement of it can be trusted: its hit rate is that of the turns."""
    assert slm_point.measure()


@pytest.mark.slm(claim="prefix-hits-raise-throughput", models=[MODEL], needs="gpu")
def test_the_cache_raises_throughput(slm_claim):
    """With the cache more is served."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-free-the-gpu", models=[MODEL], needs="gpu")
def test_the_cache_frees_the_gpu(slm_claim):
    """With the cache more is served per second in which a kernel runs, whatever the host adds."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-answer-sooner", models=[MODEL], needs="gpu")
def test_the_cache_answers_sooner(slm_claim):
    """With the cache the first token comes sooner, in the mean."""
    assert slm_claim()
