"""Findings on a measurement: what makes it invalid, what degrades it, and what disturbed it. Each is one sentence with
its numbers.

Invalid and degraded need a cause that is known and is not noise. A host that is slow, unsteady or shared is none: its
windows count, and their interval has that noise in it. Leaving them out would keep the good moments only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_slmserve.analysis.device.sensor_health import health
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.latency import closed_loop_latencies, judged_failures, judged_rows, latencies_of
from pytest_slmserve.analysis.metrics.roofline import roofline_fraction
from pytest_slmserve.analysis.stats.estimates import grouped, percent
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import is_job, is_steady
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, Run

# What fails is work that the server was spared, and a sign of something else than was to be measured: one is too much,
# unless who measures knows better.
FAILED_SHARE = 0.0
MIN_STEPS = 20  # fewer make a rate of one odd step in twenty wrong by 5 %
MIN_STEPS_PER_HALF = 20
LONGER_WINDOW = "a longer window"  # what would make such a measurement valid
LITTLE_TOLERANCE = 0.05  # both counts are of the same run: an honest one agrees within the cut at the window's ends
LITTLE_STEPS = 2  # an engine stamps a request as scheduled up to a step ahead, and may chunk its prefill over one more
LOAD_TOLERANCE = 0.05
LOAD_STEPS = 3  # between two requests a user waits for the step under way, the one scheduled ahead, and its own turn
TOKENS_TOLERANCE = 0.01  # what a request that is preempted has made already may be told twice
CONVOY_TOLERANCE = 0.05  # of a convoy's period: what is missing, or too much, may be one of its parts alone
STEADY_TOLERANCE = 0.10  # a steady window's halves differ by the noise of a repeat: some percent on a shared host
# Of the prompt tokens. Prompts are at most about half of the work at the usual lengths, so what is saved by this moves
# a rate by less than repeats differ; a chat template that begins every prompt stays below it.
MOST_CACHED = 0.05


class CheckResult(NamedTuple):
    """One sentence each. problems: make a measurement invalid. degradations: of the sensors, without making it invalid;
    no gate rests on such a measurement. noise: what disturbed the host, kept and shown. starved: other processes had
    the CPU cores, and the problems are of the kind that this causes."""

    problems: tuple[str, ...] = ()
    degradations: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    starved: bool = False


def problems(measurement: Measurement, failed_share: float = FAILED_SHARE) -> tuple[str, ...]:
    """Reasons why a measurement is invalid, one sentence each. failed_share: of the requests, that may fail."""
    return check(measurement, failed_share=failed_share).problems


def is_clean(group: ReplicaGroup) -> bool:
    """True where nothing makes a repeat invalid or degrades it."""
    found = check(*group)
    return not found.problems and not found.degradations


def check(*group: Measurement, failed_share: float = FAILED_SHARE) -> CheckResult:
    """Findings on one measurement, or on engines that were measured at the same time.

    Of several engines each text names its replica. Of engines of one model the sum is judged for steadiness: one may
    lose what another gains meanwhile. failed_share: share of the requests that may fail.
    """
    if len(group) == 1:
        return _check_one(group[0], failed_share)
    each = [_check_one(m, failed_share) for m in group]
    problems, degraded, noise = (
        tuple(f"replica {number}: {text}" for number, texts in enumerate(kind, 1) for text in texts)
        for kind in zip(*(found[:3] for found in each), strict=True)
    )
    starved = all(found.starved for found in each if found.problems)
    runs = window.common_span(group)
    if not problems and any(window.window_trace(run).span_s is None for run in runs):
        problems, starved = ("the windows of the replicas have no time in common",), False
    if not problems:
        within = (replace(m, run=run) for m, run in zip(group, runs, strict=True))
        by_model = grouped(within, lambda m: short_name(m.spec.model))
        noise += tuple(f"{model}: {text}" for model, same in by_model.items() for text in not_steady(same))
    return CheckResult(problems, degraded, noise, starved and problems != ())


def _check_one(measurement: Measurement, failed_share: float) -> CheckResult:
    job, stream = is_job(measurement.load), measurement.run.stream
    seen = health(measurement.run, measurement.environment, measurement.replica, even=not job)
    invalid, degraded = (seen.reasons if seen.state == state else () for state in ("invalid", "degraded"))
    broken = tuple(_broken(measurement, failed_share))
    if broken:
        starved = seen.starved and all(LONGER_WINDOW in text for text in broken)
        return CheckResult(broken, degraded, seen.noise, starved)
    others = (*_implausible(measurement), *invalid)
    unheld = tuple(_load_not_held(measurement))  # a client without a core sends late
    late = []
    if stream and stream.stamp_uncertainty_s:
        doubt_s, harmless_s = stream.stamp_uncertainty_s[0], window.harmless_s(latencies_of(measurement).ttft_s.p50)
        if doubt_s > harmless_s:
            what = f"the client was held up: its stamps can be {doubt_s * 1e3:.1f} ms late in the mean"
            late.append(f"{what}, {harmless_s * 1e3:.1f} ms are harmless")
    steadiness = not_steady([measurement]) if measurement.alone else ()
    noise = (*late, *steadiness, *seen.noise)
    return CheckResult((*others, *unheld), degraded, noise, seen.starved and not others and unheld != ())


def _broken(measurement: Measurement, failed_share: float) -> Iterator[str]:
    """Yield problems that leave nothing to check further, since the rates would be of something else: more requests
    failed than may, of the whole run or of the requests that count; a window too short to have a rate; a job that was
    not served completely.

    Where requests failed and none was served, that is reported already, and no window would be long enough. A job has
    no steady window. Its preemptions are counted elsewhere, since a KV cache that is too small may be the question.
    """
    run, judged = measurement.run, judged_failures(measurement)
    counts = (run.failures, len(run.samples)), (judged, len(judged_rows(measurement)))
    share = max(failed / max(1, failed + others) for failed, others in counts)
    if share > failed_share:
        borne = f" ({percent(share)} of the requests, {percent(failed_share)} may)" if failed_share else ""
        unsent = len(run.stream.unsent_s) if run.stream else 0
        given_up = f"; the load was given up, {unsent} requests were not sent any more" if unsent else ""
        first = run.first_failure or "no reason given"
        yield f"{run.failures} requests failed, the first with {first}{borne}{given_up}"
    served = sum(run.samples.finished)
    blind = not closed_loop_latencies(run).ttft_s.known
    if is_job(measurement.load):
        asked = measurement.load.requests or 0
        if served + run.failures < asked:
            yield f"{served} of {asked} requests were served"
        elif blind:
            yield "no finished request says when its first token came"
        return
    if run.failures and not served:
        return
    if preempted := window.preemptions(run):
        yield f"{preempted} preemptions in the window: the KV cache is too small for this load"
    if (steps := len(window.window_trace(run).steps)) < MIN_STEPS or window.window_trace(run).span_s is None:
        told = f"{steps} engine steps in the window, {MIN_STEPS} are needed"
        if run.stream and not len(run.steps):  # the steps are spans of time in which the client counts
            bin_s = run.stream.bin_s
            told = f"tokens came for {steps * bin_s:g} s of the window, {MIN_STEPS * bin_s:g} s are needed"
        yield f"{told}: {LONGER_WINDOW}, or more requests"
    if not window.finished_in_window(run):
        yield f"no request finished in the window: {LONGER_WINDOW}"
    elif blind:
        yield "no finished request says when its first token came"


def _implausible(measurement: Measurement) -> Iterator[str]:
    """Yield a problem for each sign that the numbers are of something else: a rate beyond the roofline, a part of a
    convoy's period, tokens that the engine's steps do not have, requests that were sent late, prompts that came from a
    cache.

    A convoy, requests that start together, first processes its prompts, then decodes. Of one size, a window within one
    period has told 0.4 times its throughput, another 1.1 times.
    """
    run, load, environment = measurement.run, measurement.load, measurement.environment
    rate, batch = window.output_tokens_per_s(run), window.mean_batch(run)
    fraction = roofline_fraction(measurement, rate, batch, overlap=True)
    if rate is not None and fraction is not None and fraction > 1:
        what = f"{rate:.0f} output tokens/s at batch {batch:.1f} is {fraction:.2f} times"
        yield f"{what} what {environment.gpu_name} can do at most"
    if is_steady(load) and load.ramp_up == "burst" and len(run.steps):
        period = round(measurement.workload.mean_output_tokens + 1)  # engine steps
        periods = (len(window.window_trace(run).steps) - 1) / period
        if abs(periods - max(1, round(periods))) > CONVOY_TOLERANCE:
            yield f"the window holds {periods:.2f} periods of a convoy, not a whole number, and their parts differ"
    asked, made = sum(run.samples.output_tokens), sum(run.steps.new_tokens)
    if is_job(load) and len(run.steps) and abs(made / max(1, asked) - 1) > TOKENS_TOLERANCE:
        yield f"the requests have {asked} output tokens, the trace of the steps {made}"
    delay = window.delay_of(run)
    if delay and (late := window.late_sends(delay, latencies_of(measurement).ttft_s.p50)):
        yield late
    cached = cache_hit_share(run)
    if cached and cached.share > MOST_CACHED and not measurement.spec.allow_prefix_cache:
        yield (
            f"{percent(cached.share)} of the prompt tokens came from a prefix cache, {cached.told_by} (bound "
            f"{percent(MOST_CACHED)}): prompts that it has not seen, or -o slm_allow_prefix_cache=1 (measure: "
            "--allow-prefix-cache)"
        )


def _load_not_held(measurement: Measurement) -> Iterator[str]:
    """Yield a problem if the load was not in the engine, by Little's law and by the mean number of admitted requests. A
    client of a server does not see when its requests were admitted.

    Requests that wait in a front end that cannot feed the engine do not count, those whose prompt takes several steps
    do. What may be missing is the share of a request's life between its sending and its admission. An engine limit
    below the load is no fault of the measurement: it is then the bound.
    """
    run, load, output_tokens = measurement.run, measurement.load, measurement.workload.mean_output_tokens
    if measurement.spec.interface != "engine" or is_job(load):
        return
    law, tolerance = window.littles_law(run), max(LITTLE_TOLERANCE, LITTLE_STEPS / output_tokens)
    if law is None:
        yield "no request says when it was admitted: Little's law cannot be checked"
    elif abs(law.deviation) > tolerance:
        yield (
            f"Little's law: {law.requests:.1f} requests by their own intervals, {law.batch:.1f} by the step trace "
            f"({percent(abs(law.deviation))} apart, bound {percent(tolerance)})"
        )
    held = window.requests_in_flight(run)
    if is_steady(load) and held is not None:
        wanted = min(load.concurrency, measurement.resolved.max_num_seqs or measurement.spec.max_num_seqs)
        least = 1 - max(LOAD_TOLERANCE, LOAD_STEPS / (LOAD_STEPS + output_tokens))
        if held < least * wanted:
            what = f"the engine held {held:.1f} requests in the mean, not the {wanted} asked for"
            yield f"{what} (bound {percent(least)} of them)"


def trustworthy(subject: str, repeats: Sequence[ReplicaGroup], wanted: int = 1) -> Verdict:
    """Holds where at least `wanted` repeats of a case are valid. Its reason tells what is wrong with the others.
    Inconclusive where all that is wrong comes from other processes that had the host's cores."""
    wrong = [found for group in repeats if (found := check(*group)).problems]
    valid = len(repeats) - len(wrong)
    what = "runs" if any(len(group) > 1 for group in repeats) else "measurements"
    told = "; ".join(dict.fromkeys(text for found in wrong for text in found.problems))
    why = ": ".join(filter(None, [f"{valid} of {len(repeats)} {what} are valid, {wanted} are wanted", told]))
    starved = bool(wrong) and all(found.starved for found in wrong)
    state = State.PASSES if valid >= wanted else State.INCONCLUSIVE if starved else State.FAILS
    records = tuple(m.id for group in repeats for m in group)
    return Verdict("valid-point", subject, state, why, value=valid, threshold=wanted, n=len(repeats), records=records)


