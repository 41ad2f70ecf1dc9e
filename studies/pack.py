"""Pack an archive as those in benchmarks/baselines are: in the newest format, as one piece, by the strongest xz.

    python studies/pack.py RECORDS OUT.jsonl.xz [--window] [--round US]

A run packs each measurement apart, so that a kill costs none, and an older release wrote an older format. With --window
the steps, requests and readings of closed loops go that do not reach into their window: about a quarter of the bytes.
With --round 16 stamps are whole multiples of 16 microseconds, a hundredth of the shortest step; shares of the KV blocks
are of 0.02 %, and power is of 0.1 W. Two thirds of an archive are last digits, noise that no packing can shorten.
Powers of two save most, for stamps are in base 64. OUT may be RECORDS.

Exit status 1, with nothing written, where OUT would not be read as RECORDS is; with --window, where `report` would say
anything else; with --round, where it would in more than digits, or where a figure would differ by over a thousandth and
by over US microseconds and a quarter (the largest share of the KV blocks: by over 0.01 %).
"""

from __future__ import annotations

import io
import json
import lzma
import math
import re
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from itertools import starmap
from pathlib import Path
from typing import TypeVar

from common import parser_of

from pytest_slmserve.__main__ import main as command
from pytest_slmserve.analysis.metrics.summary import summarize
from pytest_slmserve.archive.codec import measurement_line
from pytest_slmserve.archive.store import FORMAT, Contents, ScannedLines, decode, facts_of, read, stored_in
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement, Samples, Steps, Telemetry
from pytest_slmserve.schema.sensors import POWER, POWER_INSTANT

Table = TypeVar("Table", Samples, Steps)
Columns = Mapping[int, Sequence[float | None]]
BESIDE = 2  # rows before and after a window that stay
KV_SHARES, TENTHS = 5_000, 10  # what --round keeps of one, and of one watt
# pb=0: what stands in a text does not depend on whether its place is even.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]


def packed(path: Path, change: Callable[[Measurement], Measurement]) -> bytes:
    found = ScannedLines()
    lines = [line for line in stored_in(path, path.read_bytes())[0] if line]
    return lzma.compress(b"".join(renewed(found, line, change) + b"\n" for line in lines), filters=FILTERS)


def renewed(found: ScannedLines, line: bytes, change: Callable[[Measurement], Measurement]) -> bytes:
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


def in_window(measurement: Measurement) -> Measurement:
    """What reaches into its window, and what comes next on either side, by which rules see that it does."""
    cut = cut_to_window(measurement)
    return cut if summarize(cut) == summarize(measurement) else measurement  # a pause before it may reach far into it


def cut_to_window(measurement: Measurement) -> Measurement:
    run, load = measurement.run, measurement.load
    if not isinstance(load, ClosedLoop) or load.requests is not None:
        return measurement
    opens, closes = run.window_s
    steps, samples, seen = run.steps, run.samples, run.telemetry
    ended = [math.inf if at is None else at for at in samples.last_token_s]
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
    def cut(columns: Columns) -> dict[int, tuple[float | None, ...]]:
        return {number: tuple(column[i] for i in rows) for number, column in columns.items()}

    time_s, span_s = (tuple(column[i] for i in rows) for column in (seen.time_s, seen.span_s))
    return replace(of_each_gpu(seen, cut), time_s=time_s, span_s=span_s)


def of_each_gpu(seen: Telemetry, change: Callable[[Columns], Columns]) -> Telemetry:
    """The telemetry with its columns changed, those of all GPUs together and those of each."""
    return replace(seen, columns=change(seen.columns), gpus=tuple(map(change, seen.gpus)))


def rounded(measurement: Measurement, us: int) -> Measurement:
    """Its stamps as whole multiples of so many microseconds, on the side of the window's ends that they were on; its
    shares of the KV blocks and its power without their last digits."""
    run = measurement.run

    def nearest(stamp: float) -> int:
        return (round(stamp * 1e6) + us // 2) // us  # halves go up: every other stamp rounded to us / 2 is one

    opens, closes = map(nearest, run.window_s)

    def coarse(stamp: float | None) -> float | None:
        if stamp is None:
            return None
        near = nearest(stamp)
        near = max(near, opens) if stamp >= run.window_s[0] else min(near, opens - 1)
        near = min(near, closes) if stamp <= run.window_s[1] else max(near, closes + 1)
        return near * us / 1e6

    def table_of(table: Table) -> Table:
        stamps = [field.name for field in fields(table) if field.name.endswith("_s")]
        return replace(table, **{name: tuple(map(coarse, getattr(table, name))) for name in stamps})

    window_s = opens * us / 1e6, closes * us / 1e6
    steps = replace(table_of(run.steps), kv_usage=parts_of(run.steps.kv_usage, KV_SHARES))
    kept = replace(run, samples=table_of(run.samples), steps=steps, window_s=window_s)
    if (seen := run.telemetry) is not None:
        kept = replace(kept, telemetry=of_each_gpu(seen, power_of))
    return replace(measurement, run=kept)


def power_of(columns: Columns) -> Columns:
    return {n: parts_of(column, TENTHS) if n in (POWER, POWER_INSTANT) else column for n, column in columns.items()}


def parts_of(values: Sequence[float | None], parts: int) -> tuple[float | None, ...]:
    """The values as whole numbers of so many parts of one."""
    return tuple(None if value is None else round(value * parts) / parts for value in values)


def says_about_the_same(path: Path, as_path: Path, us: int) -> bool:
    measurements = [read(each).measurements for each in (path, as_path)]
    pairs = [(summarize(one), summarize(other)) for one, other in zip(*measurements, strict=True)]
    near = {"kv_usage": 0.51 / KV_SHARES}  # half of one; stamps at an end of the window move more
    figures = (
        (getattr(one, f.name), getattr(other, f.name), near.get(f.name, 1.25e-6 * us))
        for one, other in pairs
        for f in fields(one)
    )
    return all(starmap(about, figures)) and words_of(told(path)) == words_of(told(as_path))


def about(one: object, other: object, near: float) -> bool:
    """At most a thousandth, or `near`, apart; equal where it is no number."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=near)
    return one == other


def words_of(text: str) -> list[str]:
    """The words of a text without its numbers and its rules, which are as wide as the numbers below them."""
    return re.sub(r"-{2,}|[-+]?\d[\d.,]*", "0", text).split()


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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("out", type=Path)
    window = "leave out what does not reach into the windows"
    parser.add_argument("--window", action="store_true", help=window)
    parser.add_argument("--round", type=int, metavar="US", help="round stamps to so many microseconds")
    given = parser.parse_args()

    def change(measurement: Measurement) -> Measurement:
        kept = in_window(measurement) if given.window else measurement
        return rounded(kept, given.round) if given.round else kept

    before, size = read(given.records), given.records.stat().st_size
    with tempfile.TemporaryDirectory(dir=given.out.parent) as folder:
        made = Path(folder, "packed.jsonl.xz")
        made.write_bytes(packed(given.records, change))
        if given.round:
            alike = says_about_the_same(made, given.records, given.round)
        elif given.window:
            alike = says_the_same(made, given.records)
        else:
            alike = but_for_format(read(made)) == but_for_format(before)
        if not alike:
            print(f"{given.records} would be read as something else: nothing was written", file=sys.stderr)
            return 1
        made.replace(given.out)
    print(f"{given.out}: {len(before.measurements)} measurements, {size:,} bytes became {given.out.stat().st_size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
