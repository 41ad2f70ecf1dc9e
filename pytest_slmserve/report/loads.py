"""Results of a server under one load, at several request rates or on a ramp, as text or as facts: for `measure`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, TypeGuard

from pytest_slmserve.analysis.metrics.latency import Goodput, Percentiles, Slo, goodput_of, judged_tokens, latencies_of
from pytest_slmserve.analysis.metrics.summary import finished_output_tokens, summarize
from pytest_slmserve.analysis.metrics.validity import FAILED_SHARE, cache_hit_share, check, problems
from pytest_slmserve.analysis.metrics.window import delay_of, held_back, most_in_flight, prompt_tokens_per_s, steps_of
from pytest_slmserve.analysis.points import summary_of
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT, RATE, HighestLoad, Peak
from pytest_slmserve.report.as_json import case_facts, facts, goodput_facts
from pytest_slmserve.report.tables.findings import lines_of, word_for
from pytest_slmserve.report.tables.jobs import Served, goodput_columns, goodput_found
from pytest_slmserve.report.text_table import Column, figure, hanging, hundredths, milliseconds, table
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import short_hash


@dataclass(frozen=True, slots=True)
class ValidityCriteria:
    """Criteria for judging loads. slo: None means no goodput. attainment: the share of good requests that suffices.
    failed_share: share of requests that may fail without making a measurement invalid."""

    slo: Slo | None = None
    attainment: float = ATTAINMENT
    failed_share: float = FAILED_SHARE


CHUNK = 0.05  # tokens: a busy server now and then sends two at once, and an end of text may have no chunk
STRICT = ValidityCriteria()


def latency_facts(measurement: Measurement) -> dict[str, Percentiles]:
    """Latency percentiles by name, in seconds; ITL is of the gaps in the window."""
    seen = latencies_of(measurement)
    found = {"ttft": seen.ttft_s, "tpot": seen.tpot_s, "e2e": seen.e2e_s, "normalized": seen.normalized_latency_s}
    return found | ({"itl": seen.itl_s} if seen.itl_s else {})


def good(measurement: Measurement, slo: Slo | None) -> Goodput | None:
    return goodput_of(measurement, slo) if slo else None


def failed_text(measurement: Measurement) -> str:
    """ "3 failed (HTTP 503: 2, timeout: 1)" """
    run = measurement.run
    kinds = Counter(run.failed.kind if run.failed else ())
    each = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
    return f"{run.failures} failed{f' ({each})' if each else ''}"


def single_load_facts(measurement: Measurement, terms: ValidityCriteria) -> dict[str, Any]:
    """The server, the load and the measured figures, as facts for JSON."""
    return {
        "id": measurement.id,
        **case_facts(measurement.spec, measurement.load, measurement.workload, measurement.environment),
        "extra_body": {name: json.loads(value) for name, value in measurement.spec.extra},
        **figures_of(measurement, terms),
        **facts(measurement.run.stream, "tokens_per_chunk", "cpu_s", "salt", "refused"),
    }


def figures_of(measurement: Measurement, terms: ValidityCriteria) -> dict[str, Any]:
    """Seconds, tokens and ratios of 1; null is not measured."""
    found = check(measurement, failed_share=terms.failed_share)
    run, from_cache = measurement.run, cache_hit_share(measurement.run)
    prompts, outputs = judged_tokens(measurement)
    return {
        "valid": not found.problems,
        "problems": found.problems,
        "degraded": found.degradations,
        "noise": found.noise,
        **facts(latencies_of(measurement), "requests", "unfinished"),
        **facts(run, "failures", "first_failure"),
        "failed": run.failed and Counter(run.failed.kind),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "in_flight_max": most_in_flight(run),
        "window_s": run.window_s[1] - run.window_s[0],
        **facts(summary_of(measurement)),
        "prompt_tokens_per_s": prompt_tokens_per_s(run),
        "cached_prompt_share": from_cache and from_cache.share,
        "schedule_delay": delay_of(run),
        "held_back": held_back(run),
        "goodput": goodput_facts(good(measurement, terms.slo)),
    }


def load_text(measurement: Measurement, terms: ValidityCriteria = STRICT) -> str:
    """A head, a table of latencies where there are any, what was good, and what is wrong."""
    told, found = [], latency_facts(measurement)
    if served := good(measurement, terms.slo):
        each = ", ".join(f"{name} {hundredths(share)} %" for name, share in served.by_slo)
        share = f"{hundredths(served.attainment)} % of {served.requests} requests are good ({each})"
        rate = f"goodput {figure(served.per_s, 4)} requests/s within {served.slo}"
        told = ["", f"{rate}: {share}, {served.dropped} dropped"]
    rows = ["", _table(found)] if any(each.known for each in found.values()) else []
    doubts = lines_of(check(measurement, failed_share=terms.failed_share))
    return "\n".join([*_head(measurement), *rows, *told, *(["", *doubts] if doubts else [])])


def _load(m: Measurement) -> str:
    """Description of the load on the server, with the client's adherence to its schedule where there was one."""
    delay = delay_of(m.run)
    late = f"; sent {milliseconds(delay.p99_s)} ms late (p99)" if delay else ""
    match m.load:
        case OpenLoop(requests=None, arrivals=arrivals) if delay:
            sent = f"{figure(delay.requested_per_s, 4)} requests/s scheduled, {figure(delay.achieved_per_s, 4)} sent"
            return f"{in_words(arrivals)}: {sent}{late}"
    return f"{m.load.title}{late}"


