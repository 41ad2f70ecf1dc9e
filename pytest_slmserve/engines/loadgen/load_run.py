"""One load on one server: sends requests as the load says, tells of it twice a second, and says what was found."""

from __future__ import annotations

import gc
import math
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from pytest_slmserve.engines.loadgen.connection import Bodies
from pytest_slmserve.engines.loadgen.streams import Lead, RequestStream, Streams
from pytest_slmserve.engines.worker.slm_pacing import closed_loop

BIN_S = 0.01
GROWTH, LEAST_S = 1.01, 1e-4
STEP = math.log(GROWTH)

Window = tuple[float, float]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request that was sent and did not fail. request: index into the bodies. scheduled: None without a schedule.
    times, tokens: of each chunk that bears tokens. usage: tokens of prompt and output by the server's count, None
    where it gave none. finished: False of one that was cut off. asked: output tokens that it was for. cached: tokens of
    the prompt from a cache."""

    request: int
    sent: float
    scheduled: float | None
    times: array[float]
    tokens: array[int]
    usage: tuple[int | None, int | None]
    finished: bool
    asked: int
    cached: int | None = None

    def sample(self, beyond: float) -> tuple[Any, ...]:
        first, last = (self.times[0], self.times[-1]) if self.times else (None, None)
        output = round(self.output(beyond))
        return self.request, self.sent, None, first, last, self.usage[0], output, self.finished, self.cached

    def output(self, beyond: float) -> float:
        """Output tokens by the server's count; without one `beyond` times those of the chunks, but no more than were
        asked for."""
        shown = sum(self.tokens)
        return min(shown * beyond, max(shown, self.asked)) if self.usage[1] is None else self.usage[1]


@dataclass(frozen=True, slots=True)
class Lost:
    """One request that failed. sent: when it was or would have been. ended: when it had failed. kind: how."""

    request: int
    sent: float
    scheduled: float | None
    ended: float
    kind: str


def lost_in(failed: Iterable[Lost]) -> Message:
    """A column for each of their fields, in the order sent."""
    ordered = sorted(failed, key=lambda each: each.sent)
    return {field.name: [getattr(each, field.name) for each in ordered] for field in fields(Lost)}


def columns_found(
    rows: Iterable[RequestRow], window: Window, steps: Sequence[Window] = (), on_schedule: bool = False
) -> Message:
    """samples, scheduled, received, gaps, step_gaps, tokens_per_chunk, and chunks, which is the number behind it.
    steps: windows of their own, of a ramp. on_schedule: the load has one, also where nothing came of it."""
    ordered = sorted(rows, key=lambda row: row.sent)
    chunks = sum(len(row.times) for row in ordered if row.usage[1] is not None)
    counted = sum(sum(row.tokens) for row in ordered if row.usage[1] is not None)
    told = sum(row.usage[1] or 0 for row in ordered)
    beyond = told / counted if counted else 1.0
    times = [row.times for row in ordered]
    return {
        "samples": [list(column) for column in zip(*(row.sample(beyond) for row in ordered))],
        "scheduled": [row.scheduled for row in ordered] if on_schedule else None,
        "received": received(ordered, beyond),
        "gaps": gaps(times, window),
        "step_gaps": [gaps(times, each) for each in steps],
        "tokens_per_chunk": told / chunks if chunks else None,
        "chunks": chunks,
    }


def received(rows: Sequence[RequestRow], beyond: float) -> list[Any]:
    """Tokens in equal bins of time: their width, where the first begins, and the tokens of each.

    A request's tokens that its chunks do not show, by the server's count, came evenly with those that they show; where
    there is no such count, they are assumed as in the others.
    """
    bins: Counter[int] = Counter()
    for row in rows:
        weight = row.output(beyond) / (sum(row.tokens) or 1)
        for at, tokens in zip(row.times, row.tokens):
            bins[math.floor(at / BIN_S)] += tokens * weight  # type: ignore[assignment]
    return told_bins(bins)


def told_bins(bins: Counter[int]) -> list[Any]:
    """Bins as a message has them, the empty ones between two others too."""
    first = min(bins, default=0)
    return [BIN_S, first * BIN_S, [round(bins[i], 3) for i in range(first, max(bins, default=-1) + 1)]]


def gaps(streams: Iterable[Sequence[float]], window: Window) -> Message:
    """A histogram of the times between successive chunks that both lie in the window: bin i holds gaps from
    least_s * growth**i on; -1 holds those below least_s. And their sum, which no bin tells."""
    begin, end = window
    counts: Counter[int] = Counter()
    sum_s = 0.0
    for times in streams:
        inside = times[bisect_left(times, begin) : bisect_right(times, end)]
        counts.update(gap_bin(after - before) for before, after in pairwise(inside))
        sum_s += inside[-1] - inside[0] if inside else 0.0
    return histogram(counts, sum_s)


def histogram(counts: Counter[int], sum_s: float) -> Message:
    return {
        "growth": GROWTH,
        "least_s": LEAST_S,
        "counts": {str(i): counts[i] for i in sorted(counts)},
        "sum_s": round(sum_s, 6),
    }


def gap_bin(gap_s: float) -> int:
    return math.floor(math.log(gap_s / LEAST_S) / STEP) if gap_s >= LEAST_S else -1


def merged_columns(parts: Sequence[Message]) -> Message:
    """The columns of several client processes, merged into those of one: rows in the order sent, counts added."""
    columns = [zip(*part["samples"], part["scheduled"] or repeat_none(part)) for part in parts]
    rows = sorted((row for part in columns for row in part), key=lambda row: row[1])
    *samples, scheduled = zip(*rows) if rows else ((),)
    chunks = sum(part["chunks"] for part in parts)
    told = sum(part["tokens_per_chunk"] * part["chunks"] for part in parts if part["chunks"])
    return {
        "samples": [list(column) for column in samples],
        "scheduled": None if any(part["scheduled"] is None for part in parts) else list(scheduled),
        "received": merged_bins([part["received"] for part in parts]),
        "gaps": merged_gaps([part["gaps"] for part in parts]),
        "step_gaps": [merged_gaps(each) for each in zip(*(part["step_gaps"] for part in parts))],
        "tokens_per_chunk": told / chunks if chunks else None,
        "chunks": chunks,
        "failed": merged_losses([part["failed"] for part in parts]),
        "failures": sum(part["failures"] for part in parts),
        "unsent": sorted(at for part in parts for at in part["unsent"]),
        "waited": sorted(seconds for part in parts for seconds in part["waited"]),
        "first_failure": next((part["first_failure"] for part in parts if part["first_failure"]), None),
        "client_cpu_s": sum(part["client_cpu_s"] for part in parts),
        "doubt_s": [max(part["doubt_s"][i] for part in parts) for i in (0, 1)],
    }


def repeat_none(part: Message) -> list[None]:
    return [None] * len(part["samples"][0]) if part["samples"] else []


def merged_losses(parts: Sequence[Message]) -> Message:
    return lost_in(Lost(*row) for part in parts for row in zip(*(part[field.name] for field in fields(Lost))))


def merged_bins(parts: Sequence[Sequence[Any]]) -> list[Any]:
    bins: Counter[int] = Counter()
    for width, begin, tokens in parts:
        first = round(begin / width)
        for index, count in enumerate(tokens):
            bins[first + index] += count
    return told_bins(bins)


def merged_gaps(parts: Sequence[Message]) -> Message:
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update({int(index): count for index, count in part["counts"].items()})
    return histogram(counts, sum(part["sum_s"] for part in parts))


FAILURES, FAILED_SHARE = 5, 0.05  # a load is given up when more fail than either


class OpenLoopPacer:
    """Requests at given times, in seconds since the beginning, in ascending order. window: None for all of it.

    most: in flight at a time; one that comes meanwhile is due when another has ended. waited_s: each that was sent for
    that, in the order sent; empty without such a limit.
    """

    def __init__(
        self, schedule: Sequence[float], window: tuple[float, float] | None = None, most: int | None = None
    ) -> None:
        self.schedule, self.given = schedule, window
        self.sent = 0
        self.waited_s: list[float] = []
        self._places = None if most is None else deque([0.0] * most)  # free since when

    @property
    def next_s(self) -> float | None:
        """The time at which the next request is due, in seconds since the beginning; None once all were sent. It is inf
        while `most` are in flight, for nobody can know it until another has ended."""
        if self.sent == len(self.schedule):
            return None
        return math.inf if self._places is not None and not self._places else self.schedule[self.sent]

    def due(self, elapsed_s: float) -> list[tuple[int, float]]:
        """Numbers of the requests to send now, and since when each is due."""
        found = []
        while (at := self.next_s) is not None and at <= elapsed_s:
            if self._places is not None:
                free = self._places.popleft()
                self.waited_s.append(max(0.0, free - at))
                at = max(at, free)
            found.append((self.sent, at))
            self.sent += 1
        return found

    def freed(self, elapsed_s: float) -> None:
        """One that was in flight has ended."""
        if self._places is not None:
            self._places.append(elapsed_s)

    def phase(self, elapsed_s: float) -> str:
        if self.given is None:
            return "window"
        begin, end = self.given
        return "settle" if elapsed_s < begin else "window" if elapsed_s < end else "over"


def most_within(schedule: Sequence[float], seconds: float) -> int:
    """The most requests that are due within so many seconds."""
    most = first = 0
    for last, at in enumerate(schedule):
        while schedule[first] < at - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def part_of(load: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """The part of a load that one of `count` client processes sends: every count-th request and user."""
    mine = {**load, "part": [index, count]}
    if "schedule" in load:
        mine["schedule"] = load["schedule"][index::count]
    return mine | {name: len(range(index, number, count)) for name, number in _divided(load).items()}


def parts_of(load: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """One part for each process, but none without a request."""
    scheduled = [len(load["schedule"])] if "schedule" in load else []
    count = max(1, min(processes, *scheduled, *_divided(load).values()))
    return [part_of(load, index, count) for index in range(count)]


def _divided(load: dict[str, Any]) -> dict[str, int]:
    """Numbers of a load that its processes divide among them: `requests`, `concurrency`, `most`, if it has them."""
    return {name: load[name] for name in ("requests", "concurrency", "most") if load.get(name) is not None}


PROGRESS_S = 0.5
AHEAD_S, AHEAD = 1.0, 1000  # connections that wait for a schedule: for the most requests in a second, and at most

Say = Callable[..., None]
Hear = Callable[[], dict[str, Any] | None]  # a message of the parent, if there is one


class LoadRun:
    """requests: the bytes of each, by its number. load: as the parent describes it; its `part`, of several processes,
    says that this one sends every count-th request from the index-th on. at: when it begins, with others; None: now."""

    def __init__(self, streams: Streams, requests: Bodies, output_tokens: Sequence[int], load: dict[str, Any]) -> None:
        self.streams, self.requests, self.load = streams, requests, load
        self.output_tokens = output_tokens
        self.first, self.stride = load.get("part", (0, 1))
        self.rows: list[RequestRow] = []
        self.failed: list[Lost] = []
        self.sent = self.done = 0
        self.first_failure: str | None = None
        self.last_answer = 0.0

    def result(self, say: Say, hear: Hear, at: float | None = None) -> dict[str, Any]:
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection in the middle of a run would hold up all streams
        cpu = time.process_time()
        try:
            driver = Scheduled(self) if self._on_schedule else Looped(self, at is not None)
            window = self._serve(driver, say, hear, at)
        finally:
            gc.enable()
            gc.unfreeze()
        return {
            "event": "done",
            "began": self.began,
            "window": window,
            **columns_found(self.rows, window, self._steps, self._on_schedule),
            "failed": lost_in(self.failed),
            "failures": len(self.failed),
            "unsent": driver.unsent,
            "waited": sorted(driver.waited_s),
            "first_failure": self.first_failure,
            "client_cpu_s": time.process_time() - cpu,
            "doubt_s": [self.streams.doubt_s / max(1, self.streams.pieces_read), self.streams.most_doubt_s],
        }

    def _serve(self, driver: Driver, say: Say, hear: Hear, at: float | None) -> tuple[float, float]:
        self.streams.start_count()
        self.streams.connect_ahead(driver.connections)
        while at is not None and (left := at - time.monotonic()) > 0:
            self.streams.turn(left)
        self.began = self.last_answer = self.told = self.streams.heard = time.monotonic()
        self._told_tokens = 0
        while not (self.given_up or driver.over):
            driver.send(time.monotonic())
            self.streams.turn(max(0.0, min(self.told + PROGRESS_S, driver.next_due) - time.monotonic()))
            driver.follow(say, hear)
            self._take_ended(driver)
            self._look(say, driver)
        return self._end(driver)

    @property
    def _on_schedule(self) -> bool:
        return bool(self.load["kind"] == "open_loop")

    @property
    def _steps(self) -> list[tuple[float, float]]:
        return [(self.began + begin, self.began + end) for begin, end in self.load.get("steps", ())]

    @property
    def given_up(self) -> bool:
        return len(self.failed) > max(FAILURES, FAILED_SHARE * self.sent) or self._silent

    @property
    def _silent(self) -> bool:
        """No user has heard anything for as long as one request may last."""
        waits = not self._on_schedule and len(self.failed) > 0
        return waits and time.monotonic() - self.streams.heard > self.streams.timeout_s

    def send(self, number: int, due: float | None = None) -> None:
        """Send a load's request by its number among those of this process."""
        request = self.first + self.stride * number
        self.sent += 1
        self.streams.send(RequestStream(request, self.requests.of(request), due))

    def _take_ended(self, driver: Driver) -> None:
        while self.streams.ended and not self.given_up:
            stream = self.streams.ended.popleft()
            self._note(stream)
            driver.ended(time.monotonic(), self._steps_of(stream))

    def _steps_of(self, stream: RequestStream) -> int:
        """Steps that an answer took: a token each, and as many as were asked for where it came in one piece."""
        answer, index = stream.answer, stream.number % len(self.requests)
        if stream.failure is not None:
            return 0
        return self.output_tokens[index] if len(answer.times) < 2 else max(answer.output_tokens, len(answer.times))

    def _note(self, stream: RequestStream, cut: bool = False) -> None:
        index = stream.number % len(self.requests)
        told, asked = stream.answer.usage[1] or 0, self.output_tokens[index]
        if stream.failure is None and told > max(asked, sum(stream.answer.tokens)):
            why = f"the server counts {told} output tokens of a request for {asked}"
            stream.failure, stream.failed = ("malformed", why), stream.read_until
        if stream.failure is not None:
            kind, why = stream.failure
            self.failed.append(Lost(index, stream.sent or stream.asked, stream.due, stream.failed, kind))
            self.first_failure = self.first_failure or why
            return
        answer = stream.answer
        self.rows.append(
            RequestRow(
                index, stream.sent, stream.due, answer.times, answer.tokens, answer.usage, not cut, asked, answer.cached
            )
        )
        self.done += not cut
        self.last_answer = max(self.last_answer, stream.read_until)

    def _look(self, say: Say, driver: Driver) -> None:
        """Look after the run now and then: end requests that last too long, and report progress."""
        now = time.monotonic()
        if now < self.told + PROGRESS_S:
            return
        self.streams.expire(now)
        tokens = self.streams.tokens_so_far
        say(
            event="progress",
            phase=driver.phase(now),
            elapsed_s=now - self.began,
            done=self.done,
            in_flight=len(self.streams.in_flight),
            tokens_per_s=(tokens - self._told_tokens) / (now - self.told),
        )
        self.told, self._told_tokens = now, tokens

    def _end(self, driver: Driver) -> tuple[float, float]:
        cut = self.streams.cut_off()
        while self.streams.ended:
            self._note(self.streams.ended.popleft())
        for stream in cut:
            if stream.sent:
                self._note(stream, cut=True)
        return driver.window or (self.began, self.last_answer)


