"""Stored baseline: is this run slower than measurements of another day (`--slm-baseline`)?

This is cheaper than a gate, and weaker, because a slower day looks like a slower release. So each interval is widened
by the observed differences between launches and hosts.
"""


def test_no_worse_than_the_baseline(slm_against_baseline):
    """Throughput and latency are within the tolerance, at every load that both have measured."""
    assert slm_against_baseline()
