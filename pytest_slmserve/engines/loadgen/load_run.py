"""One load on one server: sends requests as the load says, tells of it twice a second, and says what was found."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from pytest_slmserve.engines.loadgen.columns import Lost, RequestRow, found_in, lost_in
from pytest_slmserve.engines.loadgen.schedules import FAILED_SHARE, FAILURES, OpenLoopPacer, most_within
from pytest_slmserve.engines.loadgen.step_detector import Lead
from pytest_slmserve.engines.loadgen.streams import RequestStream, Streams
from pytest_slmserve.engines.loadgen.target import Bodies
from pytest_slmserve.engines.worker.slm_pacing import closed_loop

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
            **found_in(self.rows, window, self._steps, self._on_schedule),
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
