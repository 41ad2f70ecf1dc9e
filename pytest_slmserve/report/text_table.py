"""Layout of text on a terminal: tables that fit, broken lines, names with their descriptions."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from textwrap import fill, wrap
from typing import Generic, Literal, TypeVar

from tabulate import SEPARATING_LINE, tabulate

from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.schema.specs import GIB

ABSENT = "-"
SMALLEST_DECIMAL = 6


def figure(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, but all whole ones, and separators: 16,772 and 4.03 and 0.0512."""
    if value is None or not math.isfinite(value):
        return ABSENT
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{min(max(decimals, 0), SMALLEST_DECIMAL)}f}"


def milliseconds(seconds: float | None) -> str:
    return figure(None if seconds is None else 1e3 * seconds)


def gib(number: float | None) -> str:
    """Bytes in GiB, the unit standing elsewhere."""
    return figure(None if number is None else number / GIB)


def hundredths(share: float | None, *, signed: bool = False) -> str:
    """A share in per cent with one decimal, the unit standing elsewhere."""
    if share is None or not math.isfinite(share):
        return ABSENT
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    return text.replace("-", "") if float(text) == 0 else text


def between(seen: Interval, scale: float = 1.0, unit: str = "") -> str:
    """The 95 % interval in brackets, nothing where the noise is unknown."""
    if seen.low is None or seen.high is None:
        return ""
    return f" (95 %: {figure(scale * seen.low)} to {figure(scale * seen.high)}{unit})"


def change(ratio: Interval | None) -> str:
    """A ratio as its change in per cent, "+2.3"."""
    return hundredths(None if ratio is None else ratio.value - 1, signed=True)


def interval_text(seen: Interval | None, show: Callable[[float], str]) -> str:
    """The 95 % interval, "1.2 to 3.4"; "-" where the noise is unknown."""
    if seen is None or seen.low is None or seen.high is None:
        return ABSENT
    return f"{show(seen.low)} to {show(seen.high)}"


def change_interval(ratio: Interval | None) -> str:
    """The 95 % interval of a ratio as changes in per cent, "+1.2 to +3.4"; "-" where the noise is unknown."""
    return interval_text(ratio, lambda end: hundredths(end - 1, signed=True))


def whole(number: int | None) -> str:
    """ "16,772" """
    return ABSENT if number is None else f"{number:,}"


def listed(numbers: Iterable[int]) -> str:
    """ "1, 2, 4" """
    return ", ".join(str(number) for number in numbers)


def counted(number: int, what: str) -> str:
    """ "1 launch", "2 launches" """
    plural = "es" if what.endswith(("ch", "s")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


Row = TypeVar("Row")
Side = Literal["left", "right", "center"]

NOT_A_TERMINAL = 100  # columns of a line in a file, or in the log of a workflow, unless COLUMNS says otherwise
LEAST_WIDTH = 12  # of a column whose cells are broken: in less nobody reads
NARROWEST = 20  # columns; no sentence is folded or cut to fewer
GAP = "  "


@dataclass(frozen=True, slots=True)
class Layout:
    """Room for text. width: of a line, in columns. every_column: those of a table that do not fit follow in a further
    table; else they are left out, and named."""

    width: int
    every_column: bool = False


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)


def layout() -> Layout:
    """The layout in force: that of `laid_out`, or as wide as the terminal."""
    return _LAYOUT.get() or Layout(max(shutil.get_terminal_size((NOT_A_TERMINAL, 24)).columns, NARROWEST))


