"""Pack an archive as those in benchmarks/baselines are: in the newest format, as one piece, by the strongest xz.

    python benchmarks/pack.py RECORDS OUT.jsonl.xz

A run packs each measurement apart, so that a kill costs none, and an older release wrote an older format. OUT may be
RECORDS. Exit status 1, with nothing written, where OUT would not be read as RECORDS is.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pytest_slmserve.codec import measurement_line
from pytest_slmserve.store import FORMAT, Contents, Found, decode, facts_of, read, stored_in

# pb=0: what stands in a text does not depend on whether its place is even.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]


def packed(path: Path) -> bytes:
    found = Found()
    lines = [line for line in stored_in(path, path.read_bytes()).lines if line]
    return lzma.compress(b"".join(renewed(found, line) + b"\n" for line in lines), filters=FILTERS)


def renewed(found: Found, line: bytes) -> bytes:
    """The line in the newest format. found: what the lines before it hold."""
    decode(found, line)
    match (facts := facts_of(line))["kind"]:
        case "session":
            facts["format"] = FORMAT
        case "measurement":
            facts["run"] = measurement_line(found.measurements[-1])["run"]
        case _:
            return line
    return json.dumps(facts, separators=(",", ":")).encode()


def but_for_format(contents: Contents) -> Contents:
    return replace(contents, sessions=tuple(replace(session, format=FORMAT) for session in contents.sessions))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    before, size = read(given.records), given.records.stat().st_size
    with tempfile.TemporaryDirectory(dir=given.out.parent) as folder:
        made = Path(folder, "packed.jsonl.xz")
        made.write_bytes(packed(given.records))
        if but_for_format(read(made)) != but_for_format(before):
            print(f"{given.records} would be read as something else: nothing was written", file=sys.stderr)
            return 1
        made.replace(given.out)
    print(f"{given.out}: {len(before.measurements)} measurements, {size:,} bytes became {given.out.stat().st_size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
