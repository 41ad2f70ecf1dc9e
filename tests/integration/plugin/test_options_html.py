"""--slm-html writes the page of a run, also while it goes on."""

from __future__ import annotations

import sys

import pytest
from html_pages import Page
from inside import GATE, usage_error

from pytest_slmserve.archive.store import read

pytest.importorskip("jinja2", reason="a page needs Jinja2")


def page(pytester):
    return Page((pytester.path / "out.html").read_text("utf-8"))


def test_the_page_has_the_run_s_status_verdicts_and_records(sweep, archive, pytester):
    result = sweep("--slm-html=out.html", "--slm-concurrency=1,16,64")
    seen = page(pytester)
    assert f"Exit status {int(result.ret)}" in seen.text
    assert "page: out.html" in result.stdout.str()
    assert "throughput-plateau" in seen.text and "Points of opt-125m" in seen.tables
    assert read(pytester.path / "out.html").measurements == archive().measurements


def test_while_the_run_goes_on_the_page_says_how_far_it_is(pytester):
    pytester.makepyfile(
        """
        from pathlib import Path

        def test_point(slm_point):
            page = Path("out.html")
            if page.exists():
                text = page.read_text("utf-8")
                assert "1 of 2 tests have ended" in text and "Exit status" not in text
                Path("seen").touch()
            assert slm_point.measure()
        """
    )
    words = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=8,16", "--slm-window=1")
    pytester.runpytest_inprocess(*words, "--slm-html=out.html").assert_outcomes(passed=2)
    assert (pytester.path / "seen").exists()
    assert "Exit status 0" in page(pytester).text
    assert len(read(pytester.path / "out.html").measurements) >= 2, "of a formula too, whose archive does not stay"


def test_a_gate_has_its_endpoints(pytester):
    pytester.makepyfile("def test_gate(slm_gate):\n    assert slm_gate()\n")
    pytester.runpytest_inprocess(*GATE, "--slm-html=out.html")
    assert "Endpoints" in page(pytester).tables


def test_without_jinja2_it_is_a_usage_error_before_anything_is_measured(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "needs Jinja2" in usage_error(sweep("--slm-html=out.html"))


def test_a_page_replaces_no_file_that_is_none(sweep, pytester, archive):
    sweep("--slm-records=r.jsonl")
    before = (pytester.path / "r.jsonl").read_bytes()
    assert "r.jsonl is there, and is no page" in usage_error(sweep("--slm-records=r.jsonl", "--slm-html=r.jsonl"))
    assert (pytester.path / "r.jsonl").read_bytes() == before
    assert "Is a directory" in usage_error(sweep("--slm-html=."))
    assert "no page was written: new.jsonl is" in sweep("--slm-records=new.jsonl", "--slm-html=new.jsonl").stdout.str()
    assert len(archive("new.jsonl").measurements) == 10


def test_a_page_that_cannot_be_written_is_a_note(sweep, pytester, archive):
    (pytester.path / "taken").touch()
    result = sweep("--slm-html=taken/out.html", "--slm-concurrency=1")
    assert "no page was written: cannot write taken/out.html" in result.stdout.str()
    assert archive().measurements


FAILS = """
import pytest

@pytest.mark.slm(model="opt-125m")
def test_objective(slm_measure):
    point = slm_measure(concurrency=8)
    assert point.goodput("ttft:0.001ms").attainment >= 0.99, "<b>first</b>\\x1b token"

@pytest.mark.slm(model="opt-125m", extra=(("die_at", 1),))
def test_engine(slm_measure):
    slm_measure(concurrency=8)
"""


def test_a_failed_test_is_named_on_the_page_and_in_the_step_summary(pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    pytester.makepyfile(FAILS)
    pytester.runpytest_inprocess("--slm-simulate", "--slm-window=1", "--slm-html=out.html").assert_outcomes(failed=2)
    test = "test_a_failed_test_is_named_on_the_page_and_in_the_step_summary.py"
    objective = f"{test}::test_objective: AssertionError: <b>first</b>\\x1b token"
    engine = f"{test}::test_engine: EngineFailed: the simulated engine died at concurrency 8, as it was told to"
    seen, summary = page(pytester), (pytester.path / "summary.md").read_text("utf-8")
    assert objective in seen.text and engine in seen.text
    assert f"```text\nfailed: {objective}\nfailed: {engine}\n" in summary


def test_an_inconclusive_test_is_named_with_its_reason(pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    pytester.makepyfile("def test_mine(slm_sweep): assert slm_sweep(concurrency=[1, 16]).pareto_plateau(tolerance=0.1)")
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-125m", "--slm-html=out.html")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["inconclusive: test_an_inconclusive_test_is_named_with_its_reason.py::test_mine: *"])
    told = "::test_mine: <inconclusive: throughput-plateau"
    summary = " ".join((pytester.path / "summary.md").read_text("utf-8").split())
    assert told in page(pytester).text and told in summary


def test_a_run_of_which_every_test_failed_before_it_measured_has_a_page(pytester):
    pytester.makepyfile("def test_engine(slm_spec):\n    raise RuntimeError\n")
    pytester.runpytest_inprocess("--slm-simulate", "--slm-html=out.html").assert_outcomes(failed=1)
    assert "::test_engine: RuntimeError" in page(pytester).text
