"""Number of KV blocks, predicted from the model configuration, so that capacities can be planned."""

import pytest


@pytest.mark.slm(claim="kv-blocks-as-predicted", needs="own-engine")
def test_engine_has_the_predicted_kv_blocks(slm_claim):
    """Every launch of this run has the predicted number within two blocks."""
    assert slm_claim()
