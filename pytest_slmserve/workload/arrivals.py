"""Times at which requests are sent: seconds since the beginning of a load, the same for one seed on every machine.

Every process but a replayed trace is one of unit rate, whose time is then stretched: a gap of 1 becomes 1/rate
seconds, in a ramp by the rate of the step it falls into. For a Poisson process this is exact (an inhomogeneous one is a
homogeneous one on the scale of its expected count; E. Çinlar, Introduction to Stochastic Processes, 1975).

Counts are left to chance: nothing is stretched afterwards so that the last request comes at requests/rate.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from itertools import accumulate, chain, count, dropwhile, islice, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from pytest_slmserve.schema.errors import BadDataset, BadUsage, regular
from pytest_slmserve.schema.specs import OpenLoop
from pytest_slmserve.workload.tokens import draws

Process = Literal["constant", "poisson", "gamma", "ramp", "trace"]

LEAST_BURSTINESS = 0.01  # gaps then vary by ten times their mean, and come in bursts of a hundred requests

# What each process is told by; everything else must be left alone.
TOLD_BY: dict[Process, frozenset[str]] = {
    "constant": frozenset({"rate", "duration_s", "requests"}),
    "poisson": frozenset({"rate", "duration_s", "requests"}),
    "gamma": frozenset({"rate", "burstiness", "duration_s", "requests"}),
    "ramp": frozenset({"steps", "burstiness"}),
    "trace": frozenset({"offsets_s", "speed"}),
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process that sends requests whatever becomes of those before them: an open loop.

    constant: every 1/rate seconds, the first at 0. poisson: independent of each other, `rate` of them per second.
    gamma: gaps of a gamma distribution with mean 1/rate and shape `burstiness`, as vLLM names it: 1 is Poisson, less
    comes in bursts, more is more even, infinity is constant. ramp: `steps` of (requests per second, seconds) one after
    the other, a pause being a rate of 0; Poisson unless `burstiness` says otherwise. trace: at `offsets_s`, ascending
    seconds, `speed` times as fast: 2.0 takes half the time and has twice the rate.

    The first three end after `duration_s` (a request at that instant is not sent) or after so many `requests`.
    """

    process: Process = "poisson"
    rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0
    duration_s: float | None = None
    requests: int | None = None
    steps: tuple[tuple[float, float], ...] = ()
    offsets_s: tuple[float, ...] = ()
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.process not in get_args(Process):
            raise BadUsage(f"unknown arrivals {self.process!r}", f"one of {', '.join(get_args(Process))}")
        for entry in fields(self):
            applies = entry.name in ("process", "seed") or entry.name in TOLD_BY[self.process]
            if not applies and getattr(self, entry.name) != entry.default:
                takers = ", ".join(process for process, names in TOLD_BY.items() if entry.name in names)
                raise BadUsage(f"arrivals {self.process!r} have no {entry.name}", f"without it, or {takers}")
        match self.process:
            case "ramp":
                if not any(rate > 0 for rate, _ in self.steps):
                    hint = "steps=((5, 60), (10, 60)): requests per second, and seconds"
                    raise BadUsage("a ramp that sends nothing", hint)
                for rate, seconds in self.steps:
                    if not (0 <= rate < math.inf and 0 < seconds < math.inf):
                        raise BadUsage(
                            f"a step of a ramp with {rate} requests per second for {seconds} s",
                            "a finite rate of 0 or more, and seconds above 0: steps=((5, 60), (10, 60))",
                        )
            case "trace":
                if not 0 < self.speed < math.inf:
                    raise BadUsage(f"a trace at speed {self.speed}", "speed=1 as it was, 2 in half the time")
                if not self.offsets_s:
                    hint = "offsets_s=(0.0, 0.4, 1.7): seconds since its beginning"
                    raise BadUsage("a trace without a request", hint)
                if not all(0 <= offset < math.inf for offset in self.offsets_s):
                    raise BadUsage("a trace with an offset that is no time since its beginning", "offsets_s from 0 on")
                if any(later < earlier for earlier, later in pairwise(self.offsets_s)):
                    raise BadUsage("a trace whose offsets go back in time", "ascending offsets_s")
            case _:
                if not 0 < (self.rate or 0) < math.inf:
                    raise BadUsage(f"{self.rate} requests per second", "rate=10, or another finite number above 0")
                if (self.duration_s is None) == (self.requests is None):
                    seen = "no end" if self.requests is None else "two ends"
                    raise BadUsage(f"arrivals with {seen}", "duration_s=60 or requests=600, one of them")
                if self.duration_s is not None and not 0 < self.duration_s < math.inf:
                    hint = "duration_s=60, or another finite number above 0"
                    raise BadUsage(f"arrivals over {self.duration_s} s", hint)
                if self.requests is not None and self.requests < 1:
                    hint = "requests=600, or another number from 1 on"
                    raise BadUsage(f"arrivals of {self.requests} requests", hint)
        if not self.burstiness >= LEAST_BURSTINESS:
            hint = f"burstiness=1 (Poisson), less for bursts ({LEAST_BURSTINESS} at least), more for even gaps"
            raise BadUsage(f"a burstiness of {self.burstiness}", hint)


