"""The order in which items run: an engine starts once, and what is read has been measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_slmserve.plugin.items import (
    LATE,
    engine_of,
    is_late,
    is_reader,
    is_skipped,
    measures_alone,
    reads_several,
    skip_reason,
)
from pytest_slmserve.run.session import Session


def in_running_order(session: Session, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sorts the items into the order in which they run, and skips those that cannot be carried out in this mode. Each
    item then records whether it comes late. Raises BadUsage for markers that say nothing.

    Engines come in the order of their first item. Claims and advice come after
    the points they read. Items that read more than one engine's points come last, when what is measured alone has been.
    So does what is skipped: no engine ends for it.
    """
    for item in items:
        if why := skip_reason(session, item):
            item.add_marker(pytest.mark.skip(reason=why), append=False)
    call_late(session, items)
    order: dict[Any, int] = {}

    def rank(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        late = is_late(item) or is_skipped(item)
        which = order.setdefault(engine_of(session, item), len(order))
        return late, late and not measures_alone(item), which, is_reader(item)

    return sorted(items, key=rank)


def call_late(session: Session, items: Sequence[Any]) -> None:
    """Marks the items that come late: readers of more than one engine's measurements. They run when all of those have
    been measured. Where cells are measured once more, alone, in the end, every reader waits for that: its inputs would
    change after its verdict. Raises BadUsage for an unknown claim."""
    there = [item for item in items if is_reader(item) and not is_skipped(item)]
    alone = any(map(measures_alone, there))
    for item in there:
        item.stash[LATE] = alone or reads_several(item)
