"""Whether the candidate is slower than the baseline (`--slm-gate`).

Pairs of fresh launches, one of each side, on one device with one client and the same requests, until the outcome is
known. The first of a model's tests runs its gate; the others read what it found. On the CPU two pairs run without that
option too: they decide no speed, and whether both sides have the same KV blocks.
"""

import pytest


@pytest.mark.slm(gate="cpu")
def test_no_worse(slm_gate):
    """The candidate costs no more than the margin allows."""
    assert slm_gate()
