"""Public names: few, sorted, resolved late. And the names of test files, which pytest imports by."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import pytest_slmserve

TESTS = Path(__file__).parents[2]
STAND_IN = TESTS / "support" / "stand_in"  # packages, on the path of another process
# Error rates of the gate, outputs of archives, real engines, and the subjects of run/cluster.
NOT_IN_THE_PACKAGE = {"faults", "gate", "golden", "real", "run/ray_cluster"}
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


def test_no_two_files_of_the_tests_have_one_name() -> None:
    """Their folders are no packages, so a second test_gate.py, or helper, is taken for the first that was imported."""
    files = [path for path in TESTS.rglob("*.py") if path.name != "conftest.py" and STAND_IN not in path.parents]
    names = Counter(path.name for path in files)
    assert names["test_names.py"] == 1 and [name for name, count in names.items() if count > 1] == []


def test_the_folders_of_the_tests_are_those_of_the_package() -> None:
    """Whoever changes a module finds its tests in the folder of the same name."""
    package = Path(pytest_slmserve.__file__).parent
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert {name for name in folders if not (package / name).is_dir()} == NOT_IN_THE_PACKAGE
