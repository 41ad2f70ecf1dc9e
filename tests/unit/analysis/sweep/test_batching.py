"""The batch that is worth its latency: by hand, on published results, on planted laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import ROWS
from strategies import law, point

from pytest_slmserve.analysis.advice.advisor import Decision, ModelSweep, Objectives, decide
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.batching import (
    AbsoluteSlo,
    Caps,
    RelativeSlo,
    Slo,
    latency_law,
    limit_of,
    parse_relative_slo,
)
from pytest_slmserve.analysis.sweep.plateau import ChosenLoad
from pytest_slmserve.schema.errors import BadUsage, TooFewPoints

PUBLISHED = [point(knob, [total], [ms / 1e3]) for knob, _, total, ms, _ in ROWS]
B_HALF_FROM_SHAPES = 40.6  # OPT-1.3B, a context of 330 tokens
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = st.sets(st.integers(2, 1024), min_size=3, max_size=9).map(lambda found: sorted({1, *found}))


def batching(points: list[Point], slo: Slo | None, threshold: float = 0.1, b_half: float | None = None) -> Decision:
    sweep = ModelSweep(name="opt-1.3b", points=tuple(points), b_half=b_half)
    return decide(sweep, Objectives(slo=slo, threshold=threshold))


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("2x@32", RelativeSlo(2.0, 32)),
        ("2.5x@1", RelativeSlo(2.5, 1)),
        ("30ms", AbsoluteSlo(0.03)),
        ("0.03s", AbsoluteSlo(0.03)),
        (".5s", AbsoluteSlo(0.5)),
    ],
)
def test_objectives(text, slo):
    assert parse_relative_slo(text) == slo


@pytest.mark.parametrize("text", ["", "2x", "x@32", "0x@32", "2x@0", "-2x@32", "2x@3.5", "30", "0ms", "30 ms", "nans"])
def test_what_is_no_objective(text):
    with pytest.raises(BadUsage, match="no latency objective"):
        parse_relative_slo(text)


@pytest.mark.parametrize(("factor", "chosen", "cap"), [(2, 96, 105), (4, 256, 250)])
def test_the_published_choice(factor, chosen, cap):
    seen = batching(PUBLISHED, RelativeSlo(factor, 32))
    assert seen.choice == ChosenLoad(chosen) and seen.limit.seconds == factor * 7.509587e-3
    assert seen.caps.slo == pytest.approx(cap, rel=0.06), "from the latencies alone"
    caps = batching(PUBLISHED, RelativeSlo(factor, 32), b_half=B_HALF_FROM_SHAPES).caps
    assert (round(caps.slo), round(caps.efficiency)) == (cap, 375), "closed forms, half-saturation from shapes"


def test_without_an_objective_efficiency_decides():
    seen = batching(PUBLISHED, None)
    assert seen.choice.value == 256 and seen.limit is None


@given(st.floats(10, 1e6), st.floats(0.5, 500), BATCHES, st.floats(0.02, 0.9), st.floats(1.01, 20))
def test_the_choice_is_the_last_of_the_grid_before_the_closed_forms(t_inf, b_half, batches, threshold, factor):
    """On a planted law; a load as near to a cap as rounding is may be on either side."""
    points = [point(b, [law(b, t_inf, b_half)]) for b in batches]
    seen = batching(points, RelativeSlo(factor, 1), threshold)
    cap = min(seen.caps.efficiency, seen.caps.slo)
    off = 1e-3 * (cap + b_half)
    sure, possible = (max(b for b in batches if b == 1 or b < cap + sign * off) for sign in (-1, 1))
    assert seen.choice.value in (sure, possible)


@given(BATCHES, st.floats(0.02, 0.9), st.floats(1.01, 20))
def test_a_tighter_objective_never_chooses_more(batches, threshold, factor):
    points = [point(b, [law(b)]) for b in batches]
    tight, loose = (
        batching(points, RelativeSlo(k, 1), e).choice.value
        for k, e in ((factor, threshold), (2 * factor, threshold / 2))
    )
    assert tight <= loose


def test_a_latency_at_the_limit_is_within_it_and_an_efficiency_at_the_threshold_is_not():
    points = [point(b, [rate], [wait]) for b, rate, wait in ((1, 100.0, 0.1), (2, 150.0, 0.2), (4, 200.0, 0.4))]
    assert batching(points, RelativeSlo(1, 2)).choice.value == 2
    assert batching(points, AbsoluteSlo(0.4)).choice.value == 4
    assert batching(points, AbsoluteSlo(0.4), 0.5).choice.value == 2, "200/(4 x 100) is not above one half"
    assert batching(points, AbsoluteSlo(0.05)).choice == ChosenLoad(None)


def test_an_invalid_point_is_never_chosen_nor_a_reference():
    points = [point(b, [law(b)]) for b in GRID[:-1]]
    lost = [*points, point(512, ())]
    assert batching(lost, None, 0.05).choice.value == 256
    assert "interpolated between 16 and 64" in limit_of(RelativeSlo(2, 32), [*points[:5], *points[6:]], None).note


def test_what_was_not_measured_is_told_by_the_law_and_said():
    points = [point(b, [law(b)]) for b in GRID[3:]]
    base = batching(points, None).base
    assert base.per_s == pytest.approx(law(1)) and "by the saturation law" in base.note
    beyond = limit_of(RelativeSlo(2, 1024), points, latency_law(points))
    assert beyond.seconds == pytest.approx(2 * 256 * 1024 / law(1024)) and "beyond what was measured" in beyond.note
    between = limit_of(RelativeSlo(1, 100), points, None)
    assert between.seconds == pytest.approx(256 * 100 / law(100)) and "between 64 and 128" in between.note


def test_neither_measured_nor_told():
    steep = [point(b, [100.0 * b]) for b in (2, 4, 8)]
    assert "needs T(1)" in batching(steep, None).reason
    with pytest.raises(TooFewPoints, match="nothing was measured at 64"):
        limit_of(RelativeSlo(2, 64), [point(1, [100.0]), *steep], None)
    assert batching([point(1, [100.0]), *steep], AbsoluteSlo(3.0)).caps == Caps()


def test_noise_gives_the_choice_an_interval():
    noisy = [point(b, [law(b) * 0.97, law(b) * 1.03]) for b in GRID]
    seen = batching(noisy, RelativeSlo(2, 32)).choice
    assert seen == ChosenLoad(64, 64, 64, known=True), "128 is far beyond"
    near = batching(noisy, RelativeSlo(1.41, 32)).choice
    assert (near.value, near.low, near.high) == (32, 32, 64), "64 takes 1.416 times as long as 32: it may be within"
    assert batching(noisy, RelativeSlo(1.42, 32)).choice == ChosenLoad(64, 32, 64, known=True)
