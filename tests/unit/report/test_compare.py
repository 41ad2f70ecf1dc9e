"""Comparisons of runs and of releases: planted ones have the sections that are kept, a change is the one that was
planted, and the charts have the same ratios."""

from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import values_of
from sections import difference, in_words, rows_of, tables_of
from stored_records import BASELINE, KNOWN, NEW, candidate, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import METRICS, compare, release_histories
from pytest_slmserve.report import compare as report
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.records import Environment


def compared(before, after, tolerance=0.03):
    return report.RunSide("before", before), report.RunSide("after", after), compare(before, after, tolerance)


def test_comparison_shows_planted_change():
    made = [*BASELINE, *candidate(1.1), engine_alone(environment=Environment(platform="cpu", cpu="Xeon"), launch="x")]
    assert report.measured_facts(made) == {
        "measurements": 7, "launches": 3, "models": ["opt-1.3b"], "vllm": [KNOWN.vllm, NEW.vllm],
        "devices": ["NVIDIA H200", "Xeon"], "hosts": ["one"],
    }  # fmt: skip
    assert report.days_of(["2026-02-01T", "2026-01-03T", "2026-01-09T"]) == "2026-01-03 to 2026-02-01"
    assert (report.days_of([]), report.days_of(["2026-01-02T03", "2026-01-02T01"])) == ("", "2026-01-02")
    sides = compared(BASELINE, candidate(1.1))
    section, facts = report.comparison_section(*sides), report.change_facts(*sides)
    rows = {row["metric"]: row for row in rows_of(tables_of(section)[1])}
    low, high = (float(end) for end in rows["tokens/s"]["95%"].split(" to "))
    assert low < 1 / 1.1 < high < 1 and rows["tokens/s"]["ratio"] == f"{1 / 1.1:.4f}"
    assert float(rows[METRICS["tpot_s"].heading]["ratio"]) == pytest.approx(1.1, rel=1e-3)
    assert sum(facts["counts"].values()) == len(sides[2].changes) == len(rows) and facts["counts"]["worse"] > 0
    assert facts["baseline"]["name"] == "before" and "devices" not in facts["candidate"]
    plane, *charts = section.charts()
    assert {row["series"] for row in values_of(plane.spec)} == {"baseline, opt-1.3b", "candidate, opt-1.3b"}
    ratios = [row["x"] for chart in charts for row in values_of(chart.spec) if "subject" in row]
    drawn = [change.ratio.value for change in sides[2].changes if change.metric in report.DRAWN]
    assert ratios == drawn and len(ratios) == 4


RUN = {
    "path": Path("a.jsonl"), "id": "1", "started": "2026-01-02T03:04:05", "measurements": 12, "launches": 2,
    "models": ["opt-1.3b", "b"], "vllm": ["0.26.0"], "devices": ["H200"], "hosts": ["one"], "resumes": False,
}  # fmt: skip
EXTRA = [engine_alone(700.0, 4), engine_alone(800.0, 16, launch="x")]
DAYS = [replace(m, measured_at=f"2026-01-0{day}T00:00:00") for day, m in enumerate(BASELINE, 1)]
SIMULATED = [engine_alone(environment=Environment(platform="simulated"))]
SIDES = {
    "a slower side": (DAYS, candidate(1.1)),
    "equal sides": (BASELINE, candidate(1.0)),
    "one repeat each": (BASELINE[:1], candidate(1.0)[:1]),
    "loads that one side has alone": ([*BASELINE, *EXTRA], candidate(1.0)),
    "nothing in common": (BASELINE, [engine_alone(700.0, 4)]),
    "simulated": (SIMULATED, SIMULATED),
}
STEPS = {"0.9.0": (1000.0, "one"), "0.10.0": (1001.0, "one"), "0.11.0": (900.0, "one"), "0.12.0": (900.0, "two")}


def history(speeds, wobble=(0.999, 1.0, 1.001)):
    made = []
    for version, (rate, host) in speeds.items():
        where = replace(KNOWN, vllm=version, host=host)
        made += repeats([rate * part for part in wobble], environment=where, launch=version)
    return list(report.history_sections(release_histories(made)))


def two(rate: float, **more):
    return history({"0.9.0": (1000, "one"), "0.10.0": (rate, "one")}, **more)


def test_comparison_sections_match_expected_file():
    shown = {name: in_words([report.comparison_section(*compared(*sides))]) for name, sides in SIDES.items()}
    releases = {f"a rate of {rate}": two(rate) for rate in (1200, 800)} | {"steps": history(STEPS)}
    many = {f"0.{i}.0": (1000.0 if i < 15 else 1120.0, "one" if i < 15 else "two") for i in range(10, 20)}
    releases |= {"a step at another host": history(many)}
    releases |= {f"repeats at {wobble}": two(1010, wobble=wobble) for wobble in ((0.9, 1.1), (1.0,))}
    shown |= {f"releases: {name}": in_words(found) for name, found in releases.items()}
    assert difference("compare", shown) == ""
    assert history({"0.9.0": (1000, "one")}) == []
    rows = [RUN, RUN | {"id": "2", "started": "", "resumes": True}]
    with laid_out(200):
        shown = {f"several archives: {several}": report.run_table(rows, several=several) for several in (True, False)}
    for width in (104, 92, 84, 80, 70):  # columns leave one after the other
        with laid_out(width):
            shown[f"{width} columns"] = report.run_table([RUN | {"models": ["a"], "resumes": True}], several=False)
    assert difference("runs", shown) == ""
