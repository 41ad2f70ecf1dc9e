"""Intervals of differences: moderation against published values, pairing in time, launches as units."""

from __future__ import annotations

import math
import random
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.estimates import (
    TAIL,
    Differences,
    Prior,
    Repeat,
    contrast,
    digammas,
    moderated,
    prior,
    t_above,
)

EULER = 0.57721566490153286


def repeats(*values: float, at: str = "", launch: str = "a", within: float | None = None) -> tuple[Repeat, ...]:
    return tuple(Repeat(value, at and f"{at}{i}", launch, within) for i, value in enumerate(values))


def test_digamma_and_trigamma_where_they_are_known():
    """Abramowitz and Stegun 1964, 6.3.2, 6.3.3, 6.4.2 and 6.4.4."""
    assert digammas(1) == pytest.approx((-EULER, math.pi**2 / 6), abs=1e-8)
    assert digammas(0.5) == pytest.approx((-EULER - 2 * math.log(2), math.pi**2 / 2), abs=1e-8)


@given(st.floats(0.05, 50))
def test_digamma_and_trigamma_step_as_they_should(x):
    (first, second), (further, less) = digammas(x), digammas(x + 1)
    assert further - first == pytest.approx(1 / x, rel=1e-5, abs=1e-8)
    assert second - less == pytest.approx(1 / x**2, rel=1e-4, abs=1e-7)


def test_variances_that_differ_by_chance_alone_are_pooled():
    chance = random.Random(1)
    drawn = [(variance([chance.gauss(0, 2) for _ in range(4)]), 3) for _ in range(200)]
    common = prior(drawn)
    assert common.ratio == pytest.approx(4, rel=0.15) and common.df > 15


def test_variances_that_differ_by_more_are_worth_few_degrees_of_freedom():
    chance = random.Random(2)
    drawn = [(variance([chance.gauss(0, sd) for _ in range(4)]), 3) for sd in (0.01, 0.1, 1.0) for _ in range(60)]
    assert prior(drawn).df < 2


def test_the_scatter_of_drawn_variances_gives_their_prior():
    """The true variances are scaled inverse chi-squared with 6 degrees of freedom (Smyth 2004, section 3)."""
    chance = random.Random(3)

    def drawn() -> float:
        true = 6 * 0.5 / sum(chance.gauss(0, 1) ** 2 for _ in range(6))
        return variance([chance.gauss(0, math.sqrt(true)) for _ in range(5)])

    common = prior([(drawn(), 4) for _ in range(3000)])
    assert common.df == pytest.approx(6, rel=0.2) and common.ratio == pytest.approx(0.5, rel=0.1)


def test_a_moderated_variance_lies_between_its_own_and_the_common_one():
    assert moderated(4.0, 2, Prior(1.0, 2.0, 100)) == (2.5, 4.0)
    assert moderated(4.0, 2, Prior(1.0, math.inf, 9)) == (1.0, 9)
    assert moderated(4.0, 2, Prior(1.0, 50.0, 9))[1] == 9, "no more than all have"


def test_two_samples_by_hand():
    """Welch's setting with a common variance: logs 0 and 0.02, 1 and 1.02, so variance 0.0002 with 2 degrees."""
    logs = (0.0, 0.02), (1.0, 1.02)
    seen = Differences(tuple(repeats(*map(math.exp, each)) for each in logs)).between(0, 1)
    half = t_above(0.025, 2) * math.sqrt(0.0002)
    assert seen.value == pytest.approx(1.0, abs=1e-6)
    assert (seen.high - seen.low) / 2 == pytest.approx(half, rel=1e-6)


def test_repeats_in_turn_are_paired():
    """The host slows down by a tenth; each pair is measured in the same moment."""
    first, second = repeats(100, 90, 81, at="2026-01-0"), repeats(110, 99.1, 89.05, at="2026-01-0")
    second = tuple(r._replace(at=f"{r.at}T12") for r in second)
    found = contrast(first, second)
    assert found.in_turn and found.df == 2
    logs = [math.log(b.value / a.value) for a, b in zip(first, second)]
    assert found.ratio * found.scale == pytest.approx(variance(logs) / 3)
    late = tuple(r._replace(at=f"2026-02-0{i}") for i, r in enumerate(second))
    assert not contrast(first, late).in_turn and contrast(first, late).ratio > 100 * found.ratio


def test_pairs_do_not_pay_for_the_course_of_the_host():
    """The host loses a tenth in each round, and pairs scatter by a thousandth. The last two loads have a round more."""
    chance = random.Random(5)
    rounds = [
        repeats(*(0.9**i * math.exp(chance.gauss(0, 1e-3)) for i in range(rounds)), at="2026-01-0")
        for rounds in (3, 3, 3, 4, 4)
    ]
    seen = Differences(tuple(tuple(r._replace(at=f"{r.at}T1{i}") for r in each) for i, each in enumerate(rounds)))
    paired, apart = (end.high - end.low for end in (seen.between(3, 4), seen.between(2, 3)))
    assert paired < 0.01 and apart > 0.05


def test_differences_in_turn_that_share_a_sample_are_no_independent_ones():
    """Rounds of nine loads: two each leave six degrees of freedom, where the scatter of nine samples has nine."""
    chance, runs, missed = random.Random(6), 4000, 0
    for _ in range(runs):
        samples = tuple(
            tuple(Repeat(math.exp(chance.gauss(0, 0.02)), f"{number}{load}") for number in range(2))
            for load in range(9)
        )
        seen = Differences(samples).between(7, 8, 0.004)
        missed += not seen.low <= 0 <= seen.high
    assert 0.005 <= missed / runs <= 0.011, "0.8 % planned, 1.2 % with eight degrees of freedom"


