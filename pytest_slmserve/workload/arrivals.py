"""Times at which requests are sent, in seconds since the beginning of a load; one seed gives the same times everywhere.

Each arrival process has unit rate, and its time is then stretched: a gap of 1 becomes 1/rate seconds, with the rate of
the current step. For a Poisson process this is exact (E. Çinlar, Introduction to Stochastic Processes, 1975). The
number of requests is random, because times are not rescaled so that the last request comes at requests/rate.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, chain, count, islice, pairwise, takewhile
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.errors import UNUSABLE, BadDataset, BadUsage, json_value, regular
from pytest_slmserve.schema.specs import OpenLoop
from pytest_slmserve.workload.tokens import draws

LONGEST_LINE = 1 << 20  # characters; the ids of a Mooncake row have some thousand
LEAST_BURSTINESS = 0.01  # the standard deviation of gaps is ten times their mean, with bursts of a hundred requests


def schedule(
    steps: Sequence[tuple[float, float]], burstiness: float = 1.0, seed: int = 0, requests: int | None = None
) -> tuple[float, ...]:
    """Return the times at which an open loop sends its requests: seconds since its beginning, ascending.

    Args:
        steps: (requests/s, seconds) of each step; a rate of 0 is a pause. The end of the last step is not included.
        burstiness: shape of the gamma distribution of the gaps, as in vLLM: 1 is Poisson, smaller is burstier, larger
            is more even, and infinity is constant with the first request at 0.
        requests: number of requests after which the load ends; the last step may then be infinitely long.

    Raises:
        BadUsage: if no rate is above 0, or a rate, a duration or the burstiness is out of range.
    """
    if not any(rate > 0 for rate, _ in steps):
        raise BadUsage(
            "arrivals that send nothing", "Pass steps=((5, 60), (10, 60)): requests per second, and seconds."
        )
    for rate, seconds in steps:
        if not (0 <= rate < math.inf and seconds > 0 and (requests or seconds < math.inf)):
            hint = "Use a finite rate of 0 or more, and seconds above 0: steps=((5, 60), (10, 60))."
            raise BadUsage(f"{rate} requests per second for {seconds} s", hint)
    if not burstiness >= LEAST_BURSTINESS:
        hint = f"Use burstiness=1 (Poisson), less for bursts (at least {LEAST_BURSTINESS}), more for even gaps."
        raise BadUsage(f"a burstiness of {burstiness}", hint)
    clock = pairwise(accumulate((seconds for _, seconds in steps), initial=0.0))
    scale = pairwise(accumulate((rate * seconds for rate, seconds in steps), initial=0.0))  # expected requests
    unit = _unit_times(burstiness, seed)
    times: list[float] = []
    time = next(unit)
    for (rate, _), (begin_s, end_s), (begin, end) in zip(steps, clock, scale, strict=True):
        last_s = math.nextafter(end_s, begin_s)  # rounding must not move a request into the next step
        while time < end and len(times) != requests:
            times.append(min(begin_s + (time - begin) / rate, last_s))
            time = next(unit)
    return tuple(times)


def job(
    requests: int, rate: float = math.inf, seed: int = 0, max_concurrency: int | None = None, burstiness: float = 1.0
) -> OpenLoop:
    """Return the load of a fixed number of requests, with arrival times unless all are sent at once."""
    load = OpenLoop(rate=rate, requests=requests, seed=seed, max_concurrency=max_concurrency, burstiness=burstiness)
    return load if load.at_once else replace(load, schedule_s=schedule([(rate, math.inf)], burstiness, seed, requests))


def _unit_times(shape: float, seed: int) -> Iterator[float]:
    """Yield the times of a stationary process of rate 1 with gamma-distributed gaps."""
    if shape == math.inf:
        yield from map(float, count())
    # The time to the first request is a uniform share of a gap chosen in proportion to its length, whose shape is one
    # more (D. R. Cox, Renewal Theory, 1962). With a whole gap, bursty arrivals would begin with (1/shape - 1)/2
    # requests too many. For Poisson both are the same.
    stream = draws(seed, "arrivals")
    time = next(stream) * _gamma(shape + 1, stream) / shape
    while True:
        yield time
        time += -math.log1p(-next(stream)) if shape == 1 else _gamma(shape, stream) / shape


# G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, ACM TOMS 26 (2000) 363-372, without the
# squeeze. Below shape 1, as they advise, a variate of shape + 1 times u^(1/shape). Normal variates by the polar method
# of G. Marsaglia and T. A. Bray, SIAM Review 6 (1964) 260-264. Python guarantees only its uniform stream, so
# `gammavariate` is not used.
def _gamma(shape: float, stream: Iterator[float]) -> float:
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


BLOCK_TOKENS = 512  # of Mooncake's hash_ids (github.com/kvcache-ai/Mooncake, FAST25-release)
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
FORMATS = f"a CSV with the columns {', '.join(AZURE)}, or lines of JSON with {', '.join(MOONCAKE)}"
INSTANT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
NANOSECONDS = 10**9
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace.

    Attributes:
        offset_s: seconds since the first row.
        lengths: prompt and output tokens.
        blocks: names of the prompt's blocks of `BLOCK_TOKENS` tokens, if known. Equal names mean equal tokens.
    """

    offset_s: float
    lengths: tuple[int, int]
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace that can be served.

    Attributes:
        left_out: number of skipped rows, which are too long or have no prompt or output tokens. Rows are never
            shortened, because that would make another request.
    """

    rows: tuple[TraceRow, ...]
    left_out: int
    source: str

    def times(self, speed: float = 1.0) -> tuple[float, ...]:
        """Return the arrival times in seconds, `speed` times as fast: 2 halves the duration and doubles the rate."""
        return tuple(row.offset_s / speed for row in self.rows)


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a trace in either format, one in memory at a time. The first row has offset 0.

    Raises:
        BadDataset: if the file is not a trace, or if a line is damaged or earlier than the line before.
    """
    try:
        file = open(path.expanduser(), encoding="utf-8-sig", errors="replace", opener=regular)  # noqa: SIM115
    except OSError as error:
        raise BadDataset(f"{path} cannot be read: {error.strerror}", f"Pass the path of a trace: {FORMATS}.") from None
    with file:
        lines = iter(partial(file.readline, LONGEST_LINE), "")
        first = next(lines, "")
        names = [name.strip() for name in first.split(",")]
        columns, rows = None, enumerate(chain([first], lines), start=1)
        if not first.lstrip().startswith("{"):
            if not set(AZURE) <= set(names):
                raise BadDataset(f"{path} is not a trace: its first line is {first.strip()[:60]!r}", f"Pass {FORMATS}.")
            columns, rows = [names.index(name) for name in AZURE], enumerate(lines, start=2)
        first_ns = last_ns = None
        for number, line in rows:
            if not line.strip():
                continue
            try:
                at_ns, prompt, output, *blocks = _azure_row(line, columns) if columns else _mooncake_row(line)
                if any(type(count) is not int or count < 0 for count in (prompt, output)):
                    raise ValueError
            except UNUSABLE:
                problem = f"line {number} of {path} is no row of this trace"
                raise BadDataset(problem, "Pass a whole copy of the file.") from None
            if last_ns is not None and at_ns < last_ns:
                problem = f"line {number} of {path} is earlier than the one before it"
                raise BadDataset(problem, "Sort the file by time.")
            first_ns, last_ns = at_ns if first_ns is None else first_ns, at_ns
            yield TraceRow((at_ns - first_ns) / NANOSECONDS, (prompt, output), tuple(blocks))


