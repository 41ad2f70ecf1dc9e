"""Quantities of one run over its steady window: rates by its steps, latencies by its requests, and goodput.

Rates come from the step trace, not from whole completions: requests of one fixed length end in convoys. The window is
cut to the step boundaries inside it, from the first to the last, and the tokens of the first step belong to the time
before it: so there is no edge error.

Latencies of an open loop are those of the requests *sent* in the window, whenever they end. Those that end in it are
another set: under overload the slow ones end after it, or never, and who counts only the others sees a fast service. A
request that never ended counts as slower than every other, so a percentile that falls among those is not known (None)
and never too small. A closed loop is judged by the requests that *ended* in the window: its load depends on its
latencies, and in a steady state both sets have the same ones.

TTFT = first token - sent, E2E = last token - sent, TPOT = (E2E - TTFT)/(n_out - 1), as `vllm bench serve` has them
(vllm/benchmarks/serve.py, release 0.32), normalised = E2E/n_out (G.-I. Yu and others, Orca, OSDI 2022).
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
LEAST = 1e-6  # relative variance: below a tenth of a per cent it is that of the stamps, which a record rounds


@dataclass(frozen=True, slots=True)
class WindowTrace:
    """The part of a run's trace in its window.

    inside: the engine steps whose end lies in the window, as a slice of the trace; steps: their indices. ends_s,
    tokens: their end times and output tokens. If a server reports no steps: of the equal spans of time in which its
    client received the tokens. seconds: from the first of these ends to the last; 0 below two.
    """

    inside: slice
    steps: range
    ends_s: Sequence[float]
    tokens: Sequence[float]
    seconds: float


@once
def whole_trace(run: Run) -> tuple[Sequence[float], Sequence[float]]:
    """End times and output tokens of a run's engine steps; if its server reports none, of the equal spans of time in
    which its client received the tokens."""
    stream = run.stream
    if len(run.steps) or stream is None:
        return run.steps.time_s, run.steps.new_tokens
    return [stream.begins_s + stream.bin_s * (i + 1) for i in range(len(stream.tokens))], stream.tokens


@once
def tokens_so_far(run: Run) -> Sequence[float]:
    """Output tokens up to and with each entry of the trace, after a 0."""
    return [*accumulate(whole_trace(run)[1], initial=0.0)]


def tokens_between(run: Run, begins: Sequence[float], ends: Sequence[float]) -> float:
    """Output tokens that a run made from one time to another, summed over pairs of times. Those of a step come evenly
    while it lasts. The same whatever the run did before."""
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
    """Return the trace of a run in its window."""
    (ends, tokens), (opens, closes) = whole_trace(run), run.window_s
    first, end = bisect_left(ends, opens), bisect_right(ends, closes)
    inside = slice(first, end)
    ends, tokens = ends[inside], tokens[inside]
    seconds = max(0.0, ends[-1] - ends[0]) if len(ends) > 1 else 0.0
    return WindowTrace(inside, range(first, end), ends, tokens, seconds)


@once_for_all
def output_tokens_per_s(run: Run, first: int = 0, end: int | None = None) -> float | None:
    """Output tokens per second between the ends of the first and the last of some steps of the window; None below two.
    first, end: of these steps, among those of the window; all of them unless told."""
    trace = window_trace(run)
    ends, tokens = trace.ends_s[first:end], trace.tokens[first:end]
    seconds = ends[-1] - ends[0] if len(ends) > 1 else 0.0
    return sum(tokens[1:]) / seconds if seconds > 0 else None


@once_for_all
def relative_variance(run: Run) -> float | None:
    """Return the relative variance of the window's throughput by its own course, from the means of equal parts
    (docs/statistics.md). None if a part has no tokens, or the window too few steps."""
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
    """Prompt tokens of the requests whose first token came in the window / its seconds; None of no window."""
    opens, closes = run.window_s
    rows = zip(run.samples.prompt_tokens, run.samples.first_token_s, strict=True)
    prompts = sum(tokens for tokens, first in rows if first is not None and opens <= first <= closes)
    return prompts / (closes - opens) if closes > opens else None


def step_s(run: Run) -> float | None:
    """Return the mean time between successive engine steps, which a running request waits; None without a trace of
    steps."""
    trace = window_trace(run)
    return trace.seconds / (len(trace.steps) - 1) if trace.seconds and len(run.steps) else None


def steps_with_prompts(run: Run) -> float | None:
    """Return the share of the window's steps that processed a prompt, or a part of one. None where a server tells no
    steps."""
    if not len(run.steps):
        return None
    prompts = run.steps.prompt_tokens[window_trace(run).inside]
    return sum(tokens > 0 for tokens in prompts) / len(prompts) if prompts else None


@once_for_all
def mean_batch(run: Run) -> float | None:
    """Return the mean number of sequences that a step carried to their next token, weighted by time.

    It is the new tokens of a step, without those that drafts added. A prefill that ends in the step yields its first
    token there and counts; a prompt that takes several steps is in no batch before. If a server tells no steps, it is
    the mean number of concurrent requests as its client saw them, those that wait among them.
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
    """Return the mean tokens of a step of a sequence that had a draft, in the window: 1 + accepted/drafts, as vLLM's
    log has it (vllm/v1/spec_decode/metrics.py, release 0.32), but for tokens past a request's end. None without
    drafts."""
    inside = window_trace(run).inside
    drafts = sum(run.steps.drafts[inside])
    return 1 + sum(run.steps.accepted[inside]) / drafts if drafts else None