class Looped:
    """Users who send their next request when the last one has ended."""

    def __init__(self, run: LoadRun, gated: bool) -> None:
        self.run = run
        self.loop = closed_loop(run.load, run.output_tokens, gated)
        self.connections = self.loop.concurrency
        self.next_due = float("inf")
        self.unsent: list[float] = []  # when those were due that a load was given up before
        self.waited_s: list[float] = []  # how long each that was sent was held back
        self.lead = Lead(run.streams.in_flight, run.streams.read)
        self._lived = 0.0  # steps by the answers that have ended
        self._unsettled = gated and self.loop.requests is None
        self._unopened = False

    @property
    def over(self) -> bool:
        if self.loop.phase != "over":
            return False
        return self.loop.requests is None or not (self.run.streams.in_flight or self.run.streams.ended)

    def send(self, now: float) -> None:
        for _ in range(self.loop.users_due()):
            self._send()

    def ended(self, now: float, steps: int) -> None:
        """An answer has ended. It lived for `steps`, whether the lead saw them or it came in one piece."""
        self._lived += steps / self.loop.started
        while self.loop.requests is None and self.loop.steps < int(self._lived):
            self.loop.stepped(now)
        self._send()

    def _send(self) -> None:
        if (number := self.loop.next_request()) is not None:
            self.run.send(number)

    def follow(self, say: Say, hear: Hear) -> None:
        if self.loop.requests is not None:
            return
        for at in self.lead.steps():
            self.loop.stepped(at)
        if (now := time.monotonic()) > self._latest:
            for _ in range(2 * round(self.loop.settled_steps + 1)):  # two periods of a convoy
                self.loop.stepped(now)
        if self._unsettled and self.loop.settled:
            self._unsettled, self._unopened = False, True
            say(event="settled")
        if self._unopened and (message := hear()):
            self._unopened = False
            self.loop.open(*message["window"])

    @property
    def _latest(self) -> float:
        """The time until which the window should open, then close. No request lasts longer than its time limit, so what
        has not settled after that never does: it has its window all the same."""
        limit_s = self.run.streams.timeout_s
        if self.loop.opened_at is not None:
            return self.loop.opened_at + self.loop.window_s + limit_s
        return self.run.began + (1 + self.loop.settled_steps / self.loop.lifetime_steps) * limit_s

    def phase(self, now: float) -> str:
        return self.loop.phase

    @property
    def window(self) -> tuple[float, float] | None:
        return self.loop.window


