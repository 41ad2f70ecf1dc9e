"""Compare two sets of measurements, or a series of releases, metric by metric.

If each side has four launches, as in a gate, the launches are the repeats. With fewer launches, or with several boots,
the interval is widened by the largest observed differences in throughput, mean E2E and mean TPOT:

- While kernels run, launches on one host differ by at most 0.2%, and hosts by at most 4% (OPT-125M, 1.3B and 2.7B on
  H200 hosts, results files in benchmarks/baselines).
- For the rest of the time, the GPU waits for the host. If the slower side waited for a share w of its time, another
  host may be up to 1/(1 - w) times as fast. The largest observed factor was 2.05 of a possible 2.69 (OPT-125M at
  concurrency 512, w = 0.63). Launches on one host differed by at most the square root of the possible factor, beyond
  the noise of their repeats.

Differences in TTFT, percentiles and energy have no known bound: mean TTFT differed by a factor of up to 1.7 between
launches on one host, and of 2.7 between hosts.

The machine and the requests must match, and against a stored baseline also the engine's limits. vLLM with its torch,
CUDA and attention backend, and further engine arguments, may differ.
"""

import enum
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, product
from operator import attrgetter
from statistics import fmean, variance
from typing import Any

from pytest_slmserve.analysis.compare.steps import LevelStep, level_steps
from pytest_slmserve.analysis.estimates import (
    FIRST_LOOKS,
    NORMAL,
    TAIL,
    Differences,
    Interval,
    Repeat,
    factor,
    grouped,
    percent,
    t_above,
)
from pytest_slmserve.analysis.gate.diagnosis import Difference, fact_differences
from pytest_slmserve.analysis.metrics.gpu_figures import device_figures, watched
from pytest_slmserve.analysis.points import Point, all_groups, busy_repeat, engines, point_of
from pytest_slmserve.analysis.sweep.plateau import clocks_apart
from pytest_slmserve.analysis.verdict import State, Verdict, all_of
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement, hosts_of, moment, release
from pytest_slmserve.schema.sensors import MEMORY_CLOCK, SM_CLOCK
from pytest_slmserve.schema.specs import ClosedLoop, Load, is_steady

