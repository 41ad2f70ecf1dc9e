"""The batch that is worth its latency: by hand, on published results, on planted laws; and where there is most
goodput, honest at the ends of what was measured and beside gaps."""

import pytest
from facts import tells
from hypothesis import given, strategies as st
from published import ROWS
from refusals import refused
from strategies import law, point

from pytest_slmserve.analysis.advice.advisor import ModelSweep, Objectives, decide
from pytest_slmserve.analysis.sweep import batching, plateau
from pytest_slmserve.analysis.sweep.batching import CONCURRENCY, RATE, AbsoluteSlo, RelativeSlo, highest_load, peak
from pytest_slmserve.schema.errors import TooFewPoints

PUBLISHED = [point(knob, [total], [ms / 1e3]) for knob, _, total, ms, _ in ROWS]
B_HALF_FROM_SHAPES = 40.6  # OPT-1.3B, a context of 330 tokens
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = st.sets(st.integers(2, 1024), min_size=3, max_size=9).map(lambda found: sorted({1, *found}))
EFFICIENCIES, FACTORS = st.floats(0.02, 0.9), st.floats(1.01, 20)
HUGE = "9" * 400
CURVE = [(1, 1.0), (2, 2.0), (4, 3.9), (8, 6.0), (16, 2.5)]
ATTAINED = [(1, 1.0), (2, 0.97), (4, 0.91), (8, 0.6), (16, 0.95)]


def decided(points, slo, threshold=0.1, b_half=None):
    sweep = ModelSweep(name="opt-1.3b", points=tuple(points), b_half=b_half)
    return decide(sweep, Objectives(slo=slo, threshold=threshold))


def of_law(batches, *parameters):
    return [point(b, [law(b, *parameters)]) for b in batches]


@pytest.mark.parametrize(("text", "slo"), [
    ("2x@32", RelativeSlo(2.0, 32)), ("2.5x@1", RelativeSlo(2.5, 1)), ("30ms", AbsoluteSlo(0.03)),
    ("0.03s", AbsoluteSlo(0.03)), (".5s", AbsoluteSlo(0.5)), ("", None), ("30 ms", None),
    *((text, None) for text in f"2x x@32 0x@32 2x@0 -2x@32 2x@3.5 30 0ms nans {HUGE}s {HUGE}x@1".split()),
])  # fmt: skip
def test_latency_objective_text_is_parsed(text, slo):
    if slo:
        assert batching.parse_relative_slo(text) == slo
    else:
        with refused(repr(text), hint="2x@32"):
            batching.parse_relative_slo(text)


@pytest.mark.parametrize(("factor", "chosen", "cap"), [(2, 96, 105), (4, 256, 250)])
def test_published_batch_choice_is_reproduced(factor, chosen, cap):
    seen = decided(PUBLISHED, RelativeSlo(factor, 32))
    assert (seen.choice, seen.limit.seconds) == (plateau.ChosenLoad(chosen), factor * 7.509587e-3)
    assert (seen.batch, seen.predicted, seen.reason) == (chosen, False, "")
    assert seen.caps.slo == pytest.approx(cap, rel=0.06), "from the latencies alone"
    caps = decided(PUBLISHED, RelativeSlo(factor, 32), b_half=B_HALF_FROM_SHAPES).caps
    assert (round(caps.slo), round(caps.efficiency)) == (cap, 375), "closed forms, half-saturation from shapes"
    free = decided(PUBLISHED, None)
    assert (free.choice.value, free.limit) == (256, None), "without an objective efficiency decides"


@given(st.floats(10, 1e6), st.floats(0.5, 500), BATCHES, EFFICIENCIES, FACTORS)
def test_choice_agrees_with_closed_forms(t_inf, b_half, batches, threshold, factor):
    """On a planted law; a load as near to a cap as rounding is may be on either side. A tighter objective never chooses
    more."""
    points = of_law(batches, t_inf, b_half)
    seen, looser = (decided(points, RelativeSlo(by * factor, 1), threshold / by) for by in (1, 2))
    cap = min(seen.caps.efficiency, seen.caps.slo)
    off = 1e-3 * (cap + b_half)
    sure, possible = (max(b for b in batches if b == 1 or b < cap + sign * off) for sign in (-1, 1))
    assert seen.choice.value in (sure, possible) and seen.choice.value <= looser.choice.value


def test_latency_at_limit_is_allowed():
    points = [point(b, [rate], [wait]) for b, rate, wait in ((1, 100.0, 0.1), (2, 150.0, 0.2), (4, 200.0, 0.4))]
    asked = [(RelativeSlo(1, 2), 0.1), (AbsoluteSlo(0.4), 0.1), (AbsoluteSlo(0.4), 0.5), (AbsoluteSlo(0.05), 0.1)]
    found = [decided(points, slo, threshold).choice.value for slo, threshold in asked]
    assert found == [2, 4, 2, None], "200/(4 x 100) is not above one half"
    points = of_law(GRID[:-1])
    assert decided([*points, point(512, ())], None, 0.05).choice.value == 256
    limit = batching.limit_of(RelativeSlo(2, 32), [*points[:5], *points[6:]], None)
    assert limit.at is None and tells(limit.note, 32, 16, 64)
    # 64 takes 1.416 times as long as 32; 128 is far beyond.
    for factor, found in ((2, (64, 64, 64)), (1.41, (32, 32, 64)), (1.42, (64, 32, 64))):
        noisy = [point(b, [law(b) * 0.97, law(b) * 1.03]) for b in GRID]
        assert decided(noisy, RelativeSlo(factor, 32)).choice == plateau.ChosenLoad(*found, known=True)


