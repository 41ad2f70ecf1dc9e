"""Results of one load on one server, as a page of text or as facts for JSON: for `measure`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.metrics.goodput import Goodput, Slo, goodput_of
from pytest_slmserve.analysis.metrics.latency import Percentiles, judged_tokens, latencies_of
from pytest_slmserve.analysis.metrics.schedule_delay import delay_of, held_back
from pytest_slmserve.analysis.metrics.summary import finished_output_tokens
from pytest_slmserve.analysis.metrics.validity import FAILED_SHARE, cache_hit_share, check
from pytest_slmserve.analysis.metrics.window import most_in_flight, prompt_tokens_per_s
from pytest_slmserve.analysis.points.job_points import summary_of
from pytest_slmserve.analysis.sweep.peak_goodput import ATTAINMENT
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.numbers import figure, hundredths, milliseconds
from pytest_slmserve.report.point_facts import case_facts, goodput_facts
from pytest_slmserve.report.tables.valid_column import lines_of
from pytest_slmserve.report.text_table import Column, table
from pytest_slmserve.schema.loads import ClosedLoop, OpenLoop
from pytest_slmserve.schema.records import Measurement


@dataclass(frozen=True, slots=True)
class ValidityCriteria:
    """Criteria for judging loads. slo: None means no goodput. attainment: the share of good requests that suffices.
    failed_share: share of requests that may fail without making a measurement invalid."""

    slo: Slo | None = None
    attainment: float = ATTAINMENT
    failed_share: float = FAILED_SHARE


CHUNK = 0.05  # tokens: a busy server now and then sends two at once, and an end of text may have no chunk
STRICT = ValidityCriteria()


def latencies(measurement: Measurement) -> dict[str, Percentiles]:
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


def single_load_facts(measurement: Measurement, terms: ValidityCriteria = STRICT) -> dict[str, Any]:
    """The server, the load and the measured figures, as facts for JSON."""
    return {
        "id": measurement.id,
        **case_facts(measurement.spec, measurement.load, measurement.workload, measurement.environment),
        "extra_body": {name: json.loads(value) for name, value in measurement.spec.extra},
        **figures_of(measurement, terms),
        **facts(measurement.run.stream, "tokens_per_chunk", "cpu_s", "salt", "without"),
    }


def figures_of(measurement: Measurement, terms: ValidityCriteria = STRICT) -> dict[str, Any]:
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


def as_text(measurement: Measurement, terms: ValidityCriteria = STRICT) -> str:
    """A head, a table of latencies where there are any, what was good, and what is wrong."""
    told = [_served(served)] if (served := good(measurement, terms.slo)) else []
    found = latencies(measurement)
    rows = ["", _table(found)] if any(each.known for each in found.values()) else []
    return "\n".join([*_head(measurement), *rows, *told, *_doubts(measurement, terms)])


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


def _held_back(m: Measurement) -> Iterator[str]:
    """Line on requests that the client held back, and the wait of all in seconds; nothing without such a limit."""
    if held := held_back(m.run):
        yield (
            f"{held.requests:,} of them were held back; all waited for {figure(held.mean_s)} s in the mean, "
            f"{figure(held.p99_s)} s (p99), which is no part of their latencies"
        )


def request_lines(m: Measurement) -> Iterator[str]:
    """The model and server of the requests, then their mean prompt and output tokens."""
    prompt, output = m.workload.mean_prompt_tokens, m.workload.mean_output_tokens
    yield f"{m.spec.model} at {m.spec.url or f'the {m.spec.interface} interface'}"
    source = "" if m.workload.spec.output_tokens else f": {m.workload.source}"
    yield f"{prompt:,.4g} prompt and {output:,.4g} output tokens requested in the mean{source}"


def told_of(m: Measurement) -> Iterator[str]:
    """Notes on the load's server: extra and refused fields, early ends, counting of tokens, prefix cache."""
    for say in (further, without, _ended_early, _in_one_piece, chunks, _cached):
        yield from say(m)


