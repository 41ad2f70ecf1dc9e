"""A gate tells its outcome, what can decide it and in how long, and where the time goes between two sides: each part is
the one that was planted, and what cannot be known is named with the side that lacks it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from launches import pair_of_launches, pairs
from sections import difference, in_words, rows_of, sentences_of, tables_of
from strategies import H200, RESOLVED, measurement
from traces import traced

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.diagnosis import Difference
from pytest_slmserve.analysis.gate.launch_pairs import Answers, Differs, judge_gate
from pytest_slmserve.report import gate
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.writer import page_content
from pytest_slmserve.report.screen import screen
from pytest_slmserve.report.section import section_markdown, section_text
from pytest_slmserve.schema.records import SIMULATED
from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU

OPTIONS = "--slm-gpu --slm-gate --slm-resume --slm-concurrency=8,64"
NOISY = [m for n in range(1, 13) for m in pair_of_launches(n, speed=1.2 if n % 2 else 0.8)]


def gated(measured, **criteria):
    return judge_gate(measured, GateCriteria(**criteria))


# What can decide it


@pytest.mark.parametrize(("there", "more", "seconds"), [(1, 3, ()), (2, 2, (180, 660)), (3, 1, (120, 600))])
def test_a_gate_before_its_first_look_says_what_can_decide_it_and_in_how_long(there, more, seconds):
    """A pair takes a minute, and one pair more is for the launches that do not count."""
    found = gated(pairs(there))
    said, options = gate.next_step(found).split(": ")
    assert options == OPTIONS and said.startswith(f"{more} more pair{'s' if more > 1 else ''}")
    assert all(f" {s} s" in said for s in seconds) and said.count(" s") == len(seconds)
    assert gate.has_few_pairs(found) and "PASS" not in gate.title(found) and f" {there} pair" in gate.title(found)
    assert f"next: {gate.next_step(found)}" in sentences_of(gate.gate_section(found))


@pytest.mark.parametrize("days", [1, 4])
def test_a_gate_that_was_interrupted_goes_on_and_a_pause_is_no_time_of_its_pairs(days):
    def late(m):
        return m.measured_at.replace("01-01", f"01-0{days if m.paired.pair > 4 else 1}")

    found = gated([replace(m, measured_at=late(m)) for m in NOISY if m.paired.pair <= 9])
    said, options = gate.next_step(found).split(": ")
    assert said.split()[:2] == ["3", "more"] and " 240 s" in said and " all " not in said and options == OPTIONS


@pytest.mark.parametrize(
    ("measured", "option"),
    [
        (pairs(2, kv_blocks=1000), ""),  # it fails
        (pairs(4), ""),  # it passes
        (pairs(4, failures=1), ""),  # it has no pair
        (NOISY, "-o slm_gate_pairs=24"),  # it used its pairs: a new one needs twice as many
        ([*pairs(2), *pair_of_launches(3, failures=1)], "-o slm_gate_pairs"),
        *((pairs(n, **{name: None}), "slmserve doctor") for n in (4, 12) for name in ("ready_s", "kv_blocks")),
    ],
)
def test_a_gate_names_what_decides_it_if_anything_does(measured, option):
    found = gated(measured)
    said, shown = gate.next_step(found), sentences_of(gate.gate_section(found))
    assert option in said if option else said == ""
    assert any(text.startswith("next") for text in shown) is bool(option)


# What is shown of it


def test_planted_gates_have_the_sections_that_are_kept():
    specs = [(m, replace(m.spec, enforce_eager=m.paired.side == "candidate", env=(("A", "1"),))) for m in pairs(4)]
    found = {
        "fails": gated(pairs(4, speed=0.9)),
        "too few pairs": gated(pairs(2)),
        "inconclusive": gated(NOISY),
        "a pair is left out": gated([*pairs(2), *pair_of_launches(3, failures=1)]),
    }
    shown = {name: in_words([gate.gate_section(each)]) for name, each in found.items()}
    other = gated([replace(m, spec=spec) for m, spec in specs])
    shown["sides that differ"] = "\n".join(f"{side}: {what}" for side, what in gate.described_sides(other))
    assert difference("gates", shown) == ""


def test_a_slower_candidate_has_its_ratio_and_an_interim_analysis_its_boundaries():
    found = gated(pairs(4, speed=0.9))
    endpoints, *others = tables_of(gate.gate_section(found))
    rates = [row for row in rows_of(endpoints) if row["endpoint"].startswith("output tokens/s") and row[""]]
    (cells,) = [(row["candidate / baseline"], row["better"], row[""], row["margin %"]) for row in rates]
    assert cells == ("0.9000", "higher", "fail", "3")
    facts = gate.gate_facts(found)
    worse = next(row for row in facts["gated"] if row["name"] == rates[0]["endpoint"])
    assert worse["worse"] == pytest.approx(1 / 0.9 - 1, rel=1e-3)
    assert (worse["outcome"], facts["outcome"], facts["pairs"]) == ("fail", "fail", 4)
    assert all("outcome" not in row for row in facts["shown"])
    interim = next(table for table in others if table.caption == "Interim analyses")
    steps = [(each.name, f"{step.mean:.4f}") for each in found.compared for step in each.interim]
    assert [(row["interim analysis"], row["mean ratio"]) for row in rows_of(interim)] == steps


@pytest.mark.parametrize("platform", ["simulated", "cuda"])
def test_a_simulated_gate_says_so_wherever_it_is_shown(platform):
    measured = [replace(m, environment=replace(m.environment, platform=platform)) for m in pairs(4)]
    found = gated(measured)
    section, told = gate.gate_section(found), Findings(gates=[found], measurements=measured)
    screened = "\n".join(line for line, _ in screen(told))
    for said in (section_text(section), section_markdown(section), screened, page_content(told, 0, {})["title"]):
        assert (SIMULATED in said) is (platform == "simulated")


def test_tokens_of_dummy_weights_are_compared_and_prove_nothing():
    assert gate.outputs_text(gated(pairs(4))) == ""
    same, differ, unsteady = (
        gate.outputs_text(SimpleNamespace(exact=(), answers=Answers(4, 16, 4, steady, differs)))
        for steady, differs in ((True, None), (True, Differs(2, 7, 11, 13)), (False, None))
    )
    assert " 16 " in same and " 4 requests" in same and len(unsteady) > len(same)
    assert all(word in differ for word in ("token 7 ", "request 2 ", "(11 and 13)"))


SECONDS = {"baseline": (0.5, 0.7, 9.0, 0.6), "candidate": (11.0, 11.0, 12.0, None)}


@pytest.mark.parametrize("untold", [None, *SECONDS])
def test_compiling_is_told_by_the_median_of_both_sides_or_not_at_all(untold):
    seconds = {**SECONDS, untold: (None,) * 4}
    took = [(m, seconds[m.paired.side][m.paired.pair - 1]) for m in pairs(4)]
    said = gate.caches_text(gated([replace(m, resolved=replace(m.resolved, compile_s=s)) for m, s in took]))
    assert ("0.65 and 11 s" in said) is (untold is None) and said.startswith("compile caches were warm")


# Where the time goes


def with_probe(wall_s, cpu_s):
    seen = (m := traced()).run.telemetry
    columns = {**seen.columns, PROBE: (wall_s,) * len(seen), PROBE_CPU: (cpu_s,) * len(seen)}
    return replace(m, run=replace(m.run, telemetry=replace(seen, columns=columns)))


NEWER = {"environment": replace(H200, vllm="0.27.0"), "resolved": replace(RESOLVED, async_scheduling=True)}
SIDES = {
    "slower": (traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0)),
    "less than a hundredth slower": (traced(0.004), traced(0.00402)),
    "no sensor beside the candidate": (traced(idle=0.25), traced(0.005, idle=None)),
    "no sensor beside the baseline": (traced(idle=None), traced(0.005, idle=0.25)),
    "no sensor": (traced(idle=None), traced(0.005, idle=None)),
    "a prompt in each step": (traced(concurrency=32), traced(0.005, concurrency=32)),
    "prompts that are not known": (traced(), measurement()),
    "another release, slower to start": (traced(), traced(0.005, ready_s=36.0, **NEWER)),
    "a slower host": (with_probe(0.005, 0.004), with_probe(0.006, 0.00402)),
    "the same host": (with_probe(0.005, 0.004), with_probe(0.005, 0.004)),
    "a probe beside one side": (traced(), with_probe(0.005, 0.004)),
}
CACHE = Difference("kv_cache_bytes", (str(1 << 33),), (str(100 << 30), None))
NEARLY = Difference("gpu_memory_bytes", (str(1 << 33),), (str((1 << 33) + 1),))  # which GiB do not tell apart


def test_planted_sides_have_the_diagnosis_that_is_kept():
    shown = {name: in_words(gate.diagnosis_parts([one], [other])) for name, (one, other) in SIDES.items()}
    shown["bytes"] = in_words(gate.difference_parts((CACHE, NEARLY)))
    shown["no difference"] = in_words(gate.difference_parts(()))
    assert difference("diagnoses", shown) == ""


def figures(baseline, candidate) -> dict[str, list[float]]:
    """Both sides of each row of the split."""
    (table, *_) = tables_of(gate.diagnosis_parts([baseline], [candidate]))
    return {name: [float(text) for text in sides[:2]] for name, *sides in table.cells.rows}


def test_a_split_is_the_one_that_was_planted():
    found = figures(*SIDES["slower"])
    assert (found["prefill"], found["decode"], found["total"]) == ([6, 6], [16, 20], [22, 26])
    assert (found["host gap"], found["kernels"]) == ([5.5, 5.2], [16.5, 20.8])
    assert (found["steps per request"], found["ms per step"]) == ([4, 4], [5.5, 6.5])


def test_the_parts_of_a_split_are_the_whole():
    found = figures(traced(0.003, 0.005, idle=0.3), traced(0.007, 0.004, idle=0.1))
    for one, other in (("prefill", "decode"), ("host gap", "kernels")):
        assert [a + b for a, b in zip(found[one], found[other])] == pytest.approx(found["total"], rel=0.01)
    steps, step_ms = found["steps per request"], found["ms per step"]
    assert [a * b for a, b in zip(steps, step_ms)] == pytest.approx(found["total"], rel=0.01)
    assert found["total"][0] != pytest.approx(found["total"][1])
