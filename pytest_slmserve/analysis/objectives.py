"""Verdicts on whether requests meet an SLO, with the limit that is broken and by how much."""

import math
from collections.abc import Sequence
from statistics import fmean

from pytest_slmserve.analysis.estimates import (
    NORMAL,
    TAIL,
    Interval,
    ends,
    percent,
    percent_interval,
    percentile,
    student_interval,
)
from pytest_slmserve.analysis.metrics.window import Slo, goodput_of, parse_slo, request_seconds
from pytest_slmserve.analysis.verdict import State, Verdict, above
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import ReplicaGroup

SHARE = 0.95  # of the requests
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
CLAIM = "slo"


def slo_of(slo: str | Slo, share: float) -> Slo:
    """Return the SLO of a text such as "ttft:200ms,tpot:50ms".

    Raises:
        BadUsage: if the text is not an SLO, or `share` is not between 0 and 1.
    """
    if not (isinstance(share, int | float) and 0 < share < 1):
        raise BadUsage(f"share={share!r} is not a share of the requests between 0 and 1", "share=0.99")
    return parse_slo(slo) if isinstance(slo, str) else slo


def keeps(slo: Slo, share: float, subject: str, repeats: Sequence[ReplicaGroup], records: tuple[str, ...]) -> Verdict:
    """Return the verdict on whether at least a share of the requests meets every limit of an SLO.

    Its value is the share over all repeats, in which failed requests count as not met. The 95% interval is that of
    independent requests (Wilson 1927) or, if that is wider, of the repeats' shares.
    """
    claim = f"{CLAIM} {slo}"
    found = goodput_of(slo, *repeats)
    if not found.requests:
        return Verdict.inconclusive(claim, subject, "no request ended in a valid window", share)
    seen = _share_kept(found.good, found.requests)
    each = [one.attainment for group in repeats if (one := goodput_of(slo, group)).attainment is not None]
    spread = student_interval(each) if len(each) > 1 else seen
    lows, highs = zip(ends(seen), ends(spread), strict=True)
    seen = Interval(seen.value, max(0.0, min(lows)), min(1.0, max(highs)))
    state = above(seen, share)
    why = f"{percent_interval(seen)} of {found.requests} requests keep {slo}, wanted {percent(share)}"
    why += _broken(slo, share, repeats) if state is not State.PASSES else ""
    why += f"; {found.dropped} did not finish" if found.dropped else ""
    why += ": too few requests, or too noisy, to tell" if state is State.INCONCLUSIVE else ""
    return Verdict(claim, subject, state, why, seen.value, seen.low, seen.high, share, found.requests, records)


def _share_kept(good: int, requests: int) -> Interval:
    z = NORMAL.inv_cdf(1 - TAIL)
    share, weight = good / requests, z**2 / requests
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return Interval(share, centre - half, centre + half)


def _broken(slo: Slo, share: float, repeats: Sequence[ReplicaGroup]) -> str:
    """Return a clause on the limit least often met: "TTFT is up to 312 ms for 95% of them, 56% above its limit"."""
    rows = [row for group in repeats for m in group for row in request_seconds(slo, m)]
    kept = {name: fmean(row[name] <= limit for row in rows) for name, limit in slo.bounds.items()}
    worst = min(kept, key=lambda name: kept[name])
    limit, reached = slo.bounds[worst], percentile([row[worst] for row in rows], share)
    if reached is None or not math.isfinite(reached):
        return f"; fewer than {percent(share)} of them have a {NAMES[worst]}"
    beyond = reached / limit - 1
    where = f"{percent(beyond)} above" if beyond >= 0 else f"{percent(-beyond)} below"
    return f"; {NAMES[worst]} is up to {reached * 1e3:,.4g} ms for {percent(share)} of them, {where} its limit"
