"""Schedules items on the workers of pytest-xdist: all of an engine on one worker. Items that read the measurements of
several engines come at the very end, when nobody measures any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xdist.scheduler import LoadScopeScheduling

LAST = "last"  # the scope of items that wait for all others

Scopes = Mapping[str, str]  # of each item that has one, by its id


class EngineScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """xdist's own distribution by scopes, whose scopes are engines, in the order of the items. An item without an
    engine is a scope of its own.

    A worker gets its next engine at its last item, not before: till then another may be free for it. It runs an item
    only when it knows the next one, or that there is none, and while it waits its engine keeps its GPUs, for which
    others may wait. So nobody is left with one item of an engine: when the engines are given away,
    each worker but one is told that it has all; the one that is left gets the first of the items that read, before
    which its engine stops, and the rest of them as soon as the others are through.
    """

    def __init__(self, config: Any, log: Any, scopes: Callable[[], Scopes]) -> None:
        super().__init__(config, log)
        self._ask, self._scopes = scopes, dict[str, str]()
        config.option.loadscopereorder = False

    def schedule(self) -> None:
        if self.collection is None:
            self._scopes = dict(self._ask())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._scopes.get(nodeid, nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        if self._only_last:
            for other in self.nodes:
                self._reschedule(other)

    def remove_node(self, node: Any) -> str | None:
        """Removes a crashed node and returns the item that it was running, None where nothing was left. That item is
        over, with a failure, and the rest of its engine is the next to be given away. xdist would try that item
        again."""
        work = self.assigned_work.pop(node)
        left = {scope: {item: done for item, done in unit.items() if not done} for scope, unit in work.items()}
        left = {scope: unit for scope, unit in left.items() if unit}
        if not left:
            return None
        crashed: str = next(iter(next(iter(left.values()))))
        for scope, unit in reversed(left.items()):
            unit.pop(crashed, None)
            if unit:
                self.workqueue[scope] = unit | self.workqueue.get(scope, {})
                self.workqueue.move_to_end(scope, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Gives a node work, twice: of one item alone a worker does not know that it may run it."""
        for _ in range(2):
            if not node.shutting_down and node in self.registered_collections:  # one that is new has to collect first
                self._give(node)

    def _give(self, node: Any) -> None:
        reads = LAST in self.assigned_work[node]
        if not self._only_last:
            # One that reads would do so before the engine of one that crashed has measured the rest.
            if not reads and (not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1):
                super()._reschedule(node)
        elif reads or all(other.shutting_down for other in self._others(node)):
            self._assign_last(node)
        else:
            node.shutdown()

    def _assign_work_unit(self, node: Any) -> None:
        if LAST in self.workqueue:
            self.workqueue.move_to_end(LAST)
        if not self._only_last:
            super()._assign_work_unit(node)

    def _assign_last(self, node: Any) -> None:
        """Assigns one of the late items, and the rest when no other node has anything to do. Until then the queue has
        what is left, be it nothing, or xdist would take the run for finished."""
        left, given = self.workqueue[LAST], self.assigned_work[node].setdefault(LAST, {})
        through = not any(self._pending_of(self.assigned_work[other]) for other in self._others(node))
        items = [*left][: len(left) if through else 1 - len(given)]
        for item in items:
            given[item] = left.pop(item)
        if items:
            node.send_runtest_some([self.registered_collections[node].index(item) for item in items])
        if through:
            del self.workqueue[LAST]
            node.shutdown()

    def _others(self, node: Any) -> list[Any]:
        return [other for other in self.nodes if other is not node]

    @property
    def _only_last(self) -> bool:
        return list(self.workqueue) == [LAST]
