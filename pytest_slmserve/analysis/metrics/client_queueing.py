"""Waiting time of a job's requests under a limit on the requests in flight.

It is no part of their latencies, which tell of the server: a request is due when it may be sent. But users waited, and
a gateway that holds requests back only moves where they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.stats.estimates import percentile
from pytest_slmserve.schema.records import Run


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Waiting times in seconds, over all requests that were sent. requests: number that waited at all. mean_s, p99_s,
    max_s: over all sent requests, those that did not wait included."""

    requests: int
    mean_s: float
    p99_s: float
    max_s: float


def held_back(run: Run) -> HeldBack | None:
    """Waiting times of a run's requests; None where the load had no limit on requests in flight, or nothing was
    sent."""
    waited = run.stream.waited_s if run.stream else ()
    if not waited:
        return None
    return HeldBack(sum(s > 0 for s in waited), fmean(waited), percentile(waited, 0.99) or 0.0, max(waited))
