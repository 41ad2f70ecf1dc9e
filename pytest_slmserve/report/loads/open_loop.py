"""Results of a server at several request rates, each measured by itself or as a step of a ramp: for `measure`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeGuard

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.metrics.goodput import Slo
from pytest_slmserve.analysis.metrics.schedule_delay import delay_of
from pytest_slmserve.analysis.metrics.summary import summarize
from pytest_slmserve.analysis.metrics.validity import check, problems
from pytest_slmserve.analysis.metrics.window import steps_of
from pytest_slmserve.analysis.sweep.peak_goodput import RATE, HighestLoad, Peak
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.loads.single_load import (
    STRICT,
    ValidityCriteria,
    failed_text,
    figures_of,
    good,
    in_words,
    latencies,
    request_lines,
    single_load_facts,
    told_of,
)
from pytest_slmserve.report.numbers import figure, milliseconds
from pytest_slmserve.report.tables.goodput import Served, found_in, goodput_columns
from pytest_slmserve.report.tables.valid_column import lines_of, word_for
from pytest_slmserve.report.text_table import Column, hanging, table
from pytest_slmserve.schema.loads import Load, OpenLoop
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import short_hash

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


def open_loop_texts(measurements: Sequence[Measurement], terms: ValidityCriteria = STRICT) -> Iterator[str]:
    """Pages on all open loops among these, one for each series."""
    for points in rate_series(measurements):
        yield (ramp_text(points[0], terms) if steps_of(points[0]) else rates_text(points, terms))


def rate_series(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """The open loops among these: a ramp by itself, the others with those that differ in their rate alone, by rate."""

    def alike(m: Measurement) -> str:
        assert isinstance(m.load, OpenLoop)
        asked = asdict(replace(m.workload.spec, requests=1))
        timing = (m.load.settle_s, m.load.window_s)
        return m.id if m.load.steps else short_hash([m.spec.key, asked, m.environment.key, _process(m), *timing])

    groups = grouped((m for m in measurements if is_windowed(m.load)), alike)
    return [sorted(group, key=_rate) for group in groups.values()]


def facts_of_load(measurement: Measurement, terms: ValidityCriteria = STRICT) -> dict[str, Any]:
    """Facts of one load, of a ramp with its steps."""
    return (ramp_facts if steps_of(measurement) else single_load_facts)(measurement, terms)


def is_windowed(load: Load) -> TypeGuard[OpenLoop]:
    """Check whether a load is an open loop whose window is judged."""
    return isinstance(load, OpenLoop) and load.requests is None


def rows_of_load(measurement: Measurement, terms: ValidityCriteria = STRICT) -> list[dict[str, Any]]:
    """Facts of one load for a table: one row, of a ramp one for each step, with what its steps share."""
    told = facts_of_load(measurement, terms)
    steps: list[dict[str, Any]] = told.pop("steps", [{}])
    for name in ("peak", "highest_load"):
        told.pop(name, None)
    return [{**told, **step} for step in steps]


def rates_text(points: Sequence[Measurement], terms: ValidityCriteria) -> str:
    """A page on loads that differ in their rate."""
    first = points[0].load
    assert isinstance(first, OpenLoop)
    judged = f"each judged for {first.window_s:g} s after {first.settle_s:g} s"
    timing = f"{in_words(_process(points[0]))}: one load after the other, {judged}"
    return "\n".join([*request_lines(points[0]), *_told(points), timing, "", *_body(points, terms)])


def rates_facts(points: Sequence[Measurement], terms: ValidityCriteria) -> dict[str, Any]:
    """A point for each rate, and what is found over all of them: null without an SLO."""
    each = [{"rate": _rate(m), **single_load_facts(m, terms)} for m in points]
    return {"points": each, **_over_all(points, terms)}


def ramp_text(measurement: Measurement, terms: ValidityCriteria) -> str:
    """A page on one ramp."""
    load = measurement.load
    assert isinstance(load, OpenLoop)
    timing = f"{in_words(load.arrivals)}; the first {load.settle_s:g} s of a step are not judged"
    return "\n".join(
        [*request_lines(measurement), *told_of(measurement), timing, "", *_body(steps_of(measurement), terms)]
    )


def ramp_facts(measurement: Measurement, terms: ValidityCriteria) -> dict[str, Any]:
    """The whole ramp, and the figures of its steps."""
    steps = steps_of(measurement)
    each = [
        {"rate": _rate(m), "from_s": m.run.window_s[0], "until_s": m.run.window_s[1], **figures_of(m, terms)}
        for m in steps
    ]
    return {**single_load_facts(measurement, terms), "steps": each, **_over_all(steps, terms)}


def _told(points: Sequence[Measurement]) -> Iterator[str]:
    """Notes that hold at all rates, then notes on single rates."""
    each = [list(told_of(m)) for m in points]
    common = [text for text in each[0] if all(text in told for told in each)]
    yield from common
    for m, told in zip(points, each, strict=True):
        yield from (f"{_rate(m):g} requests/s: {text}" for text in told if text not in common)


def _body(points: Sequence[Measurement], terms: ValidityCriteria) -> Iterator[str]:
    """The tables, how to read them, what was found, and what is wrong."""
    yield _table(points, terms)
    yield ""
    yield hanging(LEGEND, 0)
    if terms.slo:
        yield ""
        yield from _goodput(points, terms, terms.slo)
    yield from _doubts(points, terms)


def _table(points: Sequence[Measurement], terms: ValidityCriteria) -> str:
    def latency(name: str, part: str, rank: int) -> Column[Measurement]:
        return Column(
            f"{name.upper()} ms\n{part}", lambda m: milliseconds(getattr(latencies(m)[name], part)), rank=rank
        )

    def valid(m: Measurement) -> str:
        return word_for(check(m, failed_share=terms.failed_share))

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
    columns.append(Column("\nvalid", valid, "left"))
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
    return found_in([Served(_rate(m), each, m.run.failures) for m, each in served], terms.attainment, RATE)


def _over_all(points: Sequence[Measurement], terms: ValidityCriteria) -> Mapping[str, Any]:
    best, highest = _found_in(points, terms) if terms.slo else (None, None)
    return {
        "peak": best and {**facts(best), **facts(best, "bracketed", "why")},
        "highest_load": highest and {**facts(highest), "why": highest.why},
    }


def _doubts(points: Sequence[Measurement], terms: ValidityCriteria) -> list[str]:
    lines = [f"failed: {_rate(m):g} requests/s: {failed_text(m)}" for m in points if m.run.failures]
    for m in points:
        lines += lines_of(check(m, failed_share=terms.failed_share), f"{_rate(m):g} requests/s: ")
    return ["", *(hanging(line, 2) for line in lines)] if lines else []


def _process(m: Measurement) -> str:
    """The arrival process that loads of different rates have in common: "gamma 1"."""
    assert isinstance(m.load, OpenLoop)
    return m.load.arrivals.partition(",")[0]


def _rate(m: Measurement) -> float:
    """The requested rate of the load; the schedule's own rate is random."""
    assert isinstance(m.load, OpenLoop)
    return m.load.rate
