"""Results of jobs: a row for each number of requests that arrived at a rate and were served to the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.points.job_points import CONTINUOUS, JobPoint
from pytest_slmserve.report.numbers import figure, hundredths, milliseconds, whole
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.tables.valid_column import reasons, valid_cell
from pytest_slmserve.report.text_table import Column, hanging, table
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
