"""The promise of an adaptive sweep on curves that were measured: the plateau of the full grid within one grid point,
at no more than a third of its seconds. The measured repeats are its answers, their recorded seconds its price."""

from dataclasses import replace
from statistics import fmean

import pytest
from adaptive import Measured, steps_apart
from committed import archive
from published import ROWS
from strategies import point

from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.sweep.plateau import SHARE, gains, plateau

SPREAD, TOGETHER, SENSORS = (f"h200-vllm-0.26.0-{name}" for name in ("staggered", "burst", "sensors"))
CPU = "cpu-vllm-0.32.0"


def group_of(name, model, counts=lambda m: True):
    (group,) = by_series(m for m in archive(name) if m.spec.model == model and counts(m)).values()
    return group


def seconds_of(sweep, loads=None):
    """Of these measurements, or of two repeats of all loads."""
    return sum(sweep.seconds[load] for load in ([*sweep.seconds] * 2 if loads is None else loads))


@pytest.mark.parametrize(("name", "model", "full", "loads", "found", "short"), [
    (SPREAD, "opt-125m", None, [1, 1024, 512, 512, 1024], None, 0.19),
    (SPREAD, "opt-1.3b", 128, [1, 512, 128, 64, 64, 1], 128, 0.21),
    (SPREAD, "opt-2.7b", 128, [1, 256, 128, 64, 1], 128, 0.28),
    (SENSORS, "opt-125m", 512, [1, 1024, 512, 256, 256], 512, 0.19),
    (SENSORS, "opt-1.3b", 128, [1, 512, 128, 64, 64, 1], 128, 0.24),
    (SENSORS, "opt-2.7b", 128, [1, 256, 128, 64, 1], 128, 0.25),
    (CPU, "opt-tiny", 128, [1, 256, 64, 32, 32], 64, 0.17),
])  # fmt: skip
def test_adaptive_sweep_finds_full_plateau(name, model, full, loads, found, short):
    """short: the share with the windows of today, the first 2 s of each, of all loads with those that were measured."""
    group = group_of(name, model)
    cut = [replace(m, run=replace(m.run, window_s=(m.run.window_s[0], m.run.window_s[0] + 2.0))) for m in group]
    whole, today = Measured.of(group), Measured.of(cut)
    played, later = whole.played(), today.played()
    assert (whole.plateau, played.loads, plateau(played.points).value) == (full, loads, found)
    for part in (played, later):
        assert steps_apart(whole.grid, plateau(part.points).value, whole.plateau) <= 1
    shares = [seconds_of(sweep, part.loads) / seconds_of(whole) for sweep, part in ((whole, played), (today, later))]
    assert shares[0] <= SHARE and shares[1] == pytest.approx(short, abs=0.006) and short < SHARE


def test_small_grid_needs_most_loads():
    """What was measured in a burst: too few loads to leave any out. The plateau is the same."""
    for model, loads, full in (("opt-1.3b", [64, 512, 128, 64], 128), ("opt-125m", [64, 512, 256, 64], None)):
        sweep = Measured.of(group_of(TOGETHER, model))
        played = sweep.played()
        assert (sweep.grid, played.loads) == ((64, 128, 256, 512), loads)
        assert plateau(played.points).value == full == sweep.plateau
        assert SHARE < seconds_of(sweep, loads) / seconds_of(sweep) < 0.5


def test_dent_does_not_end_sweep():
    """OPT-125M gains 8.7% from concurrency 128 to 256 in its steady windows, less than a tenth; then it doubles."""
    sweep = Measured.of(group_of(SPREAD, "opt-125m", lambda m: not check(m).noise))
    (dent,) = [gain for gain in gains(sweep.points) if gain.start == 128]
    rates = {p.concurrency: fmean(p.repeats) for p in sweep.points}
    assert dent.value < 0.10 and plateau(sweep.played().points).value is None
    assert rates[128] < 0.5 * max(rates.values())


def test_adaptive_sweep_handles_published_loads():
    """Requests of 292 output tokens in the mean; the seconds are those that a sweep of ours would take."""
    points = tuple(point(load, [rate]) for load, rate, *_ in ROWS)
    sweep = Measured(points, {load: 5.0 + 1.5 * 292 * load / rate for load, rate, *_ in ROWS})
    played = sweep.played()
    assert sweep.plateau == 256 and steps_apart(sweep.grid, plateau(played.points).value, 256) <= 1
    assert seconds_of(sweep, played.loads) / seconds_of(sweep) <= SHARE
