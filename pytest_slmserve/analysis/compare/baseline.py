"""Is an engine slower than a stored baseline? The cheaper mode: only one side is measured, and it sees less.

Compared are the repeats of both sides under each load that both have. Repeats show the noise within a launch; what
they cannot show, that launches and hosts differ, widens every interval by what was seen of it.

Where kernels run all of the time, launches on one host are within 0.2 % of each other, and hosts within 4 %: so it was
seen with OPT-125M, 1.3B and 2.7B on H200 hosts (the archives in benchmarks/baselines). The rest of the time is the
host's, and may be any: the faster side waits for less, but no host makes the kernels themselves faster. So where the
slower waited for a share w of its time, another host may have up to 1/(1 - w) times its rate; farthest apart were
OPT-125M at 512 with w = 0.63, by a factor of 2.05 of 2.69. Two launches on one host were never farther apart than the
root of that, beyond the noise of their repeats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from pytest_slmserve.analysis.compare.comparability import FACTS, Fact, one_boot, sharing_of, why_not
from pytest_slmserve.analysis.points import (
    Figure,
    JobPoint,
    Point,
    ReplicaPoint,
    all_groups,
    e2e_s,
    engines,
    job_point,
    output_rate,
    point_of,
    ratio,
    replica_groups,
    shared_point,
)
from pytest_slmserve.analysis.stats.estimates import Interval, grouped, percent
from pytest_slmserve.analysis.verdict import Verdict, above, below
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import Load, is_job, is_steady
from pytest_slmserve.schema.records import Measurement

LAUNCH, LAUNCH_OF_WAITING = 0.002, 0.5
HOST, HOST_OF_WAITING = 0.04, 1.0  # share of the logarithm: 0.5 is the root
LEAST_BUSY = 0.001  # of a GPU that a sensor saw idle throughout nothing is known
COMMON, THROUGHPUT, LATENCY = "baseline-in-common", "throughput-not-below-baseline", "latency-not-above-baseline"
NO_SENSOR = "another host or boot, and no sensor told how long the device waited for its host"
WARNING = (
    "a stored baseline was measured at another time: drift of the machine, noise between hosts and launches, and the "
    "order of measuring cannot be told from a change of the software. What matters is decided by measuring both sides "
    "in turns: --slm-gate"
)

Served = Point | JobPoint | ReplicaPoint


@dataclass(frozen=True, slots=True)
class ComparedCase:
    """The measured case, whatever engine served it. models, workloads, loads: of each engine, where several shared the
    device; sharing: how they did, "alone" where there was but one."""

    models: tuple[str, ...]
    workloads: tuple[str, ...]
    loads: tuple[Load, ...]
    sharing: str

    @property
    def steady(self) -> bool:
        """Were all loads closed loops with a window?"""
        return all(map(is_steady, self.loads))

    @property
    def engines(self) -> str:
        """ "opt-1.3b", or "2 x opt-1.3b by mps" """
        return self.models[0] if len(self.models) == 1 else f"{engines(self.models)} {self._how}"

    @property
    def _how(self) -> str:
        return self.sharing.partition(" engines ")[2]

    @property
    def concurrency(self) -> int:
        return sum(load.max_concurrency or 0 for load in self.loads)

    @property
    def load(self) -> str:
        """ "64 in flight", in all; or the job, or the rate"""
        return f"{self.concurrency} in flight" if self.steady else self.loads[0].title

    @property
    def name(self) -> str:
        return f"{self.engines} at {self.load}"

    @property
    def details(self) -> str:
        """Load and workload of the case in words, to distinguish two cases of one name."""
        load, workloads = self.loads[0], f"workload {' and '.join(w[:6] for w in dict.fromkeys(self.workloads))}"
        if not is_steady(load):
            return workloads
        return f"ramp-up {load.ramp_up}, window {load.window_s:g} s, warm-up {load.settle_lifetimes:g}, {workloads}"


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Both sides of one cell. obstacle: why nothing can be said of it, or ""."""

    subject: str
    baseline: Served
    candidate: Served
    obstacle: str
    same_boot: bool

    @property
    def unseen(self) -> float | None:
        return unseen(self.baseline, self.candidate, self.same_boot)


@dataclass(frozen=True, slots=True)
class Metric:
    claim: str
    words: str
    repeats: Figure
    higher_is_better: bool


METRICS = (
    Metric(THROUGHPUT, "output tokens/s", output_rate, higher_is_better=True),
    Metric(LATENCY, "mean E2E", e2e_s, higher_is_better=False),
)