@once_for_all
def requests_in_flight(
    run: Run, since: Literal["admitted_s", "sent_s", "first_token_s"] = "admitted_s"
) -> float | None:
    """Return the mean number of requests between their admission, their sending, or the beginning of the step that made
    their first token, and their last token. A request cut off by the end of the run counts until the end of the window.
    None if no request says when it was, or the window has no steps."""
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
    """Return how many users at most thought about the next turn of a conversation, in the mean of the window: by the
    answers that they got there, and three standard deviations of their think times, which are exponential."""
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
    """Return seconds of the step that made the tokens stamped `at`, which is the one that ends then or next; 0 if the
    trace does not have it."""
    ends = run.steps.time_s
    number = bisect_left(ends, at)
    return ends[number] - ends[number - 1] if 0 < number < len(ends) else 0.0


def most_in_flight(run: Run) -> int:
    """Return the most requests at once in the window, each from its sending to its last token, failed ones left out."""
    (opens, closes), samples, changes = run.window_s, run.samples, list[tuple[float, int]]()
    for sent, last, finished in zip(samples.sent_s, samples.last_token_s, samples.finished, strict=True):
        ended = last if finished and last is not None else closes
        if sent < closes and ended > opens:
            changes += [(sent, 1), (ended, -1)]
    # Where one ends as another is sent, the end comes first.
    return max(accumulate(change for _, change in sorted(changes)), default=0)


@once_for_all
def littles_law(run: Run) -> float | None:
    """Return the relative deviation of the requests that made tokens, by their own intervals, from the mean batch of
    the step trace. Both are equal in an honest run whatever its arrivals, and however many steps a prompt takes. None:
    not measured, as of a server that tells no steps."""
    if not len(run.steps):
        return None
    requests, batch = requests_in_flight(run, "first_token_s"), mean_batch(run)
    return None if requests is None or not batch else requests / batch - 1


def kv_usage(run: Run) -> float | None:
    """Largest share of the KV blocks in use in the window, 0 to 1; None without a trace of steps."""
    return max((v for v in run.steps.kv_usage[window_trace(run).inside] if v is not None), default=None)


def preemptions(run: Run) -> int:
    """Requests thrown out of the engine in the window, to be computed again later; 0 without a trace of steps."""
    return sum(run.steps.preempted[window_trace(run).inside])


@once
def finished_in_window(run: Run) -> Sequence[int]:
    """Return rows of the samples that finished with their last token in the window."""
    opens, closes = run.window_s
    rows = zip(run.samples.finished, run.samples.last_token_s, strict=True)
    return [i for i, (finished, last) in enumerate(rows) if finished and last is not None and opens <= last <= closes]


