"""Results that are not ours: a CSV with named columns, or the JSON of `vllm bench serve`, read into points.

JSON may be one object, a list, one object a line, or whole objects one after the other. What a column means is the
user's word; nothing is guessed but the unit that a name ends in.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.advice.batch_choice import ModelSweep, ServedEngine
from pytest_slmserve.analysis.advice.gpu_memory import Footprint
from pytest_slmserve.analysis.advice.subjects import ResultSource, SourcedSweeps
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.schema.catalog import Shape, hub_name, shape_of, short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import (
    VALUE_BYTES,
)

SECONDS = {"ms": 1e-3, "s": 1.0}
SMALLEST, LARGEST = 1e-12, 1e12  # of what a rate or a latency can be, whatever its unit
LARGEST_KNOB = 10**9
DELIMITERS = ",;\t"


@dataclass(frozen=True, slots=True)
class Row:
    """One result: where it stands, for messages, and its named values as they were read."""

    place: str
    cells: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column is what. latency_unit: "ms" or "s" where the name does not end in it."""

    knob: str
    throughput: str
    latency: str
    latency_unit: str | None = None
    preemptions: str | None = None
    running: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of the knob, and what its rows say, in the order read. output_per_s: output tokens; running: mean
    number of running requests as reported; both empty where no column has them, like preemptions (None)."""

    knob: int
    throughput: tuple[float, ...]
    latency_s: tuple[float, ...]
    preemptions: float | None = None
    running: tuple[float, ...] = ()
    output_per_s: tuple[float, ...] = ()

    @property
    def preempted(self) -> bool:
        return bool(self.preemptions)

    @property
    def in_flight(self) -> float | None:
        """By Little's law: output tokens/s times seconds per token, which the latency has to be."""
        if not self.output_per_s:
            return None
        return fmean(rate * wait for rate, wait in zip(self.output_per_s, self.latency_s, strict=True))

    @property
    def point(self) -> Point:
        """Its knob as the load and as the batch, its latency as `e2e`. Not valid if any of its rows preempted."""
        if self.preempted:
            why = (f"{self.preemptions:g} preemptions",)
            return Point(concurrency=self.knob, left_out=len(self.throughput), problems=why)
        return Point(
            concurrency=self.knob,
            repeats=self.throughput,
            e2e_repeats=self.latency_s,
            batch_repeats=(float(self.knob),) * len(self.throughput),
        )


def settings_of(rows: Sequence[Row], columns: Columns) -> tuple[Setting, ...]:
    """Ascending by the knob; several rows of one knob are repeats. Raises BadUsage."""
    scale = SECONDS[unit_of(columns)]
    found = sorted(((knob_of(row, columns.knob), row) for row in rows), key=lambda pair: pair[0])
    groups = groupby(found, key=lambda pair: pair[0])
    return tuple(_setting(knob, [row for _, row in group], columns, scale) for knob, group in groups)


def _setting(knob: int, rows: Sequence[Row], columns: Columns, scale: float) -> Setting:
    def each(column: str | None) -> tuple[float, ...]:
        return () if column is None else tuple(positive(row, column) for row in rows)

    lost = None if columns.preemptions is None else math.fsum(count_of(row, columns.preemptions) for row in rows)
    return Setting(
        knob=knob,
        throughput=each(columns.throughput),
        latency_s=tuple(scale * value for value in each(columns.latency)),
        preemptions=lost,
        running=each(columns.running),
        output_per_s=each(columns.output),
    )


def unit_of(columns: Columns) -> str:
    """Raises BadUsage where neither the name of the latency nor the user says it, or they disagree."""
    name = columns.latency
    stem, _, ending = name.rpartition("_")
    named = ending if ending in SECONDS and not stem.endswith("per") else None
    if named and columns.latency_unit and named != columns.latency_unit:
        raise BadUsage(
            f"the column {name!r} ends in its unit, which is not {columns.latency_unit}", "no --latency-unit"
        )
    unit = named or columns.latency_unit
    if unit is None:
        raise BadUsage(f"the column {name!r} does not end in its unit (_ms or _s)", "--latency-unit ms or s")
    return unit


# Numbers


def value_of(row: Row, column: str) -> float:
    """A finite number, from text too. Raises BadUsage."""
    if column not in row.cells:
        raise BadUsage(f"{row.place} has no {column!r}", "--where NAME=VALUE to leave such rows out")
    cell = row.cells[column]
    try:
        value = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise BadUsage(f"{row.place}: {column} is {_shown(cell)}, which is no number", "--where to leave such rows out")
    return value


