"""Engines on the GPUs of one host: do they disturb each other, because they share its CPU and memory?

With `--slm-ray local` each GPU has an engine. At the end, two points of each model are measured again without others.
If they differ by more than the margin, points with and without neighbors must not be compared.
"""

import pytest


@pytest.mark.slm(claim="neighbours-do-not-disturb")
def test_a_cell_is_the_same_alone_and_beside_others(slm_alone, slm_claim):
    """The smallest and the largest load perform the same alone as next to other engines."""
    slm_alone()
    assert slm_claim()
