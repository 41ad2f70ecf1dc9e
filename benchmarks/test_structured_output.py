"""Structured output: what it costs against free text.

The same requests ask one engine for free text, and for JSON by a schema whose documents go on for as long as tokens are
asked for. The model has a vocabulary of 128,256 words, over which each grammar masks the tokens of every step.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

MODEL = "llama-3.2-1b"
FORMATS = ("", "json")


@pytest.mark.slm(points=[(MODEL, 16), (MODEL, 256)], lengths=(256, 256), response_format=FORMATS, needs="gpu")
def test_point_of_a_format(slm_point):
    """The point is measured, and every measurement of it can be trusted: no output ended early."""
    assert slm_point.measure()


@pytest.mark.slm(claim="structured-output-costs-little", models=[MODEL], needs="gpu")
def test_structured_output_costs_little(slm_claim):
    """JSON is served at nine tenths of the rate of free text, or more."""
    assert slm_claim()