def positive(row: Row, column: str) -> float:
    value = value_of(row, column)
    if not SMALLEST <= value <= LARGEST:
        raise BadUsage(f"{row.place}: {column} is {_shown(row.cells[column])}, which no rate and no latency can be")
    return value


def count_of(row: Row, column: str) -> float:
    value = value_of(row, column)
    if not 0 <= value <= LARGEST:
        raise BadUsage(f"{row.place}: {column} is {_shown(row.cells[column])}, which is no number of preemptions")
    return value


def knob_of(row: Row, column: str) -> int:
    value = value_of(row, column)
    if not (1 <= value <= LARGEST_KNOB and value.is_integer()):
        shown = _shown(row.cells[column])
        raise BadUsage(f"{row.place}: {column} is {shown}; a knob has to be a positive whole number", "another --knob")
    return int(value)


def _shown(cell: object) -> str:
    text = repr(cell)
    return text if len(text) <= 40 else f"{text[:37]}..."


# Choosing rows


def matching(rows: Sequence[Row], conditions: Sequence[str], option: str = "--where") -> list[Row]:
    """Rows with all of NAME=VALUE; equal as text, whatever the case, or as numbers. Raises BadUsage where no row is
    left, naming the option."""
    pairs = [condition(text, option) for text in conditions]
    check_columns(rows, [name for name, _ in pairs])
    left = [row for row in rows if holds(row, pairs)]
    if not left:
        tried = " ".join(f"{option} {text}" for text in conditions)
        raise BadUsage(f"no row is left after {tried}" if tried else "there are no rows", _values(rows, pairs))
    return left


def holds(row: Row, pairs: Sequence[tuple[str, str]]) -> bool:
    return all(_same(row.cells.get(name), value) for name, value in pairs)


def condition(text: str, option: str = "--where") -> tuple[str, str]:
    """Name and value. Raises BadUsage."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise BadUsage(f"{option} {text}: there is no condition in it", f"{option} NAME=VALUE")
    return name.strip(), value.strip()


def _same(cell: object, wanted: str) -> bool:
    if cell is None:
        return wanted == ""
    try:
        return float(str(cell)) == float(wanted)
    except ValueError:
        return str(cell).strip().casefold() == wanted.casefold()


def _values(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> str:
    """What stands in the first column that was asked for something it does not hold."""
    for name, wanted in pairs:
        seen = dict.fromkeys(str(row.cells.get(name)) for row in rows)
        if not any(_same(row.cells.get(name), wanted) for row in rows):
            return f"{name} is {', '.join(list(seen)[:12])}"
    return "fewer conditions" if pairs else "a file with results in it"


def mixtures(rows: Sequence[Row]) -> list[str]:
    """One sentence for each column of words in which rows differ that are taken as one curve."""
    return [
        f"rows of different {name} ({some(kinds)}) are taken as one curve; --where {name}=... chooses"
        for name, kinds in words(rows).items()
    ]


def words(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Columns of words in which rows differ, and these words; an empty cell is one where others are words.

    Numbers may be measurements, and where no two rows agree it is a name or a date: neither is among them.
    """
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row.cells):
        kinds = list(dict.fromkeys(text_of(row, name) for row in rows))
        plain = not any(isinstance(row.cells.get(name), (list, dict)) for row in rows)
        shared = len(kinds) > 1 and (len(kinds) < len(rows) or yes_or_no(kinds))
        if plain and shared and not any(_numeric(kind) for kind in kinds):
            found[name] = kinds
    return found


def yes_or_no(kinds: Sequence[str]) -> bool:
    """Is it a switch, and no name?"""
    return {kind.casefold() for kind in kinds} <= {"true", "false"}


def text_of(row: Row, name: str) -> str:
    """What stands in the cell; nothing where there is none."""
    cell = row.cells.get(name)
    return "" if cell is None else str(cell).strip()


def some(kinds: Sequence[str]) -> str:
    return f"{', '.join(kind or 'empty' for kind in kinds[:4])}{', ...' if len(kinds) > 4 else ''}"


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_columns(rows: Sequence[Row], names: Sequence[str | None]) -> None:
    """Raises BadUsage where no row has one of these columns, and says which there are; lists are none."""
    there = dict.fromkeys(n for row in rows for n, cell in row.cells.items() if not isinstance(cell, (list, dict)))
    for name in names:
        if rows and name is not None and name not in there:
            raise BadUsage(f"there is no column {name!r}", f"one of {', '.join(there)}")


