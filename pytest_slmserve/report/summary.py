"""The end of a run in the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.archive.own_folder import make_folder
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.gate.text import as_markdown, gate_facts, gate_text
from pytest_slmserve.report.tables.run import run_lines


def write_for_others(gates: Sequence[Gated], records: Path) -> str:
    """Writes the gates' findings for other tools: JSON and Markdown beside the records, and a GitHub workflow's page if
    there is one. Returns the paths, or the reason for failure: the records hold the measurements anyway."""
    beside, markdown = records.parent / "gate.json", as_markdown(gates)
    try:
        make_folder(beside.parent)
        beside.write_text(as_json(map(gate_facts, gates)) + "\n", "utf-8")
        beside.with_suffix(".md").write_text(markdown, "utf-8")
        if page := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(f"{markdown}\n")
    except OSError as error:
        return f"not written for others: {error}"
    return f"written: {beside} and {beside.with_suffix('.md').name}"


def write_summary(terminal: Any, session: Any) -> None:
    """Tables, verdicts and notes of a session, through pytest's terminal reporter."""
    judged = [(j.verdict, j.row) for j in session.verdicts.judged]
    further = {"shared": session.results.shared_points(), "jobs": session.results.job_points()}
    further |= {"strict": session.options.strict, "slo": session.slo}
    for text, colour in run_lines(session.verdicts.curves(), judged, **further):
        terminal.write_line(text, **({colour: True} if colour else {}))
    for gated in session.gates:
        terminal.write_line(f"{gate_text(gated)}\n")
    if session.gates:
        terminal.write_line(write_for_others(session.gates, Path(session.options.records)))
    for note in session.notes:
        terminal.write_line(f"note: {note}", yellow=True)
    if cells := session.reused_cells:
        count = f"{sum(cells.values())} measurements were reused from {session.source}"
        terminal.write_line(f"{count}: {', '.join(f'{name} ({n})' for name, n in cells.items())}")
