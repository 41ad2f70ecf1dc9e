"""Pacing of a load: when the next request is sent or the next batch is made, and in which phase the load is. Pure:
counts and times in, decisions out."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

LONG_S = 5.0  # as in `schema.specs`, which a worker cannot import


@dataclass
class ClosedLoopPacer:
    """`concurrency` users, each of whom sends the next request when the last one has ended.

    A request of n output tokens lives n engine steps. Users of a "staggered" ramp-up start at concurrency/n per step.
    That spreads their phases evenly, however fast the engine is, and every later stretch of time looks like every
    other. Its window lasts for a whole lifetime, in which each user sends one request, or for half of one if that is
    longer than LONG_S. Requests of a "burst" go on ending together (a lockstep cycle, as when a batch job sends all it
    has). So the window of a burst is a whole number of cycles of n + 1 steps, at least two: then windows can be
    compared.

    Phases: "ramp" for one lifetime of a request, unless all start at once; "settle" for `settle_lifetimes` more (so
    that a request that ends in the window was sent under the full load), or for one lockstep cycle at least; "window"
    for `window_s` or a little more; then "over". All change at the end of a step. With a fixed number of `requests`
    there is no window: all users start at once, and the phase is "over" as soon as the last request has been sent.

    A user holds conversations of `turns` requests, whose numbers follow each other, and thinks before each turn but the
    first: for `think_s` in the mean, exponentially distributed, because users who think equally long would come back
    together. Users begin at different turns, so that the mix of turns is steady after the ramp. With a think time the
    ramp lasts for a lifetime and a think time, the load settles for both once more, and the window is no shorter than a
    think time.

    A loop that is `gated` stays in "settle" until it is `given` the window that it shares with other loops. The window
    of a burst ends with the last whole cycle before the end of the shared window.
    """

    concurrency: int
    lifetime_steps: float
    settle_lifetimes: float = 0.0
    window_s: float = 0.0
    requests: int | None = None
    ramp_up: str = "staggered"
    gated: bool = False
    turns: int = 1
    think_s: float = 0.0
    started: int = 0  # users
    sent: int = 0
    begun: int = 0  # conversations
    # Users who are free: since when, or, if they think, from when on, and the number of their last request, or -1.
    free: list[tuple[float, int]] = field(default_factory=list)
    ramped: tuple[int, float] | None = None  # step and time at which all users had started
    rested: bool = True  # a lifetime and a think time have passed since then
    steps: int = 0
    opened_step: int = 0
    opened_at: float | None = None
    closed_at: float | None = None
    whole_until: float | None = None  # the last step at which the window may end
    given: Sequence[float] | None = None  # begin and end of the window that it shares

    def __post_init__(self) -> None:
        self.lifetime_steps = max(self.lifetime_steps, 1.0)
        self.staggered = self.ramp_up == "staggered" and self.requests is None
        self.settled_steps = self.lifetime_steps * max(1, self.settle_lifetimes + self.staggered)
        self.rested = not self.think_s

    def users_due(self, elapsed_s: float = 0.0) -> int:
        """The number of users to start now, at whatever time. To be called at the beginning, and after every step."""
        share = self.concurrency
        if self.staggered:
            lives = self.steps / self.lifetime_steps
            # A cycle of a user has a life and a rest, and so many of these cycles have passed.
            cycles = lives / (1 + lives * self.think_s / elapsed_s) if self.think_s and elapsed_s else lives
            share = 1 + int(self.concurrency * cycles)
        due = min(self.concurrency, share)
        due, self.started = due - self.started, due
        return due

    def stepped(self, now: float) -> None:
        """Count a step that has ended at `now`."""
        self.steps += 1
        if self.ramped is None and self.started >= self.concurrency:
            self.ramped = self.steps, now
        if not self.rested and self.ramped is not None:
            step, at = self.ramped
            self.rested = self.steps - step >= self.lifetime_steps and now - at >= self.think_s
        if self.opened_at is None:
            if self.settled and (not self.gated or (self.given is not None and now >= self.given[0])):
                self.opened_at, self.opened_step = now, self.steps
        elif self.closed_at is None:
            seen = self.steps - self.opened_step
            if self.staggered:
                whole = seen >= self.lifetime_steps * (0.5 if now - self.opened_at >= LONG_S else 1)
            else:
                cycles, rest = divmod(seen, round(self.lifetime_steps + 1))
                whole = cycles >= 2 and rest == 0
            if whole:
                self.whole_until = now
            ends = self.given[1] if self.given else self.opened_at + max(self.window_s, self.think_s)
            if now >= ends and (self.given or self.whole_until == now):
                self.closed_at = self.whole_until or now

    @property
    def settled(self) -> bool:
        """Whether the window may open."""
        return self.steps >= self.settled_steps and self.rested

    def sent_s(self, number: int, elapsed_s: float) -> float:
        """The time from which a request's latency counts, in seconds since the beginning: here the time at which a user
        is free to send it."""
        return elapsed_s

    def next_request(self, after: int | None = None) -> int | None:
        """The number of the request that a user sends now, whose last one had the number `after`; None if the loop is
        over."""
        if self.phase == "over":
            return None
        self.sent += 1
        if after is not None and (after + 1) % self.turns:
            return after + 1
        number = self.turns * self.begun + self.first_turn(self.begun)
        self.begun += 1
        return number

    def first_turn(self, conversation: int) -> int:
        """The turn at which the conversation of this number begins."""
        return conversation % self.turns if conversation < self.concurrency else 0

    def join(self, now: float, elapsed_s: float) -> None:
        """Have the users who are due to start be free."""
        for _ in range(self.users_due(elapsed_s)):
            heappush(self.free, (now, -1))

    def come_back(self, at: float, number: int) -> None:
        """Have the user whose request of this number has ended be free from then on."""
        heappush(self.free, (at, number))

    @property
    def next_free(self) -> float | None:
        """The time from which the next user is free; None if each has a request."""
        return self.free[0][0] if self.free else None

    def free_request(self, now: float) -> int | None:
        """The number of the request that the user who is free for the longest time sends; None if nobody is free, or
        sends any more."""
        if not self.free or self.free[0][0] > now:
            return None
        after = self.free[0][1]
        if (number := self.next_request(after if after >= 0 else None)) is not None:
            heappop(self.free)
        return number

    def rest_s(self, after: int) -> float:
        """Seconds for which the user whose request of this number has ended thinks before the next one: the same for
        one number on every machine."""
        if not self.think_s or not (after + 1) % self.turns:
            return 0.0
        return -self.think_s * math.log(1 - random.Random(after).random())

    @property
    def phase(self) -> str:
        if self.requests is not None:
            return "over" if self.sent >= self.requests else "window"
        if self.opened_at is None:
            return "ramp" if self.staggered and self.steps < self.lifetime_steps else "settle"
        return "window" if self.closed_at is None else "over"

    @property
    def window(self) -> tuple[float, float] | None:
        """The begin and the end of the window; None if the loop has no window, or ended before its window did."""
        if self.opened_at is None or self.closed_at is None or self.requests is not None:
            return None
        return self.opened_at, self.closed_at


class SchedulePacer(ClosedLoopPacer):
    """Requests at given times since the beginning, ascending, each with a user of its own, whatever becomes of the
    requests before it.

    Latencies count from the time at which a request is due, so that a request that a busy front end sends late does not
    look fast.
    """

    def __init__(self, times: Sequence[float]) -> None:
        super().__init__(len(times), lifetime_steps=1.0, requests=len(times))
        self.times = times

    @property
    def next_s(self) -> float | None:
        """The time at which the next request is due, in seconds since the beginning; None after the last one."""
        return self.times[self.started] if self.started < len(self.times) else None

    def users_due(self, elapsed_s: float = 0.0) -> int:
        """The number of users to start now: one for each request that became due since the last call."""
        due, self.started = self.started, bisect_right(self.times, elapsed_s, self.started)
        return self.started - due

    def sent_s(self, number: int, elapsed_s: float) -> float:
        return self.times[number]

    def next_request(self, after: int | None = None) -> int | None:
        """The number of the request that a user sends now; None if no request is due."""
        return super().next_request() if self.sent < self.started else None

    def come_back(self, at: float, number: int) -> None:
        """Let the user of a request that has ended go."""


def pacer_of(load: dict[str, Any], output_tokens: Sequence[int], gated: bool = False) -> ClosedLoopPacer:
    """The pacer of a message. In a closed loop a request lives as many steps as the mean of the output tokens."""
    if load["kind"] == "open_loop":
        return SchedulePacer(load["schedule"])
    names = ("concurrency", "settle_lifetimes", "window_s", "requests", "ramp_up", "turns", "think_s")
    asked = {name: load[name] for name in names if name in load}
    return ClosedLoopPacer(lifetime_steps=sum(output_tokens) / len(output_tokens), gated=gated, **asked)


def serve_batches(
    way: dict[str, Any],
    times: Sequence[float],
    lengths: Sequence[tuple[int, int]],
    serve: Callable[[float, list[int], int, int], tuple[float, Sequence[float], float]],
    now: float = 0.0,
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Serve requests in batches that are made one after the other, and return their rows and those of the steps. Raises
    ValueError if there is no such way to batch.

    way: The way to batch, and its numbers. "none" makes a batch of each request. "static" waits for `batch` requests,
    or all that are left. "dynamic" starts when `batch` requests have come, or with fewer when the first one has waited
    for `wait_s` seconds. times: The time at which each request comes, ascending, by the clock of `now`, at which all
    begins. lengths: Prompt and output tokens of each row of the workload, through which the requests cycle. serve:
    Serves a batch, from its time, its rows, the tokens of its longest output, and the number of requests before it.
    Returns the begin of the batch, the end of each step, and the end of the batch.
    """
    samples: list[tuple[Any, ...]] = []
    steps: list[tuple[Any, ...]] = []
    while (first := len(samples)) < len(times):
        last = min(first + way["batch"], len(times)) - 1
        if way["batching"] == "none":
            starts, last = max(now, times[first]), first
        elif way["batching"] == "static":
            starts = max(now, times[last])
        elif way["batching"] == "dynamic":
            full = times[last] if last - first + 1 == way["batch"] else float("inf")
            starts = max(now, min(full, times[first] + way["wait_s"]))
            last = bisect_right(times, starts, first, last + 1) - 1
        else:
            raise ValueError(f"unknown batching {way['batching']!r}")
        rows = [number % len(lengths) for number in range(first, last + 1)]
        batch = [lengths[row] for row in rows]
        began, stamps, now = serve(starts, rows, max(output for _, output in batch), first)
        computed = len(batch) * max(prompt for prompt, _ in batch)
        for number, stamp in enumerate(stamps):
            new_tokens = sum(output > number for _, output in batch)
            steps.append((stamp, len(batch), 0, new_tokens, 0 if number else computed, None, 0))
        for row, sent, each in zip(rows, times[first:], batch):
            samples.append((row, sent, began, stamps[0], now, *each, True, None))
    return samples, steps
