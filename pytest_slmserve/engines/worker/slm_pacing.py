"""Pacing of a load: when the next request is sent or the next batch is made, and in which phase the load is. Pure:
counts and times in, decisions out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

SHARED_CYCLES = 2.5  # of the slowest: two of each engine are whole then, also if they last a fifth longer than before


@dataclass
class ClosedLoopPacer:
    """`concurrency` users, each of whom sends the next request when the last one has ended.

    A request of n output tokens lives n engine steps. Users of a "staggered" ramp-up start at concurrency/n per step.
    That spreads their phases evenly, however fast the engine is, and every later stretch of time looks like every
    other. Requests of a "burst" go on ending together (a lockstep cycle, as when a batch job sends all it has). So the
    window of a burst is a whole number of cycles of n + 1 steps, at least two: then windows can be compared.

    Phases: "ramp" for one lifetime of a request, "settle" for `settle_lifetimes` more (so that a request that ends in
    the window was sent under the full load), "window" for `window_s` or a little more, then "over". All change at the
    end of a step. With a fixed number of `requests` there is no window: all users start at once, and the phase is
    "over" as soon as the last request has been sent.

    A loop that is `gated` stays in "settle" until `open` tells it the window that it shares with other loops. The
    window of a burst ends with the last whole cycle before the end of the shared window.
    """

    concurrency: int
    lifetime_steps: float
    settle_lifetimes: float = 0.0
    window_s: float = 0.0
    requests: int | None = None
    ramp_up: str = "staggered"
    gated: bool = False
    started: int = 0  # users
    sent: int = 0
    steps: int = 0
    opened_step: int = 0
    opened_at: float | None = None
    closed_at: float | None = None
    whole_until: float | None = None  # the end of the last whole cycle in the window
    given: tuple[float, float] | None = None  # the window that it shares

    def __post_init__(self) -> None:
        self.lifetime_steps = max(self.lifetime_steps, 1.0)
        self.settled_steps = self.lifetime_steps * (1 + self.settle_lifetimes)
        self.staggered = self.ramp_up == "staggered" and self.requests is None

    def users_due(self, elapsed_s: float = 0.0) -> int:
        """The number of users to start now, at whatever time. To be called at the beginning, and after every step."""
        share = 1 + int(self.steps * self.concurrency / self.lifetime_steps) if self.staggered else self.concurrency
        due = min(self.concurrency, share)
        due, self.started = due - self.started, due
        return due

    def stepped(self, now: float) -> None:
        """Count a step that has ended at `now`."""
        self.steps += 1
        if self.opened_at is None:
            if self.settled and (not self.gated or (self.given is not None and now >= self.given[0])):
                self.opened_at, self.opened_step = now, self.steps
        elif self.closed_at is None:
            cycles, rest = divmod(self.steps - self.opened_step, round(self.lifetime_steps + 1))
            if self.staggered or (cycles >= 2 and rest == 0):
                self.whole_until = now
            ends = self.given[1] if self.given else self.opened_at + self.window_s
            if now >= ends and (self.given or self.whole_until == now):
                self.closed_at = self.whole_until or now

    @property
    def settled(self) -> bool:
        """Whether the window may open."""
        return self.steps >= self.settled_steps

    def open(self, begin: float, end: float) -> None:
        """Set the begin and the end of a gated loop's window."""
        self.given = begin, end

    def sent_s(self, number: int, elapsed_s: float) -> float:
        """The time from which a request's latency counts, in seconds since the beginning: here the time at which a user
        is free to send it."""
        return elapsed_s

    def next_request(self) -> int | None:
        """The number of the request that a free user sends now; None if the loop is over."""
        if self.phase == "over":
            return None
        self.sent += 1
        return self.sent - 1

    @property
    def phase(self) -> str:
        if self.requests is not None:
            return "over" if self.sent >= self.requests else "window"
        if self.opened_at is None:
            return "ramp" if self.steps < self.lifetime_steps else "settle"
        return "window" if self.closed_at is None else "over"

    @property
    def window(self) -> tuple[float, float] | None:
        """The begin and the end of the window; None if the loop has no window, or ended before its window did."""
        if self.opened_at is None or self.closed_at is None or self.requests is not None:
            return None
        return self.opened_at, self.closed_at


