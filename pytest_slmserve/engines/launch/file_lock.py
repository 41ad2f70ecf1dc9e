"""Locks on files. The kernel lets go of one when the process that holds it ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ALL_MAY = 0o666  # whoever holds the lock of a device writes there who that is
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would be waited for


def open_lock(path: Path, *, make: bool = True) -> IO[str]:
    """Open the file of a lock that users of a host share, to be read at least: that is enough to lock it. make: where
    there is none.

    The folder is one in which others may put what they like: so no link is followed, only a regular file of a single
    name is taken, and nothing of a file that was there is changed. Raises OSError."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        with suppress(PermissionError):
            try:
                return _checked(os.open(path, flags | SAFELY), path)
            except FileNotFoundError:
                if not make:
                    raise
            with suppress(FileExistsError):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY, ALL_MAY)
                os.fchmod(descriptor, ALL_MAY)  # whatever our umask: it is new, and ours
                return _checked(descriptor, path)
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _checked(descriptor: int, path: Path) -> IO[str]:
    found, writes = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        what = "it has another name too" if stat.S_ISREG(found.st_mode) else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    return os.fdopen(descriptor, "r+" if writes else "r", encoding="utf-8", errors="replace")


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed. Returns False, without waiting, where another holds the
    lock.

    shared: beside other shared locks. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
