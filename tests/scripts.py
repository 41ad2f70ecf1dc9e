"""The checkout's paths, and its scripts as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[1]
BASELINES = CHECKOUT / "benchmarks" / "baselines"
RESULTS = CHECKOUT / "studies" / "results"


def checkout_script(name: str) -> Path:
    """The path of a script, by its name in the checkout. Skips the module that asks for one that is not there: the
    wheel's tests run away from the checkout."""
    path = CHECKOUT / name
    if not path.exists():
        pytest.skip("no checkout", allow_module_level=True)
    return path


@contextmanager
def loaded(path: Path) -> Iterator[ModuleType]:
    """Imported under its own name, so that its dataclasses are found, and beside those that it imports, until the block
    ends."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]
    sys.path.remove(str(path.parent))
