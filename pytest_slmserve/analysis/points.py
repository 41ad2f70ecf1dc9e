"""A point of a sweep: one concurrency, the mean of its valid repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from pytest_slmserve.analysis.stats import mean_of_known
from pytest_slmserve.analysis.summary import Summary, summarize
from pytest_slmserve.analysis.validity import problems
from pytest_slmserve.records import Measurement
from pytest_slmserve.spec import ClosedLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Summary):
    """The figures are means over the valid repeats (of percentiles too), None where no repeat is valid.

    repeats, e2e_repeats: output tokens/s and mean E2E of each valid measurement, in the order measured; records are
    their ids. batch_repeats likewise. problems: what was wrong with the measurements that are left out.
    """

    concurrency: int
    repeats: tuple[float, ...] = ()
    e2e_repeats: tuple[float, ...] = ()
    batch_repeats: tuple[float, ...] = ()
    records: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """May a claim rest on it? One valid repeat is enough; rates and latencies must be positive numbers."""
        numbers = (*self.repeats, *self.e2e_repeats)
        return 0 < len(self.repeats) == len(self.e2e_repeats) and all(0 < v < float("inf") for v in numbers)


def concurrency_of(measurement: Measurement) -> int | None:
    """The knob of a sweep, None for a load that has no steady window (a burst, a fixed number of requests)."""
    load = measurement.load
    return load.concurrency if isinstance(load, ClosedLoop) and load.requests is None else None


def points_of(measurements: Iterable[Measurement]) -> tuple[Point, ...]:
    """One point per concurrency, ascending, whatever the order of the measurements. Other loads are left out."""
    rows = sorted(
        ((c, m.measured_at, m.launch, m) for m in measurements if (c := concurrency_of(m)) is not None),
        key=lambda row: row[:3],
    )
    return tuple(_point(c, [row[3] for row in group]) for c, group in groupby(rows, key=lambda row: row[0]))


def _point(concurrency: int, measurements: Sequence[Measurement]) -> Point:
    judged = [(m, problems(m)) for m in measurements]
    valid = [m for m, wrong in judged if not wrong]
    summaries = [summarize(m) for m in valid]
    figures = {f.name: mean_of_known(getattr(s, f.name) for s in summaries) for f in fields(Summary)}
    return Point(
        concurrency=concurrency,
        repeats=tuple(s.output_tokens_per_s for s in summaries if s.output_tokens_per_s is not None),
        e2e_repeats=tuple(s.e2e_s for s in summaries if s.e2e_s is not None),
        batch_repeats=tuple(s.batch for s in summaries if s.batch is not None),
        records=tuple(m.id for m in valid),
        problems=tuple(dict.fromkeys(text for _, wrong in judged for text in wrong)),
        **figures,
    )
