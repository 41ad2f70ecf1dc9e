"""Is the candidate slower than the baseline? From pairs of launches, one of each side, in the order they were measured.

Each pair gives the logarithm of a cost ratio, candidate over baseline, positive where the candidate is worse. After 4,
6, 8 and 12 pairs (`group_sequential.looks_until`) two one-sided tests are made of the mean:

- *fails*: the mean is above 0, and above half of the margin, so that what is statistically there matters too. At most
  `alpha` of all gates of an unchanged candidate end so, whatever the number of endpoints (Holm 1979).
- *passes*: the mean is below the margin (non-inferiority, half of Schuirmann's two tests, 1987); all endpoints have to,
  so nothing is to be corrected (Berger 1982).

Neither at the last look: inconclusive. A value that is missing never passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median
from typing import Literal

from pytest_slmserve.analysis.stats.estimates import (
    FIRST_LOOKS,
    NORMAL,
    Interval,
    boundaries,
    factor,
    growth,
    looks_until,
    percent,
    sample_sd,
    shift,
    student_interval,
)
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.schema.errors import BadUsage

Better = Literal["higher", "lower"]
Pair = tuple[float | None, float | None]  # baseline, candidate

MARGIN = 0.03  # smallest change that matters, as a share
MAX_GATED = 4
POWER = 0.9
RANKS_FROM = 6  # with fewer pairs no 95 % interval by ranks exists


@dataclass(frozen=True, slots=True)
class GateCriteria:
    """margin: how much worse a candidate may be, as a share. alpha, beta: how often an unchanged candidate fails, and
    one that is worse by the margin passes, at most. pairs: as many as may be measured."""

    margin: float = MARGIN
    alpha: float = 0.01
    beta: float = 0.05
    pairs: int = FIRST_LOOKS[-1]

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise BadUsage(f"a margin of {self.margin:g}", "a share between 0 and 1, such as 0.03 for 3 %")
        if not 0 < self.alpha <= 0.5 or not 0 < self.beta <= 0.5:
            raise BadUsage(f"alpha {self.alpha:g} and beta {self.beta:g}", "each above 0 and at most 0.5")
        if self.pairs < FIRST_LOOKS[0]:
            raise BadUsage(f"a gate of {self.pairs} pairs", f"at least {FIRST_LOOKS[0]} pairs")


@dataclass(frozen=True, slots=True)
class PairSeries:
    """Values of one endpoint in each pair, in the order of measurement. margin: the endpoint's own; None: that of the
    criteria."""

    name: str
    better: Better
    pairs: tuple[Pair, ...]
    margin: float | None = None

    @property
    def sign(self) -> float:
        """Factor that turns the logarithm of a ratio into that of a cost ratio: 1 where lower is better, else -1."""
        return 1.0 if self.better == "lower" else -1.0


@dataclass(frozen=True, slots=True)
class InterimAnalysis:
    """Test of an endpoint after so many pairs. mean: geometric, of the ratios, candidate over baseline. fails_beyond,
    passes_within: the mean decides where it is worse than the one, or better than the other. outcome: from then on."""

    pairs: int
    mean: float
    fails_beyond: float
    passes_within: float
    outcome: State


@dataclass(frozen=True, slots=True)
class Comparison:
    """ratio: candidate over baseline (Hodges and Lehmann 1963), with its 95 % interval; of all pairs. worse: mean
    logarithm of the cost ratio. sd: of one pair. detectable: the smallest worsening, as a share, of this endpoint alone
    that so many pairs of such noise find with a power of 90 %. decided_at: pairs at which the outcome was known; None:
    it is not. interim: the analyses that led there.
    """

    name: str
    better: Better
    outcome: State
    why: str
    margin: float
    n: int
    ratio: Interval | None = None
    worse: float | None = None
    sd: float | None = None
    detectable: float | None = None
    decided_at: int | None = None
    interim: tuple[InterimAnalysis, ...] = ()


def gate(series: Sequence[PairSeries], terms: GateCriteria) -> tuple[Comparison, ...]:
    """Judge the gated endpoints, at most four, together. Raises BadUsage for more, or none, for two of one name, and
    for endpoints of which not every pair has a place, be it empty."""
    if not 1 <= len(series) <= MAX_GATED:
        raise BadUsage(
            f"{len(series)} gated endpoints", f"1 to {MAX_GATED}: the more are gated, the less each can show"
        )
    if len({each.name for each in series}) < len(series):
        raise BadUsage("two gated endpoints of one name", "a name of its own for each")
    if len(lengths := sorted({len(each.pairs) for each in series})) > 1:
        raise BadUsage(f"endpoints of {lengths[0]} and of {lengths[-1]} pairs", "None for a value that is missing")
    made = interim_analyses(series, terms)
    return tuple(_comparison(each, terms, made[each.name], len(series)) for each in series)


def shown(series: PairSeries, terms: GateCriteria) -> Comparison:
    """An endpoint that is not gated: its ratio, and never an outcome."""
    return _comparison(series, terms, (), 1)


def next_look(done: int, terms: GateCriteria) -> int | None:
    """Pairs at which to look next; None when all are there."""
    return next((n for n in looks_until(terms.pairs) if n > done), None)


# Decisions


def decisions(series: Sequence[PairSeries], terms: GateCriteria) -> dict[str, tuple[State, int]]:
    """Decided endpoints by name: the outcome and the look that decided it; inconclusive endpoints are absent."""
    made = {name: _decision(each) for name, each in interim_analyses(series, terms).items()}
    return {name: decision for name, decision in made.items() if decision}


def _decision(interim: Sequence[InterimAnalysis]) -> tuple[State, int] | None:
    """The last outcome, and the look at which it was reached."""
    outcome = _outcome(interim)
    at = next((each.pairs for each in interim if each.outcome is outcome), 0)
    return None if outcome is State.INCONCLUSIVE else (outcome, at)


def _outcome(interim: Sequence[InterimAnalysis]) -> State:
    return interim[-1].outcome if interim else State.INCONCLUSIVE


def interim_analyses(series: Sequence[PairSeries], terms: GateCriteria) -> dict[str, list[InterimAnalysis]]:
    """Interim analyses of each endpoint by name, up to its failure or its first missing value.

    An endpoint that passed is tested again as long as others are open. A failure then counts, for the boundaries of
    failing take no account of passes.
    """
    costs = {each.name: log_costs(each) for each in series}
    made = min(len(each.pairs) for each in series)
    looks, maximum = looks_until(made), max(terms.pairs, made)
    found: dict[str, list[InterimAnalysis]] = {each.name: [] for each in series}
    for number, n in enumerate(looks):
        open_ = [each for each in series if _outcome(found[each.name]) is not State.FAILS]
        known = {each.name: [c for c in costs[each.name][:n] if c is not None] for each in open_}
        seen = {name: (fmean(c), sample_sd(c) / math.sqrt(n)) for name, c in known.items() if len(c) == n}
        t = {name: _t(mean, error) for name, (mean, error) in seen.items()}
        critical = _critical_values(t, terms, looks, number, maximum, len(open_))
        enough = boundaries(looks, maximum, terms.beta)[number]
        for each in (each for each in open_ if each.name in seen):
            (mean, error), margin, before = seen[each.name], math.log1p(margin_of(each, terms)), found[each.name]
            outcome = _outcome(before)
            if t[each.name] > critical[each.name] and mean > margin / 2:
                outcome = State.FAILS
            elif None not in costs[each.name] and _t(mean - margin, error) < -enough:
                outcome = State.PASSES
            costly, cheap = max(critical[each.name] * error, margin / 2), margin - enough * error
            ratio, worse, better = (1 + growth(each.sign * cost) for cost in (mean, costly, cheap))
            before.append(InterimAnalysis(n, ratio, worse, better, outcome))
    return found


def _critical_values(
    t: Mapping[str, float], terms: GateCriteria, looks: tuple[int, ...], number: int, maximum: int, family: int
) -> dict[str, float]:
    """Holm's steps at one look: what the farthest t has to exceed is for alpha over all endpoints, the next for alpha
    over the rest. The first that is not exceeded is that of all others."""
    critical = {}
    for name in sorted(t, key=lambda name: (-t[name], name)):
        critical[name] = boundaries(looks, maximum, terms.alpha / family)[number]
        family -= t[name] > critical[name]
    return critical


def _t(distance: float, error: float) -> float:
    """Student's t of a mean that lies so far away; without any spread it is as large as can be, or 0."""
    if error > 0:
        return distance / error
    return math.copysign(math.inf, distance) if distance else 0.0


