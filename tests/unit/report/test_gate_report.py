from __future__ import annotations

from dataclasses import replace

import pytest
from launches import pair_of_launches, pairs

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate import caches_text, gate_section, next_step, title
from pytest_slmserve.report.page.writer import page_content
from pytest_slmserve.report.screen import screen
from pytest_slmserve.report.section import section_markdown, section_text
from pytest_slmserve.schema.records import SIMULATED

OPTIONS = "--slm-gpu --slm-gate --slm-resume --slm-concurrency=8,64"
NOISY = [m for n in range(1, 13) for m in pair_of_launches(n, speed=1.2 if n % 2 else 0.8)]


def gate_lines(gated):
    return section_text(gate_section(gated))


def as_markdown(gated):
    return section_markdown(gate_section(gated))


@pytest.mark.parametrize(
    ("there", "more"),
    [
        (1, f"3 more pairs can decide: {OPTIONS}"),
        (2, f"2 more pairs, about 180 s, can decide, and all 12 take 660 s: {OPTIONS}"),
        (3, f"1 more pair, about 120 s, can decide, and all 12 take 600 s: {OPTIONS}"),
    ],
)
def test_a_gate_before_its_first_look_says_what_can_decide_it(there, more):
    gated = judge_gate(pairs(there), GateCriteria())
    assert next_step(gated) == more and f"\n- next: {more}\n" in as_markdown(gated)
    assert f"next: {more}" in gate_lines(gated)
    assert title(gated).startswith("opt-1.3b: speed NOT JUDGED after ")


def test_a_gate_that_was_interrupted_goes_on():
    gated = judge_gate([m for m in NOISY if m.paired.pair <= 9], GateCriteria())
    assert next_step(gated) == f"3 more pairs, about 240 s, can decide: {OPTIONS}"


def test_the_pause_before_a_gate_was_resumed_is_no_time_of_its_pairs():
    there = [m for m in NOISY if m.paired.pair <= 9]
    days = [replace(m, measured_at=m.measured_at.replace("01-01", f"01-0{1 + (m.paired.pair > 4)}")) for m in there]
    assert next_step(judge_gate(days, GateCriteria())) == f"3 more pairs, about 240 s, can decide: {OPTIONS}"


@pytest.mark.parametrize("measured", [pairs(2, kv_blocks=1000), pairs(4)])
def test_a_gate_that_fails_or_passes_needs_no_more(measured):
    found = judge_gate(measured, GateCriteria())
    assert next_step(found) == "" and "next:" not in as_markdown(found)


def test_an_inconclusive_gate_says_why_and_what_may_decide_it():
    gated = judge_gate(NOISY, GateCriteria())
    said = as_markdown(gated)
    assert title(gated) == "opt-1.3b: INCONCLUSIVE after 12 pairs of launches"
    assert "| detectable % worse |" in said
    assert (
        "- output tokens/s, large load: inconclusive: neither worse for certain nor within the 3 % margin; det" in said
    )
    assert "- next: a new gate with -o slm_gate_pairs=24, a quieter host (slmserve doctor) or a larger margin" in said


@pytest.mark.parametrize("missing", [{"ready_s": None}, {"kv_blocks": None}])
@pytest.mark.parametrize("there", [4, 12])
def test_where_a_value_is_missing_more_pairs_decide_nothing(there, missing):
    gated = judge_gate(pairs(there, **missing), GateCriteria())
    assert next_step(gated) == "repair what is missing (slmserve doctor), and gate again"


def test_what_passes_has_no_smallest_change():
    rows = [line for line in as_markdown(judge_gate(pairs(4), GateCriteria())).split("\n") if line.endswith(" pass |")]
    of_endpoints = [row for row in rows if row.count(" | ") == 8]
    assert of_endpoints and all(row.split(" | ")[6] == "-" for row in of_endpoints)


@pytest.mark.parametrize("platform", ["simulated", "cuda"])
def test_a_simulated_gate_says_so_wherever_it_is_shown(platform):
    measured = [replace(m, environment=replace(m.environment, platform=platform)) for m in pairs(4)]
    gated = judge_gate(measured, GateCriteria())
    screen_text = "\n".join(line for line, _ in screen(Findings(gates=[gated])))
    heading = page_content(Findings(gates=[gated], measurements=measured), 0, {})["title"]
    for said in (gate_lines(gated), as_markdown(gated), screen_text, heading):
        assert (SIMULATED in said) is (platform == "simulated")


# Compiled code

SECONDS = {"baseline": (0.5, 0.7, 9.0, 0.6), "candidate": (11.0, 11.0, 12.0, None)}


def compiled(seconds):
    """Four pairs of launches, and what each spent on compiled code."""
    return [
        replace(m, resolved=replace(m.resolved, compile_s=seconds[m.paired.side][m.paired.pair - 1])) for m in pairs(4)
    ]


@pytest.mark.parametrize(
    ("untold", "said"),
    [(None, "warm: each side was launched before the first pair; compiling took 0.65 and 11 s of a start")]
    + [(side, "warm: each side was launched before the first pair") for side in SECONDS],
)
def test_it_tells_the_median_of_both_sides_or_nothing(untold, said):
    made = compiled({**SECONDS, untold: (None,) * 4})
    assert caches_text(judge_gate(made, GateCriteria())) == f"compile caches were {said}"
