"""Is this run slower than records of another day? (`--slm-baseline`)

Cheaper than a gate, and weaker: a slower day cannot be told from a slower release. So every interval is widened by what
launches and hosts were seen to differ by.
"""


def test_no_worse_than_the_baseline(slm_against_baseline):
    """At every load that both have measured, throughput and latency are within the tolerance."""
    assert slm_against_baseline()
