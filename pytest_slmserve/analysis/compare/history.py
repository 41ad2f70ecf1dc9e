"""History over releases of vLLM: each release of one case beside the one before, by the rules of `compare`.

A history is of one model, workload and engine on one kind of device. Its load is the largest that most of the releases
were measured under. Where a release was measured on several hosts, its values are those of the host that most releases
share: only on one host, without a boot between, is a release called better or worse (`compare.runs`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from pytest_slmserve.analysis.claims.lookup import release
from pytest_slmserve.analysis.compare.runs import (
    METRICS,
    ComparedMetric,
    MetricChange,
    by_launch,
    is_measured,
    mean_of_launches,
    metric_change,
    repeated,
    same_engines,
)
from pytest_slmserve.analysis.gate.decision import MARGIN
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.stats.estimates import Interval, factor
from pytest_slmserve.analysis.stored.baseline import (
    ComparedCase,
    Served,
    cells,
    compared_pair,
    requested_engine,
    served,
    subjects,
)
from pytest_slmserve.analysis.stored.comparability import MACHINE_FACTS
from pytest_slmserve.schema.loads import ClosedLoop, is_steady
from pytest_slmserve.schema.records import Measurement, hosts_of

FOLLOWED = tuple(metric for metric in METRICS if metric.name in ("output_tokens_per_s", "tpot_s"))
STAGES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}  # of a release, before and after it (PEP 440)


@dataclass(frozen=True, slots=True)
class ReleaseMean:
    """One release. mean: of its repeats, with its 95 % interval by the noise of the repeats, or of the launches where
    each release has four. step: what became of the metric since the release before; None of the first."""

    release: str
    mean: Interval
    launches: int
    step: MetricChange | None


@dataclass(frozen=True, slots=True)
class ReleaseHistory:
    """One metric of one case over releases, the oldest first. metric: name of the field."""

    subject: str
    device: str
    metric: str
    margin: float
    releases: tuple[ReleaseMean, ...]


@dataclass(frozen=True, slots=True)
class MeasuredRelease:
    """Measurements of one release that a history is made of, and their figures."""

    measurements: list[Measurement]
    figures: Served


@dataclass(frozen=True, slots=True)
class HistoryCase:
    """The case that a history is of, and its releases, the oldest first."""

    case: ComparedCase
    releases: list[MeasuredRelease]

    @property
    def first(self) -> Measurement:
        return self.releases[0].measurements[0]


def release_histories(measurements: Sequence[Measurement]) -> list[ReleaseHistory]:
    """A history of each followed metric of each case of which several releases were measured. Engines alone on their
    device under a steady load; launches of gates are left out, as by `compare`."""
    usable = [
        m for m in measurements if m.alone and m.paired is None and is_steady(m.load) and m.environment.vllm is not None
    ]
    lines = [line for alike in grouped(usable, _family).values() for line in _of_engines(alike)]
    found = [case for line in lines if len(line) > 1 and (case := _at_largest_load(line))]
    histories = [
        _history(each, subject, metric)
        for each, subject in zip(found, _subjects(found), strict=True)
        for metric in FOLLOWED
    ]
    return [each for each in histories if len(each.releases) > 1]


def release_order(version: str) -> tuple[object, ...]:
    """Sort key of a version: "0.9.0" before "0.10.0rc1.dev3", "0.10.0rc1", "0.10.0" and "0.10.0.post1"."""
    stages = re.findall(r"(dev|a|b|rc|post)(\d*)", version.partition("+")[0])
    return release(version), (*((STAGES[stage], int(number or 0)) for stage, number in stages), (0, 0)), version


def _family(m: Measurement) -> Hashable:
    """What all releases of a history have in common, whatever the concurrency."""
    load = replace(m.load, concurrency=1) if isinstance(m.load, ClosedLoop) else m.load
    return m.environment.platform, m.environment.title, m.spec.interface, m.spec.model, m.workload.hash, load


def _of_engines(alike: Sequence[Measurement]) -> list[list[list[Measurement]]]:
    """Measurements by release, for each engine: as `compare` holds engines against each other."""
    lines: list[list[list[Measurement]]] = []
    by_release = grouped(alike, lambda m: m.environment.vllm or "")
    for version in sorted(by_release, key=release_order):
        last = {requested_engine(line[-1][0]): line for line in lines}
        for before, here in same_engines(list(chain(*(line[-1] for line in lines))), by_release[version]):
            if before and here:
                last[requested_engine(before[0])].append(here)
            elif here:
                lines.append([here])
    return lines


def _at_largest_load(line: Sequence[Sequence[Measurement]]) -> HistoryCase | None:
    """The history under the load that most releases have, the largest of several; None where no two have one."""
    hosts = Counter(host for measured in line for host in hosts_of(measured))
    by_case = list(map(cells, line))
    found = [HistoryCase(case, list(_releases(by_case, case, hosts))) for case in dict.fromkeys(chain(*by_case))]
    several = [each for each in found if len(each.releases) > 1]
    return max(several, key=lambda each: (len(each.releases), each.case.concurrency), default=None)


def _releases(
    by_case: Sequence[Mapping[ComparedCase, Sequence[Measurement]]], case: ComparedCase, hosts: Counter[str | None]
) -> Iterator[MeasuredRelease]:
    """Releases that have a valid point of the case. by_case: of each release. hosts: number of releases measured on
    each."""
    for measured in by_case:
        by_host = grouped(measured.get(case, ()), lambda m: m.environment.host)
        if by_host:
            there = max(by_host.values(), key=lambda group: (hosts[group[0].environment.host], len(group)))
            if (figures := served(case, there)).valid:
                yield MeasuredRelease(there, figures)


def _subjects(found: Sequence[HistoryCase]) -> list[str]:
    """The name of each, with its interface and engine where another on its kind of device has the same."""
    by_device = grouped(range(len(found)), lambda i: found[i].first.environment.title)
    names = {
        i: name for group in by_device.values() for i, name in zip(group, subjects([found[i].case for i in group]))
    }
    seen = Counter((each.first.environment.title, names[i]) for i, each in enumerate(found))
    return [
        names[i]
        if seen[each.first.environment.title, names[i]] == 1
        else f"{names[i]}, {each.first.spec.interface} interface, engine {requested_engine(each.first)[:6]}"
        for i, each in enumerate(found)
    ]


def _history(of: HistoryCase, subject: str, metric: ComparedMetric) -> ReleaseHistory:
    """The history of one metric, of the releases that measured it."""
    known = [(each, side) for each in of.releases if is_measured(side := by_launch(each.figures, metric.name))]
    noise = repeated([side for _, side in known])
    steps: list[MetricChange | None] = [None]
    for (one, _), (other, _) in pairwise(known):
        sides = (one.measurements, other.measurements)
        pair = compared_pair(subject, of.case, *sides, candidate_is="the release", facts=MACHINE_FACTS)
        steps.append(metric_change(pair, of.case, of.case.load, metric, MARGIN))
    means = []
    for i, ((each, side), step) in enumerate(zip(known, steps)):
        seen = replace(factor(noise.mean(i)), value=mean_of_launches(side))
        means.append(ReleaseMean(each.measurements[0].environment.vllm or "", seen, len(side), step))
    return ReleaseHistory(subject, of.first.environment.title, metric.name, MARGIN, tuple(means))
