"""Decision whether a candidate is slower than a baseline, from pairs of launches in the order they were measured.

Each pair gives the logarithm of a cost ratio, candidate over baseline, which is positive if the candidate is worse. At
each interim analysis, two one-sided tests of the mean are made:

- *fails*: the mean is above 0, and its estimate exceeds half of the margin. At most `alpha` of all gates of an
  unchanged candidate fail, for any number of endpoints (Holm 1979).
- *passes*: the mean is below the margin (non-inferiority, half of Schuirmann's two tests, 1987). All endpoints have to
  pass, so no correction is needed (Berger 1982).

Otherwise the endpoint is inconclusive. A missing value never passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations_with_replacement, zip_longest
from statistics import fmean, median
from typing import ClassVar, Literal, Self, TypeGuard

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.estimates import FIRST_LOOKS, Interval, growth, percent
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.schema.errors import BadUsage, Launches

Better = Literal["higher", "lower"]
Pair = tuple[float | None, float | None]  # baseline, candidate

MARGIN = 0.03  # smallest change that matters, as a share
MAX_GATED = 4
POWER = 0.9
TOGETHER = (2, 4)  # launches of both sides together: even numbers, so that each side starts first equally often
STARTS = (3, 5)  # pairs of launches of a gate of the start, whose margin is five times as large
MAX_DROPPED = 3  # with more invalid pairs this host cannot decide
THIS_GATE = "; this gate "  # in a reason, before what the gate can do
RANKS_FROM = 6  # pairs, below which no 95% interval by ranks exists


@dataclass(frozen=True, slots=True)
class GateCriteria:
    """Criteria of a gate.

    Attributes:
        margin: largest accepted slowdown, as a share.
        alpha: largest share of unchanged candidates that fail.
        beta: largest share of candidates worse by the margin that pass.
        pairs: largest number of pairs.
        launches: "apart" (one side after the other), "together" (on one GPU), or "start" (only their start).

    Raises:
        BadUsage: if a value is out of range.
    """

    margin: float = MARGIN
    alpha: float = 0.01
    beta: float = 0.05
    pairs: int = FIRST_LOOKS[-1]
    launches: Launches = "apart"

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise BadUsage(f"a margin of {self.margin:g}", "Pass a share between 0 and 1, for example 0.03 for 3%.")
        if not 0 < self.alpha <= 0.5 or not 0 < self.beta <= 0.5:
            raise BadUsage(f"alpha {self.alpha:g} and beta {self.beta:g}", "Pass shares above 0 and at most 0.5.")
        if self.pairs < FIRST_LOOKS[0]:
            raise BadUsage(f"a gate of {self.pairs} pairs", f"Allow at least {FIRST_LOOKS[0]} pairs.")

    @property
    def together(self) -> bool:
        return self.launches == "together"

    @property
    def with_both_at_once(self) -> GateCriteria:
        """These criteria for sides that share one GPU."""
        return replace(self, pairs=TOGETHER[-1], launches="together")

    @property
    def of_starts(self) -> GateCriteria:
        """These criteria for a gate of the start."""
        return replace(self, pairs=STARTS[-1], launches="start")

    def looks(self, pairs: int) -> tuple[int, ...]:
        """Return the numbers of pairs, up to `pairs`, at which there is an interim analysis."""
        if self.launches == "apart":
            return estimates.looks_until(pairs)
        return tuple(n for n in (TOGETHER if self.together else STARTS) if n <= pairs)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean logarithm of an endpoint's cost ratio, with its standard error and degrees of freedom."""

    mean: float
    error: float
    df: int

    def t(self, than: float = 0.0) -> float:
        """Return Student's t of the difference from another mean, infinite without noise."""
        distance = self.mean - than
        if self.error > 0:
            return distance / self.error
        return math.copysign(math.inf, distance) if distance else 0.0