def in_words(arrivals: str) -> str:
    """How requests come, with the usual name of gamma gaps: those of burstiness 1 are Poisson arrivals."""

    def named(found: re.Match[str]) -> str:
        usual = {"1": "Poisson arrivals", "inf": "arrivals with constant gaps"}
        return usual.get(found[0].split()[1], f"arrivals with gamma gaps, burstiness {found[0].split()[1]}")

    return re.sub(r"(?<![^ ])gamma [^ ,]+", named, arrivals)


def request_lines(m: Measurement) -> Iterator[str]:
    """The model and server of the requests, then their mean prompt and output tokens."""
    prompt, output = m.workload.mean_prompt_tokens, m.workload.mean_output_tokens
    yield f"{m.spec.model} at {m.spec.url or f'the {m.spec.interface} interface'}"
    source = "" if m.workload.spec.output_tokens else f": {m.workload.source}"
    yield f"{prompt:,.4g} prompt and {output:,.4g} output tokens requested in the mean{source}"


def told_of(m: Measurement) -> Iterator[str]:
    """Notes on the load's server: extra and refused fields, early ends, counting of tokens, prefix cache."""
    yield from (*further(m), *without(m))
    asked, came = m.workload.spec.output_tokens, finished_output_tokens(m.run)
    if early := sum(tokens < asked for tokens in came) if asked else 0:
        yield f"{early} of {len(came)} requests ended early, {fmean(came):,.4g} output tokens in the mean"
    rows, seen, stream = m.run.samples, cache_hit_share(m.run), m.run.stream
    several = [i for i, tokens in enumerate(rows.output_tokens) if rows.finished[i] and tokens > 1]
    at_once = sum(rows.first_token_s[i] == rows.last_token_s[i] for i in several)
    if 2 * at_once > len(several):  # as through a proxy that buffers
        yield f"{at_once} of {len(several)} answers came in one piece: TTFT is E2E there, and TPOT and ITL say nothing"
    yield from chunks(m)
    own = "unique prompts" if stream and stream.salt else "prompts as the seed or the file has them"
    if seen is None:
        yield f"{own}; the server does not report prefix-cache hits"
    else:
        yield f"{own}; prefix-cache hit rate {hundredths(seen.share)} % ({seen.told_by})"


def _head(m: Measurement) -> Iterator[str]:
    figures, seen, (opened, closed) = summary_of(m), latencies_of(m), m.run.window_s
    yield from request_lines(m)
    yield from told_of(m)
    yield _load(m)
    if held := held_back(m.run):
        yield (
            f"{held.requests:,} of them were held back; all waited for {figure(held.mean_s)} s in the mean, "
            f"{figure(held.p99_s)} s (p99), which is no part of their latencies"
        )
    prompts = figure(prompt_tokens_per_s(m.run), 4)
    tokens = f"{figure(figures.output_tokens_per_s, 4)} output and {prompts} prompt tokens/s"
    yield f"{figure(figures.requests_per_s, 4)} requests/s, {tokens} over {closed - opened:.1f} s"
    yield f"{figure(figures.batch, 4)} requests in flight in the mean, {most_in_flight(m.run)} at most"
    counted = f"{seen.requests} requests {m.load.judged_by} in the window"
    prompt, output = judged_tokens(m)
    tokens = f"{prompt:,} prompt and {output:,} output tokens"
    yield f"{counted}: {seen.unfinished} unfinished, {failed_text(m)}; {tokens}"


def load_texts(measurements: Sequence[Measurement], terms: ValidityCriteria) -> Iterator[str]:
    """Pages on endpoints' closed loops of so many requests, each by itself, for they are no points of a sweep; then on
    all open loops, one for each series."""
    yield from (load_text(m, terms) for m in measurements if is_counted_loop(m))
    yield from (rates_text(points, terms) for points in rate_series(measurements))


