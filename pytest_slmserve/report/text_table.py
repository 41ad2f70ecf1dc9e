"""Text for terminals: numbers, tables and wrapped lines."""

import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from pathlib import Path
from textwrap import fill, wrap
from typing import Generic, Literal, TypeVar

from tabulate import SEPARATING_LINE, tabulate

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.specs import GIB

ABSENT = "-"
SMALLEST_DECIMAL = 6


def figure(value: float | None, digits: int = 3) -> str:
    """Return a number with significant digits, such as "16,800" or "0.0512"; "-" if unknown."""
    if value is None or not math.isfinite(value):
        return ABSENT
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{min(max(decimals, 0), SMALLEST_DECIMAL)}f}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds in milliseconds, without unit."""
    return figure(None if seconds is None else 1e3 * seconds)


def gib(number: float | None) -> str:
    """Return bytes in GiB, without unit."""
    return figure(None if number is None else number / GIB)


def hundredths(share: float | None, *, signed: bool = False) -> str:
    """Return a share in percent, without unit."""
    if share is None or not math.isfinite(share):
        return ABSENT
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    return text.replace("-", "") if float(text) == 0 else text


def between(seen: Interval, scale: float = 1.0, unit: str = "") -> str:
    """Return the 95% interval in brackets; empty if the noise is unknown."""
    if seen.low is None or seen.high is None:
        return ""
    return f" (95%: {figure(scale * seen.low)} to {figure(scale * seen.high)}{unit})"


def interval_text(seen: Interval | None, show: Callable[[float], str]) -> str:
    """Return the 95% interval as "1.2 to 3.4", or "-" if the noise is unknown."""
    if seen is None or seen.low is None or seen.high is None:
        return ABSENT
    return f"{show(seen.low)} to {show(seen.high)}"


def changed(ratio: Interval | None) -> tuple[str, str]:
    """Return a ratio and its 95% interval as changes in percent: "+2.3", "+1.2 to +3.4"."""
    ends = interval_text(ratio, lambda end: hundredths(end - 1, signed=True))
    return hundredths(None if ratio is None else ratio.value - 1, signed=True), ends


def whole(number: int | None) -> str:
    """Return a number with separators, "16,772"."""
    return ABSENT if number is None else f"{number:,}"


def short_path(path: str | Path) -> str:
    """Return a path as given, or relative to the current folder if that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: "1 launch" or "2 launches"."""
    plural = "es" if what.endswith(("ch", "s")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


Row = TypeVar("Row")
Side = Literal["left", "right", "center"]

NOT_A_TERMINAL = 100  # columns of a line in a file, or in the log of a workflow, unless COLUMNS says otherwise
LEAST_WIDTH = 12  # of a column with wrapped cells
NARROWEST = 20  # columns; no sentence is wrapped or cut to fewer
GAP = 2  # spaces between two columns of a table


@dataclass(frozen=True, slots=True)
class Layout:
    """Terminal layout.

    Attributes:
        width: of a line, in columns.
        every_column: whether a further table has the columns that do not fit; else a line names them.
    """

    width: int
    every_column: bool = False


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)


def layout() -> Layout:
    """Return the layout of `laid_out`, or one as wide as the terminal."""
    return _LAYOUT.get() or Layout(max(shutil.get_terminal_size((NOT_A_TERMINAL, 24)).columns, NARROWEST))


@contextmanager
def laid_out(width: int | None = None, every_column: bool = False) -> Iterator[None]:
    """Set the layout inside a `with` block.

    Args:
        width: in columns; None keeps the current width.
    """
    token = _LAYOUT.set(Layout(width or layout().width, every_column))
    try:
        yield
    finally:
        _LAYOUT.reset(token)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Column of a table.

    Attributes:
        head: heading of one or two lines, clear even if its neighbors are hidden.
        cell: text for a row, "" or "-" if unknown.
        rank: 0 for a column that stays. In narrow tables, all columns of the highest rank are hidden first.
    """

    head: str
    cell: Callable[[Row], str]
    side: Side = "right"
    rank: int = 0

    @property
    def name(self) -> str:
        joined = self.head.replace("-\n", "").replace(" /\n", " / ").replace("/\n", "/").replace("\n_", "_")
        return " ".join(joined.split())


