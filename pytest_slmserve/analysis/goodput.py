"""Goodput: the requests that were served well enough, and the rate at which there are most of them.

An SLO is an upper bound on a latency. A request is good if it finished and met every SLO; goodput is the good ones of
those sent in the window, per second of the window, as `vllm bench serve --goodput` counts them over a whole run
(vllm/benchmarks/serve.py, release 0.32). Y. Zhong and others (DistServe, arXiv:2401.09670) call goodput the highest
rate of requests at which a wanted share of them, 90 % say, is good: `highest_rate` is that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby, takewhile
from statistics import fmean

from pytest_slmserve.analysis.latency import RequestLatency, request_latency, sent_in
from pytest_slmserve.errors import BadUsage
from pytest_slmserve.records import Samples

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
        """As `parse_slo` takes it."""
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


def _bound(part: str) -> tuple[str, float]:
    match = BOUND.fullmatch(part)
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
    """Of the requests sent in the window, whenever they ended.

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
    longest_gap_s: Sequence[float | None] | None = None,
    failed: int = 0,
) -> Goodput | None:
    """Goodput over a window; None where the SLO bounds the gaps between tokens and these were not measured.

    longest_gap_s: of each row of the samples, None for a request without a second token. failed: requests sent in the
    window of which the samples have no row.
    """
    if slo.itl_s is not None and longest_gap_s is None:
        return None
    gaps = longest_gap_s or [None] * len(samples)
    met = [_met(request_latency(samples, row), gaps[row], slo) for row in sent_in(samples, window_s)]
    requests, good = len(met) + failed, sum(all(each.values()) for each in met if each)
    kept = {name: sum(each.get(name, False) for each in met) for name in slo.bounds}
    return Goodput(
        slo=slo,
        requests=requests,
        good=good,
        dropped=failed + sum(not each for each in met),
        per_s=good / (window_s[1] - window_s[0]),
        attainment=good / requests if requests else None,
        by_slo=tuple((name, count / requests if requests else None) for name, count in kept.items()),
    )


def _met(seen: RequestLatency, longest_gap_s: float | None, slo: Slo) -> dict[str, bool]:
    """Which bounds a request kept; nothing for one that did not finish."""
    if not seen.finished:
        return {}
    values = {
        "ttft": seen.ttft_s,
        "tpot": 0.0 if seen.single else seen.tpot_s,
        "itl": 0.0 if seen.single else longest_gap_s,
        "e2e": seen.e2e_s,
    }
    return {name: (value := values[name]) is not None and value <= bound for name, bound in slo.bounds.items()}


# Over several rates


@dataclass(frozen=True, slots=True)
class Peak:
    """The rate of requests with the highest goodput, both per second, and the rates measured next to it.

    below, above: None where the peak is the smallest or the largest rate that was measured. Then more goodput is not
    excluded on that side.
    """

    rate: float
    per_s: float
    below: float | None
    above: float | None

    @property
    def bracketed(self) -> bool:
        """Was no more seen on both sides?"""
        return self.below is not None and self.above is not None

    @property
    def why(self) -> str:
        """The finding in a sentence."""
        found = f"most goodput, {self.per_s:.4g}/s, at {self.rate:g} requests/s"
        if self.above is None:
            return f"{found}, the largest rate measured: a larger one may have more"
        if self.below is None:
            return f"{found}, the smallest rate measured: a smaller one may have more"
        return f"{found}, no more at {self.below:g} and {self.above:g}"


def peak(points: Sequence[tuple[float, float]]) -> Peak | None:
    """Where goodput is highest, from pairs of (rate, goodput), repeats of a rate averaged; None of nothing.

    Of rates with equal goodput the smallest: more load for the same is no gain.
    """
    means = _means(points)
    if not means:
        return None
    best = max(range(len(means)), key=lambda index: means[index][1])
    return Peak(
        *means[best],
        below=means[best - 1][0] if best > 0 else None,
        above=means[best + 1][0] if best + 1 < len(means) else None,
    )


def highest_rate(points: Sequence[tuple[float, float]], goal: float = 0.9) -> float | None:
    """DistServe's goodput, from pairs of (rate, attainment): the highest rate at which, as at every smaller one that
    was measured, the attainment is `goal` or more. Repeats of a rate are averaged. None where there is none."""
    kept = list(takewhile(lambda point: point[1] >= goal, _means(points)))
    return kept[-1][0] if kept else None


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    by_rate = groupby(sorted(points), key=lambda point: point[0])
    return [(rate, fmean(value for _, value in same)) for rate, same in by_rate]
