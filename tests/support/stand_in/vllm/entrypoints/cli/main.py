"""A stand-in for `vllm serve MODEL ... --api-server-count N`: so many servers behind one port, each with its steps."""

import subprocess
import sys

SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--share-port"]


if __name__ == "__main__":
    command, model, *flags = sys.argv[1:]
    assert command == "serve", "no other is asked for"
    place = flags.index("--api-server-count")
    count = int(flags.pop(place + 1))
    flags.pop(place)
    servers = [subprocess.Popen([*SERVER, "--model", model, *flags]) for _ in range(count)]
    sys.exit(max(server.wait() for server in servers))
