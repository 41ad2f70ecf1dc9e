"""Share of the prompt tokens that a prefix cache served. Cached tokens were not computed, so a rate with them is a
different rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.schema.records import Measurement, Run

# Of the prompt tokens. Prompts are at most about half of the work at the usual lengths, so what is saved by this moves
# a rate by less than repeats differ; a chat template that begins every prompt stays below it.
BOUND = 0.05


@dataclass(frozen=True, slots=True)
class Cached:
    """share: of the prompt tokens. told_by: whose count it is."""

    share: float
    told_by: str


def cache_hit_share(run: Run) -> Cached | None:
    """Share of the prompt tokens served by a prefix cache, and the source of the count. Per-request counts of the
    requests that ended in the window come first, where the server or engine reports them. Otherwise a server's counters
    cover the whole load, its other users included. None where neither is reported."""
    found, ended = run.samples.cached_tokens, window.finished_in_window(run)
    if any(count is not None for count in found) and ended:  # some servers leave out a count of 0
        prompts = sum(run.samples.prompt_tokens[i] for i in ended)
        return Cached(sum(found[i] or 0 for i in ended) / prompts, "by its count for each request")
    looked_up, hits = (run.stream and run.stream.cache_lookups) or (0, 0)
    return Cached(hits / looked_up, "by its counters") if looked_up else None


def cache_hit_problems(measurement: Measurement) -> Iterator[str]:
    """Yield a problem where a prefix cache served more than `BOUND` of the prompt tokens and the specification does not
    allow that. The load was then lighter than it looks."""
    seen = cache_hit_share(measurement.run)
    if seen and seen.share > BOUND and not measurement.spec.allow_prefix_cache:
        yield (
            f"{percent(seen.share)} of the prompt tokens came from a prefix cache, {seen.told_by} (bound "
            f"{percent(BOUND)}): prompts that it has not seen, or --slm-allow-prefix-cache (measure: "
            "--allow-prefix-cache)"
        )
