"""The script that tells what sampling costs, on steps and readings that are planted."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import asdict, replace
from statistics import fmean
from types import SimpleNamespace

import pytest
from scripts import benchmark_script, loaded

from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.sensors import CANARY, CANARY_CPU
from pytest_slmserve.telemetry.base import Reading
from pytest_slmserve.telemetry.host_counters import CanarySource
from pytest_slmserve.telemetry.sampler import Recording

SCRIPT = benchmark_script("sampler_cost")
READING_S, INTERVAL_S = 0.006, 0.25


@pytest.fixture(scope="module")
def script():
    with loaded(SCRIPT) as module:
        yield module


def varied(rng, at):
    """12 ms, now and then twice as long, now and then a third."""
    return rng.choice((0.004, 0.011, 0.012, 0.013, 0.024)) * rng.uniform(0.9, 1.1)


def drifting(rng, at):
    """From 10 ms to 20 and back within 6.3 s, no multiple of a stretch, and one of fifty is late by 10 ms."""
    return 0.015 + 0.005 * math.sin(at) + (rng.random() < 0.02) * 0.01


def planted(script, seed, seconds, lasting, effect_s=0.0, late=False):
    """A trace with a reading or a sham every 0.25 s, in stretches of 1 s; a reading holds up the step that it begins
    in or, if late, the one after that."""
    rng = random.Random(seed)
    steps, readings, shams, owed = [0.0], [], [], 0.0
    due = itertools.count(0.1, INTERVAL_S)
    at = next(due)
    while steps[-1] < seconds:
        end, owed = steps[-1] + lasting(rng, steps[-1]) + owed, 0.0
        while at < end:
            if script.is_on(at, 1.0):
                readings.append((at, at + READING_S * rng.uniform(0.8, 1.2)))
                end, owed = (end, effect_s) if late else (end + effect_s, 0.0)
            else:
                shams.append(at)
            at = next(due)
        steps.append(end)
    return script.Trace(steps, readings, shams)


def rounds(script, lasting, effect_s, behind=0, count=40):
    """Estimates and intervals of many traces, in ms."""
    found = [script.reading_costs(planted(script, seed, 40, lasting, effect_s), behind) for seed in range(count)]
    return [Interval(1e3 * seen.value, 1e3 * seen.low, 1e3 * seen.high) for seen in found]


@pytest.mark.parametrize("lasting", [varied, drifting])
@pytest.mark.parametrize("effect_ms", [0.0, 0.3])
@pytest.mark.parametrize("behind", [0, 1])
def test_what_is_planted_is_found(script, lasting, effect_ms, behind):
    """Nineteen of twenty intervals hold it, and the mean of all estimates is near it."""
    found = rounds(script, lasting, effect_ms / 1e3, behind)
    held = sum(seen.low <= effect_ms <= seen.high for seen in found)
    assert held >= 35
    error = fmean(seen.high - seen.low for seen in found) / 4 / len(found) ** 0.5
    assert fmean(seen.value for seen in found) == pytest.approx(effect_ms, abs=3 * error)


def test_without_shams_a_long_step_would_count_as_the_readings_doing(script):
    trace = planted(script, 1, 200, varied)
    spans = [script.overlapped(trace.steps, *reading, 0) for reading in trace.readings]
    excess = script.excesses(trace.steps, spans, frozenset(i for span in spans for i in span))
    assert fmean(excess) > 0.002
    seen = script.reading_costs(trace)
    assert seen.low < 0 < seen.high < 0.002


def test_an_effect_on_even_steps_is_exact(script):
    """Steps of 10 ms; those with a reading take 1 ms more."""
    seen = script.reading_costs(planted(script, 1, 20, lambda rng, at: 0.01, 0.001))
    assert (seen.value, seen.low, seen.high) == pytest.approx((1e-3,) * 3, abs=1e-6)


def test_what_comes_a_step_late_is_seen_with_the_step_behind(script):
    trace = planted(script, 1, 40, lambda rng, at: 0.01, 0.001, late=True)
    assert script.reading_costs(trace, behind=1).value == pytest.approx(1e-3, abs=1e-6)
    assert script.reading_costs(trace, behind=0).value < 0.8e-3


@pytest.mark.parametrize(
    ("begin", "end", "behind", "steps"),
    [
        (0.5, 0.6, 0, [0]),
        (0.5, 1.0, 0, [0]),
        (1.0, 1.0, 0, [1]),
        (0.5, 1.1, 0, [0, 1]),
        (0.5, 1.1, 1, [0, 1, 2]),
        (1.5, 3.0, 0, [1, 2]),
        (1.5, 3.0, 1, []),  # the step behind is not known
        (-0.1, 0.5, 0, []),
        (2.5, 3.5, 0, []),
        (3.0, 3.0, 0, []),
    ],
)
def test_steps_that_a_reading_overlaps(script, begin, end, behind, steps):
    assert list(script.overlapped([0, 1, 2, 3], begin, end, behind)) == steps


def test_too_few_readings_are_no_estimate(script, capsys):
    trace = planted(script, 1, 20, varied)
    script.tell_readings(replace(trace, shams=[]), INTERVAL_S)
    script.tell_readings(replace(trace, readings=[]), INTERVAL_S)
    assert capsys.readouterr().out.count("too few to compare") == 4
    seen = script.reading_costs(replace(trace, shams=trace.shams[:1]))
    assert (seen.low, seen.high) == (None, None)


def test_two_means_are_compared_as_welch_has_it(script):
    """By hand: means 3 and 2, squared errors of 2.5 / 5 and 1 / 3, 5.88 degrees of freedom, so t of 5."""
    seen = script.welch([1, 2, 3, 4, 5], [1, 2, 3])
    assert seen.value == 1
    assert seen.high - 1 == pytest.approx(2.570582 * (1 / 2 + 1 / 3) ** 0.5)
    assert script.welch([2, 2], [1, 1]) == Interval(1, 1, 1)


def test_a_piece_of_the_canary_is_a_round_that_lasts_as_long_as_it(script, clock, monkeypatch):
    """Its times come with the reading after it; one that began before a stretch without it is told of after that."""
    canary, rounds = CanarySource(rest_s=0.9), {}
    pieces = itertools.cycle([{}, {}, {}, {CANARY: 0.005, CANARY_CPU: 0.004}])

    def turn(now_s):
        canary.asked_s = now_s if now_s - canary.asked_s >= 0.9 else canary.asked_s
        return next(pieces)

    monkeypatch.setattr(canary, "_turn", turn)
    gated = script.GatedCanary(canary, 1.0, rounds)
    recording = Recording([gated], INTERVAL_S, lambda: clock.now)
    for at in range(32):
        clock.now = 100.1 + INTERVAL_S * at
        recording.read()
    lasted = {at: round(end - at, 6) for at, end in rounds.items() if script.is_on(at, 1.0)}
    assert lasted == dict.fromkeys([100.1, 103.1, 104.1, 107.1], 0.005), "one in each stretch of 1 s with it"
    shams = [end - at for at, end in rounds.items() if not script.is_on(at, 1.0)]
    assert shams == [0.0] * 16
    assert (gated.readings, gated.cpu_s, gated.wall_s) == (4, pytest.approx(0.016), pytest.approx(0.02))


class Told:
    """A source that takes its time by a clock of its own."""

    def __init__(self, name, clock, fails=False):
        self.name, self.clock, self.fails = name, clock, fails

    def read(self, now_s):
        self.clock.now += 0.002
        if self.fails:
            raise SensorFailed("it is gone", "nothing")
        return Reading({1: now_s})


@pytest.fixture
def clock(script, monkeypatch):
    found = SimpleNamespace(now=100.1)
    monkeypatch.setattr(script.time, "monotonic", lambda: found.now)
    return found


def recorded(script, clock, *sources):
    """Times of all readings and shams within 8 s."""
    rounds: dict[float, float] = {}
    gated = [script.Gated(source, 1.0, rounds) for source in sources]
    recording = Recording(gated, INTERVAL_S, lambda: clock.now)
    for at in range(32):
        clock.now = 100.1 + INTERVAL_S * at
        recording.read()
    return gated, rounds


def test_a_round_of_all_sources_is_one_reading(script, clock):
    gated, rounds = recorded(script, clock, Told("one", clock), Told("two", clock), Told("three", clock, fails=True))
    first, second, failing = gated
    assert (len(rounds), first.readings, second.readings, failing.readings) == (32, 16, 16, 1)
    lasted = [round(end - at, 6) for at, end in rounds.items() if script.is_on(at, 1.0)]
    assert lasted == [0.006] + [0.004] * 15
    assert all(end == at for at, end in rounds.items() if not script.is_on(at, 1.0))
    assert first.wall_s == pytest.approx(0.032)


def test_what_is_saved_is_small_and_gives_the_same_estimate(script, clock):
    rng, steps = random.Random(1), [0.0]
    while steps[-1] < 130:
        steps.append(steps[-1] + varied(rng, 0))
    run = SimpleNamespace(began_s=99.0, window_s=(2.0, 126.0), steps=SimpleNamespace(time_s=steps))
    rounds = {at: at + 0.006 * script.is_on(at, 1.0) for at in (99.1 + INTERVAL_S * i for i in range(520))}
    trace = script.trace_of(run, rounds, 1.0)
    text = json.dumps(asdict(trace), separators=(",", ":"))
    assert len(text) < 200_000
    assert script.reading_costs(script.Trace(**json.loads(text))) == script.reading_costs(trace)
    assert (len(trace.readings), len(trace.shams)) == (248, 248)
    assert 0 <= trace.steps[0] < 0.03 and 123.97 < trace.steps[-1] <= 124
    assert (trace.shams[0], trace.readings[0]) == (0.1, (2.1, 2.106))


def test_a_pair_of_which_the_host_slept_through_a_stretch_is_left_out(script):
    steps = [at / 10 for at in range(80) if not 20 <= at < 30]
    trace = SimpleNamespace(time_s=steps, new_tokens=[5] * len(steps))
    run = SimpleNamespace(began_s=100.0, window_s=(0.0, 8.0), steps=trace)
    assert list(script.pairs_of(run, 1.0)) == [pytest.approx((50.0, 50.0))] * 3
    assert script.rate(run, 102.0, 103.0) is None


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.01, 0.004, "at most 0.5% is lost"),
        (-0.05, 0.05, "too noisy to tell whether at most 0.5% is lost"),
        (0.003, 0.006, "MORE than 0.5% may be lost"),
        (0.02, 0.09, "MORE than 0.5% may be lost"),
        (-math.inf, math.inf, "too noisy to tell whether at most 0.5% is lost"),
    ],
)
def test_the_promise_is_judged_only_where_it_can_be(script, low, high, said):
    assert script.judged(low, high) == said


def test_both_estimates_are_told(script, capsys):
    script.tell_pairs([(100.0, 101.0), (103.0, 101.0), (90.0, 101.0)])
    script.tell_readings(planted(script, 1, 200, lambda rng, at: 0.01, 0.0005), INTERVAL_S)
    said = capsys.readouterr().out.splitlines()
    assert "3 pairs" in said[0] and "too noisy to tell" in said[1]
    assert said[3] == "steps that a reading overlaps: 0.500 ms longer (95 %: 0.500 to 0.500)"
    assert said[4] == "  0.20% of the time (95 %: 0.20% to 0.20%): at most 0.5% is lost"
