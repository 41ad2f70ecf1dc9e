"""Whether this run is slower than measurements of another day (`--slm-baseline`).

This is cheaper than a gate, and weaker: a slower day cannot be told from a slower release. So every interval is widened
by the differences that were seen between launches and hosts.
"""


def test_no_worse_than_the_baseline(slm_against_baseline):
    """At every load that both have measured, throughput and latency are within the tolerance."""
    assert slm_against_baseline()
