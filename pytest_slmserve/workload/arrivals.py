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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, chain, count, dropwhile, islice, pairwise, takewhile
from pathlib import Path
from typing import Literal, get_args

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.files import regular
from pytest_slmserve.schema.loads import OpenLoop
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
        _refuse_what_does_not_apply(self)
        match self.process:
            case "ramp":
                _check_ramp(self)
            case "trace":
                _check_trace(self)
            case _:
                _check_steady(self)


def schedule(arrivals: Arrivals) -> tuple[float, ...]:
    """Times at which to send the requests: seconds since the beginning, ascending, the first at 0 or later.

    By chance there may be none. Two may come at the same instant: in a trace, and where gaps are very uneven.
    """
    if arrivals.process == "trace":
        return tuple(offset / arrivals.speed for offset in arrivals.offsets_s)
    shape = math.inf if arrivals.process == "constant" else arrivals.burstiness
    steps = arrivals.steps or ((arrivals.rate or 0.0, arrivals.duration_s or math.inf),)
    return tuple(islice(_stretched(_unit_times(shape, arrivals.seed), steps), arrivals.requests))


def length_s(arrivals: Arrivals) -> float | None:
    """Seconds over which requests are sent; None for a number of requests, or a trace, which ends with its last."""
    return math.fsum(seconds for _, seconds in arrivals.steps) if arrivals.steps else arrivals.duration_s


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
        return (float(index) for index in count())
    stream = draws(seed, "arrivals")
    first = next(stream) * _gamma(shape + 1, stream) / shape
    return accumulate(_gaps(shape, stream), initial=first)


def _gaps(shape: float, stream: Iterator[float]) -> Iterator[float]:
    while True:
        yield -math.log1p(-next(stream)) if shape == 1 else _gamma(shape, stream) / shape


