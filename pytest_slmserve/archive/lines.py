"""Lines of a results file with their checksums, read one after another in little memory.

In a packed file each write is a separate piece (a member of gzip, a stream of xz). Its lines are yielded after its end,
because a torn piece yields none, or earlier if it has many megabytes, such as a whole file packed by `xz`.
"""

from __future__ import annotations

import html
import io
import json
import lzma
import os
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pytest_slmserve.schema.errors import BadArchive, content, regular
from pytest_slmserve.schema.printable import printable_value

FIRST = b'{"kind":"session"'  # first bytes of every results file
SEAL = re.compile(rb',"crc32":"([0-9a-f]{8})"\}$')  # end of every line
# Packings by the suffix of a file: name, and first bytes of each piece.
PACKINGS = {".gz": ("gzip", b"\x1f\x8b\x08"), ".xz": ("xz", b"\xfd7zXZ\x00")}
BEGINS = b"<!doctype html>"  # of an HTML report, which may contain its records
HINT = "Pass the results file that --slm-records named (default: .slm/records.jsonl)."
LONGEST_LINE = 1 << 28  # bytes: a million requests are some 20 million
HELD = 1 << 24  # bytes of a piece that are held until its end
_CHUNK = 1 << 12  # bytes of one read, about as many as in a piece
_SEARCHED = 1 << 20  # bytes of one search for the next piece
_UNPACKING = 1 << 27  # bytes of memory for unpacking: `xz -9` needs half of it
_DAMAGE = (zlib.error, lzma.LZMAError, EOFError)
_RECORDS = re.compile(rb'<script type="application/octet-stream" data-records="([^"]*)">([A-Za-z0-9+/=]*)</script>')


def line_of(facts: Mapping[str, Any]) -> bytes:
    return sealed(json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()) + b"\n"


def sealed(body: bytes) -> bytes:
    """Return a JSON object with the CRC-32 of the object as its last entry."""
    return b'%b,"crc32":"%08x"}' % (body[:-1], zlib.crc32(body))


def unsealed(line: bytes) -> bytes:
    """Return the JSON object of a line without its checksum. Raise ValueError if that is missing or wrong."""
    seal = SEAL.search(line)
    if seal is None:
        facts_of(line)["kind"]  # raises a more specific error for a line that is not ours
        raise ValueError("it has no checksum")
    body = line[: seal.start()] + b"}"
    if zlib.crc32(body) != int(seal[1], 16):
        raise ValueError("its checksum is that of another line: some of it was changed")
    return body


def facts_of(line: bytes) -> dict[str, Any]:
    """Return the object of a line, or raise ValueError; an empty line has the kind None."""
    if not line.strip():
        return {"kind": None}
    import msgspec  # here, because an idle run reads no records

    facts = msgspec.json.decode(line)
    if not isinstance(facts, dict):
        raise ValueError("not an object with a kind")
    plain = line.isascii() and b"\\" not in line and b"\x7f" not in line
    return facts if plain else printable_value(facts)