APART = 0.01  # tolerance of clocks, whose SM steps of 15 MHz are below 1%, and of KV blocks, which fill free memory
POWER_HELD = 0.01  # share of a window; above it, the power limit decides the SM clock, and no setting does
FAR_DAYS = 1.0
EFFECT = object()  # replaces a value that the load decided, which need not match because it is not a setting


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that must match on both sides.

    Attributes:
        of: returns the value, or None if it is unknown.
        apart: largest relative difference of numbers that match.
        optional: whether both sides may leave it unknown.
        of_gpu: whether it must be known only if a side ran on a GPU.
    """

    words: str
    of: Callable[[Measurement], Any]
    shown: Callable[[Any], str] = str
    apart: float = 0.0
    optional: bool = False
    of_gpu: bool = False


def why_not(baseline: Measurement, candidate: Measurement, facts: Sequence[Fact] | None = None) -> tuple[str, ...]:
    """Return the reasons why two measurements of one case cannot be compared, such as "driver 570.1 there, 580.2 here".

    "There" is the baseline, "here" the candidate. A fact that only one side knows is a mismatch.
    """
    on_gpu = "cuda" in (baseline.environment.platform, candidate.environment.platform)
    clauses = []
    for fact in facts or FACTS:
        there, here = sides = fact.of(baseline), fact.of(candidate)
        if sides == (None, None):
            if not (fact.optional or (fact.of_gpu and not on_gpu)):
                clauses.append(f"{fact.words} known on neither side")
        elif None not in sides and EFFECT in sides:
            continue
        elif None in sides or not (math.isclose(*sides, rel_tol=fact.apart) if fact.apart else there == here):
            unknown = {None: "not known", EFFECT: "as the power limit allows"}
            shown = [unknown.get(side) or fact.shown(side) for side in sides]
            clauses.append(f"{fact.words} {shown[0]} there, {shown[1]} here")
    return tuple(clauses)


def warnings(baseline: Measurement, candidate: Measurement) -> tuple[str, ...]:
    """Return warnings about two comparable measurements: different hosts, days in between, or unknown facts."""
    there, here = baseline.environment, candidate.environment
    found = []
    if not (there.host and here.host):
        found.append("it is not known whether the baseline is of this host: hosts of one kind differ")
    elif not one_boot(baseline, candidate):
        found.append("the baseline is of another host, or from before a boot: hosts of one kind differ")
    found += why_not(baseline, candidate, [OPERATING_SYSTEM])
    try:
        days = (moment(candidate.measured_at) - moment(baseline.measured_at)).total_seconds() / 86_400
    except ValueError:
        found.append("it is not known how much time lies between the two")
    else:
        if abs(days) >= FAR_DAYS:
            order = "older" if days > 0 else "younger"
            found.append(f"the baseline is {abs(days):.0f} day{'' if abs(days) < 1.5 else 's'} {order}")
    on_gpu = "cuda" in (there.platform, here.platform)
    for fact in FACTS:
        if fact.optional and (on_gpu or not fact.of_gpu) and fact.of(baseline) is None is fact.of(candidate):
            found.append(f"the {fact.words} is known on neither side")
    return tuple(found)


def one_boot(*measurements: Measurement) -> bool:
    """Return whether all measurements were made on one known host without a reboot in between."""
    hosts = hosts_of(measurements)
    return len(hosts) == 1 and None not in hosts


def _clock_mhz(measurement: Measurement, number: int) -> Any:
    watch, capped = watched(measurement.run), device_figures(measurement.run).power_capped
    largest = max(watch.values(number), default=None) if watch else None
    # Under the power limit, the load decides the SM clock.
    if largest is not None and number == SM_CLOCK and capped is not None and capped > POWER_HELD:
        return EFFECT
    return None if largest is None else largest / 1e6


def _kv_tokens(measurement: Measurement) -> int | None:
    blocks, size = measurement.resolved.kv_blocks, measurement.resolved.block_size
    return None if blocks is None or size is None else blocks * size


LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "chunked_prefill", "prefix_caching")

MACHINE_FACTS: tuple[Fact, ...] = (
    Fact("load format", attrgetter("spec.load_format")),
    Fact("interface", attrgetter("spec.interface")),
    Fact("prompts from a cache", attrgetter("spec.allow_prefix_cache"), lambda may: "allowed" if may else "refused"),
    Fact("platform", attrgetter("environment.platform")),
    Fact("GPU", attrgetter("environment.gpu_name"), of_gpu=True),
    Fact(
        "GPU memory", attrgetter("environment.gpu_memory_bytes"), lambda size: f"{size / 2**20:,.0f} MiB", of_gpu=True
    ),
    Fact("driver", attrgetter("environment.driver"), of_gpu=True),
    Fact("power limit", lambda m: device_figures(m.run).power_limit_w, "{:g} W".format, of_gpu=True),
    Fact("SM clock", lambda m: _clock_mhz(m, SM_CLOCK), "{:.0f} MHz".format, APART, optional=True, of_gpu=True),
    Fact("memory clock", lambda m: _clock_mhz(m, MEMORY_CLOCK), "{:.0f} MHz".format, APART, optional=True, of_gpu=True),
    Fact("CPU", attrgetter("environment.cpu"), optional=True),
    Fact("cores", attrgetter("environment.cores")),
)
OPERATING_SYSTEM = Fact("operating system", attrgetter("environment.operating_system"), optional=True)
FACTS = (
    *MACHINE_FACTS,
    *(Fact(name, attrgetter(f"resolved.{name}")) for name in LIMITS),
    Fact("KV cache", _kv_tokens, "{:,} tokens".format, APART),
)


TOLERANCE = 0.03  # default of the smallest change that matters
LAUNCHES = FIRST_LOOKS[0]  # of each side, as many as the pairs of the gate's first interim analysis
LAUNCH, LAUNCH_OF_WAITING = 0.002, 0.5
HOST, HOST_OF_WAITING = 0.05, 1.0  # OF_WAITING: exponent of the factor 1/(1 - w), 0.5 for the square root
LEAST_BUSY = 0.001  # keeps the logarithm finite if a sensor shows a GPU that is always idle
HOSTS = "other host or boot: hosts of one kind differ; the gate decides, which measures both sides in turns on one host"
ONE_REPEAT = "one repeat on each side: the noise is not known"
FEW_LAUNCHES = f"fewer than {LAUNCHES} launches on a side, and nothing else tells how far launches differ in this"
FEW_CALLS = f"fewer than {LAUNCHES} calls of `slmserve measure` on a side, each of which counts as a launch"
NOISE = "the noise is wider than the tolerance"
NO_SENSOR = "another host or boot, and no sensor told how long the device waited for its host"
COMMON = "baseline-in-common"
STORED = {  # metrics compared with a stored baseline: the claim, and the metric in words
    "output_tokens_per_s": ("throughput-not-below-baseline", "output tokens/s"),
    "e2e_s": ("latency-not-above-baseline", "mean E2E"),
}


class Judgement(enum.Enum):
    """Result for one metric, decided by the whole interval of its ratio.

    BETTER and WORSE are beyond the tolerance, SAME is within it, and NO_WORSE is within its worse side.
    """

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    NO_WORSE = "no worse"
    INCONCLUSIVE = "inconclusive"

    @property
    def state(self) -> State:
        """Verdict on the claim that the metric is not worse."""
        return {Judgement.WORSE: State.FAILS, Judgement.INCONCLUSIVE: State.INCONCLUSIVE}.get(self, State.PASSES)


@dataclass(frozen=True, slots=True)
class Metric:
    """Field of a point that is compared.

    Attributes:
        scale: factor from the field's unit to that of the heading.
        bounded: whether launches and hosts differ by at most a known bound.
        of_gpu: whether it excludes the time in which the GPU waits for its host.
    """

    name: str
    heading: str
    scale: float = 1e3
    higher_is_better: bool = False
    bounded: bool = False
    of_gpu: bool = False

    def threshold(self, tolerance: float) -> float:
        """Return the worst ratio (candidate over baseline) within the tolerance."""
        return 1 / (1 + tolerance) if self.higher_is_better else 1 + tolerance


METRICS = {
    metric.name: metric
    for metric in (
        Metric("output_tokens_per_s", "tokens/s", 1.0, higher_is_better=True, bounded=True),
        Metric("requests_per_s", "requests/s", 1.0, higher_is_better=True, bounded=True),
        Metric("tokens_per_busy_s", "tokens/busy s", 1.0, higher_is_better=True, bounded=True, of_gpu=True),
        Metric("ttft_s", "TTFT ms, mean"),
        Metric("ttft_p99_s", "TTFT ms, p99"),
        Metric("tpot_s", "TPOT ms, mean", bounded=True),
        Metric("tpot_p99_s", "TPOT ms, p99"),
        Metric("itl_s", "ITL ms, mean"),
        Metric("itl_p99_s", "ITL ms, p99"),
        Metric("e2e_s", "E2E ms, mean", bounded=True),
        Metric("e2e_p99_s", "E2E ms, p99"),
        Metric("energy_per_token_j", "mJ/token"),
    )
}


@dataclass(frozen=True, slots=True)
class ComparedCase:
    """Measured case, with one model, workload hash and load for each engine on the device.

    Attributes:
        sharing: how the engines shared the device; "alone" for a single engine.
    """

    models: tuple[str, ...]
    workloads: tuple[str, ...]
    loads: tuple[Load, ...]
    sharing: str

    @property
    def steady(self) -> bool:
        """True if all loads are closed loops with a window."""
        return all(map(is_steady, self.loads))

    @property
    def concurrency(self) -> int:
        """Total concurrency of all engines."""
        return sum(load.max_concurrency or 0 for load in self.loads)

    @property
    def engines(self) -> str:
        """Name of the engines, for example "opt-1.3b" or "2 x opt-1.3b by mps"."""
        several = self.sharing.partition(" engines ")[2]
        return self.models[0] if len(self.models) == 1 else f"{engines(self.models)} {several}"

    @property
    def load(self) -> str:
        """Load in words, for example "concurrency 64" in total."""
        return f"concurrency {self.concurrency}" if self.steady else self.loads[0].title

    @property
    def details(self) -> str:
        """Suffix that distinguishes cases with the same name."""
        load, workloads = self.loads[0], f"workload {' and '.join(w[:6] for w in dict.fromkeys(self.workloads))}"
        if not is_steady(load):
            return workloads
        return f"ramp-up {load.ramp_up}, window {load.window_s:g} s, warm-up {load.settle_lifetimes:g}, {workloads}"


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """The two sides of one case.

    Attributes:
        obstacle: reason why they cannot be compared, or "".
        stored: whether the baseline is a stored one.
    """

    case: ComparedCase
    load: str
    baseline: Point
    candidate: Point
    obstacle: str
    same_boot: bool
    stored: bool = False

    @property
    def idle_share(self) -> float | None:
        """Larger share of the time in which no kernel ran on a side; None if no sensor measured it."""
        ran = [p.gpu_util if p.engine_active is None else p.engine_active for p in (self.baseline, self.candidate)]
        return max((max(0.0, 1 - share) for share in ran if share is not None), default=None)

    @property
    def unseen(self) -> float | None:
        """Largest expected difference of two launches, as a difference of logarithms; None if unknown.

        The speed of kernels and the time between them differ independently, so their squares add up. Without a sensor
        of the idle share, for example on a CPU, the bound of hosts applies to launches, and hosts have no bound.
        """
        if self.idle_share is None:
            return math.log1p(HOST) if self.same_boot else None
        least, share = (LAUNCH, LAUNCH_OF_WAITING) if self.same_boot else (HOST, HOST_OF_WAITING)
        return math.hypot(math.log1p(least), share * -math.log(max(1 - self.idle_share, LEAST_BUSY)))

    @property
    def unseen_of_gpu(self) -> float:
        """Largest expected difference in tokens per busy second, as a difference of logarithms."""
        return math.log1p(LAUNCH if self.same_boot else HOST) + abs(clocks_apart(self.baseline, self.candidate))


@dataclass(frozen=True, slots=True)
class MetricChange:
    """Comparison of one metric of one case.

    Attributes:
        ratio: candidate over baseline, with its 95% interval if known.
        launches: of each side.
    """

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
    """Comparison of two sets of measurements.

    Attributes:
        tolerance: smallest change that matters, as a share.
        differences: of the environments and the engines in the compared cases.
    """

    tolerance: float
    changes: tuple[MetricChange, ...]
    pairs: tuple[ComparedPair, ...]
    differences: tuple[Difference, ...]
    baseline_only: tuple[str, ...]
    candidate_only: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[Judgement, int]:
        seen = Counter(each.verdict for each in self.changes)
        return {verdict: seen[verdict] for verdict in Judgement}

    @property
    def state(self) -> State:
        """Verdict on the claim that no metric is worse; inconclusive if nothing was compared."""
        return all_of(each.verdict.state for each in self.changes)


def compare(
    baseline: Sequence[Measurement],
    candidate: Sequence[Measurement],
    tolerance: float,
    metrics: Collection[str] = METRICS,
    *,
    stored: bool = False,
) -> RunComparison:
    """Compare each metric of each case that both sides have.

    Args:
        tolerance: smallest change that matters, as a share.
        stored: whether the baseline is a stored one. Then only steady loads are compared, and the engine's limits must
            match too. Otherwise launches of gates are skipped, because a gate contains both of its sides.
    """
    there, here = (
        compared_cases((m for m in side if stored or m.paired is None), steady=stored) for side in (baseline, candidate)
    )
    common = sorted((case for case in here if case in there), key=lambda c: (c.engines, not c.steady, c.concurrency))
    pairs, notes = list[ComparedPair](), list[str]()
    sides, only = (list[Measurement](), list[Measurement]()), (list[str](), list[str]())
    for case, load in zip(common, load_names(common), strict=True):
        for one, other in same_engines(there[case], here[case]):
            if one and other:
                pairs.append(compared_pair(case, load, one, other, stored=stored))
                notes += warnings(one[0], other[0])
                sides[0].extend(one)
                sides[1].extend(other)
            else:
                only[0 if one else 1].append(f"{case.engines} at {load}, with another engine")
    if (gated := sum(m.paired is not None for m in (*baseline, *candidate))) and not stored:
        notes.append(f"launches of gates are skipped ({gated} measurements): `report` judges them")
    changes = (
        change_of(pair, METRICS[name], tolerance, pairs) for pair in pairs for name in METRICS if name in metrics
    )
    return RunComparison(
        tolerance,
        tuple(change for change in changes if change),
        tuple(pairs),
        fact_differences(*(sides if pairs else (baseline, candidate))),
        (*only[0], *listed_cases(case for case in there if case not in here)),
        (*only[1], *listed_cases(case for case in here if case not in there)),
        tuple(dict.fromkeys(notes)),
    )


def compared_cases(measurements: Iterable[Measurement], *, steady: bool) -> dict[ComparedCase, list[Measurement]]:
    """Return measurements by case: single engines in the order first met, then complete groups of engines.

    Args:
        steady: whether to skip loads without a window.
    """
    found: dict[ComparedCase, list[Measurement]] = {}
    for members in all_groups(measurements):
        part, sharing = members[0].replica, "alone"
        if part and part.count > 1:
            share = "" if part.thread_percentage is None else f", {part.thread_percentage}% of the threads"
            sharing = f"{part.count} engines by {part.sharing}{share}{', pinned' if part.pinned else ''}"
        models, loads = tuple(short_name(m.spec.model) for m in members), tuple(m.load for m in members)
        case = ComparedCase(models, tuple(m.workload.hash for m in members), loads, sharing)
        if case.steady or not steady:
            found.setdefault(case, []).extend(members)
    return found


def of_model(measurements: Iterable[Measurement], model: str) -> list[Measurement]:
    """Return the measurements under steady loads in which the first engine has this model."""
    by_case = compared_cases(measurements, steady=True)
    return [m for case, found in by_case.items() if case.models[0] == model for m in found]


def load_names(cases: Sequence[ComparedCase]) -> list[str]:
    """Return the load of each case, with details if two cases have the same name."""
    names = Counter((case.engines, case.load) for case in cases)
    return [c.load if names[c.engines, c.load] == 1 else f"{c.load} ({c.details})" for c in cases]


def listed_cases(cases: Iterable[ComparedCase]) -> list[str]:
    """Return a line per set of engines, such as "opt-1.3b at concurrency 1, 2 (ramp-up …)", and one per other load."""
    by_steady = grouped(cases, lambda case: case.steady)
    listed = []
    for alike in grouped(by_steady.get(True, []), lambda case: (case.engines, case.details)).values():
        loads = ", ".join(map(str, sorted(case.concurrency for case in alike)))
        listed.append(f"{alike[0].engines} at concurrency {loads} ({alike[0].details})")
    return [*listed, *(f"{case.engines} at {case.load} ({case.details})" for case in by_steady.get(False, []))]


def requested_engine(m: Measurement) -> str:
    """Return the key of the requested engine, or of the set of engines that shared a device."""
    return m.spec.key if m.alone or m.replica is None else m.replica.set


def same_engines(
    there: Sequence[Measurement], here: Sequence[Measurement]
) -> Iterator[tuple[list[Measurement], list[Measurement]]]:
    """Pair the measurements of one case by their engines.

    Yields:
        Both sides of each engine with the same key. If one other engine remains on each side, these two, else each
        remaining engine with an empty list.
    """
    first, second = grouped(there, requested_engine), grouped(here, requested_engine)
    for engine in [engine for engine in first if engine in second]:
        yield first.pop(engine), second.pop(engine)
    if len(first) == len(second) == 1:
        yield *first.values(), *second.values()  # type: ignore[misc]
    else:
        yield from ((group, []) for group in first.values())
        yield from (([], group) for group in second.values())


def compared_pair(
    case: ComparedCase, load: str, there: Sequence[Measurement], here: Sequence[Measurement], *, stored: bool = False
) -> ComparedPair:
    """Return both sides of one case, with the obstacle to their comparison."""
    both = point_of(all_groups(there)), point_of(all_groups(here))
    used = [list(chain(*point.used)) for point in both]
    obstacles: list[str] = []
    sides = ("the baseline", "this run" if stored else "the candidate")
    for side, point, measured in zip(sides, both, (there, here), strict=True):
        known = {(requested_engine(m), m.environment.vllm, m.environment.torch) for m in measured}
        if len(known) > 1:
            obstacles.append(f"{side} has {len(known)} different engines or releases under this load")
        elif not point.valid:
            obstacles.append(f"{side} is invalid: {'; '.join(point.problems) or 'it has no valid repeat'}")
        elif point.degraded:
            obstacles.append(f"{side} is questionable: {'; '.join(point.degraded)}")
    if not obstacles:
        for one, other in product(*used):
            if getattr(one.replica, "index", 0) == getattr(other.replica, "index", 0):
                obstacles += why_not(one, other, FACTS if stored else MACHINE_FACTS)
    return ComparedPair(case, load, *both, "; ".join(dict.fromkeys(obstacles)), one_boot(*chain(*used)), stored)


def change_of(
    pair: ComparedPair, metric: Metric, tolerance: float, among: Sequence[ComparedPair] = ()
) -> MetricChange | None:
    """Return the comparison of one metric, or None if a side has no measurement of it.

    A metric on different hosts or boots is called better or worse only against a stored baseline, whose interval
    includes the observed difference between hosts.

    Args:
        among: pairs that provide the noise of a metric of the GPU, which is alike at all loads, if this load has no
            repeats.
    """
    sides = [repeats_by_launch(side, metric) for side in (pair.baseline, pair.candidate)]
    if not all(sides):
        return None
    noise = repeat_noise(sides)
    if metric.of_gpu and not noise.known:
        alike = (p for p in among if p is not pair and p.case.engines == pair.case.engines)
        noise = repeat_noise(
            sides, [repeats_by_launch(side, metric) for p in alike for side in (p.baseline, p.candidate)]
        )
    seen, elsewhere = factor(noise.between(0, 1)), not (pair.same_boot or pair.stored)
    bounded = metric.bounded and pair.case.steady and (pair.stored or pair.idle_share is not None)
    unseen = (pair.unseen_of_gpu if metric.of_gpu else pair.unseen) if bounded else None
    if min(map(len, sides)) >= LAUNCHES and pair.same_boot:
        unseen = 0.0
    verdict, why = Judgement.INCONCLUSIVE, pair.obstacle
    if why or unseen is None:
        seen = Interval(seen.value)
    elif seen.low is not None and seen.high is not None:
        low, high, most = seen.low / math.exp(unseen), seen.high * math.exp(unseen), 1 + tolerance
        seen = Interval(seen.value, low, high)
        if high < 1 / most or low > most:
            if not elsewhere:
                verdict = Judgement.BETTER if (low > most) is metric.higher_is_better else Judgement.WORSE
        elif low > 1 / most and high < most:
            verdict = Judgement.SAME
        elif low > 1 / most if metric.higher_is_better else high < most:
            verdict = Judgement.NO_WORSE
    if verdict is Judgement.INCONCLUSIVE and not why:
        if elsewhere:
            why = HOSTS
        elif unseen is None:
            of_an_endpoint = pair.baseline.used[0][0].environment.platform == "remote"
            why = NO_SENSOR if pair.stored else FEW_CALLS if of_an_endpoint else FEW_LAUNCHES
        else:
            why = ONE_REPEAT if seen.low is None else NOISE
    one, other = (mean_of_repeats(side) for side in sides)
    launches = (len(sides[0]), len(sides[1]))
    return MetricChange(pair.case.engines, pair.load, metric.name, one, other, seen, verdict, why, launches)


def repeats_by_launch(side: Point, metric: Metric) -> list[list[Repeat]]:
    """Return the repeats of a metric for each launch; empty if a value is not positive and finite."""
    known = [
        busy_repeat(value, group[0]) if metric.of_gpu else Repeat(value, group[0].measured_at, group[0].launch)
        for group, figures in zip(side.used, side.each, strict=True)
        if (value := getattr(figures, metric.name, None)) is not None
    ]
    sound = all(0 < repeat.value < math.inf for repeat in known)
    return list(grouped(known, lambda repeat: repeat.launch).values()) if sound else []


def mean_of_repeats(launches: Sequence[Sequence[Repeat]]) -> float:
    return fmean(repeat.value for repeat in chain(*launches))


def repeat_noise(
    sides: Sequence[Sequence[Sequence[Repeat]]], others: Sequence[Sequence[Sequence[Repeat]]] = ()
) -> Differences:
    """Return both sides as samples of launches if each has enough, else of repeats, which lack the noise of launches.

    Args:
        others: further repeats that provide noise.
    """
    if min(map(len, sides), default=0) < LAUNCHES:
        return Differences(tuple(tuple(chain(*side)) for side in (*sides, *filter(None, others))), minutes=0.0)
    return Differences(
        tuple(tuple(launch[0]._replace(value=mean_of_repeats([launch])) for launch in side) for side in sides)
    )


def against_stored(
    baseline: Sequence[Measurement], candidate: Sequence[Measurement], tolerance: float
) -> tuple[list[Verdict], tuple[str, ...]]:
    """Compare a run with a stored baseline.

    Returns:
        Verdicts on output tokens/s and mean E2E for each common case, and notes. A verdict fails if the whole interval
        of the ratio (candidate over baseline) is worse than the tolerance.
    """
    found = compare(baseline, candidate, tolerance, (), stored=True)
    sides = {"the baseline": found.baseline_only, "this run": found.candidate_only}
    notes = (*(f"measured by {side} alone: {', '.join(only)}" for side, only in sides.items() if only), *found.notes)
    if not found.pairs:
        there, here = (", ".join(only) or "none" for only in sides.values())
        why = "no model was measured under one load with one workload on both sides: the baseline has"
        return [Verdict.inconclusive(COMMON, "baseline", f"{why} {there}; this run {here}")], notes
    verdicts = []
    for pair, (name, (claim, words)) in product(found.pairs, STORED.items()):
        subject, metric = f"{pair.case.engines} at {pair.load}", METRICS[name]
        threshold = metric.threshold(tolerance)
        change, both = change_of(pair, metric, tolerance), (pair.baseline, pair.candidate)
        if change is None or pair.unseen is None or pair.obstacle:
            why = f"cannot be compared: {pair.obstacle or NO_SENSOR}"
            verdicts.append(Verdict.inconclusive(claim, subject, why, threshold, *both))
            continue
        seen = change.ratio
        apart = percent(abs(seen.value - 1))
        way = f"{apart} {'lower' if seen.value < 1 else 'higher'} than" if apart != percent(0) else "equal to"
        why = f"{words} {way} the baseline's ({seen.value:.4g} times"
        why += "" if seen.low is None else f", 95%: {seen.low:.4g} to {seen.high:.4g}"
        why += f"), tolerance {percent(tolerance)}"
        if seen.low is None:
            why += "; noise unknown: one repeat on each side; --slm-repeats 2"
        elif min(change.launches) < LAUNCHES or not pair.same_boot:
            where = "launch" if pair.same_boot else "host or boot"
            why += f"; widened by a factor of {math.exp(pair.unseen):.4g} each way for another {where}"
            if (idle := pair.idle_share) is not None:
                why += f", and a GPU that waits for its host for {percent(idle)} of the time"
        verdict = Verdict.from_interval(claim, subject, change.verdict.state, why, seen, threshold, *both)
        verdicts.append(replace(verdict, why=why))  # omits the clause on launches, which the interval includes
    return verdicts, notes


FOLLOWED = ("output_tokens_per_s", "tokens_per_busy_s", "tpot_s")
NO_DIFFERENCE, NOT_COMPARABLE, TOO_FEW = "no difference shown", "not comparable", "too few launches"
WORDS = {Judgement.BETTER: "improved", Judgement.WORSE: "regressed"}  # other verdicts keep the words of `compare`
STAGES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}  # order relative to the release (PEP 440)
WORTH = 0.1  # smallest change that a useful interval must show
REACH = FIRST_LOOKS[-1]  # launches of each release; if the tolerance needs more, the aim is `WORTH`


def tells(seen: Interval) -> bool:
    """Return whether an interval of a ratio, or of a mean, is narrow enough to show a change of `WORTH`."""
    return seen.low is not None and seen.high is not None and seen.high <= seen.low * (1 + WORTH) ** 2


def launches_needed(pair: ComparedPair, step: MetricChange, noise: float) -> tuple[int, float] | None:
    """Return how many launches of each release would show a change of a metric, and the change as a share.

    The change is the default tolerance if `REACH` launches can show it, else `WORTH`. None means that launches do not
    help.

    Args:
        noise: standard deviation of the mean of a launch's repeats, as a share.
    """
    unseen = pair.unseen_of_gpu if METRICS[step.metric].of_gpu else pair.unseen
    if step.why not in (NOISE, ONE_REPEAT) or unseen is None or min(step.launches) >= LAUNCHES:
        return None
    # `unseen` is the 95% limit of the difference of two launches, whose variance is twice that of one launch.
    sd = math.hypot(unseen / NORMAL.inv_cdf(1 - TAIL) / math.sqrt(2), noise)

    def narrow(launches: int, change: float) -> bool:
        return t_above(TAIL, 2 * launches - 2) * sd * math.sqrt(2 / launches) <= math.log1p(change)

    shows = TOLERANCE if narrow(REACH, TOLERANCE) else WORTH
    return next(n for n in count(LAUNCHES) if narrow(n, shows)), shows


@dataclass(frozen=True, slots=True)
class ReleaseMean:
    """One metric of one release in a history.

    Attributes:
        step: change since the previous release, if any.
        launches_more: further launches of both releases that would show a change by the share `shows`; None if they
            would not help.
        gate: command that gates it against the previous release, if more launches would help or if it regressed.
    """

    release: str
    mean: Interval
    launches: int
    step: MetricChange | None
    launches_more: int | None = None
    shows: float | None = None
    gate: str = ""

    @property
    def step_words(self) -> str:
        if self.step is None:
            return ""
        if self.step.verdict is Judgement.INCONCLUSIVE:
            if self.launches_more is not None and not tells(self.step.ratio):
                return TOO_FEW
            return NO_DIFFERENCE if self.step.why in (NOISE, ONE_REPEAT, FEW_LAUNCHES) else NOT_COMPARABLE
        return WORDS.get(self.step.verdict) or str(self.step.verdict.value)


@dataclass(frozen=True, slots=True)
class ReleaseHistory:
    """One metric of one case over several releases, the oldest first.

    Attributes:
        steps: changes of the level by more than the tolerance; `at` is the index of a release.
    """

    subject: str
    device: str
    metric: str
    tolerance: float
    releases: tuple[ReleaseMean, ...]
    steps: tuple[LevelStep, ...]

    @property
    def regressions(self) -> list[tuple[ReleaseMean, Interval]]:
        """Releases that regressed, or since which the level is worse, with the ratio to before, the newest last.

        Those that a later release repaired are left out.
        """
        higher = METRICS[self.metric].higher_is_better
        found = {s.at: s.ratio for s in self.steps if (s.ratio.value < 1) == higher}
        steps = enumerate(each.step for each in self.releases)
        found |= {i: step.ratio for i, step in steps if step and step.verdict is Judgement.WORSE}
        means = [each.mean.value if higher else 1 / each.mean.value for each in self.releases]
        lasting = (i for i in sorted(found) if means[-1] * (1 + self.tolerance) < means[i - 1])
        return [(self.releases[i], found[i]) for i in lasting]


def release_order(version: str) -> tuple[object, ...]:
    """Return the sort key of a version. This order is ascending: "0.9.0", "0.10.0rc1", "0.10.0", "0.10.0.post1"."""
    stages = re.findall(r"(dev|a|b|rc|post)(\d*)", version.partition("+")[0])
    return release(version), (*((STAGES[stage], int(number or 0)) for stage, number in stages), (0, 0)), version


# A case of one engine, and the measurements and the point of each release, the oldest first.
HistoryCase = tuple[ComparedCase, list[tuple[list[Measurement], Point]]]


def history_cases(alike: Sequence[Measurement]) -> Iterator[HistoryCase]:
    """Yield for each engine the largest load at which most releases have a valid point, if at least two have one.

    If several hosts measured a release, the host that measured the most releases counts.
    """
    lines: list[list[list[Measurement]]] = []  # engine, release, measurements
    by_release = grouped(alike, lambda m: m.environment.vllm or "")
    for version in sorted(by_release, key=release_order):
        last = {requested_engine(line[-1][0]): line for line in lines}
        for before, here in same_engines(list(chain(*(line[-1] for line in lines))), by_release[version]):
            if before and here:
                last[requested_engine(before[0])].append(here)
            elif here:
                lines.append([here])
    for line in lines:
        hosts = Counter(host for measured in line for host in hosts_of(measured))
        by_case = [compared_cases(measured, steady=True) for measured in line]
        found: list[HistoryCase] = []
        for case in dict.fromkeys(chain(*by_case)):
            by_host = (
                grouped(measured[case], lambda m: m.environment.host) for measured in by_case if case in measured
            )
            there = [max(each.values(), key=lambda ms: (hosts[ms[0].environment.host], len(ms))) for each in by_host]
            found.append((case, [(ms, point) for ms in there if (point := point_of(all_groups(ms))).valid]))
        best = max(found, key=lambda each: (len(each[1]), each[0].concurrency))
        if len(best[1]) > 1:
            yield best


def release_histories(measurements: Sequence[Measurement]) -> list[ReleaseHistory]:
    """Return a history of each followed metric of each single engine under a steady load with several releases."""

    def family(m: Measurement) -> Hashable:
        load = replace(m.load, concurrency=1) if isinstance(m.load, ClosedLoop) else m.load
        return m.environment.platform, m.environment.title, m.spec.interface, m.spec.model, m.workload.hash, load

    usable = [m for m in measurements if m.alone and m.paired is None and is_steady(m.load) and m.environment.vllm]
    found = [case for alike in grouped(usable, family).values() for case in history_cases(alike)]
    histories = []
    for device, shown in grouped(found, lambda each: each[1][0][0][0].environment.title).items():
        names = [f"{case.engines} at {load}" for (case, _), load in zip(shown, load_names([case for case, _ in shown]))]
        for (case, releases), name in zip(shown, names):
            first = releases[0][0][0]
            more = f", {first.spec.interface} interface, engine {requested_engine(first)[:6]}"
            subject = name + (more if names.count(name) > 1 else "")
            for metric in FOLLOWED:
                known = [
                    (each, side) for each, point in releases if (side := repeats_by_launch(point, METRICS[metric]))
                ]
                noise = repeat_noise([side for _, side in known])
                scatter = noise_of_launches([side for _, side in known])
                means, asked = list[ReleaseMean](), dict[int, tuple[int, float]]()
                for i, (each, side) in enumerate(known):
                    mean = replace(factor(noise.mean(i)), value=mean_of_repeats(side))
                    here = ReleaseMean(each[0].environment.vllm or "", mean, len(side), None)
                    if i:
                        pair = compared_pair(case, case.load, known[i - 1][0], each)
                        step = change_of(pair, METRICS[metric], TOLERANCE)
                        here = replace(here, step=step)
                        if step and (needed := launches_needed(pair, step, scatter)):
                            here = replace(here, launches_more=needed[0] - min(step.launches), shows=needed[1])
                            asked[i] = needed
                        elif step and step.verdict is Judgement.WORSE:
                            asked[i] = REACH, TOLERANCE
                    means.append(here)
                if len(means) > 1:
                    levels = level_steps([each.mean.value for each in means])
                    beyond = tuple(s for s in levels if abs(math.log(s.ratio.value)) > math.log1p(TOLERANCE))
                    asked = dict.fromkeys((s.at for s in beyond), (REACH, TOLERANCE)) | asked
                    for i, (launches, shows) in asked.items():
                        command = gate_command(known[i - 1][0][0], known[i][0][0], launches, shows)
                        means[i] = replace(means[i], gate=command)
                    histories.append(ReleaseHistory(subject, device, metric, TOLERANCE, tuple(means), beyond))
    return histories


def noise_of_launches(releases: Sequence[Sequence[Sequence[Repeat]]]) -> float:
    """Return the standard deviation of the mean of a launch's repeats, as a share; 0 if no launch has two repeats."""
    logs = [[math.log(repeat.value) for repeat in launch] for side in releases for launch in side]
    several = [each for each in logs if len(each) > 1]
    if not several:
        return 0.0
    df = sum(len(each) - 1 for each in several)
    return math.sqrt(sum(variance(each) * (len(each) - 1) for each in several) / df / fmean(map(len, logs)))


