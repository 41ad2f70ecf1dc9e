"""Quantities of one run, all of them over its steady window.

Rates come from the step trace, not from whole completions: requests of one fixed length end in convoys. The window is
cut to the step boundaries inside it, from the first to the last, and the tokens of the first step belong to the time
before it: so there is no edge error. A request's latency counts where its last token lies in the window.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import mul, sub
from statistics import fmean, variance
from typing import TypeVar

from pytest_slmserve.analysis.estimates import mean_of_known, once, per_second, percentile
from pytest_slmserve.schema.records import Failures, Measurement, Run
from pytest_slmserve.schema.specs import OpenLoop, is_steady

T = TypeVar("T")

BATCHES = 8
LEAST = 1e-6  # relative variance: below a tenth of a per cent it is that of the stamps, which a record rounds


@dataclass(frozen=True, slots=True)
class LittlesLaw:
    """Two counts of the same thing: `requests` from the requests' own intervals, `batch` from the step trace.
    deviation: requests/batch - 1."""

    requests: float
    batch: float
    deviation: float


@dataclass(frozen=True, slots=True)
class WindowTrace:
    """The trace of a run, and its part in the window.

    ends_s, tokens: end times and output tokens of all engine steps, as two columns. Where a server reports no steps:
    those of the equal spans of time in which its client received the tokens. steps: indices of those whose end lies in
    the window. span_s: the first and the last of these ends in seconds; None where no time lies between them.
    """

    ends_s: Sequence[float]
    tokens: Sequence[float]
    steps: range
    span_s: tuple[float, float] | None


@once
def window_trace(run: Run) -> WindowTrace:
    """The trace of a run with its window."""
    stream, (opens, closes) = run.stream, run.window_s
    ends: Sequence[float] = run.steps.time_s
    tokens: Sequence[float] = run.steps.new_tokens
    if not len(run.steps) and stream is not None:
        ends = [stream.begins_s + stream.bin_s * (i + 1) for i in range(len(stream.tokens))]
        tokens = stream.tokens
    steps = range(bisect_left(ends, opens), bisect_right(ends, closes))
    span = (ends[steps[0]], ends[steps[-1]]) if len(steps) > 1 else (0.0, 0.0)
    return WindowTrace(ends, tokens, steps, span if span[1] > span[0] else None)


def piece(column: Sequence[T], steps: range) -> Sequence[T]:
    """Part of a trace column that belongs to `steps`, as one slice, since there are thousands."""
    return column[steps.start : steps.stop]


def tokens_per_s(run: Run, steps: range) -> float | None:
    """Output tokens per second between the ends of the first and the last of `steps`."""
    if len(steps) < 2:
        return None
    trace = window_trace(run)
    seconds = trace.ends_s[steps[-1]] - trace.ends_s[steps[0]]
    return sum(piece(trace.tokens, steps[1:])) / seconds if seconds > 0 else None


@once
def output_tokens_per_s(run: Run) -> float | None:
    """Output tokens of the trace in the window / window; None below two steps."""
    return tokens_per_s(run, window_trace(run).steps)


@once
def relative_variance(run: Run) -> float | None:
    """Relative variance of the window's throughput by its own course, from the means of equal parts; None where
    a part has no tokens, or the window too few steps.

    Over the committed sweeps it explains why loads differ in noise, with 4 to 32 parts alike (docs/intervals.md).
    """
    trace = window_trace(run)
    steps, span = trace.steps, trace.span_s
    if len(steps) < 2 * BATCHES or span is None:
        return None
    parts, each = [0.0] * BATCHES, (span[1] - span[0]) / BATCHES
    before = span[0]
    for at, made in zip(piece(trace.ends_s, steps[1:]), piece(trace.tokens, steps[1:])):
        first, last = (min(int((moment - span[0]) / each), BATCHES - 1) for moment in (before, at))
        for part in range(first, last + 1):  # a step across a boundary belongs to both parts, by its time
            inside = min(at, span[0] + (part + 1) * each) - max(before, span[0] + part * each)
            parts[part] += made * inside / (at - before) if at > before else 0.0
        before = at
    centre = math.fsum(parts) / BATCHES
    return max(LEAST, variance(parts) / centre**2 / BATCHES) if min(parts) > 0 else None


def prompt_tokens_per_s(run: Run) -> float | None:
    """Prompt tokens of the requests whose first token came in the window / its seconds; None of no window."""
    opens, closes = run.window_s
    rows = zip(run.samples.prompt_tokens, run.samples.first_token_s, strict=True)
    prompts = sum(tokens for tokens, first in rows if first is not None and opens <= first <= closes)
    return prompts / (closes - opens) if closes > opens else None


def step_s(run: Run) -> float | None:
    """Mean time between successive engine steps, which a running request waits; None without a trace of steps."""
    trace = window_trace(run)
    if trace.span_s is None or not len(run.steps):
        return None
    return (trace.span_s[1] - trace.span_s[0]) / (len(trace.steps) - 1)


def steps_with_prompts(run: Run) -> float | None:
    """Share of the window's steps that processed a prompt, or a part of one. None where a server tells no steps."""
    if not len(run.steps):
        return None
    prompts = piece(run.steps.prompt_tokens, window_trace(run).steps)
    return sum(tokens > 0 for tokens in prompts) / len(prompts) if prompts else None


