"""The benchmarks' tests: a wheel has them within the package, a checkout beside it."""

import re
from pathlib import Path

import pytest_slmserve

PACKAGE = Path(pytest_slmserve.__file__).parent
BENCHMARKS = next(folder for folder in (PACKAGE / "benchmarks", PACKAGE.parent / "benchmarks") if folder.is_dir())


def shipped(*names: str) -> dict[str, str]:
    """Those benchmarks, of whatever suite, each by a name that no test of ours has, whose module would be taken for
    it."""
    texts = {name: (BENCHMARKS / f"{name}.py").read_text("utf-8") for name in names}
    suite = r"(?m)^(pytestmark = |@)pytest.mark.slm_suite.*\n"
    return {f"{name}_shipped.py": re.sub(suite, "", text) for name, text in texts.items()}


def put(folder: Path, *names: str) -> None:
    for name, text in shipped(*names).items():
        (folder / name).write_text(text)
