"""Files as we open them: regular ones only, with errors that name them; and the folder of the user for our own."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import IO, Any


def regular(path: str, flags: int) -> int:
    """An opener for `open` that takes files only: a FIFO would be waited for, and a device may have no end. Raises
    OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` itself refuses a folder
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", path)
    return descriptor


def content(path: Path) -> bytes:
    """All bytes of a file. Raises OSError, also where it is larger than the memory."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except (MemoryError, OverflowError):
        raise OSError(errno.ENOMEM, "it is larger than the memory", str(path)) from None


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed. Returns False, without waiting, where another holds the lock.

    shared: together with other shared locks. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file(path: Path) -> bool:
    """Whether it names a file; a name that no file can have does not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def user_cache(name: str = "pytest-slmserve") -> Path:
    """A folder for what can be made again, in the user's cache by the XDG Base Directory Specification: ours, or that
    of this name."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name
