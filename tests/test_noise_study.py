"""The study of intervals under noise, with fewer runs: the numbers of docs/intervals.md are from the script itself."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from interfaces import SIMULATED, small_workload
from scripts import benchmark_script, loaded

from pytest_slmserve.analysis.metrics.window import output_tokens_per_s, relative_variance
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.engines.simulated import HostNoise, SimulatedEngine
from pytest_slmserve.schema.loads import ClosedLoop

SCRIPT = benchmark_script("noise_study")
RUNS = 40  # of each noise
NOISES = {"white": "white:0.1", "1/f": "pink:0.12", "slowdowns": "slow:0.2:0.3:2"}


@pytest.fixture(scope="module")
def study():
    with loaded(SCRIPT) as module:
        yield module


@pytest.mark.parametrize("load", [4, 64, 256])
def test_its_windows_are_those_of_the_simulated_engine(study, load):
    law, noise = study.Law(0.10), NOISES["1/f"]
    planted = {"t_inf": (256 + law.b_half) / study.STEP_S, "b_half": law.b_half, "noise": 0, "host_noise": noise}
    engine = SimulatedEngine(
        replace(SIMULATED, max_num_seqs=256, max_num_batched_tokens=65536, extra=tuple(planted.items()))
    )
    run = engine.run(small_workload(output_tokens=study.OUTPUT), ClosedLoop(load, window_s=study.WINDOW_S))
    host = study.Host(law, noise, 0)
    host.noise = HostNoise(noise, f"host {SIMULATED.seed}")
    short = host.once(load).run
    assert short.window_s == pytest.approx(run.window_s, rel=0.01)
    assert output_tokens_per_s(short) == pytest.approx(output_tokens_per_s(run), rel=0.01)
    assert relative_variance(short) == pytest.approx(relative_variance(run), rel=0.2)


def most(runs: int, p: float) -> int:
    """What a true rate of p exceeds in one of a thousand such tests."""
    tail, count = 1.0, -1
    while tail > 0.001:
        count += 1
        tail -= math.comb(runs, count) * p**count * (1 - p) ** (runs - count)
    return count


def test_verdicts_and_intervals_at_the_bound_are_wrong_as_rarely_as_they_say(study):
    """Where the truth is the bound every verdict is wrong: 2.5 % of either kind, after up to seven looks together."""
    found = [
        study.one(noise, study.TOLERANCE, RUNS * i + j) for i, noise in enumerate(NOISES.values()) for j in range(RUNS)
    ]
    for state in (State.PASSES, State.FAILS):
        assert sum(each.state is state for each in found) <= most(len(found), 0.025)
    assert sum(not each.covered[-1] for each in found) <= most(len(found), 0.05)


@pytest.mark.parametrize("noise", NOISES)
def test_intervals_of_two_rounds_cover_what_they_say(study, noise):
    found = [study.one(NOISES[noise], 0.05, seed, fixed=True) for seed in range(2 * RUNS)]
    assert 0.91 <= fmean(covered for each in found for covered in each.covered) <= 0.99


def test_a_quiet_host_is_decided_in_fewer_seconds_than_a_fixed_design_takes(study):
    for gain, state in ((0.05, State.PASSES), (0.16, State.FAILS)):
        sweeps = [study.one(study.NOISES["none"], gain, seed) for seed in range(10)]
        assert {each.state for each in sweeps} == {state}
        assert fmean(each.seconds for each in sweeps) < 0.6 * study.one("white:0.01", gain, 1, fixed=True).seconds
