"""Public names: few, sorted, resolved late. And the names of the folders of unit tests."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import pytest_slmserve

TESTS = Path(__file__).parents[2]
IMPORT = "import sys, pytest_slmserve; print(*[m for m in sys.modules if m.startswith('pytest_slmserve.')])"


def test_public_names_are_sorted_and_few() -> None:
    assert pytest_slmserve.__all__ == sorted(set(pytest_slmserve.__all__))
    assert 5 <= len(pytest_slmserve.__all__) <= 30


@pytest.mark.parametrize("name", pytest_slmserve.__all__)
def test_every_public_name_resolves_to_what_it_names(name: str) -> None:
    assert getattr(pytest_slmserve, name).__name__ == name


@pytest.mark.parametrize("name", pytest_slmserve.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    thing = getattr(pytest_slmserve, name)
    assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), "a generated docstring tells nothing"


def test_the_version_is_the_installed_one() -> None:
    try:
        installed = version("pytest-slmserve")
    except PackageNotFoundError:
        pytest.skip("runs from a folder on the path: no release is installed")
    assert pytest_slmserve.__version__ == installed


def test_dir_shows_the_public_names() -> None:
    assert {*pytest_slmserve.__all__, "__version__"} <= set(dir(pytest_slmserve))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'pytest_slmserve' has no attribute 'nonsense'"):
        pytest_slmserve.nonsense  # noqa: B018


def test_the_package_itself_names_nothing_early() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_folders_of_the_tests_are_those_of_the_package() -> None:
    """Whoever changes a module finds its tests in the folder of the same name."""
    package = Path(pytest_slmserve.__file__).parent
    unit = TESTS / "unit"
    folders = {path.parent.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")}
    assert len(folders) > 10 and {name for name in folders if not (package / name).is_dir()} == set()
