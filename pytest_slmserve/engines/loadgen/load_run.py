"""A load generator in its own process: one load after the other on one server. JSON lines in, JSON lines out, over an
inherited socket.

    python loadgen/load_run.py FD PARENT_PID

The first line in names the server: `url`, `headers`, and `timeout_s` of a request. Then `load` hands over the bodies,
and `run` a load; `close` ends it, unanswered. Lines out: `ready` or `failed`, `loaded`, `progress`, `done`. A run that
is one of several at once has a time at which it begins (`at`), sends `settled`, and gets its window by `open`. All
times are `time.monotonic()`.

A load is a `closed_loop`, as the engine's worker has it, or an `open_loop`: a `schedule` of seconds since the
beginning, and a `window` in it. `done` has `began`, `window`, `on_schedule`, `first_failure`, the rows `failed`,
`unsent`, `waited`, `client_cpu_s`, the results of `results_of`, and `doubt_s`: by how much the stamps of a piece's
chunks can be wrong, on the average and at most. It is 0 for a piece that is one chunk.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import socket
import sys
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pytest_slmserve.engines.loadgen.streams import Bodies, Lead, RequestStream, Streams, Target
from pytest_slmserve.engines.worker.slm_pacing import pacer_of
from pytest_slmserve.engines.worker.slm_process import Ended, Lines, guarded

BIN_S = 0.01
GROWTH, LEAST_S = 1.01, 1e-4
STEP = math.log(GROWTH)

Window = tuple[float, float]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request that was sent and did not fail.

    request: index into the bodies. scheduled: None without a schedule. times, tokens: of each chunk with tokens. usage:
    tokens of prompt and output by the server's count, None if it gave none. finished: False if the request was cut off.
    asked: output tokens that were requested. cached: tokens of the prompt from a cache.
    """

    request: int
    sent: float
    scheduled: float | None
    times: array[float]
    tokens: array[int]
    usage: tuple[int | None, int | None]
    finished: bool
    asked: int
    cached: int | None = None


def results_of(rows: Sequence[RequestRow], window: Window, steps: Sequence[Window] = ()) -> Message:
    """The results of the requests of a load.

    Returns:
        samples: a row for each request, in any order. bins: tokens received in each span of BIN_S. A request's tokens
        that its chunks do not show, by the server's count, came evenly with those that they show; without such a count,
        they are assumed as in the other requests, but no more than were requested. gaps: those in the window, and in
        that of each step of a ramp. told, chunks: tokens by the server's count, and the number of their chunks.
    """
    counted = [row for row in rows if row.usage[1] is not None]
    shown = sum(sum(row.tokens) for row in counted)
    told = sum(row.usage[1] or 0 for row in counted)
    beyond = told / shown if shown else 1.0
    samples = []
    bins: Counter[int] = Counter()
    for row in rows:
        tokens, output = sum(row.tokens), row.usage[1] or 0.0
        if row.usage[1] is None:
            output = min(tokens * beyond, max(tokens, row.asked))
        stamps = (row.times[0], row.times[-1]) if row.times else (None, None)
        counts = row.usage[0], round(output)
        samples.append((row.request, row.sent, None, *stamps, *counts, row.finished, row.cached, row.scheduled))
        weight = output / (tokens or 1)
        for at, count in zip(row.times, row.tokens):
            bins[math.floor(at / BIN_S)] += count * weight  # type: ignore[assignment]
    times = [row.times for row in rows]
    found = [gaps(times, each) for each in (window, *steps)]
    return {"samples": samples, "bins": bins, "gaps": found, "told": told, "chunks": sum(len(r.times) for r in counted)}


def gaps(streams: Iterable[Sequence[float]], window: Window) -> Message:
    """A histogram of the times between successive chunks that both lie in the window: bin i holds gaps from
    LEAST_S * GROWTH**i on; -1 holds those below LEAST_S. And their sum, which the bins do not have."""
    begin, end = window
    counts: Counter[int] = Counter()
    sum_s = 0.0
    for times in streams:
        inside = times[bisect_left(times, begin) : bisect_right(times, end)]
        found = (after - before for before, after in pairwise(inside))
        counts.update(math.floor(math.log(gap / LEAST_S) / STEP) if gap >= LEAST_S else -1 for gap in found)
        sum_s += inside[-1] - inside[0] if inside else 0.0
    return {"counts": counts, "sum_s": sum_s}


def parts_of(load: Message, processes: int) -> list[Message]:
    """The parts of a load that client processes send, one for each but none without a request: of `count` processes
    each sends every count-th request, for its share of the users."""
    divided = {name: load[name] for name in ("requests", "concurrency", "most") if load.get(name) is not None}
    scheduled = [len(load["schedule"])] if "schedule" in load else []
    count = max(1, min(processes, *scheduled, *divided.values()))
    parts = []
    for index in range(count):
        part = load | {"part": [index, count]}
        part |= {name: len(range(index, number, count)) for name, number in divided.items()}
        if scheduled:
            part["schedule"] = load["schedule"][index::count]
        parts.append(part)
    return parts


