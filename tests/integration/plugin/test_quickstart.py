"""The quick start: three tests that a new user runs first, on a simulated engine."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from inner_runs import QUIET
from scripts import CHECKOUT

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read

QUICKSTART = ("--pyargs", "pytest_slmserve.quickstart", *QUIET)


def test_it_is_green_in_a_few_seconds_and_its_archive_is_reported_as_its_run_was(pytester, capsys):
    before = os.times()
    result = pytester.runpytest_subprocess(*QUICKSTART, "--slm-simulate", "-v", "--slm-records=.slm/records.jsonl")
    after = os.times()
    assert result.ret == 0
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*::test_slo PASSED*", "*::test_plateau PASSED*", "*::test_gate PASSED*"])
    result.stdout.fnmatch_lines(["opt-125m: PASS after * pairs of launches"])
    assert after.children_user - before.children_user < 8, "seconds, whatever else the cores do meanwhile"
    capsys.readouterr()
    assert main(["report", ".slm/records.jsonl"]) == 0
    pytest.LineMatcher(capsys.readouterr().out.splitlines()).fnmatch_lines(["opt-125m: PASS after * pairs*"])
    (session,) = read(pytester.path / ".slm" / "records.jsonl").sessions
    assert session.plan["gate"]["pairs"] == 12, "the terms, without which a report would assume some"


def test_in_a_checkout_it_needs_the_package_alone(pytester, monkeypatch):
    """pytest reads tests/conftest.py there, and Hypothesis is not installed."""
    support = [*(CHECKOUT / "tests/support").glob("*.py")]
    for path in [CHECKOUT / "conftest.py", CHECKOUT / "tests/conftest.py", CHECKOUT / "tests/skips.toml", *support]:
        to = pytester.path / path.relative_to(CHECKOUT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    hidden = pytester.mkdir("hidden")
    (hidden / "hypothesis.py").write_text("raise ModuleNotFoundError('hypothesis')")
    monkeypatch.setenv("PYTHONPATH", f"{hidden}{os.pathsep}{pytester.path}/tests/support", prepend=os.pathsep)
    words = (*QUICKSTART, "-p", "no:hypothesispytest", "--slm-simulate")
    result = pytester.run(sys.executable, "-m", "pytest", *words)
    assert result.ret == 0
    result.assert_outcomes(passed=3)


def test_without_a_mode_it_says_what_it_needs_and_on_a_real_engine_its_gate_waits(pytester, holds):
    result = pytester.runpytest_inprocess(*QUICKSTART, "-rs")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["*--slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*"])
    holds("0.32.0")
    plan = pytester.runpytest_inprocess(*QUICKSTART, "--slm-cpu", "--slm-plan")
    plan.stdout.fnmatch_lines(["*test_slo*", "*test_plateau*"])
    plan.stdout.no_fnmatch_line("*test_gate*")


# The word of the marker


def test_a_gate_of_each_endpoint_may_be_simulated_beside_other_tests(runs):
    source = """
        import pytest

        @pytest.mark.slm(gate="simulated")
        def test_gate(slm_gate): assert slm_gate()

        def test_other(slm_measure): assert slm_measure(4).valid

        def test_gate_of_a_real_engine(slm_gates): assert False
        """
    ran = runs(source, "--slm-simulate", "--slm-models=opt-125m", "--slm-window=1", "-rs")
    assert (ran.ret, ran.counts) == (0, {"passed": 6, "skipped": 2})
    ran.lines.fnmatch_lines(["*no launch told its memory", "*needs --slm-gate"])


@pytest.mark.parametrize("word", ["True", "'real'"])
def test_another_word_is_refused(runs, word):
    ran = runs(f"import pytest\n@pytest.mark.slm(gate={word})\ndef test_it(slm_gates): pass", "--slm-simulate")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR and f"gate={word}" in ran.err and "--slm-gate" in ran.err
