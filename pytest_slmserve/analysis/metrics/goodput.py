"""Goodput: the requests that were served well enough, and the rate at which there are most of them.

An SLO is an upper bound on a latency. A request is good if it finished and met every SLO; goodput is the good ones of
those sent in the window, per second of the window, as `vllm bench serve --goodput` counts them over a whole run
(vllm/benchmarks/serve.py, release 0.32). What becomes of it over several rates of requests is in `rates`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from pytest_slmserve.analysis.metrics.latency import (
    RequestLatency,
    judged_failures,
    judged_rows,
    request_latency,
    sent_in,
)
from pytest_slmserve.analysis.stats.estimates import per_second
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement, Samples

EXAMPLE = "ttft:200ms,tpot:50ms,e2e:5s"
BOUND = re.compile(r"\s*(\w+)\s*:\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?\s*", re.ASCII)
EXPONENT = {"ms": "e-3", "s": ""}


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds that one request must keep, all of them; None is no bound.

    ttft_s: to the first token. tpot_s: per output token after it; a request of one token meets it, as in vLLM.
    itl_s: the longest gap between two of its tokens. e2e_s: to the last token.
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

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds by name: ttft, tpot, itl, e2e, those that there are."""
        found = ((field.name.removesuffix("_s"), getattr(self, field.name)) for field in fields(self))
        return {name: bound for name, bound in found if bound is not None}

    def __str__(self) -> str:
        """The SLO as text that `parse_slo` accepts, such as ttft:200ms,e2e:5s."""
        return ",".join(f"{name}:{_duration(bound)}" for name, bound in self.bounds.items())


def parse_slo(text: str) -> Slo:
    """An SLO from words like ttft:200ms,tpot:50ms,e2e:5s. Raises BadUsage with what to type instead."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, seconds = _bound(part)
        if name in bounds:
            raise BadUsage(f"{name.removesuffix('_s')} twice in the SLO {text!r}", EXAMPLE)
        bounds[name] = seconds
    return Slo(**bounds)


def slo_of_requests(text: str) -> Slo | None:
    """An SLO that records can be held against, None of no words. Raises BadUsage, as `checked_slo`."""
    return checked_slo(text) if text else None


def checked_slo(text: str) -> Slo:
    """An SLO that records can be held against. Raises BadUsage for what is none, and for a bound on the gaps between
    tokens, which no record keeps request by request."""
    slo = parse_slo(text)
    if slo.itl_s is not None:
        raise BadUsage("the gaps between a request's tokens are counted together, not request by request", "tpot:50ms")
    return slo


def _bound(part: str) -> tuple[str, float]:
    match = BOUND.fullmatch(part.lower())
    if match is None:
        raise BadUsage(f"{part.strip()!r} is no SLO", EXAMPLE)
    name, number, unit = match.groups()
    known = [field.name.removesuffix("_s") for field in fields(Slo)]
    if name not in known:
        raise BadUsage(f"no latency is called {name!r}", f"one of {', '.join(known)}: {EXAMPLE}")
    if unit is None:
        raise BadUsage(f"the SLO {part.strip()!r} has no unit", f"{name}:{number}ms, or {name}:{number}s")
    return f"{name}_s", float(number + EXPONENT[unit])


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.12g}ms" if seconds < 1 else f"{seconds:.15g}s"


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
    by_slo: tuple[tuple[str, float | None], ...]


def goodput(
    samples: Samples,
    window_s: tuple[float, float],
    slo: Slo,
    *,
    rows: Sequence[int] | None = None,
    failed: int = 0,
) -> Goodput | None:
    """Goodput over a window; None where the SLO bounds the gaps between tokens, which a record does not keep by
    request.

    rows: those of the samples that count; None: those sent in the window. failed: requests of which the samples have no
    row.
    """
    if slo.itl_s is not None:
        return None
    judged = sent_in(samples, window_s) if rows is None else rows
    met = [_met(request_latency(samples, row), slo) for row in judged]
    good, dropped = sum(all(each.values()) for each in met if each), failed + sum(not each for each in met)
    kept = {name: sum(each.get(name, False) for each in met) for name in slo.bounds}
    return _counted(slo, len(met) + failed, good, dropped, per_second(good, window_s), kept)


def _counted(slo: Slo, requests: int, good: int, dropped: int, per_s: float, kept: Mapping[str, float]) -> Goodput:
    """Goodput by its counts. kept: requests that met each SLO alone."""

    def share(count: float) -> float | None:
        return count / requests if requests else None

    by_slo = tuple((name, share(count)) for name, count in kept.items())
    return Goodput(slo, requests, good, dropped, per_s, share(good), by_slo)


def goodput_of(measurement: Measurement, slo: Slo) -> Goodput | None:
    """Goodput over the requests by which this kind of load is judged, failed ones included; None as `goodput`."""
    run = measurement.run
    return goodput(run.samples, run.window_s, slo, rows=judged_rows(measurement), failed=judged_failures(measurement))


def together(seen: Sequence[Goodput | None], *, at_once: bool = False) -> Goodput | None:
    """Several windows of one load as one: requests are summed, goodput is their mean, or its sum where the windows were
    `at_once`, of engines that served beside each other. None where one is not known, and of none."""
    found = [each for each in seen if each is not None]
    if not found or len(found) < len(seen):
        return None
    requests, good, dropped = (sum(getattr(each, n) for each in found) for n in ("requests", "good", "dropped"))
    names = [name for name, _ in found[0].by_slo]
    kept = {name: sum((dict(each.by_slo)[name] or 0.0) * each.requests for each in found) for name in names}
    per_s = (math.fsum if at_once else fmean)(each.per_s for each in found)
    return _counted(found[0].slo, requests, good, dropped, per_s, kept)


def _met(seen: RequestLatency, slo: Slo) -> dict[str, bool]:
    """Verdicts by SLO name, True where the request kept that bound; empty for one that did not finish."""
    if not seen.finished:
        return {}
    values = {"ttft": seen.ttft_s, "tpot": 0.0 if seen.single else seen.tpot_s, "e2e": seen.e2e_s}
    return {name: (value := values[name]) is not None and value <= bound for name, bound in slo.bounds.items()}
