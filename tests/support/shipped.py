"""The benchmarks' tests: a wheel has them within the package, a checkout beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_slmserve

PACKAGE = Path(pytest_slmserve.__file__).parent
BENCHMARKS = next(folder for folder in (PACKAGE / "benchmarks", PACKAGE.parent / "benchmarks") if folder.is_dir())


def put(folder: Path, *names: str) -> None:
    """Copies those benchmarks, of whatever suite, each by a name that no test of ours has, whose module would be taken
    for it."""
    for name in names:
        text = (BENCHMARKS / f"{name}.py").read_text("utf-8")
        (folder / f"{name}_shipped.py").write_text(re.sub(r"(?m)^(pytestmark = |@)pytest.mark.slm_suite.*\n", "", text))
