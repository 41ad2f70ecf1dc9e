"""Sections and facts of fixed-size workloads, single loads, request rates, ramps and goodput."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from statistics import fmean
from typing import Any, TypeGuard

from pytest_slmserve.analysis.estimates import Interval, grouped, percentile, possible, student_interval
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import FAILED_SHARE, cache_hit_share, check, problems, tokens_asked_for
from pytest_slmserve.analysis.metrics.window import Slo, steps_of
from pytest_slmserve.analysis.points import CONTINUOUS, JobPoint, concurrency_of, summary_of
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT, CONCURRENCY, RATE, HighestLoad, Peak, highest_load, peak
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.as_json import case_facts, facts
from pytest_slmserve.report.findings import origin, reasons, served_on, valid_cell
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.section import Chart, Legend, Part, Section, Table
from pytest_slmserve.report.text_table import Column, figure, hundredths, milliseconds, whole
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ClosedLoop, Load, OpenLoop, handed_over, short_hash

SHARES = (0.0, 0.01, *(i / 20 for i in range(1, 20)), 0.98, 0.99, 1.0)  # quantiles that are drawn
LATENCY_CHARTS = "Latency of requests"


def latency_charts(loads: Mapping[float, Sequence[Measurement]], of: str = charts.CONCURRENCY) -> Iterator[Chart]:
    """Yield the quantiles of latencies and of gaps between tokens, by load.

    Args:
        of: name of a load in the legend.
    """
    results = all(m.workload.kind != "generate" for each in loads.values() for m in each)
    for name in ("E2E",) if results else ("TTFT", "TPOT", "E2E", "ITL"):
        values = []
        for load, each in loads.items():
            if name == "ITL":
                gaps = window.gaps_of(m.run for m in each)
                quantiles = map(gaps.percentile, SHARES) if gaps else []
            else:
                requests = (
                    window.request_latency(m.run.samples, row) for m in each for row in window.judged_requests(m).rows
                )
                known = sorted(s for one in requests if (s := getattr(one, f"{name.lower()}_s")) is not None)
                quantiles = (percentile(known, share) for share in SHARES)
            for share, seconds in zip(SHARES, quantiles):
                if seconds is not None and seconds > 0:
                    values.append({"x": 1e3 * seconds, "y": 100 * share, "load": load})
        yield Chart(name, charts.quantiles(name, values, of) if values else None, group=LATENCY_CHARTS)


@dataclass(frozen=True, slots=True)
class Served:
    """Row of goodput for one load.

    Attributes:
        goodput: None if nothing valid was measured.
        dropped: requests that failed, or at a rate did not end.
        valid: whether the highest goodput may be that of this load.
    """

    load: float
    goodput: window.Goodput | None
    dropped: int
    valid: bool = True


GOODPUT_LEGEND = (
    "good: of the requests that ended in the window, those that finished within every limit; of all repeats together. "
    "dropped: that failed, in all repeats."
)
RATES_GOODPUT_LEGEND = (
    "good: of the requests sent in the window, those that finished within every limit. dropped: that failed, or did "
    "not end."
)


def goodput_columns(load: str, slo: Slo) -> list[Column[Served]]:
    def within(name: str) -> Callable[[Served], str]:
        return lambda s: hundredths(s.goodput.by_slo[name] if s.goodput else None)

    return [
        Column(load, lambda s: f"{s.load:g}"),
        Column("goodput\n/s", lambda s: figure(s.goodput.per_s if s.goodput else None, 4)),
        Column("good\n%", lambda s: hundredths(s.goodput.attainment if s.goodput else None)),
        *(Column(f"{name}\n%", within(name)) for name in slo.bounds),
        Column("\ndropped", lambda s: str(s.dropped)),
    ]


def goodput_rows(curve: Curve, slo: Slo) -> list[Served]:
    """Return the goodput of each point by valid repeats, with the dropped requests of all repeats."""
    dropped = Counter[int | None]()
    for m in curve.measurements:
        dropped[concurrency_of(m)] += m.run.failures
    return [Served(point.concurrency, point.goodput(slo), dropped[point.concurrency]) for point in curve.points]


def goodput_found(
    rows: Sequence[Served], attainment: float = ATTAINMENT, unit: str = CONCURRENCY
) -> tuple[Peak | None, HighestLoad | None]:
    """Return the peak of goodput, and the highest load with enough good requests, if any is valid.

    Args:
        attainment: share of good requests that is enough.
    """
    known = [(s.load, s.goodput) for s in rows if s.goodput and s.valid]
    invalid = [s.load for s in rows if not (s.goodput and s.valid)]
    attained = [(load, each.attainment) for load, each in known if each.attainment is not None]
    best = peak([(load, each.per_s) for load, each in known], invalid, unit)
    return best, highest_load(attained, attainment, invalid, unit)


def goodput_parts(
    rows: Sequence[Served], slo: Slo, attainment: float = ATTAINMENT, unit: str = CONCURRENCY
) -> list[Part]:
    """Return a table of goodput, its peak, and a legend; empty without rows."""
    columns, legend = goodput_columns("offered\n/s", slo), RATES_GOODPUT_LEGEND
    if unit == CONCURRENCY:
        columns, legend = goodput_columns("concur-\nrency", slo), GOODPUT_LEGEND
        columns.insert(1, Column("\nrequests", lambda s: whole(s.goodput.requests if s.goodput else None), rank=1))
    best, highest = goodput_found(rows, attainment, unit)
    found = [each.why for each in (best, highest) if each]
    if best is None:
        found = ["no load has a valid measurement: nothing can be said of where goodput peaks"]
    shown = Table(rows, columns, caption="Goodput", heading=f"good: {slo}", always=len(columns))
    return [shown, *found, Legend(legend)] if rows else []


JOB_LEGEND = (
    "Jobs: throughput is over the whole of one, to its last answer. offered, arrived: requests/s, as specified and as "
    "they came. batch: sequences that a step held; at a rate, admitted requests. holds: full-length requests that fit "
    "at once. preempted: in the mean of the repeats, sent back to be computed again. waste: share of a batch's work "
    "that is padding, or for sequences that have ended."
)
ARRIVALS = {1.0: "", math.inf: "constant"}  # words for a burstiness
JOBS: tuple[Column[JobPoint], ...] = (
    Column("\nmodel", lambda p: p.model, "left"),
    Column("\ninterface", lambda p: "server" if p.spec.interface == "server" else "", "left"),
    Column("\nbatching", lambda p: "" if p.batching == CONTINUOUS else p.batching, "left"),
    Column("\nlora", lambda p: a.words if (a := p.workload.spec.adapters) else ""),
    Column("lora\nslots", lambda p: whole(p.slots) if p.workload.spec.adapters else ""),
    Column("prompt/\noutput", lambda p: f"{p.workload.mean_prompt_tokens:.0f}/{p.output_tokens:.0f}"),
    Column("\nrequests", lambda p: f"{p.requests:,}"),
    Column("offered\n/s", lambda p: "at once" if p.load.at_once else f"{p.load.rate:g}"),
    Column("arrived\n/s", lambda p: figure(p.rate), rank=6),
    Column("burst-\niness", lambda p: ARRIVALS.get(p.load.burstiness, f"{p.load.burstiness:g}"), rank=3),
    Column(
        "max concur-\nrency", lambda p: "" if p.load.max_concurrency is None else whole(p.load.max_concurrency), rank=3
    ),
    Column("max_num\n_seqs", lambda p: whole(p.spec.max_num_seqs) if p.spec.platform != "remote" else "", rank=2),
    Column("KV\nblocks", lambda p: whole(p.kv_blocks), rank=2),
    Column("\nholds", lambda p: whole(p.capacity), rank=8),
    Column("requests\n/s", lambda p: figure(p.requests_per_s, 4), rank=1),
    Column("tokens\n/s", lambda p: figure(p.output_tokens_per_s, 4)),
    Column("\nbatch", lambda p: figure(p.batch), rank=7),
    Column("E2E s\nmean", lambda p: figure(p.e2e_s), rank=1),
    Column("E2E s\np99", lambda p: figure(p.e2e_p99_s), rank=4),
    Column("ms/\ntoken", lambda p: milliseconds(p.normalized_latency_s), rank=5),
    Column("TTFT\nms", lambda p: milliseconds(p.ttft_s), rank=4),
    Column("pre-\nempted", lambda p: figure(p.preemptions), rank=6),
    Column("waste\n%", lambda p: hundredths(p.waste), rank=5),
    Column("\nvalid", valid_cell, "left"),
)


def job_sections(jobs: Sequence[JobPoint]) -> list[Section]:
    """Return the fixed-size workloads and their problems on each kind of host."""
    sections = []
    for points in grouped(jobs, lambda p: p.environment.key).values():
        where = points[0].environment
        title = f"Jobs on {served_on(where)}{': SIMULATED, NOT MEASURED' if where.platform == 'simulated' else ''}"
        remarks = (text for p in points for text in reasons(p, f"{p.model}, {p.output_tokens:.0f} output tokens"))
        # By descending rate, which begins with all requests at once.
        rows = sorted(points, key=lambda p: (p.model, p.batching, p.output_tokens, -p.load.rate, p.kv_blocks or 0))
        sections.append(Section(title, [Table(rows, JOBS, caption=title), *remarks]))
    return sections


@dataclass(frozen=True, slots=True)
class ValidityCriteria:
    slo: Slo | None = None  # None means no goodput
    attainment: float = ATTAINMENT  # share of good requests that suffices
    failed_share: float = FAILED_SHARE  # share of requests that may fail without making a measurement invalid


BEST_RATES = ("peak", "highest_load")  # of all rates, or of all steps of a ramp
CHUNK = 0.05  # tokens: a busy server may send two at once, and the end of text may have no chunk


def load_figures(measurement: Measurement, terms: ValidityCriteria) -> dict[str, Any]:
    """Return the figures of a load or step in seconds, tokens and shares; None if not measured."""
    found = check(measurement, failed_share=terms.failed_share)
    run, from_cache = measurement.run, cache_hit_share(measurement.run)
    judged = window.judged_requests(measurement)
    return {
        "valid": not found.problems,
        "problems": found.problems,
        "degraded": found.degradations,
        "noise": found.noise,
        **facts(window.latencies_of(measurement), "requests", "unfinished"),
        **facts(run, "failures", "first_failure"),
        "failed": run.failed and Counter(run.failed.kind),
        "prompt_tokens": judged.prompt_tokens,
        "output_tokens": judged.output_tokens,
        "concurrency_max": window.most_in_flight(run),
        "window_s": run.window_s[1] - run.window_s[0],
        **facts(summary_of(measurement)),
        "prompt_tokens_per_s": window.prompt_tokens_per_s(run),
        "cached_prompt_share": from_cache and from_cache.share,
        "schedule_delay": window.delay_of(run),
        "held_back": window.held_back(run),
        "goodput": window.goodput_of(terms.slo, (measurement,)) if terms.slo else None,
    }


def facts_of_load(measurement: Measurement, terms: ValidityCriteria) -> dict[str, Any]:
    """Return server, load and figures, and the figures of the steps of a ramp."""
    found = {
        "id": measurement.id,
        **case_facts(measurement),
        "extra_body": {name: handed_over(value) for name, value in measurement.spec.extra},
        **load_figures(measurement, terms),
        **facts(measurement.run.stream, "tokens_per_chunk", "cpu_s", "salt", "refused"),
        "notes": [*_load_notes(measurement)],
    }
    if not (steps := steps_of(measurement)):
        return found
    times = ({"from_s": m.run.window_s[0], "until_s": m.run.window_s[1]} for m in steps)
    rows = [{"rate": offered_rate(m), **load_figures(m, terms), **each} for m, each in zip(steps, times)]
    return {**found, "steps": rows, **_best_rates(steps, terms)}


def rates_facts(points: Sequence[Measurement], terms: ValidityCriteria) -> dict[str, Any]:
    """Return the facts of each rate, and the best rates, which are None without an SLO."""
    each = [{"rate": offered_rate(m), **facts_of_load(m, terms)} for m in points]
    return {"points": each, **_best_rates(points, terms)}


def rows_of_load(measurement: Measurement, terms: ValidityCriteria) -> list[dict[str, Any]]:
    """Return a load as one row, or as a row for each step of a ramp."""
    shared = facts_of_load(measurement, terms)
    steps: list[dict[str, Any]] = shared.pop("steps", [{}])
    return [{name: value for name, value in {**shared, **step}.items() if name not in BEST_RATES} for step in steps]


def _served(points: Sequence[Measurement], terms: ValidityCriteria) -> list[Served]:
    found = [(m, window.goodput_of(terms.slo, (m,))) for m in points] if terms.slo else []
    return [Served(offered_rate(m), good, good.dropped, not problems(m, terms.failed_share)) for m, good in found]


def _best_rates(points: Sequence[Measurement], terms: ValidityCriteria) -> dict[str, Any]:
    return dict(zip(BEST_RATES, goodput_found(_served(points, terms), terms.attainment, RATE)))


def doubts_of(row: Mapping[str, Any], name: str = "") -> list[str]:
    """Return a line for each problem, degradation and noise, which begins with `name`."""
    kinds = {"problems": "invalid", "degraded": "questionable", "noise": "noisy"}
    return [f"{kind}: {name}{text}" for field, kind in kinds.items() for text in row[field]]


def failed_text(row: Mapping[str, Any]) -> str:
    """Return the number of failed requests by kind: "3 failed (HTTP 503: 2, timeout: 1)"."""
    each = ", ".join(f"{kind}: {count}" for kind, count in Counter(row["failed"] or ()).most_common())
    return f"{row['failures']} failed{f' ({each})' if each else ''}"


def in_words(arrivals: str) -> str:
    """Return how requests arrive; gamma gaps of burstiness 1 are Poisson arrivals."""
    usual = {"1": "Poisson arrivals", "inf": "arrivals with constant gaps"}
    gamma, words = r"(?<![^ ])gamma ([^ ,]+)", "arrivals with gamma gaps, burstiness"
    return re.sub(gamma, lambda found: usual.get(found[1], f"{words} {found[1]}"), arrivals)


def endpoint_notes(m: Measurement) -> Iterator[str]:
    """Yield notes on request fields, refused fields, and the counting of tokens."""
    if m.spec.interface == "endpoint" and m.spec.extra:
        yield f"each request with {', '.join(f'{name}: {value}' for name, value in m.spec.extra)}"
    stream = m.run.stream
    if stream and stream.refused:
        yield f"requests without {', '.join(stream.refused)}, which this server refuses"
    if stream and any(m.run.samples.finished):
        if stream.tokens_per_chunk is None:
            yield "the server does not say how many tokens it sent: each chunk counts as one"
        elif abs(stream.tokens_per_chunk - 1) > CHUNK:
            meaning = "ITL is between chunks"
            if stream.tokens_per_chunk > 1:
                meaning += ", and TPOT is too small if the first chunk has several, or if the server hides its thought"
            yield f"{stream.tokens_per_chunk:.2f} tokens came in a chunk, in the mean: {meaning}"


def _load_notes(m: Measurement) -> Iterator[str]:
    yield from endpoint_notes(m)
    wanted, came = m.workload.spec.output_tokens, window.finished_output_tokens(m.run)
    if not tokens_asked_for(m) and (early := sum(tokens < wanted for tokens in came) if wanted else 0):
        yield f"{early} of {len(came)} requests ended early, {fmean(came):,.4g} output tokens in the mean"
    rows, seen, stream = m.run.samples, cache_hit_share(m.run), m.run.stream
    several = [i for i, tokens in enumerate(rows.output_tokens) if rows.finished[i] and tokens > 1]
    at_once = sum(rows.first_token_s[i] == rows.last_token_s[i] for i in several)
    if 2 * at_once > len(several):  # for example through a proxy that buffers
        yield f"{at_once} of {len(several)} answers came in one piece: TTFT is E2E there, and TPOT and ITL say nothing"
    own, share = "unique prompts", m.workload.spec.prefix_share
    if share:
        own = f"prompts with {hundredths(share)}% in common, unique from there on"
    elif m.workload.spec.turns > 1:
        own = "conversations of which no cache has seen one"
    elif m.workload.spec.source == "trace":
        own = "prompts of the trace"
    elif not (stream and stream.salt):
        own = "prompts as the seed or the file has them"
    if seen is None:
        yield f"{own}; the server does not report prefix-cache hits"
    else:
        yield f"{own}; prefix-cache hit rate {hundredths(seen.share)}% ({seen.told_by})"


def _requests(m: Measurement) -> tuple[str, str]:
    source = "" if m.workload.spec.output_tokens else f": {m.workload.source}"
    place = m.spec.url or f"the {m.spec.interface} interface"
    return f"{m.spec.model} at {place}", f"{m.workload.each} requested in the mean{source}"


def is_windowed(load: Load) -> TypeGuard[OpenLoop]:
    """Return whether a load is an open loop with a window."""
    return isinstance(load, OpenLoop) and load.requests is None


def offered_rate(m: Measurement) -> float:
    """Return the requested rate of an open loop in requests/s. Its schedule is random."""
    assert isinstance(m.load, OpenLoop)
    return m.load.rate


def rate_series(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Return the open loops: each ramp by itself, and loads that differ only in rate, by rate."""

    def alike(m: Measurement) -> str:
        assert isinstance(m.load, OpenLoop)
        requests = asdict(replace(m.workload.spec, requests=1))
        process, timing = m.load.arrivals.partition(",")[0], (m.load.settle_s, m.load.window_s)
        return m.id if m.load.steps else short_hash([m.spec.key, requests, m.environment.key, process, *timing])

    groups = grouped((m for m in measurements if is_windowed(m.load)), alike)
    return [sorted(group, key=offered_rate) for group in groups.values()]