@contextmanager
def laid_out(width: int | None = None, every_column: bool = False) -> Iterator[None]:
    """Puts a layout in force. width: None means that of the terminal."""
    token = _LAYOUT.set(Layout(width or layout().width, every_column))
    try:
        yield
    finally:
        _LAYOUT.reset(token)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Column of a table. head: heading of one or two lines, complete in itself: its neighbours may be left out. cell:
    text for a row, "" or "-" where nothing is known. about: what a legend says of it. rank: 0 stays; of the others the
    highest go first, all at once, where the table is too wide."""

    head: str
    cell: Callable[[Row], str]
    side: Side = "right"
    about: str = ""
    rank: int = 0

    @property
    def name(self) -> str:
        """The heading on one line."""
        joined = self.head.replace("-\n", "").replace(" /\n", " / ").replace("/\n", "/").replace("\n_", "_")
        return " ".join(joined.split())


@dataclass(frozen=True, slots=True)
class TableParts:
    """Lines of a table: its headings, each row, and what follows."""

    head: list[str]
    rows: list[list[str]]
    foot: list[str]


def table(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> str:
    """Rows below the headings of the columns that tell something, as wide as the layout allows. always: number of first
    columns shown in any case."""
    parts = table_parts(rows, columns, always)
    return "\n".join([*parts.head, *(line for row in parts.rows for line in row), *parts.foot])


def table_parts(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> TableParts:
    """The table in parts, for who shows some of its rows. The foot names the columns that do not fit, or is a table of
    them."""
    kept, room = telling(rows, columns, always), layout()
    shown = _fitting(rows, kept, room)
    cells = [[column.cell(row) for column in shown] for row in rows]
    head, *body = _grid(cells, [column.head for column in shown], [column.side for column in shown], room.width)
    others = [column for column in kept if column not in shown]
    if not others:
        return TableParts(head, body, [])
    if room.every_column:  # below the first columns that always stay: they name a row
        keys = list(takewhile(lambda column: not column.rank, kept))
        return TableParts(head, body, ["", *table(rows, [*keys, *others], len(kept)).split("\n")])
    needed = sum(_widths(rows, kept)) + len(GAP) * (len(kept) - 1)
    names = ", ".join(column.name for column in others)
    return TableParts(head, body, hanging(f"not shown: {names}; COLUMNS={needed} shows them", 2).split("\n"))


def telling(rows: Sequence[Row], columns: Sequence[Column[Row]], always: int = 0) -> list[Column[Row]]:
    """Columns in which any row has something to show, and the first `always` in any case."""
    return [
        column
        for number, column in enumerate(columns)
        if number < always or any(column.cell(row) not in ("", ABSENT) for row in rows)
    ]


def _fitting(rows: Sequence[Row], columns: Sequence[Column[Row]], room: Layout) -> list[Column[Row]]:
    """Columns that fit: those of the highest rank go first. Where the others follow in a further table, those of one
    rank stay in each."""
    shown = list(zip(columns, _widths(rows, columns)))
    while sum(wide + len(GAP) for _, wide in shown) - len(GAP) > room.width:
        ranks = {column.rank for column, _ in shown if column.rank}
        if len(ranks) <= room.every_column:
            break
        shown = [pair for pair in shown if pair[0].rank != max(ranks)]
    return [column for column, _ in shown]


def _widths(rows: Sequence[Row], columns: Sequence[Column[Row]]) -> list[int]:
    return [_width([column.head, *(column.cell(row) for row in rows)]) for column in columns]


def _width(texts: Sequence[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def grid(rows: Sequence[Sequence[str]], heads: Sequence[str], sides: Sequence[Side], width: int | None = None) -> str:
    """A table of cells. sides: where each column stands. width: texts on the left are broken where lines would be
    longer."""
    return "\n".join(line for lines in _grid(rows, heads, sides, width or layout().width) for line in lines)


def _grid(rows: Sequence[Sequence[str]], heads: Sequence[str], sides: Sequence[Side], width: int) -> list[list[str]]:
    """The lines of the headings, and of each row."""
    columns = [list(column) for column in zip(*rows)] or [[] for _ in heads]
    widths = [_width([head, *cells]) for head, cells in zip(heads, columns)]
    too_wide = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for place in sorted(range(len(widths)), key=lambda place: -widths[place]):
        if too_wide > 0 and sides[place] == "left" and (less := min(too_wide, widths[place] - LEAST_WIDTH)) > 0:
            broken = ["\n".join(wrap(cell, widths[place] - less)) for cell in columns[place]]
            columns[place], too_wide = broken, too_wide - less
            widths[place] = _width([heads[place], *broken])
    # Lines of headings are rows: tabulate widens a column beyond its heading, and takes away an empty first line.
    head, body = list(zip_longest(*(each.split("\n") for each in heads), fillvalue="")), list(zip(*columns))
    laid = tabulate([*head, SEPARATING_LINE, *body], tablefmt="simple", colalign=sides, disable_numparse=True)
    lines = (line.rstrip() for line in laid.split("\n")[1:-1])  # without the rules above and below
    heights = [max((cell.count("\n") for cell in cells), default=0) + 1 for cells in body]
    return [list(islice(lines, height)) for height in (len(head) + 1, *heights)]


def hanging(text: str, indent: int) -> str:
    """A text broken into lines, its later ones indented."""
    spaces = " " * indent
    return fill(text, layout().width, subsequent_indent=spaces, break_long_words=False, break_on_hyphens=False)


def folded(text: str) -> str:
    """Several lines, of which those that are too long are broken and go on below their own indent."""
    width = layout().width
    return "\n".join(
        line if len(line) <= width else hanging(line, len(line) - len(line.lstrip()) + 2) for line in text.split("\n")
    )


def command_lines(before: str, command: str) -> list[str]:
    """A command of the shell after what is said of it, as lines that may be typed together."""
    lines = [before]
    for word in map(shlex.quote, shlex.split(command)):
        if len(f"{lines[-1]} {word} \\") > layout().width:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {word}"
    return lines


def named_lines(pairs: Sequence[tuple[str, str]]) -> str:
    """A line for each name and what is said of it, the texts below each other."""
    width = max((len(name) for name, _ in pairs), default=0) + 2
    return "\n".join(hanging(f"{name:<{width}}{text}", width) for name, text in pairs)
