"""Loads: how requests are sent to an engine.

A record keeps the facts of a load, and keys are hashes of them: `load_facts` and `load_of` hold that mapping alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeGuard, get_args

from pytest_slmserve.schema.errors import BadUsage, RampUp
from pytest_slmserve.schema.specs import WorkloadSpec, short_hash

JudgedBy = Literal["sent", "ended"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests in flight until the window has passed; each that ends is followed by the next.

    ramp_up: "staggered" over one request's lifetime, so that every step looks like every other (a service under steady
    traffic), or a "burst" (a batch job: the requests go on ending together). After that lifetime the loop runs on for
    `settle_lifetimes` more, so that what ends in the window was sent under the full load; only then the window of at
    least `window_s` opens. With `requests` set there is no window: exactly so many are served.
    """

    concurrency: int
    window_s: int | float = 5.0  # a whole number stays one: keys are hashes of what was asked
    settle_lifetimes: int | float = 1.0
    requests: int | None = None
    ramp_up: RampUp = "staggered"

    judged_by: ClassVar[JudgedBy] = "ended"

    def __post_init__(self) -> None:
        if not isinstance(self.concurrency, int) or isinstance(self.concurrency, bool):
            raise BadUsage(f"concurrency {self.concurrency!r} is no whole number", "concurrency=64")
        if self.concurrency < 1:
            raise BadUsage(f"concurrency {self.concurrency} is not positive", "1 or more")
        for name in ("window_s", "settle_lifetimes"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
                raise BadUsage(f"{name}={value!r} is no finite number", f"{name}=10")
        if self.ramp_up not in get_args(RampUp):
            raise BadUsage(f"ramp_up={self.ramp_up!r} is no ramp-up", " or ".join(get_args(RampUp)))
        if self.requests is None and self.window_s <= 0:
            raise BadUsage(f"a window of {self.window_s} s measures nothing", "--slm-window 5")

    @property
    def max_concurrency(self) -> int:
        """Requests in flight at most, as of an open loop."""
        return self.concurrency

    def duration_s(self, lifetime_s: float) -> float:
        """Seconds of one measurement whose requests live so long; a ramp goes by at half of its load."""
        window_s = max(self.window_s, 2 * lifetime_s) if self.ramp_up == "burst" else self.window_s
        return (0.5 + self.settle_lifetimes) * lifetime_s + window_s

    @property
    def title(self) -> str:
        """ "64 in flight", or "64 in flight, 500 requests"."""
        return f"{self.concurrency} in flight{'' if self.requests is None else f', {self.requests:,} requests'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests sent when a schedule says, whatever becomes of those before them: a job of so many, or a window.

    rate: requests per second as asked for, in the mean; infinity: all at once. requests: each is served to the end,
    as `vllm bench serve --num-prompts --request-rate` does. Without them those sent from `settle_s` on for `window_s`
    are judged, whenever they end; meanwhile the load goes on, for `settle_s` more. max_concurrency: in flight at most,
    as behind a gateway that holds the others back. How long they wait there is no part of their latencies (as with
    vLLM's `--max-concurrency`), but told.

    schedule_s: when each is sent, in seconds since the beginning; a record does without. seed, burstiness: of a job's
    gamma arrivals, 1.0 being Poisson and infinity constant gaps. arrivals: how the schedule of a window came about, in
    words that no other schedule has. steps: of a ramp, requests per second and seconds of each; a step settles for
    `settle_s` and is judged by itself.
    """

    rate: int | float = math.inf
    requests: int | None = None
    window_s: int | float | None = None
    settle_s: int | float = 0.0
    arrivals: str = ""
    steps: tuple[tuple[int | float, int | float], ...] = ()
    seed: int = 0
    burstiness: int | float = 1.0
    max_concurrency: int | None = None
    schedule_s: tuple[float, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.window_s is None):
            raise BadUsage("an open loop has a number of requests or a window", "requests=500, or window_s=10")
        if self.requests is not None and self.requests < 1:
            raise BadUsage(f"a job of {self.requests} requests", "requests=500, or another number from 1 on")
        if self.window_s is not None and (self.settle_s < 0 or self.window_s <= 0):
            raise BadUsage(f"a window of {self.window_s} s after {self.settle_s} s", "10 s after 5 s")
        if not isinstance(self.rate, int | float) or not self.rate > 0:
            raise BadUsage(f"{self.rate} requests per second", "rate=10; without it all at once")
        if self.at_once and self.requests is None:
            raise BadUsage("what comes all at once is a number of requests", "requests=500, or rate=10")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BadUsage(f"{self.max_concurrency} in flight at most", "max_concurrency=64; None for as many as come")
        if not self.burstiness > 0:
            raise BadUsage(f"arrivals of burstiness {self.burstiness}", "burstiness=0.5; inf for constant gaps")
        if self.at_once and self.burstiness != 1:
            raise BadUsage("what comes all at once has no burstiness", "rate=10 too")
        if any(seconds <= self.settle_s for _, seconds in self.steps):
            raise BadUsage(f"a step that is over before it has settled for {self.settle_s:g} s", "longer steps")

    @property
    def at_once(self) -> bool:
        return self.rate == math.inf

    @property
    def judged_by(self) -> JudgedBy:
        """The rule by which requests count: those "sent" in the window, or those that "ended" in it, all of a job."""
        return "sent" if self.requests is None else "ended"

    @property
    def pace(self) -> str:
        """ "10/s", or "all at once"."""
        return "all at once" if self.at_once else f"{self.rate:g}/s"

    @property
    def title(self) -> str:
        """ "10 requests/s", or "500 requests, 10/s, seed 0, burstiness 0.5, 64 in flight at most"."""
        if self.requests is None:
            return f"{self.rate:g} requests/s"
        even = "at constant gaps" if self.burstiness == math.inf else f"burstiness {self.burstiness:g}"
        parts = [f"{self.requests:,} requests", self.pace, *([] if self.at_once else [f"seed {self.seed}"])]
        parts += [] if self.burstiness == 1 else [even]
        parts += [] if self.max_concurrency is None else [f"{self.max_concurrency:,} in flight at most"]
        return ", ".join(parts)

    @property
    def times(self) -> tuple[float, ...]:
        """The schedule. Raises BadUsage where it was not filled in, as in a load that was read from a record."""
        if self.at_once:
            return (0.0,) * (self.requests or 0)
        if not self.schedule_s or self.requests not in (None, len(self.schedule_s)):
            hint = "pytest_slmserve.workload.arrivals.job(requests, rate, seed)"
            raise BadUsage("an open loop without its schedule", hint)
        return self.schedule_s

    @property
    def step_windows_s(self) -> list[tuple[float, float]]:
        """Begin and end of each step's window, whose requests are judged, in seconds since the run began."""
        ends = accumulate(seconds for _, seconds in self.steps)
        return [(end - seconds + self.settle_s, end) for (_, seconds), end in zip(self.steps, ends, strict=True)]


Load = ClosedLoop | OpenLoop


def is_steady(load: Load) -> TypeGuard[ClosedLoop]:
    """Check whether a load is a point of a sweep: a closed loop, so many in flight, whose window is judged."""
    return isinstance(load, ClosedLoop) and load.requests is None


def is_job(load: Load) -> TypeGuard[OpenLoop]:
    """Check whether a load is a number of requests that come by a schedule and are served to the end."""
    return isinstance(load, OpenLoop) and load.requests is not None


def load_facts(load: Load) -> dict[str, Any]:
    """Facts of a load as a record keeps them. A closed loop keeps all fields. An open loop keeps
    those that its kind always had, and each other that is not the default."""
    if isinstance(load, ClosedLoop):
        return {**asdict(load), "kind": "closed_loop"}
    always = {"requests", "rate", "seed"} if is_job(load) else {"arrivals", "rate", "settle_s", "window_s"}
    told = ((f, getattr(load, f.name)) for f in fields(load) if f.compare)
    kept = {f.name: value for f, value in told if f.name in always or value != f.default}
    finite = {name: None if value == math.inf else value for name, value in kept.items()}
    return {**finite, "kind": "job" if is_job(load) else "open_loop"}


def load_of(facts: dict[str, Any], convert: Callable[[Any, Any], Any]) -> Load:
    """The load that a record keeps. convert: makes a value of a class from those entries that it has."""
    match facts["kind"]:
        case "closed_loop":
            closed: ClosedLoop = convert(ClosedLoop, facts)
            return closed
        case "open_loop" | "job":
            told: OpenLoop = convert(OpenLoop, {name: value for name, value in facts.items() if value is not None})
            return replace(told, burstiness=math.inf) if facts.get("burstiness", 1) is None else told
    raise ValueError(f"unknown kind of load {facts['kind']!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, a fixed number of tokens out (greedy, the end-of-text token ignored). text: what the ids say, of a
    prompt that was text; for servers that are somebody else's."""

    prompt: tuple[int, ...]
    output_tokens: int
    text: str = field(default="", repr=False)


@dataclass(frozen=True)  # no slots: what is told of all requests is kept once it is known
class Workload:
    """A seeded set of requests, and the hash of its content: equal hash, equal requests, on every machine."""

    spec: WorkloadSpec
    requests: tuple[Request, ...]
    source: str  # where the conversations came from, for people

    @cached_property
    def hash(self) -> str:
        return short_hash([[list(r.prompt), r.output_tokens] for r in self.requests])

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(len(r.prompt) for r in self.requests) / len(self.requests)

    @cached_property
    def mean_output_tokens(self) -> float:
        return sum(r.output_tokens for r in self.requests) / len(self.requests)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(r.prompt) + r.output_tokens for r in self.requests)

    def reference(self) -> WorkloadReference:
        return WorkloadReference(
            self.hash,
            self.spec,
            len(self.requests),
            self.mean_prompt_tokens,
            self.mean_output_tokens,
            self.longest,
            self.source,
        )


@dataclass(frozen=True, slots=True)
class WorkloadReference:
    """The part of a workload that a record keeps: enough to judge by, and the hash that identifies its requests."""

    hash: str
    spec: WorkloadSpec
    requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    longest: int
    source: str
    kind: Literal["generate"] = "generate"  # each request is a prompt and the tokens that follow it