# Files


def read(path: Path) -> list[Row]:
    """Rows of a CSV or JSON file, told apart by how it begins. Raises BadUsage."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadUsage(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadUsage(f"{path} is no text in UTF-8", "a CSV or JSON file") from None
    is_json = text.lstrip()[:1] in ("{", "[")
    return list(_json_rows(text, path.name) if is_json else _csv_rows(text, path.name))


def _json_rows(text: str, name: str) -> Iterator[Row]:
    for number, value in enumerate(_objects(text, name), 1):
        if not isinstance(value, dict):
            raise BadUsage(f"{name}: result {number} is no JSON object", "the files that `vllm bench serve` saves")
        yield Row(f"{name}: result {number}", value)


def _objects(text: str, name: str) -> Iterator[object]:
    """Values that stand one after the other, lists of them opened."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            line = text.count("\n", 0, at) + 1
            raise BadUsage(f"{name}: no JSON in what begins at line {line}", "a whole file") from None
        yield from value if isinstance(value, list) else [value]


def _csv_rows(text: str, name: str) -> Iterator[Row]:
    lines = text.splitlines()
    if not lines:
        return
    reader = csv.reader(lines, delimiter=max(DELIMITERS, key=lines[0].count), strict=True)
    try:
        header = [cell.strip() for cell in next(reader)]
        if twice := {cell for cell in header if cell and header.count(cell) > 1}:
            raise BadUsage(f"{name}: several columns are called {min(twice)!r}", "a name of its own for each column")
        for cells in reader:
            if len(cells) not in (0, len(header)):
                seen = f"{name}: line {reader.line_num} has {len(cells)} cells, the header has {len(header)}"
                raise BadUsage(seen, "a whole CSV file with a header")
            if cells:
                yield Row(f"{name}: line {reader.line_num}", dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise BadUsage(f"{name}: no CSV in line {reader.line_num}: {error}", "a CSV or JSON file") from None


NOT_THE_BATCH = 0.10  # share by which requests in flight may miss the knob before a reader is told


def of_settings(
    settings: Sequence[Setting],
    model: str | None,
    longest: int | None,
    b_half: float | None,
    latency: str,
    notes: Sequence[str] = (),
) -> SourcedSweeps:
    """model: tells shape and weights, where it is known; None: only the batch can be advised. latency: its column.
    Raises BadUsage."""
    shares = [rate / all_tokens for s in settings for rate, all_tokens in zip(s.output_per_s, s.throughput)]
    lost = [s.knob for s in settings if s.preempted]
    over = [s.knob for s in settings if (n := s.in_flight) is not None and n > (1 + NOT_THE_BATCH) * s.knob]
    said = [f"left out, for they preempted: {', '.join(map(str, lost))}"] if lost else []
    if over:
        at = ", ".join(map(str, over))
        said.append(f"output rate x latency is more than the knob at {at}: the knob is taken as the batch")
    subject = ModelSweep(
        name="results" if model is None else short_name(model),
        points=tuple(_with_batch(s, not over) for s in settings),
        engine=None if model is None else _engine_of_shape(model, shape_of(model), longest),
        output_share=fmean(shares) if shares else None,
        b_half=b_half,
        notes=(*notes, *said),
    )
    return SourcedSweeps((subject,), ResultSource("results that are not ours", latency))


def _with_batch(setting: Setting, by_law: bool) -> Point:
    """Its batch by Little's law, where the output rate is known."""
    point = setting.point
    if not (by_law and setting.output_per_s and point.valid):
        return point
    pairs = zip(setting.output_per_s, setting.latency_s, strict=True)
    return replace(point, batch_repeats=tuple(rate * wait for rate, wait in pairs))


def _engine_of_shape(model: str, shape: Shape, longest: int | None) -> ServedEngine:
    dtype = str(dict(shape.config).get("torch_dtype") or dict(shape.config).get("dtype") or "float16")
    each = VALUE_BYTES.get(dtype)
    weights = shape.weight_bytes(each) if each else None
    footprint = None
    if weights is not None and each is not None and longest is not None:
        footprint = Footprint(weight_bytes=weights, kv_bytes_per_token=shape.kv_bytes_per_token(each), longest=longest)
    why_not = (
        "the longest request is not known: --max-model-len" if weights is not None else "its weights are not known"
    )
    return ServedEngine(model=hub_name(model), dtype=dtype, footprint=footprint, no_footprint=why_not)