@dataclass(frozen=True, slots=True)
class PairSeries:
    """Values of one endpoint in each pair, in the order measured. The margin is a share."""

    name: str
    better: Better
    pairs: tuple[Pair, ...]
    margin: float = MARGIN

    unit: ClassVar[tuple[str, str]] = "pair", "pairs"  # name of the repeated unit

    @property
    def sign(self) -> float:
        """1 if lower values are better, else -1."""
        return 1.0 if self.better == "lower" else -1.0

    @property
    def log_ratios(self) -> list[float | None]:
        """Logarithm of candidate over baseline of each pair, if it is complete."""
        return [
            math.log(candidate) - math.log(baseline) if is_positive(baseline) and is_positive(candidate) else None
            for baseline, candidate in self.pairs
        ]

    @property
    def known(self) -> list[float]:
        """Logarithms of the ratios of complete pairs."""
        return [ratio for ratio in self.log_ratios if ratio is not None]

    @property
    def spread(self) -> float | None:
        """Standard deviation of `known`, or None below two."""
        return estimates.sample_sd(self.known) if len(self.known) > 1 else None

    def with_costs(self, costs: Sequence[float]) -> Self:
        """Return this series with these logarithms of cost ratios."""
        return replace(self, pairs=tuple((1.0, math.exp(self.sign * cost)) for cost in costs))

    def estimate(self, n: int | None = None) -> Estimate | None:
        """Return the estimate of the first `n` pairs, or of all complete pairs; None if one of `n` is incomplete."""
        costs = [self.sign * ratio for ratio in (self.known if n is None else self.log_ratios[:n]) if ratio is not None]
        if not costs or len(costs) < (n or 0):
            return None
        return Estimate(fmean(costs), estimates.sample_sd(costs) / math.sqrt(len(costs)), len(costs) - 1)

    @property
    def interval(self) -> Interval:
        """Candidate over baseline, with its 95% interval."""
        return estimates.factor(hodges_lehmann(self.known))


@dataclass(frozen=True, slots=True)
class InterimAnalysis:
    """Test of an endpoint after a number of pairs.

    Attributes:
        mean: geometric mean of candidate over baseline.
        fails_beyond, passes_within: ratios beyond which it fails, and within which it passes.
        outcome: from this analysis on.
    """

    pairs: int
    mean: float
    fails_beyond: float
    passes_within: float
    outcome: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(PairSeries):
    """Comparison of both sides in one endpoint, over all pairs.

    Attributes:
        gated: whether it is evaluated.
        n: number of complete pairs.
        ratio: candidate over baseline (Hodges and Lehmann 1963).
        worse: mean logarithm of the cost ratio.
        sd: standard deviation of a pair.
        detectable: smallest slowdown of only this endpoint that this gate finds with a power of 90%, as a share.
        decided_at: number of pairs at which the outcome was known.
    """

    gated: bool
    outcome: State
    why: str
    n: int
    ratio: Interval | None
    worse: float | None
    sd: float | None
    detectable: float | None
    decided_at: int | None
    interim: tuple[InterimAnalysis, ...]

    @property
    def seems_worse(self) -> bool:
        """Whether it is worse by more than half of the margin, and the 95% interval excludes equality."""
        if self.ratio is None or self.worse is None or self.worse <= math.log1p(self.margin) / 2:
            return False
        end = self.ratio.high if self.better == "higher" else self.ratio.low
        return end is not None and (end < 1) == (self.better == "higher")


def gate(series: Sequence[PairSeries], criteria: GateCriteria) -> tuple[Comparison, ...]:
    """Return the comparisons of one to four endpoints, evaluated together.

    Raises:
        BadUsage: if there are more or none, or if names are equal or numbers of pairs differ.
    """
    if not 1 <= len(series) <= MAX_GATED:
        raise BadUsage(
            f"{len(series)} gated endpoints",
            f"Gate 1 to {MAX_GATED} endpoints: with more of them, each is harder to detect.",
        )
    if len({each.name for each in series}) < len(series):
        raise BadUsage("two gated endpoints of one name", "Give each endpoint its own name.")
    if len(lengths := sorted({len(each.pairs) for each in series})) > 1:
        raise BadUsage(f"endpoints of {lengths[0]} and of {lengths[-1]} pairs", "Pass None for each missing value.")
    found = interim_analyses(series, criteria)
    return tuple(compare_sides(each, criteria, found[each.name], len(series)) for each in series)


