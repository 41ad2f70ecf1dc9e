"""Pack an archive as those in benchmarks/baselines are: in the newest format, as one piece, by the strongest xz.

    python studies/pack.py RECORDS OUT.jsonl.xz [--window] [--round US]

A run packs each measurement apart, so that a kill costs none. Gates alone need no table of claims. With --window
the steps, requests and readings of closed loops go that do not reach into their window: about a quarter of the bytes.
With --round 16 stamps are whole multiples of 16 microseconds, a hundredth of the shortest step; shares of the KV blocks
are of 0.02%, and power is of 0.1 W. Two thirds of an archive are last digits, noise that no packing can shorten.
Powers of two save most, for stamps are in base 64. OUT may be RECORDS.

Exit status 1, with nothing written, where OUT would not be read as RECORDS is; with --window, where `report` would say
anything else; with --round, where it would in more than digits, or where a figure would differ by over a thousandth and
by over US microseconds and a quarter (the largest share of the KV blocks: by over 0.01%;
Little's law: by over 0.05%).
"""

from __future__ import annotations

import io
import lzma
import math
import re
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from common import parser_of

from pytest_slmserve.__main__ import main as command
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.archive.codec import measurement_line
from pytest_slmserve.archive.lines import FIRST, ArchiveLines, facts_of, line_of, unsealed
from pytest_slmserve.archive.store import BULK, Contents, ScannedLines, decode, read
from pytest_slmserve.schema.records import Measurement, Samples, Steps, Telemetry
from pytest_slmserve.schema.sensors import POWER, POWER_INSTANT
from pytest_slmserve.schema.specs import ClosedLoop

Table = TypeVar("Table", Samples, Steps)
Column = tuple[float | None, ...]
BESIDE = 2  # rows before and after a window that stay
KV_SHARES, TENTHS = 5_000, 10  # what --round keeps of one, and of one watt
# pb=0: what stands in a text does not depend on whether its place is even.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]


def has_gates_alone(found: Contents) -> bool:
    return all(m.paired for m in found.measurements)


def packed(path: Path, change: Callable[[Measurement], Measurement], claims: bool) -> bytes:
    """The archive in the newest format, each of its measurements changed, with its claims or without."""
    found, lines = ScannedLines(), list[bytes]()
    with path.open("rb") as file:
        for line in filter(None, ArchiveLines(path, file)):
            decode(found, line)
            if not claims and line.startswith(FIRST):
                line = line_of(facts_of(unsealed(line)) | {"claims": {}}).rstrip()
            changed = line.startswith(BULK)
            lines.append(line_of(measurement_line(change(found.measured[-1][0]))) if changed else line + b"\n")
    return lzma.compress(b"".join(lines), filters=FILTERS)


def in_window(measurement: Measurement) -> Measurement:
    """The parts that reach into its window, and their neighbours on either side, by which rules see that they do. A
    measurement that would have another summary stays whole: a pause before its window may reach far into it."""
    run, load = measurement.run, measurement.load
    if not isinstance(load, ClosedLoop) or load.requests is not None:
        return measurement
    opens, closes = run.window_s

    def around(times: Sequence[float]) -> range:
        """Rows of these times, ascending, that lie in the window, and those beside it."""
        first, last = bisect_left(times, opens) - BESIDE, bisect_right(times, closes) + BESIDE
        return range(max(0, first), min(last, len(times)))

    def rows_of(table: Table, rows: Sequence[int]) -> Table:
        columns = {field.name: getattr(table, field.name) for field in fields(table)}
        return replace(table, **{name: tuple(column[i] for i in rows) for name, column in columns.items() if column})

    ended = [math.inf if at is None else at for at in run.samples.last_token_s]
    requests = [i for i, sent in enumerate(run.samples.sent_s) if sent <= closes and ended[i] >= opens]
    cut = replace(run, steps=rows_of(run.steps, around(run.steps.time_s)), samples=rows_of(run.samples, requests))
    if (seen := run.telemetry) is not None:
        rows = around(seen.time_s)
        kept = of_each_gpu(seen, lambda column: tuple(column[i] for i in rows))
        time_s, span_s = (tuple(column[i] for i in rows) for column in (seen.time_s, seen.span_s))
        cut = replace(cut, telemetry=replace(kept, time_s=time_s, span_s=span_s))
    shorter = replace(measurement, run=cut)
    return shorter if summarize(shorter) == summarize(measurement) else measurement


