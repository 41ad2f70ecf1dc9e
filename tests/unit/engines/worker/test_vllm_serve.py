"""Who does not send our key gets no answer from the server behind it."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from pytest_slmserve.engines.worker.vllm_serve import Guard

KEY = (b"authorization", b"Bearer a-key")
REFUSED, REACHED = (401, False), (None, True)
WITHOUT = [[], [(b"authorization", b"Bearer another")], [(b"authorization", b"a-key")], [(b"x", KEY[1])]]


@pytest.mark.parametrize(("kind", "path", "headers", "found"), [
    *(("http", path, headers, REFUSED) for path in ("/v1/completions", "/collective_rpc", "/healthy", "/")
      for headers in WITHOUT),
    *(("http", path, [(b"accept", b"*/*"), KEY], REACHED) for path in ("/v1/completions", "/")),
    *((kind, path, [], REACHED) for kind, path in (("http", "/health"), ("http", "/metrics"), ("lifespan", "/"))),
])  # fmt: skip
def test_request_without_key_is_refused(monkeypatch, kind, path, headers, found):
    monkeypatch.setenv("SLM_KEY", "a-key")
    app, send = AsyncMock(), AsyncMock()
    asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, None, send))
    status = send.call_args_list[0].args[0]["status"] if send.called else None
    assert (status, app.called) == found
