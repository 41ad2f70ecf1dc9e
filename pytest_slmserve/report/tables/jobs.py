"""What jobs found: a row for each, of so many requests that arrived at a rate and were served to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pytest_slmserve.analysis.points.job_points import CONTINUOUS, JobPoint, grouped
from pytest_slmserve.report.numbers import ABSENT, figure, hundredths, milliseconds
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.tables.valid_column import valid_cell
from pytest_slmserve.report.text_table import grid_of_known, hanging
from pytest_slmserve.schema.loads import Job

LEGEND = (
    "Jobs: throughput is over the whole of one, to its last answer. came: requests/s as they arrived. "
    "batch: sequences that a step held; at a rate, admitted requests. holds: full-length requests that fit at once. "
    "preempted: in the mean of the repeats, sent back to be computed again. waste: share of a batch's work that is "
    "padding, or for sequences that have ended."
)
Column = tuple[str, Callable[[JobPoint], str]]
# What tells jobs apart; those columns are left out in which all are alike and nothing was chosen.
NAMES: tuple[Column, ...] = (
    ("\nmodel", lambda p: p.model),
    ("\nbatching", lambda p: "" if p.batching == CONTINUOUS else p.batching),
    ("prompt/\noutput", lambda p: f"{p.workload.mean_prompt_tokens:.0f}/{p.output_tokens:.0f}"),
    ("\nrequests", lambda p: f"{p.load.requests:,}"),
    ("asked\n/s", lambda p: "at once" if p.load.rate is None else f"{p.load.rate:g}"),
    ("came\n/s", lambda p: figure(p.rate)),
    ("burst-\niness", lambda p: _burstiness(p.load)),
    ("most in\nflight", lambda p: "" if p.load.max_concurrency is None else f"{p.load.max_concurrency:,}"),
    ("KV\nblocks", lambda p: ABSENT if p.kv_blocks is None else f"{p.kv_blocks:,}"),
    ("\nholds", lambda p: ABSENT if p.capacity is None else f"{p.capacity:,}"),
)
FIGURES: tuple[Column, ...] = (
    ("requests\n/s", lambda p: figure(p.requests_per_s, 4)),
    ("tokens\n/s", lambda p: figure(p.output_tokens_per_s, 4)),
    ("\nbatch", lambda p: figure(p.batch)),
    ("E2E s\nmean", lambda p: figure(p.e2e_s)),
    ("\np99", lambda p: figure(p.e2e_p99_s)),
    ("ms/\ntoken", lambda p: milliseconds(p.normalized_latency_s)),
    ("TTFT\nms", lambda p: milliseconds(p.ttft_s)),
    ("pre-\nempted", lambda p: ABSENT if p.preemptions is None else figure(p.preemptions)),
    ("waste\n%", lambda p: hundredths(p.waste)),
    ("\nvalid", valid_cell),
)
WORDS = {"\nmodel", "\nbatching", "\nvalid"}


def job_report(jobs: Sequence[JobPoint]) -> Iterator[str]:
    """A table for each kind of host, and how to read it; nothing where there was no job."""
    for points in grouped(jobs, lambda p: p.environment.key):
        where = points[0].environment
        simulated = ": SIMULATED, NOT MEASURED" if where.backend == "fake" else ""
        yield "\n".join([f"Jobs on {served_on(where)}{simulated}", "", _table(points), *_remarks(points)])
    if jobs:
        yield hanging(LEGEND, 0)


def _table(points: Sequence[JobPoint]) -> str:
    ordered = sorted(points, key=_place)
    rows = [[text(p) for _, text in (*NAMES, *FIGURES)] for p in ordered]
    columns = [name for name, _ in (*NAMES, *FIGURES)]
    return grid_of_known(rows, columns, ["left" if name in WORDS else "right" for name in columns])


def _burstiness(load: Job) -> str:
    if load.burstiness is None:
        return "constant"
    return "" if load.burstiness == 1 else f"{load.burstiness:g}"


def _place(point: JobPoint) -> tuple[str, str, float, float, int]:
    """Those that belong together stand together; rates from all at once down."""
    rate = point.load.rate
    return point.model, point.batching, point.output_tokens, -1e9 if rate is None else -rate, point.kv_blocks or 0


def _remarks(points: Sequence[JobPoint]) -> Iterator[str]:
    for p in points:
        if p.left_out or not p.valid:
            kind = "left out" if p.valid else "INVALID"
            yield hanging(f"{kind}: {p.model}, {p.output_tokens:.0f} output tokens: {'; '.join(p.problems)}", 2)
