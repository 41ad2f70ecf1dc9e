"""Traces of real services: when each request came, and how long it was. Numbers only, no text.

Two formats. The Azure LLM inference traces, CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens
(github.com/Azure/AzurePublicDataset; 2023: P. Patel and others, Splitwise, arXiv:2311.18677). Mooncake's, an object of
JSON on each line with timestamp (ms), input_length and output_length (github.com/kvcache-ai/Mooncake; R. Qin and
others, arXiv:2407.00079); its hash_ids, which say what prompts share, are not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, dropwhile, islice, takewhile
from pathlib import Path

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.files import regular
from pytest_slmserve.workload.arrivals import Arrivals
from pytest_slmserve.workload.seeding import draws

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
