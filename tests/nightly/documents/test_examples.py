"""The files of examples/; test_blocks.py runs each command of their page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from scripts import needs_checkout

EXAMPLES = Path(__file__).parents[3] / "examples"
needs_checkout()
PAGE = (EXAMPLES / "README.md").read_text("utf-8")
COMMANDS = re.findall(r"^((?:pytest|slmserve) .+?) +# (\d+)$", PAGE, re.MULTILINE)


@pytest.fixture
def copied(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the files, as a user has them."""
    shutil.copytree(EXAMPLES, pytester.path, dirs_exist_ok=True)
    return pytester


def test_every_file_has_its_command_and_its_row() -> None:
    files = {path.name for path in EXAMPLES.glob("test_*.py")}
    assert len(files) >= 4 and files == {word for line, _ in COMMANDS for word in line.split() if word in files}
    assert files == set(re.findall(r"\]\((test_\w+\.py)\)", PAGE))


def test_without_a_mode_all_are_skipped(copied: pytest.Pytester) -> None:
    copied.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(skipped=6)
