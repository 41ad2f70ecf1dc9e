"""Rates, latencies and goodput of one run over its steady window.

Rates come from the step trace, because requests of one length end at the same time. The window is cut to the ends of
its first and last step, so that it has no edge error.

With an open loop, latencies are those of the requests *sent* in the window, because under overload slow requests end
after it or never. A request that never ended is slower than all others, and a percentile among such requests is None.
With a closed loop, they are those of the requests that *ended* in the window, because its load depends on its
latencies.

TTFT = first token - sent, E2E = last token - sent, TPOT = (E2E - TTFT)/(n_out - 1), as `vllm bench serve` has them
(vllm/benchmarks/serve.py, release 0.32), normalized = E2E/n_out (G.-I. Yu and others, Orca, OSDI 2022).
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from statistics import fmean, variance
from typing import Any, Literal, NamedTuple

from pytest_slmserve.analysis.estimates import mean_of_known, once, once_for_all, per_second, percentile
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Failures, Measurement, ReplicaGroup, Run, Samples
from pytest_slmserve.schema.specs import ClosedLoop, JudgedBy, OpenLoop, is_burst

BATCHES = 8
LEAST = 1e-6  # relative variance: a smaller one is that of the rounded time stamps


@dataclass(frozen=True, slots=True)
class WindowTrace:
    """The engine steps whose end lies in a run's window.

    If a server reports no steps, they are equal spans of time in which its client received tokens.

    Attributes:
        inside: as a slice of the trace.
        steps: as indices of the trace.
    """

    inside: slice
    steps: range
    ends_s: Sequence[float]
    tokens: Sequence[float]
    seconds: float


@once
def whole_trace(run: Run) -> tuple[Sequence[float], Sequence[float]]:
    """Return end times and output tokens of all steps, or of equal spans of time if a server reports no steps."""
    stream = run.stream
    if len(run.steps) or stream is None:
        return run.steps.time_s, run.steps.new_tokens
    return [stream.begins_s + stream.bin_s * (i + 1) for i in range(len(stream.tokens))], stream.tokens


@once
def tokens_so_far(run: Run) -> Sequence[float]:
    """Return the cumulative output tokens of the trace, beginning with 0."""
    return [*accumulate(whole_trace(run)[1], initial=0.0)]


def tokens_between(run: Run, begins: Sequence[float], ends: Sequence[float]) -> float:
    """Return the output tokens between pairs of times, in total. Those of a step are spread evenly over it."""
    at_ends, tokens = whole_trace(run)
    parts: list[float] = []
    for sign, at in (*((-1, at) for at in begins), *((1, at) for at in ends)):
        number = bisect_right(at_ends, at)
        parts.append(sign * tokens_so_far(run)[number])
        if 0 < number < len(at_ends):
            before, after = at_ends[number - 1 : number + 1]
            parts.append(sign * tokens[number] * (at - before) / (after - before))
    return math.fsum(parts)


@once
def window_trace(run: Run) -> WindowTrace:
    (ends, tokens), (opens, closes) = whole_trace(run), run.window_s
    first, end = bisect_left(ends, opens), bisect_right(ends, closes)
    inside = slice(first, end)
    ends, tokens = ends[inside], tokens[inside]
    seconds = max(0.0, ends[-1] - ends[0]) if len(ends) > 1 else 0.0
    return WindowTrace(inside, range(first, end), ends, tokens, seconds)


@once_for_all
def output_tokens_per_s(run: Run, first: int = 0, end: int | None = None) -> float | None:
    """Return the output tokens/s in the window, or between two of its steps.

    Args:
        first: index in the window; `end` is exclusive.
    """
    trace = window_trace(run)
    ends, tokens = trace.ends_s[first:end], trace.tokens[first:end]
    seconds = ends[-1] - ends[0] if len(ends) > 1 else 0.0
    return sum(tokens[1:]) / seconds if seconds > 0 else None


@once_for_all
def relative_variance(run: Run) -> float | None:
    """Return the relative variance of the window's throughput, from equal parts (docs/statistics.md)."""
    trace = window_trace(run)
    if len(trace.steps) < 2 * BATCHES or not trace.seconds:
        return None
    parts, each, begins = [0.0] * BATCHES, trace.seconds / BATCHES, trace.ends_s[0]
    before = begins
    for at, made in zip(trace.ends_s[1:], trace.tokens[1:]):
        first, last = (min(int((moment - begins) / each), BATCHES - 1) for moment in (before, at))
        for part in range(first, last + 1):  # a step across a boundary belongs to both parts, by its time
            inside = min(at, begins + (part + 1) * each) - max(before, begins + part * each)
            parts[part] += made * inside / (at - before) if at > before else 0.0
        before = at
    centre = math.fsum(parts) / BATCHES
    return max(LEAST, variance(parts) / centre**2 / BATCHES) if min(parts) > 0 else None


