"""What decides a gate: each boundary at each look, Holm's steps over the endpoints, what is missing, what must change
nothing; the interval that is shown; the noise of a calibration; the release that a bisection names; how often a gate is
right (in 300; `tests/nightly/statistics` has thousands), within the binomial bounds of docs/statistics.md."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial
from statistics import fmean, median, stdev

import gate_sessions as made
import pytest
from facts import tells
from hypothesis import given, settings, strategies as st
from refusals import refused
from scipy.stats import chi2

from pytest_slmserve.analysis.estimates import boundaries, looks_until, student_interval
from pytest_slmserve.analysis.gate import decision
from pytest_slmserve.analysis.gate.decision import Comparison, GateCriteria, PairSeries, Rates, gate, hodges_lehmann
from pytest_slmserve.analysis.verdict import State

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
TERMS, LOOKS = GateCriteria(), (4, 6, 8, 12)
HALF = math.log1p(TERMS.margin) / 2
CRITICAL = {family: boundaries(LOOKS, 12, TERMS.alpha / family) for family in (1, 2, 3, 4)}
ENOUGH = boundaries(LOOKS, 12, TERMS.beta)
TINY, HUGE = 1e-300, 1e300  # the ends of what a float holds
GATES = 300
ALARMS, MISSES = (made.most(GATES, share) for share in (made.ALARMS, made.MISSES))
FOUR = {"worse": made.UNCHANGED}
UNLIKELY = {"noise": made.heavy, "common": 0.5, "drift": made.DRIFT, "second": made.SECOND}
BETA, MOSTLY = made.most(GATES, TERMS.beta), math.ceil(0.95 * GATES)
QUIET = made.session(made.Planted(sd=0.001, worse=made.UNCHANGED), random.Random(8), 12, made.DIRECTIONS)


def costly(*log_costs: float, name: str = "latency", margin: float = TERMS.margin) -> PairSeries:
    """Pairs of which the candidate's cost is so much above that of the baseline, as a logarithm."""
    return PairSeries(name, "lower", tuple((7.0, 7.0 * math.exp(cost)) for cost in log_costs), margin)


def with_t(t: float, mean: float, n: int = 4) -> list[float]:
    """An even number of costs with that mean and Student's t."""
    spread = mean / t * math.sqrt(n - 1)
    return [mean + spread, mean - spread] * (n // 2)


def means_of_two(values):
    return sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))


def one(series: PairSeries, terms: GateCriteria = TERMS) -> Comparison:
    (found,) = gate([series], terms)
    return found


@pytest.mark.parametrize(("better", "sign"), [("lower", 1), ("higher", -1)])
def test_look_boundaries_match_student_t(better, sign):
    costs = [0.02, -0.01, 0.015, -0.02, 0.03, 0.02]
    found = one(PairSeries("any", better, tuple((1.0, math.exp(sign * x)) for x in costs)))
    assert [each.pairs for each in found.interim] == [4, 6]
    allowed = boundaries((4, 6), 12, TERMS.beta)
    for number, each in enumerate(found.interim):
        seen = costs[: each.pairs]
        error = stdev(seen) / math.sqrt(each.pairs)
        bounds = (fmean(seen), CRITICAL[1][number] * error, math.log1p(TERMS.margin) - allowed[number] * error)
        told = [sign * math.log(ratio) for ratio in (each.mean, each.fails_beyond, each.passes_within)]
        assert told == pytest.approx(bounds)


