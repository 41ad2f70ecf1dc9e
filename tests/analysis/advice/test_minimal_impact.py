"""The claim on the advisor's batch: against every other load, from records whose throughput is planted."""

from __future__ import annotations

import pytest
from strategies import measurement

from pytest_slmserve.analysis.advice.subjects import advised_batch_costs_little
from pytest_slmserve.analysis.points import ratio
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.analysis.verdict import State


def judged(rates):
    curve = curve_of("opt-1.3b", [measurement(n, rate + i, repeat=i) for n, rate in rates.items() for i in range(2)])
    return curve, advised_batch_costs_little(curve, 0.9)


def test_the_load_that_serves_most_is_chosen_of_all_and_corrected_for_it():
    curve, verdict = judged({1: 100.0, 32: 2400.0, 128: 4800.0, 512: 4900.0})
    _, chosen, _, most = curve.valid
    by_itself = ratio(chosen, most, curve.valid)
    assert verdict.state is State.FAILS and verdict.value == by_itself.value
    assert verdict.low < by_itself.low < by_itself.high < verdict.high


def test_a_batch_that_serves_most_itself_is_held_against_the_next():
    _, verdict = judged({1: 100.0, 32: 2400.0, 128: 2000.0})
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(1.2, rel=0.01)
    assert "32 in flight, chosen for twice the latency at 32, serves 120 %" in verdict.why
    assert "of what 128 does" in verdict.why
