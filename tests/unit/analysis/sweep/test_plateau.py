"""Gains by hand, the plateau where the law has it, the law that was planted; and which loads an adaptive sweep asks
for: what decides is measured, nothing twice, in a third of the seconds."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from statistics import fmean

import pytest
from adaptive import h200_seconds, in_turn, play, steps_apart
from hypothesis import given, strategies as st
from refusals import refused
from strategies import curves, law, measurement, noisy_curve, plateau_batch, point, rates, without, work_of_model

from pytest_slmserve.analysis.estimates import Interval, student_interval
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.analysis.points import point_differences, point_of
from pytest_slmserve.analysis.sweep import plateau
from pytest_slmserve.analysis.sweep.curve import FEWEST_POINTS, Curve
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad, crossing, fit, fit_law, gains
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run import executor
from pytest_slmserve.schema.errors import TooFewPoints

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LAWS = st.floats(10, 1e6), st.floats(0.1, 500), st.sets(st.integers(1, 1024), min_size=1, max_size=9)
PUBLISHED_STEP_MS = {
    1: 4.0272, 2: 4.3287, 4: 4.3995, 8: 4.5941, 16: 5.268, 32: 6.5227, 64: 9.2927, 96: 11.9048, 128: 14.5958,
    192: 20.702, 256: 26.3635, 384: 38.3864, 512: 51.0159,
}  # fmt: skip
GRID = tuple(1 << i for i in range(11))
DENTED = dict(zip(GRID, (665, 1247, 2446, 4388, 7695, 12191, 17778, 25677, 27918, 42274, 53466)))
law_of_20 = partial(law, b_half=20.0)
NOISY = {load: (law_of_20(load), 0.88 * law_of_20(load)) for load in GRID}
A_SECOND = {"seconds": lambda load, rate: 1.0}


def pareto_front(points):
    return Curve(subject="opt-1.3b", points=tuple(points)).pareto_front()


def test_gains_skip_invalid_points():
    seen, last = gains([point(1, [100.0, 102.0]), point(2, [150.0, 150.0]), point(4, ()), point(8, [160.0])])
    # sd of the two groups' logs pooled is 0.0099 with 2 degrees of freedom: half width 4.3027 * 0.0099 * 1
    assert seen.value == pytest.approx(150 / 101 - 1)
    assert (seen.low, seen.high) == pytest.approx((0.4233, 0.5498), abs=1e-3)
    assert (seen.start, seen.end, last.start, last.end) == (1, 2, 2, 8)
    rates = {1: 100, 2: 101, 4: 102, 8: 150, 16: 152, 32: 153}
    assert plateau.plateau([point(b, [float(t)]) for b, t in rates.items()]) == ChosenLoad(8)
    noisy = noisy_curve({b: law(b) for b in (64, 128, 256, 512, 1024)}, noise=0.03, repeats=2, seed=4)
    seen = noisy.plateau()
    assert seen.known and (seen.low or 0) <= seen.value <= (seen.high or 10**9) and seen.low != seen.high
    assert (plateau.plateau([]), gains([]), pareto_front([])) == (ChosenLoad(), (), ())
    for b_half, tolerance in product((1.1, 5.0, 21.0, 45.0), (0.05, 0.10, 0.2)):  # where the law has it
        points = [point(b, [law(b, b_half=b_half)] * 2) for b in BATCHES]
        expected = next(b for b in BATCHES if b > plateau_batch(b_half, tolerance))
        begins = expected if expected < 512 else None
        assert plateau.plateau(points, tolerance) == ChosenLoad(begins, begins, begins, known=True), b_half
    equal = [point(1, [10.0], [1.0]), point(2, [10.0], [1.0]), point(4, [10.0], [2.0])]
    assert [p.concurrency for p in pareto_front(equal)] == [1, 2]
    slow, fast = point(1, [100.0, 100.0], [2.0, 2.0]), point(2, [150.0, 150.0], [1.6, 1.6])
    [(other, by)] = plateau.advantages([slow, fast], slow)
    assert other is fast and (by.value, by.low, by.high) == pytest.approx((0.25,) * 3)
    single = [replace(p, repeats=p.repeats[:1], e2e_repeats=p.e2e_repeats[:1]) for p in (slow, fast)]
    assert plateau.advantages(single, single[0])[0][1].low is None and not point_differences(single).known


@given(st.lists(st.floats(10, 1000), min_size=2, max_size=6), st.integers(2, 5))
def test_gain_is_growth_per_doubling(values, factor):
    found = gains([point(factor**i, [rate]) for i, rate in enumerate(values)])
    for gain, (a, b) in zip(found, pairwise(values), strict=True):
        assert (1 + gain.value) ** math.log2(factor) == pytest.approx(b / a)
        assert (gain.end, gain.low, gain.high) == (factor * gain.start, None, None), "one repeat has no interval"


@given(curves(), st.randoms(use_true_random=False))
def test_point_order_changes_no_plateau(curve, chance):
    shuffled = chance.sample(curve.points, len(curve.points))
    for ask in (plateau.plateau, pareto_front, gains):
        assert ask(shuffled) == ask(curve.points)
    grid, known = plateau.Grid(tuple(p.concurrency for p in curve.points), 0.1, 3, h200_seconds), curve.points[::2]
    turned, order = replace(grid, loads=grid.loads[::-1]), chance.sample(known, len(known))
    assert plateau.next_load(grid.loads, known, 0.1) == plateau.next_load(grid.loads, order, 0.1)
    assert plateau.next_measurement(grid, known) == plateau.next_measurement(turned, order)
    front = pareto_front(curve.points)
    figures = {p: (p.output_tokens_per_s, -p.e2e_s) for p in curve.points}
    assert front, "some point is always the fastest"
    for p, (rate, wait) in figures.items():
        assert (p in front) is not any(q[0] >= rate and q[1] >= wait and q != (rate, wait) for q in figures.values())
        most = max((by.value for _, by in plateau.advantages(curve.points, p)), default=0.0)
        assert most <= 1e-9 if p in front else most >= -1e-9
    first = curve.points[0].concurrency
    assert first not in [p.concurrency for p in pareto_front(without(curve, first).points)], "it is invalid now"


def test_intervals_hold_at_all_looks():
    """With one look each tail is 2.5%; with several each is less, together as much as one."""
    for looks, repeats in (((), 3), ((4,), 4), ((2, 4), 1), ((2, 4), 4)):
        own, first, second, third, last, later = (plateau.tail_at(n, looks) for n in (repeats, 1, 2, 3, 4, 9))
        assert first == second == third and last == later and own in (first, last)
        if len(looks) < 2:
            assert first == last == 0.025
        else:
            assert max(first, last) < 0.025 < first + last < 0.05
    begun = {first: plateau.looks_from(first) for first in (2, 5, 20)}
    assert begun == {2: (2, 3, 4, 6, 8, 12, 16), 5: (5, 6, 8, 12, 16), 20: (20,)}, "with what is measured of each load"
    looks = (2, 3, 4, 6, 8, 12, 16)
    for n, least in ((2, 0.025), (3, 0.017), (8, 0.012)):
        more = plateau.tail_at(n, looks, over=True)
        assert least <= more <= 0.025 and more > 2 * plateau.tail_at(n, looks), "an early end wastes nothing"
    assert plateau.tail_at(16, looks, over=True) == plateau.tail_at(16, looks), "nothing was left"
    assert plateau.tail_at(5, (5,), over=True) == plateau.tail_at(5) == 0.025


def test_fitted_model_matches_published_results():
    """Half of it needs no GPU: shapes give b_half, then one number of the device predicts batches from 1 to 512. The
    fixed part of a step shows the host: reading the weights takes less than half of it at that GPU's bandwidth."""
    points = [point(b, [b / ms * 1e3]) for b, ms in PUBLISHED_STEP_MS.items()]
    shapes, peaks = work_of_model(model_of("opt-1.3b"), 161, 338), peaks_of("NVIDIA H100 64GB HBM2")
    both, one = fit(points), fit(points, b_half=shapes.b_half)
    assert (both.b_half.value, shapes.b_half) == (pytest.approx(45.4, abs=0.5), pytest.approx(40.6, abs=0.1))
    assert both.error_max < 0.06 and both.error_mean < 0.03 and one.error_max < 0.10 and one.error_mean < 0.05
    assert one.b_half == Interval(shapes.b_half) and one.t_inf.value == pytest.approx(10_800, rel=0.02)
    fixed_s = both.fixed_s.value, shapes.weight_bytes / peaks.bytes_per_s
    assert fixed_s == pytest.approx((3.95e-3, 1.61e-3), rel=0.01)


