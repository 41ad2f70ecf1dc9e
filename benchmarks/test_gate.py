"""Gate: is the candidate slower than the baseline (`--slm-gate`)?

Pairs of fresh launches run on one device with one client and the same requests, until the outcome is known. The first
test of a model runs its gate, and the others read the result. On the CPU two pairs also run without that option, and
judge only whether both sides have the same KV blocks.
"""

import pytest


@pytest.mark.slm(gate="cpu")
def test_no_worse(slm_gate):
    """The candidate is not worse than the margin allows."""
    assert slm_gate()
