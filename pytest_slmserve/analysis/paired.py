"""A gate from its records: launches in pairs, what is compared of them, and the outcome.

The unit that is repeated is a launch, a fresh start of an engine: what differs between launches (memory layout, the
compiler's choices, the heat of the card) would else pass for a difference between the sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import get_args

from pytest_slmserve.analysis.gate import Better, Comparison, Outcome, Pair, Series, Terms, gate, overall, shown
from pytest_slmserve.analysis.outputs import Answers, Outputs, compare_outputs
from pytest_slmserve.analysis.summary import Summary, summarize
from pytest_slmserve.analysis.validity import standing
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.kinds import Side
from pytest_slmserve.models import short_name
from pytest_slmserve.records import Measurement

SIDES: tuple[Side, Side] = get_args(Side)
START_MARGIN = 0.15  # a start is imports and compilation, and nobody serves meanwhile
BLOCKS_MARGIN = 0.01  # of KV blocks: engines of one release differ by one or two in thousands
STATES = {Outcome.PASS: State.HOLDS, Outcome.FAIL: State.FAILS, Outcome.INCONCLUSIVE: State.UNDECIDED}


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
    def outputs(self) -> Outputs:
        """Of whichever measurement asked for them."""
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
    gate."""

    name: str
    label: str
    better: Better
    read: Callable[[Launch], float | None]
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Gated:
    """What a gate found for one model. pairs: those that count. dropped: why others do not, a sentence each. gated,
    shown: comparisons by endpoint; none of an endpoint of which nothing was measured. blocks: of the KV cache."""

    model: str
    gate: str
    terms: Terms
    pairs: tuple[PairOfLaunches, ...]
    dropped: tuple[str, ...]
    gated: tuple[Comparison, ...]
    shown: tuple[Comparison, ...]
    blocks: Verdict

    @property
    def answers(self) -> Answers | None:
        """Whether both sides give the same tokens; None where nobody asked them."""
        baseline, candidate = ([pair.launch(side).outputs for pair in self.pairs] for side in SIDES)
        return compare_outputs(baseline, candidate)

    @property
    def outcome(self) -> Outcome:
        """Of the comparisons, and of the KV blocks, which are no matter of chance."""
        exact = [outcome for outcome, state in STATES.items() if state is self.blocks.state]
        return overall([*(each.outcome for each in self.gated), *exact])

    @property
    def settled(self) -> bool:
        """Have more pairs nothing to decide? What is missing in one stays missing, and KV blocks that nobody reports
        stay unknown."""
        waiting = [each for each in self.gated if each.outcome is Outcome.INCONCLUSIVE and each.n == len(self.pairs)]
        return bool(self.gated) and (not waiting or self.outcome is Outcome.FAIL)

    def verdict(self, endpoint: str) -> Verdict | None:
        """For a test; None where the pairs that count tell nothing of it, undecided where no pair counts. Raises
        KeyError for an unknown endpoint."""
        if endpoint == BLOCKS:
            return self.blocks
        label = next((each.label for each in GATED if each.name == endpoint), None)
        if label is None:
            raise KeyError(endpoint)
        if not self.pairs:
            return Verdict(f"no-worse-{endpoint}", self.model, State.UNDECIDED, _nothing_counts(self.dropped))
        found = next((each for each in self.gated if each.name == label), None)
        return None if found is None else _verdict(self, endpoint, found)


def _read(name: str, which: int, launch: Launch) -> float | None:
    value: float | None = getattr(launch.figures[which], name)
    return value


def _start(launch: Launch) -> float | None:
    return launch.measurements[0].resolved.ready_s


SMALL, LARGE = 0, -1
BLOCKS = "kv-blocks"
GATED = (
    Endpoint("throughput", "output tokens/s, large load", "higher", partial(_read, "output_tokens_per_s", LARGE)),
    Endpoint("latency", "mean E2E, small load", "lower", partial(_read, "e2e_s", SMALL)),
    Endpoint("energy", "J per output token, large load", "lower", partial(_read, "energy_per_token_j", LARGE)),
    Endpoint("start", "s to start", "lower", _start, START_MARGIN),
)
SHOWN = (
    Endpoint("large-ttft", "mean TTFT, large load", "lower", partial(_read, "ttft_s", LARGE)),
    Endpoint("large-tpot", "mean TPOT, large load", "lower", partial(_read, "tpot_s", LARGE)),
    Endpoint("large-tail", "p99 E2E, large load", "lower", partial(_read, "e2e_p99_s", LARGE)),
    Endpoint("small-throughput", "output tokens/s, small load", "higher", partial(_read, "output_tokens_per_s", SMALL)),
    Endpoint("small-ttft", "mean TTFT, small load", "lower", partial(_read, "ttft_s", SMALL)),
)
ENDPOINTS = (*(each.name for each in GATED), BLOCKS)


