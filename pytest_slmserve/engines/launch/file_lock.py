"""Locks on files. The kernel lets go of one when the process that holds it ends, however it ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def try_lock(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file, or a descriptor, until it is closed. Returns False, without waiting, where another holds the
    lock.

    shared: beside other shared locks. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, which is made where there is none, and hold it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
