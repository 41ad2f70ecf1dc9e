"""A gate from its records: launches in pairs, what is compared of them, and the outcome.

The unit that is repeated is a launch, a fresh start of an engine: what differs between launches (memory layout, the
compiler's choices, the heat of the card) would else pass for a difference between the sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from statistics import fmean
from typing import get_args

from pytest_slmserve.analysis.device.gpu_figures import most_memory_used
from pytest_slmserve.analysis.gate.decision import (
    Better,
    Calibration,
    Comparison,
    GateCriteria,
    Pair,
    PairSeries,
    gate,
    shown,
    weakened,
)
from pytest_slmserve.analysis.metrics.summary import Summary, summarize
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.stats.estimates import ends, grouped, possible, student_interval
from pytest_slmserve.analysis.verdict import State, Verdict, all_of, below
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import Caches, Side
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

SIDES: tuple[Side, Side] = get_args(Side)
START_MARGIN = 0.15  # a start is imports and compilation, and nobody serves meanwhile
BLOCKS_MARGIN = 0.01  # of KV blocks: engines of one release differ by one or two in thousands
MEMORY_MARGIN = 0.01  # of the device's memory in use, as of KV blocks; small engines are allowed a few hundred MiB:
OUTPUTS_MARGIN = 0.05  # nats a token: bfloat16 for float32 changes 0.013, wrong engines more (docs/gate-decision.md)
MEMORY_GRAIN = 256 << 20  # torch's allocator takes segments of 20 MiB and more, each captured graph a pool of them

Outputs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Differs:
    """The first token that differs: of which request (from 1), at which position (from 1), on each side."""

    request: int
    position: int
    baseline: int | None
    candidate: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """Whether both sides answer the same, which is told, not judged. With the same weights and prompts the likeliest
    token is the same unless roundings differ: another kernel, another order of sums. With dummy weights all tokens are
    nearly as likely. requests, tokens: how many of each were asked for. same: requests whose tokens are all the same.
    steady: launches of one side agree."""

    requests: int
    tokens: int
    same: int
    steady: bool
    differs: Differs | None


@dataclass(frozen=True, slots=True)
class Launch:
    """One fresh start of one side, measured at each load, ascending. figures: of each measurement. problems: why it
    cannot be trusted, what is invalid and what is degraded."""

    side: Side
    second: bool
    measurements: tuple[Measurement, ...]
    figures: tuple[Summary, ...]
    problems: tuple[str, ...]

    @property
    def scores(self) -> tuple[float, ...]:
        """Mean log probability of the baseline's tokens of each request; empty where nobody asked."""
        return next((m.paired.scores for m in self.measurements if m.paired and m.paired.scores), ())

    @property
    def outputs(self) -> Outputs:
        """Greedy output tokens of each request, from the first measurement that has them; empty where none requested
        them."""
        return next((m.paired.outputs for m in self.measurements if m.paired and m.paired.outputs), ())


