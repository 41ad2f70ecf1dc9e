from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from strategies import law, measurement

from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import summary_lines, write_for_others


def findings(records, strict: bool = False) -> Findings:
    made = [measurement(c, law(c), repeat=i) for c in (128, 256, 512) for i in range(2)]
    curve = curve_of("opt-1.3b", made)
    rows = [lookup.row_for(name, "opt-1.3b") for name in ("throughput-plateau", "table-1-batch-fits")]
    return Findings(
        curves=[curve],
        judged=[(lookup.judge_row(row, curve), row) for row in rows],
        notes=["the line was torn"],
        reused={"opt-1.3b at 128": 3, "opt-1.3b at 256": 1},
        reused_from="some.jsonl",
        archives=[str(records)],
        strict=strict,
    )


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The archive of the run, in the folder where it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    path = Path("records.jsonl")
    path.touch()
    return path


def written(records, detail="summary", **of):
    found = findings(records, **of)
    found = replace(found, written=write_for_others(found, records))
    return [(text, {colour: True} if colour else {}) for text, colour in summary_lines(found, detail)]


def test_the_last_screen_in_colours(records):
    lines = written(records)
    assert ("claims: 1 pass, 1 fail as expected", {"green": True}) in lines
    assert ("note: the line was torn", {"yellow": True}) in lines
    assert [text for text, _ in lines[-3:]] == [
        "4 measurements were reused from some.jsonl",
        "archive: records.jsonl",
        "more: slmserve report records.jsonl",
    ]
    assert not any(text.startswith("opt-1.3b on NVIDIA") for text, _ in lines), "the tables come when asked for"


@pytest.mark.parametrize("detail", ["tables", "all"])
def test_tables_come_before_the_last_screen(records, detail):
    lines = written(records, detail)
    colours = {" ".join(text.split())[:18]: markup for text, markup in lines}
    assert colours["passes opt-1.3b pl"] == {"green": True} == colours["fails, as expected"]
    assert colours["opt-1.3b on NVIDIA"] == {}
    assert ("note: the line was torn", {"yellow": True}) in lines
    cells = "opt-1.3b at 128 (3), opt-1.3b at 256 (1)"
    assert f"4 measurements were reused from some.jsonl: {cells}" in [text for text, _ in lines]
    assert lines[-1][0] == "more: slmserve report records.jsonl"


def test_under_strict_an_expected_failure_is_red(records):
    assert [m for text, m in written(records, strict=True) if text.strip().startswith("FAILS")] == [{"red": True}]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("detail", ["summary", "tables", "all"])
def test_no_line_is_longer_than_the_terminal(records, monkeypatch, detail, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = "\n".join(text for text, _ in written(records, detail))
    assert max(map(len, text.splitlines())) <= width
    assert ("not shown:" in text) == (detail == "tables" and width < 120)
    assert ("spread" in text) == (detail != "summary"), "there, or named as left out"


def test_every_run_writes_on_the_page_of_its_workflow(records, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    written(records)
    text = page.read_text("utf-8")
    assert text.startswith("### pytest-slmserve\n\n```text\nNVIDIA H200, vLLM 0.26.0\n") and text.count("```") == 2
    assert "claims: 1 pass, 1 fail as expected" in text and not (tmp_path / "gate.json").exists()


def test_a_page_that_cannot_be_written_is_told(records, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/nowhere/page.md")
    assert any(text.startswith("not written for others: [Errno 2]") for text, _ in written(records))
