"""What a section of a report holds, as values that tests compare: its tables, its sentences and its charts."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_slmserve.report.section import Legend, Named, Part, Section, Table


def rows_of(table: Table) -> list[dict[str, str]]:
    """Each row of a table by the names of the columns that tell something."""
    cells = table.cells
    return [dict(zip(cells.heads, row, strict=True)) for row in cells.rows]


def column_of(table: Table, name: str) -> list[str]:
    return [row[name] for row in rows_of(table)]


def tables_of(parts: Section | Iterable[Part]) -> list[Table]:
    """The tables that have rows."""
    parts = parts.parts if isinstance(parts, Section) else parts
    return [part for part in parts if isinstance(part, Table) and part.rows]


def sentences_of(parts: Section | Iterable[Part]) -> list[str]:
    parts = parts.parts if isinstance(parts, Section) else parts
    return [part for part in parts if isinstance(part, str) and part]


def named_of(section: Section) -> dict[str, str]:
    return dict(pair for part in section.parts if isinstance(part, Named) for pair in part.pairs)


def legends_of(parts: Iterable[object]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Legend)]
