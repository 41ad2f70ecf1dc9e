"""The decisions of a gate by hand-made pairs, and what it shows of them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from statistics import fmean, median, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_slmserve.analysis.estimates import boundaries, looks_until, student_interval
from pytest_slmserve.analysis.gate.decision import (
    Comparison,
    GateCriteria,
    PairSeries,
    compare_sides,
    gate,
    hodges_lehmann,
    next_look,
)
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.schema.errors import BadUsage

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
TERMS = GateCriteria()
HALF = math.log1p(TERMS.margin) / 2
CRITICAL = {family: boundaries((4, 6, 8, 12), 12, TERMS.alpha / family) for family in (1, 2, 3, 4)}


def costly(*log_costs: float, name: str = "latency", margin: float = TERMS.margin) -> PairSeries:
    """Pairs of which the candidate's cost is so much above that of the baseline, as a logarithm."""
    return PairSeries(name, "lower", tuple((7.0, 7.0 * math.exp(cost)) for cost in log_costs), margin)


def with_t(t: float, mean: float, n: int = 4) -> list[float]:
    """An even number of costs with that mean and Student's t."""
    spread = mean / t * math.sqrt(n - 1)
    return [mean + spread, mean - spread] * (n // 2)


def one(series: PairSeries, terms: GateCriteria = TERMS) -> Comparison:
    (found,) = gate([series], terms)
    return found


def outcomes(*series: PairSeries, terms: GateCriteria = TERMS) -> list[State]:
    return [found.outcome for found in gate(series, terms)]


# Interim analyses


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_boundaries_of_each_look_lie_where_its_t_decides(better):
    costs = [0.02, -0.01, 0.015, -0.02, 0.03, 0.02]
    found = one(PairSeries("any", better, tuple((1.0, math.exp(x if better == "lower" else -x)) for x in costs)))
    assert [each.pairs for each in found.interim] == [4, 6]
    allowed = boundaries((4, 6), 12, TERMS.beta)
    for number, each in enumerate(found.interim):
        seen = costs[: each.pairs]
        error = stdev(seen) / math.sqrt(each.pairs)
        bounds = (fmean(seen), CRITICAL[1][number] * error, math.log1p(TERMS.margin) - allowed[number] * error)
        told = [math.log(ratio) for ratio in (each.mean, each.fails_beyond, each.passes_within)]
        assert told == pytest.approx([x if better == "lower" else -x for x in bounds])


def test_a_failure_ends_the_analyses_and_a_pass_stays_until_then():
    turned = PairSeries("turned", "lower", (*[(1.0, 1.0 + 0.001 * i) for i in (1, -1, 1, -1)], *[(1.0, 1.2)] * 8))
    assert [each.outcome for each in one(turned).interim] == [PASS, PASS, PASS, FAIL]
    worse = one(costly(*with_t(50, 0.2, 12)))
    assert [(each.pairs, each.outcome) for each in worse.interim] == [(4, FAIL)]
    assert one(costly(0.1, 0.1)).interim == ()


def test_the_boundary_of_an_endpoint_is_that_of_holms_step():
    clear, next_ = costly(*with_t(2 * CRITICAL[2][0], 0.2), name="clear"), costly(*with_t(1.0, 0.01), name="next")
    ((first,), (second,)) = (each.interim for each in gate([next_, clear], TERMS)[::-1])
    error = 0.01 / 1.0
    assert math.log(second.fails_beyond) == pytest.approx(CRITICAL[1][0] * error)
    assert math.log(first.fails_beyond) == pytest.approx(CRITICAL[2][0] * 0.2 / (2 * CRITICAL[2][0]))


# Failing


@pytest.mark.parametrize("number", range(4))
def test_fails_from_the_critical_value_on(number):
    """At each look; before it, the pairs are too noisy for any decision."""
    n, critical = (4, 6, 8, 12)[number], CRITICAL[1][number]
    above, below = (one(costly(*with_t(critical * x, 0.2, n))) for x in (1.001, 0.999))
    assert (above.outcome, above.decided_at) == (FAIL, n) and below.outcome is INCONCLUSIVE


@pytest.mark.parametrize("family", [2, 3, 4])
def test_of_several_endpoints_the_first_has_to_be_clearer(family):
    others = [costly(0.5, -0.5, 0.5, -0.5, name=str(i)) for i in range(family - 1)]
    above, below = (costly(*with_t(CRITICAL[family][0] * x, 0.2)) for x in (1.001, 0.999))
    assert outcomes(above, *others) == [FAIL, *[INCONCLUSIVE] * (family - 1)]
    assert outcomes(below, *others) == [INCONCLUSIVE] * family


@pytest.mark.parametrize("family", [2, 3, 4])
def test_a_clear_failure_lets_the_next_be_judged_among_the_rest(family):
    between = fmean((CRITICAL[family][0], CRITICAL[family - 1][0]))
    clear, next_ = costly(*with_t(1000.0, 0.2), name="clear"), costly(*with_t(between, 0.2))
    vague = [costly(0.5, -0.5, 0.5, -0.5, name=str(i)) for i in range(family - 1)]
    assert outcomes(next_, *vague) == [INCONCLUSIVE] * family
    assert outcomes(next_, clear, *vague[1:])[:2] == [FAIL, FAIL]


def test_it_does_so_at_later_looks_too():
    between = fmean((CRITICAL[2][1], CRITICAL[1][1]))
    clear = costly(*with_t(1000.0, 0.2, 6), name="clear")
    late = costly(*with_t(between, 0.2, 6))
    first, second = gate([late, clear], TERMS)
    assert (first.outcome, first.decided_at, second.outcome, second.decided_at) == (FAIL, 6, FAIL, 4)
    assert outcomes(late, costly(*[0.0] * 6, name="unchanged"))[0] is INCONCLUSIVE


@pytest.mark.parametrize(("mean", "outcome"), [(HALF * 0.99, PASS), (HALF * 1.01, FAIL), (0.0, PASS), (-0.05, PASS)])
def test_what_is_certain_but_small_does_not_fail(mean, outcome):
    assert one(costly(*[mean + 1e-5, mean - 1e-5] * 2)).outcome is outcome


def test_certain_but_small_still_lets_the_next_be_judged_among_the_rest():
    small = costly(*with_t(1000.0, HALF / 2), name="small")
    next_ = costly(*with_t(fmean((CRITICAL[2][0], CRITICAL[1][0])), 0.2))
    assert outcomes(next_, small) == [FAIL, PASS]


def test_each_endpoint_has_a_margin_of_its_own():
    costs = with_t(1000.0, math.log1p(0.05))
    strict, lax = costly(*costs, name="strict"), costly(*costs, name="lax", margin=0.15)
    assert outcomes(strict, lax) == [FAIL, PASS]
    assert [found.margin for found in gate([strict, lax], TERMS)] == [0.03, 0.15]


# Passing, or neither


@pytest.mark.parametrize("number", range(4))
def test_passes_from_the_critical_value_on(number):
    n, critical = (4, 6, 8, 12)[number], boundaries((4, 6, 8, 12), 12, TERMS.beta)[number]
    margin = math.log1p(TERMS.margin)
    above, below = ([margin + cost for cost in with_t(-critical * x, -0.3, n)] for x in (1.001, 0.999))
    assert (one(costly(*above)).outcome, one(costly(*above)).decided_at) == (PASS, n)
    assert one(costly(*below)).outcome is INCONCLUSIVE


def test_a_pass_needs_no_correction_for_other_endpoints():
    noise = [0.006, -0.006, 0.006, -0.006]
    assert outcomes(*(costly(*noise, name=str(i)) for i in range(4))) == [PASS] * 4


def test_decided_at_the_first_look_that_tells():
    found = one(costly(*[0.02, -0.02] * 6))
    assert (found.outcome, found.decided_at, found.n) == (PASS, 6, 12)
    found = one(costly(*[0.0] * 12))
    assert (found.outcome, found.decided_at, found.n) == (PASS, 4, 12)


def test_between_two_looks_nothing_new_is_decided():
    noise = [0.02, -0.02] * 6
    assert [one(costly(*noise[:n])).outcome for n in (4, 5)] == [INCONCLUSIVE] * 2
    assert [next_look(done, TERMS) for done in (0, 3, 4, 5, 6, 8, 11, 12, 20)] == [4, 4, 6, 6, 8, 12, 12, None, None]


@pytest.mark.parametrize("n", range(4))
def test_fewer_than_four_pairs_never_decide(n):
    for cost in (0.0, 0.5):
        found = one(costly(*[cost] * n))
        assert (found.outcome, found.decided_at, found.n) == (INCONCLUSIVE, None, n)
        assert ("4 are wanted at least" in found.why) if n else found.why == "no pairs"
        assert found.detectable is None


def test_too_noisy_for_any_decision_is_inconclusive():
    found = one(costly(*[0.5, -0.5] * 6))
    assert (found.outcome, found.decided_at) == (INCONCLUSIVE, None)
    assert found.why == "neither worse for certain nor within the 3 % margin; detectable: 107.8 % worse"


@pytest.mark.parametrize(
    ("better", "cost", "why"),
    [
        (
            "lower",
            0.02,
            "2 % higher (1.02 times the baseline) in the first 4 pairs: more than half of the 3 % margin",
        ),
        ("lower", 0.3, "35 % higher (1.35 times the baseline) in the first 4 pairs, which noise does not explain"),
        ("higher", 0.3, "25.9 % lower (0.741 times the baseline) in the first 4 pairs, which noise does not explain"),
        ("higher", 0.0302, "3 % lower (0.97 times the baseline) in the first 4 pairs, which noise does not explain"),
    ],
)
def test_a_failure_says_how_far_the_candidate_is_and_by_which_rule_it_fails(better, cost, why):
    pairs = costly(*[cost if better == "lower" else -cost] * 12).pairs
    assert one(PairSeries("any", better, pairs)).why.startswith(why)


def test_more_pairs_than_planned_are_all_looked_at():
    found = one(costly(*[0.04, -0.04] * 10))
    assert (found.outcome, found.n) == (PASS, 20) and found.decided_at in looks_until(20)
    assert found.decided_at > 12


@pytest.mark.parametrize(
    ("states", "expected"), [([], INCONCLUSIVE), ([PASS, PASS], PASS), ([PASS, INCONCLUSIVE, FAIL], FAIL)]
)
def test_one_failure_fails_all_and_one_inconclusive_state_leaves_it_open(states, expected):
    assert all(all_of(order) is expected for order in itertools.permutations(states))
    assert all_of([PASS, INCONCLUSIVE]) is INCONCLUSIVE


# Values without noise


@pytest.mark.parametrize(("cost", "outcome"), [(0.0, PASS), (0.01, PASS), (0.05, FAIL), (-0.2, PASS)])
def test_no_spread_at_all(cost, outcome):
    found = one(PairSeries("s to start", "lower", ((10.0, 10.0 * math.exp(cost)),) * 4))
    assert found.outcome is outcome and found.sd == 0 and found.decided_at == 4
    assert found.ratio is not None and found.ratio.low == pytest.approx(found.ratio.high) == found.ratio.value
    assert found.detectable == pytest.approx(math.expm1(HALF))


def test_values_at_the_ends_of_what_a_float_holds():
    huge = PairSeries("latency", "lower", ((1e-300, 1e300), (1e300, 1e-300)) * 2)
    assert one(huge).outcome is INCONCLUSIVE
    assert one(replace(huge, pairs=((1e-300, 1e300),) * 4)).outcome is FAIL
    assert one(replace(huge, pairs=((1e300, 1e-300),) * 4)).outcome is PASS


# What is missing


def test_a_failure_that_was_seen_before_something_went_missing_says_why_it_failed():
    found = one(replace(costly(*[0.2] * 6), pairs=(*costly(*[0.2] * 6).pairs, (1.0, None))))
    assert (found.outcome, found.decided_at) == (FAIL, 4) and found.why.startswith("22.1 % higher")


def test_which_value_is_missing_is_said():
    pairs, nothing = costly(*[0.0] * 4).pairs, (None, None)
    found = one(PairSeries("x", "lower", (*pairs[:2], (1.0, None), pairs[3])))
    assert "pair 3 has no value of the candidate" in found.why
    assert "pair 1 has no value of the baseline" in one(PairSeries("x", "lower", (nothing, *pairs))).why
    found = one(PairSeries("x", "lower", (nothing,) * 12))
    assert (found.outcome, found.n, found.ratio, found.sd) == (INCONCLUSIVE, 0, None, None)


def test_an_endpoint_without_values_still_counts_in_the_family():
    between = costly(*with_t(fmean((CRITICAL[2][0], CRITICAL[1][0])), 0.2))
    nothing = PairSeries("nothing", "lower", ((None, None),) * 4)
    assert outcomes(between) == [FAIL] and outcomes(between, nothing) == [INCONCLUSIVE] * 2


# Wrong usage


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"margin": 0.0}, "a margin of 0"),
        ({"margin": 1.0}, "a margin of 1"),
        ({"margin": -0.03}, "a margin of -0.03"),
        ({"margin": math.nan}, "a margin of nan"),
        ({"alpha": 0.0}, "alpha 0 and beta"),
        ({"alpha": 0.6}, "alpha 0.6"),
        ({"alpha": math.nan}, "alpha nan"),
        ({"beta": 0.0}, "beta 0"),
        ({"beta": 0.51}, "beta 0.51"),
        ({"pairs": 3}, "a gate of 3 pairs"),
    ],
)
def test_terms_that_make_no_sense(wrong, said):
    with pytest.raises(BadUsage, match=said):
        GateCriteria(**wrong)


