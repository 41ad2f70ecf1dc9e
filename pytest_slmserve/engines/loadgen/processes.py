"""Several client processes that share one load, where one core is not enough: told as one."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pytest_slmserve.engines.loadgen.connection import Bodies, target_of
from pytest_slmserve.engines.loadgen.load_run import LoadRun, merged_columns, parts_of
from pytest_slmserve.engines.loadgen.streams import Streams
from pytest_slmserve.engines.worker.slm_pacing import shared_window_s
from pytest_slmserve.engines.worker.slm_process import Ended, Lines

BEGIN_S, OPEN_S = 0.2, 0.1  # from saying when to begin, or to open the window, to doing so: all have heard it by then
PHASES = ("ramp", "settle", "window", "over")
Message = dict[str, Any]


class Parts:
    """Forks its processes when made: each serves its end of a socket as a client that is alone would, on its own part
    of the cores. They die with the group, and end when their socket is closed."""

    def __init__(self, lines: Lines, greeting: Message, processes: int, serve: Callable[[socket.socket], None]) -> None:
        self.lines = lines
        self._pids: list[int] = []
        self._parts: list[Lines] = []
        for cores in client_cores(processes):
            self._parts.append(Lines(self._fork(cores, serve)))
        for part in self._parts:
            part.say(**{**greeting, "processes": 1})
        for answer in self._hear_all(self._parts):
            if answer["event"] == "failed":
                raise ValueError(answer["cause"])

    def _fork(self, cores: Sequence[int], serve: Callable[[socket.socket], None]) -> socket.socket:
        ours, theirs = socket.socketpair()
        if pid := os.fork():
            theirs.close()
            self._pids.append(pid)
            return ours
        status = 1
        try:
            for end in (ours, self.lines.end, *(part.end for part in self._parts)):
                end.close()
            os.sched_setaffinity(0, cores)
            serve(theirs)
            status = 0
        finally:
            os._exit(status)

    def load(self, message: Message) -> Message:
        for part in self._parts:
            part.say(**message)
        return self._hear_all(self._parts)[0]

    def run(self, message: Message) -> Message:
        load, at = message["load"], message.get("at")
        loads = parts_of(load, len(self._parts))
        begins = at or time.monotonic() + BEGIN_S
        busy = self._parts[: len(loads)]
        for part, mine in zip(busy, loads):
            part.say(op="run", load=mine, at=begins)
        return ProcessesRun(self.lines, busy, load, begins, gated=at is not None).result()

    def _hear_all(self, parts: Sequence[Lines]) -> list[Message]:
        return [message for part in parts if (message := part.hear())]

    def close(self) -> None:
        for part in self._parts:
            part.end.close()
        for pid in self._pids:
            os.waitpid(pid, 0)


class ProcessesRun:
    """One run of several processes: their progress as one, and one window for all of them."""

    def __init__(self, lines: Lines, parts: Sequence[Lines], load: Message, begins: float, gated: bool) -> None:
        self.lines, self.parts, self.load, self.begins, self.gated = lines, parts, load, begins, gated
        self._progress: dict[int, Message] = {}
        self._done: dict[int, Message] = {}
        self._settled: set[int] = set()
        self._opened = False

    def result(self) -> Message:
        ends = {part.end: index for index, part in enumerate(self.parts)}
        while len(self._done) < len(self.parts):
            for end in select.select([*ends], [], [])[0]:
                index = ends[end]
                while message := self.parts[index].hear(0.0):
                    self._take(index, message)
        parts = [self._done[index] for index in sorted(self._done)]
        return {
            "event": "done",
            "began": parts[0]["began"],
            "window": [min(p["window"][0] for p in parts), max(p["window"][1] for p in parts)],
            **merged_columns(parts),
        }

    def _take(self, index: int, message: Message) -> None:
        match message["event"]:
            case "progress":
                self._progress[index] = message
                if index == min(set(range(len(self.parts))) - self._done.keys()):
                    self.lines.say(**self._summed())
            case "settled":
                self._settled.add(index)
                self._open()
            case "done":
                self._done[index] = message
                self._open()

    def _summed(self) -> Message:
        told = self._progress.values()
        sums = {name: sum(m[name] for m in told) for name in ("done", "in_flight", "tokens_per_s")}
        phase = min((m["phase"] for m in told), key=PHASES.index)
        return {"event": "progress", "phase": phase, "elapsed_s": max(m["elapsed_s"] for m in told), **sums}

    def _open(self) -> None:
        """Open the common window once all processes have settled, except those that have ended. The parent sets the
        window where this run is one of several."""
        waiting = self._settled - self._done.keys()
        if self._opened or not waiting or len(self._settled | self._done.keys()) < len(self.parts):
            return
        self._opened = True
        window: Any = None
        if self.gated:
            self.lines.say(event="settled")
            message = self.lines.hear()
            window = message["window"] if message else None
        opens = time.monotonic() + OPEN_S
        window = window or (opens, opens + shared_window_s(self.load, opens - self.begins))
        for index in waiting:
            self.parts[index].say(op="open", window=window)


def client_cores(processes: int) -> list[list[int]]:
    """Parts of the cores that may be used: of equal size, or all of them for each where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[index::processes] if len(cores) >= processes else cores for index in range(processes)]


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


def serve_parent(end: socket.socket) -> None:
    """Serve the parent's messages until one is `close`, or the parent is gone; `failed` if the client cannot start."""
    lines = Lines(end)
    try:
        greeting = lines.hear()
        assert greeting
        client = start_client(lines, greeting)
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


def start_client(lines: Lines, greeting: Message) -> StreamingClient | Parts:
    processes = greeting["processes"]
    return StreamingClient(lines, greeting) if processes == 1 else Parts(lines, greeting, processes, serve_parent)
