"""The probe of sizes in its own process: an interpreter that is slow, or not there."""

from __future__ import annotations

import json

import pytest

from pytest_slmserve.plan import models
from pytest_slmserve.plan.models import probe_models
from pytest_slmserve.schema.models import CATALOGUE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)


def test_an_interpreter_that_is_slow_or_not_there_is_a_note(tmp_path, monkeypatch):
    config = {**dict(CATALOGUE["llama-tiny"].config), "architectures": ["OtherForCausalLM"], "model_type": "other"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o700)
    monkeypatch.setattr(models, "PROBE_S", 0.1)
    for python, fact, vllm in ((slow, "0.1 s", "0.26.0"), (tmp_path / "nobody", "nobody", "0.27.0")):
        [note] = probe_models([str(tmp_path)], str(python), {}, {"vllm": vllm})
        assert fact in note and str(tmp_path) in note