def load_sections(measurements: Sequence[Measurement], terms: ValidityCriteria) -> list[Section]:
    """Return a section for each load that `is_counted_loop`, each series of rates and each ramp."""

    def repeats_of(some: Iterable[Measurement]) -> list[list[Measurement]]:
        return [*grouped(some, lambda m: m.key).values()]

    series = grouped(rate_series(measurements), lambda each: each[0].key).values()  # repeats of a ramp together
    return [
        *(repeats_section([repeats], terms) for repeats in repeats_of(filter(is_counted_loop, measurements))),
        *(repeats_section(repeats_of(chain.from_iterable(each)), terms, of_rates=True) for each in series),
    ]


def repeats_section(
    loads: Sequence[Sequence[Measurement]], terms: ValidityCriteria, *, of_rates: bool = False
) -> Section:
    """Return the section of loads that differ at most in rate, with intervals over the repeats of each."""
    shown = [middle_repeat(repeats) for repeats in loads]
    section = rates_section(shown, terms) if of_rates else load_section(shown[0], terms)
    if max(map(len, loads)) == 1:
        return section
    wrong = [
        f"invalid: {m.load.title}, repeat {number} of {len(repeats)}: {why}"
        for repeats, middle in zip(loads, shown)
        for number, m in enumerate(repeats, 1)
        if m is not middle  # because its section has them
        for why in problems(m, terms.failed_share)
    ]
    return replace(section, parts=[*section.parts, *wrong, "", *repeat_parts(loads)])