@dataclass
class SchedulePacer:
    """Requests at given times since the beginning, ascending, each with a user of its own, whatever becomes of the
    requests before it. The phase is "over" as soon as the last one has been sent, and there is no window.

    Latencies count from the time at which a request is due, so that a request that a busy front end sends late does not
    look fast.
    """

    gated: ClassVar = False
    settled: ClassVar = True
    window: ClassVar = None

    times: Sequence[float]
    due: int = 0
    sent: int = 0
    started: int = 0

    def __post_init__(self) -> None:
        self.requests = self.concurrency = len(self.times)

    @property
    def next_s(self) -> float | None:
        """The time at which the next request is due, in seconds since the beginning; None after the last one."""
        return self.times[self.due] if self.due < len(self.times) else None

    def users_due(self, elapsed_s: float) -> int:
        """The number of users to start now: one for each request that became due since the last call."""
        self.due = bisect_right(self.times, elapsed_s, self.due)
        due, self.started = self.due - self.started, self.due
        return due

    def stepped(self, now: float) -> None:
        """Do nothing: steps do not change a schedule."""

    def sent_s(self, number: int, elapsed_s: float) -> float:
        return self.times[number]

    def next_request(self) -> int | None:
        """The number of the request that a user sends now; None if no request is due."""
        if self.sent >= self.due:
            return None
        self.sent += 1
        return self.sent - 1

    @property
    def phase(self) -> str:
        return "over" if self.sent >= self.requests else "window"


Pacer = ClosedLoopPacer | SchedulePacer


def closed_loop(load: dict[str, Any], output_tokens: Sequence[int], gated: bool) -> ClosedLoopPacer:
    """The closed loop of a message. The lifetime of a request in steps is the mean number of output tokens."""
    return ClosedLoopPacer(
        load["concurrency"],
        sum(output_tokens) / len(output_tokens),
        load["settle_lifetimes"],
        load["window_s"],
        load["requests"],
        load["ramp_up"],
        gated,
    )


def shared_window_s(load: dict[str, Any], settled_after_s: float) -> float:
    """Seconds of the window that several loops share: those of the load, and for a burst enough for two whole cycles.
    settled_after_s: Seconds after which the slowest loop has settled."""
    cycles_s = SHARED_CYCLES * settled_after_s / (1 + load["settle_lifetimes"]) if load["ramp_up"] == "burst" else 0.0
    return max(float(load["window_s"]), cycles_s)


def next_batch(
    batching: str, times: Sequence[float], first: int, now: float, most: int, wait_s: float
) -> tuple[float, int]:
    """The time at which the next batch starts, and the number of its requests, which begin with number `first`.

    Args:
        batching: "none" makes a batch of each request. "static" waits for `most` requests, or all that are left.
            "dynamic" starts when `most` requests have come, or with fewer when the first one has waited for `wait_s`.
        times: The time at which each request comes, ascending, in seconds since the beginning.
        now: The time from which the engine is free.

    Raises:
        ValueError: There is no such way to batch.
    """
    last = min(first + most, len(times)) - 1
    match batching:
        case "none":
            return max(now, times[first]), 1
        case "static":
            return max(now, times[last]), last - first + 1
        case "dynamic":
            full = times[last] if last - first + 1 == most else float("inf")
            starts = max(now, min(full, times[first] + wait_s))
            return starts, sum(times[i] <= starts for i in range(first, last + 1))
    raise ValueError(f"unknown batching {batching!r}")


def batch_rows(
    requests: Sequence[tuple[int, float, int, int]], began: float, stamps: Sequence[float], ended: float
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The rows of the steps of a batch, and the rows of its requests, as workers report them.

    requests: The number, the time of sending, the prompt tokens and the output tokens of each request. began, ended:
    Times of the batch. stamps: The end of each step.
    """
    slots = len(requests)
    computed = slots * max(prompt for _, _, prompt, _ in requests)
    steps = [
        (stamp, slots, 0, sum(tokens > number for *_, tokens in requests), 0 if number else computed, None, 0)
        for number, stamp in enumerate(stamps)
    ]
    return steps, [(row, at, began, stamps[0], ended, *tokens, True, None) for row, at, *tokens in requests]