def prompt_tokens_per_s(run: Run) -> float | None:
    """Return the prompt tokens/s, by the first tokens in the window."""
    opens, closes = run.window_s
    rows = zip(run.samples.prompt_tokens, run.samples.first_token_s, strict=True)
    prompts = sum(tokens for tokens, first in rows if first is not None and opens <= first <= closes)
    return prompts / (closes - opens) if closes > opens else None


def step_s(run: Run) -> float | None:
    """Return the mean time between successive engine steps."""
    trace = window_trace(run)
    return trace.seconds / (len(trace.steps) - 1) if trace.seconds and len(run.steps) else None


def steps_with_prompts(run: Run) -> float | None:
    """Return the share of the window's steps that processed (part of) a prompt."""
    if not len(run.steps):
        return None
    prompts = run.steps.prompt_tokens[window_trace(run).inside]
    return sum(tokens > 0 for tokens in prompts) / len(prompts) if prompts else None


@once_for_all
def mean_batch(run: Run) -> float | None:
    """Return the mean number of sequences that got a token in a step, weighted by time.

    Tokens accepted from drafts do not count, and a prompt counts only in the step that yields its first token. Without
    steps, it is the mean number of concurrent requests by the client, including waiting requests.
    """
    if not len(run.steps) and run.stream is not None:
        return requests_in_flight(run, "sent_s")
    trace = window_trace(run)
    if not trace.seconds:
        return None
    sequences = trace.tokens
    if accepted := run.steps.accepted[trace.inside]:
        sequences = [made - further for made, further in zip(sequences, accepted, strict=True)]
    weighted = (count * (at - before) for count, (before, at) in zip(sequences[1:], pairwise(trace.ends_s)))
    return math.fsum(weighted) / trace.seconds


def acceptance_length(run: Run) -> float | None:
    """Return the mean tokens per step of a sequence with a draft, or None without drafts.

    It is 1 + accepted/drafts, as in vLLM's log (vllm/v1/spec_decode/metrics.py, release 0.32), without tokens past a
    request's end.
    """
    inside = window_trace(run).inside
    drafts = sum(run.steps.drafts[inside])
    return 1 + sum(run.steps.accepted[inside]) / drafts if drafts else None


@once_for_all
def requests_in_flight(
    run: Run, since: Literal["admitted_s", "sent_s", "first_token_s"] = "admitted_s"
) -> float | None:
    """Return the mean number of concurrent requests in the window.

    Args:
        since: start of a request; "first_token_s" is the start of the step of its first token.
    """
    trace, samples, begins = window_trace(run), run.samples, getattr(run.samples, since)
    if not trace.seconds or all(at is None for at in begins):
        return None
    if since == "first_token_s":
        begins = [at if at is None else at - step_before(run, at) for at in begins]
    inside, opens, closes = [], trace.ends_s[0], trace.ends_s[-1]
    for began, last, finished in zip(begins, samples.last_token_s, samples.finished, strict=True):
        if began is not None:
            ended = last if finished and last is not None and last < closes else closes
            inside.append(max(0.0, ended - max(began, opens)))
    return math.fsum(inside) / (closes - opens)


def thinking_users(measurement: Measurement) -> float:
    """Return an upper bound of the mean number of users in their think time.

    It adds three standard deviations of the exponential think times.
    """
    run, load, turns = measurement.run, measurement.load, measurement.workload.spec.turns
    trace, samples = window_trace(run), run.samples
    if not isinstance(load, ClosedLoop) or not load.think_s or not trace.seconds:
        return 0.0
    opens, closes = trace.ends_s[0], trace.ends_s[-1]
    answered = sum(
        finished and at is not None and opens <= at <= closes and (request + 1) % turns > 0
        for request, at, finished in zip(samples.request, samples.last_token_s, samples.finished, strict=True)
    )
    most = (answered + 3 * math.sqrt(answered)) * load.think_s / (closes - opens)
    return min(most, load.concurrency)


