"""A gate whose sides live on one GPU at once: its estimate by hand, the boundaries of its looks, how many windows a
launch needs, what is refused, what is missing, and the committed launches of two equal sides and of a layer more."""

import math
from dataclasses import replace
from statistics import fmean, stdev, variance

import pytest
from facts import tells
from hypothesis import given, strategies as st
from launches import HAPPENS
from scipy.stats import t as student
from scripts import CHECKOUT, checkout_script, loaded

from pytest_slmserve.analysis.gate import side_by_side
from pytest_slmserve.analysis.gate.decision import GateCriteria, compare_sides, gate, interim_analyses
from pytest_slmserve.analysis.gate.side_by_side import COMMITTED, Allowance, WindowSeries, host_decides, pairs_wanted
from pytest_slmserve.analysis.verdict import State

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
TERMS = GateCriteria().with_both_at_once
LAUNCHES = st.lists(st.lists(st.floats(-0.2, 0.2), min_size=8, max_size=24), min_size=1, max_size=5)


def windows(*means: float, noise: float = 0.01) -> list[list[float]]:
    return [[mean + noise * each for each in HAPPENS] for mean in means]


def series(launches, name="seconds", better="lower", allowance=COMMITTED, margin=0.03):
    """Windows of a baseline that takes 7 s, or does 7 tokens/s."""
    sign = 1 if better == "lower" else -1
    pairs = [[(7.0, 7.0 * math.exp(sign * cost)) for cost in launch] for launch in launches]
    return WindowSeries.of(name, better, pairs, margin, allowance)


