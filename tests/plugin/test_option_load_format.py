"""--slm-load-format: dummy weights need no download; real ones (auto) come from the Hub or a folder."""

import json
from pathlib import Path

from inside import usage_error

from pytest_slmserve.engines.launch.model_files import model_for
from pytest_slmserve.engines.launch.vllm_arguments import engine_arguments, engine_environment
from pytest_slmserve.schema.specs import EngineSpec


def test_it_is_recorded(sweep, archive):
    sweep("--slm-load-format=auto", "--slm-concurrency=1,2")
    assert {m.spec.load_format for m in archive().measurements} == {"auto"}


def test_dummy_weights_need_a_config_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = EngineSpec("opt-125m")
    folder = model_for(spec)
    assert json.loads(Path(folder, "config.json").read_text())["hidden_size"] == 768
    assert engine_arguments(spec, folder)["load_format"] == "dummy"
    assert engine_environment(spec, {})["HF_HUB_OFFLINE"] == "1"


def test_real_weights_come_by_the_hubs_name():
    spec = EngineSpec("opt-125m", load_format="auto")
    assert model_for(spec) == "facebook/opt-125m"
    assert engine_arguments(spec, "facebook/opt-125m")["load_format"] == "auto"
    assert "HF_HUB_OFFLINE" not in engine_environment(spec, {})


def test_a_licence_that_restricts_the_use_of_real_weights_is_noted(sweep):
    said = "the licence of its weights restricts their use: Llama 3.2 Community License"
    options = ("--slm-models=llama-3.2-1b", "--slm-concurrency=1,2")
    assert said in sweep("--slm-load-format=auto", *options).stdout.str()
    assert said not in sweep(*options).stdout.str()


def test_other_words_are_refused(sweep):
    assert "dummy or auto" in usage_error(sweep("--slm-load-format=random"))