def next_look(done: int, criteria: GateCriteria) -> int | None:
    """Return the number of pairs at the next interim analysis, or None after the last."""
    return next((n for n in criteria.looks(criteria.pairs) if n > done), None)


def interim_analyses(series: Sequence[PairSeries], criteria: GateCriteria) -> dict[str, list[InterimAnalysis]]:
    """Return the interim analyses of each endpoint by name, up to its failure or first missing value.

    An endpoint that passed is tested again while others are open, and may still fail, because the boundaries for
    failing do not rely on a pass.
    """
    missing = {each.name: None in each.log_ratios for each in series}
    made = min(len(each.pairs) for each in series)
    looks, maximum = criteria.looks(made), max(criteria.pairs, made)
    found: dict[str, list[InterimAnalysis]] = {each.name: [] for each in series}

    def boundary(number: int, error_rate: float, df: int) -> float:
        return estimates.t_above(estimates.tails(looks, maximum, error_rate)[number], df)

    for number, n in enumerate(looks):
        open_ones = [e for e in series if not found[e.name] or found[e.name][-1].outcome is not State.FAILS]
        family = len(open_ones)
        tests = [(seen, each) for each in open_ones if (seen := each.estimate(n))]
        # Holm's steps: the largest t has to exceed the boundary for alpha over all endpoints, and the next one that for
        # alpha over the rest. The first boundary that is not exceeded holds for all others. Equal values of t come
        # by name, also if a results file has rounded their measurements.
        for seen, each in sorted(tests, key=lambda test: (-round(test[0].t(), 2), test[1].name)):
            critical, enough = (boundary(number, rate, seen.df) for rate in (criteria.alpha / family, criteria.beta))
            family -= seen.t() > critical
            margin, earlier = math.log1p(each.margin), found[each.name]
            outcome = earlier[-1].outcome if earlier else State.INCONCLUSIVE
            if seen.t() > critical and seen.mean > margin / 2:
                outcome = State.FAILS
            elif not missing[each.name] and seen.t(than=margin) < -enough:
                outcome = State.PASSES
            costs = seen.mean, max(critical * seen.error, margin / 2), margin - enough * seen.error
            ratio, worse, better = (1 + growth(each.sign * cost) for cost in costs)
            earlier.append(InterimAnalysis(n, ratio, worse, better, outcome))
    return found


def is_positive(value: float | None) -> TypeGuard[float]:
    """Return whether a value was measured, is finite and above 0."""
    return value is not None and math.isfinite(value) and value > 0