def gate_command(baseline: Measurement, candidate: Measurement, launches: int, shows: float) -> str:
    """Return the command of a gate that launches two releases in turns, or "" for an endpoint.

    If a record has neither an interpreter nor environment variables, the command has a placeholder path.

    Args:
        shows: margin of the gate, as a share.
    """
    spec, asked = candidate.spec, candidate.workload.spec
    if spec.interface == "endpoint":
        return ""
    words = ["pytest", "--pyargs", "pytest_slmserve.benchmarks", candidate.environment.mode, "--slm-gate"]
    words += [f"--slm-models={spec.model}", f"--slm-concurrency={candidate.load.max_concurrency}"]
    words += [f"--slm-interface={spec.interface}"] if spec.interface != "engine" else []
    words += [] if asked.prompt_tokens is None else [f"--slm-input-len={asked.prompt_tokens}"]
    words += ["--slm-gate-launches=apart", "-o", f"slm_gate_pairs={launches}", f"--slm-gate-margin={shows:.0%}"]
    for side, m in (("baseline", baseline), ("candidate", candidate)):
        own = m.spec.python or ("" if m.spec.env else f"/path/to/vllm-{m.environment.vllm}/bin/python")
        words += side_words(side, own, m.spec.env, m.spec.extra)
    return shlex.join(words)


def side_words(
    side: str, python: str, env: Iterable[tuple[str, str]], arguments: Iterable[tuple[str, Any]]
) -> list[str]:
    """Return the pytest options for one side of a gate."""
    options = [f"python={python}"] if python else []
    options += [f"env={name}={value}" for name, value in env]
    options += [f"arg={name}={json.dumps(value)}" for name, value in arguments]
    return [f"--slm-side={side}:{option}" for option in options]
