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


def benchmark_script(name: str) -> Path:
    """Skips the module that asks, where there is no such file: scripts stay in the checkout, tests may not."""
    path = CHECKOUT / "benchmarks" / f"{name}.py"
    if not path.exists():
        pytest.skip("no checkout", allow_module_level=True)
    return path


@contextmanager
def loaded(path: Path) -> Iterator[ModuleType]:
    """Imported under its own name, so that its dataclasses are found, until the block ends."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]