@given(*LAWS, st.integers(1, 1024))
def test_planted_saturation_model_is_recovered(t_inf, b_half, batches, load):
    rows = [(b, law(b, t_inf, b_half)) for b in batches]
    assert fit_law(rows, b_half) == pytest.approx((t_inf, b_half))
    if len(rows) < 3:
        return
    assert fit_law(rows) == pytest.approx((t_inf, b_half), rel=1e-3)
    known = {n: law(n, b_half=b_half) for n in batches}
    load = min(max(load, min(batches)), max(batches))
    points = [point(n, [rate]) for n, rate in known.items()]
    (seen,) = plateau.predictions(points, [load])
    exact = law(load, b_half=b_half)
    found = plateau.predicted(known, load), seen.tokens_per_s.value, seen.tokens_per_s.low
    assert found == pytest.approx((exact,) * 3) and plateau.law_error(points)[0] < 1e-9 and seen.concurrency == load


def test_fit_intervals_cover_true_values():
    points = [point(b, [law(b), law(b) * 1.01]) for b in BATCHES[:-1]]
    found = fit([point(512, [law(512)]), *points[::-1]])
    once = fit([point(b, [law(b)]) for b in BATCHES])
    assert (found.n, fit([*points, point(512, ())]).n) == (1, 2), "an invalid point takes no part"
    assert (once.t_inf.value, once.b_half.value, once.fixed_s.value) == pytest.approx((10_000, 45, 0.0045))
    assert (once.n, once.b_half.low) == (1, None) and once.error_max < 1e-9, "one repeat has no interval"
    assert once.tokens_per_s(45) == pytest.approx(5000)
    # Two launches of which the second is 4% faster: their own repeats say nothing of a third.
    rates = [(launch, i, 1 + 0.04 * launch + 0.001 * i) for launch in range(2) for i in range(3)]
    points = [
        point_of([(measurement(b, law(b) * by, repeat=3 * on + i, launch=f"launch-{on}"),) for on, i, by in rates])
        for b in BATCHES
    ]
    found, means = fit(points).t_inf, student_interval([10_010.0, 10_410.0])
    assert (found.low, found.high) == pytest.approx((means.low, means.high), rel=0.01)
    found = [fit(noisy_curve({b: law(b) for b in BATCHES}, seed=seed).points).b_half for seed in range(300)]
    assert 0.91 < sum(seen.low <= 45 <= seen.high for seen in found) / 300 < 0.985
    # As two repeats of a small sweep have it, whose Student interval is 13 standard errors wide.
    repeats = {1: [95.0, 130.0], 4: [420.0, 400.0], 16: [1210.0, 1340.0], 64: [2900.0, 2300.0]}
    found = fit([point(batch, rates) for batch, rates in repeats.items()])
    assert found.b_half.low == found.fixed_s.low == found.t_inf.low == 0.0
    assert 0 < found.b_half.value < found.b_half.high


