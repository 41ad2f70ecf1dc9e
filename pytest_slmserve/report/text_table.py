"""Layout of text on a terminal: tables, broken lines, names with their descriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Generic, Literal, TypeVar

from tabulate import tabulate

from pytest_slmserve.report.numbers import ABSENT

Row = TypeVar("Row")

WIDTH = 150  # of a line, in columns


def grid(rows: Sequence[Sequence[str]], columns: Sequence[str], sides: Sequence[str]) -> str:
    """A table. sides: where each column stands, left, right or center."""
    text = str(tabulate(rows, columns, "simple", disable_numparse=True, colalign=sides if rows else None))
    return "\n".join(line.rstrip() for line in text.splitlines())


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Column of a table. head: heading of one or two lines. cell: text for a row, "" or "-" where nothing is known.
    about: what a legend says of it."""

    head: str
    cell: Callable[[Row], str]
    side: Literal["left", "right", "center"] = "right"
    about: str = ""


def table(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> str:
    """Rows below the headings of the columns that tell something. always: number of first columns shown in any case."""
    kept = telling(rows, columns, always)
    cells = [[column.cell(row) for column in kept] for row in rows]
    return grid(cells, [column.head for column in kept], [column.side for column in kept])


def telling(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> list[Column[Row]]:
    """Columns in which any row has something to show, and the first `always` in any case."""
    return [
        column
        for number, column in enumerate(columns)
        if number < always or any(column.cell(row) not in ("", ABSENT) for row in rows)
    ]


def hanging(text: str, indent: int) -> str:
    """A line broken at WIDTH, its later parts indented."""
    spaces = " " * indent
    return fill(text, WIDTH, subsequent_indent=spaces, break_long_words=False, break_on_hyphens=False)


def named(pairs: Sequence[tuple[str, str]]) -> str:
    """A line for each name and what is said of it, the texts below each other."""
    width = max(len(name) for name, _ in pairs) + 2
    return "\n".join(hanging(f"{name:<{width}}{text}", width) for name, text in pairs)