def is_counted_loop(m: Measurement) -> bool:
    """Check whether it is an endpoint's closed loop of so many requests."""
    counted = isinstance(m.load, ClosedLoop) and m.load.requests is not None
    return m.spec.interface == "endpoint" and m.alone and counted


def further(m: Measurement) -> Iterator[str]:
    """Fields of its requests that are not ours."""
    if m.spec.interface == "endpoint" and m.spec.extra:
        yield f"each request with {', '.join(f'{name}: {value}' for name, value in m.spec.extra)}"


def without(m: Measurement) -> Iterator[str]:
    """Request fields that the server refused."""
    if m.run.stream and m.run.stream.refused:
        yield f"requests without {', '.join(m.run.stream.refused)}, which this server refuses"


def chunks(m: Measurement) -> Iterator[str]:
    """The method of counting tokens, where a chunk is not one token by the server's own count."""
    stream = m.run.stream
    if stream is None or not any(m.run.samples.finished):
        return
    if (each := stream.tokens_per_chunk) is None:
        yield "the server does not say how many tokens it sent: each chunk counts as one"
    elif abs(each - 1) > CHUNK:
        yield f"{each:.2f} tokens came in a chunk, in the mean: ITL is between chunks"


def _table(found: dict[str, Percentiles]) -> str:
    def part(name: str) -> Column[tuple[str, Percentiles]]:
        return Column(name, lambda row: milliseconds(getattr(row[1], name)))

    names: Column[tuple[str, Percentiles]]
    names = Column("ms", lambda row: row[0].upper() if len(row[0]) < 5 else "E2E/token", "left")
    columns = [names, *map(part, ("mean", "p50", "p90", "p95", "p99"))]
    return table(list(found.items()), columns, always=len(columns))


LATENCIES = {"ttft": (4, 1), "tpot": (4, 2), "itl": (9, 7), "e2e": (4, 2)}  # ranks of the columns of p50 and p99
LEGEND = (
    "offered, due, sent, served: requests/s of the load, by its schedule in the window, really sent, and by the tokens "
    "that came. late: sent after it was due. tokens: of output. Latencies are of the requests sent in the window, ITL "
    "of all gaps between tokens in it."
)
LEGEND_OF_GOODPUT = (
    "good: of the requests sent in the window, those that finished within every bound. dropped: that failed, or did "
    "not end."
)


