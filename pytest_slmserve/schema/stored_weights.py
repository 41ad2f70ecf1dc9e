"""Number of weights by the safetensors files of a folder, of which only the headers are read."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_HEADER = 100_000_000  # bytes, by the format's own specification
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def stored_parameters(folder: Path, tied: bool) -> int | None:
    """Weights that the safetensors of `folder` hold; None without any, or where they are quantized: their numbers are
    packed then. tied: an output layer that is stored beside the embeddings is the same, and counts once."""
    try:
        tensors = dict(_tensors(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not tensors or any(not tensor["dtype"].startswith(("F32", "F16", "BF16")) for tensor in tensors.values()):
        return None
    if tied and HEAD in tensors and any(name.endswith(EMBEDDINGS) for name in tensors):
        del tensors[HEAD]
    return sum(int(math.prod(tensor["shape"])) for tensor in tensors.values())


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and description of each tensor. With an index they are of the files that it names, all of which must be
    there. Raises OSError or ValueError where a file is missing or damaged."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({str(file) for file in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    else:
        files = ["model.safetensors"]
    for file in files:
        path = folder / file
        tensors = _header(path, path.stat().st_mtime_ns)
        yield from (pair for pair in tensors.items() if pair[0] != "__metadata__")


@functools.cache
def _header(path: Path, changed_ns: int) -> dict[str, Any]:
    """The header of a file as it was when it was changed last: read once, for plans ask often."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LARGEST_HEADER:
            raise ValueError(f"{path} has no header of safetensors")
        found: dict[str, Any] = json.loads(file.read(size))
    return found
