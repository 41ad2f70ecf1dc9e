"""Curve of one engine over the load, and the claims that need no other curve.

If data are missing, invalid or too noisy, a verdict is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis import objectives
from pytest_slmserve.analysis.estimates import Interval, grouped, percent, percent_interval, t_above
from pytest_slmserve.analysis.metrics.gpu_figures import Peaks, Work, peaks_of_engine, work_of_workload
from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.points import (
    Figure,
    JobPoint,
    Point,
    ReplicaPoint,
    at_common_loads,
    busy_rate,
    by_series,
    e2e_s,
    output_rate,
    points_of,
    ratio,
)
from pytest_slmserve.analysis.sweep import plateau
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad, Gain, Prediction, next_load, predictions
from pytest_slmserve.analysis.verdict import State, Verdict, below, every
from pytest_slmserve.schema.errors import BadUsage, Kind
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.records import Environment, Measurement, Resolved, series_key
from pytest_slmserve.schema.specs import (
    GIB,
    SPECULATIVE,
    UNITS,
    ClosedLoop,
    EngineSpec,
    WorkloadReference,
    WorkloadSpec,
    workload_facts,
)

FEWEST_POINTS = 3  # two doublings: one with a gain, and one without
MOST_REPEATS = 50  # of a load, in a recommendation
SURE = 2.2  # standard errors to an end of an interval with many repeats
TOLERANCE = 0.10
MARGIN = 0.03  # run-to-run difference of one configuration in published data (arXiv:2503.08311, raw results)
PLATEAU, LATENCY, PARETO = "throughput-plateau", "latency-rises-past-plateau", "pareto-up-to-plateau"
GPU_PLATEAU = "gpu-plateau"
NOISE_UNKNOWN = "noise unknown: one repeat of each point"
QUICKEST = 3  # number of the smallest loads whose second repeats show the noise
NO_BUSY = "no sensor gave the time in which a kernel ran (GPM or DCGM)"


@dataclass(frozen=True, slots=True)
class Axes:
    """Names of the load, the throughput and the latency of a curve.

    Attributes:
        knob: name of the load in external results; None means concurrency.
    """

    knob: str | None = None
    throughput: str = "tokens/s"
    latency: str = "E2E"

    def at(self, *loads: object) -> str:
        """Return the loads as text, such as "concurrency 8, 16" or "max_num_seqs 8"."""
        text = ", ".join(map(str, loads))
        return f"concurrency {text}" if self.knob is None else f"{self.knob} {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points by ascending concurrency, and all their measurements, including invalid ones.

    Attributes:
        cut: planned loads that were skipped for a reason (concurrency, reason).
        missing: planned loads without a measurement; in an unfinished adaptive sweep, the next load.
        unneeded: planned loads that an adaptive sweep did not need.
        looks: numbers of repeats at the interim analyses of a sweep that continues until its claims are conclusive.
        over: whether the sweep is finished.
        beside: whether its run planned other sweeps but not this curve, so it need not show a plateau.
        shared: replicas of the model.
        alone: single engines, measured for comparison with replicas.
        wider: the same engine on more GPUs.
        warmer: the same engine and requests with larger shared prefixes, ascending, or with the prefix cache on.
        structured: for a curve of free text, the same engine and requests with structured output.
        plain: for a curve with speculative decoding, the same engine without it.
    """

    subject: str
    axes: Axes = Axes()
    points: tuple[Point, ...] = ()
    cut: tuple[tuple[int, str], ...] = ()
    missing: tuple[int, ...] = ()
    adaptive: bool = False
    unneeded: tuple[int, ...] = ()
    looks: tuple[int, ...] = ()
    over: bool = False
    beside: bool = False
    shared: tuple[ReplicaPoint, ...] = ()
    alone: tuple[Point, ...] = ()
    wider: tuple[Curve, ...] = field(default=(), repr=False)
    warmer: tuple[Curve, ...] = field(default=(), repr=False)
    structured: tuple[Curve, ...] = field(default=(), repr=False)
    plain: Curve | None = field(default=None, repr=False)
    jobs: tuple[JobPoint, ...] = field(default=(), repr=False)
    measurements: tuple[Measurement, ...] = field(default=(), repr=False)

    def tail_of(self, repeats: int) -> float:
        """Return the probability outside each end of an interval; see `plateau.tail_at`."""
        return plateau.tail_at(repeats, self.looks, self.over)

    @property
    def first(self) -> Measurement | None:
        """First measurement, with the workload, environment, ramp-up and engine (except `max_num_seqs`) of all."""
        return self.measurements[0] if self.measurements else None

    @property
    def decodes(self) -> bool:
        """True if its requests generate tokens, as those of published points do."""
        return self.workload is None or self.workload.kind == "generate"

    @property
    def spec(self) -> EngineSpec | None:
        return self.first.spec if self.first else None

    @property
    def environment(self) -> Environment | None:
        if self.first is None:
            return self.jobs[0].environment if self.jobs else None
        return self.first.environment

    @property
    def workload(self) -> WorkloadReference | None:
        return self.first.workload if self.first else None

    @property
    def load(self) -> ClosedLoop | None:
        return self.first.load if self.first and isinstance(self.first.load, ClosedLoop) else None

    @property
    def family(self) -> tuple[str, str, str | None, str | None] | None:
        """Key of curves with one kind of host, requests, ramp-up and `EngineSpec.family`; None without data."""
        if self.first is None:
            return None
        start = self.load.ramp_up if self.load else None
        return self.first.spec.family, self.first.environment.per_gpu_key, self.first.workload.hash, start

    @property
    def resolved(self) -> tuple[Resolved, ...]:
        """Values that the engine resolved, one entry per launch."""
        return tuple({m.launch: m.resolved for m in self.measurements}.values())

    @property
    def trusted(self) -> list[Measurement]:
        """Measurements that the points use."""
        return [m for point in self.points for group in point.used for m in group]

    @property
    def kv_capacity(self) -> int | None:
        """Number of the longest requests that fit into the KV cache at once."""
        return kv_capacity(self.first.spec, self.first.workload.longest, self.first.resolved) if self.first else None

    @property
    def work(self) -> Work | None:
        """Work of a request on a GPU; None if unknown, for example with a prefix cache or speculative decoding."""
        return work_of_workload(self.first.spec, self.first.resolved, self.first.workload) if self.first else None

    @property
    def peaks(self) -> Peaks | None:
        """Peak rates of the engine's GPUs, if they are known."""
        return peaks_of_engine(self.first.spec, self.first.environment) if self.first else None

    def one_engine(self, concurrency: int, replicas: ReplicaPoint | None = None) -> Point | None:
        """Return the valid point of a single engine at a concurrency, if any.

        Args:
            replicas: restricts the measurements to their hosts.
        """
        valid = [*plateau.valid_points(self.alone), *self.valid]
        found = (point for point in valid if point.concurrency == concurrency)
        return next(filter(None, (point.on_hosts_of(replicas) if replicas else point for point in found)), None)

    @property
    def valid(self) -> list[Point]:
        """Valid points."""
        return plateau.valid_points(self.points)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Predictions of the saturation model for the unneeded loads, if it describes the curve."""
        return predictions(self.points, self.unneeded)

    @property
    def speedups(self) -> list[tuple[Point, Point, Interval]]:
        """Valid points with and without speculation at each common load, ascending, and their throughput ratio."""
        pairs, among = at_common_loads(self.valid, self.plain.valid if self.plain else ())
        return [(of, to, ratio(of, to, among)) for of, to in pairs]

    def gains(self, figure: Figure = output_rate) -> tuple[Gain, ...]:
        """Return the relative gain of a figure per doubling, between neighboring valid points."""
        return plateau.gains(self.points, figure, self.tail_of)

    def factors(self) -> dict[int, tuple[float, float]]:
        """Return the two factors of the throughput gain of each doubling, less 1, by the load at its end.

        The first is the gain in tokens per busy second, due to the GPU. The second is the gain in busy time, due to the
        host.
        """
        seen = {(gain.start, gain.end): gain.value for gain in self.gains()}
        of_gpu = ((gain, seen.get((gain.start, gain.end))) for gain in self.gains(busy_rate))
        pairs = [(gain, (1 + both) / (1 + gain.value) - 1) for gain, both in of_gpu if both is not None]
        return {gain.end: (gain.value, round(of_host, 4) + 0.0) for gain, of_host in pairs}  # + 0.0: no sign of -0.0

    def plateau(self, tolerance: float = TOLERANCE, figure: Figure = output_rate) -> ChosenLoad:
        """Return the load from which the figure grows by less than `tolerance` (a share) per doubling."""
        return plateau.plateau(self.points, tolerance, self.tail_of, figure)

    def meets(self, slo: str | Slo, share: float = objectives.SHARE, *, at: int | None = None) -> Verdict:
        """Return the verdict on an SLO at one load, which also says up to which load the SLO holds.

        Args:
            slo: for example "ttft:200ms,tpot:50ms"; see `Point.meets`.
            share: of the requests that must meet the SLO.
            at: concurrency; the largest valid one by default.
        """
        limits, points = objectives.slo_of(slo, share), {p.concurrency: p for p in self.valid}
        wanted = max(points, default=0) if at is None else at
        each = {load: replace(p, told=None).meets(limits, share) for load, p in points.items()}
        claim, subject = f"{objectives.CLAIM} {limits}", f"{self.subject} at {self.axes.at(wanted)}"
        verdict = Verdict.inconclusive(claim, subject, "it has no valid repeat there", share)
        if wanted in each:
            verdict = each[wanted]
        kept = list(takewhile(lambda load: each[load].state is State.PASSES, each))
        highest = f"kept up to {self.axes.at(kept[-1])}" if kept else "kept for sure at no load"
        verdict = replace(verdict, why=f"{verdict.why}; {highest}", again=(wanted,))
        if told := next((p.told for p in points.values() if p.told), None):
            told(verdict)
        return verdict

    def pareto_front(self) -> tuple[Point, ...]:
        """Return the valid points that are Pareto-optimal by mean throughput and mean E2E, regardless of noise."""
        means = [(p, fmean(p.repeats), fmean(p.e2e_repeats)) for p in self.valid]
        return tuple(
            p
            for p, rate, wait in means
            if not any(min(other - rate, wait - its) >= 0 < max(other - rate, wait - its) for _, other, its in means)
        )

    def pareto_plateau(self, tolerance: float = TOLERANCE, figure: Figure = output_rate) -> Verdict:
        """Return the verdict on whether the last doubling gains less than `tolerance`, with 97.5% confidence.

        If the last loads are more than a factor of two apart, the gain is the mean of several doublings. The last
        doubling gains less than that mean, so only a small gain is conclusive.

        Args:
            figure: `busy_rate` for the plateau of the GPU, which does not depend on the host.
        """
        of_gpu = figure is busy_rate
        claim, each, what = PLATEAU, "", "throughput"
        if of_gpu:
            claim, each, what = GPU_PLATEAU, "per second in which a kernel runs, ", "it"
        largest = _largest_two(self)
        reason = obstacle(self, largest.__contains__)
        if not reason and not all(figure(p) for p in self.valid if p.concurrency in largest):
            reason = NO_BUSY
        if reason:
            return _undecided(claim, self, reason, tolerance)
        gains, threshold = self.gains(figure), f"threshold {percent(tolerance)}"
        last, state = gains[-1], below(gains[-1], tolerance)
        why = f"{each}the last doubling ({last.start} to {last.end}) gains {percent_interval(last)}"
        if last.value < 0:
            why = f"{each}with the last doubling ({last.start} to {last.end}) {what} is {_lower(last)}"
        why += f"{'' if of_gpu else self.split(last.end)}, {threshold}"
        if state is State.FAILS and last.end > 2 * last.start:
            why = f"{each}from {last.start} to {last.end} a doubling gains {percent_interval(last)} in the mean, "
            why += f"{threshold}: the last one, from {last.end / 2:g} on, was not measured{sparsely(self)}"
            undecided = Verdict.from_interval(
                claim, self.subject, State.INCONCLUSIVE, why, last, tolerance, *self.valid
            )
            return replace(undecided, remedy=f"a measurement at {self.axes.at(f'{last.end / 2:g}')}")
        if state is State.INCONCLUSIVE:
            why += ": too noisy to tell"
        elif state is State.FAILS:
            why = f"no plateau up to concurrency {last.end}: {why}"
            if self.cut:
                why += f"; {self.cut[0][0]} was cut: {self.cut[0][1]}"
            elif self.kv_capacity is not None:
                why += f"; the KV cache holds {self.kv_capacity} requests"
        else:
            flat = self.plateau(tolerance, figure)
            later = [g for g in gains if g.start >= (flat.value or 0)]
            most, least = max(later, key=lambda g: g.value), min(later, key=lambda g: g.value)
            gain = f"gain at most {percent(most.value)}" if most.value > 0 else f"lose at least {percent(-most.value)}"
            why = (
                f"{each}plateau from concurrency {flat.value} (95%: {flat.low} to {flat.high}): later doublings {gain}"
            )
            why += f" ({threshold})"
            if least.value < -MARGIN and least is not most:
                why += f"; from {least.start} to {least.end} {what} falls by {percent(-least.value)}"
        return _verdict(claim, self, state, why, last, tolerance, (last.start, last.end))

    def split(self, end: int) -> str:
        """Return a clause such as " = +6% GPU, +26% host" for the gain up to a load; empty without a sensor."""
        factors = zip(self.factors().get(end, ()), ("GPU", "host"))
        shares = ", ".join(f"{'+' if gain >= 0 else ''}{percent(gain)} {whose}" for gain, whose in factors)
        return f" = {shares}" if shares else ""

    def latency_keeps_rising(self, tolerance: float = TOLERANCE) -> Verdict:
        """Return the verdict on whether each doubling past the plateau raises the mean E2E by more than `tolerance`."""
        knee, reason = _knee(self, tolerance, lambda load, knee: load >= knee)
        if knee is None:
            return _undecided(LATENCY, self, reason, tolerance)

        def rises(several: int) -> list[tuple[Interval, tuple[int, int]]]:
            found = plateau.gains(self.points, e2e_s, self.tail_of, several)
            return [(gain, (gain.start, gain.end)) for gain in found if gain.start >= knee]

        state, flattest, loads = every(rises, least=tolerance)
        why = f"past concurrency {knee} each doubling should raise the mean E2E by {percent(tolerance)}, "
        if flattest.value < 0:
            why += f"from {loads[0]} to {loads[1]} it is {_lower(flattest)}"
        else:
            why += f"the least does by {percent_interval(flattest)} ({loads[0]} to {loads[1]})"
        return _verdict(LATENCY, self, state, why, flattest, tolerance, loads)

    def pareto_up_to_plateau(self, tolerance: float = TOLERANCE, margin: float = MARGIN) -> Verdict:
        """Return the verdict on whether all points up to the plateau (or all, without one) are Pareto-optimal.

        Args:
            margin: advantage in throughput and mean E2E that counts, because noise separates even equal points.
        """
        largest = max((p.concurrency for p in self.valid), default=None)
        knee, reason = _knee(self, tolerance, lambda load, knee: load <= knee, largest)
        if knee is None:
            return _undecided(PARETO, self, reason, margin)
        upto = [p for p in self.valid if p.concurrency <= knee]

        def rivals(several: int) -> list[tuple[Interval, tuple[Point, Point]]]:
            return [(by, (p, q)) for p in upto for q, by in plateau.advantages(self.points, p, self.tail_of, several)]

        state, by, (point, rival) = every(rivals, most=margin)
        if state is State.PASSES:
            why = f"no other point is better by {percent(margin)} in both throughput and mean E2E "
            why += f"than concurrency {', '.join(str(p.concurrency) for p in upto)}"
        else:
            verb = "beats" if state is State.FAILS else "may beat"
            least = f"in the lesser of them by {percent_interval(by)}"
            if by.value < 0:
                least = f"though the lesser of them is {_lower(by)}"
            why = f"concurrency {rival.concurrency} {verb} {point.concurrency} in both throughput and mean E2E, "
            why += f"{least}, threshold {percent(margin)}"
        return _verdict(PARETO, self, state, why, by, margin, tuple(sorted((point.concurrency, rival.concurrency))))


def curve_of(
    subject: str,
    measurements: Iterable[Measurement],
    *,
    planned: Sequence[int] = (),
    cut: Sequence[tuple[int, str]] = (),
    adaptive: float | None = None,
    looks: Sequence[int] = (),
    over: bool = False,
    beyond: Container[str] = (),
) -> Curve:
    """Return the curve of measurements that differ only in their concurrency. Other loads are skipped.

    Args:
        planned: all planned concurrencies. If one is missing, claims are inconclusive.
        adaptive: tolerance of an adaptive sweep.
        beyond: series keys of larger loads, which an engine with another limit of sequences measured.

    Raises:
        BadUsage: if engines, workloads, environments or ways of loading differ.
    """
    series = by_series(measurements)
    if sum(key not in beyond for key in series) > 1:
        raise BadUsage(
            f"{subject}: measurements of {len(series)} different engines, workloads, environments or ways of loading "
            "are not one curve",
            "Build each curve from one model, one workload, one way of loading, and one machine.",
        )
    loaded = tuple(m for group in series.values() for m in group)
    points = points_of(loaded)
    known = {p.concurrency for p in points} | {concurrency for concurrency, _ in cut}
    missing = tuple(sorted(set(planned) - known))
    unneeded: tuple[int, ...] = ()
    if adaptive is not None:
        wanted = next_load(planned, points, adaptive)
        missing, unneeded = ((wanted.concurrency,), ()) if wanted else ((), missing)
    kind: Kind = loaded[0].workload.kind if loaded else "generate"
    return Curve(
        subject=subject,
        axes=Axes() if kind == "generate" else Axes(throughput=f"{UNITS[kind]}s/s"),
        points=points,
        cut=tuple(cut),
        missing=missing,
        adaptive=adaptive is not None,
        unneeded=unneeded,
        looks=tuple(looks),
        over=over,
        alone=points_of(replace(m, replica=None) for m in loaded if m.replica),
        measurements=loaded,
    )


def with_shared(curves: Iterable[Curve], shared: Sequence[ReplicaPoint]) -> list[Curve]:
    """Return the curves, each with the replicas of its engine on the same kind of host with the same requests."""
    found: dict[Any, list[ReplicaPoint]] = {}
    for point in shared:
        if len(point.families) == 1:
            family = *point.families, point.environment.per_gpu_key, point.workload, point.ramp_up
            found.setdefault((family, point.tensor_parallel_size), []).append(point)
    keys = ((curve, curve.family, curve.spec and curve.spec.tensor_parallel_size) for curve in curves)
    return [replace(curve, shared=tuple(found.get((family, gpus), ()))) for curve, family, gpus in keys]


def with_compared(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves, with `warmer` and `structured` filled in."""

    def others(alike: Callable[[Curve], object], value: Callable[[Curve], Any]) -> dict[int, tuple[Curve, ...]]:
        groups = (sorted(group, key=value) if len(group) > 1 else group for group in grouped(curves, alike).values())
        return {id(least): tuple(rest) for least, *rest in groups}

    def series(curve: Curve, spec: EngineSpec, requests: WorkloadSpec) -> object:
        assert curve.load and curve.environment
        return series_key(spec, repr(requests), curve.load, curve.environment)

    def of_prefixes(curve: Curve) -> object:
        if not (curve.spec and curve.load and curve.workload) or not curve.workload.spec.finds_prefixes:
            return id(curve)
        spec = replace(curve.spec.with_arguments([("enable_prefix_caching", True)]), prefix_caching=True)
        asked = curve.workload.spec
        return series(curve, spec, asked if asked.turns > 1 else replace(asked, prefix_share=0.0))

    def served(curve: Curve) -> tuple[bool, float]:
        caches = bool(curve.spec and curve.spec.caches_prefixes)
        return caches, (curve.workload and curve.workload.spec.prefix_share) or 0.0

    def of_formats(curve: Curve) -> object:
        if not (curve.spec and curve.load and curve.workload):
            return id(curve)
        return series(curve, curve.spec, replace(curve.workload.spec, response_format=""))

    def output(curve: Curve) -> str:
        return curve.workload.spec.response_format if curve.workload else ""

    warmer, beside = others(of_prefixes, served), others(of_formats, output)
    free = {id(curve): beside.get(id(curve), ()) for curve in curves if not output(curve)}
    return [replace(c, warmer=warmer.get(id(c), ()), structured=free.get(id(c), ())) for c in curves]