def _head(m: Measurement) -> Iterator[str]:
    figures, seen, (opened, closed) = summary_of(m), latencies_of(m), m.run.window_s
    yield from request_lines(m)
    yield from told_of(m)
    yield _load(m)
    yield from _held_back(m)
    prompts = figure(prompt_tokens_per_s(m.run), 4)
    tokens = f"{figure(figures.output_tokens_per_s, 4)} output and {prompts} prompt tokens/s"
    yield f"{figure(figures.requests_per_s, 4)} requests/s, {tokens} over {closed - opened:.1f} s"
    yield f"{figure(figures.batch, 4)} requests in flight in the mean, {most_in_flight(m.run)} at most"
    counted = f"{seen.requests} requests {m.load.judged_by} in the window"
    prompt, output = judged_tokens(m)
    tokens = f"{prompt:,} prompt and {output:,} output tokens"
    yield f"{counted}: {seen.unfinished} unfinished, {failed_text(m)}; {tokens}"


def counted_loop_texts(measurements: Sequence[Measurement], terms: ValidityCriteria = STRICT) -> Iterator[str]:
    """Pages on endpoints' closed loops of so many requests: each by itself, for they are no points of a sweep."""
    return (as_text(m, terms) for m in measurements if is_counted_loop(m))


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
    if m.run.stream and m.run.stream.without:
        yield f"requests without {', '.join(m.run.stream.without)}, which this server refuses"


def chunks(m: Measurement) -> Iterator[str]:
    """The method of counting tokens, where a chunk is not one token by the server's own count."""
    stream = m.run.stream
    if stream is None or not any(m.run.samples.finished):
        return
    if (each := stream.tokens_per_chunk) is None:
        yield "the server does not say how many tokens it sent: each chunk counts as one"
    elif abs(each - 1) > CHUNK:
        yield f"{each:.2f} tokens came in a chunk, in the mean: ITL is between chunks"


def _in_one_piece(m: Measurement) -> Iterator[str]:
    """Number of answers that came all at once, as through a proxy that buffers; nothing where few did."""
    rows = m.run.samples
    several = [i for i, tokens in enumerate(rows.output_tokens) if rows.finished[i] and tokens > 1]
    at_once = sum(rows.first_token_s[i] == rows.last_token_s[i] for i in several)
    if 2 * at_once > len(several):
        yield f"{at_once} of {len(several)} answers came in one piece: TTFT is E2E there, and TPOT and ITL say nothing"


def _cached(m: Measurement) -> Iterator[str]:
    """The origin of the prompts, and the share of tokens from a prefix cache as far as known."""
    seen, stream = cache_hit_share(m.run), m.run.stream
    own = "unique prompts" if stream and stream.salt else "prompts as the seed or the file has them"
    if seen is None:
        yield f"{own}; the server does not report prefix-cache hits"
    else:
        yield f"{own}; prefix-cache hit rate {hundredths(seen.share)} % ({seen.told_by})"


def _ended_early(m: Measurement) -> Iterator[str]:
    """Number of requests of a known length that returned fewer tokens than requested; nothing where none did."""
    asked, came = m.workload.spec.output_tokens, finished_output_tokens(m.run)
    early = sum(tokens < asked for tokens in came) if asked else 0
    if early:
        yield f"{early} of {len(came)} requests ended early, {fmean(came):,.4g} output tokens in the mean"


def _table(found: dict[str, Percentiles]) -> str:
    def part(name: str) -> Column[tuple[str, Percentiles]]:
        return Column(name, lambda row: milliseconds(getattr(row[1], name)))

    names: Column[tuple[str, Percentiles]]
    names = Column("ms", lambda row: row[0].upper() if len(row[0]) < 5 else "E2E/token", "left")
    columns = [names, *map(part, ("mean", "p50", "p90", "p95", "p99"))]
    return table(list(found.items()), columns, always=len(columns))


def _served(found: Goodput) -> str:
    each = ", ".join(f"{name} {hundredths(share)} %" for name, share in found.by_slo)
    share = f"{hundredths(found.attainment)} % of {found.requests} requests are good ({each})"
    return f"\ngoodput {figure(found.per_s, 4)} requests/s within {found.slo}: {share}, {found.dropped} dropped"


def _doubts(m: Measurement, terms: ValidityCriteria) -> list[str]:
    lines = lines_of(check(m, failed_share=terms.failed_share))
    return ["", *lines] if lines else []