@given(st.dictionaries(st.integers(1, 512), st.floats(10, 1e4), min_size=4, max_size=8))
def test_fit_minimises_relative_error(rows):
    """Least squares of the relative error of the step time: any small step aside is farther."""

    def squares(t_inf, b_half):
        return math.fsum((1 - (batch + b_half) / t_inf * rate / batch) ** 2 for batch, rate in rows.items())

    try:
        t_inf, b_half = fit_law(rows.items())
    except TooFewPoints:
        return
    least = squares(t_inf, b_half) * (1 - 1e-9) - 1e-9
    assert all(squares(t_inf * by, b_half + more) >= least for by in (0.99, 1, 1.01) for more in (-0.5, 0, 0.5))


@pytest.mark.parametrize(("rates", "b_half", "facts"), [
    ({}, None, (3, 0)), ({1: [1.0], 2: [1.5]}, None, (3, 2)), ({1: [1.0], 2: (), 4: ()}, None, (3, 1)),
    ({8: ()}, 45.0, ()), ({b: [b**1.5] for b in BATCHES}, None, ()),
])  # fmt: skip
def test_too_few_points_fit_nothing(rates, b_half, facts):
    with refused(*facts, kind=TooFewPoints):
        fit([point(b, each) for b, each in rates.items()], b_half)


