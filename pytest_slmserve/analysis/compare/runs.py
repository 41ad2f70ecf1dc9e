"""Two runs side by side: each metric of each case that both have, with its ratio, interval and verdict.

A verdict is never bolder than the gate. The unit of repetition is the launch, and the gate decides from four pairs of
launches on, made in turns on one host. So a difference is called better or worse only where both sides were measured on
one host without a boot between, and

- each side has four launches: then they are the repeats, or
- a sensor told how long the device waited for its host, which bounds how far launches differ in throughput and in mean
  E2E and TPOT (`stored.baseline.unseen`): then the interval of the repeats is widened by that.

How far launches differ in TTFT, in percentiles or in energy is bounded by nothing: in the archives of
benchmarks/baselines two launches on one host were up to 1.7 times apart in mean TTFT, and two hosts 2.7 times.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import fmean

from pytest_slmserve.analysis.compare.baseline import (
    ComparedCase,
    ComparedPair,
    Served,
    cells,
    compared_pair,
    idle_share_of,
    listed_cases,
    requested_engine,
    served,
    subjects,
    widened,
)
from pytest_slmserve.analysis.compare.comparability import MACHINE_FACTS, warnings
from pytest_slmserve.analysis.gate.decision import MARGIN
from pytest_slmserve.analysis.gate.diagnosis import Difference, fact_differences
from pytest_slmserve.analysis.stats.estimates import FIRST_LOOKS, Interval, ends, factor, grouped
from pytest_slmserve.analysis.stats.noise import Differences, Repeat
from pytest_slmserve.schema.environment import release
from pytest_slmserve.schema.loads import ClosedLoop, is_steady
from pytest_slmserve.schema.records import Measurement, hosts_of

LAUNCHES = FIRST_LOOKS[0]  # of each side, as the gate wants pairs
HOSTS = "other host or boot: hosts of one kind differ; the gate decides, which measures both sides in turns on one host"
ONE_REPEAT = "one repeat on each side: the noise is not known"
FEW_LAUNCHES = f"fewer than {LAUNCHES} launches on a side, and nothing else tells how far launches differ in this"
NOISE = "the noise is wider than the margin"


class Judgement(enum.Enum):
    """What became of a metric. SAME: within the margin for certain. NO_WORSE: the same or better. INCONCLUSIVE: it may
    be worse by more than the margin, or better, and nobody knows."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    NO_WORSE = "no worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """name: of the field. bounded: is it known how far launches and hosts differ in it, where a sensor told of
    waiting?"""

    name: str
    higher_is_better: bool = False
    bounded: bool = False