@once
def mean_batch(run: Run) -> float | None:
    """Mean number of sequences that a step carried to their next token, weighted by time.

    It is the new tokens of a step, also where the step did some prefills: a prefill that ends in the step yields its
    first token there and counts as the sequence it is. One whose prompt is not through yields none and does not count,
    although it takes part: with chunked prefill the true number can be a little higher, never lower. Where a server
    tells no steps, it is the mean number of requests in flight as its client saw them, those that wait among them.
    """
    if not len(run.steps) and run.stream is not None:
        return _mean_open(run, run.samples.sent_s)
    trace = window_trace(run)
    if trace.span_s is None:
        return None
    ends, tokens = piece(trace.ends_s, trace.steps), piece(trace.tokens, trace.steps[1:])
    return math.fsum(map(mul, tokens, map(sub, ends[1:], ends))) / (trace.span_s[1] - trace.span_s[0])


@once
def requests_in_flight(run: Run) -> float | None:
    """Mean number of admitted requests, integrated over their own intervals from admitted to last token.

    A request cut off by the end of the run counts until the end of the window. None where no request says when it was
    admitted, or the window has no steps.
    """
    return _mean_open(run, run.samples.admitted_s)


def _mean_open(run: Run, begins: Sequence[float | None]) -> float | None:
    """Mean number of requests between their beginning and their last token."""
    span, samples = window_trace(run).span_s, run.samples
    if span is None or all(at is None for at in begins):
        return None
    inside, (opens, closes) = [], span
    for began, last, finished in zip(begins, samples.last_token_s, samples.finished, strict=True):
        if began is not None:
            ended = last if finished and last is not None and last < closes else closes
            inside.append(max(0.0, ended - max(began, opens)))
    return math.fsum(inside) / (closes - opens)


def most_in_flight(run: Run) -> int:
    """Most requests at once in the window, each from when it was sent to its last token; those that failed are left
    out."""
    (opens, closes), samples, changes = run.window_s, run.samples, list[tuple[float, int]]()
    for sent, last, finished in zip(samples.sent_s, samples.last_token_s, samples.finished, strict=True):
        ended = last if finished and last is not None else closes
        if sent < closes and ended > opens:
            changes += [(sent, 1), (ended, -1)]
    # Where one ends as another is sent, the end comes first.
    return max(accumulate(change for _, change in sorted(changes)), default=0)


@once
def littles_law(run: Run) -> LittlesLaw | None:
    """Both counts of the requests in the engine; equal in an honest run, whatever its arrivals. None: not measured."""
    requests, batch = requests_in_flight(run), mean_batch(run)
    if requests is None or not batch:
        return None
    return LittlesLaw(requests, batch, requests / batch - 1)


def kv_usage(run: Run) -> float | None:
    """Largest share of the KV blocks in use in the window, 0 to 1; None without a trace of steps."""
    return max((v for v in piece(run.steps.kv_usage, window_trace(run).steps) if v is not None), default=None)


def preemptions(run: Run) -> int:
    """Requests thrown out of the engine in the window, to be computed again later; 0 without a trace of steps."""
    return sum(piece(run.steps.preempted, window_trace(run).steps))


@once
def finished_in_window(run: Run) -> Sequence[int]:
    """Rows of the samples that finished with their last token in the window."""
    opens, closes = run.window_s
    rows = zip(run.samples.finished, run.samples.last_token_s, strict=True)
    return [i for i, (finished, last) in enumerate(rows) if finished and last is not None and opens <= last <= closes]


def common_span(group: Sequence[Measurement]) -> list[Run]:
    """Runs of a group, cut to the span that all windows have in common. Uncut without a common clock (simulated), and
    of requests that start together: their windows are whole convoys, and parts of one differ."""
    runs = [m.run for m in group]
    began = [run.began_s for run in runs if run.began_s is not None]
    if len(began) < len(runs) or any(is_steady(m.load) and m.load.ramp_up == "burst" for m in group):
        return runs
    opens = max(at + run.window_s[0] for at, run in zip(began, runs))
    closes = min(at + run.window_s[1] for at, run in zip(began, runs))
    return [replace(run, window_s=(opens - at, max(opens, closes) - at)) for at, run in zip(began, runs)]


