"""--slm-suite chooses among the shipped tests: core takes minutes, papers and all take more."""

from __future__ import annotations

import pytest
from inside import usage_error
from shipped import BENCHMARKS

SUITES = """
    import pytest

    def test_core(slm_point): ...

    @pytest.mark.slm_suite("papers")
    def test_papers(slm_point): ...

    @pytest.mark.slm_suite("all")
    def test_all(slm_point): ...
"""
PLAN = ("--slm-simulate", "--slm-plan", "--slm-concurrency=1", "--slm-models=opt-125m", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("words", "count"), [([], 1), (["--slm-suite=core"], 1), (["--slm-suite=papers"], 2), (["--slm-suite=all"], 3)]
)
def test_a_suite_has_those_before_it(pytester, words, count):
    pytester.makepyfile(test_suites=SUITES)
    result = pytester.runpytest_inprocess(*PLAN, *words)
    result.stdout.fnmatch_lines([f"*end: {count} item{'s' * (count > 1)}"])
    if count == 1:
        result.stdout.fnmatch_lines(["slmserve leaves out 1 test: --slm-suite papers runs them, or their own path"])


def test_a_file_that_is_named_runs_unless_a_suite_is_named_too(pytester):
    file = pytester.makepyfile(test_suites=SUITES)
    pytester.runpytest_inprocess(*PLAN, str(file)).stdout.fnmatch_lines(["*end: 3 items"])
    pytester.runpytest_inprocess(*PLAN, f"{file}::test_all").stdout.fnmatch_lines(["*end: 1 item"])
    pytester.runpytest_inprocess(*PLAN, str(file.parent)).stdout.fnmatch_lines(["*end: 1 item"])
    pytester.runpytest_inprocess(*PLAN, str(file), "--slm-suite=core").stdout.fnmatch_lines(["*end: 1 item"])


def test_an_unknown_suite_is_one_sentence(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.slm_suite('more')\ndef test_it(slm_point): ...")
    assert "@pytest.mark.slm_suite('more') names no suite" in usage_error(pytester.runpytest_inprocess(*PLAN))
    assert "--slm-suite: 'more' is not core or papers or all" in usage_error(
        pytester.runpytest_inprocess(*PLAN, "--slm-suite=more")
    )


def test_the_core_suite_is_planned_to_take_15_minutes_on_a_gpu_at_most(pytester):
    result = pytester.runpytest_inprocess("--slm-gpu", "--slm-plan", "-p", "no:cacheprovider", str(BENCHMARKS))
    [end] = [line for line in result.outlines if " end: " in line]
    minutes, _, seconds = end.split()[0].partition(":")
    assert 300 < int(minutes) * 60 + int(seconds) <= 900
