"""Names of models: of the catalogue, of the Hub, of a folder with a `config.json`; and the shape that each stands for.

`models.json` is the catalogue: for each model its name on the Hub, where its shape was published, its licence where
that restricts its use, its number of weights, and its configuration. The tiny ones are ours."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.shapes import Shape, is_tied, shape_from_config
from pytest_slmserve.schema.specs import short_hash


def regular(path: str, flags: int) -> int:
    """An opener for `open` that takes files only: a FIFO would be waited for, and a device may have no end. Raises
    OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` itself refuses a folder
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", path)
    return descriptor


def content(path: Path) -> bytes:
    """All bytes of a file. Raises OSError, also where it is larger than the memory."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except (MemoryError, OverflowError):
        raise OSError(errno.ENOMEM, "it is larger than the memory", str(path)) from None


def is_file(path: Path) -> bool:
    """Whether it names a file; a name that no file can have does not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether it names a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


LARGEST_HEADER = 100_000_000  # bytes, by the format's own specification
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def stored_parameters(folder: Path, tied: bool) -> int | None:
    """Weights that the safetensors of `folder` hold; None without any, or where they are quantized: their numbers are
    packed then. tied: an output layer that is stored beside the embeddings is the same, and counts once."""
    try:
        tensors = dict(_tensors(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not tensors or any(not tensor["dtype"].startswith(("F32", "F16", "BF16")) for tensor in tensors.values()):
        return None
    if tied and HEAD in tensors and any(name.endswith(EMBEDDINGS) for name in tensors):
        del tensors[HEAD]
    return sum(int(math.prod(tensor["shape"])) for tensor in tensors.values())


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and description of each tensor. With an index they are of the files that it names, all of which must be
    there. Raises OSError or ValueError where a file is missing or damaged."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({str(file) for file in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    else:
        files = ["model.safetensors"]
    for file in files:
        path = folder / file
        tensors = _header(path, path.stat().st_mtime_ns)
        yield from (pair for pair in tensors.items() if pair[0] != "__metadata__")


@functools.cache
def _header(path: Path, changed_ns: int) -> dict[str, Any]:
    """The header of a file as it was when it was changed last: read once, for plans ask often."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LARGEST_HEADER:
            raise ValueError(f"{path} has no header of safetensors")
        found: dict[str, Any] = json.loads(file.read(size))
    return found


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