def steps_of(measurement: Measurement) -> list[Measurement]:
    """A measurement for each step of the load, whose window is the step but for its first `settle_s`; none where the
    load is no ramp. Gaps between tokens are those of the step. An older record has gaps of the whole run only, and
    where it has no times of failures each step keeps all failures.

    What a step left unserved the next one has to serve too, so a step after an overload is judged with that backlog:
    this is what a ramp is for. A rate by itself is measured by a load of its own.
    """
    load = measurement.load
    if not isinstance(load, OpenLoop):
        return []
    run, found = measurement.run, []
    for number, ((rate, _), (begin, end)) in enumerate(zip(load.steps, load.step_windows_s, strict=True)):
        stream, failed, failures = run.stream, run.failed, run.failures
        if stream:
            unknown = {**stream.gaps, "counts": {}, "sum_s": None}
            stream = replace(stream, gaps=stream.step_gaps[number] if stream.step_gaps else unknown, step_gaps=())
        if failed is not None:  # the step's own, those of its settling time included
            rows = [row for row, at in enumerate(failed.sent_s) if begin - load.settle_s <= at < end]
            columns = {column.name: getattr(failed, column.name) for column in fields(failed)}
            own = {name: values and tuple(values[row] for row in rows) for name, values in columns.items()}
            failed, failures = Failures(**own), len(rows)
        part = replace(run, window_s=(begin, end), stream=stream, failed=failed, failures=failures)
        step = replace(load, rate=rate, window_s=end - begin, steps=())
        found.append(replace(measurement, load=step, run=part))
    return found


HARMLESS_S = 5e-3
SHARE_OF_TTFT = 0.1


@dataclass(frozen=True, slots=True)
class ScheduleDelay:
    """Rates, and delays of sending in seconds, of the requests scheduled in the window.

    requested_per_s: scheduled / seconds of the window. achieved_per_s: sent in the window, whenever they were
    scheduled, / the same. unsent: scheduled in the window, never sent. mean_s, p99_s, max_s: of the delays of those
    that were sent, None where none was.
    """

    requested_per_s: float
    achieved_per_s: float
    unsent: int
    mean_s: float | None
    p99_s: float | None
    max_s: float | None


def delay_of(run: Run) -> ScheduleDelay | None:
    """Requested and achieved rates, and delays of sending, of the requests scheduled in the window, failed and unsent
    ones included; None without a schedule."""
    if run.stream is None or run.stream.scheduled_s is None:
        return None
    opens, closes = run.window_s
    rows: list[tuple[float, float | None]] = [*zip(run.stream.scheduled_s, run.samples.sent_s, strict=True)]
    if run.failed and run.failed.scheduled_s is not None:
        rows += zip(run.failed.scheduled_s, run.failed.sent_s, strict=True)
    rows += [(at, None) for at in run.stream.unsent_s]
    wanted = [(at, sent) for at, sent in rows if opens <= at < closes]
    delays = [sent - at for at, sent in wanted if sent is not None]
    return ScheduleDelay(
        requested_per_s=per_second(len(wanted), run.window_s),
        achieved_per_s=per_second(sum(sent is not None and opens <= sent < closes for _, sent in rows), run.window_s),
        unsent=len(wanted) - len(delays),
        mean_s=mean_of_known(delays),
        p99_s=percentile(delays, 0.99),
        max_s=max(delays, default=None),
    )


def late_sends(delay: ScheduleDelay, median_ttft_s: float | None) -> str | None:
    """Message that late or unsent requests invalidate the run; None where the client kept up. Without a TTFT: None."""
    if delay.unsent:
        return f"the client never sent {delay.unsent} requests of the window"
    bound = harmless_s(median_ttft_s)
    if delay.p99_s is None or delay.p99_s <= bound:
        return None
    return (
        f"the client lagged: 1 % of the requests were sent {delay.p99_s * 1e3:.1f} ms late or more,"
        f" {bound * 1e3:.1f} ms are harmless ({delay.achieved_per_s:.4g} of {delay.requested_per_s:.4g} requests/s)"
    )


def harmless_s(median_ttft_s: float | None) -> float:
    """Seconds by which a client may be late, in sending and in its time stamps, if the median TTFT is this."""
    return max(HARMLESS_S, SHARE_OF_TTFT * (median_ttft_s or 0.0))


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Waiting times in seconds under a limit on the requests in flight, over all requests that were sent. They are no
    part of latencies, which tell of the server: a request is due when it may be sent. But users waited, and a gateway
    that holds requests back only moves where they do.

    requests: number that waited at all. mean_s, p99_s, max_s: over all sent requests, those that did not wait included.
    """

    requests: int
    mean_s: float
    p99_s: float
    max_s: float


def held_back(run: Run) -> HeldBack | None:
    """Waiting times of a run's requests; None without a limit on requests in flight, or where nothing was sent."""
    waited = run.stream.waited_s if run.stream else ()
    if not waited:
        return None
    return HeldBack(sum(s > 0 for s in waited), fmean(waited), percentile(waited, 0.99) or 0.0, max(waited))