@dataclass(frozen=True, slots=True)
class PairOfLaunches:
    """baseline and candidate, next to each other in time."""

    number: int
    baseline: Launch
    candidate: Launch

    def launch(self, side: Side) -> Launch:
        return self.baseline if side == "baseline" else self.candidate

    @property
    def launches(self) -> tuple[Launch, Launch]:
        return self.baseline, self.candidate

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.baseline.problems, *self.candidate.problems)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A quantity that sides are compared by. label: with its unit. read: from a launch. margin: its own, or that of the
    gate. load: which of a launch it is read at; None: at none."""

    name: str
    label: str
    better: Better
    read: Callable[[Launch], float | None]
    margin: float | None = None
    load: int | None = None


@dataclass(frozen=True, slots=True)
class Exact:
    """A quantity that is no matter of chance, judged by the worst pair. least: is there a least that the candidate must
    have, or a most that it may? bound: that value, from the baseline's. told: in words, of both and of the bound.
    needed: is a launch without a value a fault? Else a sensor told it, and not every device has one."""

    name: str
    label: str
    read: Callable[[Launch], float | None]
    least: bool
    bound: Callable[[float], float]
    told: Callable[[float, float, float], str]
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Gated:
    """Findings of a gate for one model. pairs: those that count. dropped: why others do not, a sentence each. gated,
    shown: comparisons by endpoint. exact: verdicts on quantities that are no matter of chance. Endpoints without any
    measured value are absent, except in `exact` where a value is needed or no pair counts."""

    model: str
    gate: str
    terms: GateCriteria
    pairs: tuple[PairOfLaunches, ...]
    dropped: tuple[str, ...]
    gated: tuple[Comparison, ...]
    shown: tuple[Comparison, ...]
    exact: tuple[Verdict, ...]
    caches: Caches = "warm"

    @property
    def answers(self) -> Answers | None:
        """Comparison of the greedy tokens of both sides; None where they were not requested."""
        baseline, candidate = ([pair.launch(side).outputs for pair in self.pairs] for side in SIDES)
        return compare_outputs(baseline, candidate)

    @property
    def outcome(self) -> State:
        """Combined outcome of the gated comparisons and of the verdicts on what is no matter of chance."""
        return all_of([*(each.outcome for each in self.gated), *(each.state for each in self.exact)])

    @property
    def settled(self) -> bool:
        """Have more pairs nothing to decide? What is missing in one stays missing, and what is no matter of
        chance stays unknown where it is."""
        waiting = [each for each in self.gated if each.outcome is State.INCONCLUSIVE and each.n == len(self.pairs)]
        return bool(self.gated) and (not waiting or self.outcome is State.FAILS)

    @property
    def failing_load(self) -> Load | None:
        """Load of the first failing endpoint that is read at a load; None where no such endpoint fails."""
        failed = {each.name for each in self.gated if each.outcome is State.FAILS}
        loads = (each.load for each in GATED if each.load is not None and _label(each, self.pairs) in failed)
        which = next(loads, None)
        return None if which is None else self.pairs[0].baseline.measurements[which].load

    def verdict(self, endpoint: str) -> Verdict | None:
        """Verdict on an endpoint, for a test. None where the pairs that count have no value of it; inconclusive where
        no pair counts. Raises KeyError for an unknown endpoint."""
        if endpoint == OUTPUTS or endpoint in (each.name for each in EXACT):
            return next((each for each in self.exact if each.claim == endpoint), None)
        of = {each.name: each for each in GATED}[endpoint]
        if not self.pairs:
            return Verdict.inconclusive(f"no-worse-{endpoint}", self.model, nothing_counts(self.dropped))
        found = next((each for each in self.gated if each.name == _label(of, self.pairs)), None)
        return None if found is None else _verdict(self, endpoint, found)


def _memory(launch: Launch) -> float | None:
    """Bytes of the device's memory in use at most, over all loads; None where one of them was not watched."""
    each = [most_memory_used([m]) for m in launch.measurements]
    return None if None in each else most_memory_used(launch.measurements)


def _of_load(name: str, label: str, better: Better, figure: str, which: int) -> Endpoint:
    return Endpoint(name, label, better, lambda launch: getattr(launch.figures[which], figure), load=which)


def _told_blocks(before: float, after: float, bound: float) -> str:
    return f"{after:,.0f} blocks where the baseline has {before:,.0f} (bound: {100 * BLOCKS_MARGIN:g} % fewer)"


def _told_memory(before: float, after: float, bound: float) -> str:
    had, used, most = (f"{value / GIB:.2f} GiB" for value in (before, after, bound))
    return f"{used} in use where the baseline has {had} (bound: {most})"


SMALL, LARGE = 0, -1
GATED = (
    _of_load("throughput", "output tokens/s, large load", "higher", "output_tokens_per_s", LARGE),
    _of_load("latency", "mean E2E, small load", "lower", "e2e_s", SMALL),
    _of_load("energy", "J per output token, large load", "lower", "energy_per_token_j", LARGE),
    Endpoint("start", "s to start", "lower", lambda launch: launch.measurements[0].resolved.ready_s, START_MARGIN),
)
SHOWN = (
    _of_load("large-ttft", "mean TTFT, large load", "lower", "ttft_s", LARGE),
    _of_load("large-tpot", "mean TPOT, large load", "lower", "tpot_s", LARGE),
    _of_load("large-tail", "p99 E2E, large load", "lower", "e2e_p99_s", LARGE),
    _of_load("small-throughput", "output tokens/s, small load", "higher", "output_tokens_per_s", SMALL),
    _of_load("small-ttft", "mean TTFT, small load", "lower", "ttft_s", SMALL),
)
BLOCKS, MEMORY = "kv-blocks", "memory"
EXACT = (
    Exact(
        BLOCKS,
        "KV blocks",
        lambda launch: launch.measurements[0].resolved.kv_blocks,
        least=True,
        bound=lambda before: (1 - BLOCKS_MARGIN) * before,
        told=_told_blocks,
        needed=True,
    ),
    Exact(
        MEMORY,
        "device memory",
        _memory,
        least=False,
        bound=lambda before: before + max(MEMORY_MARGIN * before, MEMORY_GRAIN),
        told=_told_memory,
    ),
)
OUTPUTS = "outputs"  # of real weights; those of dummy ones mean nothing
ENDPOINTS = (*(each.name for each in (*GATED, *EXACT)), OUTPUTS)


