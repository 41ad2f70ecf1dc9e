"""Middleware for vLLM's own server: who does not send our key is not answered.

vLLM has a key of its own, VLLM_API_KEY, but puts all variables of that kind into the hash that names its compile cache,
and into a file in it (`envs.compile_factors`, `compilation/backends.py`; vLLM 0.26): with a random one each start would
compile anew, and leave it on disk. And it leaves the developer endpoint open.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

OPEN = ("/health", "/metrics")


class Guard:
    """Middleware around an ASGI application. The key is that of SLM_KEY, whose name vLLM does not know."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.wanted = f"Bearer {os.environ['SLM_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._knows(dict(scope["headers"])):
            await self.app(scope, receive, send)
            return
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": head})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        return hmac.compare_digest(headers.get(b"authorization", b""), self.wanted)
