"""The benchmarks' tests: a wheel has them within the package, a checkout beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest_slmserve

PACKAGE = Path(pytest_slmserve.__file__).parent
BENCHMARKS = next(folder for folder in (PACKAGE / "benchmarks", PACKAGE.parent / "benchmarks") if folder.is_dir())


def put(folder: Path, *names: str) -> None:
    """Copies those benchmarks, each by a name that no test of ours has, whose module would be taken for it."""
    for name in names:
        shutil.copy(BENCHMARKS / f"{name}.py", folder / f"{name}_shipped.py")
