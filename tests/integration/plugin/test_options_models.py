"""--slm-models chooses the models to sweep."""

from __future__ import annotations

import json

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.schema.models import CATALOGUE


def test_each_model_has_its_points_on_its_own_engine(sweep, archive):
    result = sweep("--slm-models=opt-125m,facebook/opt-350m")
    result.assert_outcomes(passed=12)
    models = [m.spec.model for m in archive().measurements]
    assert models == ["opt-125m"] * 10 + ["opt-350m"] * 10


def test_an_unknown_model_is_an_error_that_names_near_ones_or_all(sweep):
    text = usage_error(sweep("--slm-models=opt-2b"))
    assert "unknown model 'opt-2b'" in text and "opt-2.7b" in text and "opt-tiny" not in text
    assert "opt-125m, opt-350m, opt-1.3b" in usage_error(sweep("--slm-models=falcon"))


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


def test_a_load_for_which_the_engine_has_no_room_after_all_is_skipped_with_its_word(sweep, archive):
    """The plan cannot know how much a hybrid model keeps; the engine can."""
    result = sweep("--slm-models=granite-4.0-h-350m", "--slm-concurrency=1,9000", "-rs")
    result.stdout.fnmatch_lines(["*the engine says that its KV cache holds * requests of 768 tokens*"])
    assert {m.load.concurrency for m in archive().measurements} == {1}


def test_every_model_of_the_catalogue_is_planned(pytester):
    pytester.makepyfile(SWEEP)
    options = ("--slm-simulate", "--slm-plan", "--slm-concurrency=64", "--slm-input-len=8", "--slm-output-len=8")
    result = pytester.runpytest_inprocess(*options, f"--slm-models={','.join(CATALOGUE)}")
    text = result.stdout.str()
    assert result.ret == 0 and [name for name in CATALOGUE if f"[{name}-64]" not in text] == []


def test_what_compares_or_sizes_the_cache_of_a_hybrid_model_is_skipped(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(claim="kv-blocks-as-predicted")
        def test_blocks(slm_claim):
            assert slm_claim()

        job = {"model": "lfm2-350m", "requests": 8, "lengths": (8, 8), "kv_requests": 4}

        @pytest.mark.slm(jobs=[job])
        def test_job(slm_job_point):
            assert slm_job_point.measure()
        """
    )
    options = ("--slm-simulate", "--slm-strict", "--slm-models=lfm2-350m", "-rs")
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines_random(["*the engine's own KV blocks count*", "*no KV cache can be sized for it*"])


def test_a_model_that_nobody_can_count_is_simulated_all_the_same(pytester, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    config = {**dict(CATALOGUE["llama-tiny"].config), "architectures": ["OtherForCausalLM"], "model_type": "other"}
    (pytester.mkdir("mine") / "config.json").write_text(json.dumps(config))
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=mine", "--slm-python=/nowhere", "--slm-plan")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*mine: its weights are not counted (/nowhere does not run*"])


def test_a_name_on_the_hub_that_is_not_to_be_had_is_one_sentence(pytester, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-models=me/mine", "--slm-python=/nowhere"))
    assert "unknown model 'me/mine'" in text and "hf download me/mine config.json" in text


def test_a_config_that_is_not_json_is_an_error(pytester):
    (pytester.mkdir("mine") / "config.json").write_text("{")
    pytester.makepyfile(SWEEP)
    assert "is not JSON" in usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-models=mine"))


def test_a_model_that_a_marker_names_stays_and_the_run_says_so(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(model="opt-1.3b")
        def test_other(slm_measure, slm_spec):
            assert slm_measure(4) and slm_spec.model == "opt-1.3b"

        @pytest.mark.slm(model="facebook/opt-125m")
        def test_same(slm_measure):
            assert slm_measure(4)
        """
    )
    words, said = (
        ("--slm-simulate", "--slm-window=1"),
        "slmserve: 1 test of opt-1.3b, as the marker has it: --slm-models",
    )
    result = pytester.runpytest_inprocess(*words, "--slm-models=opt-125m")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"{said} does not change that"])
    pytester.runpytest_inprocess(*words).stdout.no_fnmatch_line("*as the marker has it*")