def step_before(run: Run, at: float) -> float:
    """Return the duration of the step that made the tokens stamped `at`; 0 if unknown."""
    ends = run.steps.time_s
    number = bisect_left(ends, at)
    return ends[number] - ends[number - 1] if 0 < number < len(ends) else 0.0


def most_in_flight(run: Run) -> int:
    """Return the maximum concurrency in the window, without failed requests."""
    (opens, closes), samples, changes = run.window_s, run.samples, list[tuple[float, int]]()
    for sent, last, finished in zip(samples.sent_s, samples.last_token_s, samples.finished, strict=True):
        ended = last if finished and last is not None else closes
        if sent < closes and ended > opens:
            changes += [(sent, 1), (ended, -1)]
    # If a request ends as another is sent, the end comes first.
    return max(accumulate(change for _, change in sorted(changes)), default=0)


@once_for_all
def littles_law(run: Run) -> float | None:
    """Return the relative deviation of the concurrent requests that made tokens from the mean batch.

    Both agree whatever the arrivals are, and however many steps a prompt takes.
    """
    if not len(run.steps):
        return None
    requests, batch = requests_in_flight(run, "first_token_s"), mean_batch(run)
    return None if requests is None or not batch else requests / batch - 1


def kv_usage(run: Run) -> float | None:
    """Return the largest share of the KV blocks in use in the window."""
    return max((v for v in run.steps.kv_usage[window_trace(run).inside] if v is not None), default=None)


def preemptions(run: Run) -> int:
    return sum(run.steps.preempted[window_trace(run).inside])


@once
def finished_in_window(run: Run) -> Sequence[int]:
    """Return the rows of the requests that finished in the window."""
    opens, closes = run.window_s
    rows = zip(run.samples.finished, run.samples.last_token_s, strict=True)
    return [i for i, (finished, last) in enumerate(rows) if finished and last is not None and opens <= last <= closes]


def common_span(group: Sequence[Measurement]) -> list[Run]:
    """Return the runs of a group, with windows cut to their common span.

    Simulated engines have no common clock, and the lockstep cycles of bursts must be whole, so these stay uncut.
    """
    runs = [m.run for m in group]
    began = [run.began_s for run in runs if run.began_s is not None]
    if len(began) < len(runs) or any(is_burst(m.load) for m in group):
        return runs
    opens = max(at + run.window_s[0] for at, run in zip(began, runs))
    closes = min(at + run.window_s[1] for at, run in zip(began, runs))
    return [replace(run, window_s=(opens - at, max(opens, closes) - at)) for at, run in zip(began, runs)]


def steps_of(measurement: Measurement) -> list[Measurement]:
    """Return a measurement for each step of a ramp of rates; none for other loads.

    A step after an overload also serves its backlog. Each step has all failures if their times are unknown.
    """
    load = measurement.load
    if not isinstance(load, OpenLoop):
        return []
    run, found = measurement.run, []
    for number, ((rate, _), (begin, end)) in enumerate(zip(load.steps, load.step_windows_s, strict=True)):
        stream, failed, failures = run.stream, run.failed, run.failures
        if stream:
            stream = replace(stream, gaps=stream.step_gaps[number] if stream.step_gaps else {}, step_gaps=())
        if failed is not None:  # those of the step, with its settling time
            rows = [row for row, at in enumerate(failed.sent_s) if begin - load.settle_s <= at < end]
            columns = (getattr(failed, column.name) for column in fields(failed))
            failed, failures = Failures(*(c and tuple(c[row] for row in rows) for c in columns)), len(rows)
        part = replace(run, window_s=(begin, end), stream=stream, failed=failed, failures=failures)
        step = replace(load, rate=rate, window_s=end - begin, steps=())
        found.append(replace(measurement, load=step, run=part))
    return found


HARMLESS_S = 5e-3
SHARE_OF_TTFT = 0.1


@dataclass(frozen=True, slots=True)
class ScheduleDelay:
    """Rates and delays of the requests scheduled in the window.

    Attributes:
        achieved_per_s: of the requests sent in the window, whenever they were scheduled.
        unsent: number of requests never sent.
    """

    requested_per_s: float
    achieved_per_s: float
    unsent: int
    mean_s: float | None
    p99_s: float | None
    max_s: float | None


