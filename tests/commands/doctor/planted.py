"""What the checks find is put there."""

from __future__ import annotations

from pathlib import Path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
