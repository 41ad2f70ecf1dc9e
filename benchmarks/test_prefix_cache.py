"""Hits of the prefix cache: throughput and TTFT over the share of the prompt tokens that are not computed.

Requests of 1,024 prompt and 64 output tokens, so that prompts are most of the work, at the batch of the model in
arXiv:2404.03353, table 1. Each prompt begins as all others do, for so much of it, and is its own from there on. The
engine is one and the same, with its cache on. A measurement is valid if the hit rate is the asked one.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

MODEL = "opt-1.3b"
SHARES = (0, 0.5, 0.9)


@pytest.mark.slm(points=[(MODEL, 256)], lengths=(1024, 64), prefix_share=SHARES, needs="gpu")
def test_point_of_a_share(slm_point):
    """The point is measured, and every measurement of it can be trusted: its hit rate is the asked one."""
    assert slm_point.measure()


@pytest.mark.slm(claim="prefix-hits-raise-throughput", models=[MODEL], needs="gpu")
def test_hits_raise_throughput(slm_claim):
    """At each higher hit rate more is served."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-free-the-gpu", models=[MODEL], needs="gpu")
def test_hits_free_the_gpu(slm_claim):
    """At each higher hit rate more is served per second in which a kernel runs, whatever the host adds."""
    assert slm_claim()


@pytest.mark.slm(claim="prefix-hits-answer-sooner", models=[MODEL], needs="gpu")
def test_hits_answer_sooner(slm_claim):
    """At each higher hit rate the first token comes sooner, in the mean."""
    assert slm_claim()
