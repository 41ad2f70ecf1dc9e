"""A host that is planted: nothing is there yet."""

from __future__ import annotations

import pytest

from pytest_slmserve.commands.doctor import Places


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path / "proc", tmp_path / "sys", tmp_path / "shm", tmp_path / "tmp", tmp_path / "home", {})
