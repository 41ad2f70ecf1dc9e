"""The end of a run: in the terminal, on the page of a workflow, and for other tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_slmserve.archive.own_folder import make_folder
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.gate.text import as_markdown, gate_facts, gate_text
from pytest_slmserve.report.screen import Line, screen
from pytest_slmserve.report.tables.history import history_report
from pytest_slmserve.report.tables.run import Findings, run_lines
from pytest_slmserve.report.text_table import folded, laid_out
from pytest_slmserve.schema.literals import Detail
from pytest_slmserve.schema.printable import printable

ON_A_PAGE = 100  # columns, and lines, of a summary on the page of a workflow


def write_summary(terminal: Any, session: Any, detail: Detail = "summary") -> None:
    """Writes the last screen of a session through pytest's terminal reporter, below its tables where `detail` wants
    them; and for others."""
    found = findings_of(session)
    page = f"page: {session.page.path}" if session.page and session.page.path.exists() else ""
    others = write_for_others(found, Path(session.options.records))
    found = replace(found, written="; ".join(filter(None, (others, page))))
    with laid_out(every_column=detail == "all"):
        lines: list[Line] = []
        if detail != "summary":  # also what the screen below has no room for
            lines = [*tables(found), *((folded(f"note: {note}"), "yellow") for note in found.notes)]
            each = ", ".join(f"{name} ({n})" for name, n in session.reused_cells.items())
            lines += [(folded(f"{found.reused}: {each}"), None)] if found.reused else []
            lines.append(("", None))
            found = replace(found, notes=(), reused="")
        for text, colour in [*lines, *screen(found)]:
            terminal.write_line(text, **({colour: True} if colour else {}))


def findings_of(session: Any) -> Findings:
    cells = session.reused_cells
    archive = session.executor.archive
    if archive and not session.keeps_records:  # it goes with the run, and the page holds it
        archive = session.page
    return Findings(
        curves=session.verdicts.curves(),
        judged=[(each.verdict, each.row) for each in session.verdicts.judged],
        shared=session.results.shared_points(),
        jobs=session.results.job_points(),
        gates=session.gates,
        slo=session.slo,
        strict=session.options.strict,
        failed=session.failed,
        undecided=session.undecided,
        notes=session.notes,
        reused=f"{sum(cells.values())} measurements were reused from {session.source}" if cells else "",
        archives=[str(archive.path)] if archive else [],
        command=session.command,
    )


def tables(found: Findings) -> Iterator[Line]:
    """Every table and verdict, as pieces of text with a colour."""
    yield from ((folded(text), colour) for text, colour in run_lines(found))
    yield from ((f"{folded(text)}\n", None) for text in history_report(found.history))
    yield from ((f"{folded(gate_text(gated))}\n", None) for gated in found.gates)


def write_for_others(found: Findings, records: Path) -> str:
    """Writes gates as JSON and Markdown beside the records, and what was found on the page of a GitHub workflow.
    Returns the paths beside the records, or the reason for failure: the records hold the measurements anyway."""
    beside, page = records.parent / "gate.json", os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        if page:
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(f"{as_page(found)}\n")
        if not found.gates:
            return ""
        make_folder(beside.parent)
        beside.write_text(as_json(map(gate_facts, found.gates)) + "\n", "utf-8")
        beside.with_suffix(".md").write_text(as_markdown(found.gates), "utf-8")
    except OSError as error:
        return f"not written for others: {error}"
    return f"written: {beside} and {beside.with_suffix('.md').name}"


def as_page(found: Findings) -> str:
    """Markdown: the gates in full, the tests that failed, and the last screen where there is more than gates."""
    gates = as_markdown(found.gates)
    if found.command and found.gates:
        gates += f"To repeat it:\n\n```sh\n{printable(found.command, layout='')}\n```\n\n"
    lines = [f"failed: {printable(text, layout='')}" for text in found.failed]  # never folded: none can end the block
    if not found.gates or found.curves or found.judged:
        with laid_out(ON_A_PAGE):
            lines += [text for text, _ in screen(replace(found, gates=()), most=ON_A_PAGE)]
    text = "\n".join(lines)
    return f"{gates}### pytest-slmserve\n\n```text\n{text}\n```\n" if lines else gates
