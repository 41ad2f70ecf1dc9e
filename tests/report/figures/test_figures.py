from __future__ import annotations

import sys
from pathlib import Path

import pytest
from strategies import H200, law, measurement, noisy_curve

from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.report.figures.sweeps import draw_sweeps, pictures
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage

BATCHES = (1, 4, 16, 64, 256, 512)


def curve(model: str = "opt-1.3b", environment: Environment = H200, **numbers: float) -> Curve:
    made = [
        measurement(c, law(c, **numbers), model=model, environment=environment, repeat=i)
        for c in BATCHES
        for i in range(2)
    ]
    return curve_of(model, made)


def drawn(tmp_path: Path, *curves: Curve) -> str:
    """Text of the picture: matplotlib's SVG names each piece of text in a comment."""
    pytest.importorskip("matplotlib")
    draw_sweeps(curves, tmp_path / "out.svg")
    return (tmp_path / "out.svg").read_text("utf-8")


def test_several_models_in_one_png(tmp_path):
    pytest.importorskip("matplotlib")
    draw_sweeps([curve(), curve("opt-2.7b", t_inf=5000.0)], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_names_models_device_law_bound_and_plateau(tmp_path):
    text = drawn(tmp_path, curve(), curve("opt-2.7b", t_inf=5000.0))
    origin = "NVIDIA H200, vLLM 0.26.0, 64 prompt and 32 output tokens"
    expected = ("opt-1.3b", "opt-2.7b", origin, "fitted law", "roofline", "plateau from here", "512")
    assert [name for name in expected if f"<!-- {name} -->" not in text] == []


def test_a_simulated_sweep_says_so_and_has_no_roofline(tmp_path):
    text = drawn(tmp_path, curve(environment=Environment(platform="simulated", gpu_name="simulated")))
    assert "SIMULATED, not measured on a device" in text and "<!-- roofline -->" not in text


def test_few_points_and_no_plateau(tmp_path):
    text = drawn(tmp_path, noisy_curve({1: 1.0, 2: 2.0}), noisy_curve({4: 7.0}, subject="other"))
    assert "<!-- plateau from here -->" not in text and "<!-- other -->" in text


def test_the_plane_has_plain_numbers_between_the_powers_of_ten(tmp_path):
    text = drawn(tmp_path, noisy_curve({1: 300.0, 64: 4700.0}), noisy_curve({4: 200.0}, subject="other"))
    assert "<!-- 2,000 -->" in text and "mathdefault" not in text


def test_a_law_that_does_not_describe_the_curve_is_not_drawn(tmp_path):
    bent = noisy_curve({1: 10.0, 16: 160.0, 128: 1200.0, 256: 700.0, 512: 650.0})
    assert "<!-- fitted law -->" not in drawn(tmp_path, bent)


@pytest.mark.parametrize(
    ("curves", "why"), [([], "no sweep to draw"), ([Curve(subject="x")], "no valid point to draw")]
)
def test_nothing_to_draw(curves, why, tmp_path):
    with pytest.raises(BadUsage, match=why):
        draw_sweeps(curves, tmp_path / "out.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadUsage, match=r"pip install 'pytest-slmserve\[figures\]'"):
        draw_sweeps([curve()], tmp_path / "out.png")


@pytest.mark.parametrize(("path", "message"), [("no/such/out.png", "cannot write"), ("out.nonsense", "'.nonsense'")])
def test_a_path_that_cannot_be_written(path, message, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(BadUsage, match=message):
        draw_sweeps([curve()], tmp_path / path)


def test_models_of_any_speed_are_on_one_scale():
    pytest.importorskip("matplotlib")
    fast, slow, short = curve("fast"), curve("slow", t_inf=10.0), noisy_curve({1: 1.0, 2: 2.0})
    relative = {each.name: each.figure for each in pictures([fast, slow, short])}["relative-throughput"]
    ends = [list(line.get_ydata())[-1] for line in relative.axes[0].lines if len(line.get_xdata())]
    assert ends == [1.0, 1.0]
    assert "relative-throughput" not in {each.name for each in pictures([fast, short])}