def test_unmeasured_latency_is_interpolated():
    """Little's latency of the law is a straight line."""
    for at, facts in ((100, (64, 128)), (1024, ()), (64, None)):
        points = of_law(GRID[3:])
        found = batching.limit_of(RelativeSlo(2, at), points, batching.latency_law(points))
        assert found.seconds == pytest.approx(2 * 256 * at / law(at))
        assert (found.at, found.note) == (64, None) if facts is None else tells(found.note, at, *facts)
    base = decided(of_law(GRID[3:]), None).base
    assert base.per_s == pytest.approx(law(1)) and base.note
    assert batching.measured_base([point(1, [90.0, 110.0])]).per_s == 100
    assert batching.measured_base([point(2, [1.0])]) is None
    steep = [point(b, [100.0 * b]) for b in (2, 4, 8)]
    undecided = decided(steep, None)
    assert undecided.batch is None and tells(undecided.reason, "T(1)")
    with refused(64, kind=TooFewPoints):
        batching.limit_of(RelativeSlo(2, 64), [point(1, [100.0]), *steep], None)
    assert decided([point(1, [100.0]), *steep], AbsoluteSlo(3.0)).caps == batching.Caps()


@pytest.mark.parametrize("unit", [RATE, CONCURRENCY])
@pytest.mark.parametrize(("points", "invalid", "found", "facts"), [
    (CURVE, [], (8, 6.0, 4, 16, ()), ("6/s", 4, 16)),
    (CURVE, [8, 16], (8, 6.0, 4, 16, ()), ("6/s",)),  # of which one repeat is valid
    (CURVE[:4], [], (8, 6.0, 4, None, ()), ("6/s",)), (CURVE[3:], [], (8, 6.0, None, 16, ()), ("6/s",)),
    (CURVE[3:4], [], (8, 6.0, None, None, ()), ("6/s",)),
    ([(16, 2.0), (8, 1.0), (8, 7.0), (4, 3.9), (8, 7.0)], [], (8, 5.0, 4, 16, ()), ("5/s",)),
    ([(4, 3.0), (8, 5.0), (16, 5.0), (32, 1.0)], [], (8, 5.0, 4, 16, ()), ("5/s",)),  # of equal ones the smaller
    ([(1, 1.0), (4, 3.9), (16, 2.5)], [8, 2, 0.5, 1, 16], (4, 3.9, 1, 16, (2, 8)), ("2, 8",)),
    ([(1, 1.0), (4, 3.9)], [8], (4, 3.9, 1, None, (8,)), (8,)),
])  # fmt: skip
def test_goodput_peak_names_neighbouring_loads(points, invalid, found, facts, unit):
    seen = peak(points, invalid=invalid, unit=unit)
    assert (seen.load, seen.per_s, seen.below, seen.above, seen.unknown, seen.unit) == (*found, unit)
    assert seen.bracketed is (None not in found and found[4] == ()) and tells(seen.why, f"{found[0]} {unit}", *facts)


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 100)), min_size=1, max_size=30))
def test_no_load_exceeds_goodput_peak(points):
    seen, rates = peak(points), sorted({rate for rate, _ in points})
    by_rate = {rate: [value for at, value in points if at == rate] for rate in rates}
    assert all(sum(values) / len(values) <= seen.per_s + 1e-9 for values in by_rate.values())
    assert (seen.above is None, seen.below is None) == (seen.load == rates[-1], seen.load == rates[0])
    nothing, doubtful = peak([(4, 0.0), (8, 0.0)]), peak([(4, 0.0), (8, 0.0)], invalid=[2])
    assert (nothing.per_s, doubtful.per_s, nothing.unknown, doubtful.unknown) == (0, 0, (), (2,))
    assert not tells(nothing.why, 4) and tells(doubtful.why, 2)
    assert peak([]) is peak([], invalid=[8]) is highest_load([]) is None


@pytest.mark.parametrize("unit", [RATE, CONCURRENCY])
@pytest.mark.parametrize(("points", "goal", "invalid", "found", "facts"), [
    (ATTAINED, 0.9, [], (4, 0.91, (8, 0.6), ()), ("90%", "91%", "60%", 8)),  # what 16 attains is luck
    (ATTAINED, 0.97, [], (2, 0.97, (4, 0.91), ()), ("97%", "91%")),
    (ATTAINED, 0.5, [], (16, 0.95, None, ()), ("50%", "95%")),
    ([(1, 1.0), (4, 0.91), (8, 0.6)], 0.9, [2, 4, 16], (4, 0.91, (8, 0.6), (2,)), (2,)),
    ([(1, 1.0), (1, 0.7)], 0.9, [], (None, None, (1, 0.85), ()), ("90%", "85%", 1)),
    ([(1, 0.2), (2, 0.1)], 0.9, [], (None, None, (1, 0.2), ()), ("90%", "20%", 1)),
])  # fmt: skip
def test_highest_load_keeps_goodput_goal(points, goal, invalid, found, facts, unit):
    seen = highest_load(points, goal, invalid, unit)
    assert (seen.load, seen.attainment, seen.above, seen.unknown, seen.goal) == (*found, goal)
    assert tells(seen.why, *facts, *([] if found[0] is None else [f"{found[0]} {unit}"]))
    assert highest_load(points, invalid=invalid, unit=unit).goal == 0.9
