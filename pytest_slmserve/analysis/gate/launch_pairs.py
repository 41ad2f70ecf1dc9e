"""Gate computed from its records: pairs of launches, the endpoints that are compared, and the outcome.

A launch, which is a fresh start of an engine, is the unit that is repeated, because its effects (memory layout, choices
of the compiler, heat of the card) would otherwise look like a difference between the sides.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter
from statistics import fmean, median
from typing import Any, get_args

from pytest_slmserve.analysis.estimates import Interval, ends, grouped, possible, student_interval
from pytest_slmserve.analysis.gate.decision import Better, Comparison, GateCriteria, PairSeries, compare_sides, gate
from pytest_slmserve.analysis.gate.side_by_side import Allowance
from pytest_slmserve.analysis.metrics.gpu_figures import most_memory_used
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import Summary, summarize
from pytest_slmserve.analysis.verdict import State, Verdict, all_of, below
from pytest_slmserve.schema.errors import Caches, Side
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

SIDES: tuple[Side, Side] = get_args(Side)
START_MARGIN = 0.15  # a start consists of imports and compilation, and serves no request
BLOCKS_MARGIN = 0.01  # of KV blocks: on a GPU, engines of one release differ by one or two in thousands at most
MEMORY_MARGIN = 0.01  # of the device's memory in use, but at least MEMORY_GRAIN, because
MEMORY_GRAIN = 256 << 20  # torch's allocator takes segments of 20 MiB or more, and each captured graph a pool
OUTPUTS_MARGIN = 0.05  # nats per token: bfloat16 for float32 changes 0.013, and a wrong engine more (docs/results.md)

Outputs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Differs:
    """First token that differs, by its request and position, both from 1. A side that ended has None."""

    request: int
    position: int
    baseline: int | None
    candidate: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """Comparison of the greedy tokens of both sides, for information.

    With the same weights, the tokens are the same unless roundings differ (another kernel, another order of sums). With
    dummy weights, all tokens are nearly as likely.

    Attributes:
        tokens: largest number of tokens of a request.
        same: number of requests with equal tokens.
        steady: whether all launches of each side agree.
    """

    requests: int
    tokens: int
    same: int
    steady: bool
    differs: Differs | None


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of one side's engine, measured at each load in ascending order.

    In a gate of the start, it has only the measurements of the side's launches in a pair.

    Attributes:
        figures: at each load, of its measurement or its windows.
        problems: why a measurement is invalid or degraded.
        outputs: greedy tokens of each request, if requested.
        scores: mean log probability of the baseline's tokens of each request, if requested.
    """

    measurements: tuple[Measurement, ...]
    figures: tuple[tuple[Summary, ...], ...]
    problems: tuple[str, ...]
    outputs: Outputs
    scores: tuple[float, ...]

    @property
    def at_each_load(self) -> tuple[Measurement, ...]:
        """First measurement at each load."""
        return tuple({m.load: m for m in reversed(self.measurements)}.values())[::-1]

    def with_caches(self, caches: Caches | None) -> list[Measurement]:
        """Return the measurements with this state of the compile caches; None: with any."""
        return [m for m in self.measurements if not caches or (m.paired and m.paired.caches == caches)]