def pairs_of(measurements: Iterable[Measurement]) -> tuple[PairOfLaunches, ...]:
    """Whole pairs of one gate, in the order of measuring; a launch that was broken off makes none. Of a pair that was
    made again, since the first time was broken off, the last launch of each side counts."""
    found = []
    for number, members in sorted(grouped(measurements, attrgetter("paired.pair")).items()):
        launches = {launch.side: launch for launch in _launches(members)}
        if set(launches) == set(SIDES):
            found.append(PairOfLaunches(number, launches["baseline"], launches["candidate"]))
    loads = max((len(launch.measurements) for pair in found for launch in pair.launches), default=0)
    return tuple(pair for pair in found if all(len(launch.measurements) == loads for launch in pair.launches))


def _launches(members: Sequence[Measurement]) -> list[Launch]:
    """Launches of one pair, in the order of time. The last measurement of a load counts: the one before it could not be
    trusted."""
    found = []
    for group in grouped(sorted(members, key=attrgetter("measured_at")), lambda m: m.launch).values():
        last = {m.load: m for m in group}
        ascending = sorted(last.values(), key=lambda m: m.load.max_concurrency or 0)
        paired = ascending[0].paired
        assert paired
        problems = tuple(text for m in ascending for texts in check(m)[:2] for text in texts)
        found.append(Launch(paired.side, paired.second, tuple(ascending), tuple(map(summarize, ascending)), problems))
    return found


def judge_gate(measurements: Sequence[Measurement], terms: GateCriteria) -> Gated:
    """Findings of one gate from its records. A pair with an invalid or degraded measurement does not count; `dropped`
    has the reason."""
    everything = pairs_of(measurements)
    pairs = tuple(pair for pair in everything if not pair.problems)
    dropped = tuple(f"pair {p.number}: {p.problems[0]}" for p in everything if p.problems)
    series = gated_series(pairs)
    beside = shown_series(pairs)
    first = measurements[0]
    exact = (_exactly(each, first, pairs, dropped) for each in EXACT)
    return Gated(
        model=short_name(first.spec.model),
        gate=first.paired.gate if first.paired else "",
        terms=terms,
        pairs=pairs,
        dropped=dropped,
        gated=gate(series, terms) if series else (),
        shown=tuple(shown(each, terms) for each in beside),
        exact=tuple(verdict for verdict in (*exact, outputs_kept(first, everything)) if verdict is not None),
        caches=first.paired.caches if first.paired else "warm",
    )


def weaker(gated: Gated, calibration: Calibration) -> Gated:
    """The gate's findings in view of a runner's noise. A pass becomes inconclusive where the noise would mostly hide a
    worsening by the margin."""
    return replace(gated, gated=tuple(weakened(each, calibration) for each in gated.gated))


def gated_series(pairs: Sequence[PairOfLaunches]) -> list[PairSeries]:
    """Series of the gated endpoints of which something was measured."""
    return [made for each in GATED if (made := _series(each, pairs)) is not None]


def shown_series(pairs: Sequence[PairOfLaunches]) -> list[PairSeries]:
    """Series of the endpoints that are shown and not gated, without those of the small load where there is one load
    only. That load is the large one as well as the small, and once is enough."""
    endpoints = [each for each in SHOWN if each.load != SMALL or not _one_load(pairs)]
    return [made for each in endpoints if (made := _series(each, pairs)) is not None]


def _series(endpoint: Endpoint, pairs: Sequence[PairOfLaunches]) -> PairSeries | None:
    """Values of an endpoint in each pair; None where neither side has a value in any pair, as without a sensor."""
    values: tuple[Pair, ...] = tuple((endpoint.read(p.baseline), endpoint.read(p.candidate)) for p in pairs)
    if all(value is None for pair in values for value in pair):
        return None
    return PairSeries(_label(endpoint, pairs), endpoint.better, values, endpoint.margin)


def _label(endpoint: Endpoint, pairs: Sequence[PairOfLaunches]) -> str:
    """Label of an endpoint, without its load where there is one load only."""
    return endpoint.label.partition(",")[0] if _one_load(pairs) else endpoint.label


def _one_load(pairs: Sequence[PairOfLaunches]) -> bool:
    return all(len(launch.measurements) == 1 for pair in pairs for launch in pair.launches)


def nothing_counts(dropped: Sequence[str]) -> str:
    """A clause for a gate without pairs. dropped: why they do not count."""
    return "; ".join(["no pair of launches counts", *dropped[:1]])