def delay_of(run: Run) -> ScheduleDelay | None:
    """Return the delays of the requests scheduled in the window, or None without a schedule."""
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
    """Return a sentence if requests were sent late or never."""
    if delay.unsent:
        return f"the client never sent {delay.unsent} requests of the window"
    bound = harmless_s(median_ttft_s)
    if delay.p99_s is None or delay.p99_s <= bound:
        return None
    return (
        f"the client lagged: 1% of the requests were sent {delay.p99_s * 1e3:.1f} ms late or more,"
        f" {bound * 1e3:.1f} ms are harmless ({delay.achieved_per_s:.4g} of {delay.requested_per_s:.4g} requests/s)"
    )


def harmless_s(median_ttft_s: float | None) -> float:
    """Return the acceptable delay of a client's sends and time stamps."""
    return max(HARMLESS_S, SHARE_OF_TTFT * (median_ttft_s or 0.0))


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Waiting times under a limit on concurrent requests, over all requests; `requests` is how many waited."""

    requests: int
    mean_s: float
    p99_s: float
    max_s: float


def held_back(run: Run) -> HeldBack | None:
    """Return the waiting times, or None without a limit on concurrent requests."""
    waited = run.stream.waited_s if run.stream else ()
    if not waited:
        return None
    return HeldBack(sum(s > 0 for s in waited), fmean(waited), percentile(waited, 0.99) or 0.0, max(waited))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one latency; None among requests that did not get that far.

    Attributes:
        known: number of requests with this latency; `mean` is None unless all have it.
    """

    known: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles of all latencies over the same requests.

    Attributes:
        unfinished: number of failed or cut off requests.
        tpot_s: without requests of one output token.
        itl_s: over all gaps between tokens in the window, if a client saw them.
    """

    requests: int
    unfinished: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    normalized_latency_s: Percentiles
    itl_s: Percentiles | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """Means and percentiles by the field names of a `Summary`."""
        each = {"e2e": self.e2e_s, "ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.itl_s}
        named: dict[str, Any] = {"normalized_latency_s": self.normalized_latency_s.mean}
        for name, seen in each.items():
            named[f"{name}_s"] = None if seen is None else seen.mean
            named |= {f"{name}_{part}_s": None if seen is None else getattr(seen, part) for part in PARTS}
        return named


PARTS, SHARES = ("p50", "p90", "p95", "p99"), (0.50, 0.90, 0.95, 0.99)


class RequestLatency(NamedTuple):  # made for each request: three times as fast as a frozen dataclass
    """Latencies of one request, or None if it did not get that far; `single` if it had one output token."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    normalized_latency_s: float | None
    single: bool


def request_latency(samples: Samples, row: int) -> RequestLatency:
    """Return the latencies of one request; of an unfinished request only its TTFT."""
    sent, first, last = samples.sent_s[row], samples.first_token_s[row], samples.last_token_s[row]
    ttft = None if first is None else first - sent
    if not samples.finished[row] or last is None:
        return RequestLatency(ttft, None, None, None, single=False)
    e2e, tokens = last - sent, samples.output_tokens[row]
    return RequestLatency(
        ttft_s=ttft,
        tpot_s=None if ttft is None or tokens <= 1 else (e2e - ttft) / (tokens - 1),
        e2e_s=e2e,
        normalized_latency_s=e2e / max(tokens, 1),
        single=tokens <= 1,
    )


def latencies(runs: Sequence[Run], judged_by: JudgedBy = "ended") -> Latencies:
    """Return the latencies of all requests that finished in the windows of these runs, or were sent in them.

    A failed request that was sent counts as never ended.
    """
    seen = []
    for run in runs:
        rows, failed = _in_window(run, judged_by)
        seen += [request_latency(run.samples, row) for row in rows]
        if judged_by == "sent":
            seen += [RequestLatency(None, None, None, None, single=False)] * (failed or 0)
    gaps = gaps_of(runs)
    return Latencies(
        requests=len(seen),
        unfinished=sum(each.e2e_s is None for each in seen),
        ttft_s=percentiles([each.ttft_s for each in seen]),
        tpot_s=percentiles([each.tpot_s for each in seen if not each.single]),
        e2e_s=percentiles([each.e2e_s for each in seen]),
        normalized_latency_s=percentiles([each.normalized_latency_s for each in seen]),
        itl_s=Percentiles(gaps.gaps, gaps.mean_s, *map(gaps.percentile, SHARES)) if gaps else None,
    )


