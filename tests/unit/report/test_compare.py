"""Comparisons of runs and of releases: each row is the change that was planted, inconclusive ones are together by their
reason, what only one side has is named, and the charts have the same ratios."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from html_pages import values_of
from sections import column_of, legends_of, rows_of, sentences_of, tables_of
from stored_records import BASELINE, KNOWN, NEW, candidate, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import METRICS, compare, release_histories
from pytest_slmserve.report.compare import (
    BY_CHANCE,
    DRAWN,
    NOTHING_IN_COMMON,
    RunSide,
    change_facts,
    comparison_section,
    days_of,
    history_sections,
    measured_facts,
    run_table,
)
from pytest_slmserve.report.section import Named, Section
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.records import Environment

SPEEDS = {"0.9.0": (1000.0, "one"), "0.10.0": (1001.0, "one"), "0.11.0": (900.0, "one"), "0.12.0": (900.0, "two")}


def compared(before, after, tolerance=0.03):
    return RunSide("before", before), RunSide("after", after), compare(before, after, tolerance)


# Two runs


def test_facts_of_measurements_are_counted_and_named_once():
    made = [*BASELINE, *candidate(1.1), engine_alone(environment=Environment(platform="cpu", cpu="Xeon"), launch="x")]
    assert measured_facts(made) == {
        "measurements": 7,
        "launches": 3,
        "models": ["opt-1.3b"],
        "vllm": [KNOWN.vllm, NEW.vllm],
        "devices": ["NVIDIA H200", "Xeon"],
        "hosts": ["one"],
    }


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([], ""),
        (["2026-01-02T03:04"], "2026-01-02"),
        (["2026-01-02T03", "2026-01-02T01"], "2026-01-02"),
        (["2026-02-01T", "2026-01-03T", "2026-01-09T"], "2026-01-03 to 2026-02-01"),
    ],
)
def test_days_are_the_first_and_the_last(times, words):
    assert days_of(times) == words


def test_a_side_tells_what_it_is_made_of():
    made = [replace(m, measured_at=f"2026-01-0{day}T00:00:00") for day, m in enumerate(BASELINE, 1)]
    assert RunSide("a.jsonl", made).about == (
        "a.jsonl: 3 measurements, 1 launch, 2026-01-01 to 2026-01-03, vLLM 0.26.0, NVIDIA H200, host one"
    )
    simulated = RunSide("b", [engine_alone(environment=Environment(platform="simulated"))]).about
    assert simulated.split(", ")[1:2] == ["1 launch"] and "no vLLM" in simulated and "host" not in simulated


def test_a_slower_side_is_told_metric_by_metric():
    section = comparison_section(*compared(BASELINE, candidate(1.1)))
    differences, changes = tables_of(section)
    assert {"vllm", "torch"} <= {*column_of(differences, "")}
    rows = {row["metric"]: row for row in rows_of(changes)}
    assert (changes.caption, column_of(changes, "load").count("concurrency 8")) == ("opt-1.3b", 1), "said once"
    rate = rows["tokens/s"]
    assert (rate["baseline"], rate["candidate"], rate["ratio"], rate["verdict"]) == (
        "1,001",
        "910.0",
        "0.9091",
        "worse",
    )
    low, high = (float(end) for end in rate["95 %"].split(" to "))
    assert low < 1 / 1.1 < high < 1 and section.look == "bad"
    assert float(rows[METRICS["tpot_s"].heading]["ratio"]) == pytest.approx(1.1, rel=1e-3)
    said = sentences_of(section)
    assert [text for text in said if text.startswith("worse: opt-1.3b at concurrency 8: tokens/s 0.9091")]
    assert f"note: {BY_CHANCE}" in said and said[-1] in section.title
    verdicts = column_of(changes, "verdict")
    for word in ("better", "worse", "inconclusive"):
        assert f" {verdicts.count(word)} {word}" in said[-1]
    assert "same" not in said[-1] and " 3 %" in said[-1]
    assert [name for name, _ in next(part for part in section.parts if isinstance(part, Named)).pairs] == [
        "baseline",
        "candidate",
    ]


def test_equal_sides_are_the_same_in_every_metric():
    sides = compared(BASELINE, candidate(1.0))
    section, found = comparison_section(*sides), sides[2]
    (*_, changes) = tables_of(section)
    verdicts = {*column_of(changes, "verdict")}
    assert "same" in verdicts and not {"better", "worse"} & verdicts and section.look != "bad"
    assert f"note: {BY_CHANCE}" not in sentences_of(section)
    facts = change_facts(*sides)
    assert facts["counts"]["worse"] == 0 and sum(facts["counts"].values()) == len(found.changes) == len(changes.rows)
    assert facts["baseline"]["name"] == "before" and "devices" not in facts["candidate"]


def test_what_is_inconclusive_is_together_by_its_reason():
    section = comparison_section(*compared(BASELINE[:1], candidate(1.0)[:1]))
    (*_, changes) = tables_of(section)
    unknown = column_of(changes, "verdict").count("inconclusive")
    said = [text for text in sentences_of(section) if text.startswith("inconclusive: ")]
    told = [int(n) for n in re.findall(r"\((\d+) metrics?: opt-1.3b at 8\)", "\n".join(said))]
    assert sum(told) == unknown and len(told) == len(said) > 1


def test_what_one_side_alone_measured_is_counted():
    extra = [engine_alone(700.0, 4), engine_alone(800.0, 16, launch="x")]
    said = sentences_of(comparison_section(*compared([*BASELINE, *extra], candidate(1.0))))
    assert [text for text in said if "by the baseline alone: " in text and "concurrency 4, 16 (" in text]
    assert not [text for text in said if "by the candidate alone" in text]
    nothing = comparison_section(*compared(BASELINE, [engine_alone(700.0, 4)]))
    assert tables_of(nothing) == [] and nothing.parts[-1] == NOTHING_IN_COMMON
    assert len([text for text in sentences_of(nothing) if " alone: " in text]) == 2


def test_the_charts_of_a_comparison_have_its_ratios():
    sides = compared(BASELINE, candidate(1.1))
    plane, *charts = comparison_section(*sides).charts()
    assert {row["series"] for row in values_of(plane.spec)} == {"baseline, opt-1.3b", "candidate, opt-1.3b"}
    ratios = [row["x"] for chart in charts for row in values_of(chart.spec) if "subject" in row]
    assert ratios == [change.ratio.value for change in sides[2].changes if change.metric in DRAWN] and len(ratios) == 4


@pytest.mark.parametrize("several", [True, False])
def test_runs_are_a_line_each(several, tmp_path):
    row = {
        "path": tmp_path / "a.jsonl", "id": "1", "started": "2026-01-02T03:04:05", "measurements": 12, "launches": 2,
        "models": ["opt-1.3b", "b"], "vllm": ["0.26.0"], "devices": [], "hosts": ["one"], "resumes": False,
    }  # fmt: skip
    with laid_out(200):
        head, _, _, first, second = run_table(
            [row, row | {"id": "2", "started": "", "resumes": True}], several=several
        ).splitlines()
    assert ("archive" in head) is several and (first.split()[0] == "a.jsonl") is several
    assert first.split()[several:] == ["1", "2026-01-02", "03:04", "12", "2", "opt-1.3b,", "b", "0.26.0", "one"]
    assert second.split()[several:][:2] == ["2", "-"] and len(second.split()) > len(first.split())


def test_columns_of_runs_leave_a_narrow_terminal_one_after_the_other(tmp_path):
    row = {
        "path": tmp_path, "id": "1", "started": "2026-01-02T03:04:05", "measurements": 12, "launches": 2,
        "resumes": True, "models": ["a"], "vllm": ["0.26.0"], "devices": ["H200"], "hosts": ["one"],
    }  # fmt: skip
    told = {}
    for width in range(110, 40, -1):
        with laid_out(width):
            told[" ".join(run_table([row], several=False).split()).partition("shown: ")[2].partition(";")[0]] = width
    assert list(told) == ["", "host", "launches, host", "launches, device, host", "launches, vLLM, device, host"]


# Releases


def history(speeds=SPEEDS, wobble=(0.999, 1.0, 1.001)):
    made = []
    for version, (rate, host) in speeds.items():
        where = replace(KNOWN, vllm=version, host=host)
        made += repeats([rate * part for part in wobble], environment=where, launch=version)
    return list(history_sections(release_histories(made)))


def two(rate: float, **more):
    section, legend = history({"0.9.0": (1000, "one"), "0.10.0": (rate, "one")}, **more)
    (table,) = tables_of(section)
    return section, legend, table


def test_each_release_is_beside_the_one_before():
    section, legend = history()
    (table,) = tables_of(section)
    rows = rows_of(table)[:4]
    assert section.title.endswith("opt-1.3b at concurrency 8, NVIDIA H200") and section.look == "bad"
    assert [(row["metric"], row["release"], row["value"], row["ratio"], row["verdict"]) for row in rows] == [
        ("tokens/s", "0.9.0", "1,000", "", ""),
        ("tokens/s", "0.10.0", "1,001", "1.001", "same"),
        ("tokens/s", "0.11.0", "900.0", "0.8991", "regressed"),
        ("tokens/s", "0.12.0", "900.0", "1.000", "not comparable"),
    ]
    assert [row["95 % of value"] for row in rows][:2] == ["998.7 to 1,001", "999.7 to 1,002"]
    assert [row["95 % of ratio"] for row in rows] == ["", "0.9967 to 1.005", "0.8953 to 0.9029", "0.9594 to 1.042"]
    (reason,) = sentences_of(section)
    assert reason.startswith("not comparable: ") and reason.endswith("(0.12.0)")
    assert " 3 %." in legend.text and any(BY_CHANCE in note for note in legend.notes)


@pytest.mark.parametrize(("wobble", "ratio", "interval"), [((0.9, 1.1), "1.010", True), ((1.0,), "1.010", False)])
def test_noise_and_single_repeats_show_no_difference_and_say_why(wobble, ratio, interval):
    section, legend, table = two(1010, wobble=wobble)
    later = [row for row in rows_of(table) if row["release"] == "0.10.0"]
    assert {row["verdict"] for row in later} == {"no difference shown"} and later[0]["ratio"] == ratio
    assert (later[0]["95 % of ratio"] != "-") is interval and section.look == "open"
    assert len(sentences_of(section)) == 1 and not any(BY_CHANCE in note for note in legend.notes)


@pytest.mark.parametrize(("rate", "verdict"), [(1200, "improved"), (800, "regressed"), (1000, "same")])
def test_a_release_is_judged_by_the_one_before(rate, verdict):
    _, _, table = two(rate)
    assert column_of(table, "verdict")[1::2] == [verdict, verdict]


def test_nothing_is_said_of_one_release():
    assert history({"0.9.0": (1000, "one")}) == [] and legends_of([]) == []


def test_charts_of_a_history_say_what_their_whiskers_are():
    section, _ = history()
    assert isinstance(section, Section)
    drawn = list(section.charts())
    assert [chart.title for chart in drawn] == list(dict.fromkeys(column_of(tables_of(section)[0], "metric")))
    assert all("repeats" in chart.note and "launches" not in chart.note for chart in drawn)