def not_steady(together: Sequence[Measurement]) -> Iterator[str]:
    """Yield a finding if the throughput of engines that ran at the same time changed within the window. Chance does
    that too: at a noise of 12 % per half second, to a fifth of all windows of 5 s."""
    known = [rates for rates in map(_rates_of_halves, together) if rates is not None]
    if len(known) < len(together):
        return
    first, second = (sum(side) for side in zip(*known, strict=True))
    if abs(second / first - 1) > STEADY_TOLERANCE:
        yield (
            f"not steady: {first:.0f} output tokens/s in the first half of the window, {second:.0f} in the second "
            f"({percent(abs(second / first - 1))} apart, bound {percent(STEADY_TOLERANCE)})"
        )


def _rates_of_halves(measurement: Measurement) -> tuple[float, float] | None:
    """Output tokens/s at both ends of a window that is meant to be steady; None where it is not, or is too short.

    The window is cut at the middle of its time. A convoy prefills, then decodes: parts of a period differ, however
    steady the engine is. So of convoys the ends are equal numbers of whole periods, and a run without steps has none.
    """
    load, run = measurement.load, measurement.run
    if not is_steady(load) or window.window_trace(run).span_s is None:
        return None
    trace = window.window_trace(run)
    steps, ends = trace.steps, trace.ends_s
    if load.ramp_up == "staggered":
        middle = bisect_left(ends, (ends[steps[0]] + ends[steps[-1]]) / 2, steps[0], steps[-1])
        halves = range(steps[0], middle + 1), range(middle, steps[-1] + 1)
    else:
        period = round(measurement.workload.mean_output_tokens + 1)  # engine steps
        each = min(round(len(steps) / period) // 2 * period, steps[-1] - steps[0]) if len(run.steps) else 0
        halves = range(steps[0], steps[0] + each + 1), range(steps[-1] - each, steps[-1] + 1)
    if min(map(len, halves)) <= MIN_STEPS_PER_HALF:
        return None
    first, second = (window.tokens_per_s(run, half) for half in halves)
    return (first, second) if first and second else None


@dataclass(frozen=True, slots=True)
class Cached:
    """share: of the prompt tokens, which were not computed: a rate with them is a different rate. told_by: whose
    count it is."""

    share: float
    told_by: str


def cache_hit_share(run: Run) -> Cached | None:
    """Share of the prompt tokens served by a prefix cache, and the source of the count. Per-request counts of the
    requests that ended in the window come first, where the server or engine reports them. Otherwise a server's counters
    cover the whole load, its other users included. None where neither is reported."""
    found, ended = run.samples.cached_tokens, window.finished_in_window(run)
    if any(count is not None for count in found) and ended:  # some servers leave out a count of 0
        prompts = sum(run.samples.prompt_tokens[i] for i in ended)
        return Cached(sum(found[i] or 0 for i in ended) / prompts, "counted for each request")
    looked_up, hits = (run.stream and run.stream.cache_lookups) or (0, 0)
    return Cached(hits / looked_up, "server metrics") if looked_up else None
