"""Storage for columns out of memory: the figures of each run stay, and its columns are read again when needed.

A run in memory takes about eight times the bytes of its line. Lines of columns that were not used recently go to a
temporary file without a name, or stay in memory, packed, if that cannot be written.
"""

from __future__ import annotations

import io
import os
import tempfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from threading import RLock

from pytest_slmserve.archive.codec import run_of_record
from pytest_slmserve.archive.lines import facts_of
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.records import COLUMNS, FIGURE, Run

RECENT = 1 << 24  # bytes of lines whose columns stay in memory, more than in any committed results file


@dataclass(eq=False, slots=True)
class Kept:
    """Place of a run's line: offset and length in the file, or the packed line; None before the first eviction."""

    shelf: Shelf
    place: tuple[int, int] | bytes | None = None

    def columns_of(self, run: Run) -> Run:
        """Return a run that has the columns, and put them back into this one."""
        return self.shelf.read(run, self)


class Shelf:
    def __init__(self, recent: int = RECENT) -> None:
        self._most, self._bytes = recent, 0
        self._recent: OrderedDict[Kept, tuple[Run, bytes]] = OrderedDict()
        self._file: io.FileIO | None = None
        self._lock = RLock()

    def put(self, run: Run, line: bytes) -> None:
        """Take a run with its line; its columns may then leave the memory until they are needed."""
        kept = vars(run)["kept"] = Kept(self)
        with self._lock:
            self._remember(kept, run, line)

    def read(self, run: Run, kept: Kept) -> Run:
        """Return a run with the columns of this one, which gets them back. Raise BadArchive if they cannot be read."""
        with self._lock:
            if kept in self._recent:  # another thread was here
                return self._recent[kept][0]
            line = self._line(kept)
            found = run_of_record(facts_of(line))
            vars(run).update({name: getattr(found, name) for name in COLUMNS})
            self._remember(kept, run, line)
        return found

    def _remember(self, kept: Kept, run: Run, line: bytes) -> None:
        self._recent[kept] = run, line
        self._bytes += len(line)
        while self._bytes > self._most and len(self._recent) > 1:
            kept, (run, line) = self._recent.popitem(last=False)
            self._bytes -= len(line)
            kept.place = kept.place or self._written(zlib.compress(line, 1))
            for name in COLUMNS:
                vars(run).pop(name, None)
            for name in [name for name in run.derived if name[0] != FIGURE]:
                del run.derived[name]

    def _written(self, packed: bytes) -> tuple[int, int] | bytes:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it goes with the process
            at, rest = self._file.seek(0, os.SEEK_END), packed
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:  # of a full disk, for example
            return packed
        return at, len(packed)

    def _line(self, kept: Kept) -> bytes:
        assert kept.place is not None  # because the run is not recent
        if isinstance(kept.place, bytes):
            return zlib.decompress(kept.place)
        assert self._file is not None
        at, size = kept.place
        try:
            self._file.seek(at)
            return zlib.decompress(self._file.read(size))
        except (OSError, zlib.error) as error:
            why = f"a temporary file with what this process has measured or read cannot be read again: {error}"
            raise BadArchive(why, "Run slmserve report on the results file.") from None


SHELF = Shelf()  # one for each process