def against_stored(baseline: Sequence[Measurement], candidate: Sequence[Measurement], margin: float) -> list[Verdict]:
    """Verdicts on whether the candidate is worse than the baseline by more than `margin`, for each model and load of
    both.

    Holds if the whole interval of the ratio lies within the margin, or on its better side; fails if the whole lies
    beyond. Inconclusive otherwise, where the two cannot be compared (`comparability.why_not`), and where they have
    nothing in common. value, low, high: candidate over baseline. bound: the ratio at the margin, which for a rate is
    1/(1 + margin): what takes 3 % longer has 1/1.03 of the rate.
    """
    pairs = _pairs(baseline, candidate)
    if not pairs:
        there, here = (", ".join(listed_cases(cells(side))) or "none" for side in (baseline, candidate))
        why = "no model was measured under one load with one workload on both sides: the baseline has"
        return [Verdict.inconclusive(COMMON, "baseline", f"{why} {there}; this run {here}")]
    return [_verdict(pair, metric, margin) for pair in pairs for metric in METRICS]


def on_one_side(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[str, ...]:
    """Notes on measurements whose case the other side has not measured, one sentence per side."""
    there, here = cells(baseline), cells(candidate)
    sides = (("the baseline", [c for c in there if c not in here]), ("this run", [c for c in here if c not in there]))
    return tuple(f"measured by {side} alone: {', '.join(listed_cases(only))}" for side, only in sides if only)


def cells(
    measurements: Iterable[Measurement], wanted: Callable[[Load], bool] = is_steady
) -> dict[ComparedCase, list[Measurement]]:
    """Measurements under the wanted loads, by what was measured: of engines alone, in the order first met, then of
    several that shared a device, where all of them are there."""
    found: dict[ComparedCase, list[Measurement]] = {}
    for members in all_groups(list(measurements)):
        if all(wanted(m.load) for m in members):
            models, loads = tuple(short_name(m.spec.model) for m in members), tuple(m.load for m in members)
            cell = ComparedCase(models, tuple(m.workload.hash for m in members), loads, sharing_of(members[0]))
            found.setdefault(cell, []).extend(members)
    return found


def of_model(measurements: Iterable[Measurement], model: str) -> list[Measurement]:
    """Measurements of one model under a steady load; of several models on a device, those whose first it is."""
    return [m for cell, found in cells(measurements).items() if cell.models[0] == model for m in found]


def served(cell: ComparedCase, measurements: Sequence[Measurement]) -> Served:
    """The figures of one cell, wherever it was measured."""
    if len(cell.models) == 1:
        return (job_point if is_job(cell.loads[0]) else partial(point_of, cell.concurrency))(measurements)
    return shared_point(replica_groups(measurements))


def unseen(baseline: Served, candidate: Served, same_boot: bool) -> float | None:
    """Largest difference to expect between two launches, whatever serves, as a difference of logarithms; None where
    unknown.

    Where no sensor measured the waiting, as on a CPU, launches are taken to differ as hosts do, and hosts by anything.
    """
    waits = idle_share_of(baseline, candidate)
    if waits is None:
        return math.log1p(HOST) if same_boot else None
    least, share = (LAUNCH, LAUNCH_OF_WAITING) if same_boot else (HOST, HOST_OF_WAITING)
    return max(math.log1p(least), share * -math.log(max(1 - waits, LEAST_BUSY)))


def idle_share_of(*points: Served) -> float | None:
    """Share of the time in which no kernel ran, the largest of those known: the device waited for its host."""
    ran = [p.gpu_util if p.engine_active is None else p.engine_active for p in points]
    return max((max(0.0, 1 - share) for share in ran if share is not None), default=None)


def _pairs(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> list[ComparedPair]:
    there, here = cells(baseline), cells(candidate)
    common = [cell for cell in here if cell in there]
    return [
        compared_pair(subject, cell, _of_same_engine(there[cell], here[cell]), here[cell])
        for subject, cell in zip(subjects(common), common, strict=True)
    ]


def subjects(cases: Sequence[ComparedCase]) -> list[str]:
    """The name of each, with its details where another has the same name."""
    names = Counter(case.name for case in cases)
    return [case.name if names[case.name] == 1 else f"{case.name} ({case.details})" for case in cases]


def compared_pair(
    subject: str,
    case: ComparedCase,
    there: Sequence[Measurement],
    here: Sequence[Measurement],
    *,
    candidate_is: str = "this run",
    facts: Sequence[Fact] = FACTS,
) -> ComparedPair:
    """Both sides of one case. facts: those that have to match."""
    baseline, candidate = served(case, there), served(case, here)
    used = [[m for group in side.used for m in group] for side in (baseline, candidate)]
    reasons = [*_against("the baseline", baseline, there), *_against(candidate_is, candidate, here)]
    if not reasons:
        alike = [(one, other) for one, other in product(*used) if _index(one) == _index(other)]
        reasons = list(dict.fromkeys(clause for one, other in alike for clause in why_not(one, other, facts)))
    return ComparedPair(subject, baseline, candidate, "; ".join(reasons), one_boot(*used[0], *used[1]))


def _of_same_engine(there: Sequence[Measurement], here: Sequence[Measurement]) -> list[Measurement]:
    """Measurements of the baseline whose requested engine is one of the candidate's; all of them where none is."""
    asked = set(map(requested_engine, here))
    return [m for m in there if requested_engine(m) in asked] or list(there)


def requested_engine(m: Measurement) -> str:
    """Key of the requested engine; of engines that shared a device, one key for all of them."""
    return m.spec.key if m.alone or m.replica is None else m.replica.set


def _index(m: Measurement) -> int:
    return m.replica.index if m.replica else 0


def _against(side: str, point: Served, measurements: Sequence[Measurement]) -> Iterator[str]:
    """Reasons why no verdict may rest on this side: several engines or releases, an invalid or a degraded point."""
    known = {(requested_engine(m), m.environment.vllm, m.environment.torch) for m in measurements}
    if len(known) > 1:
        yield f"{side} has {len(known)} different engines or releases under this load"
    elif not point.valid:
        yield f"{side} is invalid: {'; '.join(point.problems) or 'it has no valid repeat'}"
    elif point.degraded:
        yield f"{side} is degraded: {'; '.join(point.degraded)}"


def _verdict(pair: ComparedPair, metric: Metric, margin: float) -> Verdict:
    """Verdict on one metric of a pair. The noise is that of the repeats of both sides under this load. Where the GPU
    waits for its host it is many times what it is elsewhere."""
    bound = 1 / (1 + margin) if metric.higher_is_better else 1 + margin
    if pair.obstacle or pair.unseen is None:
        why = f"cannot be compared: {pair.obstacle or NO_SENSOR}"
        return Verdict.inconclusive(metric.claim, pair.subject, why, bound, pair.baseline, pair.candidate)
    seen = widened(ratio(pair.candidate, pair.baseline, what=metric.repeats), pair.unseen)
    state = (above if metric.higher_is_better else below)(seen, bound)
    ends = "" if seen.low is None or seen.high is None else f" (95 %: {_signed(seen.low)} to {_signed(seen.high)})"
    told = f"{_signed(seen.value)}{ends} against the baseline, bound {_signed(bound)}"
    why = f"{metric.words} {told}{_remark(pair, seen, pair.unseen)}"
    known = Verdict.from_interval(metric.claim, pair.subject, state, why, seen, bound, pair.baseline, pair.candidate)
    return replace(known, why=why)  # the interval knows of launches


def widened(ratio: Interval, by: float) -> Interval:
    """The interval of a ratio, each end farther by so much as a difference of logarithms."""
    if ratio.low is None or ratio.high is None:
        return ratio
    return Interval(ratio.value, ratio.low / math.exp(by), ratio.high * math.exp(by))


def _signed(ratio: float) -> str:
    """1.03 as "+3 %" """
    text = percent(ratio - 1)
    return f"+{text}" if ratio > 1 and text != percent(0) else text


def _remark(pair: ComparedPair, seen: Interval, by: float) -> str:
    if seen.low is None:
        return "; noise unknown: one repeat on each side; --slm-repeats 2"
    where, waits = "launch" if pair.same_boot else "host or boot", idle_share_of(pair.baseline, pair.candidate)
    told = "" if waits is None else f", and a GPU that waits for its host for {percent(waits)} of the time"
    return f"; widened by a factor of {math.exp(by):.4g} each way for another {where}{told}"


def listed_cases(some: Iterable[ComparedCase]) -> list[str]:
    """ "opt-1.3b at 1, 2 in flight (ramp-up staggered, ...)" for each set of engines, and each other load by itself"""
    cells = list(some)
    steady = grouped((cell for cell in cells if cell.steady), lambda cell: (cell.engines, cell.details))
    loads = {key: ", ".join(map(str, sorted(cell.concurrency for cell in each))) for key, each in steady.items()}
    return [
        *(f"{model} at {at} in flight ({details})" for (model, details), at in loads.items()),
        *(f"{cell.name} ({cell.details})" for cell in cells if not cell.steady),
    ]
