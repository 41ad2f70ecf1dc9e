"""Whether Vega-Lite knows a chart."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator


@cache
def vega_lite() -> Any:
    """A validator by the schema of Vega-Lite, which Altair ships; importing Altair would take a second."""
    altair = find_spec("altair")
    assert altair is not None and altair.origin is not None
    path = Path(altair.origin).parent / "vegalite" / "v6" / "schema" / "vega-lite-schema.json"
    return Draft7Validator(json.loads(path.read_text("utf-8")))
