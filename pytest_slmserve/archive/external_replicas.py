"""Rows of several engines on one device, in results that are not ours, as sets of engines to compare.

Rows are repeats of one set if they agree in the number of engines, in the limit of each, in every column of words and
in every column that the baseline was asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.compare.external_replicas import EngineSet
from pytest_slmserve.archive.external import (
    LARGEST,
    SECONDS,
    Columns,
    Row,
    check_columns,
    condition,
    count_of,
    holds,
    knob_of,
    matching,
    positive,
    some,
    text_of,
    unit_of,
    value_of,
    words,
    yes_or_no,
)
from pytest_slmserve.schema.errors import BadUsage

MOST_ENGINES = 1000
OPTION = "--baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaColumns:
    """Which column is what. columns: as for one engine, its knob the limit of each engine. replicas: the number of
    engines. power: of the device, W."""

    columns: Columns
    replicas: str
    power: str | None = None

    @property
    def known(self) -> tuple[str, ...]:
        seen = self.columns
        names = (self.replicas, seen.knob, seen.throughput, seen.latency, seen.preemptions, self.power)
        return tuple(name for name in names if name is not None)


Identity = tuple[int, int, tuple[tuple[str, str], ...]]


def engine_sets(rows: Sequence[Row], names: ReplicaColumns, baseline: Sequence[str]) -> tuple[EngineSet, ...]:
    """By replicas, limit and settings; baseline: conditions NAME=VALUE on rows of one engine. Raises BadUsage."""
    check_columns(rows, names.known)
    pairs = [condition(text, OPTION) for text in baseline]
    alone = [row for row in rows if replicas_of(row, names.replicas) == 1]
    if alone:
        matching(alone, baseline, OPTION)
    return tuple(_set(key, group, names, pairs) for key, group in sorted(_groups(rows, names, pairs).items()))


def _groups(
    rows: Sequence[Row], names: ReplicaColumns, pairs: Sequence[tuple[str, str]]
) -> Mapping[Identity, Sequence[Row]]:
    settings = _settings(rows, names, pairs)
    found: dict[Identity, list[Row]] = {}
    for row in rows:
        values = tuple((name, spelled[_plain(text_of(row, name))]) for name, spelled in settings.items())
        found.setdefault((*_place(row, names), values), []).append(row)
    return found


def _place(row: Row, names: ReplicaColumns) -> tuple[int, int]:
    return replicas_of(row, names.replicas), knob_of(row, names.columns.knob)


def _settings(
    rows: Sequence[Row], names: ReplicaColumns, pairs: Sequence[tuple[str, str]]
) -> dict[str, Mapping[str, str]]:
    """Columns that tell sets of one number and limit apart, and how each value is spelled."""
    wanted = {name for name, kinds in words(rows).items() if not _is_name(name, kinds, rows, names)}
    wanted |= {name for name, _ in pairs}
    return {
        name: {_plain(text): text for text in sorted({text_of(row, name) for row in rows}, reverse=True)}
        for name in sorted(wanted.difference(names.known))
    }


def _is_name(name: str, kinds: Sequence[str], rows: Sequence[Row], names: ReplicaColumns) -> bool:
    """Does each number and limit have one word, and each word one of them? Then it says nothing that they do not."""
    both = {(_place(row, names), text_of(row, name)) for row in rows}
    return len(both) == len(kinds) == len({place for place, _ in both}) and not yes_or_no(kinds)


def _plain(text: str) -> str:
    """Equal where `--baseline` takes texts for equal."""
    try:
        return repr(float(text))
    except ValueError:
        return text.casefold()


def _set(key: Identity, rows: Sequence[Row], names: ReplicaColumns, pairs: Sequence[tuple[str, str]]) -> EngineSet:
    replicas, knob, settings = key
    columns, told = names.columns, {name for name, _ in settings}
    scale = SECONDS[unit_of(columns)]
    lost = None if columns.preemptions is None else math.fsum(count_of(row, columns.preemptions) for row in rows)
    return EngineSet(
        replicas=replicas,
        knob=knob,
        settings=settings,
        throughput=tuple(positive(row, columns.throughput) for row in rows),
        latency_s=tuple(scale * positive(row, columns.latency) for row in rows),
        preemptions=lost,
        power_w=() if names.power is None else tuple(_power(row, names.power) for row in rows),
        eligible=all(holds(row, pairs) for row in rows),
        alternative=all(holds(row, [pair for pair in pairs if pair[0] not in told]) for row in rows),
    )


def replicas_of(row: Row, column: str) -> int:
    value = value_of(row, column)
    if not (1 <= value <= MOST_ENGINES and value.is_integer()):
        problem = f"{row.place}: {column} is {text_of(row, column)[:40]}, which is no number of engines"
        raise BadUsage(problem, "another column for --replicas")
    return int(value)


def _power(row: Row, column: str) -> float | None:
    """None where nothing stands: nothing is chosen by power."""
    if text_of(row, column).casefold() in ("", "nan"):
        return None
    value = value_of(row, column)
    if not 0 <= value <= LARGEST:
        raise BadUsage(f"{row.place}: {column} is {text_of(row, column)[:40]}, which is no power")
    return value


# What a reader should know of the rows


def remarks(rows: Sequence[Row], names: ReplicaColumns, baseline: Sequence[str]) -> Iterator[str]:
    """One sentence for each column in which rows differ that are compared, or taken as repeats of each other."""
    pairs = [condition(text, OPTION) for text in baseline]
    asked = {name for name, _ in pairs}
    for name, kinds in words(rows).items():
        if name not in asked and name not in names.known:
            different = f"rows of different {name} ({some(sorted(kinds))})"
            yield f"{different} are compared with each other; --where {name}=... chooses"
    groups = list(_groups(rows, names, pairs).values())
    for name in dict.fromkeys(name for row in rows for name in row.cells):
        if name not in names.known and (kinds := _mixed(name, rows, groups)):
            yield f"rows of different {name} ({some(kinds)}) are taken as repeats; --where {name}=... chooses"
    if names.columns.preemptions is None:
        yield "no --preemptions: what preempted is not told from the rest, and may be chosen"


def _mixed(name: str, rows: Sequence[Row], groups: Sequence[Sequence[Row]]) -> list[str]:
    """Values in which repeats differ, if each stands in several rows, as settings do and measurements do not."""
    cells = [row.cells.get(name) for row in rows]
    if any(isinstance(cell, (list, dict)) for cell in cells):
        return []
    recurring = min(Counter(text_of(row, name) for row in rows).values()) > 1
    differing = {text for group in groups if len(kinds := {text_of(r, name) for r in group}) > 1 for text in kinds}
    return sorted(differing) if recurring else []