def _gamma(shape: float, stream: Iterator[float]) -> float:
    """A gamma variate of scale 1 by G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, ACM
    TOMS 26 (2000) 363-372, without its squeeze; below shape 1 as they advise: a variate of shape + 1, times
    u^(1/shape). Python guarantees only its uniform stream, so its own `gammavariate` is not used."""
    if shape < 1:
        return _gamma(shape + 1, stream) * math.pow(1 - next(stream), 1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = _normal(stream)
        v = (1 + c * x) ** 3
        u = 1 - next(stream)
        if v > 0 and math.log(u) < x * x / 2 + d * (1 - v + math.log(v)):
            return d * v


def _normal(stream: Iterator[float]) -> float:
    """A standard normal variate by the polar method of G. Marsaglia and T. A. Bray, SIAM Review 6 (1964) 260-264."""
    while True:
        x, y = 2 * next(stream) - 1, 2 * next(stream) - 1
        square = x * x + y * y
        if 0 < square < 1:
            return x * math.sqrt(-2 * math.log(square) / square)


def _stretched(times: Iterator[float], steps: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Times of unit rate on a clock on which each step of (rate, seconds) takes up rate * seconds of them."""
    clock = pairwise(accumulate((seconds for _, seconds in steps), initial=0.0))
    scale = pairwise(accumulate((rate * seconds for rate, seconds in steps), initial=0.0))
    time = next(times)
    for (rate, _), (begin_s, end_s), (begin, end) in zip(steps, clock, scale, strict=True):
        last_s = math.nextafter(end_s, begin_s)  # rounding must not put one into the step after
        while time < end:
            yield min(begin_s + (time - begin) / rate, last_s)
            time = next(times)


def _refuse_what_does_not_apply(arrivals: Arrivals) -> None:
    applies = {"process", "seed"} | TOLD_BY[arrivals.process]
    for entry in fields(arrivals):
        if entry.name not in applies and getattr(arrivals, entry.name) != entry.default:
            takers = ", ".join(process for process, names in TOLD_BY.items() if entry.name in names)
            raise BadUsage(f"arrivals {arrivals.process!r} have no {entry.name}", f"without it, or {takers}")


def _check_steady(arrivals: Arrivals) -> None:
    if not _positive(arrivals.rate):
        raise BadUsage(f"{arrivals.rate} requests per second", "rate=10, or another finite number above 0")
    _check_burstiness(arrivals)
    if (arrivals.duration_s is None) == (arrivals.requests is None):
        seen = "no end" if arrivals.requests is None else "two ends"
        raise BadUsage(f"arrivals with {seen}", "duration_s=60 or requests=600, one of them")
    if arrivals.duration_s is not None and not _positive(arrivals.duration_s):
        raise BadUsage(f"arrivals over {arrivals.duration_s} s", "duration_s=60, or another finite number above 0")
    if arrivals.requests is not None and arrivals.requests < 1:
        raise BadUsage(f"arrivals of {arrivals.requests} requests", "requests=600, or another number from 1 on")


def _check_burstiness(arrivals: Arrivals) -> None:
    if not arrivals.burstiness >= LEAST_BURSTINESS:
        raise BadUsage(
            f"a burstiness of {arrivals.burstiness}",
            f"burstiness=1 (Poisson), less for bursts ({LEAST_BURSTINESS} at least), more for even gaps",
        )


def _check_ramp(arrivals: Arrivals) -> None:
    _check_burstiness(arrivals)
    if not any(rate > 0 for rate, _ in arrivals.steps):
        raise BadUsage("a ramp that sends nothing", "steps=((5, 60), (10, 60)): requests per second, and seconds")
    for rate, seconds in arrivals.steps:
        if not (0 <= rate < math.inf and _positive(seconds)):
            raise BadUsage(
                f"a step of a ramp with {rate} requests per second for {seconds} s",
                "a finite rate of 0 or more, and seconds above 0: steps=((5, 60), (10, 60))",
            )


def _check_trace(arrivals: Arrivals) -> None:
    if not _positive(arrivals.speed):
        raise BadUsage(f"a trace at speed {arrivals.speed}", "speed=1 as it was, 2 in half the time")
    if not arrivals.offsets_s:
        raise BadUsage("a trace without a request", "offsets_s=(0.0, 0.4, 1.7): seconds since its beginning")
    if not all(0 <= offset < math.inf for offset in arrivals.offsets_s):
        raise BadUsage("a trace with an offset that is no time since its beginning", "offsets_s from 0 on")
    if any(later < earlier for earlier, later in pairwise(arrivals.offsets_s)):
        raise BadUsage("a trace whose offsets go back in time", "ascending offsets_s")


def _positive(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf


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

    Raises BadDataset, with the number of the line, for one that is damaged or earlier than the line before it.
    """
    first_ns: int | None = None
    last_ns = -math.inf
    for number, (at_ns, prompt, output) in _stamped(path):
        if at_ns < last_ns:
            raise _damaged(path, number, "is earlier than the one before it", "the file, sorted by time")
        first_ns, last_ns = at_ns if first_ns is None else first_ns, at_ns
        yield TraceRow((at_ns - first_ns) / NANOSECONDS, prompt, output)


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


# Formats: a line as nanoseconds on the trace's own clock, tokens in, tokens out

Stamped = tuple[int, int, int]


def _stamped(path: Path) -> Iterator[tuple[int, Stamped]]:
    """Each row with the number of its line."""
    try:
        file = open(path.expanduser(), encoding="utf-8-sig", errors="replace", opener=regular)  # noqa: SIM115
    except OSError as error:
        raise BadDataset(f"{path} cannot be read: {error.strerror}", f"the path of a trace: {FORMATS}") from None
    with file:
        first = file.readline()
        parse, rows = _format(path, first, file)
        for number, line in rows:
            if line.strip():
                try:
                    stamped = parse(line)
                except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
                    raise _damaged(path, number, "is no row of this trace", "a whole copy of the file") from None
                yield number, stamped


def _format(path: Path, first: str, rest: Iterable[str]) -> tuple[Callable[[str], Stamped], Iterable[tuple[int, str]]]:
    """The parser of a line, and numbered rows, by the first line. Raises BadDataset where that is of no trace."""
    if first.lstrip().startswith("{"):
        return _mooncake, enumerate(chain([first], rest), start=1)
    names = [name.strip() for name in first.split(",")]
    if not set(AZURE) <= set(names):
        raise BadDataset(f"{path} is no trace: its first line is {first.strip()[:60]!r}", FORMATS)
    return partial(_azure, [names.index(name) for name in AZURE]), enumerate(rest, start=2)


def _azure(columns: Sequence[int], line: str) -> Stamped:
    cells = line.split(",")
    instant, prompt, output = (cells[column].strip() for column in columns)
    return _nanoseconds(instant), _tokens(int(prompt)), _tokens(int(output))


def _nanoseconds(instant: str) -> int:
    """Nanoseconds since 1970 of an instant such as 2023-11-16 18:15:46.6805900. A float or a datetime would lose the
    last digits. Raises ValueError."""
    match = INSTANT.fullmatch(instant)
    if match is None:
        raise ValueError
    second, fraction, zone = match.groups()
    offset = "+00:00" if zone in (None, "Z") else zone
    whole = datetime.fromisoformat(second + offset) - BEGINNING
    return (whole.days * 86_400 + whole.seconds) * NANOSECONDS + int((fraction or "").ljust(9, "0"))


def _mooncake(line: str) -> Stamped:
    facts = json.loads(line)
    at_ms, prompt, output = (facts[name] for name in MOONCAKE)
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not math.isfinite(at_ms):
        raise ValueError
    return round(at_ms * 1_000_000), _tokens(prompt), _tokens(output)


def _tokens(count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError
    return count


def _damaged(path: Path, number: int, what: str, hint: str) -> BadDataset:
    return BadDataset(f"line {number} of {path} {what}", hint)