@pytest.mark.parametrize(
    ("series", "said"),
    [
        ([], "0 gated endpoints"),
        ([costly(0, 0, 0, 0, name=str(i)) for i in range(5)], "5 gated endpoints"),
        ([costly(0.5, 0.5, 0.5, 0.5), costly(0, 0, 0, 0)], "two gated endpoints of one name"),
        ([costly(*[0.0] * 12, name="a"), costly(*[0.0] * 4, name="b")], "endpoints of 4 and of 12 pairs"),
    ],
)
def test_endpoints_that_cannot_be_judged_together(series, said):
    with pytest.raises(BadUsage, match=said):
        gate(series, TERMS)


# The ratio that is shown


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=15))
def test_hodges_lehmann_is_the_median_of_all_means_of_two(values):
    means = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)]
    found = hodges_lehmann(values)
    assert found.value == pytest.approx(median(means), abs=1e-12)
    if len(values) >= 6:
        assert min(values) <= found.low <= found.value <= found.high <= max(values)


@pytest.mark.parametrize(("n", "beyond"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (20, 52)])
def test_the_interval_leaves_out_as_many_means_as_the_tables_of_signed_ranks_say(n, beyond):
    values = [float(2**i) for i in range(n)]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    found = hodges_lehmann(values)
    assert (found.low, found.high) == (means[beyond], means[-1 - beyond])