def compare_sides(
    series: PairSeries, criteria: GateCriteria, interim: Sequence[InterimAnalysis] | None = None, family: int = 1
) -> Comparison:
    """Return the comparison of an endpoint.

    Args:
        interim: its interim analyses; None if it is not gated.
        family: number of endpoints gated together.
    """
    outcome = interim[-1].outcome if interim else State.INCONCLUSIVE
    decided = None if outcome is State.INCONCLUSIVE else next(i.pairs for i in interim or () if i.outcome is outcome)
    missing = [
        f"{series.unit[0]} {number} has no value of the {side}: what is missing never passes"
        for number, pair in enumerate(series.pairs, 1)
        for side, value in zip(("baseline", "candidate"), pair)
        if not is_positive(value)
    ]
    ratios = series.known
    n, unit, detectable = len(ratios), series.unit, None
    if (looks := criteria.looks(n)) and (seen := series.estimate()):
        # At the interim analysis of n pairs, with other endpoints unchanged, two conditions hold: the slowdown exceeds
        # the noise, as the first of the family, and half of the margin.
        tail = estimates.tails(looks, max(n, criteria.pairs), criteria.alpha / family)[-1]
        out_of_noise = estimates.shift(POWER, estimates.t_above(tail, seen.df), seen.df) * seen.error
        certain = math.log1p(series.margin) / 2 + estimates.NORMAL.inv_cdf(POWER) * seen.error
        detectable = growth(max(out_of_noise, certain))
    share = f"the {100 * series.margin:.3g}% margin"
    if outcome is State.FAILS:
        mean = fmean(ratios[:decided])
        change, cost = growth(mean), growth(series.sign * mean)
        why = f"{percent(abs(change))} {'lower' if change < 0 else 'higher'} "
        why += f"({round(1 + change, 3):g} times the baseline)"
        why += "" if decided == n else f" in the first {decided} {unit[1]}"
        small = f": more than half of {share}, and noise does not explain it"
        why += small if cost <= series.margin else ", which noise does not explain"
    elif missing or not ratios:
        why = missing[0] if missing else f"no {unit[1]}"
    elif outcome is State.PASSES:
        why = f"within {share}"
    elif not looks:
        why = f"{n} {unit[n != 1]}, {criteria.looks(criteria.pairs)[0]} are wanted at least"
    else:
        why = f"not shown to be worse, and not shown to be within {share}"
        if detectable is not None:
            least = f"of {percent(detectable)}"
            if detectable >= 1:
                least = f"by a factor of {1 + detectable:.1f}" if detectable < 99 else "by a factor of more than 100"
            why += f"{THIS_GATE}can detect a slowdown {least}"
    return Comparison(
        name=series.name,
        better=series.better,
        pairs=series.pairs,
        margin=series.margin,
        gated=interim is not None,
        outcome=outcome,
        why=why,
        n=n,
        ratio=series.interval if ratios else None,
        worse=series.sign * fmean(ratios) if ratios else None,
        sd=series.spread,
        detectable=detectable,
        decided_at=decided,
        interim=tuple(interim or ()),
    )


def hodges_lehmann(values: Sequence[float]) -> Interval:
    """Return the median of all means of two values, with its 95% interval (Hodges and Lehmann 1963).

    The interval uses signed ranks or, for fewer than six values, Student's t.
    """
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    centre = median(means)
    if len(values) < RANKS_FROM:
        return estimates.student_interval(values, centre)
    beyond = _means_beyond(len(values), 0.025)
    return Interval(centre, means[beyond], means[-1 - beyond])


@lru_cache(maxsize=256)
def _means_beyond(n: int, tail: float) -> int:
    # The largest k with P(rank sum <= k) <= tail is the number of means beyond each end of the interval.
    ways = [1]  # to give signs to the ranks, by the sum of the ranks with a plus
    for rank in range(1, n + 1):
        ways = [without + with_ for without, with_ in zip_longest(ways, [*[0] * rank, *ways], fillvalue=0)]
    return sum(1 for below in accumulate(ways) if below / 2**n <= tail) - 1


def suspects(releases: Sequence[str], outcomes: Mapping[str, State]) -> tuple[Sequence[str], str | None]:
    """Return the releases that may be the first slow one, and the release to gate next, or None.

    Args:
        releases: ascending, from a good one to a slow one.
        outcomes: of gates against the good one; INCONCLUSIVE also if a release could not be started.
    """
    slow = next(i for i, each in enumerate(releases) if i == len(releases) - 1 or outcomes.get(each) is State.FAILS)
    good = max(i for i, each in enumerate(releases[:slow]) if i == 0 or outcomes.get(each) is State.PASSES)
    left = [i for i in range(good + 1, slow) if releases[i] not in outcomes]
    following = releases[min(left, key=lambda i: abs(2 * i - good - slow))] if left else None
    return releases[good + 1 : slow + 1], following


GATES = 1000  # simulated for each rate, which shows a rate of 0.5% with a standard error of about 0.2%
MIN_POWER = 0.8  # a gate that misses more than a fifth of slowdowns by the margin passes no candidate
SEED = 7


