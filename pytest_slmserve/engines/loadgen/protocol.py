"""The messages between the client and its parent, and the part of one client process in them."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from typing import Any

from pytest_slmserve.engines.loadgen.bodies import Bodies
from pytest_slmserve.engines.loadgen.load_run import LoadRun
from pytest_slmserve.engines.loadgen.processes import Parts
from pytest_slmserve.engines.loadgen.streams import Streams
from pytest_slmserve.engines.loadgen.target import target_of

Message = dict[str, Any]


class Ended(Exception):
    """The error of a socket whose other end was closed."""


class Lines:
    """JSON lines over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = bytearray()

    def say(self, **message: Any) -> None:
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, wait_s: float | None = None) -> Message | None:
        """The next message; None where none came in time. Raises Ended."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not select.select([self.end], [], [], wait_s)[0]:
                return None
            data = self.end.recv(1 << 20)
            if not data:
                raise Ended
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        message: Message = json.loads(line)
        return message

    def hear_now(self) -> Message | None:
        return self.hear(0.0)


class StreamingClient:
    """Sends requests to one server."""

    def __init__(self, lines: Lines, greeting: Message) -> None:
        self.lines = lines
        self.target = target_of(greeting["url"], greeting.get("headers") or {})
        self.streams = Streams(self.target, greeting["timeout_s"])
        self.requests = Bodies(self.target, ())
        self.output_tokens: Sequence[int] = ()

    def load(self, message: Message) -> Message:
        self.requests = Bodies(self.target, message["bodies"], message.get("mark", ""), message.get("rounds", ()))
        self.output_tokens = message["output_tokens"]
        return {"event": "loaded"}

    def run(self, message: Message) -> Message:
        self.requests.begin_anew()
        run = LoadRun(self.streams, self.requests, self.output_tokens, message["load"])
        return run.result(self.lines.say, self.lines.hear_now, message.get("at"))

    def close(self) -> None:
        self.streams.close()


def converse(end: socket.socket) -> None:
    """Start a client and serve the parent's messages until one is `close`, or the parent is gone. A client that cannot
    start reports `failed`."""
    lines = Lines(end)
    try:
        greeting = lines.hear()
        assert greeting
        client = start(lines, greeting)
    except Ended:
        return
    except (ValueError, OSError) as error:
        return lines.say(event="failed", cause=f"{error}")
    lines.say(event="ready")
    try:
        while (message := lines.hear()) and message["op"] != "close":
            lines.say(**(client.load(message) if message["op"] == "load" else client.run(message)))
    except Ended:
        pass
    finally:
        client.close()


def start(lines: Lines, greeting: Message) -> StreamingClient | Parts:
    processes = greeting["processes"]
    return StreamingClient(lines, greeting) if processes == 1 else Parts(lines, greeting, processes, serve_part)


def serve_part(end: socket.socket) -> None:
    converse(end)
