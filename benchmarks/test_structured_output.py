"""Structured output: its cost compared with free text.

One engine serves the same requests as free text, and as JSON of a schema, with documents as long as requested. Each
grammar masks the tokens of every step, over a vocabulary of 128,256.
"""

import pytest

pytestmark = pytest.mark.slm_suite("all")

MODEL = "llama-3.2-1b"
FORMATS = ("", "json")


@pytest.mark.slm(points=[(MODEL, 16), (MODEL, 256)], lengths=(256, 256), response_format=FORMATS, needs="gpu")
def test_point_of_a_format(slm_point):
    """The measurements of the point can be trusted, and no output ended early."""
    assert slm_point.measure()


@pytest.mark.slm(claim="structured-output-costs-little", models=[MODEL], needs="gpu")
def test_structured_output_costs_little(slm_claim):
    """Throughput of JSON is at least nine tenths of that of free text."""
    assert slm_claim()
