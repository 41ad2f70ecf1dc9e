"""Values as JSON: keys are the names of fields, nothing is rounded, and null is what is not known or not finite."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
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
