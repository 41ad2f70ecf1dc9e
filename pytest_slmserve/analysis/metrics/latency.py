"""Percentiles of latencies, and of which requests; and the figures of one measurement, as tables show them.

An open loop is judged by the requests *sent* in the window, whenever they end. Those that end in it are another set:
under overload the slow ones end after it, or never, and who counts only the others sees a fast service. A request that
never ended counts as slower than every other, so a percentile that falls among those is not known (None) and never too
small. A closed loop is judged by the requests that *ended* in the window: its load depends on its latencies, and in a
steady state both sets have the same ones.

TTFT = first token - sent, E2E = last token - sent, TPOT = (E2E - TTFT)/(n_out - 1), as `vllm bench serve` has them
(vllm/benchmarks/serve.py, release 0.32), normalised = E2E/n_out (G.-I. Yu and others, Orca, OSDI 2022).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, NamedTuple

from pytest_slmserve.analysis.estimates import mean_of_known, once, per_second, percentile
from pytest_slmserve.analysis.metrics import roofline, window
from pytest_slmserve.analysis.metrics.gpu_figures import decode_window, device_figures, sensed
from pytest_slmserve.analysis.metrics.window import finished_in_window
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement, Run, Samples
from pytest_slmserve.schema.specs import ClosedLoop


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one latency, in seconds. A percentile is None without requests, or where it falls among requests
    that never came so far. mean: over the `known` ones, None unless they are all of `requests`."""

    requests: int
    known: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles of all latencies over the same requests; TPOT over those of two output tokens or more.

    unfinished: requests among them that failed or were cut off. itl_s: over the gaps between tokens in the window, of
    whatever requests; None where no client saw them.
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
        """Values of `LatencyFigures` by name."""
        each = {"e2e": self.e2e_s, "ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.itl_s}
        named: dict[str, Any] = {"normalized_latency_s": self.normalized_latency_s.mean}
        for name, seen in each.items():
            named[f"{name}_s"] = None if seen is None else seen.mean
            named |= {f"{name}_{part}_s": None if seen is None else getattr(seen, part) for part in PARTS}
        return named


PARTS, SHARES = ("p50", "p90", "p95", "p99"), (0.50, 0.90, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFigures:
    """The figures of `Latencies` in seconds, each by a name of its own; None is "not measured"."""

    e2e_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None
    normalized_latency_s: float | None = None
    ttft_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    itl_s: float | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None


class RequestLatency(NamedTuple):  # made for each request of an archive: three times as fast as a frozen dataclass
    """One request's latencies in seconds; None where it never came so far. tpot_s is None too where it has a single
    output token: `single` tells these apart."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    normalized_latency_s: float | None
    single: bool


def sent_in(samples: Samples, window_s: tuple[float, float]) -> list[int]:
    """Rows that were sent from the window's opening until before its close."""
    opens, closes = window_s
    return [row for row, sent in enumerate(samples.sent_s) if opens <= sent < closes]


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


@once
def open_loop_latencies(run: Run) -> Latencies:
    """Latencies of the requests sent in the window, whenever they ended; a failed request counts as never ended.

    An older record does not say when its failed requests were sent, so they are left out.
    """
    never = RequestLatency(None, None, None, None, single=False)
    failed = _failed_in_window(run, "sent_s") if run.failed else 0
    seen = [request_latency(run.samples, row) for row in sent_in(run.samples, run.window_s)]
    return latencies(seen + [never] * failed, gaps_of([run]))


@once
def closed_loop_latencies(run: Run) -> Latencies:
    """Latencies of the requests that finished with their last token in the window."""
    return pooled_latencies([run])


def pooled_latencies(runs: Sequence[Run]) -> Latencies:
    """Latencies of all requests that finished in the windows of several runs."""
    seen = [request_latency(run.samples, row) for run in runs for row in finished_in_window(run)]
    return latencies(seen, gaps_of(runs))


def judged_rows(measurement: Measurement) -> Sequence[int]:
    """Rows that its latencies are of: what was sent in an open loop's window, or ended in that of any other load."""
    run = measurement.run
    return sent_in(run.samples, run.window_s) if measurement.load.judged_by == "sent" else finished_in_window(run)


def judged_tokens(measurement: Measurement) -> tuple[int, int]:
    """Prompt and output tokens of the requests by which the load is judged."""
    rows, samples = judged_rows(measurement), measurement.run.samples
    return sum(samples.prompt_tokens[row] for row in rows), sum(samples.output_tokens[row] for row in rows)


def judged_failures(measurement: Measurement) -> int:
    """Number of failed requests among those by which the load is judged. A load with a fixed number of requests counts
    all of its failures. An open loop counts those sent in its window; any other load, those that failed in it. A record
    without failure times counts all failures of the run."""
    run = measurement.run
    if run.failed is None or measurement.load.requests is not None:
        return run.failures
    return _failed_in_window(run, f"{measurement.load.judged_by}_s")


def _failed_in_window(run: Run, column: str) -> int:
    """Failed requests of a run whose time in this column, sent_s or ended_s, lies in the window."""
    opens, closes = run.window_s
    return sum(opens <= at < closes for at in getattr(run.failed, column))


def latencies_of(measurement: Measurement) -> Latencies:
    """Latencies of the requests by which this kind of load is judged: sent in the window, or finished in it."""
    sent = measurement.load.judged_by == "sent"
    return open_loop_latencies(measurement.run) if sent else closed_loop_latencies(measurement.run)


def latencies(seen: Sequence[RequestLatency], gaps: GapHistogram | None) -> Latencies:
    """Latencies over these requests. gaps: between tokens, of all of them."""
    itl = None if gaps is None else Percentiles(gaps.gaps, gaps.gaps, gaps.mean_s, *map(gaps.percentile, SHARES))
    return Latencies(
        requests=len(seen),
        unfinished=sum(each.e2e_s is None for each in seen),
        ttft_s=percentiles([each.ttft_s for each in seen]),
        tpot_s=percentiles([each.tpot_s for each in seen if not each.single]),
        e2e_s=percentiles([each.e2e_s for each in seen]),
        normalized_latency_s=percentiles([each.normalized_latency_s for each in seen]),
        itl_s=itl,
    )


def percentiles(values: Sequence[float | None]) -> Percentiles:
    """Percentiles and mean of `values` in seconds; None among them is longer than all others, by an unknown amount."""
    known = [value for value in values if value is not None]
    padded = sorted(known) + [math.inf] * (len(values) - len(known))
    found = (percentile(padded, share) for share in SHARES)
    seen = (value if value is not None and math.isfinite(value) else None for value in found)
    return Percentiles(len(values), len(known), mean_of_known(known) if len(known) == len(values) else None, *seen)


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """Gaps between successive tokens of a request (ITL), counted in bins whose edges grow by a factor.

    A client of a server sees chunks of its stream: where one bears several tokens, the gap is between chunks. Bin i
    holds gaps from least_s * growth^i until before least_s * growth^(i + 1); below bin 0 are all that are shorter than
    least_s, whatever their number. sum_s: of all gaps; None where an older record does not have it.
    """

    growth: float
    least_s: float
    counts: Mapping[int, int]
    sum_s: float | None = None

    @property
    def gaps(self) -> int:
        return sum(self.counts.values())

    @property
    def mean_s(self) -> float | None:
        """Mean gap in seconds: exact where `sum_s` is present, else from the middles of the bins. None without gaps."""
        if not self.gaps:
            return None
        middles = (self.middle_s(index) * count for index, count in self.counts.items())
        return (math.fsum(middles) if self.sum_s is None else self.sum_s) / self.gaps

    def middle_s(self, index: int) -> float:
        """Middle of bin `index` on the logarithmic scale, in seconds; `least_s` for the bin below all others."""
        return self.least_s * math.pow(self.growth, index + 0.5) if index >= 0 else self.least_s

    def percentile(self, share: float) -> float | None:
        """The gap in seconds that at least this share of all, 0 to 1, does not exceed. None of nothing.

        It is the middle of its bin on the scale of logarithms, so off by a factor of √growth at most: 0.5 % for bins of
        1 %. Of a gap shorter than `least_s` it is `least_s`.
        """
        wanted, seen = max(1, math.ceil(share * self.gaps)), 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= wanted:
                return self.middle_s(index)
        return None


def gaps_of(runs: Iterable[Run]) -> GapHistogram | None:
    """Gaps in the windows of all runs together; None where one has none, or counted them in other bins."""
    found = [gap_histogram(run.stream.gaps) if run.stream and run.stream.gaps else None for run in runs]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found) or len({(each.growth, each.least_s) for each in known}) > 1:
        return None
    if len(known) == 1:
        return known[0]
    sums = [each.sum_s for each in known if each.sum_s is not None]
    counts = sum((Counter(each.counts) for each in known), Counter[int]())
    total = math.fsum(sums) if len(sums) == len(known) else None
    return GapHistogram(known[0].growth, known[0].least_s, counts, total)


def gap_histogram(facts: Mapping[str, Any]) -> GapHistogram:
    """A histogram from its JSON form, {"growth": 1.01, "least_s": 1e-4, "counts": {index: count}, "sum_s": 1.5}. JSON
    makes the indices strings; they become integers again. `sum_s` may be missing."""
    counts = {int(index): int(count) for index, count in facts["counts"].items()}
    sum_s = None if facts.get("sum_s") is None else float(facts["sum_s"])
    return GapHistogram(float(facts["growth"]), float(facts["least_s"]), counts, sum_s)


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
        return ",".join(
            f"{name}:{bound * 1e3:.12g}ms" if bound < 1 else f"{name}:{bound:.15g}s"
            for name, bound in self.bounds.items()
        )


def parse_slo(text: str) -> Slo:
    """An SLO from words like ttft:200ms,tpot:50ms,e2e:5s. Raises BadUsage with what to type instead."""
    bounds: dict[str, float] = {}
    known = [field.name.removesuffix("_s") for field in fields(Slo)]
    for part in text.split(","):
        match = BOUND.fullmatch(part.lower())
        if match is None:
            raise BadUsage(f"{part.strip()!r} is no SLO", EXAMPLE)
        name, number, unit = match.groups()
        if name not in known:
            raise BadUsage(f"no latency is called {name!r}", f"one of {', '.join(known)}: {EXAMPLE}")
        if unit is None:
            raise BadUsage(f"the SLO {part.strip()!r} has no unit", f"{name}:{number}ms, or {name}:{number}s")
        if f"{name}_s" in bounds:
            raise BadUsage(f"{name} twice in the SLO {text!r}", EXAMPLE)
        bounds[f"{name}_s"] = float(number + EXPONENT[unit])
    return Slo(**bounds)


def checked_slo(text: str) -> Slo:
    """An SLO that records can be held against. Raises BadUsage for what is none, and for a bound on the gaps between
    tokens, which no record keeps request by request."""
    slo = parse_slo(text)
    if slo.itl_s is not None:
        raise BadUsage("the gaps between a request's tokens are counted together, not request by request", "tpot:50ms")
    return slo


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


def goodput_of(measurement: Measurement, slo: Slo) -> Goodput | None:
    """Goodput over the requests by which this kind of load is judged, failed requests included. None if the SLO bounds
    the gaps between tokens, which a record does not keep by request."""
    if slo.itl_s is not None:
        return None
    run, bounds, failed, rows = measurement.run, slo.bounds, judged_failures(measurement), judged_rows(measurement)
    each = (request_latency(run.samples, row) for row in rows)
    finished = [seen for seen in each if seen.e2e_s is not None]
    good, kept = 0, dict.fromkeys(bounds, 0)
    for seen in finished:
        values = {"ttft": seen.ttft_s, "tpot": 0.0 if seen.single else seen.tpot_s, "e2e": seen.e2e_s}
        met = [name for name, bound in bounds.items() if (value := values[name]) is not None and value <= bound]
        good += len(met) == len(kept)
        for name in met:
            kept[name] += 1
    dropped = failed + len(rows) - len(finished)
    return _counted(slo, len(rows) + failed, good, dropped, per_second(good, run.window_s), kept)


def pooled_goodput(seen: Sequence[Goodput | None], *, at_once: bool = False) -> Goodput | None:
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


def _counted(slo: Slo, requests: int, good: int, dropped: int, per_s: float, kept: Mapping[str, float]) -> Goodput:
    """Goodput by its counts. kept: number of requests that met each SLO."""
    by_slo = tuple((name, count / requests if requests else None) for name, count in kept.items())
    return Goodput(slo, requests, good, dropped, per_s, good / requests if requests else None, by_slo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(LatencyFigures):
    """Figures over the steady window; None is "not measured". Definitions in `window`, of the sensors' in `device`;
    latencies are of the requests by which this kind of load is judged (`latency`).

    batch: sequences that a step really held. kv_usage: largest share of the KV blocks in use. roofline_fraction:
    output tokens/s over what the GPU's data sheet allows at this batch. little: deviation of Little's law, relative.
    energy_per_token_j: power over output tokens/s. unexplained, bound: see `step_time`. decode_dram, decode_tensor:
    shares of the time in which those were active while no prompt was processed, and saturation_gap is of them.
    probe_s, probe_cpu_s: time of the host-speed probe's piece of work, and its CPU time.
    """

    batch: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    step_s: float | None = None
    kv_usage: float | None = None
    roofline_fraction: float | None = None
    little: float | None = None
    gpu_util: float | None = None
    engine_active: float | None = None
    sm_active: float | None = None
    sm_active_max: float | None = None
    sm_occupancy: float | None = None
    sm_occupancy_max: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_per_token_j: float | None = None
    sm_clock_hz: float | None = None
    own_cores: float | None = None
    stolen_cores: float | None = None
    probe_s: float | None = None
    probe_cpu_s: float | None = None
    power_capped: float | None = None
    power_imbalance: float | None = None
    unexplained: float | None = None
    decode_dram: float | None = None
    decode_tensor: float | None = None
    saturation_gap: float | None = None
    bound: roofline.Bound | None = None


def summarize(measurement: Measurement) -> Summary:
    """All figures of one measurement. requests/s is tokens/s over the mean output tokens of a request, None where that
    is 0: as requested, or, where all requests have one output length and some ended early, the lower mean of the
    finished ones. In a closed loop of so many requests both are over all of its time."""
    run, workload = measurement.run, measurement.workload
    tokens_per_s, batch, law = window.output_tokens_per_s(run), window.mean_batch(run), window.littles_law(run)
    each, finished = workload.mean_output_tokens, finished_output_tokens(run)
    if finished and (mean := fmean(finished)) < (workload.spec.output_tokens or 0):
        each = mean
    requests_per_s = tokens_per_s / each if tokens_per_s is not None and each else None
    if isinstance(measurement.load, ClosedLoop) and measurement.load.requests is not None:
        requests_per_s, tokens_per_s = rates_of_all(run)
    seen, decoding = device_figures(run), decode_window(run)
    dram, tensor = (decoding.mean(n) if decoding else None for n in (of.DRAM_ACTIVE, of.TENSOR_ACTIVE))
    step = roofline.step_time(measurement, seen)
    return Summary(
        batch=batch,
        requests_per_s=requests_per_s,
        output_tokens_per_s=tokens_per_s,
        step_s=window.step_s(run),
        kv_usage=window.kv_usage(run),
        roofline_fraction=roofline.roofline_fraction(measurement, tokens_per_s, batch),
        little=None if law is None else law.deviation,
        **latencies_of(measurement).figures,
        unexplained=step.unexplained if step else None,
        decode_dram=dram,
        decode_tensor=tensor,
        saturation_gap=roofline.saturation_gap(dram, tensor),
        bound=step.bound if step else roofline.bound_by_counters(seen),
        **sensed(Summary, run, tokens_per_s),
    )


def rates_of_all(run: Run) -> tuple[float | None, float | None]:
    """Requests/s and output tokens/s of a load that is served to its end: of the finished requests, over all of its
    time. None where that has no extent."""
    (began, ended), served = run.window_s, finished_output_tokens(run)
    seconds = ended - began
    return (len(served) / seconds, sum(served) / seconds) if seconds > 0 else (None, None)


def finished_output_tokens(run: Run) -> list[int]:
    """Output tokens of each request that was served to its end."""
    return [tokens for tokens, done in zip(run.samples.output_tokens, run.samples.finished, strict=True) if done]
