"""Pacing of a load: the times of requests and batches, and the phases of the load, as pure logic without a clock."""

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

    A request of n output tokens lives n engine steps. In a "staggered" ramp-up, users start at a rate of concurrency/n
    per step. This spreads their phases evenly, so every stretch of time looks alike. The window lasts for a lifetime,
    in which each user sends one request, or for half of one if that is longer than LONG_S. In a "burst", requests
    continue to end together (a lockstep cycle). Its window is a whole number of cycles of n + 1 steps, at least two, so
    that windows can be compared.

    Phases change at the end of a step: "ramp" for a lifetime, unless all start at once; "settle" for `settle_lifetimes`
    more, so that requests which end in the window were sent under the full load, but at least for one lockstep cycle;
    "window" for `window_s` or a little more; and "over". With a fixed number of `requests` all users start at once,
    there is no window, and the load is "over" when the last request has been sent.

    A user holds conversations of `turns` requests. Before each turn but the first, the user thinks for `think_s` on
    average, exponentially distributed, because equal times would bring users back together. Users begin at different
    turns, so that the mix of turns is steady after the ramp. Think times prolong the ramp, the settling and the window.

    A `gated` loop stays in "settle" until it is `given` the window that it shares with other loops.
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
    # Users without a request: the time from which they are free, and the number of their last request, or -1.
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
        """Return the number of users to start now. Call it at the beginning and after every step."""
        share = self.concurrency
        if self.staggered:
            lives = self.steps / self.lifetime_steps
            # Cycles that have passed. A cycle of a user is a life and a rest.
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
        """True if the window may open."""
        return self.steps >= self.settled_steps and self.rested

    def sent_s(self, number: int, elapsed_s: float) -> float:
        """Return the time from which a request's latency counts, in seconds since the beginning."""
        return elapsed_s

    def next_request(self, after: int | None = None) -> int | None:
        """Return the number of the request that a user sends now, or None if the loop is over.

        Args:
            after: number of the user's last request; None for a new user.
        """
        if self.phase == "over":
            return None
        self.sent += 1
        if after is not None and (after + 1) % self.turns:
            return after + 1
        number = self.turns * self.begun + self.first_turn(self.begun)
        self.begun += 1
        return number

    def first_turn(self, conversation: int) -> int:
        """Return the turn at which a conversation begins."""
        return conversation % self.turns if conversation < self.concurrency else 0

    def join(self, now: float, elapsed_s: float) -> None:
        """Free the users who are due to start."""
        for _ in range(self.users_due(elapsed_s)):
            heappush(self.free, (now, -1))

    def come_back(self, at: float, number: int) -> None:
        """Free the user of an ended request from the time `at` on."""
        heappush(self.free, (at, number))

    @property
    def next_free(self) -> float | None:
        """Time from which the next user is free, or None if each user has a request."""
        return self.free[0][0] if self.free else None

    def free_request(self, now: float) -> int | None:
        """Return the number of the request that the first free user sends, or None if nobody sends one."""
        if not self.free or self.free[0][0] > now:
            return None
        after = self.free[0][1]
        if (number := self.next_request(after if after >= 0 else None)) is not None:
            heappop(self.free)
        return number

    def rest_s(self, after: int) -> float:
        """Return the think time in seconds after a request, which is the same on every machine."""
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
        """Begin and end of the window, or None if the loop has no window or ended before it did."""
        if self.opened_at is None or self.closed_at is None or self.requests is not None:
            return None
        return self.opened_at, self.closed_at


class SchedulePacer(ClosedLoopPacer):
    """Requests at given ascending times since the beginning, each sent by its own user, whatever becomes of the others.

    Latencies count from the time at which a request is due, so that a request that a busy front end sends late does not
    look fast.
    """

    def __init__(self, times: Sequence[float]) -> None:
        super().__init__(len(times), lifetime_steps=1.0, requests=len(times))
        self.times = times

    @property
    def next_s(self) -> float | None:
        """Time at which the next request is due, in seconds since the beginning, or None after the last one."""
        return self.times[self.started] if self.started < len(self.times) else None

    def users_due(self, elapsed_s: float = 0.0) -> int:
        due, self.started = self.started, bisect_right(self.times, elapsed_s, self.started)
        return self.started - due

    def sent_s(self, number: int, elapsed_s: float) -> float:
        return self.times[number]

    def next_request(self, after: int | None = None) -> int | None:
        return super().next_request() if self.sent < self.started else None

    def come_back(self, at: float, number: int) -> None:
        """Do nothing, because each user sends only one request."""


def pacer_of(load: dict[str, Any], output_tokens: Sequence[int], gated: bool = False) -> ClosedLoopPacer:
    """Return the pacer of a load message. In a closed loop a request lives for the mean number of output tokens."""
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
    """Serve requests in batches one after the other, and return their rows and the rows of the steps.

    Args:
        way: `batching` and its numbers. "none" makes a batch of each request. "static" waits for `batch` requests or
            all that are left. "dynamic" starts with fewer if the first one has waited for `wait_s` seconds.
        times: arrival time of each request, ascending.
        lengths: prompt and output tokens of the workload's rows, through which the requests cycle.
        serve: function of a batch's time, rows, longest output and number of earlier requests. It returns the begin of
            the batch, the end of each step, and the end of the batch.
        now: time at which all begins.

    Raises:
        ValueError: if `batching` is unknown.
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
