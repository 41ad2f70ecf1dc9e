"""Who does not send our key gets no answer from the server behind it."""

import asyncio
from typing import Any

import pytest

from pytest_slmserve.engines.worker.vllm_serve import Guard

KEY = (b"authorization", b"Bearer a-key")


@pytest.fixture
def asked(monkeypatch):
    """The status of an answer, and whether the application behind was reached."""
    monkeypatch.setenv("SLM_KEY", "a-key")

    def ask(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> tuple[int | None, bool]:
        reached, sent = [], list[dict[str, Any]]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            reached.append(scope["path"])

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(Guard(app)({"type": kind, "path": path, "headers": list(headers)}, None, send))
        return (sent[0]["status"] if sent else None), bool(reached)

    return ask


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc", "/healthy", "/"])
def test_without_the_key_nothing_behind_it_is_reached(asked, path):
    for headers in ((), ((b"authorization", b"Bearer another"),), ((b"authorization", b"a-key"),), ((b"x", KEY[1]),)):
        assert asked(path, *headers) == (401, False)
    assert asked(path, (b"accept", b"*/*"), KEY) == (None, True)


@pytest.mark.parametrize(("path", "kind"), [("/health", "http"), ("/metrics", "http"), ("/", "lifespan")])
def test_what_says_nothing_of_requests_is_open(asked, path, kind):
    assert asked(path, kind=kind) == (None, True)