def schedule(arrivals: Arrivals) -> tuple[float, ...]:
    """Times at which to send the requests: seconds since the beginning, ascending, the first at 0 or later.

    By chance there may be none. Two may come at the same instant: in a trace, and where gaps are very uneven. All but
    the times of a trace are of unit rate at first; then each step of (rate, seconds) takes up rate * seconds of them.
    """
    if arrivals.process == "trace":
        return tuple(offset / arrivals.speed for offset in arrivals.offsets_s)
    steps = arrivals.steps or ((arrivals.rate or 0.0, arrivals.duration_s or math.inf),)
    clock = pairwise(accumulate((seconds for _, seconds in steps), initial=0.0))
    scale = pairwise(accumulate((rate * seconds for rate, seconds in steps), initial=0.0))
    unit = _unit_times(math.inf if arrivals.process == "constant" else arrivals.burstiness, arrivals.seed)
    times: list[float] = []
    time = next(unit)
    for (rate, _), (begin_s, end_s), (begin, end) in zip(steps, clock, scale, strict=True):
        last_s = math.nextafter(end_s, begin_s)  # rounding must not put one into the step after
        while time < end and len(times) != arrivals.requests:
            times.append(min(begin_s + (time - begin) / rate, last_s))
            time = next(unit)
    return tuple(times)


def job(
    requests: int, rate: float = math.inf, seed: int = 0, max_concurrency: int | None = None, burstiness: float = 1.0
) -> OpenLoop:
    """A job with its times: those of a gamma process, unless all requests come at once."""
    load = OpenLoop(rate=rate, requests=requests, seed=seed, max_concurrency=max_concurrency, burstiness=burstiness)
    if load.at_once:
        return load
    return replace(load, schedule_s=schedule(Arrivals("gamma", rate, burstiness, seed, requests=requests)))


def _unit_times(shape: float, seed: int) -> Iterator[float]:
    """Times of a process of rate 1 whose gaps have a gamma distribution of this shape, stationary from 0 on.

    The time to the first one is that from any instant to the next: a uniform share of a gap chosen in proportion to its
    length, whose shape is one more (D. R. Cox, Renewal Theory, 1962). Were it a whole gap, bursty arrivals would
    begin with too many requests, (1/shape - 1)/2 of them. For Poisson it is the same.
    """
    if shape == math.inf:
        yield from map(float, count())
    stream = draws(seed, "arrivals")
    time = next(stream) * _gamma(shape + 1, stream) / shape
    while True:
        yield time
        time += -math.log1p(-next(stream)) if shape == 1 else _gamma(shape, stream) / shape