@pytest.mark.parametrize("n", [6, 8, 12])
def test_the_interval_covers_the_truth_for_any_symmetric_noise(n):
    """Exactly: all signs of the deviations are as likely, so all are tried."""
    chance = random.Random(n)
    sizes = [chance.uniform(0.1, 1) ** 3 for _ in range(n)]
    signs = itertools.product((-1, 1), repeat=n)
    found = (hodges_lehmann([s * size for s, size in zip(row, sizes)]) for row in signs)
    covered = sum(each.low <= 0 <= each.high for each in found) / 2**n
    assert 0.95 <= covered < 0.97


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_of_few_values_the_interval_is_students(n):
    values = [0.1 * i**2 for i in range(n)]
    assert hodges_lehmann(values) == student_interval(values, hodges_lehmann(values).value)


def test_the_ratio_is_candidate_over_baseline_in_either_direction():
    pairs = ((100.0, 110.0),) * 6
    faster, slower = one(PairSeries("rate", "higher", pairs)), one(PairSeries("time", "lower", pairs))
    assert faster.ratio is not None and faster.ratio == slower.ratio and faster.ratio.value == pytest.approx(1.1)
    assert faster.worse == pytest.approx(-math.log(1.1)) == pytest.approx(-slower.worse)
    assert (faster.outcome, slower.outcome) == (PASS, FAIL)
    only_shown = compare_sides(PairSeries("time", "lower", pairs), TERMS)
    assert (only_shown.ratio, only_shown.outcome, only_shown.decided_at) == (slower.ratio, INCONCLUSIVE, None)


