"""`report` of every committed archive at three widths: no line is longer than the terminal, and no number is lost."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from scripts import BASELINES, needs_checkout

from pytest_slmserve.archive.store import read
from pytest_slmserve.commands import report
from pytest_slmserve.report.screen import MOST_LINES
from pytest_slmserve.report.text_table import laid_out

needs_checkout()
ARCHIVES = sorted(BASELINES.glob("*.jsonl.xz"))


def numbers(pieces: Iterable[str]) -> set[str]:
    return set(re.findall(r"(?<![\w.,])\d[\d,]*\.\d+(?![\w.,])", "\n".join(pieces)))


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name.partition(".jsonl")[0])
def test_no_line_is_longer_than_the_terminal_and_no_number_is_lost(path, monkeypatch):
    """But for words that cannot be broken, as paths."""
    monkeypatch.chdir(BASELINES)
    contents = read(path)
    gates = report.gates_of([(path, contents)])[0]
    found = replace(report.judged_again(contents), gates=gates, notes=contents.notes, archives=[path.name])
    with laid_out(400):
        whole = numbers(report.report_lines(found, "tables"))
    for width in (80, 100, 160):
        for detail in ("summary", "tables", "all"):
            monkeypatch.setenv("COLUMNS", str(width))
            pieces = list(report.report_lines(found, detail))
            lines = [line for piece in pieces for line in piece.splitlines()]
            long = [line for line in lines if len(line) > width and path.name not in line]
            assert [line for line in long if len(line.split()) > 1] == [], (width, detail)
            if detail == "summary":
                assert len(lines) <= MOST_LINES or found.loads, "a load that is no point has a page"
            elif detail == "all":
                assert whole <= numbers(pieces)
