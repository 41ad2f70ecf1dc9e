"""Values as JSON: keys are the names of fields, nothing is rounded, and null is what is not known or not finite. And as
CSV: a line for each object, with the same keys; what lies in an object is named `object.key`."""

from __future__ import annotations

import csv
import enum
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


def as_json(value: object) -> str:
    """The text of one JSON value, over several lines."""
    return json.dumps(plain(value), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """JSON's own types: a dataclass as an object of its fields, an enum by its value, other collections as lists."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case enum.Enum():
            return value.value
        case Path():
            return str(value)
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}
        case Iterable():
            return [plain(each) for each in value]
    return plain(facts(value))


def facts(value: object, *names: str) -> dict[str, Any]:
    """Attributes by name: those of `names`, or all fields of a dataclass. Of None each is None."""
    if not names:
        assert is_dataclass(value), f"{type(value).__name__} is neither a dataclass nor a type of JSON"
        names = tuple(field.name for field in fields(value))
    return {name: None if value is None else getattr(value, name) for name in names}


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
