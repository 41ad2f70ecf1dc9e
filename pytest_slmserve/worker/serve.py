"""Becomes vLLM's own server, after it has started the guardian of this process group.

    python serve.py ARGUMENTS... FD PARENT_PID

The descriptor is what every child of ours is given; a server is spoken to by HTTP and needs none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    *arguments, descriptor, parent = sys.argv[1:]
    os.close(int(descriptor))
    guardian = str(Path(__file__).with_name("guardian.py"))
    subprocess.Popen([sys.executable, "-I", "-S", guardian, parent, str(os.getpid())], stdin=subprocess.DEVNULL)
    server = [sys.executable, "-u", "-m", "vllm.entrypoints.openai.api_server", *arguments]
    os.execv(sys.executable, server)


if __name__ == "__main__":
    main()
