"""Sizes of models that the catalogue does not have: when a probe is asked, what is kept of it, and its errors."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Thread
from typing import ClassVar

import pytest

from pytest_slmserve.plan import models
from pytest_slmserve.plan.models import missing, model_of, probe_models, wants_probe
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE

VERSIONS = {"vllm": "0.26.0", "torch": "2.11"}
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 65024}
ENTRIES = {
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "max_position_embeddings": 2048,
}
COUNTED = {"parameters": 7_217_189_760, "active": 7_217_189_760, "completed": ENTRIES}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def falcon(tmp_path) -> str:
    folder = tmp_path / "falcon"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FALCON), "utf-8")
    return str(folder)


@pytest.fixture
def interpreter(tmp_path) -> Callable[..., str]:
    """An executable that prints these lines for whatever it is asked, and counts how often it was."""

    def made(*lines: object) -> str:
        path = tmp_path / "python"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text(f"#!{sys.executable}\nopen({str(tmp_path / 'asked')!r}, 'a').write('.')\n")
        with path.open("a") as file:
            file.writelines(f"print({text!r})\n" for text in texts)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return made


def asked(tmp_path) -> int:
    file = tmp_path / "asked"
    return len(file.read_text()) if file.exists() else 0


def test_what_the_catalogue_has_needs_no_probe(tmp_path, interpreter):
    assert probe_models(["opt-1.3b", "Qwen/Qwen3-0.6B"], interpreter(), {}, VERSIONS) == []
    twin = tmp_path / "mine"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(dict(CATALOGUE["qwen3-0.6b"].config)))
    assert probe_models([str(twin)], interpreter(), {}, VERSIONS) == [] and asked(tmp_path) == 0


def test_a_model_is_counted_once_for_each_configuration_and_its_versions(tmp_path, falcon, interpreter):
    python = interpreter("a warning of a library", {"model": falcon, "folder": falcon, **COUNTED})
    assert probe_models([falcon, falcon], python, {}, VERSIONS) == []
    shape = model_of(falcon)
    assert (shape.parameters, shape.layers, shape.kv_bytes_per_token()) == (7_217_189_760, 32, None)
    assert not wants_probe(falcon, VERSIONS) and not wants_probe(falcon, {"vllm": None, "torch": None})
    probe_models([falcon], python, {}, VERSIONS)
    assert asked(tmp_path) == 1
    probe_models([falcon], python, {}, {**VERSIONS, "vllm": "0.27.0"})
    assert asked(tmp_path) == 2


def test_a_model_that_is_not_counted_is_noted_and_asked_again(tmp_path, falcon, interpreter):
    with_shape = {**FALCON, **ENTRIES}
    (tmp_path / "falcon" / "config.json").write_text(json.dumps(with_shape))
    told = {"model": falcon, "folder": falcon, "problem": "ValueError: too new"}
    [note] = probe_models([falcon], interpreter(told), {}, VERSIONS)
    assert note == f"{falcon}: its weights are not counted (ValueError: too new)"
    assert model_of(falcon).parameters is None and wants_probe(falcon, VERSIONS)
    [note] = probe_models([falcon], interpreter(), {}, VERSIONS)
    assert "has no Transformers that counts them" in note
    [note] = probe_models([falcon], str(tmp_path / "nothing"), {}, VERSIONS)
    assert "does not run" in note


def test_a_configuration_that_nobody_can_read_is_wrong_usage(falcon, interpreter):
    with pytest.raises(BadUsage, match="its config.json has no usable 'num_hidden_layers'"):
        probe_models([falcon], interpreter(), {}, VERSIONS)
    with pytest.raises(BadUsage, match="unknown model 'falcon-7'"):
        probe_models(["falcon-7"], interpreter(), {}, VERSIONS)


def test_a_slow_probe_is_given_up(falcon, tmp_path, interpreter, monkeypatch):
    (tmp_path / "falcon" / "config.json").write_text(json.dumps({**FALCON, **ENTRIES}))
    monkeypatch.setattr(models, "PROBE_S", 0.1)
    slow = interpreter()
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    [note] = probe_models([falcon], slow, {}, VERSIONS)
    assert "took more than 0.1 s" in note


@pytest.mark.parametrize(
    ("kinds", "offline", "problem", "hint"),
    [
        (["GatedRepoError", "RepositoryNotFoundError"], "", "me/mine is gated on the Hub", "HF_TOKEN"),
        (["RepositoryNotFoundError"], "", "the Hub has no model me/mine, or it is private", "HF_TOKEN"),
        (["EntryNotFoundError"], "", "me/mine has no config.json on the Hub", "Transformers"),
        (["LocalEntryNotFoundError", "EntryNotFoundError"], "1", "and HF_HUB_OFFLINE is set", "hf download"),
        (["OfflineModeIsEnabled"], "yes", "and HF_HUB_OFFLINE is set", "hf download me/mine config.json"),
        (["TimeoutError"], "", "the Hub does not answer", "a folder with its config.json"),
        (["ModuleNotFoundError"], "", "the Hub's library is not installed", "--slm-python"),
    ],
)
def test_each_reason_is_one_sentence(monkeypatch, kinds, offline, problem, hint):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    error = missing("me/mine", kinds)
    assert problem in error.problem and hint in error.hint and len(error.problem.split()) <= 25


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as its library needs to find one file of a repository, or to hear why it may not."""

    config = b'{"model_type": "unheard-of"}'
    codes: ClassVar = {"gone": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "bare": (404, "EntryNotFound")}

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        status, code = next((found for name, found in self.codes.items() if f"/{name}/" in self.path), (200, ""))
        self.send_response(status)
        headers = {"X-Error-Code": code} if code else {"ETag": '"1"', "X-Repo-Commit": "a" * 40}
        for name, value in {**headers, "Content-Length": str(0 if code else len(self.config))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and not code:
            self.wfile.write(self.config)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="needs huggingface_hub")
def test_the_hubs_own_library_finds_the_configuration_or_says_why_not(monkeypatch, tmp_path):
    """The real library against a small server: only the configuration is fetched, into the Hub's cache."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
        names = ("me/gone", "me/gated", "me/bare", "me/there")
        monkeypatch.setattr(models, "PROBE_S", 60)
        told = models._told(names, "", env)
        server.shutdown()
    assert "RepositoryNotFoundError" in told["me/gone"]["missing"]
    assert "GatedRepoError" in told["me/gated"]["missing"]
    assert "EntryNotFoundError" in told["me/bare"]["missing"]
    snapshot = tmp_path / "cache" / "huggingface" / "hub" / "models--me--there" / "snapshots" / ("a" * 40)
    assert told["me/there"]["folder"] == str(snapshot) and json.loads((snapshot / "config.json").read_text()) == {
        "model_type": "unheard-of"
    }
