"""The catalogue: models by their names, with what the package knows of each.

`models.json` has for each model its name on the Hub, where its configuration was published, its licence where that
restricts its use, its number of weights, and its configuration. The tiny ones are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.models import Model, model_from_config

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))
CATALOGUE: dict[str, Model] = {
    name: model_from_config(name, model["config"], model["parameters"], model.get("active"))
    for name, model in MODELS.items()
}
KNOWN_AS = {known.lower(): name for name, model in MODELS.items() for known in (name, model.get("hub", name))}


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