@dataclass(frozen=True, slots=True)
class PairOfLaunches:
    """Launches of the baseline and the candidate, next to each other in time or together."""

    number: int
    baseline: Launch
    candidate: Launch

    @property
    def launches(self) -> tuple[Launch, Launch]:
        return self.baseline, self.candidate

    def launch(self, side: Side) -> Launch:
        return self.baseline if side == "baseline" else self.candidate


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Quantity by which the sides are compared.

    Attributes:
        figure: name in `Summary` or `GateLaunch`, or "first_token_s"; empty for the seconds to start.
        load: index of the load in a launch; None if the start is measured.
        margin: None for the margin of the gate.
        caches: state of the compile caches at the start; None for any.
    """

    label: str
    better: Better
    figure: str = ""
    load: int | None = None
    margin: float | None = None
    caches: Caches | None = None

    def label_in(self, pairs: Sequence[PairOfLaunches]) -> str:
        """Return the label, without the load if there is only one."""
        return self.label if self.load is None or not has_one_load(pairs) else self.label.partition(",")[0]

    def read(self, launch: Launch) -> list[float | None]:
        """Return the values of one launch, one per window at the load; None if not measured."""
        if self.load is not None:
            return [getattr(figures, self.figure) for figures in launch.figures[self.load]]
        found = launch.with_caches(self.caches)
        seconds: list[float | None] = [m.resolved.ready_s for m in found[:1]]
        if self.figure == "first_token_s":
            samples = [m.run.samples for m in found[:1]]
            seconds = [
                first and first - sent for each in samples for sent, first in zip(each.sent_s, each.first_token_s)
            ]
        elif self.figure:
            naps = [nap for m in found for nap in getattr(m.paired, self.figure)]
            seconds = [median(naps)] if naps else []
        return seconds or [None]


SMALL, LARGE = 0, -1
GATED = {
    "throughput": Endpoint("output tokens/s, large load", "higher", "output_tokens_per_s", LARGE),
    "latency": Endpoint("mean E2E, small load", "lower", "e2e_s", SMALL),
    "energy": Endpoint("J per output token, large load", "lower", "energy_per_token_j", LARGE),
    "start": Endpoint("s to start", "lower", margin=START_MARGIN),
}
BUSY = Endpoint("tokens per busy second, large load", "higher", "tokens_per_busy_s", LARGE)
SHARE = Endpoint("share of time with a kernel, large load", "higher", "engine_active", LARGE)
CORES = Endpoint("own cores, large load", "lower", "own_cores", LARGE)
TOGETHER = {  # of sides that share one GPU
    "throughput": GATED["throughput"],
    "busy": BUSY,
    "latency": GATED["latency"],
    "busy-small": replace(BUSY, label="tokens per busy second, small load", load=SMALL),
}
STARTS = {  # of a gate of the start
    "start": Endpoint("s to start, warm caches", "lower", margin=START_MARGIN, caches="warm"),
    "start-cold": Endpoint("s to start, cold caches", "lower", margin=START_MARGIN, caches="cold"),
    "wake": Endpoint("s to wake", "lower", "wake_s", margin=START_MARGIN),
}
SHOWN_OF_STARTS = (
    Endpoint("s to sleep", "lower", "sleep_s"),
    Endpoint("s to the first token, warm caches", "lower", "first_token_s", caches="warm"),
    Endpoint("s to the first token, cold caches", "lower", "first_token_s", caches="cold"),
)
SHOWN_TOGETHER = (SHARE, replace(SHARE, label="share of time with a kernel, small load", load=SMALL), CORES)
SHOWN = (
    BUSY,
    SHARE,
    CORES,
    Endpoint("mean TTFT, large load", "lower", "ttft_s", LARGE),
    Endpoint("mean TPOT, large load", "lower", "tpot_s", LARGE),
    Endpoint("p99 E2E, large load", "lower", "e2e_p99_s", LARGE),
    Endpoint("output tokens/s, small load", "higher", "output_tokens_per_s", SMALL),
    Endpoint("mean TTFT, small load", "lower", "ttft_s", SMALL),
)
BLOCKS, MEMORY = "kv-blocks", "memory"
EXACT = {BLOCKS: "KV blocks", MEMORY: "device memory"}  # labels of quantities that rarely differ between launches
OUTPUTS = "outputs"  # only with real weights, because outputs of dummy weights mean nothing
ENDPOINTS = (*GATED, *EXACT, OUTPUTS)
EVERY_ENDPOINT = tuple(dict.fromkeys((*TOGETHER, *ENDPOINTS, *STARTS)))


@dataclass(frozen=True, slots=True)
class Gated:
    """Result of a gate for one model.

    Attributes:
        dropped: why other pairs or windows do not count.
        gated, shown: comparisons that are evaluated, and only reported.
        exact: verdicts on KV blocks, device memory and outputs, if this kind of gate has them.
        lost: side whose measurements alone excluded all pairs, if there is one.
        refused: why endpoints cannot be evaluated if the sides share the GPU. Those not in `gated` are left to the
            tokens per busy second of the same load.
        allowances: assumed variation between launches if the sides share the GPU.
        calibrated: whether the measured noise of this host was considered.
        firsts: an early measurement of each side, whether or not it counts.
    """

    model: str
    gate: str
    terms: GateCriteria
    pairs: tuple[PairOfLaunches, ...]
    dropped: tuple[str, ...]
    gated: tuple[Comparison, ...]
    shown: tuple[Comparison, ...]
    exact: tuple[Verdict, ...]
    caches: Caches = "warm"
    lost: Side | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    calibrated: bool = False
    firsts: Mapping[Side, Measurement] = field(default_factory=dict)

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """Endpoints of this kind of gate, without the exact ones."""
        return {"together": TOGETHER, "apart": GATED, "start": STARTS}[self.terms.launches]

    @property
    def states(self) -> tuple[Caches, ...]:
        """States of the compile caches, in the order of launching."""
        return states_of(self.pairs) or (self.caches,)

    @property
    def windows(self) -> tuple[int, ...]:
        """Number of window pairs at each load of each launch, if the sides run together."""
        launches = self.pairs if self.terms.together else ()
        return tuple(len(windows) for pair in launches for windows in pair.baseline.figures)

    @property
    def compared(self) -> tuple[Comparison, ...]:
        """All comparisons, the gated ones first."""
        return *self.gated, *self.shown

    @property
    def answers(self) -> Answers | None:
        """Comparison of greedy tokens, if they were requested."""
        return compare_outputs(*([pair.launch(side).outputs for pair in self.pairs] for side in SIDES))

    @property
    def outcome(self) -> State:
        """Combined outcome of the gated comparisons and the exact verdicts."""
        return all_of([*(each.outcome for each in self.gated), *(each.state for each in self.exact)])

    @property
    def settled(self) -> bool:
        """Whether more pairs cannot change the outcome."""
        open_ones = [each for each in self.gated if each.outcome is State.INCONCLUSIVE]
        # More launches may show that an endpoint, which is refused, only seems worse.
        more = len(self.pairs) < self.terms.pairs and any(each.name not in self.refused for each in self.gated)
        waiting = [
            each
            for each in open_ones
            if each.n == len(self.pairs)
            and not each.decided_at
            and (each.name not in self.refused or (more and each.seems_worse))
        ]
        unsure = self.unsure_of_memory and len(self.pairs) < self.terms.pairs
        return bool(self.gated) and (not (waiting or unsure) or self.outcome is State.FAILS)

    @property
    def unsure_of_memory(self) -> bool:
        """Whether launches differ too much for a verdict on KV blocks or device memory, which more pairs may give."""
        return any(
            each.claim in EXACT and each.state is State.INCONCLUSIVE and each.value is not None for each in self.exact
        )

    @property
    def slow_load(self) -> int | None:
        """Place of the load of the first endpoint that fails; None if no endpoint of a load does."""
        verdicts = ((each.load, self.verdict(name)) for name, each in self.endpoints.items())
        slow = (load for load, seen in verdicts if seen is not None and seen.state is State.FAILS)
        return next((load for load in slow if load is not None), None)

    def verdict(self, endpoint: str) -> Verdict | None:
        """Return the verdict on an endpoint, inconclusive if no pair counts, or None if the pairs have no value.

        Raises:
            KeyError: if the endpoint is unknown.
        """
        if endpoint == OUTPUTS or endpoint in EXACT:
            return next((each for each in self.exact if each.claim == endpoint), None)
        asked = self.endpoints[endpoint]
        label = asked.label_in(self.pairs)
        claim = f"no-worse-{endpoint}"
        if not self.pairs:
            return Verdict.inconclusive(claim, self.model, nothing_counts(self.dropped, self.lost))
        found = next((each for each in self.gated if each.name == label), None)
        of_another_load = self.terms.together and asked.load == SMALL and has_one_load(self.pairs)
        if found is None or of_another_load:
            return None
        value, low, high = astuple(found.ratio) if found.ratio else (None, None, None)
        records = tuple(m.id for pair in self.pairs for launch in pair.launches for m in launch.measurements)
        why = f"{found.name}: {found.why}"
        return Verdict(claim, self.model, found.outcome, why, value, low, high, found.margin, found.n, records)

    def left_out(self, endpoint: str) -> str:
        """Return why an endpoint has no verdict: it was refused, or not measured."""
        name = self.endpoints[endpoint].label_in(self.pairs) if endpoint in self.endpoints else ""
        return self.refused.get(name, f"no launch told its {endpoint}")

    def measurements(self, side: Side, caches: Caches | None = None) -> list[Measurement]:
        """Return the measurements of one side in the pairs that count."""
        return [m for pair in self.pairs for m in pair.launch(side).with_caches(caches)]


def states_of(pairs: Sequence[PairOfLaunches]) -> tuple[Caches, ...]:
    return tuple(dict.fromkeys(m.paired.caches for pair in pairs for m in pair.baseline.measurements if m.paired))


def has_one_load(pairs: Sequence[PairOfLaunches]) -> bool:
    return all(len(launch.figures) == 1 for pair in pairs for launch in pair.launches)


def nothing_counts(dropped: Sequence[str], lost: Side | None) -> str:
    """Return a clause for a gate without pairs, with the first reason in `dropped`."""
    alone = f"in each of them measurements of the {lost}, and none of the other side, are left out"
    return "; ".join(["no pair of launches counts", *([alone] if lost else []), *dropped[:1]])


def pairs_of(measurements: Iterable[Measurement]) -> tuple[PairOfLaunches, ...]:
    """Return the complete pairs of one gate, ascending, with the last launch of each side if a pair was repeated."""
    found = []
    in_time = sorted(measurements, key=attrgetter("measured_at"))
    for number, members in sorted(grouped(in_time, attrgetter("paired.pair")).items()):
        launches = {}
        for group in grouped(members, attrgetter("launch")).values():
            # The last measurement of a load counts, because an earlier one was not valid or too short.
            last = {m.load.max_concurrency: m for m in group}
            ascending = sorted(last.values(), key=lambda m: m.load.max_concurrency or 0)
            paired = [m.paired for m in ascending if m.paired]
            launches[paired[0].side] = Launch(
                measurements=tuple(ascending),
                figures=tuple((summarize(m),) for m in ascending),
                problems=tuple(text for m in ascending for texts in check(m)[:2] for text in texts),
                outputs=next((each.outputs for each in paired if each.outputs), ()),
                scores=next((each.scores for each in paired if each.scores), ()),
            )
        if set(launches) == set(SIDES):
            found.append(PairOfLaunches(number, launches["baseline"], launches["candidate"]))
    loads = max((len(launch.measurements) for pair in found for launch in pair.launches), default=0)
    return tuple(pair for pair in found if all(len(launch.measurements) == loads for launch in pair.launches))


def judge_gate(measurements: Sequence[Measurement], criteria: GateCriteria) -> Gated:
    """Return the result of a gate whose sides were launched one after the other.

    A pair with an invalid or degraded measurement does not count.
    """
    everything, first = pairs_of(measurements), measurements[0]
    problems = {p.number: [(side, text) for side in SIDES for text in p.launch(side).problems] for p in everything}
    pairs = tuple(pair for pair in everything if not problems[pair.number])
    dropped = tuple("pair {}: {}: {}".format(number, *found[0]) for number, found in problems.items() if found)
    wrong = [{side for side, _ in found} for found in problems.values()]
    lost = next((side for side in SIDES if wrong and all(sides == {side} for sides in wrong)), None)
    series, shown = (series_of(endpoints, pairs, criteria.margin) for endpoints in (GATED.values(), SHOWN))
    model = short_name(first.spec.model)
    return Gated(
        model=model,
        gate=first.paired.gate if first.paired else "",
        terms=criteria,
        pairs=pairs,
        dropped=dropped,
        gated=gate(series, criteria) if series else (),
        shown=tuple(compare_sides(each, criteria) for each in shown),
        exact=(
            *exact_verdicts(model, pairs, criteria, nothing_counts(dropped, lost)),
            *outputs_kept(first, everything),
        ),
        caches=first.paired.caches if first.paired else "warm",
        lost=lost,
        firsts=firsts_of(measurements),
    )


def firsts_of(measurements: Sequence[Measurement]) -> dict[Side, Measurement]:
    """Return the first measurement of each side."""
    return {m.paired.side: m for m in reversed(measurements) if m.paired}


def series_of(endpoints: Iterable[Endpoint], pairs: Sequence[PairOfLaunches], margin: float) -> list[PairSeries]:
    """Return the series of the endpoints with a measured value.

    A single load is both the small and the large one, but figures that are only reported appear once.
    """
    found, one_load = [], has_one_load(pairs)
    for each in endpoints:
        if one_load and each in SHOWN and each.load == SMALL:
            continue
        values = [(each.read(pair.baseline)[0], each.read(pair.candidate)[0]) for pair in pairs]
        if any(value is not None for pair_values in values for value in pair_values):
            found.append(PairSeries(each.label_in(pairs), each.better, tuple(values), each.margin or margin))
    return found


def exact_verdicts(
    model: str, pairs: Sequence[PairOfLaunches], criteria: GateCriteria, nothing: str
) -> Iterator[Verdict]:
    """Yield the verdicts on KV blocks and device memory, each with the state of the compile caches that is worst.

    A missing value is inconclusive. If all are missing, there is no verdict on the memory, because not every device has
    sensors.
    """
    states = states_of(pairs)
    for name, label in EXACT.items():
        if not pairs:
            yield Verdict.inconclusive(name, model, nothing)
            continue
        seen = [[(extreme(name, p.baseline, how), extreme(name, p.candidate, how)) for p in pairs] for how in states]
        values = [value for each in seen for pair in each for value in pair]
        if None not in values:
            found = [memory_verdict(name, model, each, criteria) for each in seen]
            place = [each.state for each in found].index(all_of(each.state for each in found))
            differ = len({each.why for each in found}) > 1
            of = f", with {states[place]} caches" if differ else ""
            yield replace(found[place], why=f"{found[place].why}{of}")
        elif name == BLOCKS or any(value is not None for value in values):
            missing = f"not every launch told its {label}: what is missing never passes"
            yield Verdict.inconclusive(name, model, missing)


def extreme(name: str, launch: Launch, caches: Caches) -> Any:
    """Return the fewest KV blocks, or the most device memory, of a launch; None if a measurement lacks it."""
    own, blocks = launch.with_caches(caches), name == BLOCKS
    found: list[Any] = [m.resolved.kv_blocks if blocks else most_memory_used([m]) for m in own]
    return None if not found or None in found else (min if blocks else max)(found)


def memory_verdict(name: str, model: str, seen: Sequence[tuple[Any, Any]], criteria: GateCriteria) -> Verdict:
    """Return the verdict on the KV blocks, or the device memory, of pairs of launches.

    If all launches of the baseline are equal, the worst launch of the candidate decides. Otherwise chance may explain a
    difference, so the pairs are tested as those of an endpoint, which fails beyond half of its margin.
    """
    blocks, (had, has) = name == BLOCKS, zip(*seen)
    scatters = len(set(had)) > 1
    typical = fmean if scatters else min if blocks else max
    before, after = typical(had), typical(has)
    margin = BLOCKS_MARGIN if blocks else max(MEMORY_MARGIN, MEMORY_GRAIN / before)
    bound = (1 - margin if blocks else 1 + margin) * before
    is_worse = after < bound if blocks else after > bound
    state, ratio, means = State.FAILS if is_worse else State.PASSES, Interval(after / before), ""
    if scatters:
        (judged,) = gate([PairSeries(name, "higher" if blocks else "lower", tuple(seen), 2 * margin)], criteria)
        state, ratio = judged.outcome, judged.ratio or ratio
        means = f"means of {len(seen)} launches"
        means += "" if ratio.low is None or ratio.high is None else f", 95%: {ratio.low:.3f} to {ratio.high:.3f} times"
        means += ", which is not sure enough; " if state is State.INCONCLUSIVE else "; "
    if blocks:
        why = f"{after:,.0f} blocks where the baseline has {before:,.0f} ({means}margin: {100 * margin:g}% fewer)"
    else:
        was, used, most = (f"{value / GIB:.2f} GiB" for value in (before, after, bound))
        why = f"{used} in use where the baseline has {was} ({means}margin: up to {most})"
    return Verdict(name, model, state, why, ratio.value, ratio.low, ratio.high, bound / before, len(seen))


def outputs_kept(first: Measurement, pairs: Sequence[PairOfLaunches]) -> Iterator[Verdict]:
    """Yield the verdict on the log probability of the baseline's tokens in the candidate, or none with dummy weights.

    Its value is the mean change per request, in either direction. The limit is OUTPUTS_MARGIN plus the difference
    between launches of the baseline. The tokens of a pair count even if its measurements do not.
    """
    if first.spec.load_format == "dummy":
        return
    model = short_name(first.spec.model)
    both = [scores for p in pairs if all(scores := (p.baseline.scores, p.candidate.scores))]
    if not both:
        why = "no launch told how likely the baseline's tokens are"
        yield Verdict.inconclusive(OUTPUTS, model, why, OUTPUTS_MARGIN)
        return
    before, after = ([fmean(each) for each in zip(*side)] for side in zip(*both))
    seen = possible(student_interval([abs(b - a) for b, a in zip(before, after)]))
    scatter = max(fmean(abs(b - a) for b, a in zip(both[0][0], baseline)) for baseline, _ in both)
    bound = OUTPUTS_MARGIN + scatter
    answers = compare_outputs(*([p.launch(side).outputs for p in pairs] for side in SIDES))
    same = f"; {answers.same} of {answers.requests} answers are the same" if answers else ""
    low, high = ends(seen)
    why = (
        f"the log probability of the baseline's tokens changes by {seen.value:.3g} nats (95%: {low:.2g} to "
        f"{high:.2g}; margin {bound:.3g}, with {scatter:.2g} between launches of the baseline){same}"
    )
    yield Verdict.from_interval(OUTPUTS, model, below(seen, bound), why, seen, bound)


def compare_outputs(baseline: Sequence[Outputs], candidate: Sequence[Outputs]) -> Answers | None:
    """Return the comparison of the tokens of both sides' launches, or None if a side has none."""
    if not any(baseline) or not any(candidate):
        return None
    before, after = (next(filter(None, side)) for side in (baseline, candidate))
    steady = all(len(set(filter(None, side))) == 1 for side in (baseline, candidate))
    same = sum(one == other for one, other in zip(before, after))
    differing = (
        Differs(request, position, one, other)
        for request, pair in enumerate(zip_longest(before, after, fillvalue=()), 1)
        for position, (one, other) in enumerate(zip_longest(*pair), 1)
        if one != other
    )
    return Answers(len(before), max(map(len, before)), same, steady, next(differing, None))