@dataclass(frozen=True, slots=True)
class PairNoise:
    """Logarithms of cost ratios in pairs of equal sides: `costs[i]` of a pair, for each endpoint in `names`."""

    names: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]

    @property
    def spread(self) -> dict[str, Interval]:
        """Standard deviation of a pair by endpoint."""
        each = (math.sqrt(fmean(cost * cost for cost in column)) for column in zip(*self.costs))
        return {name: estimates.sd_interval(sd, len(self.costs) - 1) for name, sd in zip(self.names, each)}


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of simulated gates that fail and that pass, and their mean number of pairs."""

    fail: float
    passed: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates of gates simulated from measured noise.

    They are for an unchanged candidate, and by endpoint for one that is worse by the margin in only this endpoint.
    """

    noise: PairNoise
    unchanged: Rates
    worse: Mapping[str, Rates]


def noise_of(series: Sequence[PairSeries]) -> PairNoise:
    """Return the noise of the complete pairs.

    Costs are centered, because an order effect is not a difference of sides, and scaled for the variance that this
    removes.
    """
    columns = [[None if ratio is None else each.sign * ratio for ratio in each.log_ratios] for each in series]
    whole = [row for row in zip(*columns) if None not in row]
    means = [fmean(column) for column in zip(*whole)]
    stretch = math.sqrt(len(whole) / (len(whole) - 1)) if len(whole) > 1 else 1.0
    centred = (tuple(stretch * (cost - mean) for cost, mean in zip(row, means)) for row in whole)
    return PairNoise(tuple(each.name for each in series), tuple(centred))


def calibrate(
    noise: PairNoise, series: Sequence[PairSeries], criteria: GateCriteria, gates: int = GATES
) -> Calibration:
    """Return the rates of simulated gates with this noise.

    Args:
        series: its directions and margins are used, and the windows of a complete launch, but not its pairs.
    """
    drawn, rates = random.Random(SEED), dict[str | None, Rates]()
    for name in (*(each.name for each in series), None):  # None: the candidate is unchanged
        outcomes, taken = [], 0
        for _ in range(gates):
            # The sides of a pair may be exchanged, because they were equal.
            rows = [(drawn.choice((-1.0, 1.0)), row) for row in drawn.choices(noise.costs, k=criteria.pairs)]
            made = []
            for each in series:
                worse, i = math.log1p(each.margin) if each.name == name else 0.0, noise.names.index(each.name)
                made.append(each.with_costs([sign * row[i] + worse for sign, row in rows]))
            found = interim_analyses(made, criteria)
            for look, pairs in enumerate(criteria.looks(criteria.pairs)):
                n = pairs
                outcome = all_of([steps[: look + 1][-1].outcome for steps in found.values()])
                if outcome is not State.INCONCLUSIVE:
                    break
            outcomes.append(outcome)
            taken += n
        fails, passes = (outcomes.count(state) / gates for state in (State.FAILS, State.PASSES))
        rates[name] = Rates(fails, passes, taken / gates)
    unchanged = rates.pop(None)
    return Calibration(noise, unchanged, {name: rate for name, rate in rates.items() if name})


def weakened(compared: Sequence[Comparison], calibration: Calibration) -> tuple[Comparison, ...]:
    """Return comparisons in which a pass is inconclusive if the host's noise often hides a slowdown by the margin.

    More pairs do not change that, so `decided_at` stays.
    """
    found = []
    for each in compared:
        power = calibration.worse[each.name].fail if each.name in calibration.worse else 1.0
        if each.outcome is State.PASSES and power < MIN_POWER:
            worse = f"{100 * each.margin:.3g}% worse would fail in {100 * power:.0f}% of gates only"
            steps = tuple(replace(step, outcome=State.INCONCLUSIVE) for step in each.interim)
            why = f"this runner is too noisy to pass: {worse}"
            each = replace(each, outcome=State.INCONCLUSIVE, why=why, interim=steps)
        found.append(each)
    return tuple(found)