@given(LAUNCHES, st.sampled_from(["lower", "higher"]), st.floats(0.001, 0.02), st.integers(1, 30))
def test_window_estimate_matches_hand_calculation(launches, better, sd, df):
    seen = series(launches, better=better, allowance=Allowance(sd, df, "")).estimate()
    means, k = [fmean(launch) for launch in launches], len(launches)
    quarters = [[launch[len(launch) * i // 4 : len(launch) * (i + 1) // 4] for i in range(4)] for launch in launches]
    by_pairs = fmean(variance(launch) / len(launch) for launch in launches)
    by_blocks = fmean(variance([fmean(part) for part in parts]) / 4 for parts in quarters)
    between = variance(means) if k > 1 else 0
    v = (df * (sd**2 + max(by_pairs, by_blocks)) + (k - 1) * between) / (df + k - 1)
    assert (seen.mean, seen.error, seen.df) == (
        pytest.approx(fmean(means), abs=1e-12), pytest.approx(math.sqrt(v / k), rel=1e-6), df + k - 1
    )  # fmt: skip


def test_costs_need_one_complete_launch():
    each = series(windows(0.0, 0.02))
    found = replace(each, windows=((), *each.windows[1:])).with_costs([0.01])
    assert fmean(found.windows[0]) == pytest.approx(0.01) and found.spread == pytest.approx(each.spread)


@pytest.mark.parametrize(("endpoints", "critical"), [(1, (3.20, 3.17)), (2, (3.64, 3.59)), (4, (4.10, 4.01))])
def test_allowance_sets_look_boundaries(endpoints, critical):
    """They fail from there on, and pass from 2.22 and 2.19 standard errors below the margin."""
    each = [series(windows(0.0, 0.0, 0.0, 0.0), f"seconds {i}") for i in range(endpoints)]
    found = interim_analyses(each, TERMS)["seconds 0"]
    assert [step.pairs for step in found] == [2, 4]
    for step, c, d in zip(found, critical, (2.22, 2.19), strict=True):
        error = each[0].estimate(step.pairs).error
        assert math.log(step.fails_beyond) == pytest.approx(max(c * error, math.log(1.03) / 2), abs=0.01 * error)
        assert math.log(step.passes_within) == pytest.approx(math.log(1.03) - d * error, abs=0.01 * error)


@pytest.mark.parametrize(("means", "noise", "better", "outcome", "at"), [
    ((0.0, 0.001), 0.002, "lower", PASS, 2), ((0.05, 0.05), 0.002, "lower", FAIL, 2),
    ((0.05, 0.05), 0.002, "higher", FAIL, 2), ((-0.05, -0.05), 0.002, "higher", PASS, 2),
    ((0.018, 0.018, 0.002, 0.001), 0.02, "lower", PASS, 4), ((0.018, 0.018, 0.03, 0.03), 0.02, "lower", FAIL, 4),
    ((0.018, 0.018, 0.018, 0.018), 0.05, "lower", INCONCLUSIVE, None), ((0.05,), 0.002, "lower", INCONCLUSIVE, None),
])  # fmt: skip
def test_gate_ends_after_two_launches(means, noise, better, outcome, at):
    (found,) = gate([series(windows(*means, noise=noise), better=better)], TERMS)
    assert (found.outcome, found.decided_at, found.n) == (outcome, at, len(means))
    if len(means) == 1:
        assert found.why == "1 launch, 2 are wanted at least"


def test_window_interval_uses_student_t():
    for better in ("lower", "higher"):
        each = series(windows(0.01, 0.02, 0.015), better=better)
        seen, shown = each.estimate(), compare_sides(each, TERMS)
        assert (seen.df, each.interval) == (10, shown.ratio)
        reach, sign = student.ppf(0.975, 10) * seen.error, 1 if better == "lower" else -1
        by_hand = sorted(math.exp(sign * (0.015 + end)) for end in (-reach, reach))
        found, wanted = (shown.ratio.value, shown.ratio.low, shown.ratio.high), (math.exp(sign * 0.015), *by_hand)
        assert found == pytest.approx(wanted), better
    for missing in (None, 0.0, math.nan):
        whole = series(windows(-0.05, -0.05, noise=0.002))
        (found,) = gate([whole], TERMS)
        pairs = [[(1.0, math.exp(cost)) for cost in launch] for launch in windows(-0.05, -0.05, noise=0.002)]
        pairs[1][3] = (1.0, missing)
        (lacking,) = gate([WindowSeries.of("seconds", "lower", pairs, 0.03)], TERMS)
        assert (found.outcome, lacking.outcome, lacking.n) == (PASS, INCONCLUSIVE, 1) and tells(lacking.why, 2)
    wandering = [[0.01 * (-1) ** (i // 4) for i in range(16)]]
    assert side_by_side.variance_of_mean(wandering) > 3 * variance(wandering[0]) / 16
    calm = COMMITTED.sd * math.sqrt(2) * side_by_side.TOO_FAR
    assert series(windows(0.0, 0.999 * calm, noise=0.0)).strange == "" == series(windows(0.0)).strange
    assert tells(series(windows(0.0, 1.05 * calm, noise=0.0)).strange, 4.9, 4.6)


@pytest.mark.parametrize(("spread", "margin"), [(0.001, 0.03), (0.015, 0.03), (0.03, 0.03), (0.03, 0.05), (0.2, 0.03)])
def test_noise_sets_windows_per_launch(spread, margin):
    quiet, loud = ([by * each for each in (spread, -spread) * 4] for by in (0.1, 1))
    n, sd = pairs_wanted([quiet, loud], margin), stdev(loud)
    assert n % 4 == 0 and 8 <= n <= 40 and pairs_wanted([loud], margin) == n
    assert n == 40 or 1.2 * sd / math.sqrt(n) <= margin / 4
    assert n == 8 or 1.2 * sd / math.sqrt(n - 4) > margin / 4
    slow = [each - 0.5 for each in loud]  # half as fast: to know that takes no 40 pairs
    assert pairs_wanted([slow], margin) == (8 if spread < 0.1 else 28) and pairs_wanted([slow, loud], margin) == n


@pytest.mark.parametrize(("n", "spread", "busy", "facts"), [
    (8, 0.12, 0.9, ()), (8, 0.14, 0.9, (14, 13)), (16, 0.12, 0.9, (12, 10)), (16, 0.09, 0.9, ()),
    (8, 0.01, 0.69, (69, 70)), (8, 0.01, 0.71, ()), (8, 0.01, None, ()),
])  # fmt: skip
def test_host_bound_throughput_is_refused(n, spread, busy, facts):
    ratios = [sign * spread * math.sqrt((n - 1) / n) for sign in (1, -1) * (n // 2)]
    told = host_decides(ratios, busy)
    assert bool(told) is bool(facts) and tells(told, *facts)


@pytest.mark.parametrize(("means", "sd", "refused"), [
    ((0.001, -0.001), 0.005, False), ((0.01, -0.004), 0.0099, False), ((0.02, -0.02), 0.0283, True)
])  # fmt: skip
def test_calibration_measures_launch_allowance(means, sd, refused):
    found = Allowance.known(stdev(means), len(means), "a calibration")
    assert (found.sd, found.df) == (pytest.approx(sd, abs=1e-4), 1) and bool(found.refused) is refused
    assert not refused or tells(found.refused, 1.2, 2.8, "a calibration")


@pytest.fixture(scope="module")
def committed():
    """Returns the logarithms of the ratios of busy seconds in each launch of a committed experiment."""
    with loaded(checkout_script("studies/two_sides.py")) as study:

        def found(name):
            results = study.results_in(CHECKOUT / f"studies/results/two-sides-h100-{name}.json.xz")
            for busy in map(study.busy_seconds, results["launches"]):
                yield [math.log(busy[pair, 1] / busy[pair, 0]) for pair in sorted({pair for pair, _ in busy})]

        yield lambda name: list(found(name))


@pytest.mark.parametrize(("name", "outcome"), [("first-host", PASS), ("next-host", PASS), ("a-layer-more", FAIL)])
def test_added_layer_fails_h100_gate(committed, name, outcome):
    """OPT-1.3B; the candidate's 25 layers take 4.2% longer than 24."""
    each = series(committed(name))
    (found,) = gate([each], TERMS)
    assert (found.outcome, found.decided_at, each.strange) == (outcome, 2, "")
    assert {step.outcome for step in found.interim} == {outcome}
    worse = 1.042 if outcome is FAIL else 1.0
    assert found.ratio.low < worse < found.ratio.high
