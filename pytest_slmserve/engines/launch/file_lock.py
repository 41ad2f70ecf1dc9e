"""Locks on files. The kernel lets go of one when the process that holds it ends, however it ends."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed. Returns False, without waiting, where another holds the
    lock.

    shared: beside other shared locks. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