@st.composite
def planted(draw):
    """Any curve, sensible or not."""
    grid = sorted(draw(st.sets(st.integers(1, 1024), min_size=1, max_size=12)))
    return {load: draw(rates()) for load in grid}


def full_plateau(curve, tolerance=0.10):
    return plateau.plateau([point(load, [rate]) for load, rate in curve.items()], tolerance).value


@pytest.mark.parametrize(("grid", "rate", "loads", "begins"), [
    (GRID[:10], law_of_20, [1, 512, 128, 64], 128),  # the ends, where it begins, before
    (GRID, DENTED.__getitem__, [1, 1024, 512], None),  # 9% from 128 to 256: half of the throughput is beyond it
    (GRID, lambda load: 100.0 * load**0.8, [1, 1024, 512], None),  # the last doubling
    (GRID, lambda load: 1000.0, [1, 1024, 32], 1),  # two loads cannot tell whether the law holds
    (GRID, partial(law, b_half=7.0), [1, 1024, 32, 16, 64, 256], 32),  # perhaps in one doubling
    (GRID[:10], lambda load: law_of_20(load) * (load != 128), [1, 512, 128, 256, 64], 256),  # 128 is invalid
    *((GRID, lambda load, at=at: law(load, b_half=2.0) * (1 + 0.2 * (load >= at)), None, at)
      for at in (128, 256, 512)),
    (GRID, lambda load: law(load) * (1 if load <= 256 else 0.8), None, 256),
])  # fmt: skip
def test_adaptive_loads_follow_expected_order(grid, rate, loads, begins):
    played = play(grid, rate, repeats=1)
    assert played.loads == (loads or played.loads) and all(wanted.why for wanted in played.asked)
    assert plateau.plateau(played.points).value == begins == full_plateau({n: rate(n) for n in grid if rate(n)})


def test_known_loads_are_not_repeated():
    everything = [point(load, [law_of_20(load), 1.001 * law_of_20(load)]) for load in GRID[:10]]
    assert play(GRID[:10], law_of_20, known=everything).asked == ()
    assert play(GRID[:10], law_of_20, known=everything[::9], repeats=1).loads == [128, 64]
    beside = [point(load, [5.0]) for load in (3, 100, 4096)]
    assert plateau.next_load(GRID, beside, 0.1) == plateau.next_load(GRID, (), 0.1)
    once = [replace(point(load, [law_of_20(load)]), left_out=2) for load in (1, 64, 128, 512)]
    grid = plateau.Grid(GRID[:10], 0.1, 2, h200_seconds)
    assert plateau.next_measurement(grid, once) is None
    once[1] = replace(once[1], left_out=1)
    assert plateau.next_measurement(grid, once).concurrency == 64
    assert plateau.SECOND_CHANCES == executor.EXTRA_ATTEMPTS, "as often as a run tries again"


@pytest.mark.parametrize(("grid", "answer", "facts", "loads"), [
    # Equal repeats have no noise: one is enough, of the cheapest load around the plateau.
    (GRID, law_of_20, {}, [1, 1024, 128, 64, 256, 64]),
    # Eleven loads twice, a second each: there is time for seven measurements; of three repeats for more.
    (GRID, None, A_SECOND, [1, 1024, 128, 64, 256, 64, 128]),
    (GRID, None, A_SECOND | {"repeats": 3}, [1, 1024, 128, 64, 256, 64, 64, 128, 128, 256, 512]),
    # Four loads, of which three are needed: a third of the time is spent before the noise is known.
    (GRID[6:10], law_of_20, {}, [64, 512, 128, 64]),
])  # fmt: skip
def test_noisy_gain_is_repeated(grid, answer, facts, loads):
    played = play(grid, answer or in_turn(NOISY), **facts)
    assert played.loads == loads
    assert [w.repeats for w in played.asked] == [loads[: i + 1].count(load) for i, load in enumerate(loads)]


