from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import H200, RESOLVED, measurement
from traces import traced

from pytest_slmserve.analysis.gate import diagnosis
from pytest_slmserve.analysis.gate.diagnosis import Difference, splits
from pytest_slmserve.report.gate import (
    PROBE_LEGEND,
    SPLIT_LEGEND,
    diagnosis_parts,
    difference_parts,
    split_findings,
)
from pytest_slmserve.report.section import Legend, Section, Table, section_text
from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU


def split(baseline, candidate):
    (found,) = splits([baseline], [candidate])
    return found


def text_of(parts) -> str:
    return section_text(Section("", list(parts)))


def diagnosis_text(baseline, candidate) -> str:
    return text_of(diagnosis_parts([baseline], [candidate]))


def rows(text: str) -> dict[str, list[str]]:
    """The figures of each row of a table, by its name."""
    cells = [line.split("  ") for line in text.splitlines()]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in cells}


def test_a_split_shows_every_part_of_both_sides():
    text = diagnosis_text(traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0))
    heading, shown = text.strip().splitlines()[0], rows(text)
    assert heading == ("where the time goes: opt-1.3b, concurrency 8, seconds per 1,000 requests (1 and 1 measurement)")
    assert shown["total"] == ["22.0", "26.0", "+4.0", "+18.2"]
    assert shown["decode"] == ["16.0", "20.0", "+4.0", "+25.0"]
    assert shown["prefill"] == ["6.00", "6.00", "0.00", "0.0"]
    assert shown["host gap"] == ["5.50", "5.20", "-0.30", "-5.5"]
    assert shown["kernels"] == ["16.5", "20.8", "+4.3", "+26.1"]
    assert shown["steps per request"] == ["4.00", "4.00", "0.00", "0.0"]
    assert shown["ms per step"] == ["5.50", "6.50", "+1.00", "+18.2"]


def test_the_part_that_explains_most_is_named_in_both_views():
    said = list(split_findings(split(traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0))))
    assert said == [
        "most of the change is decode: 100 % of it",
        "most of the change is kernels: 107.5 % of it, and the other part went the other way",
        "steps per request 0.0 %, time per step +18.2 %",
    ]


def test_a_gap_that_nobody_saw_is_said_to_be_unknown():
    sides = traced(), traced(0.005, idle=None)
    assert "host gap" not in rows(diagnosis_text(*sides))
    assert list(split_findings(split(*sides)))[-1] == (
        "host gap unknown: no sensor told how long the GPU ran no kernel (candidate)"
    )
    nobody = split(traced(idle=None), traced(idle=None))
    assert list(split_findings(nobody))[-1].endswith("(baseline and candidate)")


def test_a_load_that_cannot_be_split_says_why():
    crowded = traced(concurrency=32), traced(0.005, concurrency=32)
    assert "decode" not in rows(diagnosis_text(*crowded))
    assert (
        "prefill and decode unknown: nearly every step holds a prompt at this load (0 and 0 steps only decode, 50 are "
        "wanted of each side); a smaller load tells them apart"
    ) in list(split_findings(split(*crowded)))
    unnamed = split(traced(), measurement())
    assert "prefill and decode unknown: no step is known to hold a prompt (candidate)" in list(split_findings(unnamed))


def test_bytes_are_told_in_gib_where_that_tells_them_apart():
    cache = Difference("kv_cache_bytes", (str(1 << 33),), (str(100 << 30), None))
    nearly = Difference("gpu_memory_bytes", (str(1 << 33),), (str((1 << 33) + 1),))
    found = text_of(difference_parts((cache, nearly)))
    assert rows(found)["kv_cache_bytes"] == ["8.000 GiB", "100.0 GiB or -"]
    assert rows(found)["gpu_memory_bytes"] == ["8589934592", "8589934593"]


def test_a_diagnosis_is_told_from_the_split_to_the_differences():
    newer = replace(H200, vllm="0.27.0")
    candidate = traced(0.005, environment=newer, resolved=replace(RESOLVED, async_scheduling=True), ready_s=36.0)
    split_, *findings, _, legend, _, start, differences = diagnosis_parts([traced()], [candidate])
    assert isinstance(split_, Table) and split_.heading.startswith("where the time goes: opt-1.3b")
    assert findings == list(split_findings(split(traced(), candidate))) and legend == Legend(SPLIT_LEGEND)
    assert start == "start-up of opt-1.3b: 30.0 -> 36.0 s (+20.0 %), mean of each side's launches"
    assert {"vllm", "async_scheduling"} <= {row[0] for row in differences.rows}


def test_sides_that_do_not_differ_are_said_to_be_equal():
    assert text_of(difference_parts(())).strip().startswith("nothing differs in the environments")


def with_probe(m, wall_s, cpu_s):
    seen = m.run.telemetry
    columns = {**seen.columns, PROBE: (wall_s,) * len(seen), PROBE_CPU: (cpu_s,) * len(seen)}
    return replace(m, run=replace(m.run, telemetry=replace(seen, columns=columns)))


def test_the_probes_of_both_sides_are_compared():
    sides = with_probe(traced(), 0.005, 0.004), with_probe(traced(), 0.006, 0.00402)
    shown = rows(diagnosis_text(*sides))
    assert shown["host-speed probe, ms"] == ["5.00", "6.00", "+1.00", "+20.0"]
    assert shown["its CPU time, ms"] == ["4.00", "4.02", "+0.02", "+0.5"]
    assert "the host was not the same beside both sides: host-speed probe +20.0 %, its CPU time +0.5 %" in list(
        split_findings(split(*sides))
    )
    same = with_probe(traced(), 0.005, 0.004)
    assert Legend(PROBE_LEGEND) in list(diagnosis_parts([same], [same]))
    assert "the host was not the same" not in diagnosis_text(same, same), "it was"


def test_a_probe_beside_one_side_says_nothing():
    sides = traced(), with_probe(traced(), 0.005, 0.004)
    assert split(*sides).known(diagnosis.PROBE) == [] and "host-speed probe, ms" not in rows(diagnosis_text(*sides))
    assert PROBE_LEGEND.split()[0] not in diagnosis_text(traced(), traced())


@pytest.mark.parametrize("candidate", [{"decode_s": 0.04}, {"concurrency": 8, "prompt_s": 3.0}, {"idle": 0.9}])
def test_lines_fit_a_wide_terminal(candidate):
    differing = replace(H200, operating_system="a very long name of a platform " * 2)
    text = diagnosis_text(traced(), traced(environment=differing, **candidate))
    assert all(len(line) <= 150 for line in text.splitlines())