def latencies_of(measurement: Measurement) -> Latencies:
    """Return the latencies of the requests that count for this kind of load."""
    return _latencies_of_one(measurement.run, measurement.load.judged_by)


@once_for_all
def _latencies_of_one(run: Run, judged_by: JudgedBy) -> Latencies:
    return latencies([run], judged_by)


@dataclass(frozen=True, slots=True)
class Judged:
    """The requests that count for a load: rows of the samples, their tokens, and how many others failed."""

    rows: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    failures: int


def judged_requests(measurement: Measurement) -> Judged:
    """Return the requests that were sent in the window of an open loop, or ended in that of another load.

    Failures are those of the window, or all if the load has a number of requests or their times are unknown.
    """
    run, load, samples = measurement.run, measurement.load, measurement.run.samples
    rows, failed = _in_window(run, load.judged_by)
    prompts, outputs = (sum(column[row] for row in rows) for column in (samples.prompt_tokens, samples.output_tokens))
    return Judged(rows, prompts, outputs, run.failures if failed is None or load.requests is not None else failed)


def _in_window(run: Run, judged_by: JudgedBy) -> tuple[Sequence[int], int | None]:
    """Return the rows that were sent or ended in the window, and how many requests failed in it."""
    (opens, closes), rows = run.window_s, finished_in_window(run)
    if judged_by == "sent":
        rows = [row for row, sent in enumerate(run.samples.sent_s) if opens <= sent < closes]
    if run.failed is None:
        return rows, None
    return rows, sum(opens <= at < closes for at in getattr(run.failed, f"{judged_by}_s"))


def percentiles(values: Sequence[float | None]) -> Percentiles:
    """Return percentiles and mean of `values`, in which None is longer than all others."""
    known = [value for value in values if value is not None]
    padded = sorted(known) + [math.inf] * (len(values) - len(known))
    found = (percentile(padded, share) for share in SHARES)
    seen = (value if value is not None and math.isfinite(value) else None for value in found)
    return Percentiles(len(known), mean_of_known(known) if len(known) == len(values) else None, *seen)


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """Gaps between successive tokens of a request (ITL), or between chunks of several tokens.

    Attributes:
        counts: gaps by bin. Bin i starts at least_s * growth^i, and shorter gaps are below bin 0.
        sum_s: sum of all gaps.
    """

    growth: float
    least_s: float
    counts: Mapping[int, int]
    sum_s: float

    @property
    def gaps(self) -> int:
        return sum(self.counts.values())

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.gaps if self.gaps else None

    def middle_s(self, index: int) -> float:
        """Return the middle of a bin on the logarithmic scale."""
        return self.least_s * math.pow(self.growth, index + 0.5) if index >= 0 else self.least_s

    def percentile(self, share: float) -> float | None:
        """Return the gap that this share (0 to 1) of all gaps does not exceed.

        It is the middle of its bin, so its error is at most a factor of √growth: 0.5% for bins of 1%.
        """
        wanted, seen = max(1, math.ceil(share * self.gaps)), 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= wanted:
                return self.middle_s(index)
        return None


def gaps_of(runs: Iterable[Run]) -> GapHistogram | None:
    """Return the gaps of all runs, or None if a run has none or has other bins."""
    found = [gap_histogram(run.stream.gaps) if run.stream and run.stream.gaps else None for run in runs]
    known = [each for each in found if each]
    if not known or len(known) < len(found) or len({(each.growth, each.least_s) for each in known}) > 1:
        return None
    counts = sum((Counter(each.counts) for each in known), Counter[int]())
    return replace(known[0], counts=counts, sum_s=math.fsum(each.sum_s for each in known))


def gap_histogram(facts: Mapping[str, Any]) -> GapHistogram:
    """Return a histogram from its JSON form.

    For example {"growth": 1.01, "least_s": 1e-4, "counts": {index: count}, "sum_s": 1.5}.
    """
    counts = {int(index): int(count) for index, count in facts["counts"].items()}
    return GapHistogram(float(facts["growth"]), float(facts["least_s"]), counts, float(facts["sum_s"]))


