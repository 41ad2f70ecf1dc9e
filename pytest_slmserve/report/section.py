"""What a report shows of one subject, as a value, and how the terminal, Markdown and the HTML report draw it.

A subject (a sweep, replicas, a gate, a comparison, an advice) is laid out once, by a function that returns a `Section`:

    Section(
        "opt-125m: PASS after 4 pairs of launches",
        [
            "  baseline: vLLM 0.25.0, at concurrency 256",
            Table(rows, COLUMNS, caption="Endpoints"),
            Named([("output tokens/s", "pass: at least 0.995 of the baseline")]),
            Details("How it was decided"),
            "",
            Legend("spread: standard deviation of a pair."),
        ],
        look="good",
        charts=partial(gate_charts, compared),  # a function that yields `Chart` values
    )

`section_text` draws it for a terminal, and `section_markdown` for GitHub; both leave the charts out. The template of
the HTML report draws the names with their sentences, the charts, and then all other parts in their order. JSON and CSV
hold the values that the section was made of (`report.as_json`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.report.text_table import Column, folded, hanging, named_lines, table, telling
from pytest_slmserve.schema.printable import printable

Look = Literal["good", "bad", "open"]


@dataclass(frozen=True, slots=True)
class Legend:
    """Explanation of the columns of a table, broken into lines without an indent. notes: further lines, indented."""

    text: str
    notes: Sequence[str] = ()

    @property
    def lines(self) -> str:
        return "\n".join([hanging(self.text, 0), *(hanging(note, 2) for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Named:
    """Names with a sentence each, below each other after an empty line."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Lines that Markdown shows as they are: commands, or the summary of a terminal. language: of the shell, "sh"."""

    text: str
    language: str = "text"


@dataclass(frozen=True, slots=True)
class Details:
    """Heading of parts that tell how and why. Markdown folds all parts up to the next heading, or to the end, below it.
    Nothing else shows it."""

    heading: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows and their columns. Without rows nothing is shown. A terminal puts an empty line above the table."""

    rows: Sequence[Any]
    columns: Sequence[Column[Any]]
    caption: str = ""  # title in an HTML report
    heading: str = ""  # line above the table in a terminal
    always: int = 0  # number of first columns that are shown even if no row has anything in them

    @property
    def cells(self) -> Cells:
        """Return the texts of all columns that tell something, however wide the table is."""
        kept = telling(self.rows, self.columns, self.always)
        return Cells(
            self.caption,
            [column.name for column in kept],
            [[column.cell(row) for column in kept] for row in self.rows],
            [column.side == "right" for column in kept],
        )


@dataclass(frozen=True, slots=True)
class Cells:
    """A table as texts. numeric: for each column, whether its texts stand on the right."""

    caption: str
    heads: list[str]
    rows: list[list[str]]
    numeric: list[bool]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of an HTML report."""

    title: str
    spec: dict[str, Any] | None  # of Vega-Lite; None if nothing is known that could be drawn: then there is no chart
    note: str = ""  # how to read the chart
    group: str = ""  # heading above this chart and others of the same group


# What counts an output. Prompts have tokens whatever a request gives, and so have blocks and the limits of an engine.
_OUTPUTS = re.compile(
    r"(?P<kept>prompt\s+tokens|blocks x \S+ tokens|requests of \S+ tokens|token ids)|"
    r"(?<![\w-])(?:output )?token(?P<more>s?)(?![\w-])"
)


def renamed(text: str, unit: str) -> str:
    """Return a text in which outputs are called by their name: "texts/s" and "mJ/text" for "tokens/s" and "mJ/token"
    where each request gives the vector of a text."""
    return text if unit == "token" else _OUTPUTS.sub(lambda found: found["kept"] or f"{unit}{found['more']}", text)


