"""Numbers as texts, tables that fit a terminal, broken lines, and names with their descriptions."""

import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from textwrap import fill, wrap
from typing import Generic, Literal, TypeVar

from tabulate import SEPARATING_LINE, tabulate

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.specs import GIB

ABSENT = "-"
SMALLEST_DECIMAL = 6


def figure(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits and separators: 16,772, 4.03 or 0.0512."""
    if value is None or not math.isfinite(value):
        return ABSENT
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{min(max(decimals, 0), SMALLEST_DECIMAL)}f}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds in milliseconds, without the unit."""
    return figure(None if seconds is None else 1e3 * seconds)


def gib(number: float | None) -> str:
    """Return bytes in GiB, without the unit."""
    return figure(None if number is None else number / GIB)


def hundredths(share: float | None, *, signed: bool = False) -> str:
    """Return a share in per cent with one decimal, without the unit."""
    if share is None or not math.isfinite(share):
        return ABSENT
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    return text.replace("-", "") if float(text) == 0 else text


def between(seen: Interval, scale: float = 1.0, unit: str = "") -> str:
    """Return the 95 % interval in brackets; nothing if the noise is unknown."""
    if seen.low is None or seen.high is None:
        return ""
    return f" (95 %: {figure(scale * seen.low)} to {figure(scale * seen.high)}{unit})"


def interval_text(seen: Interval | None, show: Callable[[float], str]) -> str:
    """Return the 95 % interval, "1.2 to 3.4", or "-" if the noise is unknown."""
    if seen is None or seen.low is None or seen.high is None:
        return ABSENT
    return f"{show(seen.low)} to {show(seen.high)}"


def changed(ratio: Interval | None) -> tuple[str, str]:
    """Return a ratio and its 95 % interval as changes in per cent, "+2.3" and "+1.2 to +3.4"."""
    ends = interval_text(ratio, lambda end: hundredths(end - 1, signed=True))
    return hundredths(None if ratio is None else ratio.value - 1, signed=True), ends


def whole(number: int | None) -> str:
    """Return a whole number with separators, "16,772"."""
    return ABSENT if number is None else f"{number:,}"


def counted(number: int, what: str) -> str:
    """Return a number of things, "1 launch" or "2 launches"."""
    plural = "es" if what.endswith(("ch", "s")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


Row = TypeVar("Row")
Side = Literal["left", "right", "center"]

NOT_A_TERMINAL = 100  # columns of a line in a file, or in the log of a workflow, unless COLUMNS says otherwise
LEAST_WIDTH = 12  # of a column whose cells are broken: in less nobody reads
NARROWEST = 20  # columns; no sentence is folded or cut to fewer
GAP = 2  # columns between those of a table


@dataclass(frozen=True, slots=True)
class Layout:
    """Room for text. width: of a line, in columns. every_column: columns of a table that do not fit follow in a further
    table; else they are left out, and named."""

    width: int
    every_column: bool = False


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)


def layout() -> Layout:
    """Return the layout in force: that of `laid_out`, or as wide as the terminal."""
    return _LAYOUT.get() or Layout(max(shutil.get_terminal_size((NOT_A_TERMINAL, 24)).columns, NARROWEST))


@contextmanager
def laid_out(width: int | None = None, every_column: bool = False) -> Iterator[None]:
    """Put a layout in force. width: Defaults to that of the layout in force."""
    token = _LAYOUT.set(Layout(width or layout().width, every_column))
    try:
        yield
    finally:
        _LAYOUT.reset(token)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Column of a table.

    head: Heading of one or two lines, complete in itself, because its neighbours may be left out.
    cell: Text for a row, "" or "-" if nothing is known.
    rank: 0 for a column that stays. If the table is too wide, all columns of the highest rank go first.
    """

    head: str
    cell: Callable[[Row], str]
    side: Side = "right"
    rank: int = 0

    @property
    def name(self) -> str:
        """The heading on one line."""
        joined = self.head.replace("-\n", "").replace(" /\n", " / ").replace("/\n", "/").replace("\n_", "_")
        return " ".join(joined.split())


def table(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> str:
    """Return rows below the headings of the columns that tell something. always: see `telling`."""
    head, body, foot = table_parts(rows, columns, always)
    return "\n".join([*head, *(line for row in body for line in row), *foot])


def table_parts(
    rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the lines of the headings, of each row and of the foot, for a caller that shows only some rows. Columns
    that do not fit the layout go by their rank: the foot names them, or is a table of them."""
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
        if len(ranks) <= room.every_column:  # those of one rank stay in each of several tables
            break
        shown = [column for column in shown if column.rank != max(ranks)]
    too_wide = width(shown) - room.width
    for column in sorted(shown, key=lambda column: -widths[column]):
        if too_wide > 0 and column.side == "left" and (less := min(too_wide, widths[column] - LEAST_WIDTH)) > 0:
            cells[column] = ["\n".join(wrap(cell, widths[column] - less)) for cell in cells[column]]
            too_wide -= less
    # Lines of headings are rows: tabulate widens a column beyond its heading, and takes away an empty first line.
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
    if room.every_column:  # below the first columns that always stay: they name a row
        keys = list(takewhile(lambda column: not column.rank, kept))
        return above, below, ["", *table(rows, [*keys, *others], len(kept)).split("\n")]
    names = ", ".join(column.name for column in others)
    return above, below, hanging(f"not shown: {names}; COLUMNS={width(kept)} shows them", 2).split("\n")


def telling(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> list[Column[Row]]:
    """Return the columns in which any row has something to show, and the first `always` in any case."""
    return [
        column
        for number, column in enumerate(columns)
        if number < always or any(column.cell(row) not in ("", ABSENT) for row in rows)
    ]


def hanging(text: str, indent: int) -> str:
    """Return a text broken into lines, its later ones indented."""
    return fill(text, layout().width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def folded(text: str) -> str:
    """Return several lines, of which those that are too long are broken and go on below their own indent. Control
    characters are written out: the name of a file may have some."""
    width, text = layout().width, printable(text)
    return "\n".join(
        line if len(line) <= width else hanging(line, len(line) - len(line.lstrip()) + 2) for line in text.split("\n")
    )


def command_lines(before: str, command: str) -> list[str]:
    """Return a text and a command of the shell after it, as lines that may be typed together."""
    lines = [before]
    for word in map(shlex.quote, shlex.split(command)):
        if len(f"{lines[-1]} {word} \\") > layout().width:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {word}"
    return lines


def named_lines(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a line for each name and its text, the texts below each other."""
    width = max((len(name) for name, _ in pairs), default=0) + 2
    return "\n".join(hanging(f"{name:<{width}}{text}", width) for name, text in pairs)