def common_span(group: Sequence[Measurement]) -> list[Run]:
    """Runs of a group, cut to the span that all windows have in common. Uncut without a common clock (simulated), and
    of requests that start together: their windows are whole convoys, and parts of one differ."""
    runs = [m.run for m in group]
    began = [run.began_s for run in runs if run.began_s is not None]
    if len(began) < len(runs) or any(is_burst(m.load) for m in group):
        return runs
    opens = max(at + run.window_s[0] for at, run in zip(began, runs))
    closes = min(at + run.window_s[1] for at, run in zip(began, runs))
    return [replace(run, window_s=(opens - at, max(opens, closes) - at)) for at, run in zip(began, runs)]


def steps_of(measurement: Measurement) -> list[Measurement]:
    """Return a measurement for each step of the load, whose window is the step but for its first `settle_s`; none where
    the load is no ramp. Gaps between tokens are those of the step. If it is not known when requests failed, each step
    keeps all failures.

    What a step left unserved the next one has to serve too, so a step after an overload is judged with that backlog.
    """
    load = measurement.load
    if not isinstance(load, OpenLoop):
        return []
    run, found = measurement.run, []
    for number, ((rate, _), (begin, end)) in enumerate(zip(load.steps, load.step_windows_s, strict=True)):
        stream, failed, failures = run.stream, run.failed, run.failures
        if stream:
            stream = replace(stream, gaps=stream.step_gaps[number] if stream.step_gaps else {}, step_gaps=())
        if failed is not None:  # the step's own, those of its settling time included
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
    """Rates, and delays of sending in seconds, of the requests scheduled in the window. achieved_per_s: of those sent
    in it, whenever they were scheduled. unsent: scheduled in it, never sent. mean_s, p99_s, max_s: of the delays of
    those that were sent, None if none was."""

    requested_per_s: float
    achieved_per_s: float
    unsent: int
    mean_s: float | None
    p99_s: float | None
    max_s: float | None


