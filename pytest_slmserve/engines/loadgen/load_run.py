"""A load generator in its own process, which runs one load after the other on one server.

    python loadgen/load_run.py FD PARENT_PID

It exchanges JSON lines over an inherited socket. The first line in names the server: `url`, `headers`, and `timeout_s`
of a request. Then `load` gives the bodies, `run` starts a load, and `close` ends the process without an answer. Lines
out are `ready` or `failed`, `loaded`, `progress` and `done`. One of several concurrent runs begins at a given time
(`at`), sends `settled`, and gets its window by `open`. All times are `time.monotonic()`.

A load is a `closed_loop`, like that of the engine's worker, or an `open_loop` with a `schedule` in seconds since the
beginning and a `window`. `done` has `began`, `window`, `on_schedule`, `first_failure`, the rows `failed`, `unsent`,
`waited`, `client_cpu_s`, the results of `results_of`, and `doubt_s`: the mean and the largest error of the times of
chunks that came in one piece. It is 0 for a piece that is one chunk.
"""

import gc
import math
import os
import resource
import select
import socket
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
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


def results_of(streams: Sequence[RequestStream], window: Window, steps: Sequence[Window] = ()) -> Message:
    """Return the results of the requests of a load that did not fail:

    - `samples`: a row for each request, in any order.
    - `bins`: tokens received in each span of BIN_S. Tokens beyond a request's chunks, by the server's count, are spread
      over its chunks. Without a count, the ratio of the other requests is used, up to the tokens requested.
    - `gaps`: histograms of the window, and of the window of each step of a ramp.
    - `told`, `chunks`: tokens by the server's count, and the number of their chunks.
    """
    counted = [stream.answer for stream in streams if stream.answer.usage[1] is not None]
    shown = sum(sum(answer.tokens) for answer in counted)
    told = sum(answer.usage[1] or 0 for answer in counted)
    beyond = told / shown if shown else 1.0
    samples = []
    bins: Counter[int] = Counter()
    for stream in streams:
        answer = stream.answer
        tokens, output = sum(answer.tokens), answer.usage[1] or 0.0
        if answer.usage[1] is None:
            output = min(tokens * beyond, max(tokens, stream.wanted))
        stamps = (answer.times[0], answer.times[-1]) if answer.times else (None, None)
        counts = answer.usage[0], round(output)
        samples.append((stream.index, stream.sent, None, *stamps, *counts, not stream.cut, answer.cached, stream.due))
        weight = output / (tokens or 1)
        for at, count in zip(answer.times, answer.tokens):
            bins[math.floor(at / BIN_S)] += count * weight  # type: ignore[assignment]
    found = [gaps((stream.answer.times for stream in streams), each) for each in (window, *steps)]
    chunks = sum(len(answer.times) for answer in counted)
    return {"samples": samples, "bins": bins, "gaps": found, "told": told, "chunks": chunks}


def gaps(streams: Iterable[Sequence[float]], window: Window) -> Message:
    """Return a histogram of the times between successive chunks in the window, and the sum of these times.

    Bin i has gaps from LEAST_S * GROWTH**i on, and bin -1 has gaps below LEAST_S.
    """
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
    """Return the parts of a load for several client processes, of which none is empty.

    Each of n processes sends every n-th request, for its share of the users.
    """
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


AHEAD_S, AHEAD = 1.0, 1000  # connections opened for a schedule: the most requests in this time, up to this number
PROGRESS_S = 0.5
FAILURES, FAILED_SHARE = 5, 0.05  # a load is given up if more requests fail than both allow


