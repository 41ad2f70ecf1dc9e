"""KV blocks follow from shapes: the engine has what the arithmetic says, so that capacities can be planned."""

import pytest


@pytest.mark.slm(claim="kv-blocks-as-predicted", needs="own-engine")
def test_engine_has_the_predicted_kv_blocks(slm_claim):
    """On every launch of this run the number is the predicted one within two blocks."""
    assert slm_claim()
