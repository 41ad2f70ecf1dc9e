"""Names of models: of the catalogue, of the Hub, of a folder with a `config.json`; and the shape that each stands for.

`models.json` is the catalogue: for each model its name on the Hub, where its shape was published, its licence where
that restricts its use, its number of weights, and its configuration. The tiny ones are ours."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.files import content, is_file, is_folder
from pytest_slmserve.schema.shapes import Shape, is_tied, shape_from_config
from pytest_slmserve.schema.specs import short_hash
from pytest_slmserve.schema.stored_weights import stored_parameters

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))
CATALOGUE: dict[str, Shape] = {
    name: shape_from_config(name, model["config"], model["parameters"], model.get("active"))
    for name, model in MODELS.items()
}
KNOWN_AS = {known.lower(): name for name, model in MODELS.items() for known in (name, model.get("hub", name))}
ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def short_name(model: str) -> str:
    """A model's name for people: "opt-1.3b" for "facebook/opt-1.3b", the folder's name for a path."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def catalogue_name(model: str) -> str | None:
    """The name under which the catalogue has `model`, or None: a folder may be called as it likes."""
    return KNOWN_AS.get(model.lower())


def hub_name(model: str) -> str:
    """The name to load real weights by: the Hub's, of a catalogue model; any other name, such as a folder, as it is."""
    name = catalogue_name(model)
    return str(MODELS[name].get("hub", name)) if name else model


def restriction(model: str) -> str | None:
    """The licence of a catalogue model whose weights may not be used by everybody for everything; else None."""
    return MODELS[name].get("licence") if (name := catalogue_name(model)) else None


def shape_of(model: str) -> Shape:
    """The shape of a model by any of its names: a catalogue name ("opt-1.3b", "facebook/opt-1.3b"), a folder with a
    config.json, or a name on the Hub whose config.json is in the Hub's cache here. Raises BadUsage."""
    if name := catalogue_name(model):
        return CATALOGUE[name]
    folder = config_folder(model)
    if folder is None:
        raise BadUsage(f"unknown model {model!r}", _instead_of(model))
    config = read_config(folder)
    name = Path(model).resolve().name if is_folder(Path(model)) else short_name(model)
    if twin := catalogue_twin(config):
        return shape_from_config(name, config, twin.parameters, twin.active)
    counted = kept_sizes(config)
    parameters = stored_parameters(folder, is_tied(config)) or counted.get("parameters")
    return shape_from_config(name, config, parameters, counted.get("active"), counted.get("completed"))


def catalogue_twin(config: Mapping[str, Any]) -> Shape | None:
    """The shape of the catalogue whose configuration this is, as that of a fine-tuned model; None where there is none.
    Ids of tokens and the type of the weights may differ."""
    told = config.items()
    return next(
        (
            shape
            for shape in CATALOGUE.values()
            if all(entry in told for entry in shape.config if not entry[0].endswith(("_token_id", "dtype")))
        ),
        None,
    )


def config_folder(model: str) -> Path | None:
    """The folder that holds the config.json of a model: its own, or that of its snapshot in the Hub's cache; None where
    there is neither. Raises BadUsage for a folder without one."""
    if is_file(Path(model) / "config.json"):
        return Path(model)
    if is_folder(Path(model)):
        raise BadUsage(f"the folder {model} holds no config.json", "the config.json that came with the model")
    if not on_the_hub(model):
        return None
    repository = hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        return None
    return snapshot if is_file(snapshot / "config.json") else None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises BadUsage where it is not one."""
    path = folder / "config.json"
    try:
        found = json.loads(content(path))
    except (ValueError, OSError, RecursionError) as error:
        raise BadUsage(f"{path} is not JSON: {error}", "the config.json that came with the model") from None
    if not isinstance(found, dict):
        raise BadUsage(f"{path} is no configuration of a model", "the config.json that came with the model")
    return found


def on_the_hub(model: str) -> bool:
    """Whether a name can be one of the Hub, "owner/name"."""
    return ON_THE_HUB.fullmatch(model) is not None


def hub_cache() -> Path:
    """The Hub's cache of this user, by the variables that its library heeds."""
    home = os.environ.get("HF_HOME") or _user_cache() / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def own_cache() -> Path:
    """The folder for what can be made again, in the user's cache."""
    return _user_cache() / "pytest-slmserve"


def _user_cache() -> Path:
    """The user's cache by the XDG Base Directory Specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def sizes_file(config: Mapping[str, Any]) -> Path:
    """The file of this user's cache in which the sizes of a model of this configuration are kept."""
    return own_cache() / "sizes" / f"{short_hash(dict(config))}.json"


def kept_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a probe found for this configuration (`engines.launch.model_probe`), empty where none has."""
    try:
        return _sizes(path := sizes_file(config), path.stat().st_mtime_ns)
    except OSError:
        return {}


@functools.cache
def _sizes(path: Path, changed_ns: int) -> dict[str, Any]:
    """The content of a file as it was when it was changed last: read once, for plans ask often."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _instead_of(model: str) -> str:
    """What to type in place of an unknown name: near ones, or all that are known; then what else a model may be."""
    near = dict.fromkeys(KNOWN_AS[each] for each in get_close_matches(model.lower(), KNOWN_AS, cutoff=0.75))
    suggestions = [" or ".join(near)] if near else []
    if on_the_hub(model):
        own = model.rsplit("/", 1)[-1]
        suggestions.append(f"`hf download {model} config.json --local-dir {own}` and the folder {own}")
    known = "" if near else f"one of {', '.join(CATALOGUE)}, or "
    return "; ".join([*suggestions, f"{known}a folder that holds a config.json"])