class LoadRun:
    """One load on one server.

    Each user of a closed loop sends a request when the last one has ended. In an open loop, each request is sent at its
    time since `began`, whatever the server does, or above the concurrency limit as soon as another one has ended.

    Attributes:
        connections: number of connections to open before the load begins.
        waited_s: delay of each sent request by the concurrency limit; empty without a limit.
        ended: streams of the requests that have ended well or were cut off.
        failed: streams of the requests that have failed.
    """

    def __init__(
        self,
        message: Message,
        requests: Bodies,
        output_tokens: Sequence[int],
        streams: Streams,
        lines: Lines,
        bounded: bool = True,
        streamed: bool = True,
    ) -> None:
        """Prepare the load of a message.

        Args:
            message: the load, and the time `at` which it begins; without it: now. With a `part` of the load, this
                process sends every count-th request from the index-th on.
            requests: of all processes.
            output_tokens: number that each request asks for.
            bounded: whether no answer can have more tokens than that.
            streamed: whether answers are streams of tokens, and not single results.
        """
        load = self.load = message["load"]
        self.at: float | None = message.get("at")
        self.requests, self.output_tokens, self.streams, self.lines = requests, output_tokens, streams, lines
        self.bounded, self.streamed = bounded, streamed
        self.schedule: Sequence[float] = load.get("schedule", ())
        gated = self.at is not None
        self.loop = pacer_of(load, output_tokens, gated)
        self.began = 0.0
        self.waited_s: list[float] = []
        self.ended: list[RequestStream] = []
        self.failed: list[RequestStream] = []
        most = load.get("most")
        self._places = None if most is None else deque([0.0] * most)  # times since which places are free
        self._given: Window | None = load.get("window")
        coming = (bisect_right(self.schedule, at + AHEAD_S) - first for first, at in enumerate(self.schedule))
        self.connections = min(AHEAD, most or AHEAD, max(coming)) if self.schedule else self.loop.concurrency
        self._lead = Lead(streams.in_flight, streams.read)
        self._lived = 0.0  # steps, by the answers that have ended
        self._unsettled = gated and self.loop.requests is None
        self._unopened = False

    @property
    def next_due(self) -> float:
        """Time at which the next request is due; inf if it depends on the end of another request, or none follows."""
        if not self.schedule:
            return math.inf if self.loop.next_free is None else self.loop.next_free
        if self.loop.sent >= len(self.schedule) or (self._places is not None and not self._places):
            return math.inf
        return self.began + self.schedule[self.loop.sent]

    def due(self, now: float) -> list[tuple[int, float | None]]:
        """Return the numbers of the requests to send now, and the time at which each was due if there is a schedule."""
        found: list[tuple[int, float | None]] = []
        self.loop.join(now, now - self.began)
        while self._places != deque() and (number := self.loop.free_request(now)) is not None:
            at = self.began + self.schedule[number] if self.schedule else None
            if self._places is not None and at is not None:
                free = self._places.popleft()
                self.waited_s.append(max(0.0, free - at))
                at = max(at, free)
            found.append((number, at))
        return found

    def release(self, now: float, number: int = 0, steps: int = 0) -> None:
        """Free the user of an ended request after the think time, and count the steps of its life."""
        self.loop.come_back(now + self.loop.rest_s(self._of_all(number)), number)
        if self._places is not None:
            self._places.append(now)
        if self.loop.requests is None:
            self._lived += steps / self.loop.started
            while self.loop.steps < int(self._lived):
                self.loop.stepped(now)

    def follow(self) -> None:
        """Count the steps since the last call, report that the load has settled, and receive a common window."""
        if self.loop.requests is not None:
            return
        for at in self._lead.steps():
            self.loop.stepped(at)
        # No request lasts longer than its time limit, so a load that has not settled after that never settles. It gets
        # its window nevertheless.
        timeout_s = self.streams.timeout_s
        latest = self.began + (1 + self.loop.settled_steps / self.loop.lifetime_steps) * timeout_s
        if self.loop.opened_at is not None:
            latest = self.loop.opened_at + self.loop.window_s + timeout_s
        if (now := time.monotonic()) > latest:
            for _ in range(2 * round(self.loop.settled_steps + 1)):  # two lockstep cycles
                self.loop.stepped(now)
        if self._unsettled and self.loop.settled:
            self._unsettled, self._unopened = False, True
            self.lines.say(event="settled")
        if self._unopened and (message := self.lines.hear(0.0)):
            self._unopened, self.loop.given = False, message["window"]

    @property
    def window(self) -> Window | None:
        return (self.began + self._given[0], self.began + self._given[1]) if self._given else self.loop.window

    def phase(self, now: float) -> str:
        if not self.schedule or self.window is None:
            return "window" if self.schedule else self.loop.phase
        begin, end = self.window
        return "settle" if now < begin else "window" if now < end else "over"

    def result(self) -> Message:
        """Serve the load, and return the message `done`."""
        self.requests.begin_anew()
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would delay all streams
        cpu = time.process_time()
        try:
            self._serve()
        finally:
            gc.enable()
            gc.unfreeze()
        window = self.window or (self.began, max((stream.read_until for stream in self.ended), default=self.began))
        steps = [(self.began + begin, self.began + end) for begin, end in self.load.get("steps", ())]
        failures = [(stream, *stream.failure) for stream in self.failed if stream.failure]
        return {
            "event": "done",
            "began": self.began,
            "window": window,
            **results_of(self.ended, window, steps),
            "on_schedule": "schedule" in self.load,
            "failed": [(s.index, s.sent or s.asked, s.due, s.failed, kind) for s, kind, _ in failures],
            "unsent": [self.began + at for at in self.schedule[self.loop.sent :]],
            "waited": self.waited_s,
            "first_failure": failures[0][-1] if failures else None,
            "client_cpu_s": time.process_time() - cpu,
            "doubt_s": [self.streams.doubt_s / max(1, self.streams.pieces_read), self.streams.most_doubt_s],
        }

    def _serve(self) -> None:
        streams = self.streams
        streams.begin_anew(self.connections)
        while self.at is not None and (left := self.at - time.monotonic()) > 0:
            streams.turn(left)
        self.began = told_s = streams.heard = time.monotonic()
        told_tokens = 0
        while not self.given_up:
            busy = streams.in_flight or streams.ended
            if self.loop.phase == "over" and not (busy and self.loop.requests is not None):
                break
            self._send_due()
            streams.turn(max(0.0, min(told_s + PROGRESS_S, self.next_due) - time.monotonic()))
            self.follow()
            while streams.ended and not self.given_up:
                ended = streams.ended.popleft()
                steps = self._note(ended)
                self.release(time.monotonic(), ended.number, steps)
                self._send_due()
            now = time.monotonic()
            if now >= told_s + PROGRESS_S:
                streams.expire(now)
                tokens = streams.tokens_read + streams.pieces - streams.pieces_read  # an unread piece counts as one
                _, has_room, _ = select.select([], [self.lines.end], [], 0)
                if has_room:  # a parent that does not listen must not delay the streams
                    self.lines.say(
                        event="progress",
                        phase=self.phase(now),
                        elapsed_s=now - self.began,
                        done=len(self.ended),
                        in_flight=len(streams.in_flight),
                        tokens_per_s=(tokens - told_tokens) / (now - told_s),
                    )
                told_s, told_tokens = now, tokens
        cut = [stream for stream in streams.cut_off() if stream.sent]
        for stream in (*streams.ended, *cut):
            self._note(stream)
        streams.ended.clear()

    @property
    def given_up(self) -> bool:
        """True if too many requests have failed, or if one has and a closed loop receives nothing for `timeout_s`."""
        if len(self.failed) > max(FAILURES, FAILED_SHARE * self.loop.sent):
            return True
        users_failed = bool(self.failed) and "schedule" not in self.load
        return users_failed and time.monotonic() - self.streams.heard > self.streams.timeout_s

    def _send_due(self) -> None:
        for each, due in self.due(time.monotonic()):
            number = self._of_all(each)
            index = number % len(self.output_tokens)
            wanted, body = self.output_tokens[index], self.requests.of(number)
            stream = RequestStream(index, wanted, body, due, bounded=self.bounded, streamed=self.streamed)
            stream.number = each
            self.streams.send(stream)

    def _of_all(self, number: int) -> int:
        (first, stride), (conversation, turn) = self.load.get("part", (0, 1)), divmod(number, self.loop.turns)
        return (first + stride * conversation) * self.loop.turns + turn  # type: ignore[no-any-return]

    def _note(self, stream: RequestStream) -> int:
        """Record an answer or a failure, and return the steps that the answer took."""
        answer = stream.answer
        shown, told = sum(answer.tokens), answer.usage[1]
        if stream.failure is None and (told or 0) > max(stream.wanted, shown):
            why = f"the server counts {told} output tokens of a request for {stream.wanted}"
            stream.failure, stream.failed = ("malformed", why), stream.read_until
        # A load may have millions of requests, whose streams are kept until it ends.
        del answer.response
        stream.body = b""
        if stream.failure is not None:
            self.failed.append(stream)
            return 0
        self.ended.append(stream)
        # A token is a step. If the answer came in one piece, the requested tokens count.
        return stream.wanted if len(answer.times) < 2 else max(shown if told is None else told, len(answer.times))


def _main() -> None:
    descriptor, parent = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)
    with guarded(parent), suppress(Ended):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each concurrent request
        lines = Lines(socket.socket(fileno=descriptor))
        try:
            greeting = lines.hear() or {}
            target = Target(greeting["url"], greeting["headers"])
            streams = Streams(target, greeting["timeout_s"])
        except (ValueError, OSError) as error:
            return lines.say(event="failed", cause=f"{error}")
        lines.say(event="ready")
        while (message := lines.hear()) and message["op"] != "close":
            match message["op"]:
                case "load":
                    requests = Bodies(target, message["bodies"], message.get("mark", ""), message.get("rounds", ()))
                    how = {name: message[name] for name in ("bounded", "streamed") if name in message}
                    output_tokens = message["output_tokens"]
                    lines.say(event="loaded")
                case "run":
                    lines.say(**LoadRun(message, requests, output_tokens, streams, lines, **how).result())
                # "open" comes too late if the run has already ended.


if __name__ == "__main__":
    _main()
