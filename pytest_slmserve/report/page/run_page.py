"""The page of a run, written again and again while it goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.gate.launch_pairs import SIDES
from pytest_slmserve.archive.pages import embedded
from pytest_slmserve.report.gate.text import measurements as of_gate
from pytest_slmserve.report.page.content import TEXT_WIDTH
from pytest_slmserve.report.page.writer import check_replaceable, rendered, template, write_page
from pytest_slmserve.report.summary import findings_of, tables
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.errors import SlmError

PAUSE = 20  # times what the last page took: a run spends a twentieth of its time on it at most


@dataclass(slots=True)
class RunPage:
    """The page at a path. next_at: when it may be written again, by the monotonic clock."""

    path: Path
    next_at: float = 0.0

    def __post_init__(self) -> None:
        """Raises BadUsage, before anything is measured, without Jinja2 and where the page would replace a file that is
        none."""
        template()
        check_replaceable(self.path)

    def write(self, session: Any, status: int | None = None, progress: str = "") -> None:
        """Writes what a session has found. status: of the run, once it has one; until then it may be too early for
        another page. What keeps it from being written is a note of the session: the records have it all."""
        begun = time.monotonic()
        if status is None and begun < self.next_at:
            return
        found = findings_of(session)
        with laid_out(TEXT_WIDTH, every_column=True):
            text = "\n".join(text for text, _ in tables(found))
        records = embedded(session.executor.archive.path) if session.executor.archive else []
        gates = [m for gated in session.gates for side in SIDES for m in of_gate(gated, side)]
        measured = gates or list(session.results.measurements())
        try:
            page = rendered(found, measured, records, status=status, progress=progress, text=text)
            write_page(self.path, page)
        except SlmError as error:
            session.notes.append(f"no page was written: {error}")
            self.next_at = float("inf")
            return
        self.next_at = time.monotonic() + PAUSE * (time.monotonic() - begun)
