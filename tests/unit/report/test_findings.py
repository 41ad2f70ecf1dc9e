"""What is said of each point: where it was measured, how far it is valid and why; and what findings know together."""

from dataclasses import replace

from sections import difference
from strategies import H200, measurement, noisy_curve, point, workload

from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.sweep.curve import PLATEAU, TOLERANCE, Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import findings
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.schema.records import Environment

SOUND = point(8, [100.0, 101.0])
MARKS = (
    {}, {"noise": ("slow",)}, {"noise": ("slow",), "left_out": 1}, {"left_out": 1, "degraded": ("hot",)},
    {"degraded": ("hot",), "repeats": ()},
)  # fmt: skip
WORST = {"left_out": 1, "problems": ("a", "b"), "degraded": ("hot",), "noise": ("x: 1", "x: 2", "y")}
KINDS = ("a: 1", "took 3.5% of it", "took -4% of it", "it is b-2 c")


def test_findings_match_expected_file():
    """The worst of a point is its mark, and a simulation is never a device."""
    places = [H200, replace(H200, url="http://host"), *(Environment(platform="cpu", cpu=cpu) for cpu in ("Xeon", None))]
    places += [replace(H200, platform="simulated"), None]
    shown = {"place": [findings.served_on(where) for where in places]}
    shown |= {f"origin, {work}": [findings.origin(p, work and workload(64, 32)) for p in places] for work in (None, 1)}
    shown["mark"] = [findings.valid_cell(replace(SOUND, **figures)) for figures in MARKS]
    shown["reasons"] = [
        *findings.reasons(replace(SOUND, **WORST), "at 8", "2 of 3"),
        findings.first_of_each_kind(["a: 1", "b", "a: 2", "a: 3"]),
    ]
    shown["invalid"] = [*findings.reasons(point(8, ()), "at 8")]
    shown["kinds"] = list(map(findings.reason_kind, KINDS))
    assert difference("findings", {name: "\n".join(lines) for name, lines in shown.items()}) == ""
    assert list(findings.reasons(SOUND, "at 8", "2 of 2 are used")) == []
    one, other = (noisy_curve({1: 1.0, 2: 2.0}, subject=name) for name in ("a", "b"))
    row = ClaimRow(PLATEAU, parameters={"tolerance": 0.75})
    judged = [(Verdict(PLATEAU, "a", State.PASSES, ""), row), (Verdict("other", "b", State.PASSES, ""), row)]
    found = Findings(curves=[one, other], judged=judged)
    assert [found.tolerance(curve, curve.subject) for curve in (one, other)] == [0.75, TOLERANCE]
    assert found.tolerance(one, "a, with a longer label") == 0.75
    assert Findings(judged=[(judged[0][0], None)], flat=0.2).tolerance(one, "a") == 0.2
    curves = [Curve(subject="a", measurements=(measurement(1, launch=name),)) for name in "xy"]
    found = Findings(curves=curves, reused={"a": 3, "b": 1}, reused_from="some.jsonl")
    assert list(found.labelled) == list(zip(curves, ("a", "a")))
    assert "4" in found.reused_text.split() and found.reused_text.endswith("some.jsonl")
    assert (Findings().reused_text, Findings().host_speeds) == ("", {})
    judged = [(Verdict("c", "a", State.FAILS, ""), ClaimRow("c", expected="fails"))]
    outcomes = [Findings(judged=judged, strict=strict).outcomes[0].outcome for strict in (False, True)]
    assert outcomes == ["as expected", "unexpected"]
