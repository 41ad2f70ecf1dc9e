"""A GPU's profiling counters that change every 0.1 s, as seen on an H200, and a clock that only polls move."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.telemetry.gpu import TICK_S

OLD_S, COSTS_S = 0.03, 0.002  # how old a state is when it shows, and what it costs to take it


class Lost(Exception):
    """What a GPU that cannot be read raises."""


@dataclass
class FakeGpm:
    """Counters of a GPU with planted kernels, and the clock by which they change: at `phase`, and every tick after it.
    late: seconds by which polls are late, by their number. fails_at: the sample, or the answer, that there is not."""

    phase: float = 0.03
    late: dict[int, float] = field(default_factory=dict)
    fails_at: tuple[str, int] = ("", 0)
    kernels: list[tuple[float, float]] = field(default_factory=list)
    now: float = 1000.0
    polls: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)  # not freed
    ticks: list[int] = field(default_factory=list)  # of each sample
    metrics: dict[int, int] = field(default_factory=lambda: {2: of.SM_ACTIVE, 1: of.ENGINE_ACTIVE})

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.polls += 1
        self.now += seconds + self.late.get(self.polls, 0.0)

    def count(self, function: str) -> None:
        self.calls[function] = self.calls.get(function, 0) + 1
        if self.fails_at == (function, self.calls[function]):
            raise Lost

    def sample(self) -> int:
        self.count("sample")
        self.ticks.append(math.floor((self.now - self.phase) / TICK_S))
        self.now += COSTS_S
        self.live.add(len(self.ticks) - 1)
        return len(self.ticks) - 1

    def free(self, sample: int) -> None:
        self.live.remove(sample)

    def busy_before(self, tick: int) -> float:
        at_s = self.phase + tick * TICK_S - OLD_S
        return sum(max(0.0, min(ends, at_s) - begins) for begins, ends in self.kernels)

    def between(self, first: int, last: int) -> list[SimpleNamespace]:
        """Of two samples in one tick 0, as an H200 has it; and NVML refuses another number."""
        self.count("between")
        assert {first, last} <= self.live
        since, now = self.ticks[first], self.ticks[last]
        share = (self.busy_before(now) - self.busy_before(since)) / (TICK_S * max(1, now - since))
        return [SimpleNamespace(nvmlReturn=code, value=100 * each) for code, each in ((3, math.nan), (0, share))]

    def serve(self, seconds: float, share: float = 1.0, steps: int = 7, rest_s: float = 0.0) -> float:
        """Kernels of equal steps, each with a gap behind it, and a rest; returns their seconds."""
        begins = [self.now + i * seconds / steps for i in range(steps)]
        self.kernels += [(at_s, at_s + share * seconds / steps) for at_s in begins]
        self.now += seconds + rest_s
        return share * seconds
