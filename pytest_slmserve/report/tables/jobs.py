"""Results of jobs: a row for each number of requests that arrived at a rate and were served to the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.metrics.latency import Goodput, Slo
from pytest_slmserve.analysis.points import CONTINUOUS, JobPoint, Point, concurrency_of
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT, IN_FLIGHT, HighestLoad, Peak, highest_load, peak
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.tables.findings import reasons, served_on, valid_cell
from pytest_slmserve.report.text_table import Column, figure, hanging, hundredths, milliseconds, table, whole
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import OpenLoop

LEGEND = (
    "Jobs: throughput is over the whole of one, to its last answer. offered, arrived: requests/s, as specified and as "
    "they came. batch: sequences that a step held; at a rate, admitted requests. holds: full-length requests that fit "
    "at once. preempted: in the mean of the repeats, sent back to be computed again. waste: share of a batch's work "
    "that is padding, or for sequences that have ended."
)
COLUMNS: tuple[Column[JobPoint], ...] = (
    Column("\nmodel", lambda p: p.model, "left"),
    Column("\ninterface", lambda p: "server" if p.spec.interface == "server" else "", "left"),
    Column("\nbatching", lambda p: "" if p.batching == CONTINUOUS else p.batching, "left"),
    Column("prompt/\noutput", lambda p: f"{p.workload.mean_prompt_tokens:.0f}/{p.output_tokens:.0f}"),
    Column("\nrequests", lambda p: f"{p.requests:,}"),
    Column("offered\n/s", lambda p: "at once" if p.load.at_once else f"{p.load.rate:g}"),
    Column("arrived\n/s", lambda p: figure(p.rate), rank=6),
    Column("burst-\niness", lambda p: _burstiness(p.load), rank=3),
    Column(
        "most in\nflight", lambda p: "" if p.load.max_concurrency is None else whole(p.load.max_concurrency), rank=3
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


def job_report(jobs: Sequence[JobPoint]) -> Iterator[str]:
    """A table for each kind of host, and how to read it; nothing where there was no job."""

    def place(p: JobPoint) -> tuple[str, str, float, float, int]:  # rates from all requests at once down
        return p.model, p.batching, p.output_tokens, -p.load.rate, p.kv_blocks or 0

    for points in grouped(jobs, lambda p: p.environment.key).values():
        named = ((p, f"{p.model}, {p.output_tokens:.0f} output tokens") for p in points)
        remarks = (text for p, name in named for text in reasons(p, name))
        rows = table(sorted(points, key=place), COLUMNS)
        yield "\n".join([jobs_title(points[0].environment), "", rows, *remarks])
    if jobs:
        yield hanging(LEGEND, 0)


def jobs_title(where: Environment) -> str:
    simulated = ": SIMULATED, NOT MEASURED" if where.platform == "simulated" else ""
    return f"Jobs on {served_on(where)}{simulated}"


def _burstiness(load: OpenLoop) -> str:
    if load.burstiness == math.inf:
        return "constant"
    return "" if load.burstiness == 1 else f"{load.burstiness:g}"


GOODPUT_LEGEND = (
    "good: of the requests that ended in the window, those that finished within every bound; of all repeats together. "
    "dropped: that failed, in all repeats."
)


@dataclass(frozen=True, slots=True)
class Served:
    """Row: requests under one load. goodput: None without a valid measurement. dropped: requests that failed."""

    load: float
    goodput: Goodput | None
    dropped: int


def slo_report(curve: Curve, slo: Slo) -> str:
    """A row per point, and where goodput peaks; nothing where nothing was measured."""
    if not curve.points:
        return ""
    rows = [job_goodput(curve, point, slo) for point in curve.points]
    columns = goodput_columns("in\nflight", slo, 3)
    columns.insert(1, Column("\nrequests", lambda s: whole(s.goodput.requests if s.goodput else None), rank=1))
    shown = table(rows, columns, always=len(columns))
    best, highest = goodput_found(rows)
    return "\n".join(
        [f"good: {slo}", shown, *(hanging(e.why, 2) for e in (best, highest) if e), hanging(GOODPUT_LEGEND, 0)]
    )


def highest_good_load(curve: Curve, slo: Slo) -> HighestLoad | None:
    """The highest load of a sweep at which enough requests are good; None where nothing valid was measured."""
    return goodput_found([job_goodput(curve, point, slo) for point in curve.points])[1]


def goodput_columns(load: str, slo: Slo, digits: int) -> list[Column[Served]]:
    """Columns of goodput under the heading of its load. digits: of the goodput."""

    def within(name: str) -> Callable[[Served], str]:
        return lambda s: hundredths(dict(s.goodput.by_slo)[name] if s.goodput else None)

    return [
        Column(load, lambda s: f"{s.load:g}"),
        Column("goodput\n/s", lambda s: figure(s.goodput.per_s if s.goodput else None, digits)),
        Column("good\n%", lambda s: hundredths(s.goodput.attainment if s.goodput else None)),
        *(Column(f"{name}\n%", within(name)) for name in slo.bounds),
        Column("\ndropped", lambda s: str(s.dropped)),
    ]


def job_goodput(curve: Curve, point: Point, slo: Slo) -> Served:
    """Goodput of the repeats that count. Dropped are those of all repeats: failures are no secret."""
    dropped = sum(m.run.failures for m in curve.measurements if concurrency_of(m) == point.concurrency)
    return Served(point.concurrency, point.goodput(slo), dropped)


def goodput_found(
    rows: Sequence[Served], attainment: float = ATTAINMENT, unit: str = IN_FLIGHT
) -> tuple[Peak | None, HighestLoad | None]:
    """The peak of goodput, and the highest load at which enough requests are good. attainment: the share of them that
    suffices. unit: of the loads."""
    known = [(s.load, s.goodput) for s in rows if s.goodput]
    invalid = [s.load for s in rows if s.goodput is None]
    attained = [(load, each.attainment) for load, each in known if each.attainment is not None]
    best = peak([(load, each.per_s) for load, each in known], invalid, unit)
    return best, highest_load(attained, attainment, invalid, unit)
