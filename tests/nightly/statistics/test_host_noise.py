"""Noise that studies replay: its size, its memory, and words that are none."""

import math
from itertools import groupby
from statistics import fmean, stdev

import pytest
from refusals import refused
from scripts import checkout_script, loaded

from pytest_slmserve.engines.simulated import TICK_S

with loaded(checkout_script("studies/host_noise.py")) as study:
    HostNoise = study.HostNoise


def factors(kind, seed="1", ticks=40_000):
    noise = HostNoise(kind, seed)
    return [noise(i * TICK_S) for i in range(ticks)]


@pytest.mark.parametrize(("kind", "sd", "rel", "over", "least", "most"), [
    ("white:0.1", 0.1, 0.1, 16, 0.22, 0.28),  # a quarter over 16 ticks
    ("ou:0.1:1", 0.1, 0.1, 16, 0.55, 0.75),
    ("pink:0.12", 0.12, 0.2, 40, 0.5, math.inf),  # over ten seconds
])  # fmt: skip
def test_forgotten_noise_averages_out(kind, sd, rel, over, least, most):
    values = factors(kind)
    averaged = stdev(fmean(values[i : i + over]) for i in range(0, len(values) - over, over))
    assert stdev(values) == pytest.approx(sd, rel=rel) and least < averaged / stdev(values) < most


def test_slowdowns_have_one_side():
    values = factors("slow:0.2:0.3:2")
    assert set(values) == {0.7, 1.0} and values.count(0.7) / len(values) == pytest.approx(0.2, abs=0.03)
    values = factors("speeds:1.85")
    assert set(values) == {1.0, 1 / 1.85} and 0.5 < sum(v < 1 for v in values) / len(values) < 0.7
    lasts = [len([*same]) * TICK_S for _, same in groupby(values)]
    assert min(lasts[1:-1]) >= 0.5 and fmean(lasts) > 2.25


def test_launch_noise_has_two_states():
    states = {tuple(set(factors("states:0.04", str(seed), 50))) for seed in range(40)}
    low, high = sorted(value for (value,) in states)
    assert high / low == pytest.approx(1.0408, abs=1e-3)
    both = factors("states:0.04+white:0.001", ticks=400)
    assert stdev(both) == pytest.approx(0.001, rel=0.2)
    assert abs(math.log(fmean(both))) == pytest.approx(0.02, abs=1e-3)


def test_recorded_noise_repeats_in_blocks():
    recorded = [1 + i / 1000 for i in range(64)]
    values = factors(recorded, ticks=160)
    for block in range(0, 160, 16):
        start = recorded.index(values[block])
        assert values[block : block + 16] == recorded[start : start + 16]
    noise = HostNoise("white:0.1", "1")
    later = noise(100.0)
    assert noise(3.0) == HostNoise("white:0.1", "1")(3.0) != HostNoise("white:0.1", "2")(3.0)
    assert noise(100.0) == later


@pytest.mark.parametrize("kind", ["", "grey:0.1", "white", "white:x", "ou:0.1", "slow:0.2:0.3", "white:0.1+grey:0.1"])
def test_unknown_noise_is_refused(kind):
    with refused():
        HostNoise(kind, "1")