def _exactly(
    endpoint: Exact, first: Measurement, pairs: Sequence[PairOfLaunches], dropped: Sequence[str]
) -> Verdict | None:
    """Verdict on an exact quantity by the worst pair. None where no launch has a value and none need have one.
    Inconclusive where no pair counts, or a value is missing."""
    inconclusive = partial(Verdict.inconclusive, endpoint.name, short_name(first.spec.model))
    seen = [(endpoint.read(pair.baseline), endpoint.read(pair.candidate)) for pair in pairs]
    known = [(before, after) for before, after in seen if before and after is not None]
    if not pairs:
        return inconclusive(nothing_counts(dropped))
    if len(known) < len(seen):
        nobody = all(value is None for pair in seen for value in pair)
        missing = f"not every launch told its {endpoint.label}: what is missing never passes"
        return None if nobody and not endpoint.needed else inconclusive(missing)
    return _worst(endpoint, short_name(first.spec.model), known)


def _worst(endpoint: Exact, model: str, known: Sequence[tuple[float, float]]) -> Verdict:
    """Verdict by the pair that leaves the least room to its bound; value and bound are ratios to the baseline."""
    sign = 1 if endpoint.least else -1
    before, after = min(known, key=lambda pair: sign * (pair[1] / endpoint.bound(pair[0])))
    bound = endpoint.bound(before)
    state = State.PASSES if sign * (after - bound) >= 0 else State.FAILS
    why = endpoint.told(before, after, bound)
    return Verdict(endpoint.name, model, state, why, after / before, threshold=bound / before, n=len(known))


def outputs_kept(first: Measurement, pairs: Sequence[PairOfLaunches]) -> Verdict | None:
    """Are the baseline's tokens as likely to the candidate as to a baseline, within OUTPUTS_MARGIN nats a token? The
    bound is wider by what launches of the baseline differ among themselves. None with dummy weights.

    value: the change of a request's mean log probability either way, in the mean over requests. Whatever the
    measurements of a pair are worth, its tokens count.
    """
    if first.spec.load_format == "dummy":
        return None
    model = short_name(first.spec.model)
    both = [scores for p in pairs if all(scores := (p.baseline.scores, p.candidate.scores))]
    if not both:
        return Verdict.inconclusive(
            OUTPUTS, model, "no launch told how likely the baseline's tokens are", OUTPUTS_MARGIN
        )
    before, after = ([fmean(each) for each in zip(*side)] for side in zip(*both))
    seen = possible(student_interval([abs(b - a) for b, a in zip(before, after)]))
    own = both[0][0]
    scatter = max(fmean(abs(b - a) for b, a in zip(own, baseline)) for baseline, _ in both)
    bound = OUTPUTS_MARGIN + scatter
    answers = compare_outputs(*([p.launch(side).outputs for p in pairs] for side in SIDES))
    same = f"; {answers.same} of {answers.requests} answers are the same" if answers else ""
    low, high = ends(seen)
    why = (
        f"the log probability of the baseline's tokens changes by {seen.value:.3g} nats (95 %: {low:.2g} to "
        f"{high:.2g}; bound {bound:.3g}, with {scatter:.2g} between launches of the baseline){same}"
    )
    return Verdict.from_interval(OUTPUTS, model, below(seen, bound), why, seen, bound)


def _verdict(gated: Gated, endpoint: str, found: Comparison) -> Verdict:
    value, low, high = astuple(found.ratio) if found.ratio else (None, None, None)
    records = tuple(m.id for pair in gated.pairs for launch in pair.launches for m in launch.measurements)
    claim, why = f"no-worse-{endpoint}", f"{found.name}: {found.why}"
    return Verdict(claim, gated.model, found.outcome, why, value, low, high, found.margin, found.n, records)


def compare_outputs(baseline: Sequence[Outputs], candidate: Sequence[Outputs]) -> Answers | None:
    """Comparison of the tokens from the launches of each side; None where one side was not requested to answer."""
    if not any(baseline) or not any(candidate):
        return None
    before, after = (next(filter(None, side)) for side in (baseline, candidate))
    steady = all(len(set(filter(None, side))) == 1 for side in (baseline, candidate))
    same = sum(one == other for one, other in zip(before, after))
    return Answers(len(before), max(map(len, before)), same, steady, first_difference(before, after))


def first_difference(baseline: Outputs, candidate: Outputs) -> Differs | None:
    for request, (before, after) in enumerate(zip_longest(baseline, candidate, fillvalue=()), 1):
        for position, (one, other) in enumerate(zip_longest(before, after), 1):
            if one != other:
                return Differs(request, position, one, other)
    return None
