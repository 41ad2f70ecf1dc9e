"""Engines that fail on purpose keep their logs: in a temporary folder of each test, whose path is short for sockets."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path_factory):
    tmp_path_factory.getbasetemp()  # elsewhere, for it stays
    with TemporaryDirectory(prefix="slm-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)