def test_endpoint_boundary_follows_holm_step():
    clear, next_ = costly(*with_t(2 * CRITICAL[2][0], 0.2), name="clear"), costly(*with_t(1.0, 0.01), name="next")
    ((first,), (second,)) = (each.interim for each in gate([next_, clear], TERMS)[::-1])
    assert math.log(second.fails_beyond) == pytest.approx(CRITICAL[1][0] * 0.01)
    assert math.log(first.fails_beyond) == pytest.approx(0.2 / 2)
    costs = with_t(1000.0, math.log1p(0.05))
    found = gate([costly(*costs, name="strict"), costly(*costs, name="lax", margin=0.15)], TERMS)
    assert [(each.margin, each.outcome) for each in found] == [(0.03, FAIL), (0.15, PASS)]
    noise = [0.006, -0.006, 0.006, -0.006]
    found = gate([costly(*noise, name=str(i)) for i in range(4)], TERMS)
    assert [each.outcome for each in found] == [PASS] * 4, "a pass needs no correction for other endpoints"
    pairs = ((100.0, 110.0),) * 6
    faster, slower = one(PairSeries("rate", "higher", pairs)), one(PairSeries("time", "lower", pairs))
    assert faster.ratio == slower.ratio and faster.ratio.value == pytest.approx(1.1)
    assert (faster.worse, slower.worse) == pytest.approx((-math.log(1.1), math.log(1.1)))
    assert (faster.outcome, slower.outcome) == (PASS, FAIL)
    only_shown = decision.compare_sides(PairSeries("time", "lower", pairs), TERMS)
    assert (only_shown.ratio, only_shown.outcome, only_shown.decided_at) == (slower.ratio, INCONCLUSIVE, None)


@pytest.mark.parametrize("number", range(4))
def test_critical_value_decides_gate(number):
    """At each look; before it, the pairs are too noisy for any decision."""
    n, margin = LOOKS[number], math.log1p(TERMS.margin)
    ways = (FAIL, CRITICAL[1][number], 0.2, 0.0), (PASS, -ENOUGH[number], -0.3, margin)
    for outcome, critical, mean, centre in ways:
        above, below = (one(costly(*(centre + c for c in with_t(critical * x, mean, n)))) for x in (1.001, 0.999))
        assert (above.outcome, above.decided_at, below.outcome) == (outcome, n, INCONCLUSIVE)


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.2, 0.999, 1.001]), st.booleans()), min_size=1, max_size=4),
    st.data(),
)
def test_holm_steps_equal_closed_test(look, drawn, data):
    """At each look: an endpoint fails if each set of endpoints that has it has one whose t is beyond the boundary for
    as many, and if it is above half of the margin. What is not lets the others be judged among the rest too."""
    n, t = LOOKS[look], [CRITICAL[family][look] * times for family, times, _ in drawn]
    made = [with_t(each, 0.2 if far else HALF / 2, n) for each, (_, _, far) in zip(t, drawn)]
    found = gate([costly(*costs, name=str(i)) for i, costs in enumerate(made)], TERMS)
    order = data.draw(st.permutations(range(len(made))))
    again = gate([costly(*made[i], name=str(i)) for i in order], TERMS)
    assert {each.name: each for each in again} == {each.name: each for each in found}, "in any order"
    sets = [each for size in range(1, len(t) + 1) for each in itertools.combinations(range(len(t)), size)]
    for i, (each, (_, _, far)) in enumerate(zip(found, drawn)):
        beyond = all(max(t[j] for j in others) > CRITICAL[len(others)][look] for others in sets if i in others)
        assert (each.outcome is FAIL) is (far and beyond) and (each.outcome is not FAIL or each.decided_at == n)


def test_gate_decides_only_at_looks():
    for n, cost in itertools.product(range(4), (0.0, 0.5)):
        found = one(costly(*[cost] * n))
        assert (found.outcome, found.decided_at, found.n, found.detectable) == (INCONCLUSIVE, None, n, None)
        assert found.interim == () and (n == 0 or tells(found.why, n, 4))
    assert [one(costly(*([0.02, -0.02] * 6)[:n])).outcome for n in (4, 5)] == [INCONCLUSIVE] * 2
    looks = [decision.next_look(done, TERMS) for done in (0, 3, 4, 5, 6, 8, 11, 12, 20)]
    assert looks == [4, 4, 6, 6, 8, 12, 12, None, None]
    found = one(costly(*[0.04, -0.04] * 10))
    assert (found.outcome, found.n) == (PASS, 20) and 12 < found.decided_at in looks_until(20)
    # A failure ends the analyses, and a pass stays until then.
    turned = PairSeries("turned", "lower", (*[(1.0, 1.0 + 0.001 * i) for i in (1, -1, 1, -1)], *[(1.0, 1.2)] * 8))
    assert [each.outcome for each in one(turned).interim] == [PASS, PASS, PASS, FAIL]
    worse = one(costly(*with_t(50, 0.2, 12)))
    assert [(each.pairs, each.outcome) for each in worse.interim] == [(4, FAIL)]
    nothing = PairSeries("nothing", "lower", ((None, None),) * 4)
    found = one(nothing)
    assert (found.outcome, found.n, found.ratio, found.sd, found.worse) == (INCONCLUSIVE, 0, None, None, None)
    assert tells(found.why, 1, "baseline")
    between = costly(*with_t(fmean((CRITICAL[2][0], CRITICAL[1][0])), 0.2))
    found = gate([between, nothing], TERMS)
    assert one(between).outcome is FAIL and [each.outcome for each in found] == [INCONCLUSIVE] * 2
    enormous, several = ((TINY, HUGE), (HUGE, TINY)) * 2, costly(*[0.5, -0.5] * 6).pairs
    for pairs, factor in ((enormous, "by a factor of more than 100"), (several, "by a factor of 2.1")):
        found = one(PairSeries("latency", "lower", pairs))
        assert (found.outcome, found.decided_at) == (INCONCLUSIVE, None)
        assert found.detectable > 1 and tells(found.why, "3%", factor)


