"""Arguments and variables of an engine as vLLM is started with them: by its specification, over those of ours."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_slmserve.engines.server import engine_arguments, engine_environment, model_for
from pytest_slmserve.options.table import argument
from pytest_slmserve.schema.specs import EngineSpec


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


def test_they_go_over_ours_and_leave_the_worker_importable():
    env = engine_environment(EngineSpec("opt-125m", env=(("PYTHONPATH", "/site"), ("HF_HUB_OFFLINE", "0"))), {})
    assert env["HF_HUB_OFFLINE"] == "0"
    folder, site = env["PYTHONPATH"].split(":")
    assert folder.endswith("worker")
    assert site == "/site"


def test_a_variable_changes_the_key_but_a_path_to_packages_does_not():
    plain = EngineSpec("opt-125m")
    assert EngineSpec("opt-125m", env=(("PYTHONPATH", "/site"),)).key == plain.key
    assert EngineSpec("opt-125m", env=(("VLLM_ATTENTION_BACKEND", "TRITON_ATTN"),)).key != plain.key


def test_values_are_json_or_else_text():
    spec = EngineSpec("opt-125m", extra=(("block_size", 32), ("kv_cache_dtype", "fp8")))
    arguments = engine_arguments(spec, "/model")
    assert (arguments["block_size"], arguments["kv_cache_dtype"]) == (32, "fp8")


def test_lists_and_objects_are_carried_by_a_hashable_specification():
    extra = tuple(argument(text) for text in ("sizes=[1,[2,3]]", 'config={"level": 3}', "name=plain"))
    spec = EngineSpec("opt-125m", extra=extra)
    assert hash(spec) == hash(EngineSpec("opt-125m", extra=extra))
    arguments = engine_arguments(spec, "/model")
    assert arguments["sizes"] == (1, (2, 3))
    assert arguments["config"] == {"level": 3}
    assert arguments["name"] == "plain"
