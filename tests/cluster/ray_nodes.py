"""A Ray cluster of one host: nodes are processes, which can be killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pytest_slmserve.errors import SlmError

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
LOOK_S, AT_MOST_S = 0.02, 60.0


@contextmanager
def killed_when(ready: Callable[[], Any], cluster: Any) -> Iterator[list[str]]:
    """Kills the youngest node with a GPU as soon as it is `ready`; its id is in the list then."""
    killed, over = list[str](), threading.Event()

    def watch() -> None:
        until = time.monotonic() + AT_MOST_S
        while not over.wait(LOOK_S) and time.monotonic() < until:
            with suppress(SlmError):  # there is no archive yet
                if ready():
                    node = cluster.workers.pop()
                    killed.append(node.node_id)
                    cluster.remove_node(node, allow_graceful=False)
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        over.set()
        watcher.join()