METRICS = (
    ComparedMetric("output_tokens_per_s", higher_is_better=True, bounded=True),
    ComparedMetric("requests_per_s", higher_is_better=True, bounded=True),
    ComparedMetric("ttft_s"),
    ComparedMetric("ttft_p99_s"),
    ComparedMetric("tpot_s", bounded=True),
    ComparedMetric("tpot_p99_s"),
    ComparedMetric("itl_s"),
    ComparedMetric("itl_p99_s"),
    ComparedMetric("e2e_s", bounded=True),
    ComparedMetric("e2e_p99_s"),
    ComparedMetric("energy_per_token_j"),
)


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric of one case. subject: the engines; load: theirs. ratio: candidate over baseline, with its 95 %
    interval where that is known. launches: of each side. why: the reason of an inconclusive one, else ""."""

    subject: str
    load: str
    metric: str
    baseline: float
    candidate: float
    ratio: Interval
    verdict: Judgement
    why: str
    launches: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """differences: of environments, and of engines in the cases of both. baseline_only, candidate_only: cases of one
    side. notes: a sentence each."""

    margin: float
    changes: tuple[MetricChange, ...]
    differences: tuple[Difference, ...]
    baseline_only: tuple[str, ...]
    candidate_only: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[Judgement, int]:
        """How many metrics became what."""
        seen = Counter(each.verdict for each in self.changes)
        return {verdict: seen[verdict] for verdict in Judgement}


def compare_runs(
    baseline: Sequence[Measurement], candidate: Sequence[Measurement], margin: float, metrics: Sequence[str] = ()
) -> RunComparison:
    """Both sides, case by case. margin: smallest change that matters, as a share; of a rate the inverse. metrics: names
    of those to compare, all by default. Launches of gates are left out: a gate holds both of its sides."""
    there, here = (cells((m for m in side if m.paired is None), lambda load: True) for side in (baseline, candidate))
    common = sorted(
        (case for case in here if case in there), key=lambda case: (case.engines, not case.steady, case.concurrency)
    )
    wanted = [metric for metric in METRICS if not metrics or metric.name in metrics]
    changes, both = list[MetricChange](), list[tuple[list[Measurement], list[Measurement]]]()
    only: tuple[list[str], list[str]] = ([], [])
    for subject, case in zip(subjects(common), common, strict=True):
        for one, other in same_engines(there[case], here[case]):
            if one and other:
                pair = compared_pair(subject, case, one, other, candidate_is="the candidate", facts=MACHINE_FACTS)
                load = subject.removeprefix(f"{case.engines} at ")
                changes += [made for metric in wanted if (made := metric_change(pair, case, load, metric, margin))]
                both.append((one, other))
            else:
                only[0 if one else 1].append(f"{subject}, with another engine")
    only[0].extend(listed_cases(case for case in there if case not in here))
    only[1].extend(listed_cases(case for case in here if case not in there))
    gated = sum(m.paired is not None for m in (*baseline, *candidate))
    notes = [text for one, other in both for text in warnings(one[0], other[0])]
    notes += [f"launches of gates are left out ({gated} measurements): `report` judges them"] if gated else []
    sides: list[Sequence[Measurement]] = [list(chain(*side)) for side in zip(*both)]
    differ = fact_differences(*(sides or (baseline, candidate)))
    return RunComparison(margin, tuple(changes), differ, tuple(only[0]), tuple(only[1]), tuple(dict.fromkeys(notes)))


def same_engines(
    there: Sequence[Measurement], here: Sequence[Measurement]
) -> Iterator[tuple[list[Measurement], list[Measurement]]]:
    """Measurements of one case whose engines are held against each other: those that were requested alike; where one
    engine remains on each side, these two; a remaining one alone has nothing on the other side."""
    first, second = grouped(there, requested_engine), grouped(here, requested_engine)
    for engine in [engine for engine in first if engine in second]:
        yield first.pop(engine), second.pop(engine)
    if len(first) == len(second) == 1:
        yield *first.values(), *second.values()  # type: ignore[misc]
        return
    yield from ((group, []) for group in first.values())
    yield from (([], group) for group in second.values())


def metric_change(
    pair: ComparedPair, case: ComparedCase, load: str, metric: ComparedMetric, margin: float
) -> MetricChange | None:
    """Change of one metric; None where a side has not measured it."""
    sides = [by_launch(side, metric.name) for side in (pair.baseline, pair.candidate)]
    if not all(map(has_repeats, sides)):
        return None
    enough = min(map(len, sides)) >= LAUNCHES
    seen = factor(repeated(sides).between(0, 1))
    by = _unseen(pair, case, metric, enough)
    verdict, why = Judgement.INCONCLUSIVE, pair.obstacle
    if by is not None and not why:
        seen = widened(seen, by)
        verdict = _judged(seen, metric, margin)
        known = pair.same_boot or verdict in (Judgement.SAME, Judgement.NO_WORSE)
        verdict = verdict if known else Judgement.INCONCLUSIVE
    if verdict is Judgement.INCONCLUSIVE and not why:
        why = _reason(pair, by, seen)
    ratio = seen if by is not None and not pair.obstacle else Interval(seen.value)
    (one, other), launches = map(mean_of_launches, sides), (len(sides[0]), len(sides[1]))
    return MetricChange(case.engines, load, metric.name, one, other, ratio, verdict, why, launches)


def by_launch(side: Served, name: str) -> list[list[Repeat]]:
    """The repeats used, those of one launch together."""
    repeats = (
        Repeat(value, group[0].measured_at, group[0].launch)
        for group, figures in zip(side.used, side.each, strict=True)
        if (value := getattr(figures, name, None)) is not None
    )
    return list(grouped(repeats, lambda repeat: repeat.launch).values())


def has_repeats(side: Sequence[Sequence[Repeat]]) -> bool:
    """Are there repeats, each a positive number?"""
    return bool(side) and all(0 < repeat.value < math.inf for repeat in chain(*side))


def mean_of_launches(side: Sequence[Sequence[Repeat]]) -> float:
    """Mean of all repeats."""
    return fmean(repeat.value for repeat in chain(*side))


def repeated(sides: Sequence[Sequence[Sequence[Repeat]]]) -> Differences:
    """Sides with what tells their noise: their launches where each has enough of them, else their repeats."""
    enough = min(map(len, sides), default=0) >= LAUNCHES
    return Differences(tuple(tuple(map(_mean_of, side) if enough else chain(*side)) for side in sides))


def _mean_of(launch: Sequence[Repeat]) -> Repeat:
    """The launch as one repeat."""
    return launch[0]._replace(value=fmean(repeat.value for repeat in launch))


def _unseen(pair: ComparedPair, case: ComparedCase, metric: ComparedMetric, enough: bool) -> float | None:
    """By how much more both sides may differ than their repeats tell, as a difference of logarithms; None: unknown."""
    if enough and pair.same_boot:
        return 0.0
    known = metric.bounded and case.steady and idle_share_of(pair.baseline, pair.candidate) is not None
    return pair.unseen if known else None


def _reason(pair: ComparedPair, unseen: float | None, seen: Interval) -> str:
    """Why nothing is known of a metric."""
    if not pair.same_boot:
        return HOSTS
    if unseen is None:
        return FEW_LAUNCHES
    return NOISE if seen.low is not None else ONE_REPEAT


def _judged(ratio: Interval, metric: ComparedMetric, margin: float) -> Judgement:
    """What became of a metric, by the whole interval."""
    (low, high), bound = ends(ratio), 1 + margin
    if high < 1 / bound or low > bound:
        return Judgement.BETTER if (low > bound) is metric.higher_is_better else Judgement.WORSE
    not_less, not_more = low > 1 / bound, high < bound
    if not_less and not_more:
        return Judgement.SAME
    return Judgement.NO_WORSE if (not_less if metric.higher_is_better else not_more) else Judgement.INCONCLUSIVE


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
    known = [(each, side) for each in of.releases if has_repeats(side := by_launch(each.figures, metric.name))]
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