EXAMPLE = "ttft:200ms,tpot:50ms,e2e:5s"
BOUND = re.compile(r"\s*(\w+)\s*:\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?\s*", re.ASCII)
EXPONENT = {"ms": "e-3", "s": ""}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds that every request must keep; None is no limit.

    Attributes:
        tpot_s: a request of one token meets it, as in vLLM.
        itl_s: always None, because gaps are not counted for each request.

    Raises:
        BadUsage: without a limit, or for an invalid one.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        if not self.bounds:
            raise BadUsage("an SLO without a bound", EXAMPLE)
        for name, bound in self.bounds.items():
            if not 0 < bound < float("inf"):
                raise BadUsage(f"an SLO of {bound} s for {name}", EXAMPLE)
        if self.itl_s is not None:
            why = "the gaps between a request's tokens are counted together, not request by request"
            raise BadUsage(why, "tpot:50ms")

    @property
    def bounds(self) -> dict[str, float]:
        """Limits in seconds by name (ttft, tpot, e2e)."""
        found = ((field.name.removesuffix("_s"), getattr(self, field.name)) for field in fields(self))
        return {name: bound for name, bound in found if bound is not None}

    def __str__(self) -> str:
        """Return the SLO as text that `parse_slo` accepts, such as ttft:200ms,e2e:5s."""
        return ",".join(
            f"{name}:{bound * 1e3:.12g}ms" if bound < 1 else f"{name}:{bound:.15g}s"
            for name, bound in self.bounds.items()
        )


def parse_slo(text: str) -> Slo:
    """Return the SLO of a text like ttft:200ms,tpot:50ms. Raise BadUsage with a text to use instead."""
    bounds: dict[str, float] = {}
    known = [field.name.removesuffix("_s") for field in fields(Slo)]
    for part in text.split(","):
        match = BOUND.fullmatch(part.lower())
        if match is None:
            raise BadUsage(f"{part.strip()!r} is not an SLO", EXAMPLE)
        name, number, unit = match.groups()
        if name not in known:
            raise BadUsage(f"no latency is called {name!r}", f"Use one of {', '.join(known)}, for example {EXAMPLE}.")
        if unit is None:
            raise BadUsage(f"the SLO {part.strip()!r} has no unit", f"Write {name}:{number}ms or {name}:{number}s.")
        if f"{name}_s" in bounds:
            raise BadUsage(f"{name} twice in the SLO {text!r}", EXAMPLE)
        bounds[f"{name}_s"] = float(number + EXPONENT[unit])
    return Slo(**bounds)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met an SLO, and their rate, of all requests that count for a load.

    Attributes:
        good: finished requests that met every limit.
        dropped: failed or cut off requests.
        attainment: share of good requests; `by_slo` for each single limit.
    """

    slo: Slo
    requests: int
    good: int
    dropped: int
    per_s: float
    attainment: float | None
    by_slo: Mapping[str, float | None]


def request_seconds(slo: Slo, measurement: Measurement) -> Iterator[dict[str, float]]:
    """Yield the latencies of each request that counts for a load, by the limits of an SLO.

    They are infinite if it did not finish. TPOT is 0 for one token.
    """
    judged, samples = judged_requests(measurement), measurement.run.samples
    for row in judged.rows:
        seen = request_latency(samples, row)
        values = {"ttft": seen.ttft_s, "tpot": 0.0 if seen.single else seen.tpot_s, "e2e": seen.e2e_s}
        ended = seen.e2e_s is not None
        known = ((name, values[name]) for name in slo.bounds)
        yield {name: math.inf if value is None or not ended else value for name, value in known}
    yield from (dict.fromkeys(slo.bounds, math.inf) for _ in range(judged.failures))


def goodput_of(slo: Slo, *repeats: ReplicaGroup) -> Goodput:
    """Return the goodput of one or more repeats of a load.

    The rate is the sum over concurrent engines, and the mean over repeats.
    """
    bounds, kept, rates = slo.bounds, Counter[str](), [0.0] * len(repeats)
    requests = finished = good = 0
    for i, group in enumerate(repeats):
        for m in group:
            before = good
            for seen in request_seconds(slo, m):
                met = [name for name, bound in bounds.items() if seen[name] <= bound]
                kept.update(met)
                requests, good = requests + 1, good + (len(met) == len(bounds))
                finished += any(map(math.isfinite, seen.values()))
            rates[i] += per_second(good - before, m.run.window_s)
    by_slo = {name: kept[name] / requests if requests else None for name in bounds}
    attainment = good / requests if requests else None
    return Goodput(slo, requests, good, requests - finished, fmean(rates), attainment, by_slo)


def finished_output_tokens(run: Run) -> list[int]:
    return [tokens for tokens, done in zip(run.samples.output_tokens, run.samples.finished, strict=True) if done]
