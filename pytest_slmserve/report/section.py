"""Sections: what a report shows of a subject, and how the terminal, Markdown and the HTML report draw it.

A function lays out a subject (a sweep, a gate, a comparison) once, as a `Section`:

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

`section_text` draws it for a terminal and `section_markdown` for GitHub, without charts. The HTML report draws names
with sentences, then charts, then all other parts. JSON and CSV have the underlying values (`report.as_json`).
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
    """Explanation of the columns of a table.

    Attributes:
        notes: further lines, indented from their second line on.
    """

    text: str
    notes: Sequence[str] = ()

    @property
    def lines(self) -> str:
        return "\n".join([hanging(self.text, 0), *(hanging(note, 2) for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Named:
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Block of code in Markdown.

    Attributes:
        language: of the block, "sh" for commands.
    """

    text: str
    language: str = "text"


@dataclass(frozen=True, slots=True)
class Details:
    """Heading below which Markdown folds all parts up to the next heading. Other formats omit it."""

    heading: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows and columns, shown only if there are rows."""

    rows: Sequence[Any]
    columns: Sequence[Column[Any]]
    caption: str = ""  # title in an HTML report
    heading: str = ""  # line above the table in a terminal
    always: int = 0  # number of first columns that are shown in any case

    @property
    def cells(self) -> Cells:
        """Texts of all columns that are not empty, at any width."""
        kept = telling(self.rows, self.columns, self.always)
        return Cells(
            self.caption,
            [column.name for column in kept],
            [[column.cell(row) for column in kept] for row in self.rows],
            [column.side == "right" for column in kept],
        )


@dataclass(frozen=True, slots=True)
class Cells:
    """A table as texts.

    Attributes:
        numeric: whether each column is right-aligned.
    """

    caption: str
    heads: list[str]
    rows: list[list[str]]
    numeric: list[bool]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    spec: dict[str, Any] | None  # of Vega-Lite; None if there is nothing to draw
    note: str = ""  # how to read the chart
    group: str = ""  # heading above this chart and others of the same group


# Words for outputs. Prompts, KV blocks and limits of an engine always have tokens.
_OUTPUTS = re.compile(
    r"(?P<kept>prompt\s+tokens|blocks x \S+ tokens|requests of \S+ tokens|token ids)|"
    r"(?<![\w-])(?:output )?token(?P<more>s?)(?![\w-])"
)


def renamed(text: str, unit: str) -> str:
    """Return text with the unit in place of tokens: "texts/s" if requests return the vector of a text."""
    return text if unit == "token" else _OUTPUTS.sub(lambda found: found["kept"] or f"{unit}{found['more']}", text)


@dataclass(frozen=True, slots=True)
class FiveLines:
    """Summary of a run in five sentences.

    Attributes:
        answer: result with interval and threshold.
        do_this: command to paste, or another next step.
        trust: basis of the answer.
        where: place of the evidence.
        unit: of its outputs, or "" for that of the report.
    """

    answer: str
    why: str
    do_this: str
    trust: str
    where: str
    look: Look = "open"
    unit: str = ""

    @property
    def named(self) -> dict[str, str]:
        return {name: getattr(self, name) for each in fields(self) if (name := each.name) not in ("look", "unit")}

    @property
    def below(self) -> list[str]:
        """All lines but the answer, with their names."""
        return [f"{name.replace('_', ' ')}: {text}" for name, text in self.named.items() if text][1:]

    @property
    def section(self) -> Section:
        return Section(self.answer, self.below, self.look, unit=self.unit)


# A string is one or several lines; an empty one is an empty line.
Part = str | Legend | Named | Table | Verbatim | Details


@dataclass(frozen=True, slots=True)
class Section:
    """Everything that a report shows on one subject."""

    title: str
    parts: Sequence[Part] = ()
    look: Look = "open"  # how an HTML report marks the title
    charts: Callable[[], Iterable[Chart]] = tuple  # only for an HTML report, because fits take time
    name: str = ""  # heading in an HTML report, if several sections have this title
    unit: str = ""  # of its outputs, if all its requests have the same; otherwise that of the report

    @property
    def drawn(self) -> dict[str, list[Chart]]:
        """Charts that have something to draw, by group."""
        return grouped((chart for chart in self.charts() if chart.spec), lambda chart: chart.group)


def in_units(shown: Any, unit: str) -> Any:
    """Return sections, parts or named values with the unit of outputs in their texts. Rows of tables stay the same."""
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
            unit = shown.unit or unit
            parts = {"parts": in_units(list(shown.parts), unit), "title": renamed(shown.title, unit)}
            return replace(shown, **parts, charts=lambda: (in_units(chart, unit) for chart in shown.charts()))
        case Legend() | Named() | Cells() | Chart():
            return replace(shown, **{each.name: in_units(getattr(shown, each.name), unit) for each in fields(shown)})
    return shown


def section_text(shown: Section | Legend) -> str:
    """Return a section or a legend as text in the current layout."""
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
    """Return a section as Markdown, with all columns that are not empty, and parts below `Details` folded."""
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
    # Consecutive empty lines become one.
    return "\n".join(line for before, line in pairwise(["", *lines, *end]) if line or before)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*\[\]<|])", r"\\\1", printable(" ".join(text.split()), layout=""))
