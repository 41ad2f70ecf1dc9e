"""The public names of the package: few, sorted, resolved late, each to what it names."""

from importlib.metadata import PackageNotFoundError, version

import pytest

import pytest_slmserve


def test_public_names_resolve():
    names = pytest_slmserve.__all__
    assert names == sorted(set(names)) and 5 <= len(names) <= 30
    assert {*names, "__version__"} <= set(dir(pytest_slmserve))
    for name in names:
        thing = getattr(pytest_slmserve, name)
        assert thing.__name__ == name and thing.__doc__, name
        assert not thing.__doc__.startswith(f"{name}("), "a generated docstring tells nothing"


def test_version_is_installed_one() -> None:
    with pytest.raises(AttributeError, match="'nonsense'"):
        pytest_slmserve.nonsense  # noqa: B018
    try:
        installed = version("pytest-slmserve")
    except PackageNotFoundError:
        pytest.skip("runs from a folder on the path: no release is installed")
    assert pytest_slmserve.__version__ == installed
