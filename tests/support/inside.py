"""What the tests of the plugin share: a file for the inner run, its arguments, and how to read a usage error.

Not in conftest.py, because several folders have one and `import conftest` finds the first.
"""

from __future__ import annotations

import re

import pytest

SWEEP = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()
"""
# Tables, for most tests look at what they say.
ALL_OF_IT = "--slm-report=tables"
SMALL = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=1,16,64,128,256", "--slm-window=1", ALL_OF_IT)
GATE = (  # steps of some 10 ms, so that a window has a hundred
    "--slm-simulate",
    "--slm-gate",
    ALL_OF_IT,
    "--slm-models=opt-125m",
    "--slm-concurrency=4,16",
    "--slm-window=1",
    "--slm-input-len=64",
    "--slm-output-len=32",
    "--slm-engine-arg=t_inf=2000",
    "--slm-engine-arg=b_half=16",
    "--slm-engine-arg=memory_used=8e9",
    "--slm-engine-arg=scatter=0",  # equal launches are equal
    "-p",
    "no:cacheprovider",
)
ENDPOINTS = ("throughput", "latency", "energy", "start", "kv-blocks", "memory")
ONE = ("--slm-simulate", "--slm-models=opt-125m", "--slm-window=2", ALL_OF_IT, "-p", "no:cacheprovider")


def usage_error(result):
    """The one sentence of a usage error; fails if the run ended in another way."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str() + result.stderr.str()
    text = result.stderr.str()
    assert "Traceback" not in text
    return text


def outcomes(result):
    """The outcome of each test of a run with `-v`, by its name, in the order in which they ran."""
    lines = (re.match(r"\S+::(\S+) ([A-Z]+)", line) for line in result.outlines)
    return {found[1]: found[2] for found in lines if found}