def _gamma(shape: float, stream: Iterator[float]) -> float:
    """A gamma variate of scale 1 by G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, ACM
    TOMS 26 (2000) 363-372, without its squeeze; below shape 1 as they advise: a variate of shape + 1, times
    u^(1/shape). Normal variates are by the polar method of G. Marsaglia and T. A. Bray, SIAM Review 6 (1964) 260-264.
    Python guarantees only its uniform stream, so its own `gammavariate` is not used."""
    if shape < 1:
        return _gamma(shape + 1, stream) * math.pow(1 - next(stream), 1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x, y = 2 * next(stream) - 1, 2 * next(stream) - 1
        square = x * x + y * y
        if not 0 < square < 1:
            continue
        x *= math.sqrt(-2 * math.log(square) / square)
        v = (1 + c * x) ** 3
        u = 1 - next(stream)
        if v > 0 and math.log(u) < x * x / 2 + d * (1 - v + math.log(v)):
            return d * v


AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
FORMATS = f"a CSV with the columns {', '.join(AZURE)}, or lines of JSON with {', '.join(MOONCAKE)}"
INSTANT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
NANOSECONDS = 10**9
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds since the beginning, and tokens each way."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A slice of a trace, its offsets counted from the slice's beginning.

    left_out: rows of the slice that cannot be served, because they are too long or have no token one way. None was
    shortened: it would be another request.
    """

    rows: tuple[TraceRow, ...]
    left_out: int
    source: str

    def arrivals(self, speed: float = 1.0) -> Arrivals:
        """The arrivals of the trace's requests at its times, `speed` times as fast."""
        return Arrivals("trace", offsets_s=tuple(row.offset_s for row in self.rows), speed=speed)


def read_trace(path: Path) -> Iterator[TraceRow]:
    """All rows of a trace of either format in their order, one in memory at a time; the first has offset 0.

    Raises BadDataset for a file that is no trace, and, with the number of the line, for a line that is damaged or
    earlier than the line before it.
    """
    try:
        file = open(path.expanduser(), encoding="utf-8-sig", errors="replace", opener=regular)  # noqa: SIM115
    except OSError as error:
        raise BadDataset(f"{path} cannot be read: {error.strerror}", f"the path of a trace: {FORMATS}") from None
    with file:
        first = file.readline()
        names = [name.strip() for name in first.split(",")]
        columns, rows = None, enumerate(chain([first], file), start=1)
        if not first.lstrip().startswith("{"):
            if not set(AZURE) <= set(names):
                raise BadDataset(f"{path} is no trace: its first line is {first.strip()[:60]!r}", FORMATS)
            columns, rows = [names.index(name) for name in AZURE], enumerate(file, start=2)
        first_ns = last_ns = None
        for number, line in rows:
            if not line.strip():
                continue
            try:
                at_ns, *tokens = _azure_row(line, columns) if columns else _mooncake_row(line)
                if any(type(count) is not int or count < 0 for count in tokens):
                    raise ValueError
            except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
                raise BadDataset(
                    f"line {number} of {path} is no row of this trace", "a whole copy of the file"
                ) from None
            if last_ns is not None and at_ns < last_ns:
                problem = f"line {number} of {path} is earlier than the one before it"
                raise BadDataset(problem, "the file, sorted by time")
            first_ns, last_ns = at_ns if first_ns is None else first_ns, at_ns
            yield TraceRow((at_ns - first_ns) / NANOSECONDS, *tokens)


def _azure_row(line: str, columns: Sequence[int]) -> tuple[int, int, int]:
    """Nanoseconds since 1970, prompt tokens and output tokens of a line of CSV. An instant, such as 2023-11-16
    18:15:46.6805900, would lose its last digits as a float or a datetime. Raises LookupError or ValueError."""
    cells = line.split(",")
    instant, prompt, output = (cells[column].strip() for column in columns)
    match = INSTANT.fullmatch(instant)
    if match is None:
        raise ValueError
    second, fraction, zone = match.groups()
    whole = datetime.fromisoformat(second + ("+00:00" if zone in (None, "Z") else zone)) - BEGINNING
    at_ns = (whole.days * 86_400 + whole.seconds) * NANOSECONDS + int((fraction or "").ljust(9, "0"))
    return at_ns, int(prompt), int(output)


def _mooncake_row(line: str) -> tuple[int, Any, Any]:
    """Nanoseconds on the trace's own clock, prompt tokens and output tokens of a line of JSON. Raises ValueError where
    the time is no number, and what Python raises for entries that are missing."""
    facts = json.loads(line)
    at_ms, prompt, output = (facts[name] for name in MOONCAKE)
    if type(at_ms) not in (int, float) or not math.isfinite(at_ms):
        raise ValueError
    return round(at_ms * 1_000_000), prompt, output


def load_trace(
    path: Path,
    *,
    max_model_len: int,
    from_s: float = 0.0,
    until_s: float = math.inf,
    requests: int | None = None,
    hint: str = "another slice, or a longer max_model_len",
) -> Trace:
    """The rows of a file from `from_s` until before `until_s`, the first `requests` of them that fit.

    Both are seconds of the trace since its first row. A row fits if prompt and output together have no more than
    `max_model_len` tokens, and each has one or more. The file is read no further than it must be.

    Raises BadDataset as `read_trace` does, and with the hint where nothing is left; BadUsage for a slice without
    extent.
    """
    if not 0 <= from_s < until_s:
        raise BadUsage(f"a slice of a trace from {from_s} s until {until_s} s", "from_s=0, until_s=600")
    if requests is not None and requests < 1:
        raise BadUsage(f"a slice of {requests} requests", "requests=600, or another number from 1 on")
    rows: list[TraceRow] = []
    left_out = 0
    begun = dropwhile(lambda row: row.offset_s < from_s, read_trace(path))
    for row in takewhile(lambda row: row.offset_s < until_s, begun):
        tokens = row.prompt_tokens, row.output_tokens
        if min(tokens) < 1 or sum(tokens) > max_model_len:
            left_out += 1
            continue
        rows.append(TraceRow(row.offset_s - from_s, *tokens))
        if len(rows) == requests:
            break
    if not rows:
        between = "" if (from_s, until_s) == (0, math.inf) else f" between {from_s} s and {until_s} s"
        what = f"{path} has no request of up to {max_model_len} tokens{between} ({left_out} do not fit)"
        raise BadDataset(what, hint)
    return Trace(tuple(rows), left_out, path.name)


def sample_lengths(trace: Trace, requests: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of so many rows, drawn with replacement: pairs, as they came together.

    More requests begin with the same ones.
    """
    picks = islice(draws(seed, "trace"), requests)
    drawn = (trace.rows[int(pick * len(trace.rows))] for pick in picks)
    return [(row.prompt_tokens, row.output_tokens) for row in drawn]
