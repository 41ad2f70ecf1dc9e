"""Schedules of an open loop, which wait for nobody: which request is sent when, and until when."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

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