def _azure_row(line: str, columns: Sequence[int]) -> tuple[int, int, int]:
    """Return nanoseconds since 1970, prompt tokens and output tokens. Raise LookupError or ValueError."""
    cells = line.split(",")
    instant, prompt, output = (cells[column].strip() for column in columns)
    match = INSTANT.fullmatch(instant)
    if match is None:
        raise ValueError
    # Integers, because 2023-11-16 18:15:46.6805900 would lose its last digits as a float or a datetime.
    second, fraction, zone = match.groups()
    whole = datetime.fromisoformat(second + ("+00:00" if zone in (None, "Z") else zone)) - BEGINNING
    at_ns = (whole.days * 86_400 + whole.seconds) * NANOSECONDS + int((fraction or "").ljust(9, "0"))
    return at_ns, int(prompt), int(output)


def _mooncake_row(line: str) -> tuple[Any, ...]:
    """Return nanoseconds on the trace's clock, prompt tokens, output tokens, and the names of the prompt's blocks."""
    facts = json_value(line)
    at_ms, prompt, output = (facts[name] for name in MOONCAKE)
    if type(at_ms) not in (int, float) or not math.isfinite(at_ms):
        raise ValueError
    blocks = facts.get("hash_ids")
    named = isinstance(blocks, list) and all(type(block) is int and block >= 0 for block in blocks)
    return round(at_ms * 1_000_000), prompt, output, *(blocks if named else ())


def load_trace(path: Path, *, max_model_len: int, until_s: float = math.inf, hint: str = "Allow more tokens.") -> Trace:
    """Return the requests of a trace that fit and come before `until_s`, in seconds since the first row.

    Args:
        max_model_len: limit of prompt and output tokens together. A request also needs at least one of each.
        hint: hint of the error if no request is left.

    Raises:
        BadDataset: as in `read_trace`, and if no request is left.
    """
    rows: list[TraceRow] = []
    left_out = 0
    for row in takewhile(lambda row: row.offset_s < until_s, read_trace(path)):
        if min(row.lengths) < 1 or sum(row.lengths) > max_model_len:
            left_out += 1
        else:
            rows.append(row)
    if not rows:
        between = "" if until_s == math.inf else f" before {until_s} s"
        what = f"{path} has no request of up to {max_model_len} tokens{between} ({left_out} do not fit)"
        raise BadDataset(what, hint)
    return Trace(tuple(rows), left_out, path.name)


def sample_lengths(trace: Trace, requests: int, seed: int) -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of rows drawn with replacement. More requests begin with the same rows."""
    return [trace.rows[int(pick * len(trace.rows))].lengths for pick in islice(draws(seed, "trace"), requests)]
