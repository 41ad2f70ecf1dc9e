"""Archives of several processes made one: their lines are moved as they stand, each once.

Whole measurements are not decoded, since 10,000 of them are some hundred megabytes: a line is sound if it is JSON when
its lists of numbers are left out, and if a line before it describes its engine. It is known where its head is, which is
all before its run: launch, workload, load, when, and its part among others, of which its id is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pytest_slmserve.archive import store
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.files import content

_NUMBERS = re.compile(rb"\[[-0-9,nultrefas]*\]")  # and null, true, false
_RUN = b',"run":{'  # the last entry of a measurement, and nearly all of it
_AT_ONCE = 1 << 23  # bytes that are written together


@dataclass(frozen=True, slots=True)
class Merged:
    """written, known: measurements that came into the archive, and that were there. notes: what could not be used."""

    written: int = 0
    known: int = 0
    notes: tuple[str, ...] = ()

    def __add__(self, other: Merged) -> Merged:
        return Merged(self.written + other.written, self.known + other.known, self.notes + other.notes)


def merge(parts: Iterable[Path], into: store.Archive) -> Merged:
    """Add what `into` does not have: measurements with their engines, and sessions. The parts stay as they are.

    A torn end, or a damaged line, only makes a note; all else of that part is added. Merging again, also after an
    interruption, adds what is missing. Raises BadArchive where a part cannot be read, is no archive or of a newer
    format, BadUsage where `into` cannot be written.
    """
    merged, union = Merged(), _Union(into)
    for part in parts:
        merged += union.merge(part)
    return merged


class _Union:
    """An archive to which lines of others are added, if it does not have them."""

    def __init__(self, into: store.Archive) -> None:
        self.into = into
        self._written = self._known = self._size = 0
        self._pieces: list[bytes] = []
        self._engines: dict[str, bytes] = {}  # the line that describes each launch
        lines = [line for line in store.stored_in(into.path, _read(into.path))[0] if line]
        self._seen = {_head(line) for line in lines}
        store.found_in(into.path, (line for line in lines if not line.startswith(store.BULK)), self._remember)

    def _remember(self, found: store.ScannedLines, line: bytes) -> None:
        if (facts := _checked(found, line))["kind"] == "engine":
            self._engines[facts["id"]] = line

    def merge(self, part: Path) -> Merged:
        raw = _read(part)
        if part.samefile(self.into.path):
            return Merged()
        self._written = self._known = 0
        lines, whole = store.stored_in(part, raw)
        found = store.found_in(part, lines, partial(self._take, {}))
        self._flush()
        notes = [f"{part}: not merged: {what}" for what in found.damaged]
        notes += [store.torn_end(part, lines)] if whole < len(raw) else []
        return Merged(self._written, self._known, tuple(notes))

    def _take(self, engines: dict[str, bytes], found: store.ScannedLines, line: bytes) -> None:
        """engines: the line that describes each launch, of the part so far. Raises where the line is damaged."""
        match (facts := _checked(found, line))["kind"]:
            case None:
                pass
            case "engine":  # added with its first measurement
                engines[facts["id"]] = line
            case "measurement" if _head(line) in self._seen:
                self._known += 1
            case "measurement":
                self._written += 1
                launch, known = facts["engine"], self._engines.get(facts["engine"])
                self._engines[launch] = engines[launch]
                self._add(_head(line), *([] if known == engines[launch] else [engines[launch]]), line)
            case _ if line not in self._seen:
                self._add(line, line)

    def _add(self, head: bytes, *lines: bytes) -> None:
        self._seen.add(head)
        self._pieces.append(b"".join(line + b"\n" for line in lines))
        self._size += len(self._pieces[-1])
        if self._size > _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        """All that was added is on disk on return."""
        self.into.add_lines(self._pieces)
        self._pieces, self._size = [], 0


def _checked(found: store.ScannedLines, line: bytes) -> dict[str, Any]:
    """Facts of a line, of a measurement without its numbers. Raises where the line is damaged."""
    if not line.startswith(store.BULK):
        store.decode(found, line)
        return store.facts_of(line)
    facts = store.facts_of(_NUMBERS.sub(b"[]", line))
    store.engine_before(found, facts)
    if not isinstance(facts["run"], dict):
        raise ValueError("its run is no object")
    return facts


def _head(line: bytes) -> bytes:
    return line.partition(_RUN)[0]


def _read(path: Path) -> bytes:
    try:
        return content(path)
    except OSError as error:
        raise BadArchive(f"cannot read {path}: {error.strerror}", "an archive that --slm-records wrote") from None
