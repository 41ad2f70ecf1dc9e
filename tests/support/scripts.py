"""The checkout's paths, and its scripts as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[2]
TESTS = CHECKOUT / "tests"
DATA = TESTS / "data"
BASELINES = CHECKOUT / "benchmarks" / "baselines"
RESULTS = CHECKOUT / "studies" / "results"
# The tests may be copied elsewhere, to run against a wheel. In a checkout a file that is not there is a failure.
IS_CHECKOUT = (CHECKOUT / "pytest_slmserve").is_dir()
in_checkout = pytest.mark.skipif(not IS_CHECKOUT, reason="no checkout")


def needs_checkout() -> None:
    """Skip the test or the module that calls this, if the tests stand in no checkout."""
    if not IS_CHECKOUT:
        pytest.skip("no checkout", allow_module_level=True)


def checkout_script(name: str) -> Path:
    """The path of a script by its name in the checkout; skips the module that asks if there is none."""
    needs_checkout()
    return CHECKOUT / name


@contextmanager
def loaded(path: Path) -> Iterator[ModuleType]:
    """Imported under its own name, so that its dataclasses are found, and beside those that it imports."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]
    sys.path.remove(str(path.parent))
