"""Did the client keep up? An open loop whose client lags is another load than it says.

Delay is sent - scheduled. It does two harms. The engine gets other arrivals than were asked for: late requests come in
bunches. And it tells how late the client is with everything: the loop that sends late reads tokens late, so the
delay is also the error of every time stamp, of the time to the first token above all.

The rule: a run is invalid where the 99th percentile of the delay is more than 5 ms and more than a tenth of the median
TTFT, or where a request of the window was never sent. 5 ms is about one engine step of a small model, and an engine
takes in requests between steps, so it cannot tell arrivals closer than that apart. Where latencies are long a tenth of
them hides in their own spread. The mean gap between requests is no measure: at one request per second a tenth of it is
100 ms, several times the TTFT of a small model on a GPU; at a thousand per second it is 0.1 ms, which no engine sees.

The same bounds hold for what it hears, under any load: chunks that it fetched together have one stamp, and where these
stamps can be wrong by that much in the mean, the run tells of the client and not of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.stats.estimates import mean, per_second, percentile
from pytest_slmserve.schema.records import Failures, Run

NONE_FAILED = Failures((), (), (), (), ())
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


def schedule_delay(
    scheduled_s: Sequence[float], sent_s: Sequence[float | None], window_s: tuple[float, float]
) -> ScheduleDelay:
    """Requested and achieved rates, and delays of sending, of the requests scheduled in `window_s`. Both columns have a
    row per request, on one clock. None in `sent_s` is a request that was never sent."""
    opens, closes = window_s
    wanted = [(at, sent) for at, sent in zip(scheduled_s, sent_s, strict=True) if opens <= at < closes]
    delays = [sent - at for at, sent in wanted if sent is not None]
    return ScheduleDelay(
        requested_per_s=per_second(len(wanted), window_s),
        achieved_per_s=per_second(sum(sent is not None and opens <= sent < closes for sent in sent_s), window_s),
        unsent=len(wanted) - len(delays),
        mean_s=mean(delays),
        p99_s=percentile(delays, 0.99),
        max_s=max(delays, default=None),
    )


def delay_of(run: Run) -> ScheduleDelay | None:
    """Schedule delay over all requests, failed and unsent ones included; None without a schedule."""
    if run.stream is None or run.stream.scheduled_s is None:
        return None
    failed = run.failed if run.failed and run.failed.scheduled_s is not None else NONE_FAILED
    unsent = run.stream.unsent_s
    scheduled = [*run.stream.scheduled_s, *(failed.scheduled_s or ()), *unsent]
    return schedule_delay(scheduled, [*run.samples.sent_s, *failed.sent_s, *[None] * len(unsent)], run.window_s)


def late_sends(delay: ScheduleDelay, median_ttft_s: float | None) -> str | None:
    """Message that late or unsent requests invalidate the run; None where the client kept up. Without a TTFT: None."""
    if delay.unsent:
        return f"the client never sent {delay.unsent} requests of the window"
    bound = _harmless_s(median_ttft_s)
    if delay.p99_s is None or delay.p99_s <= bound:
        return None
    return (
        f"the client lagged: 1 % of the requests were sent {delay.p99_s * 1e3:.1f} ms late or more,"
        f" {bound * 1e3:.1f} ms are harmless ({delay.achieved_per_s:.4g} of {delay.requested_per_s:.4g} requests/s)"
    )


def late_stamps(stamp_doubt_s: float, median_ttft_s: float | None) -> str | None:
    """Message that the time stamps are late, which is noise, in a sentence; None where they can be trusted.
    stamp_doubt_s: possible error of the stamps, the mean in seconds."""
    bound = _harmless_s(median_ttft_s)
    if stamp_doubt_s <= bound:
        return None
    return (
        f"the client was held up: its stamps can be {stamp_doubt_s * 1e3:.1f} ms late in the mean,"
        f" {bound * 1e3:.1f} ms are harmless"
    )


def _harmless_s(median_ttft_s: float | None) -> float:
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
