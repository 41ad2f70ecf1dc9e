"""What tests of charts and of pictures need."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vega_lite() -> Any:
    """A validator by the schema of Vega-Lite, which Altair ships; importing Altair would take a second."""
    jsonschema = pytest.importorskip("jsonschema", reason="charts are validated by a schema")
    if (altair := find_spec("altair")) is None or altair.origin is None:
        pytest.skip("Altair has the schema of Vega-Lite")
    path = Path(altair.origin).parent / "vegalite" / "v6" / "schema" / "vega-lite-schema.json"
    return jsonschema.Draft7Validator(json.loads(path.read_text("utf-8")))
