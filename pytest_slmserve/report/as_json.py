"""Values of the analysis as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: object) -> Any:
    """Value for `json.dumps`: a dataclass becomes an object of its fields, a number that is not finite becomes null."""
    match value:
        case Enum():
            return plain(value.value)
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _ if is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value
