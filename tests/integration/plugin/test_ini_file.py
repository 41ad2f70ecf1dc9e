"""Options in an ini file: texts, and in TOML lists, numbers and booleans."""

from __future__ import annotations

import pytest

KEYS = """
slm_simulate = true
slm_models = ["opt-125m", "opt-350m"]
slm_concurrency = [1, 2]
slm_window = 1
slm_engine_arg = ["t_inf=2000", "b_half=3"]
"""
NATIVE = pytest.mark.skipif(pytest.version_tuple < (9,), reason="a table of pytest 9")


@pytest.mark.parametrize("table", ["tool.pytest.ini_options", pytest.param("tool.pytest", marks=NATIVE)])
def test_values_of_toml_are_options(pytester, archive, table):
    pytester.makepyprojecttoml(f"[{table}]{KEYS}")
    pytester.makepyfile("def test_point(slm_point): assert slm_point.measure()")
    result = pytester.runpytest_inprocess("-W", "error::pytest.PytestWarning", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*models (ini), concurrency (ini), window (ini), engine_arg (ini)*"])
    found = archive().measurements
    assert {m.spec.model for m in found} == {"opt-125m", "opt-350m"} and {m.load.concurrency for m in found} == {1, 2}
    assert dict(found[0].spec.extra) == {"t_inf": 2000, "b_half": 3}


@pytest.mark.parametrize("table", ["tool.pytest.ini_options", pytest.param("tool.pytest", marks=NATIVE)])
def test_a_value_of_another_kind_is_one_sentence(pytester, table):
    pytester.makepyprojecttoml(f"[{table}]\nslm_simulate = ['maybe']")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: slmserve: slm_simulate: 'maybe' is not 1 or 0"])


def test_what_is_typed_for_one_run_goes_over_the_file(pytester, archive):
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]{KEYS}")
    pytester.makepyfile("def test_point(slm_point): assert slm_point.measure()")
    pytester.runpytest_inprocess("-o", "slm_models=opt-1.3b", "-p", "no:cacheprovider").assert_outcomes(passed=2)
    assert {m.spec.model for m in archive().measurements} == {"opt-1.3b"}
