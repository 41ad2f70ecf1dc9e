"""The order in which items run: an engine starts once, and what is read has been measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_slmserve.plugin.items import (
    check_asserted,
    check_requests_fit,
    engine_of,
    is_gate,
    is_reader,
    is_skipped,
    measures_alone,
    reads_several,
    skip_reason,
)
from pytest_slmserve.run.session import Session


def in_running_order(session: Session, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sorts the items into the order in which they run, and skips those that cannot be carried out in this mode. Raises
    BadUsage for markers that say nothing, verdicts that nothing asserts, and requests too long for their engine.

    Engines come in the order of their first item. Claims and advice come after the points they read. Items that read
    more than one engine's points come last, when what is measured alone has been. So do gates, which end the engine of
    the others, and what is skipped: no engine ends for it. Where cells are measured once more, alone, in the end, every
    reader waits for that: its inputs would change after its verdict.
    """
    for item in items:
        if why := skip_reason(session, item):
            item.add_marker(pytest.mark.skip(reason=why), append=False)
        check_asserted(item)
        check_requests_fit(session, item)
    alone = any(measures_alone(item) and not is_skipped(item) for item in items)
    order: dict[Any, int] = {}

    def rank(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        reads = is_reader(item)
        late = is_skipped(item) or is_gate(item) or (reads and (alone or reads_several(item)))
        which = order.setdefault(engine_of(session, item), len(order))
        return late, late and not measures_alone(item), which, reads

    return sorted(items, key=rank)
