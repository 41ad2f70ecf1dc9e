"""The end of a run in the terminal."""

from __future__ import annotations

from typing import Any

from pytest_slmserve.report.tables import run_lines


def write_summary(terminal: Any, session: Any) -> None:
    """Tables, verdicts and notes of a session, through pytest's terminal reporter."""
    judged = [(j.verdict, j.row) for j in session.judged]
    strict = session.options.strict
    for text, colour in run_lines(session.curves(), judged, shared=session.shared_points(), strict=strict):
        terminal.write_line(text, **({colour: True} if colour else {}))
    for note in session.notes:
        terminal.write_line(f"note: {note}", yellow=True)
    if session.reused_count:
        terminal.write_line(f"{session.reused_count} measurements were reused from {session.options.records}")
