"""The order in which items run: an engine starts once, and what is read has been measured."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import pytest

from pytest_slmserve.plugin.items import (
    LATE,
    engine_of,
    is_late,
    is_reader,
    is_skipped,
    measures_alone,
    part_of,
    reads_several,
    skip_reason,
)
from pytest_slmserve.run.session import Session


def in_running_order(session: Session, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sorts the items into the order in which they run, and skips those that cannot be carried out in this mode. Each
    item then records whether it comes late, and to which part of its engine's cells it belongs. Raises BadUsage for
    markers that say nothing.

    Engines come in the order of their first item, or as they are to begin on several GPUs. Claims and advice come after
    the points they read. Items that read more than one engine's points come last, when what is measured alone has been.
    So does what is skipped: no engine ends for it.
    """
    for item in items:
        if why := skip_reason(session, item):
            item.add_marker(pytest.mark.skip(reason=why), append=False)
    order: dict[tuple[Any, int], int] = {}
    if session.lease:
        from pytest_slmserve.plugin.xdist import parts_in_order

        order = parts_in_order(session, session.lease, items)
    call_late(session, items, divided={engine for engine, part in order if part})

    def rank(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        late, which = is_late(item) or is_skipped(item), (engine_of(session, item), part_of(item))
        return late, late and not measures_alone(item), order.setdefault(which, len(order)), is_reader(item)

    return sorted(items, key=rank)


def call_late(session: Session, items: Sequence[Any], divided: Container[Any]) -> None:
    """Marks the items that come late: readers of more than one engine's measurements, or of an engine that is
    `divided`. They run when all of those have been measured. Where cells are measured once more, alone, in the end,
    every reader waits for that: its inputs would change after its verdict. Raises BadUsage for an unknown claim."""
    there = [item for item in items if is_reader(item) and not is_skipped(item)]
    alone = any(map(measures_alone, there))
    for item in there:
        item.stash[LATE] = alone or reads_several(item) or engine_of(session, item) in divided
