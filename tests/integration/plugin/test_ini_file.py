"""Options in an ini file: texts, and in TOML lists, numbers and booleans."""

from __future__ import annotations

import pytest
from inner_runs import QUIET

KEYS = """
slm_simulate = true
slm_models = ["opt-125m", "opt-350m"]
slm_concurrency = [1, 2]
slm_window = 1
slm_input_len = 16
slm_output_len = "8"
slm_engine_arg = ["t_inf=2000", "b_half=3"]
"""
NATIVE = pytest.mark.skipif(pytest.version_tuple < (9,), reason="a table of pytest 9")
TABLES = pytest.mark.parametrize("table", ["tool.pytest.ini_options", pytest.param("tool.pytest", marks=NATIVE)])


@TABLES
def test_values_of_toml_are_options_and_what_is_typed_goes_over_them(pytester, archive, table):
    own = KEYS.replace('["opt-125m', '["opt-1.3b') if table == "tool.pytest" else KEYS
    pytester.makepyprojecttoml(f"[{table}]{own}")
    pytester.makepyfile("def test_point(slm_point): assert slm_point.measure()")
    words = ("-W", "error::pytest.PytestWarning", *QUIET)
    result = pytester.runpytest_inprocess("-o", "slm_models=opt-125m", *words)
    result.assert_outcomes(passed=2)
    assert {m.spec.model for m in archive().measurements} == {"opt-125m"}
    result = pytester.runpytest_inprocess(*words)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*models (ini), concurrency (ini), window (ini), *engine_arg (ini)*"])
    found = archive().measurements[-1]
    assert (found.spec.model, found.load.concurrency, found.load.window_s) == ("opt-350m", 2, 1.0)
    assert dict(found.spec.extra) == {"t_inf": 2000, "b_half": 3}


@TABLES
def test_a_value_of_another_kind_is_told_with_its_key(pytester, table):
    pytester.makepyprojecttoml(f"[{table}]\nslm_simulate = ['maybe']")
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: slmserve: slm_simulate: 'maybe' *"])
