"""Gates drawn from the noise of a runner: false alarms, power, and passes that say nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pytest_slmserve.analysis.gate.decision import (
    MIN_POWER,
    GateCriteria,
    InterimAnalysis,
    PairSeries,
    calibrate,
    compare_sides,
    noise_of,
    weakened,
)
from pytest_slmserve.analysis.verdict import State

TERMS = GateCriteria()
GATES = 200


def noisy(
    sd: float, name: str = "tokens/s", n: int = 12, bias: float = 0.0, margin: float = TERMS.margin
) -> PairSeries:
    chance = random.Random(name)
    pairs = tuple((1.0, math.exp(-bias + chance.gauss(0, sd))) for _ in range(n))
    return PairSeries(name, "higher", pairs, margin)


def test_a_quiet_runner_finds_everything_and_alarms_nobody():
    series = [noisy(0.003), noisy(0.003, "latency")]
    seen = calibrate(noise_of(series), series, TERMS, GATES)
    assert len(seen.noise.costs) == 12
    assert (seen.unchanged.fail, seen.unchanged.passed, seen.unchanged.pairs) == (0.0, 1.0, 4.0)
    assert {name: rates.fail for name, rates in seen.worse.items()} == {"tokens/s": 1.0, "latency": 1.0}


def test_a_noisy_runner_is_told_to_be_one():
    series = [noisy(0.05), noisy(0.003, "latency")]
    seen = calibrate(noise_of(series), series, TERMS, GATES)
    assert seen.worse["tokens/s"].fail < MIN_POWER and seen.worse["latency"].fail > 0.95
    assert seen.unchanged.passed < 0.7 and seen.unchanged.fail < 0.05 and seen.unchanged.pairs > 8


def test_an_order_effect_of_the_calibration_is_no_slowness():
    still, biased = noisy(0.003), noisy(0.003, bias=0.02)
    costs, expected = ([cost for (cost,) in noise_of([series]).costs] for series in (biased, still))
    assert costs == pytest.approx(expected)


def test_a_pair_with_a_missing_value_is_left_out():
    one, other = noisy(0.01, n=6), noisy(0.01, "latency", n=6)
    other = PairSeries("latency", "lower", (*other.pairs[:3], (1.0, None), *other.pairs[4:]))
    noise = noise_of([one, other])
    assert len(noise.costs) == 5 and noise.names == ("tokens/s", "latency")
    assert [sum(column) for column in zip(*noise.costs)] == pytest.approx([0.0, 0.0], abs=1e-12)


def test_an_endpoint_is_held_to_its_own_margin():
    series = [noisy(0.03, "start", margin=0.15)]
    assert calibrate(noise_of(series), series, TERMS, GATES).worse["start"].fail > 0.95


@pytest.mark.parametrize("outcome", list(State))
def test_only_a_pass_that_says_nothing_is_weakened(outcome):
    series = [noisy(0.05), noisy(0.003, "latency")]
    seen = calibrate(noise_of(series), series, TERMS, GATES)
    steps = (InterimAnalysis(4, 1.0, 0.98, 0.99, outcome),)
    weak, strong = (
        replace(compare_sides(noisy(0.003, name, n=4), TERMS, steps), outcome=outcome, decided_at=4)
        for name in ("tokens/s", "latency")
    )
    found, same = weakened([weak, strong], seen)
    assert same == strong
    if outcome is State.PASSES:
        assert [step.outcome for step in found.interim] == [State.INCONCLUSIVE]
        assert found.outcome is State.INCONCLUSIVE and "too noisy to pass: 3 % worse would fail" in found.why
    else:
        assert found == weak
