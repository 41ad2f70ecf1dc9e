"""The results of a run, as columns for one line of JSON. Times are `time.monotonic()`, in seconds."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

BIN_S = 0.01
GROWTH, LEAST_S = 1.01, 1e-4
STEP = math.log(GROWTH)

Window = tuple[float, float]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request that was sent and did not fail. request: index into the bodies. scheduled: None without a schedule.
    times, tokens: of each chunk that bears tokens. usage: tokens of prompt and output by the server's count, None
    where it gave none. finished: False of one that was cut off. asked: output tokens that it was for. cached: tokens of
    the prompt from a cache."""

    request: int
    sent: float
    scheduled: float | None
    times: array[float]
    tokens: array[int]
    usage: tuple[int | None, int | None]
    finished: bool
    asked: int
    cached: int | None = None

    def sample(self, beyond: float) -> tuple[Any, ...]:
        first, last = (self.times[0], self.times[-1]) if self.times else (None, None)
        output = round(self.output(beyond))
        return self.request, self.sent, None, first, last, self.usage[0], output, self.finished, self.cached

    def output(self, beyond: float) -> float:
        """Output tokens by the server's count; without one `beyond` times those of the chunks, but no more than were
        asked for."""
        shown = sum(self.tokens)
        return min(shown * beyond, max(shown, self.asked)) if self.usage[1] is None else self.usage[1]


@dataclass(frozen=True, slots=True)
class Lost:
    """One request that failed. sent: when it was or would have been. ended: when it had failed. kind: how."""

    request: int
    sent: float
    scheduled: float | None
    ended: float
    kind: str


def lost_in(failed: Iterable[Lost]) -> Message:
    """A column for each of their fields, in the order sent."""
    ordered = sorted(failed, key=lambda each: each.sent)
    return {field.name: [getattr(each, field.name) for each in ordered] for field in fields(Lost)}


def found_in(
    rows: Iterable[RequestRow], window: Window, steps: Sequence[Window] = (), on_schedule: bool = False
) -> Message:
    """samples, scheduled, received, gaps, step_gaps, tokens_per_chunk, and chunks, which is the number behind it.
    steps: windows of their own, of a ramp. on_schedule: the load has one, also where nothing came of it."""
    ordered = sorted(rows, key=lambda row: row.sent)
    chunks = sum(len(row.times) for row in ordered if row.usage[1] is not None)
    counted = sum(sum(row.tokens) for row in ordered if row.usage[1] is not None)
    told = sum(row.usage[1] or 0 for row in ordered)
    beyond = told / counted if counted else 1.0
    times = [row.times for row in ordered]
    return {
        "samples": [list(column) for column in zip(*(row.sample(beyond) for row in ordered))],
        "scheduled": [row.scheduled for row in ordered] if on_schedule else None,
        "received": received(ordered, beyond),
        "gaps": gaps(times, window),
        "step_gaps": [gaps(times, each) for each in steps],
        "tokens_per_chunk": told / chunks if chunks else None,
        "chunks": chunks,
    }


def received(rows: Sequence[RequestRow], beyond: float) -> list[Any]:
    """Tokens in equal bins of time: their width, where the first begins, and the tokens of each.

    A request's tokens that its chunks do not show, by the server's count, came evenly with those that they show; where
    there is no such count, they are assumed as in the others.
    """
    bins: Counter[int] = Counter()
    for row in rows:
        weight = row.output(beyond) / (sum(row.tokens) or 1)
        for at, tokens in zip(row.times, row.tokens):
            bins[math.floor(at / BIN_S)] += tokens * weight  # type: ignore[assignment]
    return told_bins(bins)


def told_bins(bins: Counter[int]) -> list[Any]:
    """Bins as a message has them, the empty ones between two others too."""
    first = min(bins, default=0)
    return [BIN_S, first * BIN_S, [round(bins[i], 3) for i in range(first, max(bins, default=-1) + 1)]]


def gaps(streams: Iterable[Sequence[float]], window: Window) -> Message:
    """A histogram of the times between successive chunks that both lie in the window: bin i holds gaps from
    least_s * growth**i on; -1 holds those below least_s. And their sum, which no bin tells."""
    begin, end = window
    counts: Counter[int] = Counter()
    sum_s = 0.0
    for times in streams:
        inside = times[bisect_left(times, begin) : bisect_right(times, end)]
        counts.update(gap_bin(after - before) for before, after in pairwise(inside))
        sum_s += inside[-1] - inside[0] if inside else 0.0
    return histogram(counts, sum_s)


def histogram(counts: Counter[int], sum_s: float) -> Message:
    return {
        "growth": GROWTH,
        "least_s": LEAST_S,
        "counts": {str(i): counts[i] for i in sorted(counts)},
        "sum_s": round(sum_s, 6),
    }


def gap_bin(gap_s: float) -> int:
    return math.floor(math.log(gap_s / LEAST_S) / STEP) if gap_s >= LEAST_S else -1


def merged(parts: Sequence[Message]) -> Message:
    """The columns of several client processes, merged into those of one: rows in the order sent, counts added."""
    columns = [zip(*part["samples"], part["scheduled"] or repeat_none(part)) for part in parts]
    rows = sorted((row for part in columns for row in part), key=lambda row: row[1])
    *samples, scheduled = zip(*rows) if rows else ((),)
    chunks = sum(part["chunks"] for part in parts)
    told = sum(part["tokens_per_chunk"] * part["chunks"] for part in parts if part["chunks"])
    return {
        "samples": [list(column) for column in samples],
        "scheduled": None if any(part["scheduled"] is None for part in parts) else list(scheduled),
        "received": merged_bins([part["received"] for part in parts]),
        "gaps": merged_gaps([part["gaps"] for part in parts]),
        "step_gaps": [merged_gaps(each) for each in zip(*(part["step_gaps"] for part in parts))],
        "tokens_per_chunk": told / chunks if chunks else None,
        "chunks": chunks,
        "failed": merged_losses([part["failed"] for part in parts]),
        "failures": sum(part["failures"] for part in parts),
        "unsent": sorted(at for part in parts for at in part["unsent"]),
        "waited": sorted(seconds for part in parts for seconds in part["waited"]),
        "first_failure": next((part["first_failure"] for part in parts if part["first_failure"]), None),
        "client_cpu_s": sum(part["client_cpu_s"] for part in parts),
        "doubt_s": [max(part["doubt_s"][i] for part in parts) for i in (0, 1)],
    }


def repeat_none(part: Message) -> list[None]:
    return [None] * len(part["samples"][0]) if part["samples"] else []


def merged_losses(parts: Sequence[Message]) -> Message:
    return lost_in(Lost(*row) for part in parts for row in zip(*(part[field.name] for field in fields(Lost))))


def merged_bins(parts: Sequence[Sequence[Any]]) -> list[Any]:
    bins: Counter[int] = Counter()
    for width, begin, tokens in parts:
        first = round(begin / width)
        for index, count in enumerate(tokens):
            bins[first + index] += count
    return told_bins(bins)


def merged_gaps(parts: Sequence[Message]) -> Message:
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update({int(index): count for index, count in part["counts"].items()})
    return histogram(counts, sum(part["sum_s"] for part in parts))