def is_counted_loop(m: Measurement) -> bool:
    """Return whether this is a closed loop of an endpoint with a number of requests (no point of a sweep)."""
    return m.spec.interface == "endpoint" and m.alone and isinstance(m.load, ClosedLoop) and m.load.requests is not None


def supported(share: float, values: int) -> bool:
    """Return whether, with 95% confidence, the largest of this many values is not below a percentile."""
    return share**values <= CHANCE


def _percentile(name: str) -> Column[tuple[str, window.Percentiles]]:
    share = int(name[1:]) / 100

    def shown(row: tuple[str, window.Percentiles]) -> str:
        text = milliseconds(getattr(row[1], name))
        return f"{text}*" if text and not supported(share, row[1].known) else text

    return Column(name, shown)


CHANCE = 0.05
FEW = (
    "* too few requests: with 95% confidence a p99 needs 299 of them, a p95 59 and a p90 29. A longer --window, or "
    "more --num-prompts."
)
LATENCY: tuple[Column[tuple[str, window.Percentiles]], ...] = (
    Column("ms", lambda row: row[0], "left"),
    Column("mean", lambda row: milliseconds(row[1].mean)),
    *map(_percentile, ("p50", "p90", "p95", "p99")),
)


REPEATED = {
    "requests/s": "requests_per_s",
    "output tokens/s": "output_tokens_per_s",
    "TTFT mean, ms": "ttft_s",
    "TPOT mean, ms": "tpot_s",
    "E2E mean, ms": "e2e_s",
}
ONCE = "measured once: how far another measurement would be from it is not known; --repeats 4 tells"
ENOUGH, MOST_REPEATS = 0.05, 100  # wanted half-width of an interval, as a share of its value
REPEATS: tuple[Column[tuple[str, str, Interval]], ...] = (
    Column("load", lambda row: row[0], "left"),
    Column("of all repeats", lambda row: row[1], "left"),
    Column("mean", lambda row: figure(row[2].value, 4)),
    Column("from", lambda row: figure(row[2].low, 4)),
    Column("to", lambda row: figure(row[2].high, 4)),
)


