"""Models by the names that users type: of the catalogue, of a folder with a `config.json`, or of the Hub.

Sizes of models outside the catalogue are counted by the interpreter that has vLLM, once for each configuration and its
versions.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_slmserve.schema import models as catalogue
from pytest_slmserve.schema.errors import (
    LARGEST_JSON,
    UNUSABLE,
    BadUsage,
    SlmError,
    content,
    is_file,
    json_value,
    read_json,
    regular,
    user_cache,
    write_file,
)
from pytest_slmserve.schema.secrecy import passed_on
from pytest_slmserve.schema.specs import short_hash

ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
LONGEST_NAME = 1 << 12
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
SIZES = Path(__file__).parents[1] / "engines" / "worker" / "interpreter.py"
QUANTIZATION = "hf_quant_config.json"
PROBE_S = 90  # imports of PyTorch and Transformers took 20 s on a busy host with cold disks
UNCOUNTED = (
    "so the plan knows neither the size of its weights nor, from that, its KV cache and simulated speed: install "
    "transformers and torch where --slm-python points, or take a folder with its safetensors"
)

Versions = Mapping[str, str | None]


def model_of(name: str) -> catalogue.Model:
    """Return the model of a catalogue name, a folder with a config.json, or a Hub name in the Hub's cache on this host.

    A folder with the configuration of a catalogue model, such as that of a fine-tuned one, has its sizes.
    """
    if known := catalogue.catalogue_name(name):
        return catalogue.CATALOGUE[known]
    folder = config_folder(name)
    if folder is None:
        alike = get_close_matches(name.lower(), catalogue.KNOWN_AS, cutoff=0.75)
        near = " or ".join(dict.fromkeys(catalogue.KNOWN_AS[each] for each in alike))
        hints = [f"name {near}"] if near else []
        if ON_THE_HUB.fullmatch(name):
            own = name.rsplit("/", 1)[-1]
            hints.append(f"run `hf download {name} config.json --local-dir {own}` and name the folder {own}")
        anyone = "" if near else f"one of {', '.join(catalogue.CATALOGUE)}, or "
        raise BadUsage(
            f"unknown model {name!r}",
            f"To continue: {'; '.join([*hints, f'name {anyone}a folder that holds a config.json'])}.",
        )
    config = read_config(folder)
    entries, uncompared = config.items(), ("_token_id", "dtype")
    source: catalogue.ModelSource = "folder" if folder == Path(name) else "hub"
    own = Path(name).resolve().name if source == "folder" else catalogue.short_name(name)
    for twin in catalogue.CATALOGUE.values():
        if all(entry in entries for entry in twin.config if not entry[0].endswith(uncompared)):
            return catalogue.model_from_config(own, config, twin.parameters, twin.active, source=source)
    counted = kept_sizes(config)
    parameters = stored_parameters(folder, catalogue.is_tied(config)) or counted.get("parameters")
    return catalogue.model_from_config(own, config, parameters, counted.get("active"), counted.get("completed"), source)


def known_model(name: str) -> catalogue.Model | None:
    """Return the model of a name, or None if it is unknown here."""
    try:
        return model_of(name) if catalogue.catalogue_name(name) or config_folder(name) else None
    except SlmError:
        return None


def config_folder(model: str) -> Path | None:
    """Return the folder with the config.json of a model, or its snapshot in the user's Hub cache, or None."""
    if is_file(Path(model) / "config.json"):
        return Path(model)
    with suppress(OSError):  # an impossible name of a folder
        if Path(model).is_dir():
            raise BadUsage(f"the folder {model} holds no config.json", "Copy the config.json of the model into it.")
    if not ON_THE_HUB.fullmatch(model):
        return None
    home = Path(os.environ.get("HF_HOME") or user_cache("huggingface"))
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")  # the older name is read, too
    cache = Path(named or home / "hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / content(repository / "refs" / "main", LONGEST_NAME).decode().strip()
    except (OSError, ValueError):
        return None
    return snapshot if is_file(snapshot / "config.json") else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder, with ModelOpt's quantization from the file next to it, as vLLM reads both."""
    found = _read_object(folder / "config.json")
    if not found.get("quantization_config") and is_file(beside := folder / QUANTIZATION):
        found["quantization_config"] = _read_object(beside)
    return found


def _read_object(path: Path) -> dict[str, Any]:
    hint = f"Use the {path.name} that came with the model."
    found = read_json(path, hint)
    if not isinstance(found, dict):
        raise BadUsage(f"{path} is not a configuration of a model", hint)
    return found


def stored_parameters(folder: Path, tied: bool) -> int | None:
    """Return the number of weights in the safetensors of a folder.

    None means no file, a damaged or missing one, or packed quantized weights.

    Args:
        tied: the output layer is the embeddings, and counts once.
    """
    index, tensors = folder / "model.safetensors.index.json", dict[str, Any]()
    try:
        files = ["model.safetensors"]
        if index.is_file():
            files = sorted({str(file) for file in json_value(content(index, LARGEST_JSON))["weight_map"].values()})
        for file in files:
            tensors |= _header(folder / file, (folder / file).stat().st_mtime_ns)
        tensors.pop("__metadata__", None)
        if not tensors or any(not tensor["dtype"].startswith(("F32", "F16", "BF16")) for tensor in tensors.values()):
            return None
        if tied and HEAD in tensors and any(name.endswith(EMBEDDINGS) for name in tensors):
            del tensors[HEAD]
        return catalogue.counted_weights(sum(math.prod(tensor["shape"]) for tensor in tensors.values()))
    except (OSError, *UNUSABLE):
        return None


@functools.cache  # by the time of the change, because plans read it often
def _header(path: Path, changed_ns: int) -> dict[str, Any]:
    with open(path, "rb", opener=regular) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LARGEST_JSON:
            raise ValueError(f"{path} has no header of safetensors")
        found: dict[str, Any] = json_value(file.read(size))
    return found


def sizes_file(config: Mapping[str, Any]) -> Path:
    return user_cache() / "sizes" / f"{short_hash(dict(config))}.json"


def kept_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a probe found for this configuration, or nothing."""
    try:
        found = json_value(content(sizes_file(config), LARGEST_JSON))
        counts = [found[name] for name in ("parameters", "active") if found.get(name) is not None]
        is_whole = None not in map(catalogue.counted_weights, counts) and isinstance(found.get("completed", {}), dict)
    except (OSError, *UNUSABLE):
        return {}
    return found if is_whole else {}


def probe_models(
    models: Sequence[str], python: str, env: Mapping[str, str], versions: Versions, is_run: bool = True
) -> list[str]:
    """Count the weights of unknown models, keep the sizes for `model_of`, and return notes on failures.

    A failure is kept, too, and repeated only with other versions.

    Args:
        versions: of the packages of `python`.
        is_run: engines will be started; otherwise only missing configurations are looked up.
    """
    wanted = [model for model in dict.fromkeys(models) if wants_probe(model, versions, is_run)]
    found = _told(wanted, python, env) if wanted else {}
    for model, told in found.items():
        if kinds := told.get("missing"):
            raise missing(model, kinds)
        if folder := told.get("folder") or config_folder(model):
            keep_sizes(read_config(Path(folder)), {"versions": dict(versions), **told})
    notes = []
    for model in dict.fromkeys(models):
        known = model_of(model)  # raises if there is still none
        folder = None if catalogue.catalogue_name(model) else config_folder(model)
        if known.parameters is None and folder:
            unkept = "this user's cache cannot be written" if is_run else "Transformers counts them, before a run alone"
            problem = kept_sizes(read_config(folder)).get("problem") or unkept
            notes.append(f"{model}: its weights are not counted ({problem}), {UNCOUNTED}")
    return notes


def keep_sizes(config: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Keep the result of a probe, unless the cache cannot be written."""
    path = sizes_file(config)
    kept = {name: told[name] for name in ("versions", "parameters", "active", "completed", "problem") if name in told}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(kept))


