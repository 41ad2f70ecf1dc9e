"""A gate tells its outcome, what can decide it and in how long, and where the time goes between two sides: each part is
the one that was planted, and what cannot be known is named with the side that lacks it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from launches import pair_of_launches, pairs
from sections import column_of, difference, in_words, legends_of, rows_of, sentences_of, tables_of
from strategies import H200, RESOLVED, measurement
from traces import traced

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.diagnosis import Difference, splits
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


def shown(*sides) -> dict[str, list[str]]:
    """The figures of the split, by the name of a row."""
    (table, *_) = tables_of(gate.diagnosis_parts([sides[0]], [sides[1]]))
    return {name: figures for name, *figures in table.cells.rows}


def findings(*sides) -> list[str]:
    (split,) = splits([sides[0]], [sides[1]])
    return list(gate.split_findings(split))


SLOWER = traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0)


def test_a_split_shows_every_part_of_both_sides():
    assert shown(*SLOWER) == {
        "total": ["22.0", "26.0", "+4.0", "+18.2"],
        "prefill": ["6.00", "6.00", "0.00", "0.0"],
        "decode": ["16.0", "20.0", "+4.0", "+25.0"],
        "host gap": ["5.50", "5.20", "-0.30", "-5.5"],
        "kernels": ["16.5", "20.8", "+4.3", "+26.1"],
        "steps per request": ["4.00", "4.00", "0.00", "0.0"],
        "ms per step": ["5.50", "6.50", "+1.00", "+18.2"],
    }
    by_step, by_device, steps = findings(*SLOWER)
    assert "decode: 100 %" in by_step and "other" not in by_step
    assert "kernels: 107.5 %" in by_device and "other way" in by_device
    assert " 0.0 %" in steps and " +18.2 %" in steps


def test_a_change_of_less_than_a_hundredth_is_not_taken_apart():
    said, *_ = findings(traced(0.004), traced(0.00402))
    assert "1 %" in said and "most of the change" not in said


@pytest.mark.parametrize(
    ("sides", "lacking"),
    [((0.25, None), "(candidate)"), ((None, 0.25), "(baseline)"), ((None, None), "(baseline and candidate)")],
)
def test_a_gap_that_nobody_saw_is_unknown_and_says_of_which_side(sides, lacking):
    pair = traced(idle=sides[0]), traced(0.005, idle=sides[1])
    said = findings(*pair)[-1]
    assert "host gap" not in shown(*pair) and said.startswith("host gap unknown") and said.endswith(lacking)


def test_a_load_that_cannot_be_split_says_why():
    crowded = traced(concurrency=32), traced(0.005, concurrency=32)
    assert "decode" not in shown(*crowded)
    assert [said for said in findings(*crowded) if "(0 and 0 " in said and " 50 " in said]
    assert [said for said in findings(traced(), measurement()) if said.endswith("a prompt (candidate)")]


def test_bytes_are_told_in_gib_where_that_tells_them_apart():
    cache = Difference("kv_cache_bytes", (str(1 << 33),), (str(100 << 30), None))
    nearly = Difference("gpu_memory_bytes", (str(1 << 33),), (str((1 << 33) + 1),))
    (table,) = tables_of(gate.difference_parts((cache, nearly)))
    assert table.cells.rows == [
        ["kv_cache_bytes", "8.000 GiB", "100.0 GiB or -"],
        ["gpu_memory_bytes", "8589934592", "8589934593"],
    ]
    assert tables_of(gate.difference_parts(())) == [] and len(sentences_of(gate.difference_parts(()))) == 1


def test_a_diagnosis_is_told_from_the_split_to_the_differences():
    newer = replace(H200, vllm="0.27.0")
    candidate = traced(0.005, environment=newer, resolved=replace(RESOLVED, async_scheduling=True), ready_s=36.0)
    parts = list(gate.diagnosis_parts([traced()], [candidate]))
    divided, differences = tables_of(parts)
    *told, start = sentences_of(parts)
    assert (
        divided.heading.startswith("where the time goes: opt-1.3b, concurrency 8") and "(1 and 1 m" in divided.heading
    )
    assert told == findings(traced(), candidate) and gate.SPLIT_LEGEND in legends_of(parts)
    assert "opt-1.3b: 30.0 -> 36.0 s (+20.0 %)" in start
    assert {"vllm", "async_scheduling"} <= {*column_of(differences, "")}


def with_probe(wall_s, cpu_s):
    seen = (m := traced()).run.telemetry
    columns = {**seen.columns, PROBE: (wall_s,) * len(seen), PROBE_CPU: (cpu_s,) * len(seen)}
    return replace(m, run=replace(m.run, telemetry=replace(seen, columns=columns)))


def test_the_probes_of_both_sides_are_compared_if_both_have_one():
    same, slower = with_probe(0.005, 0.004), with_probe(0.006, 0.00402)
    found = shown(same, slower)
    assert found["host-speed probe, ms"] == ["5.00", "6.00", "+1.00", "+20.0"]
    assert found["its CPU time, ms"] == ["4.00", "4.02", "+0.02", "+0.5"]
    assert [said for said in findings(same, slower) if "probe +20.0 %" in said and "CPU time +0.5 %" in said]
    assert len(findings(same, same)) == 1, "the host was the same"
    assert "host-speed probe, ms" not in shown(traced(), same)
    legends = [legends_of(gate.diagnosis_parts([m], [m])) for m in (same, traced())]
    assert [gate.PROBE_LEGEND in each for each in legends] == [True, False]


def test_the_parts_of_a_split_are_the_whole():
    found = shown(traced(0.003, 0.005, idle=0.3), traced(0.007, 0.004, idle=0.1))
    sides = {name: [float(text) for text in row[:2]] for name, row in found.items()}
    for one, other in (("prefill", "decode"), ("host gap", "kernels")):
        assert [a + b for a, b in zip(sides[one], sides[other])] == pytest.approx(sides["total"], rel=0.01)
    steps, step_ms = sides["steps per request"], sides["ms per step"]
    assert [a * b for a, b in zip(steps, step_ms)] == pytest.approx(sides["total"], rel=0.01)
    assert sides["total"][0] != pytest.approx(sides["total"][1])
