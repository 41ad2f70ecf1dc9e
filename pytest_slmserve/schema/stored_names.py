"""Words on disk that differ from the words of the code.

Records outlive the code, and every key is a hash of the words in a record. A field or a value that gets a better name
keeps its stored word, in these two tables. So old archives are read, new ones have the same format, and keys stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {  # of a field: its name on disk
    "platform": "backend",
    "operating_system": "platform",
    "load_format": "weights",
    "gpu_memory_utilization": "memory_share",
    "interface": "door",
    "tensor_parallel_size": "tensor_parallel",
    "ramp_up": "starts",
}
PLATFORMS = {"simulated": "fake"}
VALUES = {  # of a field: its values on disk, where they differ
    "expected": {"passes": "holds"},  # of a row of the claims table
    "platform": PLATFORMS,
    "device": PLATFORMS,  # of a row of the claims table
    "load_format": {"auto": "real"},
    "interface": {"engine": "offline"},
    "ramp_up": {"staggered": "spread", "burst": "together"},
}
FIELDS = {stored: name for name, stored in NAMES.items()}
MEANINGS = {name: {stored: value for value, stored in values.items()} for name, values in VALUES.items()}


def stored_value(name: str, value: Any) -> Any:
    """Value on disk of the field `name`."""
    return VALUES[name].get(value, value) if name in VALUES and isinstance(value, str) else value


def to_stored(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name, in the words on disk."""
    return {NAMES.get(name, name): stored_value(name, value) for name, value in facts.items()}


def from_stored(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `to_stored`."""
    named = {FIELDS.get(stored, stored): value for stored, value in facts.items()}
    return {
        name: MEANINGS[name].get(value, value) if name in MEANINGS and isinstance(value, str) else value
        for name, value in named.items()
    }