def rate_series(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """The open loops among these: a ramp by itself, the others with those that differ in their rate alone, by rate."""

    def alike(m: Measurement) -> str:
        assert isinstance(m.load, OpenLoop)
        asked = asdict(replace(m.workload.spec, requests=1))
        timing = (m.load.settle_s, m.load.window_s)
        return m.id if m.load.steps else short_hash([m.spec.key, asked, m.environment.key, _process(m), *timing])

    groups = grouped((m for m in measurements if is_windowed(m.load)), alike)
    return [sorted(group, key=_rate) for group in groups.values()]


def facts_of_load(measurement: Measurement, terms: ValidityCriteria) -> dict[str, Any]:
    """Facts of one load, of a ramp with the figures of its steps."""
    found, steps = single_load_facts(measurement, terms), steps_of(measurement)
    if not steps:
        return found
    each = [
        {"rate": _rate(m), "from_s": m.run.window_s[0], "until_s": m.run.window_s[1], **figures_of(m, terms)}
        for m in steps
    ]
    return {**found, "steps": each, **_over_all(steps, terms)}


def is_windowed(load: Load) -> TypeGuard[OpenLoop]:
    """Check whether a load is an open loop whose window is judged."""
    return isinstance(load, OpenLoop) and load.requests is None


def rows_of_load(measurement: Measurement, terms: ValidityCriteria) -> list[dict[str, Any]]:
    """Facts of one load for a table: one row, of a ramp one for each step, with what its steps share."""
    told = facts_of_load(measurement, terms)
    steps: list[dict[str, Any]] = told.pop("steps", [{}])
    for name in ("peak", "highest_load"):
        told.pop(name, None)
    return [{**told, **step} for step in steps]


def rates_text(points: Sequence[Measurement], terms: ValidityCriteria) -> str:
    """A page on loads that differ in their rate, or on one ramp."""
    first = points[0].load
    assert isinstance(first, OpenLoop)
    judged = f"each judged for {first.window_s:g} s after {first.settle_s:g} s"
    timing = f"{in_words(_process(points[0]))}: one load after the other, {judged}"
    steps = steps_of(points[0])
    if steps:
        timing = f"{in_words(first.arrivals)}; the first {first.settle_s:g} s of a step are not judged"
    return "\n".join([*request_lines(points[0]), *_told(points), timing, "", *_body(steps or points, terms)])


def rates_facts(points: Sequence[Measurement], terms: ValidityCriteria) -> dict[str, Any]:
    """A point for each rate, and what is found over all of them: null without an SLO."""
    each = [{"rate": _rate(m), **single_load_facts(m, terms)} for m in points]
    return {"points": each, **_over_all(points, terms)}


def _told(points: Sequence[Measurement]) -> Iterator[str]:
    """Notes that hold at all rates, then notes on single rates."""
    each = [list(told_of(m)) for m in points]
    common = [text for text in each[0] if all(text in told for told in each)]
    yield from common
    for m, told in zip(points, each, strict=True):
        yield from (f"{_rate(m):g} requests/s: {text}" for text in told if text not in common)


def _body(points: Sequence[Measurement], terms: ValidityCriteria) -> Iterator[str]:
    """The tables, how to read them, what was found, and what is wrong."""
    yield from (_rates_table(points, terms), "", hanging(LEGEND, 0))
    if terms.slo:
        yield ""
        yield from _goodput(points, terms, terms.slo)
    lines = [f"failed: {_rate(m):g} requests/s: {failed_text(m)}" for m in points if m.run.failures]
    for m in points:
        lines += lines_of(check(m, failed_share=terms.failed_share), f"{_rate(m):g} requests/s: ")
    yield from ("", *(hanging(line, 2) for line in lines)) if lines else ()


def _rates_table(points: Sequence[Measurement], terms: ValidityCriteria) -> str:
    def latency(name: str, part: str, rank: int) -> Column[Measurement]:
        return Column(
            f"{name.upper()} ms\n{part}", lambda m: milliseconds(getattr(latency_facts(m)[name], part)), rank=rank
        )

    columns: list[Column[Measurement]] = [
        Column("offered\n/s", lambda m: f"{_rate(m):g}"),
        Column("due\n/s", lambda m: figure(delay.requested_per_s if (delay := delay_of(m.run)) else None, 4), rank=8),
        Column("sent\n/s", lambda m: figure(delay.achieved_per_s if (delay := delay_of(m.run)) else None, 4), rank=6),
        Column("served\n/s", lambda m: figure(summarize(m).requests_per_s, 4)),
        Column("late ms\np99", lambda m: milliseconds(delay.p99_s if (delay := delay_of(m.run)) else None), rank=5),
        Column("tokens\n/s", lambda m: figure(summarize(m).output_tokens_per_s, 4), rank=3),
    ]
    for name, (p50, p99) in LATENCIES.items():
        columns += [latency(name, "p50", p50), latency(name, "p99", p99)]
    columns.append(Column("\nvalid", lambda m: word_for(check(m, failed_share=terms.failed_share)), "left"))
    return table(points, columns, always=len(columns))


def _goodput(points: Sequence[Measurement], terms: ValidityCriteria, slo: Slo) -> Iterator[str]:
    rows = [Served(_rate(m), found, found.dropped) for m in points if (found := good(m, slo))]
    columns = goodput_columns("offered\n/s", slo, 4)
    yield f"good: {slo}"
    yield table(rows, columns, always=len(columns))
    best, highest = _found_in(points, terms)
    yield from (hanging(each.why, 2) for each in (best, highest) if each)
    if best is None:
        yield "no rate has a valid measurement: nothing can be said of where goodput peaks"
    yield hanging(LEGEND_OF_GOODPUT, 0)


def _found_in(points: Sequence[Measurement], terms: ValidityCriteria) -> tuple[Peak | None, HighestLoad | None]:
    """The peak of goodput and the highest rate at which enough requests are good, by the valid points."""
    served = ((m, None if problems(m, terms.failed_share) else good(m, terms.slo)) for m in points)
    return goodput_found([Served(_rate(m), each, m.run.failures) for m, each in served], terms.attainment, RATE)


def _over_all(points: Sequence[Measurement], terms: ValidityCriteria) -> Mapping[str, Any]:
    best, highest = _found_in(points, terms) if terms.slo else (None, None)
    return {
        "peak": best and {**facts(best), **facts(best, "bracketed", "why")},
        "highest_load": highest and {**facts(highest), "why": highest.why},
    }


def _process(m: Measurement) -> str:
    """The arrival process that loads of different rates have in common: "gamma 1"."""
    assert isinstance(m.load, OpenLoop)
    return m.load.arrivals.partition(",")[0]


def _rate(m: Measurement) -> float:
    """The requested rate of the load; the schedule's own rate is random."""
    assert isinstance(m.load, OpenLoop)
    return m.load.rate