class Scheduled:
    """Requests at their times, whatever the server does."""

    def __init__(self, run: LoadRun) -> None:
        self.run = run
        window, most = run.load["window"], run.load.get("most")
        self.loop = OpenLoopPacer(run.load["schedule"], window and tuple(window), most)
        self.connections = min(AHEAD, most or AHEAD, most_within(run.load["schedule"], AHEAD_S))

    @property
    def over(self) -> bool:
        return self.loop.next_s is None and not (self.run.streams.in_flight or self.run.streams.ended)

    @property
    def next_due(self) -> float:
        return float("inf") if self.loop.next_s is None else self.run.began + self.loop.next_s

    @property
    def waited_s(self) -> list[float]:
        return self.loop.waited_s

    @property
    def unsent(self) -> list[float]:
        return [self.run.began + at for at in self.loop.schedule[self.loop.sent :]]

    def send(self, now: float) -> None:
        for number, due_s in self.loop.due(now - self.run.began):
            self.run.send(number, self.run.began + due_s)

    def ended(self, now: float, steps: int) -> None:
        self.loop.freed(now - self.run.began)

    def follow(self, say: Say, hear: Hear) -> None: ...

    def phase(self, now: float) -> str:
        return self.loop.phase(now - self.run.began)

    @property
    def window(self) -> tuple[float, float] | None:
        if self.loop.given is None:
            return None
        begin, end = self.loop.given
        return self.run.began + begin, self.run.began + end


Driver = Looped | Scheduled