def of_each_gpu(
    seen: Telemetry, change: Callable[[Column], Column], numbers: Container[int] | None = None
) -> Telemetry:
    """The telemetry with its columns changed, those of all GPUs together and those of each. numbers: only of these
    sensors."""

    def changed(columns: Mapping[int, Column]) -> dict[int, Column]:
        return {n: change(column) if numbers is None or n in numbers else column for n, column in columns.items()}

    return replace(seen, columns=changed(seen.columns), gpus=tuple(map(changed, seen.gpus)))


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

    def parts_of(values: Column, parts: int) -> Column:
        return tuple(None if value is None else round(value * parts) / parts for value in values)

    steps = replace(table_of(run.steps), kv_usage=parts_of(run.steps.kv_usage, KV_SHARES))
    kept = replace(run, samples=table_of(run.samples), steps=steps, window_s=(opens * us / 1e6, closes * us / 1e6))
    if (seen := run.telemetry) is not None:
        power = of_each_gpu(seen, partial(parts_of, parts=TENTHS), (POWER, POWER_INSTANT))
        kept = replace(kept, telemetry=power)
    return replace(measurement, run=kept)


def alike(path: Path, as_path: Path, window: bool, us: int | None) -> bool:
    """Is one archive read as the other is, or nearly so, after stamps were rounded?"""
    one, other = read(path), read(as_path)
    if not (window or us):
        same = (one.measurements, one.plans, one.notes) == (other.measurements, other.plans, other.notes)
        return same and (one.claims == other.claims or has_gates_alone(one))
    texts = []
    for each in (path, as_path):
        with redirect_stdout(io.StringIO()) as out:
            command(["report", str(each)])
        # The line "where" has the path, at which it breaks, and a command may have it.
        text = re.sub(r"where: .*?\n(?=\S|\n)", "", out.getvalue(), flags=re.DOTALL)
        texts.append(text.replace(str(path), "").replace(str(as_path), ""))
    pairs = [
        (m.id, summarize(m), n.id, summarize(n)) for m, n in zip(one.measurements, other.measurements, strict=True)
    ]
    if not us:
        return texts[0] == texts[1] and all((a, b) == (c, d) for a, b, c, d in pairs)
    for _, seen, _, was in pairs:
        for name in (field.name for field in fields(seen)):
            value, before = getattr(seen, name), getattr(was, name)
            # half a share of the KV blocks; stamps at an end of the window move more
            near = {"kv_usage": 0.51 / KV_SHARES, "little": 5e-4}.get(name, 1.25e-6 * us)
            numbers = isinstance(value, float) and isinstance(before, float)
            if not (math.isclose(value, before, rel_tol=1e-3, abs_tol=near) if numbers else value == before):
                return False
    # Words without numbers, and without rules, which are as wide as the numbers below them.
    words = [re.sub(r"-{2,}|[-+]?\d[\d.,]*", "0", text).split() for text in texts]
    return words[0] == words[1]


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
        made.write_bytes(packed(given.records, change, claims=not has_gates_alone(before)))
        if not alike(made, given.records, given.window, given.round):
            print(f"{given.records} would be read as something else: nothing was written", file=sys.stderr)
            return 1
        made.replace(given.out)
    print(f"{given.out}: {len(before.measurements)} measurements, {size:,} bytes became {given.out.stat().st_size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