def log_costs(series: PairSeries) -> list[float | None]:
    """Logarithms of the cost ratios, one per pair, positive where the candidate is worse; None where a value is
    missing."""
    return [None if ratio is None else series.sign * ratio for ratio in map(_log_ratio, series.pairs)]


def _log_ratio(pair: Pair) -> float | None:
    baseline, candidate = pair
    if not _is_there(baseline) or not _is_there(candidate):
        return None
    return math.log(candidate) - math.log(baseline)  # type: ignore[arg-type]


def _is_there(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def margin_of(series: PairSeries, terms: GateCriteria) -> float:
    """Margin of an endpoint, as a share: its own, or that of the gate."""
    return terms.margin if series.margin is None else series.margin


# What is shown


def _comparison(series: PairSeries, terms: GateCriteria, interim: Sequence[InterimAnalysis], family: int) -> Comparison:
    outcome, at = _decision(interim) or (State.INCONCLUSIVE, None)
    margin, ratios = margin_of(series, terms), [r for r in map(_log_ratio, series.pairs) if r is not None]
    if not ratios:
        return Comparison(series.name, series.better, outcome, _missing(series) or "no pairs", margin, 0)
    sign, n = series.sign, len(ratios)
    sd = sample_sd(ratios) if n > 1 else None
    worse, detectable = sign * fmean(ratios), _detectable(sd, n, terms, margin, family)
    if outcome is State.FAILS:
        pairs = "" if at == n else f" in the first {at} pairs"
        cost = growth(sign * fmean(ratios[:at]))
        within = f": more than half of the {100 * margin:.3g} % margin, and noise does not explain it"
        why = f"costs {percent(cost)} more{pairs}{within if cost <= margin else ', which noise does not explain'}"
    else:
        why = _missing(series) or _why(outcome, n, margin, detectable)
    ratio, steps = factor(hodges_lehmann(ratios)), tuple(interim)
    return Comparison(series.name, series.better, outcome, why, margin, n, ratio, worse, sd, detectable, at, steps)


def _missing(series: PairSeries) -> str:
    """Message that names the first missing value by pair and side; empty where all are present."""
    for number, pair in enumerate(series.pairs, 1):
        for side, value in zip(("baseline", "candidate"), pair):
            if not _is_there(value):
                return f"pair {number} has no value of the {side}: what is missing never passes"
    return ""


def _why(outcome: State, n: int, margin: float, detectable: float | None) -> str:
    if outcome is State.PASSES:
        return f"within the {100 * margin:.3g} % margin"
    if n < FIRST_LOOKS[0]:
        return f"{n} pairs, {FIRST_LOOKS[0]} are wanted at least"
    found = "" if detectable is None else f"; detectable: {percent(detectable)} worse"
    return f"neither worse for certain nor within the {100 * margin:.3g} % margin{found}"


def _detectable(sd: float | None, n: int, terms: GateCriteria, margin: float, family: int) -> float | None:
    """The smallest worsening of one endpoint, the others unchanged, that n pairs would find with a power of about 90 %,
    at the look that they make: out of the noise, as the first of `family` endpoints, and above half of the margin."""
    looks = looks_until(n)
    if sd is None or not looks:
        return None
    critical, error = boundaries(looks, max(n, terms.pairs), terms.alpha / family)[-1], sd / math.sqrt(n)
    out_of_noise = shift(POWER, critical, n - 1) * error
    return growth(max(out_of_noise, math.log1p(margin) / 2 + NORMAL.inv_cdf(POWER) * error))


def hodges_lehmann(values: Sequence[float]) -> Interval:
    """The median of all means of two values, with the 95 % interval by signed ranks (Hodges and Lehmann 1963); of fewer
    than six values with Student's, as there is none by ranks."""
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    centre = median(means)
    if len(values) < RANKS_FROM:
        return student_interval(values, centre)
    beyond = _ranks_beyond(len(values), 0.025)
    return Interval(centre, means[beyond], means[-1 - beyond])


@lru_cache(maxsize=256)
def _ranks_beyond(n: int, tail: float) -> int:
    """Number of the means that lie beyond the interval on each side: the largest k with P(rank sum <= k) <= tail."""
    ways = [1]
    for rank in range(1, n + 1):
        longer = [*ways, *[0] * rank]
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    below, k = 0, 0
    while (below + ways[k]) / 2**n <= tail:
        below, k = below + ways[k], k + 1
    return k - 1


def suspects(releases: Sequence[str], outcomes: Mapping[str, State]) -> Sequence[str]:
    """Releases of which one is the first slow one, ascending: a single one where it is known.

    releases: ascending, the good one first and the slow one last. outcomes: of the gates so far, against the good one;
    INCONCLUSIVE also for a release that could not be started.
    """
    slow = next(i for i, each in enumerate(releases) if i == len(releases) - 1 or outcomes.get(each) is State.FAILS)
    good = max(i for i, each in enumerate(releases[:slow]) if i == 0 or outcomes.get(each) is State.PASSES)
    return releases[good + 1 : slow + 1]


def next_release(releases: Sequence[str], outcomes: Mapping[str, State]) -> str | None:
    """The release to gate next: of those between that were not gated the nearest to the middle; None: all were."""
    between = suspects(releases, outcomes)[:-1]
    middle = (len(between) - 1) / 2
    left = [i for i, each in enumerate(between) if each not in outcomes]
    return between[min(left, key=lambda i: abs(i - middle))] if left else None


GATES = 1000  # drawn for each rate: half a percent is then known to a quarter
MIN_POWER = 0.8  # a gate that misses more than a fifth of what it is there to find does not pass anybody
SEED = 7
UNKNOWN = (State.INCONCLUSIVE, 0)


@dataclass(frozen=True, slots=True)
class PairNoise:
    """Logarithms of cost ratios in pairs of which both sides were the same, for each endpoint; `costs[i]` of all
    endpoints is of one pair."""

    names: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of drawn gates, and how many pairs they took in the mean."""

    fail: float
    passed: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """unchanged: gates of an unchanged candidate. worse: by endpoint, gates of a candidate that is worse by the margin
    in this endpoint and in no other."""

    terms: GateCriteria
    n: int
    unchanged: Rates
    worse: Mapping[str, Rates]

    @property
    def weak(self) -> tuple[str, ...]:
        """Endpoints of which a worsening by the margin would be missed too often."""
        return tuple(name for name, rates in self.worse.items() if rates.fail < MIN_POWER)


def noise_of(series: Sequence[PairSeries]) -> PairNoise:
    """Noise of A/A pairs; pairs with a missing value are left out. Costs are centred, since an order effect is no
    difference of sides. They are stretched by what centring takes from the variance of so few pairs."""
    columns = [log_costs(each) for each in series]
    whole = [row for row in zip(*columns) if None not in row]
    means = [fmean(column) for column in zip(*whole)]
    stretch = math.sqrt(len(whole) / (len(whole) - 1)) if len(whole) > 1 else 1.0
    centred = (tuple(stretch * (cost - mean) for cost, mean in zip(row, means)) for row in whole)
    return PairNoise(tuple(each.name for each in series), tuple(centred))


def calibrate(noise: PairNoise, series: Sequence[PairSeries], terms: GateCriteria, gates: int = GATES) -> Calibration:
    """Rates of drawn gates. series: tells each endpoint's direction and margin."""
    drawn = random.Random(SEED)
    worse = {}
    for each in series:
        planted = {each.name: math.log1p(margin_of(each, terms))}
        worse[each.name] = _rates(noise, series, terms, gates, drawn, planted)
    return Calibration(terms, len(noise.costs), _rates(noise, series, terms, gates, drawn, {}), worse)


def _rates(
    noise: PairNoise,
    series: Sequence[PairSeries],
    terms: GateCriteria,
    gates: int,
    drawn: random.Random,
    planted: Mapping[str, float],
) -> Rates:
    outcomes, pairs = [], 0
    for _ in range(gates):
        # A pair with its sides exchanged, or not: nothing tells them apart.
        rows = [(drawn.choice((-1.0, 1.0)), row) for row in drawn.choices(noise.costs, k=terms.pairs)]
        made = []
        for i, each in enumerate(series):
            costs = [sign * row[i] + planted.get(each.name, 0.0) for sign, row in rows]
            made.append(replace(each, pairs=tuple((1.0, math.exp(each.sign * cost)) for cost in costs)))
        for n in looks_until(terms.pairs):
            decided = decisions([replace(each, pairs=each.pairs[:n]) for each in made], terms)
            found = all_of([decided.get(each.name, UNKNOWN)[0] for each in made])
            if found is not State.INCONCLUSIVE:
                break
        outcomes.append(found)
        pairs += n
    return Rates(outcomes.count(State.FAILS) / gates, outcomes.count(State.PASSES) / gates, pairs / gates)


def weakened(found: Comparison, calibration: Calibration) -> Comparison:
    """A pass that says nothing is none: inconclusive, where a worsening by the margin would mostly be missed. More
    pairs do not change that, so it keeps `decided_at`."""
    if found.outcome is not State.PASSES or found.name not in calibration.weak:
        return found
    power = calibration.worse[found.name].fail
    worse = f"{100 * found.margin:.3g} % worse would fail in {100 * power:.0f} % of gates only"
    why = f"this runner is too noisy to pass: {worse}"
    steps = tuple(replace(each, outcome=State.INCONCLUSIVE) for each in found.interim)
    return replace(found, outcome=State.INCONCLUSIVE, why=why, interim=steps)
