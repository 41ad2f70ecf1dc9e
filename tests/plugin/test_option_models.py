"""--slm-models chooses the models to sweep."""

import json

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.schema.catalog import CATALOGUE


def test_each_model_has_its_points_on_its_own_engine(sweep, archive):
    result = sweep("--slm-models=opt-125m,facebook/opt-350m")
    result.assert_outcomes(passed=12)
    models = [m.spec.model for m in archive().measurements]
    assert models == ["opt-125m"] * 10 + ["opt-350m"] * 10


def test_an_unknown_model_is_an_error_that_names_the_known_ones(sweep):
    text = usage_error(sweep("--slm-models=opt-2b"))
    assert "unknown model 'opt-2b'" in text
    assert "opt-125m, opt-350m, opt-1.3b" in text


@pytest.mark.parametrize("wrong", ["opt-1.4b", "empty"])
def test_a_wrong_one_is_an_error_where_no_test_uses_it_too(pytester, wrong):
    pytester.mkdir("empty")
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass

        @pytest.mark.slm(model="opt-125m")
        def test_of_another(slm_measure): pass
        """
    )
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate", f"--slm-models={wrong}"))
    assert "opt-1.3b" in text if wrong == "opt-1.4b" else "the folder empty holds no config.json" in text


def test_a_folder_with_a_config_is_a_model(pytester, archive):
    folder = pytester.mkdir("mine")
    (folder / "config.json").write_text(json.dumps(dict(CATALOGUE["opt-125m"].config)))
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess(
        "--slm-simulate", "--slm-models=mine", "--slm-concurrency=1,8", "--slm-window=1"
    )
    assert [m.spec.model for m in archive().measurements] == ["mine"] * 4
    result.stdout.fnmatch_lines(["*mine*"])


def test_a_config_that_is_not_json_is_an_error(pytester):
    (pytester.mkdir("mine") / "config.json").write_text("{")
    pytester.makepyfile(SWEEP)
    assert "is not JSON" in usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-models=mine"))
