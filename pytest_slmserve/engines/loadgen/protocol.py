"""The messages between the client and its parent, and the part of one client process in them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pytest_slmserve.engines.loadgen.load_run import LoadRun
from pytest_slmserve.engines.loadgen.processes import Message, Parts
from pytest_slmserve.engines.loadgen.streams import Streams
from pytest_slmserve.engines.loadgen.target import Bodies, target_of
from pytest_slmserve.engines.worker.slm_lines import Ended, Lines


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
        return run.result(self.say, lambda: self.lines.hear(0.0), message.get("at"))

    def say(self, **message: Any) -> None:
        """Say it, but leave progress out where the parent does not listen: nothing may hold up the streams."""
        if message["event"] != "progress" or self.lines.has_room:
            self.lines.say(**message)

    def close(self) -> None:
        self.streams.close()


def converse(end: socket.socket) -> None:
    """Serve the parent's messages until one is `close`, or the parent is gone; `failed` if the client cannot start."""
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
    answers = {"load": client.load, "run": client.run}  # not to `open`, of a run that ended before it heard of it
    try:
        while (message := lines.hear()) and message["op"] != "close":
            if message["op"] in answers:
                lines.say(**answers[message["op"]](message))
    except Ended as ended:
        if ended.lines is not lines:
            with suppress(Ended):
                lines.say(event="failed", cause="one of the processes that share its load was killed")
    finally:
        client.close()


def start(lines: Lines, greeting: Message) -> StreamingClient | Parts:
    processes = greeting["processes"]
    return StreamingClient(lines, greeting) if processes == 1 else Parts(lines, greeting, processes, converse)
