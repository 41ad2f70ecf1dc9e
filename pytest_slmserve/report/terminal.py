"""The end of a run in the terminal."""

from __future__ import annotations

from typing import Any

from pytest_slmserve.report.tables import sweep_report, verdict_report


def write_summary(terminal: Any, session: Any) -> None:
    """Tables, verdicts and notes of a session, through pytest's terminal reporter."""
    for curve in session.curves():
        terminal.write_line(sweep_report(curve))
    if session.judged:
        terminal.write_line(verdict_report([(j.verdict, j.row) for j in session.judged]))
    for note in session.notes:
        terminal.write_line(f"note: {note}", yellow=True)
    if session.reused_count:
        terminal.write_line(f"{session.reused_count} measurements were reused from {session.options.records}")
