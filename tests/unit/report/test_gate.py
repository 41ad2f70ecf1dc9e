"""A gate tells its outcome, what can decide it and in how long, and where the time goes between two sides: each part is
the one that was planted, and what cannot be known is named with the side that lacks it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from launches import pair_of_launches, pairs
from sections import column_of, rows_of, sentences_of, tables_of
from strategies import H200, RESOLVED, measurement
from traces import traced

from pytest_slmserve.analysis.gate import diagnosis
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.diagnosis import Difference, splits
from pytest_slmserve.analysis.gate.launch_pairs import Answers, Differs, judge_gate
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate import (
    PROBE_LEGEND,
    SPLIT_LEGEND,
    caches_text,
    described_sides,
    diagnosis_parts,
    difference_parts,
    gate_facts,
    gate_section,
    has_few_pairs,
    next_step,
    outputs_text,
    split_findings,
    title,
)
from pytest_slmserve.report.page.writer import page_content
from pytest_slmserve.report.screen import screen
from pytest_slmserve.report.section import Details, Legend, section_markdown, section_text
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
    said, options = next_step(found).split(": ")
    assert options == OPTIONS and said.startswith(f"{more} more pair{'s' if more > 1 else ''}")
    assert all(f" {s} s" in said for s in seconds) and said.count(" s") == len(seconds)
    assert has_few_pairs(found) and "PASS" not in title(found) and f" {there} pair" in title(found)
    assert f"next: {next_step(found)}" in sentences_of(gate_section(found))


@pytest.mark.parametrize("days", [1, 4])
def test_a_gate_that_was_interrupted_goes_on_and_a_pause_is_no_time_of_its_pairs(days):
    there = [m for m in NOISY if m.paired.pair <= 9]
    late = [
        replace(m, measured_at=m.measured_at.replace("01-01", f"01-0{days if m.paired.pair > 4 else 1}")) for m in there
    ]
    said, options = next_step(gated(late)).split(": ")
    assert said.split()[:2] == ["3", "more"] and " 240 s" in said and " all " not in said and options == OPTIONS


@pytest.mark.parametrize("measured", [pairs(2, kv_blocks=1000), pairs(4), pairs(4, failures=1)])
def test_a_gate_that_fails_or_passes_or_has_no_pair_needs_no_more(measured):
    found = gated(measured)
    assert next_step(found) == "" and not any(said.startswith("next") for said in sentences_of(gate_section(found)))


def test_a_gate_that_used_its_pairs_needs_a_new_one_with_twice_as_many():
    found = gated(NOISY)
    assert title(found) == "opt-1.3b: INCONCLUSIVE after 12 pairs of launches" and not has_few_pairs(found)
    assert "-o slm_gate_pairs=24" in next_step(found)
    (endpoints, *_) = tables_of(gate_section(found))
    waiting = [row for row in rows_of(endpoints) if row[""] == "inconclusive"]
    assert waiting and not {"-", ""} & {row["detectable % worse"] for row in waiting}


@pytest.mark.parametrize("missing", [{"ready_s": None}, {"kv_blocks": None}])
@pytest.mark.parametrize("there", [4, 12])
def test_where_a_value_is_missing_more_pairs_decide_nothing(there, missing):
    assert "slmserve doctor" in next_step(gated(pairs(there, **missing)))


def test_a_dropped_pair_needs_a_new_gate():
    measured = [*pairs(2), *pair_of_launches(3, failures=1)]
    found = gated(measured)
    assert found.dropped and "-o slm_gate_pairs" in next_step(found)
    assert [said for said in sentences_of(gate_section(found)) if said.startswith("left out: pair 3")]


# What is shown of it


def test_what_passes_has_no_smallest_change():
    (endpoints, *_) = tables_of(gate_section(gated(pairs(4))))
    judged = [row for row in rows_of(endpoints) if row[""] == "pass"]
    assert len(judged) == 4 and {row.get("detectable % worse", "-") for row in judged} == {"-"}
    assert {row["pairs"] for row in judged} == {"4"}


def test_a_slower_candidate_has_its_ratio_margin_and_reasons():
    found = gated(pairs(4, speed=0.9))
    section = gate_section(found)
    (endpoints, *others) = tables_of(section)
    rows = {row["endpoint"]: row for row in rows_of(endpoints)}
    rates = [row for name, row in rows.items() if name.startswith("output tokens/s") and row[""]]
    assert [(row["candidate / baseline"], row["better"], row[""], row["margin %"]) for row in rates] == [
        ("0.9000", "higher", "fail", "3")
    ] * len(rates)
    headings = [part.heading for part in section.parts if isinstance(part, Details)]
    assert (
        len(headings) == 2
        and all(headings)
        and section.look == "bad"
        and len(others) > 2
        and title(found).split()[1] == "FAIL"
    )
    facts = gate_facts(found)
    worse = next(row for row in facts["gated"] if row["name"] == rates[0]["endpoint"])
    assert worse["worse"] == pytest.approx(1 / 0.9 - 1, rel=1e-3) and worse["outcome"] == "fail" == facts["outcome"]
    assert facts["pairs"] == 4 and all("outcome" not in row for row in facts["shown"])


def test_an_interim_analysis_is_a_row_with_its_boundaries():
    found = gated(pairs(4))
    interim = next(table for table in tables_of(gate_section(found)) if table.caption == "Interim analyses")
    steps = [(each.name, step) for each in found.compared for step in each.interim]
    assert [(row["interim analysis"], row["mean ratio"]) for row in rows_of(interim)] == [
        (name, f"{step.mean:.4f}") for name, step in steps
    ]


def test_both_sides_are_described_by_what_may_differ():
    measured = [
        replace(m, spec=replace(m.spec, enforce_eager=m.paired.side == "candidate", env=(("A", "1"),)))
        for m in pairs(4)
    ]
    sides = dict(described_sides(gated(measured)))
    assert sides["candidate"].split(", eager") == [
        sides["baseline"].split(", A=1")[0],
        sides["baseline"].split("8,192")[-1],
    ]
    assert sides["baseline"].startswith("vLLM 0.26.0, max_num_seqs 1,024") and sides["baseline"].endswith(" 8 and 64")


@pytest.mark.parametrize("platform", ["simulated", "cuda"])
def test_a_simulated_gate_says_so_wherever_it_is_shown(platform):
    measured = [replace(m, environment=replace(m.environment, platform=platform)) for m in pairs(4)]
    found = gated(measured)
    shown = "\n".join(line for line, _ in screen(Findings(gates=[found])))
    heading = page_content(Findings(gates=[found], measurements=measured), 0, {})["title"]
    section = gate_section(found)
    for said in (section_text(section), section_markdown(section), shown, heading):
        assert (SIMULATED in said) is (platform == "simulated")


def test_tokens_of_dummy_weights_are_compared_and_prove_nothing():
    found = gated(pairs(4))
    assert outputs_text(found) == ""
    same, differ, unsteady = (
        outputs_text(SimpleNamespace(exact=(), answers=Answers(4, 16, 4, steady, differs)))
        for steady, differs in ((True, None), (True, Differs(2, 7, 11, 13)), (False, None))
    )
    assert " 16 " in same and " 4 requests" in same and len(unsteady) > len(same)
    assert all(word in differ for word in ("token 7 ", "request 2 ", "(11 and 13)"))


SECONDS = {"baseline": (0.5, 0.7, 9.0, 0.6), "candidate": (11.0, 11.0, 12.0, None)}


@pytest.mark.parametrize("untold", [None, *SECONDS])
def test_compiling_is_told_by_the_median_of_both_sides_or_not_at_all(untold):
    seconds = {**SECONDS, untold: (None,) * 4}
    made = [
        replace(m, resolved=replace(m.resolved, compile_s=seconds[m.paired.side][m.paired.pair - 1])) for m in pairs(4)
    ]
    said = caches_text(gated(made))
    assert ("0.65 and 11 s" in said) is (untold is None) and said.startswith("compile caches were warm")


# Where the time goes


def split(baseline, candidate):
    (found,) = splits([baseline], [candidate])
    return found


def shown(*sides) -> dict[str, list[str]]:
    """The figures of the split, by the name of a row."""
    (table, *_) = tables_of(diagnosis_parts([sides[0]], [sides[1]]))
    return {name: figures for name, *figures in table.cells.rows}


def test_a_split_shows_every_part_of_both_sides():
    assert shown(traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0)) == {
        "total": ["22.0", "26.0", "+4.0", "+18.2"],
        "prefill": ["6.00", "6.00", "0.00", "0.0"],
        "decode": ["16.0", "20.0", "+4.0", "+25.0"],
        "host gap": ["5.50", "5.20", "-0.30", "-5.5"],
        "kernels": ["16.5", "20.8", "+4.3", "+26.1"],
        "steps per request": ["4.00", "4.00", "0.00", "0.0"],
        "ms per step": ["5.50", "6.50", "+1.00", "+18.2"],
    }


def test_the_part_that_explains_most_is_named_in_both_views():
    by_step, by_device, steps = split_findings(split(traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0)))
    assert "decode: 100 %" in by_step and "other" not in by_step
    assert "kernels: 107.5 %" in by_device and "other way" in by_device
    assert " 0.0 %" in steps and " +18.2 %" in steps


def test_a_change_of_less_than_a_hundredth_is_not_taken_apart():
    (said, *_) = split_findings(split(traced(0.004), traced(0.00402)))
    assert "1 %" in said and "most of the change" not in said


@pytest.mark.parametrize(
    ("sides", "lacking"),
    [((0.25, None), "(candidate)"), ((None, 0.25), "(baseline)"), ((None, None), "(baseline and candidate)")],
)
def test_a_gap_that_nobody_saw_is_unknown_and_says_of_which_side(sides, lacking):
    baseline, candidate = traced(idle=sides[0]), traced(0.005, idle=sides[1])
    assert "host gap" not in shown(baseline, candidate)
    said = list(split_findings(split(baseline, candidate)))[-1]
    assert said.startswith("host gap unknown") and said.endswith(lacking)


def test_a_load_that_cannot_be_split_says_why():
    crowded = traced(concurrency=32), traced(0.005, concurrency=32)
    assert "decode" not in shown(*crowded)
    assert [said for said in split_findings(split(*crowded)) if "(0 and 0 " in said and " 50 " in said]
    assert [said for said in split_findings(split(traced(), measurement())) if said.endswith("a prompt (candidate)")]


def test_bytes_are_told_in_gib_where_that_tells_them_apart():
    cache = Difference("kv_cache_bytes", (str(1 << 33),), (str(100 << 30), None))
    nearly = Difference("gpu_memory_bytes", (str(1 << 33),), (str((1 << 33) + 1),))
    (table,) = tables_of(difference_parts((cache, nearly)))
    assert table.cells.rows == [
        ["kv_cache_bytes", "8.000 GiB", "100.0 GiB or -"],
        ["gpu_memory_bytes", "8589934592", "8589934593"],
    ]
    assert tables_of(difference_parts(())) == [] and len(sentences_of(difference_parts(()))) == 1


def test_a_diagnosis_is_told_from_the_split_to_the_differences():
    newer = replace(H200, vllm="0.27.0")
    candidate = traced(0.005, environment=newer, resolved=replace(RESOLVED, async_scheduling=True), ready_s=36.0)
    parts = list(diagnosis_parts([traced()], [candidate]))
    divided, differences = tables_of(parts)
    *findings, start = sentences_of(parts)
    assert (
        divided.heading.startswith("where the time goes: opt-1.3b, concurrency 8") and "(1 and 1 m" in divided.heading
    )
    assert findings == list(split_findings(split(traced(), candidate))) and Legend(SPLIT_LEGEND) in parts
    assert "opt-1.3b: 30.0 -> 36.0 s (+20.0 %)" in start
    assert {"vllm", "async_scheduling"} <= {*column_of(differences, "")}


def with_probe(m, wall_s, cpu_s):
    seen = m.run.telemetry
    columns = {**seen.columns, PROBE: (wall_s,) * len(seen), PROBE_CPU: (cpu_s,) * len(seen)}
    return replace(m, run=replace(m.run, telemetry=replace(seen, columns=columns)))


def test_the_probes_of_both_sides_are_compared():
    sides = with_probe(traced(), 0.005, 0.004), with_probe(traced(), 0.006, 0.00402)
    found = shown(*sides)
    assert found["host-speed probe, ms"] == ["5.00", "6.00", "+1.00", "+20.0"]
    assert found["its CPU time, ms"] == ["4.00", "4.02", "+0.02", "+0.5"]
    assert [said for said in split_findings(split(*sides)) if "probe +20.0 %" in said and "CPU time +0.5 %" in said]
    same = with_probe(traced(), 0.005, 0.004)
    assert Legend(PROBE_LEGEND) in list(diagnosis_parts([same], [same]))
    assert len(list(split_findings(split(same, same)))) == 1, "the host was the same"


def test_a_probe_beside_one_side_says_nothing():
    sides = traced(), with_probe(traced(), 0.005, 0.004)
    assert split(*sides).known(diagnosis.PROBE) == [] and "host-speed probe, ms" not in shown(*sides)
    assert Legend(PROBE_LEGEND) not in list(diagnosis_parts([traced()], [traced()]))


def test_the_parts_of_a_split_are_the_whole():
    sides = traced(0.003, 0.005, idle=0.3), traced(0.007, 0.004, idle=0.1)
    found = {name: [float(text) for text in row[:2]] for name, row in shown(*sides).items()}
    for one, other in (("prefill", "decode"), ("host gap", "kernels")):
        assert [a + b for a, b in zip(found[one], found[other])] == pytest.approx(found["total"], rel=0.01)
    steps, step_ms = found["steps per request"], found["ms per step"]
    assert [a * b for a, b in zip(steps, step_ms)] == pytest.approx(found["total"], rel=0.01)
    assert not math.isclose(*found["total"])
