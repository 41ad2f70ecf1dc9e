"""Pacing of a load: when the next request is sent or the next batch made, and in which phase the load is. Pure: counts
and times in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHARED_PERIODS = 2.5  # of the slowest: two of each are whole then, also where they last a fifth longer than before


class ClosedLoopPacer:
    """`concurrency` users, each of whom sends its next request when the last one has ended.

    A request of n output tokens lives n engine steps. Users of a "staggered" ramp-up start at concurrency/n per step:
    that spreads their phases evenly, however fast the engine is, and every later stretch of time looks like every
    other. Users of a "burst" go on ending together (a convoy, as when a batch job sends all it has), so their window is
    a whole number of the convoy's periods of n + 1 steps, and two at least: one can be compared with another.

    Phases: "ramp" for one lifetime of a request, "settle" for `settle_lifetimes` more (so that a request that ends in
    the window was sent under the full load), "window" for `window_s` or a little more, then "over"; all change at the
    end of a step. With a fixed number of `requests` there is no window: all users start
    at once and it is over when the last request has been sent.

    A loop that is `gated` stays in "settle" until somebody who watches several of them says from when to when the
    window shall be (`open`), the same for all. A burst's window ends with its last whole period by then.
    """

    def __init__(
        self,
        concurrency: int,
        lifetime_steps: float,
        settle_lifetimes: float = 0.0,
        window_s: float = 0.0,
        requests: int | None = None,
        ramp_up: str = "staggered",
        gated: bool = False,
    ) -> None:
        self.concurrency = concurrency
        self.lifetime_steps = max(lifetime_steps, 1.0)
        self.settled_steps = self.lifetime_steps * (1 + settle_lifetimes)
        self.window_s = window_s
        self.requests = requests
        self.staggered = ramp_up == "staggered" and requests is None
        self.started = self.sent = self.steps = self.opened_step = 0
        self.opened_at: float | None = None
        self.closed_at: float | None = None
        self.whole_until: float | None = None
        self.gated = gated
        self.given: tuple[float, float] | None = None

    def users_due(self) -> int:
        """The number of users to start now; ask at the beginning, then after every step."""
        share = 1 + int(self.steps * self.concurrency / self.lifetime_steps) if self.staggered else self.concurrency
        due = min(self.concurrency, share)
        due, self.started = due - self.started, due
        return due

    def stepped(self, now: float) -> None:
        """A step has ended."""
        self.steps += 1
        if self.opened_at is None:
            if self._may_open(now):
                self.opened_at, self.opened_step = now, self.steps
        elif self.closed_at is None:
            if self._period_ends():
                self.whole_until = now
            if self._may_close(now):
                self.closed_at = self.whole_until or now

    @property
    def settled(self) -> bool:
        return self.steps >= self.settled_steps

    def open(self, begin: float, end: float) -> None:
        """Let a gated loop's window be from one time to another."""
        self.given = begin, end

    def _may_open(self, now: float) -> bool:
        return self.settled and (not self.gated or (self.given is not None and now >= self.given[0]))

    def _may_close(self, now: float) -> bool:
        assert self.opened_at is not None
        if self.given:
            return now >= self.given[1]
        return now >= self.opened_at + self.window_s and self.whole_until == now

    def _period_ends(self) -> bool:
        periods, rest = divmod(self.steps - self.opened_step, round(self.lifetime_steps + 1))
        return self.staggered or (periods >= 2 and rest == 0)

    def sent_s(self, number: int, elapsed_s: float) -> float:
        """The time from which a request's latency counts, in seconds since the beginning: here when a user is free to
        send it."""
        return elapsed_s

    def next_request(self) -> int | None:
        """Number of the request a free user sends now, or None when the loop is over."""
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
        """The begin and the end of the window; None for a loop that has no window, or that ended before its window
        did."""
        if self.opened_at is None or self.closed_at is None or self.requests is not None:
            return None
        return self.opened_at, self.closed_at


def closed_loop(load: dict[str, Any], output_tokens: Sequence[int], gated: bool) -> ClosedLoopPacer:
    """The closed loop that a message tells of; a request lives as many steps as it has output tokens, in the mean."""
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
    """Seconds of a window that several loops share, the slowest of which has settled `settled_after_s` after it began:
    those that the load asks for, and of a burst enough for two whole periods."""
    convoys_s = SHARED_PERIODS * settled_after_s / (1 + load["settle_lifetimes"]) if load["ramp_up"] == "burst" else 0.0
    return max(float(load["window_s"]), convoys_s)


class SchedulePacer:
    """Requests at given times since the beginning, ascending, each with a user of its own, whatever becomes of those
    before it; over when the last has been sent. A window it has none.

    Latencies count from when a request is due, so that one that is sent late by a busy front end does not look fast.
    """

    gated = False
    settled = True
    window = None

    def __init__(self, times: Sequence[float]) -> None:
        self.times = times
        self.requests = self.concurrency = len(times)
        self.due = self.started = self.sent = 0

    @property
    def next_s(self) -> float | None:
        """The time at which the next request is due, in seconds since the beginning; None once all were due."""
        return self.times[self.due] if self.due < len(self.times) else None

    def arrive(self, elapsed_s: float) -> None:
        """Count as due all requests whose time has come after `elapsed_s` seconds."""
        while self.due < len(self.times) and self.times[self.due] <= elapsed_s:
            self.due += 1

    def users_due(self) -> int:
        """The number of users to start now: one for each request that became due since the last call."""
        due, self.started = self.due - self.started, self.due
        return due

    def stepped(self, now: float) -> None:
        """A step has ended, which changes nothing."""

    def sent_s(self, number: int, elapsed_s: float) -> float:
        return self.times[number]

    def next_request(self) -> int | None:
        """Number of the request a user sends now, or None where none is due."""
        if self.sent >= self.due:
            return None
        self.sent += 1
        return self.sent - 1

    @property
    def phase(self) -> str:
        return "over" if self.sent >= self.requests else "window"


def next_batch(
    batching: str, times: Sequence[float], first: int, now: float, most: int, wait_s: float
) -> tuple[float, int]:
    """The time at which the next batch starts, and how many requests it has, the `first` that waits among them.

    times: when each request comes, ascending. now: from when on the engine is free. All times are in seconds since one
    beginning.
    none: each request alone. static: `most` requests, or all that are left; it waits until they are there. dynamic: as
    many as have come, `most` at most; it starts when these are there, or when the first has waited for `wait_s`. Raises
    ValueError for another way to batch."""
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
    """Rows of the steps of a batch, and of its requests, as a worker tells of them.

    requests: number, time it was sent, prompt and output tokens of each. began, ended: when the batch did. stamps: the
    end of each step."""
    slots = len(requests)
    computed = slots * max(prompt for _, _, prompt, _ in requests)
    steps = [
        (stamp, slots, 0, sum(tokens > number for *_, tokens in requests), 0 if number else computed, None, 0)
        for number, stamp in enumerate(stamps)
    ]
    return steps, [(row, at, began, stamps[0], ended, *tokens, True, None) for row, at, *tokens in requests]