def middle_repeat(repeats: Sequence[Measurement]) -> Measurement:
    """Return the valid repeat with the (lower) median throughput, or of all if none is valid."""
    if len(repeats) == 1:
        return repeats[0]
    known = [m for m in repeats if not problems(m)] or repeats
    return sorted(known, key=lambda m: summary_of(m).output_tokens_per_s or 0.0)[(len(known) - 1) // 2]


def repeat_intervals(repeats: Sequence[Measurement]) -> dict[str, Interval]:
    """Return the mean of each figure over valid repeats with its 95% interval, by field."""
    seen = [summary_of(m) for m in repeats if not problems(m)]
    known = {name: [v for s in seen if (v := getattr(s, name)) is not None] for name in REPEATED.values()}
    return {name: possible(student_interval(values)) for name, values in known.items() if values}


def repeat_parts(loads: Sequence[Sequence[Measurement]]) -> list[Part]:
    """Return 95% intervals over the repeats of each load, and how many repeats would be enough."""
    number = max(map(len, loads))
    rows, wanted = [], number
    for repeats in loads:
        found = repeat_intervals(repeats)
        for name, field in REPEATED.items():
            if seen := found.get(field):
                rows.append((repeats[0].load.title, name, seen.mapped(lambda s: 1e3 * s) if "ms" in name else seen))
        seen = found.get("output_tokens_per_s", Interval(0.0))
        if seen.high is not None and seen.value:
            share = (seen.high - seen.value) / seen.value / ENOUGH
            wanted = max(wanted, math.ceil(number * share**2))
    parts: list[Part] = [Table(rows, REPEATS, caption=f"95% intervals over {number} repeats", always=len(REPEATS))]
    if wanted > MOST_REPEATS:
        parts.append(f"more than {MOST_REPEATS} such repeats would tell output tokens/s within 5%: a longer --window")
    elif wanted > number:
        parts.append(f"to know output tokens/s within 5% takes about {wanted} repeats here: --repeats {wanted}")
    return [*parts, "what is shown of one repeat is of the one with the median throughput"]


def load_section(m: Measurement, terms: ValidityCriteria) -> Section:
    row, seen, delay = load_figures(m, terms), window.latencies_of(m), window.delay_of(m.run)
    late = f"; sent {milliseconds(delay.p99_s)} ms late (p99)" if delay else ""
    described = m.load.title
    if delay and is_windowed(m.load):
        sent = f"{figure(delay.requested_per_s, 4)} requests/s scheduled, {figure(delay.achieved_per_s, 4)} sent"
        described = f"{in_words(m.load.arrivals)}: {sent}"
    title, lengths = _requests(m)
    parts: list[Part] = [lengths, *_load_notes(m), f"{described}{late}"]
    if held := window.held_back(m.run):
        parts.append(
            f"{held.requests:,} of them were held back; all waited for {figure(held.mean_s)} s in the mean, "
            f"{figure(held.p99_s)} s (p99), which is no part of their latencies"
        )
    requests, output, prompt = (FOUR(row[f"{name}_per_s"]) for name in ("requests", "output_tokens", "prompt_tokens"))
    generates, only = m.workload.kind == "generate", seen.e2e_s
    rates = f"{requests} requests/s, {output} output and {prompt} prompt tokens/s"
    parts += [
        f"{rates if generates else f'{output} tokens/s, {prompt} prompt tokens/s'} over {row['window_s']:.1f} s",
        f"{figure(row['batch'], 4)} concurrent requests in the mean, {row['concurrency_max']} at most",
        f"{row['requests']} requests {m.load.judged_by} in the window: {row['unfinished']} unfinished, "
        f"{failed_text(row)}; {row['prompt_tokens']:,} prompt and {row['output_tokens']:,} output tokens",
    ]
    latencies = [("TTFT", seen.ttft_s), ("TPOT", seen.tpot_s), ("E2E", only)] if generates else [("E2E", only)]
    if generates:
        latencies += [("E2E/token", seen.normalized_latency_s), *([("ITL", seen.itl_s)] if seen.itl_s else [])]
    if any(each.known for _, each in latencies):
        parts.append(Table(latencies, LATENCY, caption="Latency", always=len(LATENCY)))
        if not all(supported(0.99, each.known) for _, each in latencies if each.p99 is not None):
            parts.append(FEW)
    if good := row["goodput"]:
        each = ", ".join(f"{name} {hundredths(share)}%" for name, share in good.by_slo.items())
        share = f"{hundredths(good.attainment)}% of {good.requests} requests are good ({each})"
        rate = f"goodput {figure(good.per_s, 4)} requests/s within {good.slo}"
        parts += ["", f"{rate}: {share}, {good.dropped} dropped"]
    if doubts := doubts_of(row):
        parts += ["", *doubts]
    drawn: Callable[[], Iterator[Chart]] = partial(latency_charts, {float(m.load.max_concurrency or 0): [m]})
    if is_windowed(m.load):
        drawn = partial(_rate_charts, [m], terms)
    return Section(title, parts, charts=drawn, unit=m.workload.unit)


def _rate_charts(points: Sequence[Measurement], terms: ValidityCriteria) -> Iterator[Chart]:
    panels, _ = rate_panels(points, terms.slo, terms.failed_share)
    yield from (Chart(panel["description"], panel) for panel in panels)
    yield from latency_charts({offered_rate(m): [m] for m in points}, "requests/s asked for")


def rate_panels(
    measurements: Sequence[Measurement], slo: Slo | None, failed_share: float = FAILED_SHARE
) -> tuple[list[charts.Spec], tuple[str, ...]]:
    """Return charts of throughput and latency over the sent rate, and the origins of the valid loads.

    Args:
        failed_share: see `ValidityCriteria`.
    """
    facts_of, lines = [], []
    for group in rate_series(measurements):
        judged = [(m, check(m, failed_share=failed_share), window.delay_of(m.run)) for m in steps_of(group[0]) or group]
        if line := [(m, delay, bool(seen.degradations)) for m, seen, delay in judged if delay and not seen.problems]:
            first, timing, process = group[0], "ramp", ""
            assert isinstance(first.load, OpenLoop)
            if not first.load.steps:
                timing = f"each judged for {first.load.window_s:g} s after {first.load.settle_s:g} s"
                process = first.load.arrivals.partition(",")[0].replace("gamma", "burstiness")
            where = origin(first.environment, first.workload)
            facts_of.append([short_name(first.spec.model), where, timing, process])
            lines.append(line)
    if not lines:
        return [], ()
    differ = [True, *(len({*column} - {""}) > 1 for column in [*zip(*facts_of, strict=True)][1:])]
    names = [", ".join(fact for fact, told in zip(row, differ) if told and fact) for row in facts_of]
    x, within = charts.axis("x", "requests/s sent"), f"good: {slo}"
    served: charts.Values = []
    waits: dict[str, charts.Values] = {"TTFT, ms": [], "TPOT, ms": [], "E2E, ms": []}
    for name, line in zip(names, lines):
        for m, delay, degraded in line:
            summary, sent = summary_of(m), delay.achieved_per_s
            good = window.goodput_of(slo, (m,)) if slo else None
            for stroke, per_s in (("served", summary.requests_per_s), (within, good.per_s if good else None)):
                if per_s is not None:
                    served.append(charts.interval_row(sent, Interval(per_s), name, degraded) | {"stroke": stroke})
            for heading, part in product(waits, charts.PERCENTILES):
                field = f"{heading.partition(',')[0].lower()}_{part}_s"
                if (seconds := getattr(summary, field)) is not None:
                    row = charts.interval_row(sent, Interval(1e3 * seconds), name, degraded)
                    waits[heading].append(row | {"stroke": part})
    most = max(row["x"] for row in served)
    equal, strokes = (
        charts.guide([{"x": 0, "y": 0}, {"x": most, "y": most}]),
        ("served", within) if slo else ("served",),
    )
    panels = [charts.line_chart(served, x, charts.axis("y", "requests/s"), names, strokes=strokes, under=[equal])]
    for heading, rows in waits.items():
        if rows:
            y, rules = charts.axis("y", heading, "log"), slo_rule(heading, slo)
            panels.append(charts.line_chart(rows, x, y, names, strokes=charts.PERCENTILES, rules=rules))
    return panels, tuple(dict.fromkeys(where for _, where, *_ in facts_of))


def slo_rule(heading: str, slo: Slo | None) -> charts.Values:
    """Return a line at the SLO of a latency; empty without one.

    Args:
        heading: of the axis, such as "TTFT, ms".
    """
    texts = zip(slo.bounds.items(), str(slo).split(",")) if slo else ()
    return [{"y": 1e3 * limit, "text": text} for (name, limit), text in texts if heading == f"{name.upper()}, ms"]


def _delay(head: str, name: str, show: Callable[[float | None], str], rank: int) -> Column[dict[str, Any]]:
    return Column(head, lambda row: show(getattr(row["schedule_delay"], name, None)), rank=rank)


def _latency(name: str, part: str, rank: int) -> Column[dict[str, Any]]:
    return Column(f"{name.upper()} ms\n{part}", lambda row: milliseconds(row[f"{name}_{part}_s"]), rank=rank)


MARKS = {
    "invalid": "problems",
    "questionable": "degraded",
    "noisy": "noise",
}  # fields by their mark, the worst first
FOUR = partial(figure, digits=4)
LATENCIES = {"ttft": (4, 1), "tpot": (4, 2), "itl": (9, 7), "e2e": (4, 2)}  # ranks of the columns of p50 and p99
RATES: tuple[Column[dict[str, Any]], ...] = (
    Column("offered\n/s", lambda row: f"{row['rate']:g}"),
    _delay("due\n/s", "requested_per_s", FOUR, 8),
    _delay("sent\n/s", "achieved_per_s", FOUR, 6),
    Column("served\n/s", lambda row: FOUR(row["requests_per_s"])),
    _delay("late ms\np99", "p99_s", milliseconds, 5),
    Column("tokens\n/s", lambda row: FOUR(row["output_tokens_per_s"]), rank=3),
    *(_latency(name, part, rank) for name, ranks in LATENCIES.items() for part, rank in zip(("p50", "p99"), ranks)),
    Column("\nvalid", lambda row: next((word for word, kind in MARKS.items() if row[kind]), "yes"), "left"),
)
RATES_LEGEND = (
    "offered, due, sent, served: requests/s of the load, by its schedule in the window, really sent, and by the tokens "
    "that came. late: sent after it was due. tokens: of output. Latencies are of the requests sent in the window, ITL "
    "of all gaps between tokens in it."
)


def rates_section(points: Sequence[Measurement], terms: ValidityCriteria) -> Section:
    """Return the section of loads that differ only in rate, or of one ramp."""
    first, steps = points[0], steps_of(points[0])
    assert isinstance(first.load, OpenLoop)
    judged = f"one load after the other, each judged for {first.load.window_s:g} s after {first.load.settle_s:g} s"
    timing = f"{in_words(first.load.arrivals.partition(',')[0])}: {judged}"
    if steps:
        timing = f"{in_words(first.load.arrivals)}; the first {first.load.settle_s:g} s of a step are not judged"
    notes = [(m, list(_load_notes(m))) for m in points]
    common = [text for text in notes[0][1] if all(text in told for _, told in notes)]
    single = (f"{offered_rate(m):g} requests/s: {text}" for m, told in notes for text in told if text not in common)
    rows = [{"rate": offered_rate(m), **load_figures(m, terms)} for m in steps or points]
    title, lengths = _requests(first)
    parts: list[Part] = [lengths, *common, *single, timing]
    parts += [Table(rows, RATES, caption="Rates", always=len(RATES)), "", Legend(RATES_LEGEND)]
    if terms.slo:
        parts += goodput_parts(_served(steps or points, terms), terms.slo, terms.attainment, RATE)
    doubts = [f"failed: {row['rate']:g} requests/s: {failed_text(row)}" for row in rows if row["failures"]]
    for row in rows:
        doubts += doubts_of(row, f"{row['rate']:g} requests/s: ")
    parts += ["", *doubts] if doubts else []
    return Section(title, parts, charts=partial(_rate_charts, points, terms))