def delay_of(run: Run) -> ScheduleDelay | None:
    """Return rates and delays of the requests scheduled in the window, failed ones too; None without a schedule."""
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
    """Return the problem that requests were sent late or never; None if the client kept up."""
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
    """Return seconds by which a client may be late, in sending and in its time stamps, if the median TTFT is this."""
    return max(HARMLESS_S, SHARE_OF_TTFT * (median_ttft_s or 0.0))


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Waiting times in seconds under a limit on the concurrent requests, which are no part of latencies. requests: how
    many waited at all. mean_s, p99_s, max_s: over all sent requests, those that did not wait included."""

    requests: int
    mean_s: float
    p99_s: float
    max_s: float


def held_back(run: Run) -> HeldBack | None:
    """Waiting times of a run's requests; None without a limit on concurrent requests, or if nothing was sent."""
    waited = run.stream.waited_s if run.stream else ()
    if not waited:
        return None
    return HeldBack(sum(s > 0 for s in waited), fmean(waited), percentile(waited, 0.99) or 0.0, max(waited))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one latency, in seconds. A percentile is None without requests, or where it falls among requests
    that never came so far. mean: over the `known` requests, None unless they are all."""

    known: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles of all latencies over the same requests; TPOT over those of two output tokens or more. unfinished:
    requests among them that failed or were cut off. itl_s: over the gaps between tokens in the window, of whatever
    requests; None if no client saw them."""

    requests: int
    unfinished: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    normalized_latency_s: Percentiles
    itl_s: Percentiles | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """Means and percentiles by the names that a `Summary` has for them."""
        each = {"e2e": self.e2e_s, "ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.itl_s}
        named: dict[str, Any] = {"normalized_latency_s": self.normalized_latency_s.mean}
        for name, seen in each.items():
            named[f"{name}_s"] = None if seen is None else seen.mean
            named |= {f"{name}_{part}_s": None if seen is None else getattr(seen, part) for part in PARTS}
        return named


PARTS, SHARES = ("p50", "p90", "p95", "p99"), (0.50, 0.90, 0.95, 0.99)


class RequestLatency(NamedTuple):  # made for each request of an archive: three times as fast as a frozen dataclass
    """One request's latencies in seconds; None if it never came so far. tpot_s: None too for a `single` output
    token."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    normalized_latency_s: float | None
    single: bool


def request_latency(samples: Samples, row: int) -> RequestLatency:
    """Latencies of one request. One that did not finish has only its time to first token, if that token came."""
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
    """Return the latencies of all requests that finished in the windows of these runs, or were sent in them, whenever
    they ended. A failed request that was sent counts as never ended. An older record does not say when its failed
    requests were sent, so they are left out."""
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
    """Return the latencies of the requests by which this kind of load is judged."""
    return _latencies_of_one(measurement.run, measurement.load.judged_by)


@once_for_all
def _latencies_of_one(run: Run, judged_by: JudgedBy) -> Latencies:
    return latencies([run], judged_by)


@dataclass(frozen=True, slots=True)
class Judged:
    """The requests by which a load is judged: rows of the samples, the tokens of these, and how many others failed."""

    rows: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    failures: int


def judged_requests(measurement: Measurement) -> Judged:
    """Return the requests that were sent in the window of an open loop, or ended in that of any other load, and the
    failed ones of the same moments. A load with a number of requests counts all of its failures, and so does a record
    that does not say when requests failed."""
    run, load, samples = measurement.run, measurement.load, measurement.run.samples
    rows, failed = _in_window(run, load.judged_by)
    prompts, outputs = (sum(column[row] for row in rows) for column in (samples.prompt_tokens, samples.output_tokens))
    return Judged(rows, prompts, outputs, run.failures if failed is None or load.requests is not None else failed)


def _in_window(run: Run, judged_by: JudgedBy) -> tuple[Sequence[int], int | None]:
    """Return rows of the samples that were sent, or ended, in the window, and the number of failed requests that were;
    None if the record does not say when."""
    (opens, closes), rows = run.window_s, finished_in_window(run)
    if judged_by == "sent":
        rows = [row for row, sent in enumerate(run.samples.sent_s) if opens <= sent < closes]
    if run.failed is None:
        return rows, None
    return rows, sum(opens <= at < closes for at in getattr(run.failed, f"{judged_by}_s"))


def percentiles(values: Sequence[float | None]) -> Percentiles:
    """Percentiles and mean of `values` in seconds; None among them is longer than all others, by an unknown amount."""
    known = [value for value in values if value is not None]
    padded = sorted(known) + [math.inf] * (len(values) - len(known))
    found = (percentile(padded, share) for share in SHARES)
    seen = (value if value is not None and math.isfinite(value) else None for value in found)
    return Percentiles(len(known), mean_of_known(known) if len(known) == len(values) else None, *seen)


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """Gaps between successive tokens of a request (ITL), counted in bins whose edges grow by a factor.

    A client of a server sees chunks of its stream: if one bears several tokens, the gap is between chunks. Bin i holds
    gaps from least_s * growth^i until before least_s * growth^(i + 1); below bin 0 are all that are shorter than
    least_s, whatever their number. sum_s: of all gaps.
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
        """Mean gap in seconds; None without gaps."""
        return self.sum_s / self.gaps if self.gaps else None

    def middle_s(self, index: int) -> float:
        """Middle of bin `index` on the logarithmic scale, in seconds; `least_s` for the bin below all others."""
        return self.least_s * math.pow(self.growth, index + 0.5) if index >= 0 else self.least_s

    def percentile(self, share: float) -> float | None:
        """Return the gap in seconds that at least this share of all, 0 to 1, does not exceed; None without gaps. It is
        the middle of its bin, so off by a factor of √growth at most: 0.5 % for bins of 1 %."""
        wanted, seen = max(1, math.ceil(share * self.gaps)), 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= wanted:
                return self.middle_s(index)
        return None


def gaps_of(runs: Iterable[Run]) -> GapHistogram | None:
    """Gaps in the windows of all runs together; None if one has none, or counted them in other bins."""
    found = [gap_histogram(run.stream.gaps) if run.stream and run.stream.gaps else None for run in runs]
    known = [each for each in found if each]
    if not known or len(known) < len(found) or len({(each.growth, each.least_s) for each in known}) > 1:
        return None
    counts = sum((Counter(each.counts) for each in known), Counter[int]())
    return replace(known[0], counts=counts, sum_s=math.fsum(each.sum_s for each in known))


def gap_histogram(facts: Mapping[str, Any]) -> GapHistogram:
    """Return a histogram from its JSON form, {"growth": 1.01, "least_s": 1e-4, "counts": {index: count}, "sum_s": 1.5},
    whose indices may be strings."""
    counts = {int(index): int(count) for index, count in facts["counts"].items()}
    return GapHistogram(float(facts["growth"]), float(facts["least_s"]), counts, float(facts["sum_s"]))


EXAMPLE = "ttft:200ms,tpot:50ms,e2e:5s"
BOUND = re.compile(r"\s*(\w+)\s*:\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?\s*", re.ASCII)
EXPONENT = {"ms": "e-3", "s": ""}


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds that one request must keep, all of them; None is no bound. Raises BadUsage without one.

    ttft_s: to the first token. tpot_s: per output token after it; a request of one token meets it, as in vLLM.
    itl_s: always None: a bound on the gaps between tokens is refused. e2e_s: to the last token.
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
        """Seconds by name (ttft, tpot, e2e) of the bounds that there are."""
        found = ((field.name.removesuffix("_s"), getattr(self, field.name)) for field in fields(self))
        return {name: bound for name, bound in found if bound is not None}

    def __str__(self) -> str:
        """The SLO as text that `parse_slo` accepts, such as ttft:200ms,e2e:5s."""
        return ",".join(
            f"{name}:{bound * 1e3:.12g}ms" if bound < 1 else f"{name}:{bound:.15g}s"
            for name, bound in self.bounds.items()
        )


def parse_slo(text: str) -> Slo:
    """Return the SLO of words like ttft:200ms,tpot:50ms. Raises BadUsage with what to type instead."""
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
    """Requests that met an SLO, and their rate, among the requests sent in the window, whenever they ended. In a closed
    loop: among those that ended in the window.

    good: finished, every SLO met. dropped: did not finish (failed or cut off); they meet no SLO. per_s: the good ones /
    seconds of the window. attainment: good / requests; by_slo: the same for each SLO alone, in the order of the SLO.
    Shares are None without a request.
    """

    slo: Slo
    requests: int
    good: int
    dropped: int
    per_s: float
    attainment: float | None
    by_slo: Mapping[str, float | None]


def request_seconds(slo: Slo, measurement: Measurement) -> Iterator[dict[str, float]]:
    """Yield the seconds of each request by which a load is judged, by the limits of an SLO; infinite for what did not
    come, such as every one of a failed request. A request of one token takes no time per output token."""
    judged, samples = judged_requests(measurement), measurement.run.samples
    for row in judged.rows:
        seen = request_latency(samples, row)
        values = {"ttft": seen.ttft_s, "tpot": 0.0 if seen.single else seen.tpot_s, "e2e": seen.e2e_s}
        ended = seen.e2e_s is not None
        known = ((name, values[name]) for name in slo.bounds)
        yield {name: math.inf if value is None or not ended else value for name, value in known}
    yield from (dict.fromkeys(slo.bounds, math.inf) for _ in range(judged.failures))


def goodput_of(slo: Slo, *repeats: ReplicaGroup) -> Goodput:
    """Return the goodput of one or more repeats of a load, over the requests by which it is judged, failed ones
    included. Requests are summed; the rate is the sum over engines beside each other, and the mean over repeats."""
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
    """Output tokens of each request that was served to its end."""
    return [tokens for tokens, done in zip(run.samples.output_tokens, run.samples.finished, strict=True) if done]