class ArchiveLines:
    """Lines of an open results file without their ends, None for an unreadable piece; iterated once.

    Attributes:
        count: lines so far.
        whole: bytes before a torn end, known at the end of the iteration.
        size: bytes of the file.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.count = self.whole = 0
        self.size = file.seek(0, os.SEEK_END)
        self._file = file
        self._begins = b""  # of the first line

    def __iter__(self) -> Iterator[bytes | None]:
        """Yield the lines, or raise BadArchive if the file is unreadable or something else."""
        self._file.seek(0)
        try:
            for line in self._of_pieces() if self.path.suffix in PACKINGS else self._of(self._file):
                self.count += 1
                yield line
        except OSError as error:
            raise unreadable(self.path, error) from None
        except MemoryError:
            raise BadArchive(f"{self.path} needs more memory than a results file may take", HINT) from None
        if not self.count and not FIRST.startswith(self._begins):
            raise not_an_archive(self.path)

    def _of(self, text: io.BufferedIOBase | BinaryIO, *, packed: bool = False) -> Iterator[bytes]:
        while line := text.readline(LONGEST_LINE):
            self._begins = self._begins or line[: len(FIRST)]
            if not line.endswith(b"\n"):
                if len(line) == LONGEST_LINE:
                    raise MemoryError
                if not packed:
                    return
            if not packed:
                self.whole += len(line)
            yield line.removesuffix(b"\n")

    def _of_pieces(self) -> Iterator[bytes | None]:
        name, magic = PACKINGS[self.path.suffix]
        if not magic.startswith(self._file.read(len(magic))):
            wrong = f"{self.path} ends in {self.path.suffix} but is not {name}"
            raise BadArchive(wrong, f"Remove {self.path.suffix} from its name, or pass the file as it was written.")
        start = 0
        while 0 <= start < self.size:
            piece, held, waiting = _Piece(self.path.suffix, self._file, start), list[bytes | None](), 0
            if start > self.whole:
                held.append(None)
            try:
                for line in self._of(io.BufferedReader(piece), packed=True):
                    held.append(line)
                    waiting += len(line)
                    if waiting > HELD:
                        yield from held
                        held.clear()
            except _DAMAGE:  # the next piece may be whole
                start = self._next(magic, start + 1)
                continue
            yield from held
            start = self.whole = piece.end

    def _next(self, magic: bytes, start: int) -> int:
        """Return the offset of the next piece, or -1."""
        while start < self.size:
            self._file.seek(start)
            part = self._file.read(_SEARCHED)
            if (found := part.find(magic)) >= 0:
                return start + found
            start += max(len(part) - len(magic), 0) + 1
        return -1


class _Piece(io.RawIOBase):
    """Text of the packed piece at `start`; reading raises one of _DAMAGE if it is damaged or torn."""

    def __init__(self, suffix: str, file: BinaryIO, start: int) -> None:
        self._unpack: Any = (
            zlib.decompressobj(wbits=31) if suffix == ".gz" else lzma.LZMADecompressor(lzma.FORMAT_XZ, _UNPACKING)
        )
        self._file, self._packed = file, b""  # bytes that zlib did not use; lzma keeps them itself
        self.end = start  # of the piece, once it was read
        file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        text = b""
        while not text and not self._unpack.eof:
            if not self._packed and getattr(self._unpack, "needs_input", True):
                if not (packed := self._file.read(_CHUNK)):
                    raise EOFError
                self._packed = packed
                self.end += len(packed)
            text = self._unpack.decompress(self._packed, len(buffer))
            self._packed = getattr(self._unpack, "unconsumed_tail", b"")
            if self._unpack.eof:
                self.end -= len(self._unpack.unused_data)
        buffer[: len(text)] = text
        return len(text)


def archives_in(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield the results files in an HTML report, each with a path below that of the report; any other file as it is."""
    try:
        with open(path, "rb", opener=regular) as file:
            is_page = file.read(len(BEGINS)).lower() == BEGINS
            if not is_page:
                yield path, file
        found = _RECORDS.findall(content(path)) if is_page else []
    except OSError as error:
        raise unreadable(path, error) from None
    if is_page and not found:
        raise BadArchive(
            f"{path} is a page without records", "Pass an HTML report that slmserve wrote, or a results file."
        )
    for name, data in found:
        try:
            inside, raw = path / Path(html.unescape(name.decode())).name, b64decode(data)
        except ValueError:
            raise BadArchive(f"the records in {path} are damaged", "Pass the HTML report as it was written.") from None
        yield inside, io.BytesIO(raw)


def unreadable(path: Path, error: OSError) -> BadArchive:
    return BadArchive(f"cannot read {path}: {error.strerror or error}", HINT)


def not_an_archive(path: Path, *why: str) -> BadArchive:
    hint = f"{HINT} For results of another tool add --knob, --throughput, and --latency NAME."
    return BadArchive(": ".join([f"{path} is not a results file of pytest-slmserve", *why]), hint)
