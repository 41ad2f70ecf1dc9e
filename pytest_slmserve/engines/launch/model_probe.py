"""Sizes of models that the catalogue does not have, as the interpreter that has vLLM counts them: once for each
configuration and its versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.catalog import (
    catalogue_name,
    config_folder,
    hub_name,
    kept_sizes,
    on_the_hub,
    own_cache,
    read_config,
    shape_of,
    short_name,
    sizes_file,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.secret_words import passed_on
from pytest_slmserve.schema.shapes import AS_CONFIGURED, Shape
from pytest_slmserve.schema.specs import EngineSpec, short_hash

SIZES = Path(__file__).parents[1] / "worker" / "model_sizes.py"
PROBE_S = 15

Versions = Mapping[str, str | None]


def probe_models(models: Sequence[str], python: str, env: Mapping[str, str], versions: Versions) -> list[str]:
    """Find and count those of `models` whose shape is not wholly known, and keep what was found in the user's cache,
    where `shape_of` reads it. The notes say of which models the weights could not be counted, and why. versions: of the
    packages of the interpreter `python`. Raises BadUsage for a model without a configuration."""
    wanted = [model for model in dict.fromkeys(models) if wants_probe(model, versions)]
    notes = []
    for told in _told(wanted, python, env) if wanted else ():
        model = told["model"]
        if kinds := told.get("missing"):
            raise missing(model, kinds)
        if problem := told.get("problem"):
            notes.append(f"{model}: its weights are not counted ({problem})")
        else:
            _keep(told, versions)
    for model in models:
        shape_of(model)  # which raises where there is still none
    return notes


def wants_probe(model: str, versions: Versions) -> bool:
    """Whether a probe may know more of a model than we do. Raises BadUsage for a name that is none."""
    if catalogue_name(model):
        return False
    folder = config_folder(model)
    if folder is None:
        if not on_the_hub(model):
            shape_of(model)
        return True
    config = read_config(folder)
    if kept := kept_sizes(config):
        return any(versions.values()) and bool(kept.get("versions") != dict(versions))
    try:
        shape = shape_of(model)
    except BadUsage:
        return True  # Transformers may know the entries that are not there
    unread = shape.architecture in AS_CONFIGURED and shape.windows is None
    return shape.parameters is None or unread or "num_experts_per_tok" in config


def _told(models: Sequence[str], python: str, env: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What the probe says of each model; of one that it has not come to in time, that it took too long."""
    command = [python or sys.executable, str(SIZES), *models]
    why = f"{command[0]} has no Transformers that counts them"
    allowed = passed_on(os.environ, hub=True) | dict(env)
    try:
        output = subprocess.run(command, capture_output=True, timeout=PROBE_S, env=allowed).stdout
    except subprocess.TimeoutExpired as late:
        output, why = late.stdout or b"", f"the probe took more than {PROBE_S} s"
    except OSError as error:
        output, why = b"", f"{command[0]} does not run: {error.strerror}"
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with suppress(ValueError, TypeError, KeyError):  # what libraries print is none of ours
            told = json.loads(line)
            found[told["model"]] = told
    for model in models:
        yield found.get(model) or {"model": model, "problem": why}


def _keep(told: Mapping[str, Any], versions: Versions) -> None:
    """Keep what was told of a model. A cache that cannot be written costs a probe at each run, nothing else."""
    path = sizes_file(read_config(Path(told["folder"])))
    kept = {name: told[name] for name in ("parameters", "active", "completed")}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"versions": dict(versions), **kept}), "utf-8")
        new.replace(path)


def missing(model: str, kinds: Sequence[str]) -> BadUsage:
    """The error of a name on the Hub without a configuration. kinds: of what the Hub's library raised, by name."""
    elsewhere = f"`hf download {model} config.json` where there is a network, or a folder with its config.json"
    if "GatedRepoError" in kinds:
        return BadUsage(f"{model} is gated on the Hub", "its licence, accepted there, and HF_TOKEN=TOKEN")
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        return BadUsage(f"the Hub has no model {model}, or it is private", "its name there, or HF_TOKEN=TOKEN")
    if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        return BadUsage(f"{model} has no config.json on the Hub", "a model in the format of Transformers")
    if "ModuleNotFoundError" in kinds:
        return BadUsage(f"{model}: the Hub's library is not installed", f"--slm-python=PATH, or {elsewhere}")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return BadUsage(f"{model} is not in the Hub's cache, and HF_HUB_OFFLINE is set", elsewhere)
    return BadUsage(f"{model} is not in the Hub's cache, and the Hub does not answer", elsewhere)


def model_for(spec: EngineSpec, shape: Shape) -> str:
    """A Hub name, or a folder. Raises BadUsage where that cannot be made."""
    if spec.load_format == "auto":
        return hub_name(spec.model)
    files = {"config.json": json.dumps(dict(shape.config)), **tokenizer_files(shape)}
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


def tokenizer_files(shape: Shape) -> dict[str, str]:
    """A word for each token: a server turns tokens into text, and with dummy weights there is no tokenizer. None is
    special, for those have no text, and a token without text is not sent."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(shape.vocabulary)}, "unk_token": "t0"}
    described: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    described |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": json.dumps(described), "tokenizer_config.json": json.dumps(named)}
