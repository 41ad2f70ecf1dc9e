"""Pages as tests read them: elements, tables and scripts, by the standard library alone."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Page(HTMLParser):
    """text: what a reader sees, without scripts and styles. scripts, styles: attributes and text of each. tables: their
    rows of cells, by caption; of one caption those of the last. A button in a cell is a part of its text."""

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[tuple[dict[str, str | None], str]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    text: str = ""
    tables: dict[str, list[list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._caption = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))
        match tag:
            case "caption":
                self._caption = ""
            case "tr" if self._caption:
                self.tables.setdefault(self._caption, []).append([])
            case "td" | "th" if self._caption:
                self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass
        if tag == "table":
            self._caption = ""

    def handle_data(self, data: str) -> None:
        tag, attrs = next((each for each in reversed(self._open) if each[0] != "button"), ("", {}))
        match tag:
            case "script":
                self.scripts.append((attrs, data))
                return
            case "style":
                self.styles.append(data)
                return
            case "caption":
                self._caption += data
            case "td" | "th":
                self.tables[self._caption][-1][-1] += data
        self.text += data

    @property
    def charts(self) -> dict[str, dict[str, Any]]:
        """Specifications of the charts by their id."""
        found = [(attrs, text) for attrs, text in self.scripts if "json" in (attrs.get("type") or "")]
        return {attrs["id"] or "": json.loads(text) for attrs, text in found}


def values_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row of a chart's data."""
    layers = [spec, *spec.get("layer", [])]
    return [row for layer in layers for row in layer.get("data", {}).get("values", [])]