def table(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> str:
    """Return a table without empty columns.

    Args:
        always: number of first columns that stay in any case.
    """
    head, body, foot = table_parts(rows, columns, always)
    return "\n".join([*head, *(line for row in body for line in row), *foot])


def table_parts(
    rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the lines of the headings, of each row, and of the foot.

    Columns that do not fit are hidden by rank. The foot names them, or is a table of them.
    """
    kept, room = telling(rows, columns, always), layout()
    cells = {column: [column.cell(row) for row in rows] for column in kept}
    widths = {
        column: max(len(line) for text in (column.head, *texts) for line in text.split("\n"))
        for column, texts in cells.items()
    }

    def width(of: Sequence[Column[Row]]) -> int:
        return sum(widths[column] + GAP for column in of) - GAP

    shown = kept
    while width(shown) > room.width:
        ranks = {column.rank for column in shown if column.rank}
        if len(ranks) <= room.every_column:  # with every_column, each table keeps one rank
            break
        shown = [column for column in shown if column.rank != max(ranks)]
    too_wide = width(shown) - room.width
    for column in sorted(shown, key=lambda column: -widths[column]):
        if too_wide > 0 and column.side == "left" and (less := min(too_wide, widths[column] - LEAST_WIDTH)) > 0:
            cells[column] = ["\n".join(wrap(cell, widths[column] - less)) for cell in cells[column]]
            too_wide -= less
    # Headings are rows, because tabulate widens columns beyond them and removes an empty first line.
    head = list(zip_longest(*(column.head.split("\n") for column in shown), fillvalue=""))
    body = list(zip(*(cells[column] for column in shown)))
    sides = [column.side for column in shown]
    laid = tabulate([*head, SEPARATING_LINE, *body], tablefmt="simple", colalign=sides, disable_numparse=True)
    lines = (line.rstrip() for line in laid.split("\n")[1:-1])  # without the rules above and below
    heights = [max((cell.count("\n") for cell in row), default=0) + 1 for row in body]
    above, *below = [list(islice(lines, height)) for height in (len(head) + 1, *heights)]
    others = [column for column in kept if column not in shown]
    if not others:
        return above, below, []
    if room.every_column:  # repeats the first columns of rank 0, which name a row
        keys = list(takewhile(lambda column: not column.rank, kept))
        return above, below, ["", *table(rows, [*keys, *others], len(kept)).split("\n")]
    names = ", ".join(column.name for column in others)
    return above, below, hanging(f"not shown: {names}; COLUMNS={width(kept)} shows them", 2).split("\n")


def telling(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> list[Column[Row]]:
    """Return the columns that are not empty, and always the first `always`."""
    return [
        column
        for number, column in enumerate(columns)
        if number < always or any(column.cell(row) not in ("", ABSENT) for row in rows)
    ]


def hanging(text: str, indent: int) -> str:
    """Return wrapped text whose later lines are indented."""
    return fill(text, layout().width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def folded(text: str) -> str:
    """Return text wrapped below each line's indent, with control characters escaped (names of files may have some)."""
    width, text = layout().width, printable(text)
    return "\n".join(
        line if len(line) <= width else hanging(line, len(line) - len(line.lstrip()) + 2) for line in text.split("\n")
    )


def command_lines(before: str, command: str) -> list[str]:
    """Return a text and a shell command on lines that can be pasted together."""
    lines = [before]
    for word in map(shlex.quote, shlex.split(command)):
        if len(f"{lines[-1]} {word} \\") > layout().width:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {word}"
    return lines


def named_lines(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a line for each name, with aligned texts."""
    width = max((len(name) for name, _ in pairs), default=0) + 2
    return "\n".join(hanging(f"{name:<{width}}{text}", width) for name, text in pairs)
