"""A lock on a device, held by one run of this host."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from pytest_slmserve.schema.errors import BadUsage, DeviceBusy
from pytest_slmserve.schema.files import try_lock
from pytest_slmserve.schema.printable import printable

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


LONGEST = 10_000  # characters of a note


class DeviceLock:
    """Held by one process at a time; the kernel lets go of it when that process ends, however it ends."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"pytest-slmserve-{device}.lock"
        self.is_gpu = device.startswith(("GPU-", "MIG-"))
        self.file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises DeviceBusy, naming the holder, when another run has it, and BadUsage where files cannot be locked."""
        try:
            file = open_lock(self.path)
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise self._not_taken(f"{why}", "remove it, or TMPDIR with a folder of your own") from None
        try:
            locked = try_lock(file)
        except OSError as error:
            file.close()
            raise self._not_taken(f"{error.strerror}", "TMPDIR with a folder on a file system that has locks") from None
        if not locked:
            holder = holder_of(file.read(LONGEST))
            file.close()
            raise DeviceBusy(
                f"this device is being measured by another run ({holder}): two at once would measure each other",
                "wait until it ends" + (", or choose another GPU with CUDA_VISIBLE_DEVICES" if self.is_gpu else ""),
            )
        if file.writable():
            file.truncate(0)
            json.dump({"pid": os.getpid(), "since": time.strftime("%H:%M:%S"), "folder": str(Path.cwd())}, file)
            file.flush()
        self.file = file

    def _not_taken(self, why: str, hint: str) -> BadUsage:
        return BadUsage(f"the lock of this device, {self.path}, cannot be taken ({why})", hint)

    def release(self) -> None:
        """The file is never removed, for then a third process could lock a new file of the same name while a second
        still holds the old one."""
        if self.file:
            if self.file.writable():
                self.file.truncate(0)
            self.file.close()
            self.file = None


def holder_of(text: str) -> str:
    """The process that holds a lock, by the note in its file, which anybody may have written."""
    try:
        facts = json.loads(text)
        return printable(f"process {facts['pid']}, since {facts['since']}, in {facts['folder']}", layout="")
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it has not said which"