@pytest.mark.parametrize(("better", "cost", "facts"), [
    ("lower", 0.02, ("2%", "higher", "1.02", 4, "half", "3%")), ("lower", 0.3, ("35%", "higher", "1.35", 4)),
    ("higher", 0.3, ("25.9%", "lower", "0.741", 4)), ("higher", 0.0302, ("3%", "lower", "0.97", 4)),
])  # fmt: skip
def test_gate_failure_explains_difference(better, cost, facts):
    why = one(PairSeries("any", better, costly(*[cost if better == "lower" else -cost] * 12).pairs)).why
    assert tells(why, *facts) and ("half" in why) is ("half" in facts)


@pytest.mark.parametrize(("pairs", "outcome"), [
    # Without spread, and with hardly any: what is certain but small does not fail.
    *((((10.0, 10.0 * math.exp(cost)),) * 4, outcome)
      for cost, outcome in ((0.0, PASS), (0.01, PASS), (0.05, FAIL), (-0.2, PASS))),
    *((costly(*[mean + 1e-5, mean - 1e-5] * 2).pairs, outcome)
      for mean, outcome in ((HALF * 0.99, PASS), (HALF * 1.01, FAIL), (0.0, PASS), (-0.05, PASS))),
    (((TINY, HUGE),) * 4, FAIL), (((HUGE, TINY),) * 4, PASS),
])  # fmt: skip
def test_quiet_gate_uses_half_margin(pairs, outcome):
    found = one(PairSeries("s to start", "lower", pairs))
    assert (found.outcome, found.decided_at) == (outcome, 4) and found.sd < 1e-4
    assert found.ratio.low == pytest.approx(found.ratio.high, rel=1e-4) == pytest.approx(found.ratio.value, rel=1e-4)
    assert found.detectable == pytest.approx(math.expm1(HALF), rel=1e-2), "nothing below it is said to be found"


@pytest.mark.parametrize(("at", "side"), [(0, "baseline"), (2, "candidate"), (3, "baseline")])
def test_missing_gate_value_is_named(at, side):
    pairs = list(costly(*[0.0] * 4).pairs)
    pairs[at] = (None, 1.0) if side == "baseline" else (1.0, None)
    found = one(PairSeries("x", "lower", tuple(pairs)))
    assert (found.outcome, found.n) == (INCONCLUSIVE, 3) and tells(found.why, at + 1, side)
    found = one(PairSeries("latency", "lower", (*costly(*[0.2] * 6).pairs, *pairs)))
    assert (found.outcome, found.decided_at) == (FAIL, 4) and tells(found.why, "22.1%")


