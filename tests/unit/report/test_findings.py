"""What is said of each point: where it was measured, how far it is valid and why; and what findings know together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import H200, measurement, noisy_curve, point, workload

from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.sweep.curve import PLATEAU, TOLERANCE, Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import findings
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.schema.records import Environment

SOUND = point(8, [100.0, 101.0])


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (H200, "NVIDIA H200, vLLM 0.26.0"),
        (replace(H200, url="http://host"), "http://host, vLLM 0.26.0"),
        (Environment(platform="cpu", cpu="Xeon"), "Xeon"),
        (Environment(platform="cpu"), "cpu"),
    ],
)
def test_a_place_is_its_url_or_device_and_its_release(where, words):
    assert findings.served_on(where) == findings.origin(where) == words
    assert findings.origin(where, workload(64, 32)) == f"{words}, 64 prompt and 32 output tokens"
    told = findings.origin(replace(where, platform="simulated"), workload())
    assert "SIMULATED" in told and words not in told, "a simulation is never a device"
    assert findings.served_on(None) == findings.origin(None, workload())


@pytest.mark.parametrize(
    ("figures", "cell"),
    [
        ({}, "yes"),
        ({"noise": ("slow",)}, "noisy"),
        ({"noise": ("slow",), "left_out": 1}, "partly"),
        ({"left_out": 1, "degraded": ("hot",)}, "degraded"),
        ({"degraded": ("hot",), "repeats": ()}, "NO"),
    ],
)
def test_the_worst_of_a_point_is_its_mark(figures, cell):
    assert findings.valid_cell(replace(SOUND, **figures)) == cell


def test_reasons_are_told_each_on_its_line():
    worst = replace(SOUND, left_out=1, problems=("a", "b"), degraded=("hot",), noise=("x: 1", "x: 2", "y"))
    assert list(findings.reasons(worst, "at 8", "2 of 3")) == [
        "left out: at 8: 2 of 3: a; b",
        "degraded: at 8: hot",
        "noisy, kept: at 8: x: 1, and 1 more like it; y",
    ]
    assert list(findings.reasons(SOUND, "at 8", "2 of 2 are used")) == []
    assert list(findings.reasons(point(8, ()), "at 8")) == ["INVALID: at 8: planted: invalid"]


def test_reasons_of_one_kind_differ_in_their_figures_only_and_the_first_stands_for_the_others():
    kinds = {"a: 1": "a", "took 3.5 % of it": "took", "took -4 % of it": "took", "it is b-2 c": "it is b-2 c"}
    assert {text: findings.reason_kind(text) for text in kinds} == kinds
    assert findings.first_of_each_kind(["a: 1", "b", "a: 2", "a: 3"]) == "a: 1, and 2 more like it; b"


def test_the_tolerance_is_that_of_the_claim_that_was_judged():
    one, other = (noisy_curve({1: 1.0, 2: 2.0}, subject=name) for name in ("a", "b"))
    row = ClaimRow(PLATEAU, parameters={"tolerance": 0.75})
    judged = [(Verdict(PLATEAU, "a", State.PASSES, ""), row), (Verdict("other", "b", State.PASSES, ""), row)]
    found = Findings(curves=[one, other], judged=judged)
    assert [found.tolerance(curve, curve.subject) for curve in (one, other)] == [0.75, TOLERANCE]
    assert found.tolerance(one, "a, with a longer label") == 0.75
    assert Findings(judged=[(judged[0][0], None)], flat=0.2).tolerance(one, "a") == 0.2


def test_names_outcomes_and_what_was_reused_are_known_together():
    curves = [Curve(subject="a", measurements=(measurement(1, launch=name),)) for name in "xy"]
    found = Findings(curves=curves, reused={"a": 3, "b": 1}, reused_from="some.jsonl")
    assert list(found.labelled) == list(zip(curves, ("a", "a")))
    assert "4" in found.reused_text.split() and found.reused_text.endswith("some.jsonl")
    assert (Findings().reused_text, Findings().host_speeds) == ("", {})
    judged = [(Verdict("c", "a", State.FAILS, ""), ClaimRow("c", expected="fails"))]
    outcomes = [Findings(judged=judged, strict=strict).outcomes[0].outcome for strict in (False, True)]
    assert outcomes == ["as expected", "unexpected"]
