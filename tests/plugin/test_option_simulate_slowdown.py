"""--slm-simulate-slowdown makes a simulated candidate slower, so that each end of a gate can be seen without a GPU."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from inside import GATE, usage_error
from shipped import put

REHEARSAL = ("--slm-simulate", "--slm-gate", "-p", "no:cacheprovider")  # all else as by default


@pytest.fixture
def rehearse(pytester, monkeypatch):
    """Runs the shipped gate where a workflow would."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "page.md"))
    put(pytester.path, "test_gate")
    return lambda *args: pytester.runpytest_inprocess(*REHEARSAL, "--junitxml=out.xml", *args)


@pytest.mark.parametrize(
    ("slowdown", "status", "word", "state"),
    [([], 0, "PASS", "passes"), (["1.5%"], 10, "INCONCLUSIVE", "inconclusive"), (["5%"], 1, "FAIL", "fails")],
)
def test_each_end_of_a_gate_can_be_seen(rehearse, pytester, slowdown, status, word, state):
    """By the default margin, pairs and loads; of a model whatever, for launches are drawn alike."""
    result = rehearse("--slm-models=opt-1.3b", *[f"--slm-simulate-slowdown={share}" for share in slowdown])
    assert result.ret == status
    result.stdout.fnmatch_lines([f"opt-1.3b: {word} after * pairs of launches"])
    (found,) = json.loads((pytester.path / ".slm" / "gate.json").read_text("utf-8"))
    assert found["outcome"].upper() == word
    for endpoint in found["gated"]:
        assert endpoint["ratio"]["low"] < endpoint["ratio"]["value"] < endpoint["ratio"]["high"], "no point"
    assert f"### opt-1.3b: {word} after" in (pytester.path / "page.md").read_text("utf-8")
    cases = ElementTree.parse(pytester.path / "out.xml").getroot().iter("testcase")
    (case,) = (case for case in cases if case.attrib["name"] == "test_no_worse[opt-1.3b-throughput]")
    assert {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}["slm_gate"] == state


def test_a_candidate_whose_argument_costs_something_fails(rehearse):
    result = rehearse("--slm-models=opt-125m", "--slm-candidate-engine-arg=max_num_seqs=64")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["output tokens/s *fail", "mean E2E *pass"])


def test_it_is_of_the_candidate_alone_and_of_no_start(gate, archive):
    result = gate("--slm-simulate-slowdown=0.05")
    result.stdout.fnmatch_lines(
        [
            "*candidate: *slowdown=0.05*",
            "output tokens/s, large load*0.952*fail",
            "mean E2E, small load*1.0500*fail",
            "s to start*1.0000*pass",
            "to repeat it: pytest* --slm-simulate-slowdown=0.05 *",
        ]
    )
    told = {(m.paired.side, dict(m.spec.extra).get("slowdown")) for m in archive().measurements}
    assert told == {("baseline", None), ("candidate", 0.05)}


def test_without_a_gate_or_a_simulation_it_says_nothing(pytester):
    without_gate = pytester.runpytest_inprocess("--slm-simulate", "--slm-simulate-slowdown=5%")
    assert "no gate was asked for" in usage_error(without_gate)
    words = ["--slm-cpu" if word == "--slm-simulate" else word for word in GATE]
    real = usage_error(pytester.runpytest_inprocess(*words, "--slm-simulate-slowdown=5%"))
    assert "--slm-simulate-slowdown slows a simulated candidate, and no other" in real
    alike = usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-calibrate", "--slm-simulate-slowdown=5%"))
    assert "would make the sides of a calibration differ" in alike


def test_an_ini_file_may_hold_it_for_a_simulation(pytester, gate, holds):
    holds("0.32.0")
    pytester.makeini("[pytest]\nslm_simulate_slowdown = 5%\n")
    assert gate().ret == 1
    words = ["--slm-cpu" if word == "--slm-simulate" else word for word in GATE]
    assert pytester.runpytest_inprocess(*words, "--slm-models=opt-tiny", "--slm-plan").ret == 0