@pytest.mark.parametrize(("facts", "call"), [
    *(((name.rstrip("s"), f"{value:g}"), partial(GateCriteria, **{name: value})) for name, value in (
        *(("margin", value) for value in (0.0, 1.0, -0.03, math.nan)), ("pairs", 3),
        *((name, value) for name in ("alpha", "beta") for value in (0.0, 0.51, math.nan)))),
    *((facts, partial(gate, series, TERMS)) for facts, series in (
        ("0", []),
        ("5", [costly(0, 0, 0, 0, name=str(i)) for i in range(5)]),
        (["one name"], [costly(0.5, 0.5, 0.5, 0.5), costly(0, 0, 0, 0)]),
        (["of 4 and of 12"], [costly(*[0.0] * 12, name="a"), costly(*[0.0] * 4, name="b")]),
    )),
])  # fmt: skip
def test_senseless_gate_criteria_are_refused(facts, call):
    with refused(*facts):
        call()
    GateCriteria(margin=0.999, alpha=0.5, beta=0.5, pairs=4)  # the ends of what makes sense


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=15))
def test_hodges_lehmann_matches_pairwise_means(values):
    found = hodges_lehmann(values)
    assert found.value == pytest.approx(median(means_of_two(values)), abs=1e-12)
    if len(values) >= 6:
        assert min(values) <= found.low <= found.value <= found.high <= max(values)
    else:
        assert found == student_interval(values, found.value)


@pytest.mark.parametrize(("n", "beyond"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (20, 52)])
def test_signed_rank_interval_covers_truth(n, beyond):
    """For any symmetric noise, exactly: all signs of the deviations are as likely, so all are tried."""
    values = [float(2**i) for i in range(n)]
    found, means = hodges_lehmann(values), means_of_two(values)
    assert (found.low, found.high) == (means[beyond], means[-1 - beyond])
    if n not in (6, 8, 12):
        return
    chance = random.Random(n)
    sizes = [chance.uniform(0.1, 1) ** 3 for _ in range(n)]
    signs = itertools.product((-1, 1), repeat=n)
    found = (hodges_lehmann([s * size for s, size in zip(row, sizes)]) for row in signs)
    assert 0.95 <= sum(each.low <= 0 <= each.high for each in found) / 2**n < 0.97