@given(planted(), st.integers(1, 3), st.floats(0.02, 0.5))
def test_adaptive_sweep_measures_deciding_loads(curve, repeats, tolerance):
    answers = in_turn({k: (v, 1.1 * v, 0.9 * v) for k, v in curve.items()})
    played = play(tuple(curve), answers, repeats=repeats, tolerance=tolerance)
    assert set(played.loads) <= set(curve)
    for load in set(played.loads):
        own = [w.repeats for w in played.asked if w.concurrency == load]
        assert own == list(range(1, len(own) + 1)) and len(own) <= repeats
    # The plateau of the loads measured begins after a load next to it on the grid that still gains; where there is
    # none, the last doubling of the grid gains.
    grid = tuple(curve)
    points = play(grid, curve.__getitem__, repeats=1, tolerance=tolerance).points
    loads = [p.concurrency for p in points]
    fewest = plateau.FEWEST_BATCHES
    assert len(loads) >= min(fewest, len(grid)) and {grid[0], grid[-1]} <= set(loads) and fewest == FEWEST_POINTS
    found = plateau.plateau(points, tolerance).value
    before = grid[max(grid.index(found) - 1, 0)] if found is not None else grid[max(len(grid) - 2, 0)]
    assert before in loads
    for a, b in pairwise(load for load in loads if found is not None and load >= found):
        between = [load for load in grid if a < load < b]
        allowed = len(between) <= (1 if a == found else 0)
        assert allowed or curve[b] / curve[a] - 1 < tolerance, "what may hide a doubling that gains was looked at"


@given(st.floats(2, 2000), st.sampled_from([9, 10, 11]))
def test_regular_curve_saves_measuring_time(b_half, size):
    """A third of the seconds is enough, but for the first repeat, which is made in any case."""
    curve = {load: law(load, b_half=b_half) for load in GRID[:size]}
    played = play([*curve], curve.__getitem__)
    spent = sum(h200_seconds(load, curve[load]) for load in played.loads)
    assert spent <= 2 * sum(h200_seconds(load, rate) for load, rate in curve.items()) * (1 / 3 + 0.02)
    assert steps_apart([*curve], plateau.plateau(played.points).value, full_plateau(curve)) <= 1


def test_prediction_width_follows_model_error():
    points = [point(load, [law(load) * (1.05 if load == 64 else 1)]) for load in (1, 64, 512)]
    share, where = plateau.law_error(points)
    assert where == 64 and share == pytest.approx(1 - 1 / 1.05)
    (seen,) = plateau.predictions(points, [256])
    assert seen.tokens_per_s.high == pytest.approx(seen.tokens_per_s.value * (1 + share))
    assert seen.tokens_per_s.low < law(256) < seen.tokens_per_s.high
    dented = [point(load, [DENTED[load]]) for load in (1, 512, 1024)]
    assert plateau.law_error(dented)[0] > 0.15 and plateau.law_error(dented[:2]) is None
    assert plateau.predictions(dented, [256]) == plateau.predictions(dented[:2], [256]) == ()


# Where ratios that fall with the load go through 1


def drafted(load, b_half, acceptance, draft_cost):
    """Throughput with drafts over that without, on an engine whose steps of B sequences take b_half + B, and with
    drafts b_half + (1 + draft_cost) B, for 1 + acceptance tokens each."""
    return (1 + acceptance) * (b_half + load) / (b_half + (1 + draft_cost) * load)


DRAFTS = st.floats(0.05, 4), st.floats(0.05, 8), st.floats(0.05, 0.95)


