"""The same cell alone and beside others: differences that are planted are found, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpus import alone, engine
from strategies import judge

from pytest_slmserve.analysis.claims.table import applies, claim_of
from pytest_slmserve.analysis.compare.deployments import CLAIM
from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.analysis.verdict import State, within

MARGIN = 0.03


def curve(slower: float = 1.0, again=(4, 16)):
    """Two repeats of each load beside one other engine, `slower` so much, and some of them alone."""
    beside = alone(engine(t_inf=1000.0 / slower))
    lone = [replace(m, spec=beside[0].spec) for m in alone(engine(), loads=again, repeats=1)]
    return curve_of("opt-tiny", [*(replace(m, neighbours=1) for m in beside), *lone])


def test_what_is_the_same_holds():
    verdict = judge(CLAIM, curve(), margin=MARGIN)
    assert verdict.state is State.PASSES and verdict.n == 6
    assert "at 4; " in verdict.why and "at 16 concurrent requests" in verdict.why


@pytest.mark.parametrize("slower", [1.1, 0.9])
def test_what_neighbours_slow_or_hasten_fails_with_the_number(slower):
    verdict = judge(CLAIM, curve(slower), margin=MARGIN)
    assert verdict.state is State.FAILS
    assert verdict.value == pytest.approx(slower - 1, abs=0.01)


def test_one_disturbed_cell_is_enough():
    good, bad = curve(), curve(1.1)
    mixed = [m for m in good.measurements if m.load.concurrency == 4]
    mixed += [replace(m, spec=good.spec) for m in bad.measurements if m.load.concurrency == 16]
    assert judge(CLAIM, curve_of("opt-tiny", mixed), margin=MARGIN).state is State.FAILS


def test_without_both_there_is_nothing_to_tell():
    verdict = judge(CLAIM, curve(again=()), margin=MARGIN)
    assert verdict.state is State.INCONCLUSIVE and "none of its loads" in verdict.why
    why = judge(CLAIM, curve(again=(16,)), margin=MARGIN).why
    assert "at 16 concurrent requests" in why and why.count(" at ") == 1


def test_a_run_alone_has_no_neighbours():
    neighbours = claim_of(CLAIM)
    alone_only = curve_of("opt-tiny", alone(engine()))
    assert applies(neighbours, curve()) and not applies(neighbours, alone_only)


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [
        (-0.02, 0.02, State.PASSES),
        (-0.04, 0.02, State.INCONCLUSIVE),
        (None, None, State.INCONCLUSIVE),
        (0.031, 0.05, State.FAILS),
        (-0.05, -0.031, State.FAILS),
        (-0.05, 0.05, State.INCONCLUSIVE),
    ],
)
def test_the_whole_interval_decides(low, high, state):
    assert within(Interval(0.0, low, high), -MARGIN, MARGIN) is state