def test_pairs_are_of_one_launch_where_both_samples_are():
    first = repeats(100, 101, at="2026-01-0")
    second = tuple(r._replace(at=f"{r.at}T12", launch="ab"[i]) for i, r in enumerate(first))
    assert not contrast(first, second).in_turn


def test_launches_of_two_engines_in_turn_are_paired_and_a_pair_of_launches_is_the_unit():
    """Three launches of each, two windows of a launch; the host slows down by a tenth from one pair to the next."""
    first, second = (
        tuple(
            Repeat(rate * 0.9**day * (1 + minute / 1000), f"2026-01-0{day}T{hour}:{minute}", f"{name}{day}")
            for day in range(3)
            for minute in range(2)
        )
        for name, rate, hour in (("a", 100, "01"), ("b", 110, "02"))
    )
    assert not contrast(first, second).in_turn, "two windows of one launch follow each other"
    means = [sample[::2] for sample in (first, second)]
    found = contrast(*means)
    assert found.in_turn and found.df == 2 and found.ratio * found.scale == pytest.approx(0, abs=1e-12)


def test_where_there_are_launches_they_are_the_unit():
    """Two launches 10 % apart, windows of each alike: four windows are two repeats."""
    logs = [0.0, 0.001, 0.1, 0.101]
    sample = tuple(Repeat(math.exp(log), launch="ab"[i // 2]) for i, log in enumerate(logs))
    found = contrast(sample, sample)
    assert found.df == 2 and found.ratio / 2 == pytest.approx(variance([0.0005, 0.1005]))


def test_the_course_of_a_window_says_which_loads_are_noisy():
    quiet, rough = repeats(100, 100.1, within=1e-6), repeats(50, 55, within=2.5e-3)
    seen = Differences((quiet, quiet, rough, rough))
    widths = [end.high - end.low for end in (seen.between(0, 1), seen.between(2, 3))]
    assert widths[1] > 20 * widths[0]
    quiet_half, rough_half = (mean.high - mean.value for mean in map(seen.mean, (0, 2)))
    assert quiet_half < 0.01 < rough_half


def test_without_repeats_nothing_is_known_of_the_noise():
    single = Differences((repeats(1.0), repeats(2.0)))
    assert not single.known and single.mean(0).low is None
    assert single.between(0, 1).low is None and single.between(0, 1).value == pytest.approx(math.log(2))


@pytest.mark.parametrize("spread", [(0.01, 0.01, 0.01, 0.01, 0.01), (0.002, 0.005, 0.01, 0.05, 0.05)])
def test_intervals_cover_what_they_say(spread):
    """Five loads, three repeats each, their noise equal or 25 times apart and seen in the course of each window."""
    chance, covered, runs = random.Random(4), 0, 1500
    for _ in range(runs):
        samples = tuple(
            tuple(Repeat(math.exp(chance.gauss(0, sd)), within=sd**2 * chance.uniform(0.7, 1.4)) for _ in range(3))
            for sd in spread
        )
        seen = Differences(samples).between(3, 4)
        covered += seen.low <= 0 <= seen.high
    assert 0.93 <= covered / runs <= 0.98


@pytest.mark.parametrize("loads", [2, 3])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("host", [0.0, 0.05])
def test_intervals_of_few_samples_in_turn_cover_what_they_say(loads, count, host):
    """The host drifts from one round to the next, and a round is measured in turn."""
    chance, covered, runs = random.Random(6), 0, 1000
    for _ in range(runs):
        rounds = [chance.gauss(0, host) for _ in range(count)]
        samples = tuple(
            tuple(Repeat(math.exp(drift + chance.gauss(0, 0.01)), f"{i}-{load}") for i, drift in enumerate(rounds))
            for load in range(loads)
        )
        seen = Differences(samples).between(0, 1)
        covered += seen.low <= 0 <= seen.high
    assert 0.925 <= covered / runs <= 0.975


@pytest.mark.parametrize("launches", [1, 3])
def test_intervals_of_a_mean_cover_what_they_say(launches):
    """Three repeats of each of four loads, or three launches of two windows each that differ by more than those."""
    chance, covered, runs = random.Random(7), 0, 1000
    for _ in range(runs):
        samples = tuple(
            tuple(
                Repeat(math.exp(between + chance.gauss(0, 0.01)), launch=f"{launch}")
                for launch, between in enumerate(chance.gauss(0, 0.05 if launches > 1 else 0) for _ in range(launches))
                for _ in range(2 if launches > 1 else 3)
            )
            for _ in range(4)
        )
        seen = Differences(samples).mean(2)
        covered += seen.low <= 0 <= seen.high
    assert 0.92 <= covered / runs <= 0.98


def test_the_course_of_windows_counts_where_all_tell_it():
    told, silent = repeats(100, 101, within=1e-6), repeats(50, 51, within=1e-6)
    silent = (silent[0], silent[1]._replace(within=None))
    plain = Differences(tuple(tuple(r._replace(within=None) for r in sample) for sample in (told, silent)))
    assert Differences((told, silent)).between(0, 1) == plain.between(0, 1)


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=6), st.lists(st.floats(0.5, 2), min_size=2, max_size=6))
def test_an_interval_is_that_of_the_way_back_turned_round(first, second):
    seen = Differences((repeats(*first), repeats(*second)))
    there, back = seen.between(0, 1), seen.between(1, 0)
    assert there.value == pytest.approx(-back.value, abs=1e-12) and there.low == pytest.approx(-back.high, abs=1e-9)
    assert there.value == pytest.approx(math.log(fmean(second) / fmean(first)))
    wide = seen.between(0, 1, TAIL / 4)
    assert wide.low <= there.low <= there.high <= wide.high
