"""A small dataset of invented sentences, and a tokenizer that needs no package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.models import Model

INVENTED = Path(__file__).parents[2] / "data" / "invented.json"


@pytest.fixture(scope="session")
def invented() -> Path:
    """24 conversations: 12 human-first of 18 with two turns; the others have one, none, or begin otherwise."""
    return INVENTED


@pytest.fixture(scope="session")
def invented_facts() -> list[dict]:
    return json.loads(INVENTED.read_text("utf-8"))


@pytest.fixture(scope="session")
def by_bytes():
    """One id for each byte of UTF-8, past the special ones."""
    return lambda texts: [[4 + byte for byte in text.encode()] for text in texts]


@pytest.fixture(scope="session")
def opt() -> Model:
    return model_of("opt-125m")
