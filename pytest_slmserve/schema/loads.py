"""Loads: how requests are sent to an engine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Literal

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.literals import Starts

LATER_OF_A_LOAD = {"steps": (), "max_concurrency": None, "burstiness": 1.0}


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests in flight until the window has passed; each that ends is followed by the next.

    starts: "spread" over one request's lifetime, so that every step looks like every other (a service under steady
    traffic), or "together" (a batch job: the requests go on ending together). After that lifetime the loop runs on for
    `settle_lifetimes` more, so that what ends in the window was sent under the full load; only then the window of at
    least `window_s` opens. With `requests` set there is no window: exactly
    so many are served.
    """

    concurrency: int
    window_s: float = 5.0
    settle_lifetimes: float = 1.0
    requests: int | None = None
    starts: Starts = "spread"
    kind: Literal["closed_loop"] = "closed_loop"

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise BadUsage(f"concurrency {self.concurrency} is not positive", "1 or more")
        if self.requests is None and self.window_s <= 0:
            raise BadUsage(f"a window of {self.window_s} s measures nothing", "--slm-window 5")


@dataclass(frozen=True, slots=True)
class Burst:
    """All of `requests` at once; what a batch job, or a warm-up, does."""

    requests: int
    kind: Literal["burst"] = "burst"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests sent when a schedule says, whatever becomes of those before them.

    arrivals: how the schedule came about, in words that no other schedule has. rate: requests per second, as asked for.
    schedule_s: when each is sent, since the beginning; a record has the times in its run instead. Those sent from
    `settle_s` on for `window_s` are judged, whenever they end; meanwhile the load goes on, for `settle_s` more.
    steps: of a ramp, requests per second and seconds of each; a step settles for `settle_s` and is judged by itself.
    """

    arrivals: str
    rate: float
    settle_s: float
    window_s: float
    schedule_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    steps: tuple[tuple[float, float], ...] = ()
    kind: Literal["open_loop"] = "open_loop"

    def __post_init__(self) -> None:
        if self.settle_s < 0 or self.window_s <= 0:
            raise BadUsage(f"a window of {self.window_s} s after {self.settle_s} s", "10 s after 5 s")
        if any(seconds <= self.settle_s for _, seconds in self.steps):
            raise BadUsage(f"a step that is over before it has settled for {self.settle_s:g} s", "longer steps")

    @property
    def step_windows_s(self) -> list[tuple[float, float]]:
        """From and until when the requests of each step are judged, in seconds since the run began."""
        ends = accumulate(seconds for _, seconds in self.steps)
        return [(end - seconds + self.settle_s, end) for (_, seconds), end in zip(self.steps, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Job:
    """So many requests, each once, served to the end: what `vllm bench serve --num-prompts --request-rate` does.

    rate: requests per second at which they arrive, in the mean, by the seed; None: all at once. burstiness: 1.0 is
    independently of each other (Poisson), less comes in bursts, more is more even, None is constant.
    max_concurrency: in flight at most, as behind a gateway that holds the others back. How long they wait there is no
    part of their latencies (as with vLLM's `--max-concurrency`), but told. schedule_s: when each comes, since the
    beginning, as `workload.arrivals.job` fills it in; it follows from the rest, so a record does without.
    """

    requests: int
    rate: float | None = None
    seed: int = 0
    schedule_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    max_concurrency: int | None = None
    burstiness: float | None = 1.0
    kind: Literal["job"] = "job"

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise BadUsage(f"a job of {self.requests} requests", "requests=500, or another number from 1 on")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise BadUsage(f"{self.rate} requests per second", "rate=10; None for all at once")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BadUsage(f"{self.max_concurrency} in flight at most", "max_concurrency=64; None for as many as come")
        if self.burstiness is not None and not 0 < self.burstiness < math.inf:
            raise BadUsage(f"arrivals of burstiness {self.burstiness}", "burstiness=0.5; None for constant gaps")
        if self.rate is None and self.burstiness != 1:
            raise BadUsage("what comes all at once has no burstiness", "rate=10 too")

    @property
    def further(self) -> str:
        """ ", burstiness 0.5, 64 in flight at most": what there is beside number and rate, or nothing."""
        arrivals = ", at constant gaps" if self.burstiness is None else f", burstiness {self.burstiness:g}"
        held_back = "" if self.max_concurrency is None else f", {self.max_concurrency:,} in flight at most"
        return ("" if self.burstiness == 1 else arrivals) + held_back

    @property
    def times(self) -> tuple[float, ...]:
        """The schedule. Raises BadUsage where it was not filled in, as in a job that was read from a record."""
        if len(self.schedule_s) != self.requests:
            raise BadUsage("a job without its schedule", "pytest_slmserve.workload.arrivals.job(requests, rate, seed)")
        return self.schedule_s


Load = ClosedLoop | Burst | OpenLoop | Job


def load_facts(load: Load) -> dict[str, Any]:
    """What a record keeps of a load; a field that came later is left out while it says what was always so."""
    facts = {name: value for name, value in asdict(load).items() if name != "schedule_s"}
    return {name: value for name, value in facts.items() if (name, value) not in LATER_OF_A_LOAD.items()}
