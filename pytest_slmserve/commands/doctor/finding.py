"""A finding that a check hands to the page, and the folders that it reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pytest_slmserve.schema.specs import GIB

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page. advice: what to type or to change, nothing where nothing needs to be."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders where a host keeps what the checks read."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    temporary: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    home: Path = field(default_factory=Path.home)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)


def first_of(name: str, found: str, *cases: tuple[object, State, str]) -> Finding:
    """Finding by the first case that is true, of its state and advice; fine where none is."""
    state, advice = next(((state, advice) for wrong, state, advice in cases if wrong), ("ok", ""))
    return Finding(name, state, found, advice)


def of_size(name: str, found: str, have: int, wanted: int, least: int, advice: str) -> Finding:
    """Finding on what there is of something, against what is wanted and what is the least."""
    return first_of(name, found, (have < least, "problem", advice), (have < wanted, "warning", advice))


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