@dataclass(frozen=True, slots=True)
class FiveLines:
    """The first that a reader wants to know of a run, a sentence each: the answer with its number, its interval and
    what is allowed; why it is so; one command to paste, or what else there is to do; what the answer rests on; and
    where the evidence is."""

    answer: str
    why: str
    do_this: str
    trust: str
    where: str
    look: Look = "open"

    @property
    def named(self) -> dict[str, str]:
        """The lines by their names in JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "look"}

    @property
    def below(self) -> list[str]:
        """All lines but the answer, with their names in words."""
        return [f"{name.replace('_', ' ')}: {text}" for name, text in self.named.items() if text][1:]

    @property
    def section(self) -> Section:
        """The lines as a section whose title is the answer."""
        return Section(self.answer, self.below, self.look)


# A string is one or several lines; an empty one is an empty line.
Part = str | Legend | Named | Table | Verbatim | Details


@dataclass(frozen=True, slots=True)
class Section:
    """All that is shown of one subject."""

    title: str
    parts: Sequence[Part] = ()
    look: Look = "open"  # how an HTML report marks the title
    charts: Callable[[], Iterable[Chart]] = tuple  # called only for an HTML report: fits and intervals take time
    name: str = ""  # heading in an HTML report, if it tells the section from others with this title

    @property
    def drawn(self) -> dict[str, list[Chart]]:
        """Charts of which something is known, by their group, for an HTML report."""
        return grouped((chart for chart in self.charts() if chart.spec), lambda chart: chart.group)


def in_units(shown: Any, unit: str) -> Any:
    """Return what is shown with outputs by their name, in whatever texts are in it: a part of a section, a section, or
    names with their values. Rows of a table are values, and stay."""
    if unit == "token":
        return shown

    def called(column: Column[Any]) -> Column[Any]:
        return replace(column, head=renamed(column.head, unit), cell=lambda row: renamed(column.cell(row), unit))

    match shown:
        case str():
            return renamed(shown, unit)
        case list() | tuple():
            return type(shown)(in_units(each, unit) for each in shown)
        case dict():
            return {name: in_units(value, unit) for name, value in shown.items()}
        case Table():
            caption, heading = renamed(shown.caption, unit), renamed(shown.heading, unit)
            return replace(shown, columns=[*map(called, shown.columns)], caption=caption, heading=heading)
        case Section():
            parts = {"parts": in_units(list(shown.parts), unit), "title": renamed(shown.title, unit)}
            return replace(shown, **parts, charts=lambda: (in_units(chart, unit) for chart in shown.charts()))
        case Legend() | Named() | Cells() | Chart():
            return replace(shown, **{each.name: in_units(getattr(shown, each.name), unit) for each in fields(shown)})
    return shown


def section_text(shown: Section | Legend) -> str:
    """Return the text of a section, or of a legend of several sections, for a terminal with the layout in force."""
    if isinstance(shown, Legend):
        return shown.lines
    lines = [shown.title]
    for part in shown.parts:
        match part:
            case str():
                lines.append(part)
            case Legend():
                lines.append(part.lines)
            case Verbatim(text):
                lines.append(text)
            case Named(pairs) if pairs:
                lines += ["", named_lines(pairs)]
            case Table(rows, columns, heading=heading, always=always) if rows:
                lines += ["", *filter(None, [heading]), table(rows, columns, always)]
    return folded("\n".join(lines))


def section_markdown(shown: Section) -> str:
    """Return a section as Markdown, for the page of a workflow or an issue: sentences as a list, tables with all their
    columns that say something, and what stands below `Details` folded."""
    lines, end = [f"### {_escaped(shown.title)}", ""], [""]
    for part in shown.parts:
        match part:
            case str() if part:
                lines.append(f"- {_escaped(part)}")
            case Named(pairs):
                lines += [f"- {_escaped(name)}: {_escaped(text)}" for name, text in pairs]
            case Legend(text, notes):
                lines += ["", _escaped(text), "", *(f"- {_escaped(note)}" for note in notes)]
            case Verbatim(text, language):
                fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
                lines += ["", f"{fence}{language}", printable(text), fence, ""]
            case Details(heading):
                lines += [*end, f"<details><summary>{heading}</summary>", ""]
                end = ["", "</details>", ""]
            case Table(rows, heading=heading) if rows:
                cells = part.cells
                head, *body = [" | ".join(map(_escaped, row)) for row in (cells.heads, *cells.rows)]
                sides = " | ".join("---:" if right else "---" for right in cells.numeric)
                lines += ["", _escaped(heading), "", *(f"| {row} |" for row in (head, sides, *body)), ""]
    # A part has empty lines around it; two of them say no more than one.
    return "\n".join(line for before, line in pairwise(["", *lines, *end]) if line or before)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*\[\]<|])", r"\\\1", printable(" ".join(text.split()), layout=""))