def planted_ratios(acceptance, beyond, where, noise=0.0, seed=0):
    """Ratios at doublings of the load, each with an interval, that cross 1 at a share `where` of their logarithmic
    range; and where they do: (1 + a)(b + B) = b + (1 + d) B at B = a b / (d - a)."""
    chance, draft_cost = random.Random(seed), acceptance + beyond
    planted = BATCHES[-1] ** where
    b_half, found = planted * (draft_cost - acceptance) / acceptance, {}
    for load in BATCHES:
        true = drafted(load, b_half, acceptance, draft_cost)
        seen = true * math.exp(chance.gauss(0, noise))
        found[load] = Interval(seen, seen * math.exp(-1.96 * noise), seen * math.exp(1.96 * noise))
    assert drafted(planted, b_half, acceptance, draft_cost) == pytest.approx(1.0)
    return found, planted


@given(*DRAFTS)
def test_crossing_lies_in_its_interval(acceptance, beyond, where):
    ratios, planted = planted_ratios(acceptance, beyond, where)
    seen = crossing(ratios)
    assert seen.low / 1.0001 <= planted <= seen.high * 1.0001
    below, above = (end(load for load in ratios if side(load)) for end, side in (
        (max, lambda load: load <= planted), (min, lambda load: load >= planted))
    )  # fmt: skip
    assert below * 0.999 <= seen.low and seen.high <= above * 1.001, "between the loads around it"
    assert crossing(dict(reversed(ratios.items()))) == seen, "in whatever order"


def test_crossing_interval_has_nominal_coverage():
    cases = [planted_ratios(0.7, 0.8, 0.3 + 0.001 * seed, 0.02, seed) for seed in range(400)]
    seen = [(crossing(ratios), planted) for ratios, planted in cases]
    assert sum(found.low <= planted <= found.high for found, planted in seen) >= 0.95 * len(seen)
    assert fmean(found.high / found.low for found, _ in seen) < 1.8


@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=9), st.integers(0, 8), st.floats(1, 3))
def test_higher_ratios_never_lower_crossing(values, place, factor):
    """Whether they fall with the load or not; it is none of these loads where all lie on one side."""
    ratios = {2**i: Interval(value, 0.9 * value, 1.1 * value) for i, value in enumerate(values)}
    raised = {
        load: ratio.mapped(lambda end: end * factor) if load == 2**place else ratio for load, ratio in ratios.items()
    }
    seen, later = crossing(ratios), crossing(raised)
    assert seen.low / 1.0001 <= seen.value <= seen.high * 1.0001 and seen.value <= later.value * 1.0001
    for found in (seen.value, seen.low, seen.high):
        assert found in (0.0, math.inf) or 0.999 <= found <= 2 ** (len(values) - 1) * 1.001
    assert min(values) <= 1 or seen.value == math.inf
    assert max(values) > 1 or seen.value == 0


def test_two_loads_widen_crossing_interval():
    assert crossing({2: Interval(2.0, 1.9, 2.1), 8: Interval(0.5, 0.4, 0.6)}).mapped(round) == Interval(4, 2, 8)
    seen = crossing({load: Interval(ratio) for load, ratio in ((1, 2.0), (4, 1.0), (16, 0.5))})
    assert (seen.value, seen.low, seen.high) == (pytest.approx(4), 0, math.inf)


@given(st.floats(200, 40_000), st.floats(0.5, 300), st.floats(30, 200))
def test_adaptive_sweep_keeps_its_budget(t_inf, b_half, budget_s):
    """The smallest load is measured in any case; a second one only if a repeat of the smallest is paid for as well."""
    rate = lambda load: t_inf * load / (load + b_half)  # noqa: E731
    played = play(GRID, rate, budget_s=budget_s)
    spent_s = sum(h200_seconds(load, rate(load)) for load in played.loads)
    assert played.loads[0] == 1 and spent_s <= max(budget_s, h200_seconds(1, rate(1)))
    if len({*played.loads}) > 1:
        assert len(played.loads) > len({*played.loads})
    paid = play(GRID, rate, budget_s=1e9).loads
    known = sorted({*paid})
    assert {*play(GRID, rate).loads} <= {*paid} and all(b <= 4 * a for a, b in pairwise(known)), "no wide gap is left"