def wants_probe(model: str, versions: Versions, is_run: bool = True) -> bool:
    """Return whether a probe may find more about a model."""
    if catalogue.catalogue_name(model):
        return False
    folder = config_folder(model)
    if folder is None:
        if not ON_THE_HUB.fullmatch(model):
            model_of(model)
        return True
    config = read_config(folder)
    if kept := kept_sizes(config):
        return is_run and any(versions.values()) and bool(kept.get("versions") != dict(versions))
    try:
        known = model_of(model)
    except BadUsage:
        return True  # Transformers may know the missing entries
    unread = known.architecture in catalogue.AS_CONFIGURED and known.windows is None
    return is_run and (known.parameters is None or unread or "num_experts_per_tok" in config)


def _told(models: Sequence[str], python: str, env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
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
        with suppress(*UNUSABLE):  # libraries may print other lines
            told = json_value(line)
            found[told["model"]] = told
    return {model: found.get(model) or {"problem": why} for model in models}


def missing(model: str, kinds: Sequence[str]) -> BadUsage:
    """Return the error for a name without a configuration, from the names of the Hub library's exceptions."""
    elsewhere = f"`hf download {model} config.json` on a host with a network, or name a folder with its config.json"
    if "GatedRepoError" in kinds:
        return BadUsage(f"{model} is gated on the Hub", "Accept its license on the Hub, and set HF_TOKEN=TOKEN.")
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        return BadUsage(
            f"the Hub has no model {model}, or it is private", "Check its name on the Hub, or set HF_TOKEN=TOKEN."
        )
    if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        return BadUsage(f"{model} has no config.json on the Hub", "Choose a model in the format of Transformers.")
    if "ModuleNotFoundError" in kinds:
        return BadUsage(f"{model}: the Hub's library is not installed", f"Pass --slm-python=PATH, or run {elsewhere}.")
    for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(offline, "").upper() in ("1", "ON", "YES", "TRUE"):
            return BadUsage(f"{model} is not in the Hub's cache, and {offline} is set", f"Run {elsewhere}.")
    return BadUsage(f"{model} is not in the Hub's cache, and the Hub does not answer", f"Run {elsewhere}.")
