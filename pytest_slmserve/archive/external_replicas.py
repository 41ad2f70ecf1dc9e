"""Rows of several engines on one device, in external results, as sets of engines to compare.

Rows are repeats of one set if they agree in the number of engines, in the limit of each, in every column of words and
in every column that `--baseline` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_slmserve.analysis.compare.external_replicas import EngineSet
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.archive.external import (
    Columns,
    Row,
    condition,
    holds,
    knob_of,
    matching,
    mixed_repeats,
    number_of,
    point_of,
    replicas_of,
    some,
    text_of,
    words,
    yes_or_no,
)

OPTION = "--baseline"
Settings = tuple[tuple[str, str], ...]  # names and values that tell one set from another
Groups = Mapping[tuple[int, int, Settings], Sequence[Row]]  # rows by number of engines, limit and settings


def engine_sets(rows: Sequence[Row], columns: Columns, baseline: Sequence[str]) -> tuple[EngineSet, ...]:
    """Sets by replicas, limit and settings. baseline: conditions NAME=VALUE on one engine. Raises BadUsage."""
    pairs = [condition(text, OPTION) for text in baseline]
    if alone := [row for row in rows if replicas_of(row, columns.replicas) == 1]:
        matching(alone, baseline, OPTION)
    return tuple(
        EngineSet(
            replicas=replicas,
            limit=limit,
            settings=settings,
            point=point_of(replicas * limit, group, columns),
            eligible=all(holds(row, pairs) for row in group),
            alternative=all(holds(row, [pair for pair in pairs if pair[0] not in dict(settings)]) for row in group),
        )
        for (replicas, limit, settings), group in sorted(_groups(rows, columns, pairs).items())
    )


def _groups(rows: Sequence[Row], columns: Columns, pairs: Sequence[tuple[str, str]]) -> Groups:
    named = {name for name, kinds in words(rows).items() if not _is_name(name, kinds, rows, columns)}
    names = sorted((named | {name for name, _ in pairs}).difference(columns.names))
    spelled = {
        name: {_plain(text): text for text in sorted({text_of(row, name) for row in rows}, reverse=True)}
        for name in names
    }

    def settings(row: Row) -> Settings:
        return tuple((name, spelled[name][_plain(text_of(row, name))]) for name in names)

    return grouped(rows, lambda row: (*_place(row, columns), settings(row)))


def _place(row: Row, columns: Columns) -> tuple[int, int]:
    return replicas_of(row, columns.replicas), knob_of(row, columns.knob)


def _is_name(name: str, kinds: Sequence[str], rows: Sequence[Row], columns: Columns) -> bool:
    """Does each number and limit have one word, and each word one of them? Then it says nothing that they do not."""
    both = {(_place(row, columns), text_of(row, name)) for row in rows}
    return len(both) == len(kinds) == len({place for place, _ in both}) and not yes_or_no(kinds)


def _plain(text: str) -> str:
    """Text that is equal where `--baseline` takes texts for equal."""
    number = number_of(text)
    return text.casefold() if number is None else repr(number)


def remarks(rows: Sequence[Row], columns: Columns, baseline: Sequence[str]) -> Iterator[str]:
    """One sentence for each column in which rows differ that are compared, or taken as repeats of each other."""
    pairs = [condition(text, OPTION) for text in baseline]
    for name, kinds in words(rows).items():
        if name not in dict(pairs) and name not in columns.names:
            different = f"rows of different {name} ({some(sorted(kinds))})"
            yield f"{different} are compared with each other; --where {name}=... chooses"
    yield from mixed_repeats(rows, list(_groups(rows, columns, pairs).values()), columns.names)
    if columns.preemptions is None:
        yield "no --preemptions: what preempted is not told from the rest, and may be chosen"
