"""Folders that describe a catalogue model to an engine that loads no weights: its configuration and a tokenizer."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.catalog import hub_name, short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.files import own_cache
from pytest_slmserve.schema.models import Model
from pytest_slmserve.schema.specs import EngineSpec, short_hash


def model_for(spec: EngineSpec) -> str:
    """The name or folder by which the engine loads its model: with dummy weights a folder of ours that describes it.
    Raises BadUsage where that cannot be made."""
    if spec.load_format == "auto":
        return hub_name(spec.model)
    model = spec.known_model
    files = {"config.json": json.dumps(dict(model.config)), **tokenizer_files(model)}
    return str(kept(short_name(spec.model), files))


def kept(name: str, files: Mapping[str, str]) -> Path:
    """A folder of the user's cache with these files, made if it is not there. Its name depends on what is in it."""
    folder = own_cache() / f"{name}-{short_hash(dict(files))}"
    if folder.is_dir():
        return _unchanged(folder, files)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        for file, text in files.items():
            (made / file).write_text(text, "utf-8")
        try:
            made.rename(folder)
        except OSError:  # another start made it meanwhile
            shutil.rmtree(made)
            if not folder.is_dir():
                raise
    except OSError as error:
        why = f"cannot describe {name} in {folder.parent}: {error.strerror}"
        raise BadUsage(why, "XDG_CACHE_HOME=FOLDER that can be written to") from None
    return _unchanged(folder, files)


def _unchanged(folder: Path, files: Mapping[str, str]) -> Path:
    """The folder. Raises BadUsage where it holds something else: another model would be measured."""
    try:
        same = all((folder / name).read_text("utf-8") == text for name, text in files.items())
    except (OSError, ValueError):
        same = False
    if not same:
        raise BadUsage(f"{folder} does not hold what it was made with: somebody changed it", f"rm -r '{folder}'")
    return folder


def tokenizer_files(model: Model) -> dict[str, str]:
    """A word for each token: a server turns tokens into text, and with dummy weights there is no tokenizer. None is
    special, for those have no text, and a token without text is not sent."""
    words = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(model.vocabulary)}, "unk_token": "t0"}
    described: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": words,
    }
    described |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": json.dumps(described), "tokenizer_config.json": json.dumps(named)}
