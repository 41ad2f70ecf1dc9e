"""What a section of a report holds, as values that tests compare: its tables, its sentences and its charts; and all of
it as a text that a file of tests/data/report keeps."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from difflib import unified_diff
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator
from scripts import DATA

from pytest_slmserve.report.section import Details, Legend, Named, Part, Section, Table

SHORT = 16  # characters
MANY = 8  # rows


def rows_of(table: Table) -> list[dict[str, str]]:
    """Each row of a table by the names of the columns that tell something."""
    cells = table.cells
    return [dict(zip(cells.heads, row, strict=True)) for row in cells.rows]


def tables_of(parts: Section | Iterable[Part]) -> list[Table]:
    """The tables that have rows."""
    return [part for part in getattr(parts, "parts", parts) if isinstance(part, Table) and part.rows]


def sentences_of(parts: Section | Iterable[Part]) -> list[str]:
    return [part for part in getattr(parts, "parts", parts) if isinstance(part, str) and part]


def in_words(parts: Iterable[Section | Part]) -> str:
    """Sections, a line for each sentence and row, and the number of charts. Of a legend the first words are enough:
    no two begin alike."""
    lines: list[str] = []
    for part in parts:
        match part:
            case Section(title, inner, look, charts, name):
                drawn = sum(chart.spec is not None for chart in charts())
                lines += [f"# {title} [{look}] {name}".strip(), in_words(inner), f"charts: {drawn}"]
            case Table(caption=caption, heading=heading):
                if (cells := part.cells).rows:
                    rows = [f"{caption} {heading}".strip()], cells.heads, *cells.rows
                    lines += map(" | ".join, rows)
            case Named(pairs):
                lines += [f"{name}: {text}" for name, text in pairs]
            case Legend(text, notes):
                lines += [f"({text[:20]})", *notes]
            case Details(heading):
                lines.append(f"+ {heading}")
            case _:
                lines.append(str(part))
    return "\n".join(filter(None, lines))


def in_layers(spec: Mapping[str, Any]) -> str:
    """A chart: the mark of each layer with what it draws, its rows, of many the first, the middle one and the last, and
    the axes."""
    lines, names = [spec["description"]], []
    for part in [spec, *spec["layer"]]:
        shown = {channel: each["field"] for channel, each in part.get("encoding", {}).items() if "field" in each}
        lines.append(f"+ {part['mark']['type']}: {shown}" if "mark" in part else "+ all layers")
        rows = part.get("data", {}).get("values", [])
        for row in rows if len(rows) <= MANY else [rows[0], rows[len(rows) // 2], rows[-1]]:
            lines += [] if [*row] == names else [" | ".join(row)]
            names = [*row]
            lines.append(" | ".join(map(str, row.values())))
    axes = {name: spec["layer"][-1]["encoding"].get(name, {}) for name in "xy"}
    lines += [f"{name}: {axis.get('title')}, {axis.get('scale')}, {axis.get('axis')}" for name, axis in axes.items()]
    return "\n".join(lines)


@cache
def vega_lite() -> Any:
    """A validator by the schema of Vega-Lite, which Altair ships; importing Altair would take a second."""
    path = Path(str(find_spec("altair").origin)).parent / "vegalite/v6/schema/vega-lite-schema.json"
    return Draft7Validator(json.loads(path.read_text("utf-8")))


def difference(name: str, shown: Mapping[str, str]) -> str:
    """What planted scenes show otherwise than the file of this name in tests/data/report has it; empty if nothing.
    `REWRITE=1 pytest FILE` writes it anew. A float has six digits. Of long lines that a scene before had, the file has
    their number, as "~ 3"."""
    text, said = "", set[str]()
    for scene, lines in shown.items():
        text += f"=== {scene}\n"
        for line in re.sub(r"\d+\.\d{6,}(e-\d+)?", lambda found: f"{float(found[0]):.6g}", lines).split("\n"):
            text += "~\n" if line in said and len(line) > SHORT else f"{line}\n"
            said.add(line)
    text = re.sub(r"(?m)(^~\n)+", lambda found: f"~ {len(found[0]) // 2}\n", text)
    path = DATA / "report" / f"{name}.txt"
    if os.environ.get("REWRITE"):
        path.write_text(text, "utf-8")
    was, now = path.read_text("utf-8").splitlines(), text.splitlines()
    return "\n".join(unified_diff(was, now, "kept", "now", lineterm=""))
