"""The history of a metric over releases of vLLM: each release compared with the one before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from pytest_slmserve.analysis.compare import changes
from pytest_slmserve.analysis.compare.changes import ComparedCase, Judgement, MetricChange, requested_engine
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.stats.estimates import Interval, factor, grouped
from pytest_slmserve.schema.environment import release
from pytest_slmserve.schema.loads import ClosedLoop, is_steady
from pytest_slmserve.schema.records import Measurement, hosts_of

FOLLOWED = ("output_tokens_per_s", "tpot_s")
NO_DIFFERENCE, NOT_COMPARABLE = "no difference shown", "not comparable"
WORDS = {Judgement.BETTER: "improved", Judgement.WORSE: "regressed"}  # other decided verdicts by `compare`'s own words
STAGES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}  # of a release, before and after it (PEP 440)


@dataclass(frozen=True, slots=True)
class ReleaseMean:
    """One release. mean: of its repeats, with its 95 % interval by the noise of the repeats, or of the launches if each
    release has four. step: what became of the metric since the release before; None of the first."""

    release: str
    mean: Interval
    launches: int
    step: MetricChange | None

    @property
    def step_words(self) -> str:
        """What became of the metric since the release before, in words; empty of the first release."""
        if self.step is None:
            return ""
        if self.step.verdict is Judgement.INCONCLUSIVE:
            return (
                NO_DIFFERENCE
                if self.step.why in (changes.NOISE, changes.ONE_REPEAT, changes.FEW_LAUNCHES)
                else NOT_COMPARABLE
            )
        return WORDS.get(self.step.verdict) or str(self.step.verdict.value)


@dataclass(frozen=True, slots=True)
class ReleaseHistory:
    """One metric of one case over releases, the oldest first. metric: name of the field."""

    subject: str
    device: str
    metric: str
    tolerance: float
    releases: tuple[ReleaseMean, ...]


# A case of one engine, and the measurements and point of each release that has it, the oldest first.
HistoryCase = tuple[ComparedCase, list[tuple[list[Measurement], Point]]]


def release_histories(measurements: Sequence[Measurement]) -> list[ReleaseHistory]:
    """Return a history of each followed metric of each case of which several releases were measured: of single engines
    under a steady load. Launches of gates are left out, as by `compare`."""

    def family(m: Measurement) -> Hashable:
        """What all releases of a history have in common, whatever the concurrency."""
        load = replace(m.load, concurrency=1) if isinstance(m.load, ClosedLoop) else m.load
        return m.environment.platform, m.environment.title, m.spec.interface, m.spec.model, m.workload.hash, load

    usable = [m for m in measurements if m.alone and m.paired is None and is_steady(m.load) and m.environment.vllm]
    lines = [line for alike in grouped(usable, family).values() for line in lines_of_engines(alike)]
    found = [each for line in lines if (each := at_largest_load(line))]
    histories = []
    for alike in grouped(found, lambda each: each[1][0][0][0].environment.title).values():
        loads = changes.load_names([case for case, _ in alike])
        names = [f"{case.engines} at {load}" for (case, _), load in zip(alike, loads)]
        for each, name in zip(alike, names):
            first = each[1][0][0][0]
            more = f", {first.spec.interface} interface, engine {requested_engine(first)[:6]}"
            subject = name + (more if names.count(name) > 1 else "")
            histories += [release_history(each, subject, metric) for metric in FOLLOWED]
    return [each for each in histories if len(each.releases) > 1]


def release_order(version: str) -> tuple[object, ...]:
    """Return the sort key of a version: "0.9.0" before "0.10.0rc1.dev3", "0.10.0rc1", "0.10.0" and "0.10.0.post1"."""
    stages = re.findall(r"(dev|a|b|rc|post)(\d*)", version.partition("+")[0])
    return release(version), (*((STAGES[stage], int(number or 0)) for stage, number in stages), (0, 0)), version


def lines_of_engines(alike: Sequence[Measurement]) -> list[list[list[Measurement]]]:
    """Return the measurements of each release, for each engine. Engines of two releases are the same as in
    `compare`."""
    lines: list[list[list[Measurement]]] = []
    by_release = grouped(alike, lambda m: m.environment.vllm or "")
    for version in sorted(by_release, key=release_order):
        last = {requested_engine(line[-1][0]): line for line in lines}
        for before, here in changes.same_engines(list(chain(*(line[-1] for line in lines))), by_release[version]):
            if before and here:
                last[requested_engine(before[0])].append(here)
            elif here:
                lines.append([here])
    return lines


def at_largest_load(line: Sequence[Sequence[Measurement]]) -> HistoryCase | None:
    """Return the case under the load that most releases have a valid point of, the largest of several; None if no two
    have one. Of a release that several hosts measured, the host counts that most releases were measured on."""
    hosts = Counter(host for measured in line for host in hosts_of(measured))
    by_case = [changes.compared_cases(measured, steady=True) for measured in line]
    found = []
    for case in dict.fromkeys(chain(*by_case)):
        releases = []
        for measured in by_case:
            by_host = grouped(measured.get(case, ()), lambda m: m.environment.host)
            if by_host:
                there = max(by_host.values(), key=lambda group: (hosts[group[0].environment.host], len(group)))
                if (point := changes.served(case, there)).valid:
                    releases.append((there, point))
        if len(releases) > 1:
            found.append((case, releases))
    return max(found, key=lambda each: (len(each[1]), each[0].concurrency), default=None)


def release_history(of: HistoryCase, subject: str, metric: str) -> ReleaseHistory:
    """Return the history of one metric, of the releases that measured it."""
    case, releases = of
    known = [(each, side) for each, point in releases if (side := changes.repeats_by_launch(point, metric))]
    noise = changes.repeat_noise([side for _, side in known])
    steps: list[MetricChange | None] = [None]
    for (one, _), (other, _) in pairwise(known):
        pair = changes.compared_pair(case, case.load, one, other)
        steps.append(changes.change_of(pair, changes.METRICS[metric], changes.TOLERANCE))
    means = []
    for i, ((each, side), step) in enumerate(zip(known, steps)):
        mean = replace(factor(noise.mean(i)), value=changes.mean_of_repeats(side))
        means.append(ReleaseMean(each[0].environment.vllm or "", mean, len(side), step))
    return ReleaseHistory(subject, releases[0][0][0].environment.title, metric, changes.TOLERANCE, tuple(means))
