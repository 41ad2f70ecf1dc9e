"""Several client processes that share one load, if one core is not enough: told as one."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from pytest_slmserve.engines.loadgen.connection import Bodies, target_of
from pytest_slmserve.engines.loadgen.load_run import LoadRun, Message, merged_columns, parts_of
from pytest_slmserve.engines.loadgen.streams import Streams
from pytest_slmserve.engines.worker.slm_pacing import shared_window_s
from pytest_slmserve.engines.worker.slm_process import Ended, Lines

BEGIN_S, OPEN_S = 0.2, 0.1  # from saying when to begin, or to open the window, to doing so: all have heard it by then
PHASES = ("ramp", "settle", "window", "over")


class Parts:
    """Forks its processes when made: each serves its end of a socket as a single client would, on its own part of the
    cores. They die with the group, and end when their socket is closed."""

    def __init__(self, lines: Lines, greeting: Message, serve: Callable[[socket.socket], None]) -> None:
        self.lines = lines
        self._pids: list[int] = []
        self._parts: list[Lines] = []
        cores, processes = sorted(os.sched_getaffinity(0)), greeting["processes"]
        for index in range(processes):  # of equal size, or all cores for each if there are too few
            self._fork(cores[index::processes] if len(cores) >= processes else cores, serve)
        for answer in self._answers(greeting | {"processes": 1}):
            if answer["event"] == "failed":
                raise ValueError(answer["cause"])

    def _fork(self, cores: Sequence[int], serve: Callable[[socket.socket], None]) -> None:
        ours, theirs = socket.socketpair()
        if pid := os.fork():
            theirs.close()
            self._pids.append(pid)
            self._parts.append(Lines(ours))
            return
        status = 1
        try:
            for end in (ours, self.lines.end, *(part.end for part in self._parts)):
                end.close()
            os.sched_setaffinity(0, cores)
            serve(theirs)
            status = 0
        finally:
            os._exit(status)

    def _answers(self, message: Message) -> list[Message]:
        """The answer of each process to this message."""
        for part in self._parts:
            part.say(**message)
        return [answer for part in self._parts if (answer := part.hear())]

    def load(self, message: Message) -> Message:
        return self._answers(message)[0]

    def run(self, message: Message) -> Message:
        """One run of all processes: their progress as one, and one window for all of them. The parent sets the window
        if this run is one of several."""
        load, at = message["load"], message.get("at")
        loads = parts_of(load, len(self._parts))
        parts = self._parts[: len(loads)]
        begins = at or time.monotonic() + BEGIN_S
        for part, mine in zip(parts, loads):
            part.say(op="run", load=mine, at=begins)
        progress: dict[int, Message] = {}
        done: dict[int, Message] = {}
        settled: set[int] = set()
        opened = False
        for index, told in messages_of(parts):
            match told["event"]:
                case "progress":
                    progress[index] = told
                    if index == min(set(range(len(parts))) - done.keys()):
                        each = progress.values()
                        sums = {name: sum(m[name] for m in each) for name in ("done", "in_flight", "tokens_per_s")}
                        phase = min((m["phase"] for m in each), key=PHASES.index)
                        self.lines.say(
                            event="progress", phase=phase, elapsed_s=max(m["elapsed_s"] for m in each), **sums
                        )
                case "settled":
                    settled.add(index)
                case "done":
                    done[index] = told
            waiting = settled - done.keys()
            if waiting and not opened and len(settled | done.keys()) == len(parts):
                opened = True
                opens = time.monotonic() + OPEN_S
                window: Any = opens, opens + shared_window_s(load, opens - begins)
                if at is not None:
                    self.lines.say(event="settled")
                    window = (self.lines.hear() or {})["window"]
                for place in waiting:
                    parts[place].say(op="open", window=window)
        found = [done[index] for index in sorted(done)]
        return {
            "event": "done",
            "began": found[0]["began"],
            "window": [min(each["window"][0] for each in found), max(each["window"][1] for each in found)],
            **merged_columns(found),
        }

    def close(self) -> None:
        for part in self._parts:
            part.end.close()
        for pid in self._pids:
            os.waitpid(pid, 0)


def messages_of(parts: Sequence[Lines]) -> Iterator[tuple[int, Message]]:
    """Yield the messages of these processes, each with the process's index, until all are done."""
    indexes = {part.end: index for index, part in enumerate(parts)}
    done = 0
    while done < len(parts):
        for end in select.select([*indexes], [], [])[0]:
            index = indexes[end]
            while message := parts[index].hear(0.0):
                done += message["event"] == "done"
                yield index, message


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
        """Send a message, but leave out progress if the parent does not listen: nothing may hold up the streams."""
        if message["event"] != "progress" or self.lines.has_room:
            self.lines.say(**message)

    def close(self) -> None:
        self.streams.close()


def serve_parent(end: socket.socket) -> None:
    """Serve the parent's messages until one is `close`, or the parent is gone; `failed` if the client cannot start."""
    lines = Lines(end)
    try:
        greeting = lines.hear() or {}
        several = greeting["processes"] > 1
        client = Parts(lines, greeting, serve_parent) if several else StreamingClient(lines, greeting)
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