def with_plain(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves, with `plain` filled in for engines with speculative decoding."""

    def alike(curve: Curve) -> object:
        if not (curve.first and curve.load):
            return id(curve)
        return series_key(curve.first.spec.plain, curve.first.workload.hash, curve.load, curve.first.environment)

    plain = {alike(curve): curve for curve in curves if not (curve.spec and curve.spec.speculation)}
    return [replace(c, plain=plain.get(alike(c)) if c.spec and c.spec.speculation else None) for c in curves]


def with_jobs(curves: Iterable[Curve], jobs: Sequence[JobPoint]) -> list[Curve]:
    """Return the curves with the jobs of their models, and a curve for each model that has only jobs."""
    known = list(curves)
    alone = dict.fromkeys(job.model for job in jobs if job.model not in {curve.subject for curve in known})
    return [
        replace(curve, jobs=tuple(job for job in jobs if job.model == curve.subject))
        for curve in (*known, *(Curve(subject=model) for model in alone))
    ]


def is_sweep(curve: Curve) -> bool:
    """Return whether a curve was planned or measured at enough loads to have a shape."""
    return curve.adaptive or len(curve.points) + len(curve.cut) + len(curve.missing) >= FEWEST_POINTS


def is_main_sweep(curve: Curve) -> bool:
    """Return whether a curve is a sweep that its run planned."""
    return is_sweep(curve) and not curve.beside


def obstacle(curve: Curve, reads: Callable[[int], bool] = lambda load: True) -> str | None:
    """Return the reason why no verdict on this curve is possible yet, or None.

    Args:
        reads: whether the verdict depends on a load.
    """
    missing = [load for load in curve.missing if curve.adaptive or reads(load)]
    invalid = [p for p in curve.points if not p.valid and reads(p.concurrency)]
    if missing:
        return f"not measured at {curve.axes.at(', '.join(map(str, missing)))}"
    if invalid:
        reason = "; ".join(invalid[0].problems) or "it has no valid repeat"
        return f"invalid at {curve.axes.at(', '.join(str(p.concurrency) for p in invalid))} ({reason})"
    if len(curve.valid) < FEWEST_POINTS:
        return f"{len(curve.valid)} valid points, {FEWEST_POINTS} are needed"
    if all(len(p.repeats) < 2 for p in curve.valid):
        return f"{NOISE_UNKNOWN}{'' if curve.axes.knob else '; --slm-repeats 2'}"
    return None


def to_know_noise(verdict: Verdict, curve: Curve) -> Verdict:
    """Return the verdict. If only the noise is unknown, add the loads whose second repeats would show it.

    The smallest loads show the GPU's noise for all others (tests/nightly/statistics/test_archives.py) and are the
    fastest. A plateau needs the noise of the largest loads.
    """
    if not verdict.why.startswith(NOISE_UNKNOWN):
        return verdict
    smallest = [p.concurrency for p in curve.valid[:QUICKEST]]
    loads = _largest_two(curve) if verdict.claim in (PLATEAU, LATENCY, PARETO) else smallest
    return replace(verdict, again=tuple(loads), more_repeats=1)


def _undecided(claim: str, curve: Curve, reason: str, threshold: float) -> Verdict:
    verdict = Verdict.inconclusive(claim, curve.subject, reason + sparsely(curve), threshold, *curve.valid)
    return to_know_noise(verdict, curve)


def _knee(
    curve: Curve, tolerance: float, reads: Callable[[int, int], bool], otherwise: int | None = None
) -> tuple[int | None, str]:
    """Return the concurrency where the plateau begins, or None and the reason why no verdict is possible."""
    knee = curve.plateau(tolerance).value
    if knee is None:
        if reason := obstacle(curve):
            return None, reason
        return otherwise, "" if otherwise else f"no plateau within the points measured (threshold {percent(tolerance)})"
    last = _largest_two(curve)
    reason = obstacle(curve, lambda load: reads(load, knee) or load in last)
    return (None, reason) if reason else (knee, "")


def _lower(seen: Interval) -> str:
    ends = "" if seen.low is None or seen.high is None else f", 95%: {1 + seen.low:.3g} to {1 + seen.high:.3g}"
    return f"{percent(-seen.value)} lower ({1 + seen.value:.3g} times{ends})"


# The last doubling, measured or not, decides whether there is a plateau.
def _largest_two(curve: Curve) -> list[int]:
    return sorted({*curve.missing, *(p.concurrency for p in curve.points)})[-2:]


def _verdict(
    claim: str, curve: Curve, state: State, why: str, seen: Interval, threshold: float, loads: tuple[int, ...]
) -> Verdict:
    # The noise of the host changes slowly, so a few repeats of two loads may agree by chance.
    repeated = sum(len(p.repeats) > 1 for p in curve.valid)
    by_chance = claim != GPU_PLATEAU and len(curve.looks) > 1 and not curve.adaptive and repeated < FEWEST_POINTS
    if by_chance:
        state, why = State.INCONCLUSIVE, f"{why}; {repeated} loads have a second repeat, {FEWEST_POINTS} are needed"
    why += sparsely(curve)
    verdict = Verdict.from_interval(claim, curve.subject, state, why, seen, threshold, *curve.valid)
    if not by_chance:
        return with_remedy(verdict, curve, loads)
    mode = f"{curve.environment.mode} " if curve.environment else ""
    return replace(verdict, remedy=f"{mode}--slm-resume --slm-repeats 2 tells the noise of the host")


def with_remedy(verdict: Verdict, curve: Curve, loads: tuple[int, ...]) -> Verdict:
    """Return the verdict. If it is inconclusive, add the repeats and the time that would resolve it.

    The width of the interval falls with the square root of the repeats. External results get no time estimate.

    Args:
        loads: loads on which the verdict depends most.
    """
    value, low, high, threshold = verdict.value, verdict.low, verdict.high, verdict.threshold
    if verdict.state is not State.INCONCLUSIVE or value is None or threshold is None:
        return verdict
    points = [p for p in curve.valid if p.concurrency in loads]
    there, where = min(len(p.repeats) for p in points), curve.axes.at(" and ".join(map(str, loads)))
    remedy, more = f"more repeats at {where}", None
    if low is not None and high is not None:
        certainty = t_above(curve.tail_of(there), max(1, sum(len(p.repeats) - 1 for p in curve.valid)))
        # Repeats do not reduce the uncertainty of clocks. Only its part towards the threshold matters.
        fixed = plateau.clocks_apart(points[0], points[-1]) if verdict.claim == GPU_PLATEAU else 0.0
        towards = max(0.0, fixed if value < threshold else -fixed)
        reach = (high - low - abs(fixed)) / 2 * SURE / certainty
        distance = max(0.0, abs(value - threshold) - towards)
        if distance > 0 and distance * MOST_REPEATS**0.5 >= reach * there**0.5:
            more = max(1, math.ceil(there * (reach / distance) ** 2) - there)
        else:
            remedy = f"at {where} it is too near to its threshold for {MOST_REPEATS} repeats to tell"
    if more and curve.load and curve.environment:
        starts = [each.ready_s for each in curve.resolved if each.ready_s is not None]
        seconds = fmean(starts or [0.0]) + more * sum(curve.load.duration_s(fmean(p.e2e_repeats)) for p in points)
        start = ", with an engine start," if starts else ""
        remedy = f"about {seconds:.0f} s more at {where}{start} would decide: {curve.environment.mode} --slm-resume"
    if curve.unneeded:
        remedy = "--slm-sweep full with --slm-resume measures the rest"
    return replace(verdict, again=loads, more_repeats=more, remedy=remedy)


def sparsely(curve: Curve) -> str:
    """Return a clause with the measured loads if an adaptive sweep skipped any."""
    if not curve.unneeded:
        return ""
    return f" (adaptive sweep: judged at concurrency {', '.join(str(p.concurrency) for p in curve.valid)})"


# Fields of an engine's specification that a label names elsewhere, or that do not change a measurement.
NAMED_APART = ("model", "platform", "interface", "url", "tensor_parallel_size", "gpu", "python", "env", "extra")


def labels(curves: Sequence[Curve]) -> list[str]:
    """Return the subject of each curve, with the facts and settings that distinguish curves of the same subject.

    If the settings have the same text, the label contains their hash.
    """
    found = []
    for curve in curves:
        alike = [other for other in curves if other.subject == curve.subject]
        rivals, own, first = list(map(_facts, alike)), _facts(curve), curve.first
        words = [fact for i, fact in enumerate(own) if any(rival[i : i + 1] != [fact] for rival in rivals)]
        if first is not None:
            measured = [other.first for other in alike if other.first]
            for mine, *theirs in zip(_settings(first, first), *(_settings(other, first) for other in measured)):
                (settings, of_all), others = mine, [each for each, _ in theirs]
                if all(its == of_all for _, its in theirs):
                    continue
                differ = [text for name, text in settings.items() if any(each.get(name) != text for each in others)]
                elsewhere = dict.fromkeys(name for each in others for name in each if name not in settings)
                words += [*differ, *(f"{name} unset" for name in elsewhere)] or [of_all]
        found.append(", ".join([curve.subject, *words]))
    return found


def _facts(curve: Curve) -> list[str]:
    first, load = curve.first, curve.load
    if first is None or load is None:
        return []
    where = first.environment
    return [
        f"{first.spec.interface} interface{front_ends(first.spec)}",
        f"TP {first.spec.tensor_parallel_size}",
        f"ramp-up {load.ramp_up}",
        f"window {load.window_s:g} s",
        f"warm-up {load.settle_lifetimes:g}",
        where.url or where.gpu_name or where.cpu or "unknown device",
        f"vLLM {where.vllm or '-'}",
    ]


_Named = tuple[dict[str, str], str]  # settings for a label, and a hash for the case that they are the same


def _settings(measured: Measurement, like: Measurement) -> tuple[_Named, _Named]:
    """Return the settings of the requests and of the engine, in vLLM's words, without the facts of `_facts`."""
    requests, spec = workload_facts(measured.workload.spec) | {"kind": measured.workload.spec.kind}, measured.spec
    adapters = measured.workload.spec.adapters
    requests["lora"] = f"{adapters.words} {adapters.traffic}" if adapters else ""
    requests["output"] = measured.workload.spec.output
    for name in ("adapters", "response_format"):  # shown as "lora" and "output"
        requests.pop(name, None)
    if spec.tensor_parallel_size != like.spec.tensor_parallel_size:  # the number of GPUs distinguishes them already
        spec = replace(spec, kv_cache_bytes=like.spec.kv_cache_bytes)
    spec = replace(spec.without_http if spec.interface == "server" else spec, tensor_parallel_size=1)
    prompt, output = requests.pop("prompt_tokens"), requests.pop("output_tokens")
    engine = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in NAMED_APART}
    arguments = {name: value for name, value in spec.arguments.items() if name != SPECULATIVE} | {"drafts": spec.drafts}
    of_requests = {"lengths": f"{prompt or 'natural'}/{output} tokens" if output else "natural lengths"}
    of_engine: dict[str, str] = {}
    for named, values in ((of_requests, requests), (of_engine, engine | dict(spec.env) | arguments)):
        for name, value in values.items():
            plain = isinstance(value, bool) or value == ""
            named[name] = (name if value else f"no {name}") if plain else f"{name} {value}"
    given = f"{spec.kv_cache_bytes / GIB:.6g} GiB" if spec.kv_cache_bytes else "as vLLM has it"
    of_engine["kv_cache_bytes"] = f"KV cache {given}"
    return (of_requests, f"workload {measured.workload.hash[:6]}"), (of_engine, f"engine {spec.key[:6]}")


def front_ends(spec: EngineSpec | None) -> str:
    """Return a clause such as " with 4 front ends", or "" for one."""
    return f" with {spec.front_ends} front ends" if spec and spec.front_ends > 1 else ""
