"""The files of examples/; test_blocks.py runs each command of their page."""

from __future__ import annotations

import re
import shutil

import pytest
from scripts import CHECKOUT, needs_checkout

needs_checkout()
EXAMPLES = CHECKOUT / "examples"


def test_every_file_has_its_command_and_its_row_and_without_a_mode_is_skipped(pytester: pytest.Pytester) -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    commands = " ".join(re.findall(r"^((?:pytest|slmserve) .+?) +# \d+$", page, re.MULTILINE)).split()
    files = {path.name for path in EXAMPLES.glob("test_*.py")}
    assert len(files) >= 4 and files == files & set(commands) == set(re.findall(r"\]\((test_\w+\.py)\)", page))
    shutil.copytree(EXAMPLES, pytester.path, dirs_exist_ok=True)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(skipped=6)