AHEAD_S, AHEAD = 1.0, 1000  # connections that wait for a schedule: for the most requests in a second, and at most

Due = tuple[int, float | None]  # the number of a request, and when it was to be sent if there is a schedule


class LoadUsers:
    """The users of a load. Those of a closed loop send their next request when the last one has ended. Those of an open
    loop send one each, at times since `began`, whatever the server does; if only so many may be in flight, one that
    comes meanwhile is due when another has ended.

    connections: how many to open before it begins. waited_s: how long each that was sent was held back, in the order
    sent; empty without such a limit.
    """

    def __init__(self, load: Message, output_tokens: Sequence[int], gated: bool, streams: Streams) -> None:
        self.schedule: Sequence[float] = load.get("schedule", ())
        self.loop = pacer_of(load, output_tokens, gated)
        self.began = 0.0
        self.waited_s: list[float] = []
        most = load.get("most")
        self._places = None if most is None else deque([0.0] * most)  # free since when
        self._given: Window | None = load.get("window")
        coming = (bisect_right(self.schedule, at + AHEAD_S) - first for first, at in enumerate(self.schedule))
        self.connections = min(AHEAD, most or AHEAD, max(coming)) if self.schedule else self.loop.concurrency
        self._timeout_s = streams.timeout_s
        self._lead = Lead(streams.in_flight, streams.read)
        self._free = 0  # users that are due to start, or whose request has ended
        self._lived = 0.0  # steps by the answers that have ended
        self._unsettled = gated and self.loop.requests is None
        self._unopened = False

    @property
    def next_due(self) -> float:
        """The time at which the next request is due; inf if none has a time, or if nobody can know it until another has
        ended."""
        if self.loop.sent >= len(self.schedule) or (self._places is not None and not self._places):
            return math.inf
        return self.began + self.schedule[self.loop.sent]

    def due(self, now: float) -> list[Due]:
        """The requests to send now."""
        found: list[Due] = []
        self._free += self.loop.users_due(now - self.began)
        while self._free and self._places != deque() and (number := self.loop.next_request()) is not None:
            self._free -= 1
            at = self.began + self.schedule[number] if self.schedule else None
            if self._places is not None and at is not None:
                free = self._places.popleft()
                self.waited_s.append(max(0.0, free - at))
                at = max(at, free)
            found.append((number, at))
        return found

    def ended(self, now: float, steps: int = 0) -> None:
        """A request has ended that was in flight. It lived for `steps`, whether the lead saw them or it came in one
        piece."""
        self._free += 1
        if self._places is not None:
            self._places.append(now)
        if self.loop.requests is None:
            self._lived += steps / self.loop.started
            while self.loop.steps < int(self._lived):
                self.loop.stepped(now)

    def follow(self, lines: Lines) -> None:
        """Count the steps since the last call. If this loop is one of several, report that it has settled, and take the
        window that the parent sets."""
        if self.loop.requests is not None:
            return
        for at in self._lead.steps():
            self.loop.stepped(at)
        # No request lasts longer than its time limit, so what has not settled after that never does: it has its window
        # all the same.
        latest = self.began + (1 + self.loop.settled_steps / self.loop.lifetime_steps) * self._timeout_s
        if self.loop.opened_at is not None:
            latest = self.loop.opened_at + self.loop.window_s + self._timeout_s
        if (now := time.monotonic()) > latest:
            for _ in range(2 * round(self.loop.settled_steps + 1)):  # two lockstep cycles
                self.loop.stepped(now)
        if self._unsettled and self.loop.settled:
            self._unsettled, self._unopened = False, True
            lines.say(event="settled")
        if self._unopened and (message := lines.hear(0.0)):
            self._unopened, self.loop.given = False, message["window"]

    @property
    def window(self) -> Window | None:
        return (self.began + self._given[0], self.began + self._given[1]) if self._given else self.loop.window

    def phase(self, now: float) -> str:
        if not self.schedule or self.window is None:
            return "window" if self.schedule else self.loop.phase
        begin, end = self.window
        return "settle" if now < begin else "window" if now < end else "over"


PROGRESS_S = 0.5
FAILURES, FAILED_SHARE = 5, 0.05  # a load is given up when more fail than either