# The smallest worsening that is found


@pytest.mark.parametrize("family", [1, 4])
@pytest.mark.parametrize(("n", "sd"), [(4, 0.002), (4, 0.02), (6, 0.01), (8, 0.01), (12, 0.002), (12, 0.02)])
def test_nine_of_ten_gates_find_what_is_said_to_be_found(n, sd, family):
    """Of this noise, by a gate that passes nobody before its time; that is what the number leaves out."""
    terms, chance, gates = GateCriteria(beta=1e-9), random.Random(n + family), 200
    others = [costly(*[0.5, -0.5] * (n // 2), name=str(i)) for i in range(family - 1)]
    known = [sd * x for x in with_t(1e-9, 1e-9 * math.sqrt((n - 1) / n) / math.sqrt(n - 1), n)]
    scale = sd / stdev(known)
    found = gate([costly(*(scale * x for x in known)), *others], terms)[0]
    assert found.sd == pytest.approx(sd) and found.detectable is not None
    effect = math.log1p(found.detectable)
    drawn = (costly(*(chance.gauss(effect, sd) for _ in range(n))) for _ in range(gates))
    power = sum(gate([each, *others], terms)[0].outcome is FAIL for each in drawn) / gates
    assert 0.8 < power < 0.98  # four standard errors below, and room for earlier looks above


@pytest.mark.parametrize("n", [4, 6, 8, 12])
def test_nothing_below_half_of_the_margin_is_said_to_be_found(n):
    found = one(costly(*[1e-6, -1e-6] * (n // 2)))
    assert found.detectable == pytest.approx(math.expm1(HALF), rel=1e-3)


def test_more_pairs_find_less_and_more_endpoints_find_more():
    noise = [0.02, -0.02] * 6
    by_pairs = [one(costly(*noise[:n])).detectable for n in (4, 6, 8, 12)]
    assert by_pairs == sorted(by_pairs, reverse=True)
    others = [costly(*noise, name=str(i)) for i in range(3)]
    by_family = [gate([costly(*noise), *others[:more]], TERMS)[0].detectable for more in range(4)]
    assert by_family == sorted(by_family) and by_family[0] < by_family[3]


# What changes nothing

costs = st.lists(st.floats(-0.2, 0.2), min_size=4, max_size=13)
sizes = st.floats(1e-6, 1e6)


def seen(found: Comparison) -> tuple[object, ...]:
    return found.outcome, found.decided_at, found.n


@settings(deadline=None)
@given(costs, sizes)
def test_unit_direction_and_sides_do_not_matter(log_costs, size):
    """Another unit; both sides exchanged and the direction turned; a rate instead of a time."""
    series = costly(*log_costs)
    before = one(series)
    scaled = one(replace(series, pairs=tuple((size * a, size * b) for a, b in series.pairs)))
    mirrored = one(replace(series, better="higher", pairs=tuple((b, a) for a, b in series.pairs)))
    rates = one(replace(series, better="higher", pairs=tuple((1 / a, 1 / b) for a, b in series.pairs)))
    assert seen(before) == seen(scaled) == seen(mirrored) == seen(rates)
    assert scaled.ratio.value == pytest.approx(before.ratio.value)
    assert scaled.sd == pytest.approx(before.sd, abs=1e-12)
    assert mirrored.ratio.value == pytest.approx(1 / before.ratio.value)
    assert mirrored.worse == pytest.approx(before.worse)


@settings(deadline=None)
@given(st.integers(4, 12), st.data())
def test_the_order_of_endpoints_does_not_matter(n, data):
    row = st.tuples(st.floats(-0.1, 0.2), st.floats(0.001, 0.1), st.integers(0, 10**6))
    made = []
    for i, (centre, sd, seed) in enumerate(data.draw(st.lists(row, min_size=2, max_size=4))):
        chance = random.Random(seed)
        made.append(costly(*(chance.gauss(centre, sd) for _ in range(n)), name=str(i)))
    order = data.draw(st.permutations(made))
    before, after = gate(made, TERMS), gate(order, TERMS)
    assert {each.name: each for each in before} == {each.name: each for each in after}


@settings(deadline=None)
@given(costs, st.floats(0, 0.3))
def test_a_worse_candidate_is_not_judged_better(log_costs, more):
    """At the first look: the same noise, and a mean that is farther up."""
    ranks = {PASS: 0, INCONCLUSIVE: 1, FAIL: 2}
    before, after = (one(costly(*(c + x for c in log_costs[:4]))) for x in (0.0, more))
    assert ranks[after.outcome] >= ranks[before.outcome]


def test_what_passed_early_and_turns_bad_fails_and_says_why_by_the_pairs_that_decided():
    def turning(name: str, early: float, late: float) -> PairSeries:
        return PairSeries(name, "lower", (*[(1.0, early + 0.001 * i) for i in (1, -1, 1, -1)], *[(1.0, late)] * 8))

    noisy = PairSeries("noisy", "lower", tuple((1.0, 1.0 + 0.06 * (-1) ** i) for i in range(12)))
    turned, recovers = turning("turned", 1.0, 1.2), turning("recovers", 1.1, 0.9)
    assert outcomes(*(replace(each, pairs=each.pairs[:4]) for each in (turned, noisy))) == [PASS, INCONCLUSIVE]
    late = gate([turned, noisy], TERMS)[0]
    assert (late.outcome, late.decided_at) == (FAIL, 12)
    found = one(recovers)
    assert found.outcome is FAIL and "10 % higher (1.1 times the baseline) in the first 4 pairs" in found.why
