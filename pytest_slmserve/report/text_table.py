"""How text is laid out on a terminal: tables, broken lines, names with what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from tabulate import tabulate

from pytest_slmserve.report.numbers import ABSENT

WIDTH = 150  # of a line, in columns


def grid(rows: Sequence[Sequence[str]], columns: Sequence[str], sides: Sequence[str]) -> str:
    """A table. sides: where each column stands, left, right or center."""
    text = str(tabulate(rows, columns, "simple", disable_numparse=True, colalign=sides if rows else None))
    return "\n".join(line.rstrip() for line in text.splitlines())


def grid_of_known(rows: Sequence[Sequence[str]], columns: Sequence[str], sides: Sequence[str], always: int = 0) -> str:
    """The same without the columns, but for the first `always`, of which no row says anything."""
    known = [any(row[i] not in ("", ABSENT) for row in rows) for i in range(len(columns))]
    kept = [i for i, there in enumerate(known) if there or i < always]
    return grid([[row[i] for i in kept] for row in rows], [columns[i] for i in kept], [sides[i] for i in kept])


def hanging(text: str, indent: int) -> str:
    """A line broken at WIDTH, its later parts indented."""
    spaces = " " * indent
    return fill(text, WIDTH, subsequent_indent=spaces, break_long_words=False, break_on_hyphens=False)


def named(pairs: Sequence[tuple[str, str]]) -> str:
    """A line for each name and what is said of it, the texts below each other."""
    width = max(len(name) for name, _ in pairs) + 2
    return "\n".join(hanging(f"{name:<{width}}{text}", width) for name, text in pairs)
