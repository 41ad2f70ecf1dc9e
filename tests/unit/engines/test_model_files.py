"""What an engine is told to load: folders that describe a model, in the same place at every start."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_slmserve.engines.server import model_for, tokenizer_files
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import EngineSpec

TINY = EngineSpec("opt-tiny", platform="cpu", dtype="bfloat16")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pytest-slmserve"


def test_dummy_weights_come_from_a_folder_that_describes_the_model(cache):
    shape = CATALOGUE["opt-125m"]
    folder = Path(model_for(EngineSpec("opt-125m")))
    assert folder.parent == cache and folder.name.startswith("opt-125m-")
    assert json.loads((folder / "config.json").read_text("utf-8")) == dict(shape.config)
    assert not [path for path in folder.iterdir() if path.suffix != ".json"], "there are no weights"


def test_it_is_the_same_at_every_start_and_another_for_another_model():
    here = model_for(TINY)
    assert here == model_for(EngineSpec("opt-tiny", interface="server"))
    other = replace(TINY, model_facts=CATALOGUE["opt-125m"])
    assert here != model_for(other), "a folder of one name may describe something else"


@pytest.mark.parametrize(
    ("model", "wanted"), [("opt-1.3b", "facebook/opt-1.3b"), ("facebook/opt-1.3b", "facebook/opt-1.3b"), ("/m", "/m")]
)
def test_real_weights_come_by_name_or_path(model, wanted, cache):
    assert model_for(EngineSpec(model, load_format="auto")) == wanted
    assert not cache.exists()


@pytest.mark.parametrize("how", ["another shape", "removed", "not text", "a folder"])
def test_a_folder_that_somebody_changed_is_not_measured(cache, how):
    """Its name promises what is in it."""
    config = Path(model_for(TINY)) / "config.json"
    text = config.read_text("utf-8")
    config.unlink()
    match how:
        case "another shape":
            config.write_text(text.replace("{", '{"more": 1, ', 1), "utf-8")
        case "not text":
            config.write_bytes(bytes(range(128, 256)))
        case "a folder":
            config.mkdir()
    with pytest.raises(BadUsage, match="somebody changed it") as caught:
        model_for(TINY)
    assert caught.value.hint == f"rm -r '{config.parent}'"


def test_starts_at_once_make_one_folder(cache):
    """None ever sees a part of it, and nothing is left beside it."""
    files, found = {"config.json", "tokenizer.json", "tokenizer_config.json"}, []

    def start() -> None:
        folder = Path(model_for(TINY))
        found.append((folder, {path.name for path in folder.iterdir()}))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(found[0][0], files)] * 16
    assert list(cache.iterdir()) == [found[0][0]]


def test_a_cache_that_cannot_be_written_to_is_one_sentence(cache):
    cache.write_text("a file is in the way")
    with pytest.raises(BadUsage, match=r"cannot describe opt-tiny in .*pytest-slmserve: (.|\n)*XDG_CACHE_HOME=FOLDER"):
        model_for(TINY)


def test_there_is_a_word_for_each_token(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shape = CATALOGUE["opt-tiny"]
    (tmp_path / "tokenizer.json").write_text(tokenizer_files(shape)["tokenizer.json"], "utf-8")
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.get_vocab_size() == shape.vocabulary
    assert found.encode("t5 t0 t11").ids == [5, 0, 11]
    assert found.decode([5, 0, 11]) == "t5 t0 t11"