def pairs_of(measurements: Iterable[Measurement]) -> tuple[PairOfLaunches, ...]:
    """Whole pairs of one gate, in the order of measuring; a launch that was broken off makes none."""
    found = []
    for number, members in groupby(sorted(measurements, key=_place), key=lambda m: _paired(m)[0]):
        launches = {launch.side: launch for launch in _launches(list(members))}
        if set(launches) == set(SIDES):
            found.append(PairOfLaunches(number, launches["baseline"], launches["candidate"]))
    loads = max((len(launch.measurements) for pair in found for launch in pair.launches), default=0)
    return tuple(pair for pair in found if all(len(launch.measurements) == loads for launch in pair.launches))


def _launches(members: Sequence[Measurement]) -> list[Launch]:
    """Of one pair. The last measurement of a load counts: the one before it could not be trusted."""
    found = []
    for _, group in groupby(sorted(members, key=lambda m: (m.launch, m.measured_at)), key=attrgetter("launch")):
        last = {m.load: m for m in group}
        ascending = sorted(last.values(), key=lambda m: getattr(m.load, "concurrency", 0))
        _, second, side = _paired(ascending[0])
        problems = tuple(text for m in ascending for texts in standing(m) for text in texts)
        found.append(Launch(side, second, tuple(ascending), tuple(map(summarize, ascending)), problems))
    return found


def _paired(measurement: Measurement) -> tuple[int, bool, Side]:
    assert measurement.paired is not None
    return measurement.paired.pair, measurement.paired.second, measurement.paired.side


def _place(measurement: Measurement) -> tuple[int, str]:
    return _paired(measurement)[0], measurement.launch


def judge_gate(measurements: Sequence[Measurement], terms: Terms) -> Gated:
    """From the records of one gate. A pair with a measurement that cannot be trusted does not count, and says why."""
    everything = pairs_of(measurements)
    pairs = tuple(pair for pair in everything if not pair.problems)
    dropped = tuple(f"pair {p.number}: {p.problems[0]}" for p in everything if p.problems)
    series = gated_series(pairs)
    beside = [made for each in SHOWN if (made := _series(each, pairs)) is not None]
    first = measurements[0]
    return Gated(
        model=short_name(first.spec.model),
        gate=first.paired.gate if first.paired else "",
        terms=terms,
        pairs=pairs,
        dropped=dropped,
        gated=gate(series, terms) if series else (),
        shown=tuple(shown(each, terms) for each in beside),
        blocks=_blocks(short_name(first.spec.model), pairs, dropped),
    )


def gated_series(pairs: Sequence[PairOfLaunches]) -> list[Series]:
    """Of the gated endpoints of which something was measured."""
    return [made for each in GATED if (made := _series(each, pairs)) is not None]


def _series(endpoint: Endpoint, pairs: Sequence[PairOfLaunches]) -> Series | None:
    """None where neither side has a value in any pair: no sensor, say."""
    values: tuple[Pair, ...] = tuple((endpoint.read(p.baseline), endpoint.read(p.candidate)) for p in pairs)
    if all(value is None for pair in values for value in pair):
        return None
    return Series(endpoint.label, endpoint.better, values, endpoint.margin)


def _nothing_counts(dropped: Sequence[str]) -> str:
    return "; ".join(["no pair of launches counts", *dropped[:1]])


def _blocks(model: str, pairs: Sequence[PairOfLaunches], dropped: Sequence[str]) -> Verdict:
    """No fewer KV blocks than before, but for one in a hundred: a number that every launch reports, without noise."""
    sides = [tuple(launch.measurements[0].resolved.kv_blocks for launch in pair.launches) for pair in pairs]
    known = [(before, after) for before, after in sides if before and after is not None]
    if not sides:
        return Verdict(BLOCKS, model, State.UNDECIDED, _nothing_counts(dropped))
    if not known or len(known) < len(sides):
        return Verdict(BLOCKS, model, State.UNDECIDED, "the engines did not report their KV blocks in every pair")
    before, after = min(known, key=lambda pair: pair[1] / pair[0])
    state = State.HOLDS if after >= (1 - BLOCKS_MARGIN) * before else State.FAILS
    why = f"{after:,} blocks where the baseline has {before:,} (bound: {100 * BLOCKS_MARGIN:g} % fewer)"
    return Verdict(BLOCKS, model, state, why, after / before, bound=1 - BLOCKS_MARGIN, n=len(known))


def _verdict(gated: Gated, endpoint: str, found: Comparison) -> Verdict:
    ratio = found.ratio
    records = tuple(m.id for pair in gated.pairs for launch in pair.launches for m in launch.measurements)
    return Verdict(
        claim=f"no-worse-{endpoint}",
        subject=gated.model,
        state=STATES[found.outcome],
        why=f"{found.name}: {found.why}",
        value=None if ratio is None else ratio.value,
        low=None if ratio is None else ratio.low,
        high=None if ratio is None else ratio.high,
        bound=found.margin,
        n=found.n,
        records=records,
    )
