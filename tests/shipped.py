"""Where the benchmarks' tests are: a wheel has them within the package, a checkout beside it."""

from __future__ import annotations

from pathlib import Path

import pytest_slmserve

PACKAGE = Path(pytest_slmserve.__file__).parent
BENCHMARKS = next(folder for folder in (PACKAGE / "benchmarks", PACKAGE.parent / "benchmarks") if folder.is_dir())
