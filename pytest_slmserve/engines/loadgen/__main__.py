"""A load generator in its own process: JSON lines in, JSON lines out, over an inherited socket.

    python loadgen/__main__.py FD PARENT_PID

The first line in names the server: `url`, `headers`, and `timeout_s` of a request. Then `load` hands over the bodies,
and `run` a load; `close` ends it, unanswered. Lines out: `ready` or `failed`, `loaded`, `progress`, `done`. A run that
is one of several at once has a time at which it begins (`at`), sends `settled`, and gets its window by `open`. All
times are `time.monotonic()`.

A load is a `closed_loop`, as the engine's worker has it, or an `open_loop`: a `schedule` of seconds since the
beginning, and a `window` in it. `done` has `began`, `window`, `on_schedule`, `first_failure`, the rows `failed`,
`unsent`, `waited`, `client_cpu_s`, the results of load_run.py, and `doubt_s`: by how much the stamps of a piece's
chunks can be wrong, on the average and at most. It is 0 for a piece that is one chunk.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress

from pytest_slmserve.engines.loadgen.load_run import StreamingClient
from pytest_slmserve.engines.worker.slm_process import Ended, Lines, guarded


def _main() -> None:
    """Serve the parent's messages until one is `close`, or the parent is gone; `failed` if the client cannot start."""
    descriptor, parent = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)
    with guarded(parent), suppress(Ended):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each request in flight
        lines = Lines(socket.socket(fileno=descriptor))
        try:
            client = StreamingClient(lines, lines.hear() or {})
        except (ValueError, OSError) as error:
            return lines.say(event="failed", cause=f"{error}")
        lines.say(event="ready")
        while (message := lines.hear()) and message["op"] != "close":
            match message["op"]:
                case "load":
                    lines.say(**client.load(message))
                case "run":
                    lines.say(**client.run(message))
                # not "open", of a run that ended before it heard of its window


if __name__ == "__main__":
    _main()
