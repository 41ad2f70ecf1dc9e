"""Facts as CSV: a line for each, with the keys that the JSON has; what lies in an object is named `object.key`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_slmserve.report.as_json import plain


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a table whose head is that of all rows. Items of a list have "; " between them."""
    flat = [dict(_cells(plain(row))) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _cells(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        match value:
            case dict():
                yield from _cells(value, f"{above}{name}.")
            case _:
                yield f"{above}{name}", _cell(value)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case list() if not any(isinstance(item, list | dict) for item in value):
            return "; ".join(map(_cell, value))
        case str():
            return value
    return json.dumps(value)