@pytest.mark.parametrize("family", [1, 4])
@pytest.mark.parametrize(("n", "sd"), [(4, 0.002), (4, 0.02), (6, 0.01), (8, 0.01), (12, 0.002), (12, 0.02)])
def test_detectable_change_is_usually_found(n, sd, family):
    """Nine of ten gates find it if they pass nobody before their time, which is what the number leaves out."""
    terms, chance, gates = GateCriteria(beta=1e-9), random.Random(n + family), 200
    others = [costly(*[0.5, -0.5] * (n // 2), name=str(i)) for i in range(family - 1)]
    spread = sd * math.sqrt((n - 1) / n)
    found = gate([costly(*[spread, -spread] * (n // 2)), *others], terms)[0]
    assert found.sd == pytest.approx(sd)
    effect = math.log1p(found.detectable)
    drawn = (costly(*(chance.gauss(effect, sd) for _ in range(n))) for _ in range(gates))
    power = sum(gate([each, *others], terms)[0].outcome is FAIL for each in drawn) / gates
    assert 0.8 < power < 0.98  # four standard errors below, and room for earlier looks above


@settings(deadline=None)
@given(st.lists(st.floats(-0.2, 0.2), min_size=4, max_size=13), st.floats(1e-6, 1e6), st.floats(0, 0.3))
def test_exchanged_sides_mirror_gate_verdict(log_costs, size, more):
    """Another unit; both sides exchanged and the direction turned; a rate instead of a time. Worse at the first look:
    the same noise, and a mean that is farther up."""
    series = costly(*log_costs)
    before = one(series)
    scaled = one(replace(series, pairs=tuple((size * a, size * b) for a, b in series.pairs)))
    mirrored = one(replace(series, better="higher", pairs=tuple((b, a) for a, b in series.pairs)))
    rates = one(replace(series, better="higher", pairs=tuple((1 / a, 1 / b) for a, b in series.pairs)))
    assert len({(each.outcome, each.decided_at, each.n) for each in (before, scaled, mirrored, rates)}) == 1
    assert (scaled.ratio.value, 1 / mirrored.ratio.value) == pytest.approx((before.ratio.value,) * 2)
    assert (scaled.sd, mirrored.worse) == pytest.approx((before.sd, before.worse), abs=1e-12)
    before, after = (one(costly(*(c + x for c in log_costs[:4]))).outcome for x in (0.0, more))
    rank = (PASS, INCONCLUSIVE, FAIL).index
    assert rank(after) >= rank(before)


def bisected(releases: list[str], planted: str, unknown: set[str]) -> dict[str, State]:
    found: dict[str, State] = {}
    while (release := decision.suspects(releases, found)[1]) is not None:
        assert release not in found
        slow = releases.index(release) >= releases.index(planted)
        found[release] = INCONCLUSIVE if release in unknown else FAIL if slow else PASS
    return found


@given(st.integers(2, 40), st.data())
def test_bisection_names_planted_release(n, data):
    releases = [f"0.{i}.0" for i in range(n)]
    planted = data.draw(st.sampled_from(releases[1:]))
    unknown = set(data.draw(st.lists(st.sampled_from(releases[1:]))))
    left, _ = decision.suspects(releases, bisected(releases, planted, unknown))
    assert planted in left and set(left[:-1]) <= unknown
    found = bisected(releases, planted, set())
    assert decision.suspects(releases, found) == ([planted], None) and len(found) <= math.ceil(math.log2(n - 1))


def noisy(sd: float, name: str = "tokens/s", n: int = 12, bias: float = 0.0, margin: float = 0.03) -> PairSeries:
    chance = random.Random(name)
    pairs = tuple((1.0, math.exp(-bias + chance.gauss(0, sd))) for _ in range(n))
    return PairSeries(name, "higher", pairs, margin)


def calibrated(*series: PairSeries) -> decision.Calibration:
    return decision.calibrate(decision.noise_of(series), series, TERMS, 200)


def test_noise_is_matched_by_name():
    series = noisy(0.05), noisy(0.003, "latency")
    noise = decision.noise_of(series)
    worse = decision.calibrate(noise, series[::-1], TERMS, 200).worse
    assert worse["tokens/s"].fail < decision.MIN_POWER and worse["latency"].fail > 0.95


def test_calibration_noise_gives_gate_power():
    seen = calibrated(noisy(0.003), noisy(0.003, "latency"))
    assert len(seen.noise.costs) == 12 and seen.unchanged == Rates(0.0, 1.0, 4.0)
    assert {name: rates.fail for name, rates in seen.worse.items()} == {"tokens/s": 1.0, "latency": 1.0}
    assert calibrated(noisy(0.03, "start", margin=0.15)).worse["start"].fail > 0.95, "held to its own margin"
    seen = calibrated(noisy(0.05), noisy(0.003, "latency"))
    assert seen.worse["tokens/s"].fail < decision.MIN_POWER and seen.worse["latency"].fail > 0.95
    assert seen.unchanged.passed < 0.7 and seen.unchanged.fail < 0.05 and seen.unchanged.pairs > 8
    # Centred, and stretched by what centring takes from so few pairs: the variance is the sample's.
    series, other = noisy(0.02, n=6), noisy(0.01, "latency", n=6)
    noise = decision.noise_of([series, replace(other, pairs=(*other.pairs[:3], (1.0, None), *other.pairs[4:]))])
    left = [math.log(b / a) for a, b in (*series.pairs[:3], *series.pairs[4:])]
    drawn, _ = columns = [*zip(*noise.costs)]
    assert len(noise.costs) == 5 and noise.names == ("tokens/s", "latency")
    assert math.sqrt(fmean(x * x for x in drawn)) == pytest.approx(stdev(left))
    assert [sum(column) for column in columns] == pytest.approx([0.0, 0.0], abs=1e-12)
    seen, ends = noise.spread["tokens/s"], [stdev(left) * math.sqrt(4 / chi2.isf(tail, 4)) for tail in (0.025, 0.975)]
    assert [*noise.spread] == ["tokens/s", "latency"] and seen.value == pytest.approx(stdev(left))
    assert [seen.low, seen.high] == pytest.approx(ends)
    biased, still = (decision.noise_of([noisy(0.003, bias=bias)]).costs for bias in (0.02, 0.0))
    assert [cost for (cost,) in biased] == pytest.approx([cost for (cost,) in still])
    assert decision.noise_of([noisy(0.02, n=1)]).costs == ((0.0,),)
    for noise in ({}, {"noise": made.heavy}, {"common": 0.9}):
        (series,) = made.session(made.Planted(sd=0.02, **noise), random.Random(3), 2000, ("lower",))
        assert math.sqrt(fmean(math.log(b / a) ** 2 for a, b in series.pairs)) == pytest.approx(0.02, rel=0.15)
    drifting = made.Planted(sd=0.0, drift=made.DRIFT, second=made.SECOND)
    (series,) = made.session(drifting, random.Random(3), 12, ("lower",))
    logs = [math.log(b / a) for a, b in series.pairs]
    assert all(abs(math.fsum(logs[:n])) < 1e-9 for n in (4, 6, 8, 12)) and max(logs) > 0.01


@pytest.mark.parametrize("outcome", list(State))
@pytest.mark.parametrize(("power", "weak"), [(decision.MIN_POWER - 0.001, True), (decision.MIN_POWER, False)])
def test_calibration_weakens_meaningless_pass(outcome, power, weak):
    rates = {"tokens/s": Rates(power, 0.0, 12.0)}
    seen = decision.Calibration(decision.noise_of([noisy(0.05)]), Rates(0.0, 1.0, 4.0), rates)
    steps = (decision.InterimAnalysis(4, 1.0, 0.98, 0.99, outcome),)
    made = [decision.compare_sides(noisy(0.003, name, n=4), TERMS, steps) for name in ("tokens/s", "energy")]
    shown, unknown = (replace(each, outcome=outcome, decided_at=4) for each in made)
    found, same = decision.weakened([shown, unknown], seen)
    assert same == unknown and found.decided_at == 4
    if weak and outcome is PASS:
        assert [step.outcome for step in found.interim] == [INCONCLUSIVE] == [found.outcome]
        assert tells(found.why, "3%", f"{100 * power:.0f}%")
    else:
        assert found == shown


@pytest.mark.parametrize(("planted", "fails", "passes"), [
    *((host, (0, ALARMS), (MOSTLY, GATES)) for host in (*made.HOSTS.values(), FOUR, {**FOUR, "common": 0.9})),
    ({**FOUR, **UNLIKELY}, (0, ALARMS), (0, GATES)),
    *(({"worse": (0.05,), **host}, (GATES - MISSES, GATES), (0, 1)) for host in ({}, *made.HOSTS.values())),
    ({"worse": made.SLOWER}, (GATES - MISSES, GATES), (0, 1)),
    *(({"worse": worse}, (GATES // 2, GATES), (0, BETA)) for worse in ((0.03,), (0.03, 0.0, 0.0, 0.0))),
])  # fmt: skip
def test_gate_error_rates_stay_bounded(planted, fails, passes):
    """Unchanged, one seldom fails and mostly passes; 5% are found; at the margin no more than beta pass."""
    seen = made.many(made.Planted(sd=0.02, **planted), GATES)
    assert fails[0] <= seen.outcomes[FAIL] <= fails[1] and passes[0] <= seen.outcomes[PASS] <= passes[1]
    assert seen.fails.total() - seen.fails["endpoint 0"] <= ALARMS, "of the others none is worse"


def with_gap(series: PairSeries, at: int, value: float | None, side: int) -> PairSeries:
    baseline, candidate = series.pairs[at]
    gap = (baseline, value) if side else (value, candidate)
    return replace(series, pairs=(*series.pairs[:at], gap, *series.pairs[at + 1 :]))


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize("side", [0, 1], ids=["baseline", "candidate"])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_missing_value_never_passes_gate(value, side, at):
    """Wherever it is, and after the endpoint would have passed too."""
    found = gate([with_gap(QUIET[0], at, value, side), *QUIET[1:]], TERMS)
    assert [(each.outcome, each.decided_at) for each in found] == [(INCONCLUSIVE, None), *[(PASS, 4)] * 3]


@pytest.mark.parametrize("at", range(12))
def test_run_with_gap_never_passes(at):
    """A run that had passed or failed before the gap has ended before it."""
    outcome, pairs, _ = made.looked_at([with_gap(QUIET[0], at, None, 1), *QUIET[1:]], TERMS)
    assert (outcome, pairs) == ((INCONCLUSIVE, 12) if at < 4 else (PASS, 4))
    slow = replace(QUIET[1], pairs=tuple((a, made.measured(0.2, "lower")) for a, _ in QUIET[1].pairs))
    assert at < 4 or gate([with_gap(slow, at, None, 1)], TERMS)[0].outcome is FAIL