class StreamingClient:
    """Sends the requests of a load to one server."""

    def __init__(self, lines: Lines, greeting: Message) -> None:
        self.lines = lines
        self.target = Target(greeting["url"], greeting["headers"])
        self.streams = Streams(self.target, greeting["timeout_s"])

    def load(self, message: Message) -> Message:
        """Take the requests of the next loads, and the output tokens that each asks for."""
        self.requests = Bodies(self.target, message["bodies"], message.get("mark", ""), message.get("rounds", ()))
        self.output_tokens: Sequence[int] = message["output_tokens"]
        return {"event": "loaded"}

    def run(self, message: Message) -> Message:
        """Serve the load of the message, and return the message `done`. at: when it begins, with others; without it:
        now. The load's `part`, of several processes, says that this one sends every count-th request from the index-th
        on."""
        self.requests.begin_anew()
        load, at = message["load"], message.get("at")
        self.on_schedule = load["kind"] == "open_loop"
        self.first, self.stride = load.get("part", (0, 1))
        self.rows: list[RequestRow] = []
        self.failed: list[tuple[Any, ...]] = []  # request, when sent (or would have been), when due, when ended, kind
        self.sent = self.done = 0
        self.first_failure: str | None = None
        users = LoadUsers(load, self.output_tokens, at is not None, self.streams)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection in the middle of a run would hold up all streams
        cpu = time.process_time()
        try:
            window = self._serve(users, at)
        finally:
            gc.enable()
            gc.unfreeze()
        steps = [(users.began + begin, users.began + end) for begin, end in load.get("steps", ())]
        return {
            "event": "done",
            "began": users.began,
            "window": window,
            **results_of(self.rows, window, steps),
            "on_schedule": self.on_schedule,
            "failed": self.failed,
            "unsent": [users.began + at for at in users.schedule[users.loop.sent :]],
            "waited": users.waited_s,
            "first_failure": self.first_failure,
            "client_cpu_s": time.process_time() - cpu,
            "doubt_s": [self.streams.doubt_s / max(1, self.streams.pieces_read), self.streams.most_doubt_s],
        }

    def _serve(self, users: LoadUsers, at: float | None) -> Window:
        """Send the requests and note their answers until the load is over, and return its window."""
        streams = self.streams
        streams.begin_anew(users.connections)
        while at is not None and (left := at - time.monotonic()) > 0:
            streams.turn(left)
        users.began = self.last_answer = told_s = streams.heard = time.monotonic()
        told_tokens = 0
        while not self.given_up:
            busy = streams.in_flight or streams.ended
            if users.loop.phase == "over" and not (busy and users.loop.requests is not None):
                break
            self._send_due(users)
            streams.turn(max(0.0, min(told_s + PROGRESS_S, users.next_due) - time.monotonic()))
            users.follow(self.lines)
            while streams.ended and not self.given_up:
                steps = self._note(streams.ended.popleft())
                users.ended(time.monotonic(), steps)
                self._send_due(users)
            now = time.monotonic()
            if now >= told_s + PROGRESS_S:
                streams.expire(now)
                tokens = streams.tokens_read + streams.pieces - streams.pieces_read  # an unread piece counts as one
                _, has_room, _ = select.select([], [self.lines.end], [], 0)
                if has_room:  # a parent that does not listen must not hold up the streams
                    self.lines.say(
                        event="progress",
                        phase=users.phase(now),
                        elapsed_s=now - users.began,
                        done=self.done,
                        in_flight=len(streams.in_flight),
                        tokens_per_s=(tokens - told_tokens) / (now - told_s),
                    )
                told_s, told_tokens = now, tokens
        cut = streams.cut_off()
        while streams.ended:
            self._note(streams.ended.popleft())
        for stream in cut:
            if stream.sent:
                self._note(stream, cut=True)
        return users.window or (users.began, self.last_answer)

    @property
    def given_up(self) -> bool:
        """Whether too many requests have failed, or no user has heard anything for as long as one request may last."""
        if len(self.failed) > max(FAILURES, FAILED_SHARE * self.sent):
            return True
        users_failed = bool(self.failed) and not self.on_schedule
        return users_failed and time.monotonic() - self.streams.heard > self.streams.timeout_s

    def _send_due(self, users: LoadUsers) -> None:
        for number, due in users.due(time.monotonic()):
            request = self.first + self.stride * number
            self.sent += 1
            self.streams.send(RequestStream(request, self.requests.of(request), due))

    def _note(self, stream: RequestStream, cut: bool = False) -> int:
        """Note the answer of a stream, or its failure. Returns the steps that the answer took: a token each, and as
        many as were requested if it came in one piece; 0 of a failure."""
        index, answer = stream.number % len(self.output_tokens), stream.answer
        asked, shown, told = self.output_tokens[index], sum(answer.tokens), answer.usage[1]
        if stream.failure is None and (told or 0) > max(asked, shown):
            why = f"the server counts {told} output tokens of a request for {asked}"
            stream.failure, stream.failed = ("malformed", why), stream.read_until
        if stream.failure is not None:
            kind, why = stream.failure
            self.failed.append((index, stream.sent or stream.asked, stream.due, stream.failed, kind))
            self.first_failure = self.first_failure or why
            return 0
        row = RequestRow(
            index, stream.sent, stream.due, answer.times, answer.tokens, answer.usage, not cut, asked, answer.cached
        )
        self.rows.append(row)
        self.done += not cut
        self.last_answer = max(self.last_answer, stream.read_until)
        return asked if len(answer.times) < 2 else max(shown if told is None else told, len(answer.times))


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
