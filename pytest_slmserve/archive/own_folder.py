"""The folder `.slm` of a project, in which a run keeps what it wrote unless it was told another place."""

from __future__ import annotations

from pathlib import Path

OWN = ".slm"


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents. Where that makes our own, git is told to ignore it: results are kept elsewhere
    on purpose. Raises OSError."""
    own = next((each for each in (folder, *folder.parents) if each.name == OWN), None)
    is_new = own is not None and not own.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if own and is_new:
        (own / ".gitignore").write_text("*\n", "utf-8")
