"""--slm-timeout is how long a request to an endpoint may last, the first one too."""

from __future__ import annotations

import socket
import time

import pytest
from inside import usage_error


def test_a_server_that_does_not_answer_is_not_waited_for_longer(pytester):
    pytester.makepyfile("def test(slm_measure): assert slm_measure(1).valid")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions"
        began = time.monotonic()
        text = usage_error(pytester.runpytest_inprocess(f"--slm-endpoint={url}", "--slm-models=m", "--slm-timeout=0.5"))
        assert f"{url} does not answer: timed out" in text and time.monotonic() - began < 30


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_what_is_no_duration_is_refused(pytester, seconds):
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate", f"--slm-timeout={seconds}"))
    assert "is not a positive number" in text
