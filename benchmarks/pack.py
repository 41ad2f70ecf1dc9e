"""Pack an archive as those in benchmarks/baselines are: in the newest format, as one piece, by the strongest xz.

    python benchmarks/pack.py RECORDS OUT.jsonl.xz [--window]

A run packs each measurement apart, so that a kill costs none, and an older release wrote an older format. With --window
the steps, requests and readings of closed loops go that do not reach into their window: about a quarter of the bytes.
OUT may be RECORDS. Exit status 1, with nothing written, where OUT would not be read as RECORDS is; with --window, where
a measurement would have another summary, or `report` would say anything else.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import TypeVar

from pytest_slmserve.__main__ import main as command
from pytest_slmserve.analysis.summary import summarize
from pytest_slmserve.codec import measurement_line
from pytest_slmserve.records import Measurement, Samples, Steps, Telemetry
from pytest_slmserve.spec import ClosedLoop
from pytest_slmserve.store import FORMAT, Contents, Found, decode, facts_of, read, stored_in

Table = TypeVar("Table", Samples, Steps)
BESIDE = 2  # rows before and after a window that stay
# pb=0: what stands in a text does not depend on whether its place is even.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]


def packed(path: Path, change: Callable[[Measurement], Measurement]) -> bytes:
    found = Found()
    lines = [line for line in stored_in(path, path.read_bytes()).lines if line]
    return lzma.compress(b"".join(renewed(found, line, change) + b"\n" for line in lines), filters=FILTERS)


def renewed(found: Found, line: bytes, change: Callable[[Measurement], Measurement]) -> bytes:
    """The line in the newest format. found: what the lines before it hold."""
    decode(found, line)
    match (facts := facts_of(line))["kind"]:
        case "session":
            facts["format"] = FORMAT
        case "measurement":
            facts["run"] = measurement_line(change(found.measurements[-1]))["run"]
        case _:
            return line
    return json.dumps(facts, separators=(",", ":")).encode()


def as_it_is(measurement: Measurement) -> Measurement:
    return measurement


def in_window(measurement: Measurement) -> Measurement:
    """What reaches into its window, and what comes next on either side, by which rules see that it does."""
    run, load = measurement.run, measurement.load
    if not isinstance(load, ClosedLoop) or load.requests is not None:
        return measurement
    opens, closes = run.window_s
    steps, samples, seen = run.steps, run.samples, run.telemetry
    ended = [inf if at is None else at for at in samples.last_token_s]
    rows = [i for i, sent in enumerate(samples.sent_s) if sent <= closes and ended[i] >= opens]
    kept = replace(run, steps=rows_of(steps, around(run.window_s, steps.time_s)), samples=rows_of(samples, rows))
    if seen is not None:
        kept = replace(kept, telemetry=readings_of(seen, around(run.window_s, seen.time_s)))
    return replace(measurement, run=kept)


def around(window_s: tuple[float, float], times: Sequence[float]) -> range:
    """Rows of these times, ascending, that lie in the window, and those beside it."""
    opens, closes = window_s
    first, last = bisect_left(times, opens) - BESIDE, bisect_right(times, closes) + BESIDE
    return range(max(0, first), min(last, len(times)))


def rows_of(table: Table, rows: Sequence[int]) -> Table:
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(table, **{name: tuple(column[i] for i in rows) for name, column in columns.items() if column})


def readings_of(seen: Telemetry, rows: Sequence[int]) -> Telemetry:
    def cut(columns: Mapping[int, Sequence[float | None]]) -> dict[int, tuple[float | None, ...]]:
        return {number: tuple(column[i] for i in rows) for number, column in columns.items()}

    return replace(
        seen,
        time_s=tuple(seen.time_s[i] for i in rows),
        span_s=tuple(seen.span_s[i] for i in rows),
        columns=cut(seen.columns),
        gpus=tuple(cut(each) for each in seen.gpus),
    )


def says_the_same(path: Path, as_path: Path) -> bool:
    summaries = [[(m.id, summarize(m)) for m in read(each).measurements] for each in (path, as_path)]
    return summaries[0] == summaries[1] and told(path) == told(as_path)


def told(path: Path) -> str:
    """What `report` says of it, but for its name."""
    out = io.StringIO()
    with redirect_stdout(out):
        command(["report", str(path)])
    return out.getvalue().replace(str(path), "")


def but_for_format(contents: Contents) -> Contents:
    return replace(contents, sessions=tuple(replace(session, format=FORMAT) for session in contents.sessions))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("out", type=Path)
    window = "leave out what does not reach into the windows"
    parser.add_argument("--window", action="store_true", help=window)
    given = parser.parse_args(arguments)
    before, size = read(given.records), given.records.stat().st_size
    with tempfile.TemporaryDirectory(dir=given.out.parent) as folder:
        made = Path(folder, "packed.jsonl.xz")
        made.write_bytes(packed(given.records, in_window if given.window else as_it_is))
        alike = (
            says_the_same(made, given.records) if given.window else but_for_format(read(made)) == but_for_format(before)
        )
        if not alike:
            print(f"{given.records} would be read as something else: nothing was written", file=sys.stderr)
            return 1
        made.replace(given.out)
    print(f"{given.out}: {len(before.measurements)} measurements, {size:,} bytes became {given.out.stat().st_size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
