"""How long it takes to merge 10,000 records that eight processes wrote into one archive.

    python studies/merge_cost.py [RECORDS] [--folder FOLDER]

The records are those of a stored run on an H200 with sensors, over and over, each with its own launch and time: some
40 kB each. They are merged into a new archive, and once more where it has all of them. `disk` is what it takes to write
as many bytes and no more. Exit status 1 where merging takes over 5 s.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

from common import BASELINES, parser_of

from pytest_slmserve.archive.lines import ArchiveLines, sealed, unsealed
from pytest_slmserve.archive.store import BULK, Archive, Merged, merge

RECORDS = 10_000
PARTS = 8
LIMIT_S = 5.0
STORED = BASELINES / "h200-vllm-0.26.0-sensors.jsonl.xz"


def lines_of(stored: Path) -> tuple[bytes, bytes, list[bytes]]:
    """A session, an engine, and measurements, whose launch and time are left to be filled in."""
    with stored.open("rb") as file:
        lines = [unsealed(line) for line in ArchiveLines(stored, file) if line]
    engine = next(line for line in lines if line.startswith(b'{"kind":"engine"'))
    bulk = [line for line in lines if line.startswith(BULK)]
    return lines[0], with_value(engine, b"id"), [with_value(with_value(m, b"engine"), b"measured_at") for m in bulk]


def with_value(line: bytes, name: bytes) -> bytes:
    """The line with a gap for the text of an entry."""
    begins = line.index(b'"%b":"' % name) + len(name) + 4
    return line[:begins] + b"<%b>" % name + line[line.index(b'"', begins) :]


def written(folder: Path, count: int) -> list[Path]:
    """Parts of equal size."""
    session, engine, measurements = lines_of(STORED)
    parts = [folder / f"part{number}.jsonl" for number in range(PARTS)]
    for number, part in enumerate(parts):
        launch = b"launch-%d" % number
        with part.open("wb") as file:
            file.write(sealed(session.replace(b'"started":"', b'"started":"%d-' % number, 1)) + b"\n")
            file.write(sealed(engine.replace(b"<id>", launch, 1)) + b"\n")
            for index, line in enumerate(islice(cycle(measurements), count // PARTS)):
                filled = line.replace(b"<engine>", launch, 1).replace(b"<measured_at>", b"%d" % index, 1)
                file.write(sealed(filled) + b"\n")
    return parts


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def disk_s(folder: Path, size: int) -> float:
    """Seconds for so many bytes, in pieces of 8 MiB that each are on disk before the next."""
    piece = os.urandom(1 << 23)

    def write() -> None:
        with (folder / "bytes").open("wb", buffering=0) as file:
            for _ in range(-(-size // len(piece))):
                file.write(piece)
                os.fsync(file.fileno())

    seconds = timed(write)
    (folder / "bytes").unlink()
    return seconds


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("records", nargs="?", type=int, default=RECORDS)
    parser.add_argument("--folder", type=Path, help="on the disk to be asked (default: that of temporary files)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        return told(Path(name), given.records)


def told(folder: Path, count: int) -> int:
    records = folder / "records.jsonl"
    parts = written(folder, count)
    size = sum(part.stat().st_size for part in parts)
    found: list[Merged] = []
    with Archive.open(records) as into:
        seconds = timed(lambda: found.append(merge(parts, into)))
    with Archive.open(records) as into:
        again = timed(lambda: found.append(merge(parts, into)))
    assert [(m.written, m.known, m.notes) for m in found] == [(count, 0, ()), (0, count, ())], found
    print(f"{count:,} records of {PARTS} parts, {size / 1e6:.0f} MB: {seconds:.2f} s (limit {LIMIT_S:g} s)")
    print(f"where all are there: {again:.2f} s; disk: {disk_s(folder, size):.2f} s")
    return int(seconds > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
