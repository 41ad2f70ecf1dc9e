"""Which request is sent when, and until when: a closed loop by the worker's own rule, and a schedule that waits for
nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_slmserve.worker.admission import ClosedLoop

FAILURES, FAILED_SHARE = 5, 0.05  # a load is given up when more fail than either


def closed_loop(load: dict[str, Any], output_tokens: Sequence[int], gated: bool) -> ClosedLoop:
    """Also a burst, which is a closed loop of as many users as requests."""
    burst = load["kind"] == "burst"
    return ClosedLoop(
        load["requests"] if burst else load["concurrency"],
        sum(output_tokens) / len(output_tokens),
        load.get("settle_lifetimes", 0.0),
        load.get("window_s", 0.0),
        load["requests"],
        load.get("starts", "together"),
        gated,
    )


class OpenLoop:
    """Requests at given times, in seconds since the beginning, in ascending order. window: None for all of it."""

    def __init__(self, schedule: Sequence[float], window: tuple[float, float] | None) -> None:
        self.schedule, self.given = schedule, window
        self.sent = 0

    @property
    def next_s(self) -> float | None:
        """When the next one is due; None: all were sent."""
        return self.schedule[self.sent] if self.sent < len(self.schedule) else None

    def due(self, elapsed_s: float) -> list[int]:
        """Numbers of the requests to send now."""
        first = self.sent
        while self.sent < len(self.schedule) and self.schedule[self.sent] <= elapsed_s:
            self.sent += 1
        return list(range(first, self.sent))

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
    """What one of `count` client processes does of a load: every count-th request, and as large a part of the users."""
    mine = {**load, "part": [index, count]}
    if load["kind"] == "open_loop":
        return mine | {"schedule": load["schedule"][index::count]}
    if load.get("requests") is not None:
        mine["requests"] = len(range(index, load["requests"], count))
    if "concurrency" in load:
        mine["concurrency"] = len(range(index, load["concurrency"], count))
    return mine


def parts_of(load: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """One part for each process, but none without a request."""
    if load["kind"] == "open_loop":
        least = len(load["schedule"])
    else:
        least = min(n for n in (load.get("requests"), load.get("concurrency")) if n is not None)
    count = max(1, min(processes, least))
    return [part_of(load, index, count) for index in range(count)]
