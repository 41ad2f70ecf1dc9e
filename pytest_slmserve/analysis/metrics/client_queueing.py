"""How long requests of a job waited because no more than so many may be in flight at a time.

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
    """Of all requests that were sent. requests: how many waited at all. mean_s, p99_s, max_s: over all of them."""

    requests: int
    mean_s: float
    p99_s: float
    max_s: float


def held_back(run: Run) -> HeldBack | None:
    """None where there was no such limit, or nothing was sent."""
    waited = run.stream.waited_s if run.stream else ()
    if not waited:
        return None
    return HeldBack(sum(s > 0 for s in waited), fmean(waited), percentile(waited, 0.99) or 0.0, max(waited))
