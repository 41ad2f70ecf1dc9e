"""Engines on the GPUs of one host share its CPU and its memory: do they disturb each other?

With `--slm-ray local` an engine measures on each GPU. When all are through, two cells of each model are measured once
more, alone. Where they differ by more than the margin, what was measured beside others must not be compared with what
was measured alone.
"""

import pytest


@pytest.mark.slm(claim="neighbours-do-not-disturb")
def test_a_cell_is_the_same_alone_and_beside_others(slm_alone, slm_claim):
    """Its smallest and its largest load."""
    slm_alone()
    assert slm_claim()
