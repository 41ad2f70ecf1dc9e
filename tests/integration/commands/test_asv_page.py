"""The commands of docs/asv.md, run as they stand there on records that were made up."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import CHECKOUT, needs_checkout
from test_asv_command import archive, launches

from pytest_slmserve.__main__ import main, parser

PAGE = CHECKOUT / "docs/asv.md"
needs_checkout()


def commands(heading: str) -> list[list[str]]:
    """Words of each command in the blocks of a section; the shell's own substitution is one file."""
    section = PAGE.read_text("utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    lines = re.sub(r"\$\(.*\)", "records.jsonl", blocks).splitlines()
    return [shlex.split(command, comments=True) for line in lines for command in line.split(" && ")]


def test_a_history_is_kept_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Only what installs, measures or serves the page is not run."""
    if find_spec("asv") is None or shutil.which("git") is None:
        pytest.skip("needs asv and git")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ASV_CONF_DIR", str(tmp_path))
    done = []
    for words in commands("## Keep a history"):
        match words:
            case ["pip", "install", "pytest-slmserve[asv]"] | ["asv", "preview"]:
                pass
            case ["pytest", "--slm-gpu", _, records]:
                path = Path(records.removeprefix("--slm-records="))
                archive(path, launches(path.name.removeprefix("h200-").removesuffix(".jsonl.gz")))
            case ["slmserve", *arguments]:
                assert main(arguments) == 0
            case ["cd", folder]:
                os.chdir(tmp_path / folder)
            case ["asv", *arguments]:
                subprocess.run([sys.executable, "-m", "asv", *arguments], check=True, timeout=120)
                done.append(arguments[0])
            case _:
                pytest.fail(f"unknown: {words}")
    printed = capfd.readouterr().out
    assert done == ["publish", "show", "compare"] and Path(".asv/html/index.html").is_file()
    assert "seconds_per_1000_requests('opt-1.3b', 64)" in printed and "Benchmark (Parameter)" in printed


def test_every_command_on_the_page_is_one() -> None:
    found = commands("## Keep a history") + commands("## The committed history")
    ours = [words[1:] for words in found if words[0] == "slmserve"]
    assert len(ours) >= 4 and {words[1] for words in ours} == {"init", "convert"}
    assert all(parser("asv").parse_args(words).carry_out for words in ours)
