"""Archives inside a page: one HTML file holds the records that its numbers were made of."""

from __future__ import annotations

import gzip
import html
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path

from pytest_slmserve.schema.errors import BadArchive

PACKED = (".gz", ".xz")
BEGINS = b"<!doctype html>"
_RECORDS = re.compile(rb'<script type="application/octet-stream" data-records="([^"]*)">([A-Za-z0-9+/=]*)</script>')


@dataclass(frozen=True, slots=True)
class Embedded:
    """An archive as a page holds it: its file name, whose suffix tells the packing, and its bytes in base64."""

    name: str
    base64: str


def embedded(path: Path) -> list[Embedded]:
    """The archive at a path, packed; those inside, of a page. Of an archive that is not packed the whole lines are
    kept. Raises BadArchive where it cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadArchive(f"cannot read {path}: {error.strerror}", "the file that --slm-records named") from None
    return [_packed(name.name, data) for name, data in archives_in(path, raw)]


def _packed(name: str, raw: bytes) -> Embedded:
    if not name.endswith(PACKED):
        name, raw = f"{name}.gz", gzip.compress(raw[: raw.rfind(b"\n") + 1], 6, mtime=0)
    return Embedded(name, b64encode(raw).decode())


def archives_in(path: Path, raw: bytes) -> list[tuple[Path, bytes]]:
    """The archives of a page, each as a path below that of the page; of any other file, the file itself."""
    if raw[: len(BEGINS)].lower() != BEGINS:
        return [(path, raw)]
    return [(path / Path(html.unescape(name.decode())).name, b64decode(data)) for name, data in _RECORDS.findall(raw)]
