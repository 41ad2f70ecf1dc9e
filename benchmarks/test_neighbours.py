"""Whether engines on the GPUs of one host disturb each other, because they share its CPU and its memory.

With `--slm-ray local` an engine measures on each GPU. When all have ended, two points of each model are measured once
more, alone. If they differ by more than the margin, points measured next to other engines must not be compared with
points measured alone.
"""

import pytest


@pytest.mark.slm(claim="neighbours-do-not-disturb")
def test_a_cell_is_the_same_alone_and_beside_others(slm_alone, slm_claim):
    """The points are those of the smallest and the largest load."""
    slm_alone()
    assert slm_claim()
